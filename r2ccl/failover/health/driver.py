"""One rank's part in the agreement of all ranks on which rails are down or slow.

What this rank finds of a rail, its own or a peer's, goes in: it is down (`report_down`), it carries
again (`report_up`), this is what it was measured at (`report_bandwidth`). What all ranks plan a
collective with comes out (`enter`). Between, `r2ccl.failover.health.protocol` says what to send,
and the control plane carries it.

Must not import sockets or threads; owned by one caller at a time. Invariant: a rail that was
reported down here is so until it is reported up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from r2ccl.bootstrap.base import Post
from r2ccl.clock import Clock
from r2ccl.failover.health.protocol import (
    Action,
    Agreement,
    Broadcast,
    HealthAgreed,
    HealthKnown,
    Late,
    Send,
)
from r2ccl.failover.health.rounds import Message
from r2ccl.failover.health.table import WHOLE, Health, RailShare

_log = logging.getLogger(__name__)


class Known(NamedTuple):
    """A health and the clock's reading when this rank learned of it."""

    health: Health
    since_s: float


class HealthAgreement:
    """The agreement of one rank, with a control plane and a clock.

    Parameters
    ----------
    rank : int
    health : Health
        What to plan with at first; the same on all ranks.
    control : Post
    clock : Clock
    """

    def __init__(self, rank: int, health: Health, *, control: Post, clock: Clock) -> None:
        self._rank = rank
        self._control = control
        self._clock = clock
        self._agreement = Agreement(rank, health)
        #: Newest version this rank has heard of; it may not plan with it yet.
        self.known = Known(health, clock())
        #: What this rank says of rails that are not whole: those that are down, of any rank, and
        #: the shares of its own that are slow.
        self._down: set[tuple[int, int]] = set()
        self._weights: dict[tuple[int, int], int] = {}
        self._toward: dict[int, int] = {}
        #: Health of all collectives while no change is being agreed on; else None, and `enter`
        #: must be asked. Whoever starts a collective with it sets `last_started`, which the
        #: agreement reads before its next event: so a collective costs one comparison.
        self.steady = self._agreement.steady
        self.last_started = 0

    # What a collective asks

    def enter(self, op: int) -> Health | None:
        """Count collective `op`, the next one, as started.

        Returns
        -------
        Health or None
            What to plan it with; None: wait, and ask again after a message.
        """
        if self.steady is not None:
            self.last_started = op
            return self.steady
        agreement = self._agreement
        if not agreement.may_start(op):
            return None
        health = agreement.start(op)
        self.steady = agreement.steady
        self.last_started = op
        return health

    def waits_for(self) -> tuple[int, ...]:
        """Ranks whose word is missing before more collectives may start."""
        return self._agreement.waits_for()

    # What this rank finds

    def report_down(self, rank: int, rail: int) -> None:
        """Report that `rail` of `rank` carries nothing; once."""
        if (rank, rail) not in self._down:
            self._down.add((rank, rail))
            self._report([(rank, rail)])

    def report_up(self, rank: int, rail: int) -> None:
        """Take back that it is down, if this rank said so."""
        if (rank, rail) in self._down:
            self._down.remove((rank, rail))
            self._report([(rank, rail)])

    def report_bandwidth(self, weights: Mapping[int, int], toward: Mapping[int, int]) -> None:
        """Report what this rank's rails carry, of those that carry anything.

        Parameters
        ----------
        weights : mapping of int to int
            Share of each rail.
        toward : mapping of int to int
            Rank that each rail's slices were last sent to.
        """
        news = {(self._rank, rail): share for rail, share in weights.items()}
        changed = [key for key, share in news.items() if self._weights.get(key, WHOLE) != share]
        self._weights |= news
        self._toward |= toward
        audible = [key for key in changed if key not in self._down]
        if audible:
            self._report(audible)

    def _report(self, rails: Iterable[tuple[int, int]]) -> None:
        words = [self._word(key) for key in rails]
        self._event(lambda: self._agreement.report(self._clock(), words))

    def _word(self, key: tuple[int, int]) -> RailShare:
        if key in self._down:
            return RailShare(*key, 0)
        if key in self._weights:
            return RailShare(*key, self._weights[key], self._toward[key[1]])
        return RailShare(*key, WHOLE)

    # Events

    def on_message(self, peer: int, message: Message) -> None:
        """Take a message of `peer`.

        Raises
        ------
        InternalError
            It breaks the protocol.
        """
        self._event(lambda: self._agreement.on_message(self._clock(), peer, message))

    def tick(self, now: float) -> None:
        """Begin a round that had to wait, and look whether one takes too long."""
        self._event(lambda: self._agreement.tick(now))

    def peer_lost(self, peer: int) -> None:
        """`peer` is gone: nothing more is agreed or started."""
        self._catch_up()
        self._agreement.peer_lost(peer)

    def _event(self, take: Callable[[], list[Action]]) -> None:
        self._catch_up()
        actions = take()
        self.steady = self._agreement.steady
        self._do(actions)

    def _catch_up(self) -> None:
        """Tell the agreement what was started while nothing was under way."""
        if self.steady is not None:
            self._agreement.skip_to(self.last_started)
            self.steady = None

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._control.send(action.peer, action.message)
                case Broadcast():
                    self._control.broadcast(action.message)
                case HealthKnown():
                    self.known = Known(action.health, self._clock())
                case HealthAgreed():
                    _log.info(
                        "rank %d: health version %d holds from collective %d on; degraded ranks: "
                        "%s",
                        self._rank, action.version, action.first_op,
                        list(self.known.health.degraded()) or "none",
                    )  # fmt: skip
                case Late():
                    _log.warning(
                        "rank %d: agreeing on health version %d takes long; missing: ranks %s",
                        self._rank, action.version, list(action.ranks),
                    )  # fmt: skip


__all__ = ["HealthAgreement", "Known"]
