"""Driver of the health agreement: connects the protocol to the control plane and a clock.

A rank reports that a rail, its own or a peer's, is down (`report_down`) or up again (`report_up`),
and the measured bandwidth of its own rails (`report_bandwidth`). It asks to exclude rails, or to
end their exclusion (`exclude`). `enter` returns the health with which all ranks plan a collective.
`r2ccl.failover.health.protocol` decides which messages to send; the control plane sends them.

Only one thread may use a `HealthAgreement` at a time; any thread may read ``known``. A rail that
this rank reported down stays down until this rank withdraws that report. An excluded rail of this
rank counts as reported down, so after the exclusion ends it is down until this rank reports it up.

Invariant: while a rank reports its own port of a rail down, it reports no other port of that rail.
The rank could not observe that such a port works again, so its report would never be withdrawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias

import msgspec

from r2ccl.bootstrap.base import Post
from r2ccl.clock import Clock
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.protocol import (
    Action,
    Agreement,
    ExclusionAnswered,
    HealthAgreed,
    HealthKnown,
    Late,
    Send,
)
from r2ccl.failover.health.rounds import ExcludeRails, Message
from r2ccl.failover.health.table import WHOLE, Health, RailShare

_log = logging.getLogger(__name__)


#: Callback; takes two sets of (rank, rail): the newly excluded rails, and those not excluded now.
OnExcluded: TypeAlias = Callable[[AbstractSet[tuple[int, int]], AbstractSet[tuple[int, int]]], None]
#: Callback; takes the reason why a request is refused, or an empty text once it is in force.
OnAnswer: TypeAlias = Callable[[str], None]


class Known(NamedTuple):
    """Health, and the clock reading at which this rank learned of it."""

    health: Health
    since_s: float


class HealthAgreement:
    """Health agreement of one rank; it sends messages and reads the clock.

    A *round* is one run of the agreement, which ends with a new health version.

    Parameters
    ----------
    rank : int
    health : Health
        Initial health; the same on all ranks.
    control : Post
        Sends control messages.
    clock : Clock
    on_excluded : callable, optional
        ``on_excluded(excluded, included)``: called with two sets of (rank, rail): the rails that a
        new health excludes in addition, and the rails that it no longer excludes. Called before
        this rank agrees to the new health. Default: do nothing.
    """

    def __init__(
        self,
        rank: int,
        health: Health,
        *,
        control: Post,
        clock: Clock,
        on_excluded: OnExcluded = lambda excluded, included: None,
    ) -> None:
        self._rank = rank
        self._control = control
        self._clock = clock
        self._agreement = Agreement(rank, health)
        self._on_excluded = on_excluded
        #: Newest health that this rank has received, committed or not.
        self.known = Known(health, clock())
        self._on_known: Callable[[Health], None] | None = None
        #: Last reports of this rank: (rank, rail) of rails that are down; the measured share of own
        #: rails, and the rank that the slices of each own rail were last sent to.
        self._down = {(rank, rail) for rail in health.excluded_rails(rank)}
        self._weights: dict[tuple[int, int], int] = {}
        self._toward: dict[int, int] = {}
        #: Callbacks of the exclusion requests without an answer, by number; and callbacks of the
        #: granted requests, each with the version, not agreed on yet, that carries it out.
        self._asked: dict[int, OnAnswer] = {}
        self._nasked = 0
        self._granted: list[tuple[int, OnAnswer]] = []
        self._version = health.version
        #: Health of all following collectives until the next round begins; None: `enter` must be
        #: called. While it is set, a caller may skip `enter`: the caller plans with it and sets
        #: `last_started` to the number of the collective. The agreement reads `last_started` before
        #: its next event. A collective then costs one comparison instead of a call of `enter`.
        self.steady = self._agreement.steady
        self.last_started = 0

    def skip_to(self, op: int) -> None:
        """Set the number of the next collective to `op` + 1.

        Call it before the first collective and the first message.
        """
        self.last_started = op

    def on_known(self, take: Callable[[Health], None]) -> None:
        """Register ``take(health)``, which is called when this rank receives a new health."""
        self._on_known = take

    # Called before a collective

    def enter(self, op: int) -> Health | None:
        """Count collective `op` as started, if it may start; return the health to plan it with.

        `op` must be the next collective, or again the last one if it failed before it sent any
        byte.

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
        """Report that `rail` of `rank` is down, unless this rank has reported it already.

        A report on this rank's own `rail` withdraws this rank's reports on `rail` of other ranks.
        While this rank's own `rail` is reported down, `rail` of another rank is not reported.
        """
        own = (self._rank, rail)
        if (rank, rail) in self._down or own in self._down:
            return
        others = [key for key in self._down if key[1] == rail] if rank == self._rank else []
        self._down.difference_update(others)
        self._down.add((rank, rail))
        self._report([(rank, rail), *sorted(others)])

    def report_up(self, rank: int, rail: int) -> None:
        """Withdraw this rank's report that `rail` of `rank` is down, if there is one."""
        if (rank, rail) in self._down:
            self._down.remove((rank, rail))
            self._report([(rank, rail)])

    def withdraw(self, peer: int) -> None:
        """Withdraw this rank's reports that rails of `peer` are down, if there are any."""
        keys = [key for key in self._down if key[0] == peer]
        if keys:
            self._down.difference_update(keys)
            self._report(sorted(keys))

    def report_bandwidth(self, weights: Mapping[int, int], toward: Mapping[int, int]) -> None:
        """Report the measured bandwidth of this rank's rails.

        Only changed shares are sent. No share is sent for a rail that this rank has reported down.

        Parameters
        ----------
        weights : mapping of int to int
            Share of each rail, 1 to `WHOLE`.
        toward : mapping of int to int
            Rank that each rail's slices were last sent to; -1: none was sent.
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
        """Take the shares in `health` as each rank's report on its own rails; call it on rank 0.

        The excluded rails of `health` are adopted too.
        """
        self._event(lambda: self._agreement.adopt(self._clock(), health))

    # Excluded rails

    def exclude(
        self, ports: Iterable[tuple[int, int]], on_answer: OnAnswer, *, is_excluded: bool
    ) -> None:
        """Ask to exclude rails or, unless `is_excluded`, to end their exclusion.

        Parameters
        ----------
        ports : iterable of (int, int)
            Rank and rail of each rail to exclude or include.
        on_answer : callable
            ``on_answer(refusal)``: called with an empty string once all ranks know of the change,
            or with the reason why nothing was changed. Not called if a rank is lost before that.
        is_excluded : bool

        Raises
        ------
        InvalidArgument
            If a rank or rail does not exist.
        """
        self._nasked += 1
        request = ExcludeRails(self._nasked, tuple(ports), is_excluded)
        self._asked[request.number] = on_answer
        try:
            self._event(lambda: self._agreement.exclude(self._clock(), request))
        except InvalidArgument:
            del self._asked[request.number]
            raise

    def _on_answered(self, action: ExclusionAnswered) -> None:
        number, version, refusal = msgspec.structs.astuple(action.answer)
        on_answer = self._asked.pop(number, None)
        if on_answer is None:
            return
        if refusal:
            on_answer(refusal)
        else:
            self._granted.append((version, on_answer))
            self._tell_granted()

    def _tell_granted(self) -> None:
        """Answer the granted requests whose version is agreed on by now."""
        told = [on_answer for version, on_answer in self._granted if version <= self._version]
        self._granted = [each for each in self._granted if each[0] > self._version]
        for on_answer in told:
            on_answer("")

    def _learn(self, health: Health) -> None:
        before, after = set(self.known.health.excluded), set(health.excluded)
        self.known = Known(health, self._clock())
        if before != after:
            self._on_excluded(after - before, before - after)
        if self._on_known is not None:
            self._on_known(health)

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
        """Begin a postponed round if it is due; log a message if the current round takes too long.

        `now` is a clock reading in seconds.
        """
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
                    self._learn(action.health)
                case ExclusionAnswered():
                    self._on_answered(action)
                case HealthAgreed():
                    self._version = action.version
                    self._tell_granted()
                    _log.info(
                        "rank %d: all ranks use version %d of the health of the rails from "
                        "collective %d on; degraded ranks: %s",
                        self._rank, action.version, action.first_op,
                        list(self.known.health.degraded()) or "none",
                    )  # fmt: skip
                case Late():
                    _log.info(
                        "rank %d: the agreement on version %d of the health of the rails is "
                        "delayed; still waiting for ranks %s: check that they run and can be "
                        "reached",
                        self._rank, action.version, list(action.ranks),
                    )  # fmt: skip


__all__ = ["HealthAgreement", "Known"]
