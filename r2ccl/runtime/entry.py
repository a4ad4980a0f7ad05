"""Entry: how a collective begins, whatever memory it is on: with which plan.

All ranks enter a collective with the same health of all rails (`r2ccl.failover.health.driver`), so
each finds the same schedule for itself. Must not see memory. Owned by whoever runs collectives.
Invariant: a plan is that of the health which all ranks enter the collective with, so it is used for
the next one or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from r2ccl.failover.health.table import Health
from r2ccl.planning.plan_cache import GroupPlanCache, Plan, PlanCache
from r2ccl.runtime.engine import Engine
from r2ccl.schedule.ir import Schedule
from r2ccl.types import CallSignature

#: Enters a collective, by an allreduce of the caller's own if there is one.
Enter = Callable[[CallSignature, Schedule | None], Plan]


class Entry:
    """Enters collectives of one rank.

    Parameters
    ----------
    engine : Engine
    plans : PlanCache
    whole : Health
        Of a communicator that agrees on none.
    """

    def __init__(self, engine: Engine, plans: PlanCache, whole: Health) -> None:
        self._engine = engine
        self._plans = plans
        self._whole = whole

    def __call__(self, call: CallSignature, own: Schedule | None = None) -> Plan:
        """Enter a collective of all ranks, by an allreduce of the caller's own if there is one.

        Raises
        ------
        R2cclError
            What ended the communicator.
        InvalidArgument, ScheduleError
            As `PlanCache`.
        """
        health = self._engine.enter() or self._whole
        return self._plans(call, health, self._engine.op, own)

    def among(self, members: tuple[int, ...], homes: Sequence[int] = ()) -> Enter:
        """Return what enters allreduces of some ranks, while all others enter theirs.

        Parameters
        ----------
        members : tuple of int
            The group of this rank: one rank of every node, in rising order. AVG divides by the
            number of all ranks.
        homes : sequence of int, optional
            The rails it uses while they are up, of those that channels are at home on; the same at
            all members. Default: all.

        Returns
        -------
        callable
            As this object, but there are no schedules of the caller's own.
        """
        engine = self._engine
        plans = GroupPlanCache(
            engine.rank,
            members,
            engine.nranks,
            self._plans.fabric,
            engine.config,
            homes=homes,
        )

        def enter(call: CallSignature, own: Schedule | None = None) -> Plan:
            return plans(call, self._engine.enter() or self._whole)

        return enter


__all__ = ["Enter", "Entry"]
