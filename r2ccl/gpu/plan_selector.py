"""Plans of collectives on GPU memory: of all ranks, or of one rank of every node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from r2ccl.planning.plan_cache import GroupPlanCache, Plan, PlanCache
from r2ccl.runtime.engine import Engine
from r2ccl.schedule.ir import Schedule
from r2ccl.types import CallSignature

#: Enters a collective and returns its plan; of the caller's own schedule if one is given.
EnterCall = Callable[[CallSignature, Schedule | None], Plan]


class PlanSelector:
    """Enters the collectives of one rank, each with the plan that all ranks choose.

    Parameters
    ----------
    engine : Engine
    plans : PlanCache
    """

    def __init__(self, engine: Engine, plans: PlanCache) -> None:
        self._engine = engine
        self._plans = plans

    def __call__(self, call: CallSignature, own: Schedule | None = None) -> Plan:
        """Enter a collective of all ranks, by the schedule `own` if there is one.

        Raises
        ------
        R2cclError
            If the communicator has ended.
        InvalidArgument, ScheduleError
            See `PlanCache`.
        """
        return self._plans(call, self._engine.enter(), self._engine.op, own)

    def among(self, members: tuple[int, ...], homes: Sequence[int] = ()) -> EnterCall:
        """Return a function that enters allreduces of some ranks, while all others enter theirs.

        Parameters
        ----------
        members : tuple of int
            The group of this rank: one rank of every node, in rising order. AVG divides by the
            number of all ranks.
        homes : sequence of int, optional
            Home rails the group uses while they are up; the same at all members. Default: all.

        Returns
        -------
        callable
            As this object, but it takes no schedule of the caller's own.
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
            return plans(call, engine.enter())

        return enter


__all__ = ["EnterCall", "PlanSelector"]
