"""Driver of the health agreement: connects the protocol to the control plane and a clock.

A rank reports that a rail, its own or a peer's, is down (`report_down`) or up again (`report_up`),
and the measured bandwidth of its own rails (`report_bandwidth`). `enter` returns the health with
which all ranks plan a collective. `r2ccl.failover.health.protocol` decides which messages to send;
the control plane sends them.

Only one thread may use a `HealthAgreement` at a time; any thread may read ``known``. A rail that
this rank reported down stays down until this rank reports it up.
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
    HealthAgreed,
    HealthKnown,
    Late,
    Send,
)
from r2ccl.failover.health.rounds import Message
from r2ccl.failover.health.table import WHOLE, Health, RailShare

_log = logging.getLogger(__name__)


class Known(NamedTuple):
    """Health, and the clock reading at which this rank learned of it."""

    health: Health
    since_s: float


class HealthAgreement:
    """Health agreement of one rank, which sends its messages and reads the clock.

    Parameters
    ----------
    rank : int
    health : Health
        Initial health; the same on all ranks.
    control : Post
        Sends control messages.
    clock : Clock
    """

    def __init__(self, rank: int, health: Health, *, control: Post, clock: Clock) -> None:
        self._rank = rank
        self._control = control
        self._clock = clock
        self._agreement = Agreement(rank, health)
        #: Newest health that this rank has received, committed or not.
        self.known = Known(health, clock())
        self._on_known: Callable[[Health], None] | None = None
        #: Last reports of this rank: (rank, rail) of rails that are down; the measured share of own
        #: rails, and the rank that the slices of each own rail were last sent to.
        self._down: set[tuple[int, int]] = set()
        self._weights: dict[tuple[int, int], int] = {}
        self._toward: dict[int, int] = {}
        #: Health of every next collective while no round is running, else None. While it is set, a
        #: caller may skip `enter`: it plans with this health and sets `last_started` to the number
        #: of the collective, which the agreement reads before its next event. The check then costs
        #: one comparison.
        self.steady = self._agreement.steady
        self.last_started = 0

    def skip_to(self, op: int) -> None:
        """Number the next collective `op` + 1; call it before the first collective and message."""
        self.last_started = op

    def on_known(self, take: Callable[[Health], None]) -> None:
        """Register ``take(health)``, which is called when this rank receives a new health."""
        self._on_known = take

    # Called before a collective

    def enter(self, op: int) -> Health | None:
        """Count collective `op`, which must be the next one, as started.

        Returns
        -------
        Health or None
            Health to plan `op` with. None: `op` may not start yet and is not counted; call again
            after the next message. After `peer_lost`, always None.
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
        """Return the ranks that this rank waits for in the current round; empty if none runs."""
        return self._agreement.waits_for()

    # Reports of this rank

    def report_down(self, rank: int, rail: int) -> None:
        """Report that `rail` of `rank` is down, unless this rank reported that before."""
        if (rank, rail) not in self._down:
            self._down.add((rank, rail))
            self._report([(rank, rail)])

    def report_up(self, rank: int, rail: int) -> None:
        """Withdraw this rank's report that `rail` of `rank` is down, if there is one."""
        if (rank, rail) in self._down:
            self._down.remove((rank, rail))
            self._report([(rank, rail)])

    def report_bandwidth(self, weights: Mapping[int, int], toward: Mapping[int, int]) -> None:
        """Report the measured bandwidth of this rank's rails.

        Only shares that changed are sent, and none of a rail that this rank has reported down.

        Parameters
        ----------
        weights : mapping of int to int
            Share of each rail, 1 to `WHOLE`.
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

    def adopt(self, health: Health) -> None:
        """Take `health` as the report of each rank on its own rails; call it on rank 0 only."""
        self._event(lambda: self._agreement.adopt(self._clock(), health))

    # Events

    def on_message(self, peer: int, message: Message) -> None:
        """Handle an agreement message from `peer`.

        Raises
        ------
        InternalError
            If the message breaks the protocol.
        """
        self._event(lambda: self._agreement.on_message(self._clock(), peer, message))

    def tick(self, now: float) -> None:
        """Begin a postponed round if it is due; warn if the current round takes too long."""
        self._event(lambda: self._agreement.tick(now))

    def peer_lost(self, peer: int) -> None:
        """End the agreement because `peer` is lost: no further round or collective starts."""
        self._catch_up()
        self._agreement.peer_lost(peer)

    def _event(self, take: Callable[[], list[Action]]) -> None:
        self._catch_up()
        actions = take()
        self.steady = self._agreement.steady
        self._do(actions)

    def _catch_up(self) -> None:
        """Tell the protocol which collectives were started while `steady` was set."""
        if self.steady is not None:
            self._agreement.skip_to(self.last_started)
            self.steady = None

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._control.send(action.peer, action.message)
                case HealthKnown():
                    self.known = Known(action.health, self._clock())
                    if self._on_known is not None:
                        self._on_known(action.health)
                case HealthAgreed():
                    _log.info(
                        "rank %d: all ranks plan with health version %d from collective %d on; "
                        "degraded ranks: %s",
                        self._rank, action.version, action.first_op,
                        list(self.known.health.degraded()) or "none",
                    )  # fmt: skip
                case Late():
                    _log.warning(
                        "rank %d: the agreement on health version %d is delayed; still waiting "
                        "for ranks %s: check that they run and can be reached",
                        self._rank, action.version, list(action.ranks),
                    )  # fmt: skip


__all__ = ["HealthAgreement", "Known"]
