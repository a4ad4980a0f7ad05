"""Bringing up paths whose two ends join by exchanging cards over the control plane.

The lower rank calls: it makes its end and offers its card; the higher rank makes its own, joins it
to the offered one and answers; the caller joins in turn, proves the way there and back, says so,
and both take the path into use::

    caller    Offer(card) ->              join, hello ... Joined    Ready ->   use
    answerer              join, Answer(card) ->                              use

Whatever goes wrong, the caller begins again with fresh ends, after a pause that doubles, for as
long as it takes; an answerer whose own port is not ready yet tries the same offer again until a
newer one comes. ``attempt`` tells the rounds apart and ``epoch`` the lives of a path. Trust comes
from the session that carries the cards.

Must not import sockets or verbs. Invariant: at most one end of a path exists here at a time, and
one that is not handed over is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from r2ccl.clock import Clock
from r2ccl.errors import TransportError
from r2ccl.transport.base import Endpoint, Joined, Transport
from r2ccl.types import PathKey

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
#: How long the caller waits for an answer, and for its proof.
_ANSWER_TIMEOUT_S = 2.0
_PROOF_TIMEOUT_S = 10.0


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Control message: the caller's end of a path."""

    rail: int
    epoch: int
    attempt: int
    card: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Control message: the answerer's end, joined to the offered one."""

    rail: int
    epoch: int
    attempt: int
    card: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Control message: the caller has proved the path and uses it."""

    rail: int
    epoch: int
    attempt: int


class _Attempt:
    """A path on its way up."""

    __slots__ = ("deadline", "endpoint", "epoch", "number", "offer", "pause")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = 0
        self.endpoint: Endpoint | None = None
        #: The answerer's: what it could not answer yet.
        self.offer: Offer | None = None
        #: When the caller begins again, and when the answerer tries again to answer.
        self.deadline = 0.0
        self.pause = _FIRST_PAUSE_S

    def drop(self) -> None:
        """Close this end, if there is one."""
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


class Joiner:
    """The paths of one rank that are on their way up.

    Parameters
    ----------
    rank : int
    transport : Transport
    send : callable
        ``send(peer, message)`` over the control plane, exactly once and in order.
    on_joined : callable
        Takes (peer, rail, epoch, endpoint), and owns the endpoint.
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
        self._attempts: dict[PathKey, _Attempt] = {}
        #: Offers of epochs this rank has not reached yet.
        self._early: dict[PathKey, Offer] = {}

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

    def cancel(self, key: PathKey) -> None:
        """Do not bring `key` up any more."""
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            attempt.drop()

    def close(self) -> None:
        """Cancel everything."""
        for key in list(self._attempts):
            self.cancel(key)

    def kick(self, rail: int) -> None:
        """Have the calls and answers of `rail` begin again at once: its port is back."""
        for key, attempt in self._attempts.items():
            if key.rail == rail:
                attempt.pause = _FIRST_PAUSE_S
                self._begin_again(key, attempt)

    def tick(self, now: float) -> None:
        """Begin calls, and try answers, whose time has come."""
        for key, attempt in list(self._attempts.items()):
            if now >= attempt.deadline:
                self._begin_again(key, attempt)

    def on_message(self, peer: int, message: Offer | Answer | Ready) -> None:
        """Take a message of `peer`; a stale one changes nothing."""
        key = PathKey(peer, message.rail)
        if not 0 <= message.rail < self._transport.nrails:
            _log.warning("rank %d: rank %d spoke of rail %d", self._rank, peer, message.rail)
        elif isinstance(message, Offer):
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
        attempt = self._attempts.get(event.path)
        if attempt is None or attempt.endpoint is None:
            return
        if event.error:
            self._failed(event.path, attempt, event.error)
        elif self._rank < event.path.peer:
            self._send(event.path.peer, Ready(event.path.rail, attempt.epoch, attempt.number))
            self._hand_over(event.path, attempt)

    def _begin_again(self, key: PathKey, attempt: _Attempt) -> None:
        if self._rank < key.peer:
            self._call(key, attempt)
        elif attempt.offer is not None:
            self._answer(key, attempt, attempt.offer)

    def _call(self, key: PathKey, attempt: _Attempt) -> None:
        attempt.drop()
        attempt.number += 1
        try:
            attempt.endpoint = endpoint = self._transport.offer(key)
        except TransportError as exc:
            self._failed(key, attempt, str(exc))
            return
        attempt.deadline = self._clock() + _ANSWER_TIMEOUT_S
        self._send(key.peer, Offer(key.rail, attempt.epoch, attempt.number, endpoint.card))

    def _on_offer(self, key: PathKey, offer: Offer) -> None:
        attempt = self._attempts.get(key)
        if attempt is None or offer.epoch > attempt.epoch:
            self._early[key] = offer
            return
        if offer.epoch == attempt.epoch and key.peer < self._rank:
            attempt.pause = _FIRST_PAUSE_S
            self._answer(key, attempt, offer)

    def _answer(self, key: PathKey, attempt: _Attempt, offer: Offer) -> None:
        attempt.drop()
        attempt.number = offer.attempt
        attempt.offer = None
        try:
            attempt.endpoint = self._transport.offer(key)
            attempt.endpoint.join(offer.card, is_caller=False)
        except TransportError as exc:
            attempt.offer = offer
            self._failed(key, attempt, str(exc))
            return
        self._send(key.peer, Answer(key.rail, attempt.epoch, attempt.number, attempt.endpoint.card))

    def _on_reply(self, key: PathKey, attempt: _Attempt, message: Answer | Ready) -> None:
        if attempt.endpoint is None:
            return
        if isinstance(message, Ready):
            self._hand_over(key, attempt)
            return
        attempt.deadline = self._clock() + _PROOF_TIMEOUT_S
        try:
            attempt.endpoint.join(message.card, is_caller=True)
        except TransportError as exc:
            self._failed(key, attempt, str(exc))

    def _hand_over(self, key: PathKey, attempt: _Attempt) -> None:
        endpoint = attempt.endpoint
        assert endpoint is not None
        del self._attempts[key]
        self._on_joined(key.peer, key.rail, attempt.epoch, endpoint)

    def _failed(self, key: PathKey, attempt: _Attempt, why: str) -> None:
        """Close this end; the caller calls again later, the answerer tries this offer again."""
        _log.info("rank %d: rail %d to rank %d: %s", self._rank, key.rail, key.peer, why)
        attempt.drop()
        attempt.deadline = self._clock() + attempt.pause
        attempt.pause = min(2 * attempt.pause, _MAX_PAUSE_S)


__all__ = ["Answer", "Joiner", "Offer", "Ready"]
