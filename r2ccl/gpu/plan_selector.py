"""Selection of plans for collectives on GPU memory, among all ranks or one rank per node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from r2ccl.planning.plan_cache import GroupPlanCache, Plan, PlanCache
from r2ccl.runtime.engine import Engine
from r2ccl.schedule.ir import Schedule
from r2ccl.types import CallSignature

#: Function that enters a collective and returns its plan. To enter a collective means to wait while
#: the ranks agree on a new health, and to take the health for the plan (`Engine.enter`). The second
#: argument is a user-defined schedule for the plan, or None.
EnterCall = Callable[[CallSignature, Schedule | None], Plan]


class PlanSelector:
    """Function object that enters a collective and returns the plan that all ranks select for it.

    The calling thread then runs the plan. All ranks must enter their collectives in the same order.

    Parameters
    ----------
    engine : Engine
    plans : PlanCache
    """

    def __init__(self, engine: Engine, plans: PlanCache) -> None:
        self._engine = engine
        self._plans = plans

    def __call__(self, call: CallSignature, own: Schedule | None = None) -> Plan:
        """Enter a collective of all ranks and return its plan.

        Parameters
        ----------
        call : CallSignature
        own : Schedule, optional
            User-defined schedule for the collective.

        Raises
        ------
        TransportTimeout
            If the ranks did not agree in time on the health to plan with.
        R2cclError
            If this method had to wait for the ranks, and the communicator has ended.
        ConcurrentCalls
            As `Engine.enter`.
        InvalidArgument, ScheduleError, ImportError, TransportError
            If `PlanCache` cannot make a plan of `call` or `own`.
        """
        return self._plans(call, self._engine.enter(), self._engine.op, own)

    def among(self, members: tuple[int, ...], homes: Sequence[int] = ()) -> EnterCall:
        """Return a function that enters an allreduce among `members`.

        Ranks outside of `members` must enter an allreduce of their own group whenever the members
        do.

        Parameters
        ----------
        members : tuple of int
            Group of this rank: one rank per node, in ascending order. AVG divides by the number of
            all ranks, not of the members.
        homes : sequence of int, optional
            Home rails that the group uses while they are up; equal on all members. Default: all
            home rails.

        Returns
        -------
        callable
            An `EnterCall`, which ignores a user-defined schedule.
        """
        engine = self._engine
        plans = GroupPlanCache(
            engine.rank,
            members,
            engine.nranks,
            self._plans.fabric,
            engine.config,
            homes=homes,
            place=self._plans.place,
        )

        def enter(call: CallSignature, own: Schedule | None = None) -> Plan:
            return plans(call, engine.enter())

        return enter


__all__ = ["EnterCall", "PlanSelector"]
