"""Health agreement: all ranks switch to a new `Health` at the same collective.

Theory of operation
-------------------
Rank 0 is the coordinator. A rank that detects a change of a rail reports the change to the
coordinator. The coordinator merges the reports and runs one *round* at a time. The messages of a
round travel along the binomial tree of `r2ccl.bootstrap.overlay`, whose root is the coordinator, so
per round no rank sends or receives more than about log2(n) messages of each kind. Every rank
numbers its collectives from 1 in the order of planning, so the numbers match. ``reached`` is the
last collective that a rank has started, ``W`` the window::

    message           from -> to            action of the receiver
    --------------------------------------------------------------------------------------------
    Report(news)      any -> coordinator    stores the shares; begins a round unless a round is
                                            running, a round ended less than `rest_s` ago, or
                                            nothing changes
    Prepare(health)   parent -> children    passes it on, holds the health, promises to start
                                            nothing beyond reached + W until the Commit
    Promise(v, r)     child -> parent       once it has its own promise and those of all children:
                                            sends Promise(v, max(r)) to its parent; the
                                            coordinator sends Commit(v, max(r) + W + 1)
    Commit(v, first)  parent -> children    passes it on, plans with version v from collective
                                            `first` on
    ExcludeRails      any -> coordinator    refuses it, or begins a round as for a Report
    RailsExcluded     coordinator -> asker  tells the caller: refused, or in force from version v on

The coordinator takes part as a rank too: it handles its own messages immediately, without sending
them. A health is *held* after its Prepare: the user may read it. The rank *plans with* the health
only after its Commit.

Why no two ranks ever plan one collective from different versions
-----------------------------------------------------------------
Messages between neighbors in the tree arrive exactly once and in order. (Reports may overtake each
other, so they are numbered.) Let rank r start collective k.

1. *Rank r has received every Commit(v, f) with f <= k.* Suppose one is missing. If r had not yet
   promised v, its later promise has reached >= k, so f >= reached + W + 1 > k. If r had promised
   v, then k <= reached + W, and f = max(reached) + W + 1 > k. Both contradict f <= k.
2. *f never decreases with v.* The coordinator prepares v + 1 after it committed v, so each rank
   promises v + 1 after v, with a ``reached`` that is not lower.

By 1, all ranks choose the health of k among the same commits. By 2, "the newest version whose
first collective is at most k" is the same version on all ranks. By the same argument the health of
some collectives is final before they start. While no promise is open, these are the W collectives
after the last one started; while a promise is open, these are all collectives up to its limit.

Why the agreement makes progress
--------------------------------
The thread that runs a rank's data loop answers a Prepare even during a collective, so a round
waits for no collective. A rank that does not answer is named in the log (`Late`). A dead rank
ends the communicator and with it the agreement (`peer_lost`).

W is at least 1, so a rank that lags behind can begin the collective that the other ranks run. Each
round lets every rank start W more collectives, so collectives continue even if reports arrive
often. With the default W = 1, a collective that takes longer than a round never waits, and a
shorter one waits once, for the rest of the round. A larger W would also avoid this wait, but would
delay the new plan by more collectives, which costs most when collectives are long. To protect short
collectives, `rest_s` passes between a commit and the next round. The pause is a time, because a
pause counted in collectives would never end on a rank that runs none. During the pause, the reports
of a flapping rail are merged.

There is no I/O and no clock here: every time is a clock reading passed in. Invariant: all ranks get
the same `Health` from `start` and `steady` for the same collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from r2ccl.bootstrap.overlay import parent
from r2ccl.errors import CommunicatorRevoked, InternalError, InvalidArgument
from r2ccl.failover.health.rounds import (
    AgreementLimits,
    Commit,
    Coordinator,
    ExcludeRails,
    Member,
    Message,
    Prepare,
    Promise,
    RailsExcluded,
    Report,
    Subtree,
)
from r2ccl.failover.health.table import Health, RailShare

#: Rank that merges the reports of all ranks.
COORDINATOR = 0


class Send(msgspec.Struct, frozen=True):
    """Action: send `message` to rank `peer`."""

    peer: int
    message: Message


class HealthKnown(msgspec.Struct, frozen=True):
    """Action: record `health` as the newest one known; this rank does not plan with it yet."""

    health: Health


class HealthAgreed(msgspec.Struct, frozen=True):
    """Action: record that all ranks plan with `version` from collective `first_op` on.

    Collectives that had to wait for this agreement may start.
    """

    version: int
    first_op: int


class Late(msgspec.Struct, frozen=True):
    """Action: log that the round for `version` has waited too long for `ranks`."""

    version: int
    ranks: tuple[int, ...]


class ExclusionAnswered(msgspec.Struct, frozen=True):
    """Action: tell the caller of `Agreement.exclude` the answer to its request."""

    answer: RailsExcluded


Action: TypeAlias = Send | HealthKnown | HealthAgreed | Late | ExclusionAnswered


class Agreement:
    """State machine of one rank: takes events and returns actions, to be executed in order.

    A *round* is one run of the agreement, which ends with a new health version.

    Parameters
    ----------
    rank : int
    health : Health
        Health to plan with until the first agreement; the same on all ranks. Its table defines the
        number of ranks.
    limits : AgreementLimits, optional

    Raises
    ------
    InvalidArgument
        If `rank` is not in the table.
    """

    def __init__(self, rank: int, health: Health, limits: AgreementLimits | None = None) -> None:
        if not 0 <= rank < health.nranks:
            raise InvalidArgument(
                f"rank {rank} is not in the health table, which has {health.nranks} ranks"
            )
        self.rank = rank
        self.nranks = health.nranks
        self._limits = limits or AgreementLimits()
        self._member = Member(rank, health, self._limits.window)
        is_coordinator = rank == COORDINATOR
        self._coordinator = Coordinator(health, self._limits) if is_coordinator else None
        self._subtree = Subtree(rank, health)
        #: Rank whose loss ended the agreement; None while the agreement runs.
        self.lost: int | None = None
        self._nreports = 0
        self._looked_at = 0.0
        self._waited_s = 0.0

    # Called before a collective

    @property
    def held(self) -> Health:
        """Newest health that this rank has received, committed or not."""
        return self._member.held

    @property
    def started(self) -> int:
        """Number of the last collective started."""
        return self._member.started

    def may_start(self, op: int) -> bool:
        """Return whether collective `op`, the next one, may start now.

        If not, the `Commit` of the current round will allow it. After the loss of a rank, nothing
        may start.
        """
        return self.lost is None and self._member.may_start(op)

    def start(self, op: int) -> Health:
        """Count collective `op` as started and return the health to plan it with.

        A collective that failed before it sent any byte may be started again with the same number.

        Raises
        ------
        CommunicatorRevoked
            If a rank is lost.
        InternalError
            If `op` is neither the last collective started nor the next, or `may_start` forbids it.
        """
        self._check_alive()
        return self._member.start(op)

    @property
    def steady(self) -> Health | None:
        """Health of all collectives until the next event; None: call `start` for each.

        An event is a call of `report`, `adopt`, `exclude`, `on_message`, `tick` or `peer_lost`.
        Collectives planned with this health need no `start`; instead, before the next event, call
        `skip_to` with the number of the last of these collectives.
        """
        return self._member.steady if self.lost is None else None

    def skip_to(self, op: int) -> None:
        """Count all collectives up to `op` as started; call it before the next event.

        Raises
        ------
        InternalError
            If `steady` is None, or a later collective than `op` has been started.
        """
        self._member.skip_to(op)

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that this rank waits for in the current round; empty if none is running.

        These are this rank's children in the tree whose promises are missing; such a child may
        itself wait for its own children. If no promise is missing, this rank waits only for the
        coordinator, whose `Commit` is missing.
        """
        if self._member.limit is None:
            return ()
        return tuple(sorted(self._subtree.missing)) or (COORDINATOR,)

    # Events

    def report(self, now: float, news: Sequence[RailShare]) -> list[Action]:
        """Report shares of rails, of this rank or of a peer, to the coordinator.

        Parameters
        ----------
        now : float
            Clock reading in seconds, as in all events.
        news : sequence of RailShare
            Replaces the last reports of this rank on these rails.

        Raises
        ------
        InvalidArgument
            If a rank or rail does not exist, or a share is not 0 to `WHOLE`.
        """
        self.held.changed(news)  # raises here, not only on the coordinator
        if not news or self.lost is not None:
            return []
        self._nreports += 1
        message = Report(tuple(news), self._nreports)
        if self.rank == COORDINATOR:
            return self._take(now, self.rank, message)
        return [Send(COORDINATOR, message)]

    def adopt(self, now: float, health: Health) -> list[Action]:
        """Take the shares in `health` as each rank's report on its own rails; call it on rank 0.

        A new communicator adopts the health and excluded rails of the communicator from which it
        is made, so that failures need not be detected and reported again.
        """
        if self.lost is not None:
            return []
        assert self._coordinator is not None
        for rank in range(health.nranks):
            shares = enumerate(health.shares_of(rank))
            self._coordinator.report(rank, [RailShare(rank, rail, share) for rail, share in shares])
        self._coordinator.adopt_excluded(health.excluded)
        return self._begin(now)

    def exclude(self, now: float, request: ExcludeRails) -> list[Action]:
        """Ask the coordinator to exclude rails, or to end their exclusion.

        Raises
        ------
        InvalidArgument
            If a rank or rail does not exist.
        """
        self.held.changed((), request.ports)  # raises here, not only on the coordinator
        if self.lost is not None:
            return []
        if self.rank == COORDINATOR:
            return self._take(now, self.rank, request)
        return [Send(COORDINATOR, request)]

    def on_message(self, now: float, peer: int, message: Message) -> list[Action]:
        """Handle a message from `peer`.

        Raises
        ------
        InternalError
            If the message breaks the protocol; the text names the sender and the kind of message.
        """
        if self.lost is not None:
            return []
        name = type(message).__name__
        if not 0 <= peer < self.nranks or peer == self.rank:
            raise InternalError(
                f"rank {self.rank}: received {name} from rank {peer}, but the sender must be "
                f"another rank, from 0 to {self.nranks - 1}"
            )
        if not self._is_addressed(peer, message):
            raise InternalError(
                f"rank {self.rank}: received {name} from rank {peer}, but only rank {COORDINATOR} "
                f"receives Report and ExcludeRails, only rank {COORDINATOR} sends RailsExcluded, "
                "only a child in the tree sends Promise, and only the parent in the tree sends "
                "Prepare and Commit"
            )
        try:
            return self._take(now, peer, message)
        except (InternalError, InvalidArgument) as exc:
            raise InternalError(f"rank {self.rank}: {name} of rank {peer}: {exc.args[0]}") from exc

    def tick(self, now: float) -> list[Action]:
        """Begin a postponed round if it is due; return `Late` for a round that takes too long."""
        if self.lost is not None:
            return []
        return self._begin(now) + self._look(now)

    def peer_lost(self, peer: int) -> None:
        """End the agreement because `peer` is lost; `held` can still be read."""
        if self.lost is None:
            self.lost = peer

    def _is_addressed(self, peer: int, message: Message) -> bool:
        match message:
            case Report() | ExcludeRails():
                return self.rank == COORDINATOR
            case RailsExcluded():
                return peer == COORDINATOR
            case Promise():
                return peer in self._subtree.children
            case Prepare() | Commit():
                return self.rank != COORDINATOR and peer == parent(self.rank)

    def _take(self, now: float, peer: int, message: Message) -> list[Action]:
        match message:
            case Report():
                return self._on_report(now, peer, message)
            case ExcludeRails():
                return self._on_exclude(now, peer, message)
            case RailsExcluded():
                return [ExclusionAnswered(message)]
            case Prepare():
                return self._on_prepare(now, message)
            case Promise():
                return self._on_promise(now, peer, message)
            case Commit():
                if not self._member.commit(message):
                    return []
                agreed = HealthAgreed(message.version, message.first_op)
                return [*self._to_children(message), agreed]

    def _on_report(self, now: float, peer: int, message: Report) -> list[Action]:
        assert self._coordinator is not None
        self._coordinator.report(peer, self._coordinator.unheard(peer, message))
        return self._begin(now)

    def _on_exclude(self, now: float, peer: int, message: ExcludeRails) -> list[Action]:
        assert self._coordinator is not None
        answer = self._coordinator.exclude(message)
        said = ExclusionAnswered(answer) if peer == self.rank else Send(peer, answer)
        return [said, *self._begin(now)]

    def _on_prepare(self, now: float, message: Prepare) -> list[Action]:
        promise = self._member.prepare(message)
        if promise is None:
            return []
        self._looked_at, self._waited_s = now, 0.0
        self._subtree.begin(message.health.version)
        known = HealthKnown(message.health)
        return [*self._to_children(message), known, *self._on_promise(now, self.rank, promise)]

    def _on_promise(self, now: float, peer: int, message: Promise) -> list[Action]:
        promise = self._subtree.promise(peer, message)
        if promise is None:
            return []
        if self._coordinator is None:
            return [Send(parent(self.rank), promise)]
        return self._take(now, self.rank, self._coordinator.end(now, promise))

    def _begin(self, now: float) -> list[Action]:
        prepare = None if self._coordinator is None else self._coordinator.begin(now)
        return [] if prepare is None else self._take(now, self.rank, prepare)

    def _to_children(self, message: Prepare | Commit) -> list[Action]:
        return [Send(child, message) for child in self._subtree.children]

    def _look(self, now: float) -> list[Action]:
        """Measure how long the current round takes; return `Late` if it takes too long.

        A gap between two calls counts as at most a quarter of `late_s`: while this rank did not run
        its loop, it could not receive answers either.
        """
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
                f"rank {self.rank}: rank {self.lost} is lost, so this communicator has ended; "
                "call shrink() to continue with the surviving ranks"
            )


__all__ = [
    "COORDINATOR",
    "Action",
    "Agreement",
    "ExclusionAnswered",
    "HealthAgreed",
    "HealthKnown",
    "Late",
    "Send",
]
