"""Connects RDMA paths and probes, whose ends exchange endpoint info over the control plane.

The lower rank is the caller. It creates its endpoint and sends the endpoint's info as an offer. The
answerer, the higher rank, creates an endpoint too, joins it to the offered one and answers with the
info of its own endpoint. The caller joins in turn, verifies that data passes in both directions,
and reports the success. Then both ends take the path into use::

    caller    Offer(info) ->              join, hello ... Joined    EndpointReady ->    use
    answerer              join, Answer(info) ->                                      use

After any failure the caller begins again with new endpoints, any number of times. It pauses before
each new attempt; the pause doubles up to a maximum. If an attempt to connect a path times out, the
next attempt begins without a pause, because the caller has waited already. An answerer whose port
is not ready tries to answer the same offer again until a newer offer arrives or, for a probe, for
`_ANSWER_TIMEOUT_S`. The messages of an attempt carry its number (``attempt``) and the path's
``epoch``. The control session, which carries the endpoint info, is authenticated, so the endpoints
need no authentication.

The connection of a probe serves only the rank that probes over it. That rank is therefore the
caller, even if it is the higher rank, and need not report that the connection is ready::

    prober    Offer(info) ->              join, hello ... Joined
    probed                join, Answer(info)

The probed end is kept until the next offer of the same probe arrives, because the prober has then
closed its end. Probes have low priority: per tick, at most one offer of a probe is sent, and none
while paths are being repaired. If a probe cannot be connected (for example because the fabric does
not connect its two rails), the pauses between the attempts grow to one minute. A pause ends early
when the prober's port comes up, when a path to the probed rank on one of the two rails comes up,
when the probed rank reports that its port came up, or when a probe between two ports of one rail is
requested but cannot be made (`r2ccl.failover.probes.Probes.on_probed`).

Invariant: this rank has at most one endpoint that is not in use yet per path, and at most one per
probe and role (prober, probed). An endpoint that does not come into use is closed.
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
#: ``via`` of messages about a path.
_NO_PROBE = -1
#: Time that the caller waits for an answer, and after it for the verification to finish.
_ANSWER_TIMEOUT_S = 2.0
_PROOF_TIMEOUT_S = 10.0
#: Reason of a failure by one of these timeouts.
_TIMED_OUT = (
    f"the peer did not answer within {_ANSWER_TIMEOUT_S:g} s, or no test message passed within "
    f"{_PROOF_TIMEOUT_S:g} s"
)


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Control message: endpoint info of the caller, for a path or a probe.

    ``rail`` is the receiver's rail. ``via`` is the sender's rail for a probe, and -1 for a path,
    whose ends are on the same rail. ``epoch`` is the epoch of the path, or the number of the
    probe's connection. ``attempt`` is a number that the sender uses for this attempt only.
    """

    rail: int
    epoch: int
    attempt: int
    info: bytes
    via: int = _NO_PROBE


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Control message: endpoint info of the answerer, whose endpoint is joined to the offered one.

    ``epoch`` and ``attempt`` are those of the offer. ``rail`` is the receiver's rail, ``via`` the
    sender's, as in `Offer`.
    """

    rail: int
    epoch: int
    attempt: int
    info: bytes
    via: int = _NO_PROBE


class EndpointReady(msgspec.Struct, frozen=True, tag="ready"):
    """Control message: the caller has verified and uses the path; the answerer may use it too."""

    rail: int
    epoch: int
    attempt: int


def probe_keys(peers: Sequence[int], rails: Sequence[int]) -> list[ProbeKey]:
    """Return the probes that a rank connects: two to each RDMA port of each peer.

    The first starts from the rank's own port on the same rail, the second from its port on the next
    rail. If there is only one RDMA rail, the second is left out.

    Parameters
    ----------
    peers : sequence of int
    rails : sequence of int
        RDMA rails, in order; the last rail is followed by the first.
    """
    following = dict(zip(rails, [*rails[1:], *rails[:1]], strict=True))
    return [
        ProbeKey(peer, rail, via)
        for peer in peers
        for rail in rails
        for via in dict.fromkeys((rail, following[rail]))
    ]


class _Attempt:
    """State of this rank's attempt to connect a path, its own probe, or a peer's probe."""

    __slots__ = ("deadline", "endpoint", "epoch", "expiry", "number", "offer", "pause")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = 0
        self.endpoint: Endpoint | None = None
        #: Answerer only: offer that is not answered yet, None if there is none; and, for a probe,
        #: clock reading until which the caller waits for the answer.
        self.offer: Offer | None = None
        self.expiry = 0.0
        #: Clock reading at which the caller begins again, after a timeout or a pause, or at which
        #: the answerer tries to answer again.
        self.deadline = 0.0
        self.pause = _FIRST_PAUSE_S

    def hurry(self) -> None:
        """End the pause before the next attempt, if there is one, and reset its length."""
        if self.endpoint is None:
            self.deadline = 0.0
            self.pause = _FIRST_PAUSE_S

    def drop(self) -> None:
        """Close the endpoint, if any."""
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


class Connector:
    """Connection attempts of one rank, for RDMA paths and probes; not thread-safe.

    Parameters
    ----------
    rank : int
    transport : Transport
    send : callable
        ``send(peer, message)`` over the control plane, exactly once and in order.
    on_joined : callable
        ``on_joined(peer, rail, epoch, endpoint)``: takes ownership of the endpoint of a connected
        path. When a probe is connected, the transport owns the prober's endpoint.
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
        #: Endpoints at which peers probe this rank, each made for the peer's last offer.
        self._asked: dict[ProbeKey, _Attempt] = {}
        #: Number of probe connections begun; the number of each serves as its epoch.
        self._nlives = 0
        #: Number of attempts begun as caller. An attempt begun again in the same epoch gets a new
        #: number, so that late replies to the cancelled one do not match.
        self._ncalls = 0
        #: True if no path is being repaired; repairs have priority over probes.
        self._is_calm = True
        #: Last offer that arrived before this rank began to connect the path in the offer's epoch.
        self._early: dict[PathKey, Offer] = {}
        #: Reason of the last failure to connect, per path that is being connected.
        self._failures: dict[PathKey, str] = {}

    def obstacles(self, peer: int) -> list[str]:
        """Describe why paths to `peer` are not connected, one text per failed rail.

        Any thread may call this method. Rails without a failed attempt are left out.
        """
        failures = self._failures.copy()
        return [f"rail {key.rail}: {why}" for key, why in failures.items() if key.peer == peer]

    def begin(self, key: PathKey, epoch: int) -> None:
        """Begin to connect path `key` in `epoch`.

        The lower rank sends an offer. The higher rank answers the offer: now if it has arrived
        already, else when it arrives. An earlier attempt for the path is cancelled.
        """
        self.cancel(key)
        attempt = self._attempts[key] = _Attempt(epoch)
        if self._rank < key.peer:
            self._call(key, attempt)
        else:
            offer = self._early.pop(key, None)
            if offer is not None:
                self._on_offer(key, offer)

    def begin_probe(self, key: ProbeKey) -> None:
        """Schedule a new connection of probe `key`, in place of the previous attempt.

        A later `tick` sends the offer.
        """
        self.cancel(key)
        self._nlives += 1
        self._attempts[key] = _Attempt(self._nlives)

    def cancel(self, key: PathKey | ProbeKey) -> None:
        """Stop connecting `key` and close its endpoint; do nothing if no attempt is under way."""
        if isinstance(key, PathKey):
            self._failures.pop(key, None)
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            attempt.drop()

    def close(self) -> None:
        """Cancel all attempts, and close the endpoints at which peers probe this rank."""
        for key in list(self._attempts):
            self.cancel(key)
        for attempt in self._asked.values():
            attempt.drop()
        self._asked.clear()

    def kick(self, rail: int, peer: int | None = None) -> None:
        """Retry the attempts of `rail` without delay, because a port of the rail is up again.

        For a path, the lower rank sends a new offer now, and the higher rank repeats an answer that
        failed. For a probe, the pause before the next attempt, if there is one, ends.

        Parameters
        ----------
        rail : int
        peer : int, optional
            Rank whose port is up again; default: this rank's own port.
        """
        for key, attempt in self._attempts.items():
            if isinstance(key, PathKey) and key.rail == rail and peer in (None, key.peer):
                attempt.pause = _FIRST_PAUSE_S
                self._begin_again(key, attempt)
        for probe, attempt in self._probes():
            if probe.via == rail if peer is None else (probe.peer, probe.rail) == (peer, rail):
                attempt.hurry()

    def hurry(self, key: ProbeKey) -> None:
        """End the pause before the next attempt to connect probe `key`, if there is one."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.hurry()

    def tick(self, now: float, is_calm: bool = True) -> None:
        """End attempts that timed out, and send the offers and answers that are due.

        Probes are skipped unless `is_calm`.

        Parameters
        ----------
        now : float
            Time in seconds.
        is_calm : bool
            True if no path is being repaired. Offers of probes that arrive before the next call are
            answered at once only if it is True.
        """
        for key, attempt in list(self._attempts.items()):
            if now >= attempt.deadline and isinstance(key, PathKey):
                if attempt.endpoint is not None and self._rank < key.peer:
                    self._failed(key, attempt, _TIMED_OUT)
                self._begin_again(key, attempt)
        self._is_calm = is_calm
        if is_calm:
            self._tick_probes(now)

    def _tick_probes(self, now: float) -> None:
        due = [(key, attempt) for key, attempt in self._probes() if now >= attempt.deadline]
        for key, attempt in due:
            if attempt.endpoint is not None:
                self._failed(key, attempt, _TIMED_OUT)
        # Only one per tick: creating and joining an endpoint takes a millisecond or more.
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
        """Yield the probes that this rank makes, with the attempts to connect them."""
        for key, attempt in self._attempts.items():
            if isinstance(key, ProbeKey):
                yield key, attempt

    def on_message(self, peer: int, message: Offer | Answer | EndpointReady) -> None:
        """Handle a control message from `peer`; ignore a stale message.

        A message about a rail that does not exist is logged and ignored.
        """
        rails = {message.rail}
        key: PathKey | ProbeKey = PathKey(peer, message.rail)
        if not isinstance(message, EndpointReady) and message.via != _NO_PROBE:
            # The sender's local rail is the remote rail here.
            key = ProbeKey(peer, message.via, message.rail)
            rails.add(message.via)
        if not rails <= set(range(self._transport.nrails)):
            _log.warning(
                "rank %d: ignored a message from rank %d about rails %s, because this rank lacks "
                "at least one of these rails; use the same version of r2ccl and the same settings "
                "on all hosts",
                self._rank,
                peer,
                sorted(rails),
            )
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
        """Handle the result of a connection test at the caller, or a failure at the answerer.

        If the test succeeded, take the endpoint into use and, for a path, tell the answerer. After
        a failure, close the endpoint; the caller tries again after a pause. Ignore the event if
        another attempt has replaced the endpoint since.
        """
        key = event.key
        attempt = self._attempts.get(key)
        if attempt is None or attempt.endpoint is not event.endpoint:
            return
        if event.error:
            self._failed(key, attempt, event.error)
        elif isinstance(key, ProbeKey):
            del self._attempts[key]  # the transport uses the endpoint already
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
        self._ncalls += 1
        attempt.number = self._ncalls
        try:
            attempt.endpoint = self._transport.offer(key)
            info = attempt.endpoint.info
        except TransportError as exc:
            self._failed(key, attempt, str(exc))
            return
        attempt.deadline = self._clock() + _ANSWER_TIMEOUT_S
        self._send(key.peer, Offer(key.rail, attempt.epoch, attempt.number, info, _via(key)))

    def _on_asker(self, key: ProbeKey, offer: Offer) -> None:
        """Answer the offer of a peer that probes this rank; during repairs, postpone the answer.

        The endpoint of an earlier offer of the same probe is closed.
        """
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
        """Close this end; schedule a new offer (caller) or a new answer to the offer (answerer)."""
        is_probe = isinstance(key, ProbeKey)
        if not isinstance(key, ProbeKey):
            self._failures[key] = why
        # DEBUG for probes: on a fabric that does not connect rails, some fail throughout the job.
        _log.log(
            logging.DEBUG if is_probe else logging.INFO,
            "rank %d: could not connect rail %d to rank %d%s: %s; trying again",
            self._rank, key.rail, key.peer, f" (for a probe; own rail {_via(key)})" * is_probe, why,
        )  # fmt: skip
        attempt.drop()
        attempt.deadline = self._clock() + attempt.pause
        attempt.pause = min(2 * attempt.pause, _MAX_PROBE_PAUSE_S if is_probe else _MAX_PAUSE_S)


def _via(key: PathKey | ProbeKey) -> int:
    return key.via if isinstance(key, ProbeKey) else _NO_PROBE


__all__ = ["Answer", "Connector", "EndpointReady", "Offer", "probe_keys"]
