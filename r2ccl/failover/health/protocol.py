"""Agreement: from which collective on all ranks plan with a new `Health`.

Theory of operation
-------------------
Rank 0 coordinates. Whoever learns something about a rail reports it there; the coordinator merges
what has come and runs one *round* at a time. Collectives are numbered from 1 as they are planned,
alike on every rank; ``reached`` is the last one a rank has started, ``W`` the window::

    message           from -> to            the receiver
    --------------------------------------------------------------------------------------------
    Report(news)      any -> coordinator    notes them; begins a round unless one is under way,
                                            or ended less than `rest_s` ago, or nothing changes
    Prepare(health)   coordinator -> all    holds it, answers Promise(version, reached), and
                                            starts nothing beyond reached + W until the Commit
    Promise(v, r)     all -> coordinator    with the last one: Commit(v, max(r) + W + 1)
    Commit(v, first)  coordinator -> all    plans with it from collective `first` on

The coordinator is also a rank like any other: it hands itself its own messages, at once. What is
*held* is known (a user may read it); what is *planned with* is agreed.

Why no two ranks ever plan one collective from different versions
-----------------------------------------------------------------
Between two ranks messages arrive once and in order. Let rank r start collective k.

1. *It has every Commit(v, f) with f <= k.* Suppose it has not. Either it had not promised v yet:
   then its later promise says reached >= k, so f >= reached + W + 1 > k. Or it had: then k is at
   most its reached + W, and f = max(reached) + W + 1 > k. Both contradict f <= k.
2. *f never decreases with v.* The coordinator prepares v + 1 after it committed v, so a rank's
   promise of v + 1 is later than that of v, and its reached is not lower.

By 1 all ranks choose for k among the same commits, and by 2 "the newest whose first is at most k"
is the same one for all. By the same argument the answer for k is final before k starts: W ahead
of the last start while nothing is promised, and up to the limit while something is (`health_of`).

Why it goes on
--------------
A promise is given by whoever owns the rank's loop, also in the midst of a collective, so a round
waits for no collective; a rank that does not answer is reported (`Late`), a dead one ends the
communicator, and the agreement with it (`peer_lost`).

W is at least 1. A rank that has not begun the collective the others are in can then join it, and
each round lets every rank start W more, so that no rate of reports stops the collectives. With
W = 1, the default, a collective that takes longer than a round does not wait at all, and a shorter
one waits once, for the rest of the round. A larger W would spare short ones that too, and put the
new plan off by as many collectives for long ones, which need it more. Short ones are protected by
time instead: `rest_s` between a commit and the next round. Counting collectives there would keep
a rank that runs none from hearing news, and a flapping rail's reports merge meanwhile.

Pure: no I/O, no clock; times are readings passed in. Invariant: a `Health` returned by `start` or
`health_of` for some collective is what every other rank gets for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from r2ccl.errors import CommunicatorRevoked, InternalError, InvalidArgument
from r2ccl.failover.health.rounds import (
    TO_COORDINATOR,
    AgreementLimits,
    Commit,
    Coordinator,
    Member,
    Message,
    Prepare,
    Promise,
    Report,
)
from r2ccl.failover.health.table import Health, RailShare

#: The rank that merges what all report.
COORDINATOR = 0


class Send(msgspec.Struct, frozen=True):
    """Action: send `message` to rank `peer`."""

    peer: int
    message: Message


class Broadcast(msgspec.Struct, frozen=True):
    """Action: send `message` to every other rank."""

    message: Message


class HealthKnown(msgspec.Struct, frozen=True):
    """Action: this rank knows `health` from now on; it does not plan with it yet."""

    health: Health


class HealthAgreed(msgspec.Struct, frozen=True):
    """Action: this rank plans with `version` from `first_op` on; what waited may start."""

    version: int
    first_op: int


class Late(msgspec.Struct, frozen=True):
    """Action: tell the user that the round for `version` has waited for `ranks` too long."""

    version: int
    ranks: tuple[int, ...]


Action: TypeAlias = Send | Broadcast | HealthKnown | HealthAgreed | Late


class Agreement:
    """One rank's end of the protocol: events in, actions out, to be taken in the order given.

    Parameters
    ----------
    rank : int
    health : Health
        What to plan with until the first agreement; the same on all ranks, whose number it gives.
        Of a communicator made from another: the rows of its ranks (`Health.of_ranks`) in the
        version the call that made it was planned with.
    limits : AgreementLimits, optional
    """

    def __init__(self, rank: int, health: Health, limits: AgreementLimits | None = None) -> None:
        if not 0 <= rank < health.nranks:
            raise InvalidArgument(f"rank {rank}; the health given is of {health.nranks} ranks")
        self.rank = rank
        self.nranks = health.nranks
        self._limits = limits or AgreementLimits()
        self._member = Member(rank, health, self._limits.window)
        is_coordinator = rank == COORDINATOR
        self._coordinator = Coordinator(health, self._limits) if is_coordinator else None
        #: Whose loss ended the agreement; None while it goes on.
        self.lost: int | None = None
        self._looked_at = 0.0
        self._waited_s = 0.0

    # What a collective asks

    @property
    def held(self) -> Health:
        """The newest version this rank knows; it may not plan with it yet."""
        return self._member.held

    @property
    def started(self) -> int:
        """Number of the last collective started."""
        return self._member.started

    def may_start(self, op: int) -> bool:
        """Whether collective `op`, the next one, may start now; if not, wait for a message."""
        return self.lost is None and self._member.may_start(op)

    def start(self, op: int) -> Health:
        """Count collective `op` as started and return what to plan it with.

        A call that failed before any byte moved may start its number again.

        Raises
        ------
        CommunicatorRevoked
            A rank is lost.
        InternalError
            `op` is not the next one, or `may_start` forbids it.
        """
        self._check_alive()
        return self._member.start(op)

    @property
    def steady(self) -> Health | None:
        """What to plan with while nothing is under way; then `start` may be left to `skip_to`.

        It holds until the next event (`report`, `on_message`, `tick`, `peer_lost`). None: ask
        `start` for each collective.
        """
        return self._member.steady if self.lost is None else None

    def skip_to(self, op: int) -> None:
        """Count all collectives up to `op` as started; before the next event.

        Raises
        ------
        InternalError
            Nothing was `steady`, or `op` is behind.
        """
        self._member.skip_to(op)

    def health_of(self, op: int) -> Health:
        """Return the health with which every rank plans collective `op`.

        Raises
        ------
        InternalError
            `op` is before the last collective started, or so far ahead that its version may still
            change.
        """
        return self._member.health_of(op)

    def waits_for(self) -> tuple[int, ...]:
        """Ranks this one waits for before more may start: it names them when a call gives up."""
        if self._coordinator is not None:
            return tuple(sorted(self._coordinator.missing))
        return () if self._member.limit is None else (COORDINATOR,)

    # Events

    def report(self, now: float, news: Sequence[RailShare]) -> list[Action]:
        """Tell what this rank now finds of some rails: its own, or a peer's by a verdict.

        Raises
        ------
        InvalidArgument
            There is no such rank, rail or share.
        """
        self.held.changed(news)  # refuses here, not at the coordinator, what does not exist
        message = Report(tuple(news))
        return self._to_coordinator(now, message) if news and self.lost is None else []

    def on_message(self, now: float, peer: int, message: Message) -> list[Action]:
        """Take a message of `peer`.

        Raises
        ------
        InternalError
            It breaks the protocol; names who sent what.
        """
        if self.lost is not None:
            return []
        name = type(message).__name__
        if not 0 <= peer < self.nranks or peer == self.rank:
            raise InternalError(
                f"rank {self.rank}: {name} from rank {peer}; the others are of 0 to "
                f"{self.nranks - 1}"
            )
        if (self.rank if isinstance(message, TO_COORDINATOR) else peer) != COORDINATOR:
            raise InternalError(
                f"rank {self.rank}: {name} from rank {peer}, which is between rank {COORDINATOR} "
                "and the others"
            )
        try:
            return self._take(now, peer, message)
        except (InternalError, InvalidArgument) as exc:
            raise InternalError(f"rank {self.rank}: {name} of rank {peer}: {exc}") from exc

    def tick(self, now: float) -> list[Action]:
        """Begin a round that had to wait, and look whether one takes too long."""
        if self.lost is not None:
            return []
        return self._begin(now) + self._look(now)

    def peer_lost(self, peer: int) -> None:
        """`peer` is gone: nothing is agreed or started any more, what is held can be read."""
        if self.lost is None:
            self.lost = peer

    # Inside

    def _take(self, now: float, peer: int, message: Message) -> list[Action]:
        match message:
            case Report():
                return self._on_report(now, peer, message)
            case Prepare():
                return self._on_prepare(now, message)
            case Promise():
                return self._on_promise(now, peer, message)
            case Commit():
                done = self._member.commit(message)
                return [HealthAgreed(message.version, message.first_op)] if done else []

    def _on_report(self, now: float, peer: int, message: Report) -> list[Action]:
        assert self._coordinator is not None
        self._coordinator.report(peer, message.news)
        return self._begin(now)

    def _on_prepare(self, now: float, message: Prepare) -> list[Action]:
        promise = self._member.prepare(message)
        if promise is None:
            return []
        self._looked_at, self._waited_s = now, 0.0
        return [HealthKnown(message.health), *self._to_coordinator(now, promise)]

    def _on_promise(self, now: float, peer: int, message: Promise) -> list[Action]:
        assert self._coordinator is not None
        commit = self._coordinator.promise(now, peer, message)
        return [] if commit is None else self._to_all(now, commit)

    def _begin(self, now: float) -> list[Action]:
        prepare = None if self._coordinator is None else self._coordinator.begin(now)
        return [] if prepare is None else self._to_all(now, prepare)

    def _to_coordinator(self, now: float, message: Report | Promise) -> list[Action]:
        if self.rank == COORDINATOR:
            return self._take(now, self.rank, message)
        return [Send(COORDINATOR, message)]

    def _to_all(self, now: float, message: Prepare | Commit) -> list[Action]:
        others: list[Action] = [Broadcast(message)] if self.nranks > 1 else []
        return others + self._take(now, self.rank, message)

    def _look(self, now: float) -> list[Action]:
        """Count the time a round takes; a gap in which this rank was away counts as a short one."""
        gap = min(now - self._looked_at, self._limits.late_s / 4)
        self._looked_at = now
        ranks = self.waits_for()
        if not ranks:
            return []
        self._waited_s += gap
        if self._waited_s < self._limits.late_s:
            return []
        self._waited_s = 0.0
        return [Late(self.held.version, ranks)]

    def _check_alive(self) -> None:
        if self.lost is not None:
            raise CommunicatorRevoked(
                f"rank {self.rank}: rank {self.lost} is lost, so no health is agreed on any more; "
                "go on with a communicator of the others"
            )


__all__ = [
    "COORDINATOR",
    "Action",
    "Agreement",
    "Broadcast",
    "HealthAgreed",
    "HealthKnown",
    "Late",
    "Send",
]
