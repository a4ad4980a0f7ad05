"""Connects paths and probes whose two ends exchange endpoint info over the control plane.

The lower rank calls: it makes its end and offers its info; the higher rank makes its own, joins it
to the offered one and answers; the caller joins in turn, proves the way there and back, says so,
and both take the path into use::

    caller    Offer(info) ->              join, hello ... Joined    EndpointReady ->    use
    answerer              join, Answer(info) ->                                      use

Whatever goes wrong, the caller begins again with fresh ends, after a pause that doubles, for as
long as it takes; an answerer whose own port is not ready yet tries the same offer again until a
newer one comes. ``attempt`` tells the rounds apart and ``epoch`` the lives of a path. Trust comes
from the session that carries the endpoint info.

The connection of a probe serves the one rank that asks over it, so the asker calls, whichever rank
it is, and nobody has to be told that it is ready::

    asker     Offer(info) ->              join, hello ... Joined
    asked                 join, Answer(info)

The asked end stays as it is until the next offer, which is how it learns that the asker's end is
gone. Probes wait: one is called per tick, and one that cannot be joined, on a fabric without a way
between rails, is tried ever more rarely, until a path of one of its ports comes up.

Must not import sockets or verbs. Invariant: at most one end of a path, and one of each role of a
probe, exists here at a time, and one that is not handed over is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from r2ccl.clock import Clock
from r2ccl.errors import TransportError
from r2ccl.transport.base import Endpoint, Joined, Transport
from r2ccl.types import PathKey, ProbeKey

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_MAX_PROBE_PAUSE_S = 60.0
#: ``via`` of what is about a path.
_NO_PROBE = -1
#: How long the caller waits for an answer, and for its proof.
_ANSWER_TIMEOUT_S = 2.0
_PROOF_TIMEOUT_S = 10.0


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Control message: the caller's end of a path, or of a probe's connection.

    ``rail`` is the receiver's port and ``via`` the sender's, -1 for a path.
    """

    rail: int
    epoch: int
    attempt: int
    info: bytes
    via: int = _NO_PROBE


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Control message: the answerer's end, joined to the offered one; rails as in `Offer`."""

    rail: int
    epoch: int
    attempt: int
    info: bytes
    via: int = _NO_PROBE


class EndpointReady(msgspec.Struct, frozen=True, tag="ready"):
    """Control message: the caller has proved the path and uses it."""

    rail: int
    epoch: int
    attempt: int


def probe_keys(peers: Sequence[int], rails: Sequence[int]) -> list[ProbeKey]:
    """Return the probes that have connections: from each port's own rail, and from the next one.

    Parameters
    ----------
    peers : sequence of int
    rails : sequence of int
        Those that join.
    """
    following = dict(zip(rails, [*rails[1:], *rails[:1]], strict=True))
    return [
        ProbeKey(peer, rail, via)
        for peer in peers
        for rail in rails
        for via in dict.fromkeys((rail, following[rail]))
    ]


class _Attempt:
    """A path, or one end of a probe's connection, on its way up."""

    __slots__ = ("deadline", "endpoint", "epoch", "expiry", "number", "offer", "pause")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = 0
        self.endpoint: Endpoint | None = None
        #: The answerer's: what it could not answer yet, and until when the caller waits for it.
        self.offer: Offer | None = None
        self.expiry = 0.0
        #: When the caller begins again, and when the answerer tries again to answer.
        self.deadline = 0.0
        self.pause = _FIRST_PAUSE_S

    def hurry(self) -> None:
        """Have a call that waits for its turn begin at the next tick."""
        if self.endpoint is None:
            self.deadline = 0.0
            self.pause = _FIRST_PAUSE_S

    def drop(self) -> None:
        """Close this end, if there is one."""
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


class Connector:
    """The paths and probes of one rank that are on their way up.

    Parameters
    ----------
    rank : int
    transport : Transport
    send : callable
        ``send(peer, message)`` over the control plane, exactly once and in order.
    on_joined : callable
        Takes (peer, rail, epoch, endpoint) of a path, and owns the endpoint. A probe's is the
        transport's.
    clock : Clock
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        send: Callable[[int, object], None],
        on_joined: Callable[[int, int, int, Endpoint], None],
        clock: Clock,
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._send = send
        self._on_joined = on_joined
        self._clock = clock
        self._attempts: dict[PathKey | ProbeKey, _Attempt] = {}
        #: Ends at which peers ask, as they last offered.
        self._asked: dict[ProbeKey, _Attempt] = {}
        #: Lives of probes, which tell their connections apart as epochs do those of a path.
        self._nlives = 0
        #: No path is under repair, which comes before probes.
        self._is_calm = True
        #: Offers of epochs this rank has not reached yet.
        self._early: dict[PathKey, Offer] = {}
        #: Why the last attempt at a path failed, of paths that are not up.
        self._failures: dict[PathKey, str] = {}

    def obstacles(self, peer: int) -> list[str]:
        """Say why paths to `peer` are not joined; any thread."""
        failures = self._failures.copy()
        return [f"rail {key.rail}: {why}" for key, why in failures.items() if key.peer == peer]

    def begin(self, key: PathKey, epoch: int) -> None:
        """Bring `key` up in `epoch`."""
        self.cancel(key)
        attempt = self._attempts[key] = _Attempt(epoch)
        if self._rank < key.peer:
            self._call(key, attempt)
        else:
            offer = self._early.pop(key, None)
            if offer is not None:
                self._on_offer(key, offer)

    def begin_probe(self, key: ProbeKey) -> None:
        """Bring the connection of a probe up, when there is time, in place of the one it had."""
        self.cancel(key)
        self._nlives += 1
        self._attempts[key] = _Attempt(self._nlives)

    def cancel(self, key: PathKey | ProbeKey) -> None:
        """Do not bring `key` up any more."""
        if isinstance(key, PathKey):
            self._failures.pop(key, None)
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            attempt.drop()

    def close(self) -> None:
        """Cancel everything."""
        for key in list(self._attempts):
            self.cancel(key)
        for attempt in self._asked.values():
            attempt.drop()
        self._asked.clear()

    def kick(self, rail: int, peer: int | None = None) -> None:
        """Have the calls and answers of `rail` begin again at once: its port is back.

        Its local port, or that of `peer`.
        """
        for key, attempt in self._attempts.items():
            if isinstance(key, PathKey) and key.rail == rail and peer in (None, key.peer):
                attempt.pause = _FIRST_PAUSE_S
                self._begin_again(key, attempt)
        for probe, attempt in self._probes():
            if probe.via == rail if peer is None else (probe.peer, probe.rail) == (peer, rail):
                attempt.hurry()

    def hurry(self, key: ProbeKey) -> None:
        """Have the call of `key`, if it waits for its turn, begin at the next tick."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.hurry()

    def tick(self, now: float, is_calm: bool = True) -> None:
        """Begin calls, and try answers, whose time has come; those of probes when it is calm."""
        for key, attempt in list(self._attempts.items()):
            if now >= attempt.deadline and isinstance(key, PathKey):
                self._begin_again(key, attempt)
        self._is_calm = is_calm
        if is_calm:
            self._tick_probes(now)

    def _tick_probes(self, now: float) -> None:
        due = [(key, attempt) for key, attempt in self._probes() if now >= attempt.deadline]
        for key, attempt in due:
            if attempt.endpoint is not None:
                self._failed(key, attempt, "no answer to the offer, or no proof, in time")
        # One at a time: making and joining an end takes a millisecond or more.
        for key, attempt in due:
            if attempt.endpoint is None and now >= attempt.deadline:
                self._call(key, attempt)
                break
        for key, attempt in self._asked.items():
            if attempt.offer is not None and now >= attempt.deadline:
                if now < attempt.expiry:
                    self._answer(key, attempt, attempt.offer)
                else:
                    attempt.offer = None

    def _probes(self) -> Iterator[tuple[ProbeKey, _Attempt]]:
        """Those this rank calls."""
        for key, attempt in self._attempts.items():
            if isinstance(key, ProbeKey):
                yield key, attempt

    def on_message(self, peer: int, message: Offer | Answer | EndpointReady) -> None:
        """Take a message of `peer`; a stale one changes nothing."""
        rails = {message.rail}
        key: PathKey | ProbeKey = PathKey(peer, message.rail)
        if not isinstance(message, EndpointReady) and message.via != _NO_PROBE:
            # What is the sender's own port is the far one here.
            key = ProbeKey(peer, message.via, message.rail)
            rails.add(message.via)
        if not rails <= set(range(self._transport.nrails)):
            _log.warning("rank %d: rank %d spoke of rails %s", self._rank, peer, sorted(rails))
        elif isinstance(message, Offer):
            if isinstance(key, ProbeKey):
                self._on_asker(key, message)
            else:
                self._on_offer(key, message)
        else:
            attempt = self._attempts.get(key)
            if attempt is not None and (attempt.epoch, attempt.number) == (
                message.epoch,
                message.attempt,
            ):
                self._on_reply(key, attempt, message)

    def on_joined(self, event: Joined) -> None:
        """The caller's end has proved itself, or failed to."""
        key = event.key
        attempt = self._attempts.get(key)
        if attempt is None or attempt.endpoint is None:
            return
        if event.error:
            self._failed(key, attempt, event.error)
        elif isinstance(key, ProbeKey):
            del self._attempts[key]  # the transport has it in use
        elif self._rank < key.peer:
            self._send(key.peer, EndpointReady(key.rail, attempt.epoch, attempt.number))
            self._hand_over(key, attempt)

    def _begin_again(self, key: PathKey, attempt: _Attempt) -> None:
        if self._rank < key.peer:
            self._call(key, attempt)
        elif attempt.offer is not None:
            self._answer(key, attempt, attempt.offer)

    def _call(self, key: PathKey | ProbeKey, attempt: _Attempt) -> None:
        attempt.drop()
        attempt.number += 1
        try:
            attempt.endpoint = self._transport.offer(key)
            info = attempt.endpoint.info
        except TransportError as exc:
            self._failed(key, attempt, str(exc))
            return
        attempt.deadline = self._clock() + _ANSWER_TIMEOUT_S
        self._send(key.peer, Offer(key.rail, attempt.epoch, attempt.number, info, _via(key)))

    def _on_asker(self, key: ProbeKey, offer: Offer) -> None:
        """Make the end that `key.peer` asks at; its offers come in order, the newest counts."""
        previous = self._asked.get(key)
        if previous is not None:
            previous.drop()
        attempt = self._asked[key] = _Attempt(offer.epoch)
        attempt.expiry = self._clock() + _ANSWER_TIMEOUT_S
        attempt.offer = offer
        if self._is_calm:
            self._answer(key, attempt, offer)

    def _on_offer(self, key: PathKey, offer: Offer) -> None:
        attempt = self._attempts.get(key)
        if attempt is None or offer.epoch > attempt.epoch:
            self._early[key] = offer
            return
        if offer.epoch == attempt.epoch and key.peer < self._rank:
            attempt.pause = _FIRST_PAUSE_S
            self._answer(key, attempt, offer)

    def _answer(self, key: PathKey | ProbeKey, attempt: _Attempt, offer: Offer) -> None:
        attempt.drop()
        attempt.number = offer.attempt
        attempt.offer = None
        try:
            attempt.endpoint = self._transport.offer(key)
            attempt.endpoint.join(offer.info, is_caller=False)
            info = attempt.endpoint.info
        except TransportError as exc:
            attempt.offer = offer
            self._failed(key, attempt, str(exc))
            return
        self._send(key.peer, Answer(key.rail, attempt.epoch, attempt.number, info, _via(key)))

    def _on_reply(
        self, key: PathKey | ProbeKey, attempt: _Attempt, message: Answer | EndpointReady
    ) -> None:
        if attempt.endpoint is None:
            return
        if isinstance(message, EndpointReady):
            assert isinstance(key, PathKey)
            self._hand_over(key, attempt)
            return
        attempt.deadline = self._clock() + _PROOF_TIMEOUT_S
        try:
            attempt.endpoint.join(message.info, is_caller=True)
        except TransportError as exc:
            self._failed(key, attempt, str(exc))

    def _hand_over(self, key: PathKey, attempt: _Attempt) -> None:
        endpoint = attempt.endpoint
        assert endpoint is not None
        del self._attempts[key]
        self._failures.pop(key, None)
        for probe, waiting in self._probes():
            if probe.peer == key.peer and key.rail in (probe.rail, probe.via):
                waiting.hurry()
        self._on_joined(key.peer, key.rail, attempt.epoch, endpoint)

    def _failed(self, key: PathKey | ProbeKey, attempt: _Attempt, why: str) -> None:
        """Close this end; the caller calls again later, the answerer tries this offer again."""
        is_probe = isinstance(key, ProbeKey)
        if not isinstance(key, ProbeKey):
            self._failures[key] = why
        # Where there is no way between rails, this is said for as long as the job runs.
        _log.log(
            logging.DEBUG if is_probe else logging.INFO,
            "rank %d: rail %d to rank %d%s: %s",
            self._rank, key.rail, key.peer, f", probed from rail {_via(key)}" * is_probe, why,
        )  # fmt: skip
        attempt.drop()
        attempt.deadline = self._clock() + attempt.pause
        attempt.pause = min(2 * attempt.pause, _MAX_PROBE_PAUSE_S if is_probe else _MAX_PAUSE_S)


def _via(key: PathKey | ProbeKey) -> int:
    return key.via if isinstance(key, ProbeKey) else _NO_PROBE


__all__ = ["Answer", "Connector", "EndpointReady", "Offer", "probe_keys"]
