"""Begins collectives, whatever memory they are on, and runs those on host memory.

Owned by one thread at a time: the caller's, or the communicator's worker, which runs what goes on
asynchronously and the host's part of collectives on device memory. Imports everything down to the
engine. Invariant: a call's plan is that of the health which all ranks enter it with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl import kernels
from r2ccl.clock import monotonic
from r2ccl.dtypes import CODES
from r2ccl.failover.health.table import Health
from r2ccl.planning.calibration import calibrate
from r2ccl.planning.cost_model import Choice, Rates
from r2ccl.planning.plan_cache import GroupPlanCache, Plan, PlanCache
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import Call, LandingPool, LaneRun
from r2ccl.runtime.progress import Progress
from r2ccl.schedule.ir import Schedule
from r2ccl.types import CallSignature, Collective, ReduceOp

Array = npt.NDArray[Any]

#: Enters a collective, by an allreduce of the caller's own if there is one.
SelectPlan = Callable[[CallSignature, Schedule | None], Plan]

_NOTHING = np.empty(0, np.uint8)
_INT64 = CODES[np.dtype(np.int64)]
_UINT8 = CODES[np.dtype(np.uint8)]


class PlanSelector:
    """Enters the collectives of one rank, each with the plan that all ranks choose.

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
        """Enter a collective of all ranks; by an allreduce of the caller's own, if there is one.

        Raises
        ------
        R2cclError
            What ended the communicator.
        InvalidArgument, ScheduleError
            As `PlanCache`.
        """
        health = self._engine.enter() or self._whole
        return self._plans(call, health, self._engine.op, own)

    def among(self, members: tuple[int, ...], homes: Sequence[int] = ()) -> SelectPlan:
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


class HostCollectives:
    """Host memory's part of a communicator.

    Parameters
    ----------
    engine : Engine
    entry : PlanSelector
    pool : LandingPool
    """

    def __init__(self, engine: Engine, entry: PlanSelector, pool: LandingPool) -> None:
        self._engine = engine
        self._entry = entry
        self._pool = pool
        #: Where partial sums go that are no result of this rank's.
        self._scratch = np.empty(0, np.uint8)
        self._quiet = kernels.quiet_context()

    def carry_out(self, request: Request) -> None:
        """Run a request on host memory to its end.

        Raises
        ------
        R2cclError
            What ended it.
        """
        source, output, call = request.source, request.output, request.signature
        assert isinstance(source, Buffer)
        if output is None:
            self.run(call, source.array, self._scratch_like(source.array))
            return
        assert isinstance(output, Buffer)
        if call.collective == Collective.ALLGATHER:
            if not request.is_in_place:
                at = self._engine.rank * source.count
                output.array[at : at + source.count] = source.array
            self.run(call, output.array, output.array)
        elif call.collective == Collective.REDUCE_SCATTER:
            sums = self._scratch_like(source.array)
            self.run(call, source.array, sums)
            at = self._engine.rank * output.count
            output.array[:] = sums[at : at + output.count]
        else:
            self.run(call, source.array, output.array, request.schedule)

    def run(
        self, call: CallSignature, source: Array, output: Array, own: Schedule | None = None
    ) -> None:
        """Run a collective, by its best schedule or by an allreduce of the caller's own."""
        self.run_plan(self._entry(call, own), source, output)

    def run_plan(self, plan: Plan, source: Array, output: Array) -> None:
        """Run a collective that was just entered."""
        self._quiet.run(self._run_quietly, plan, source, output)

    def gather(self, mine: bytes) -> list[bytes]:
        """Tell all ranks something, and return what each says; all say as many bytes."""
        rank, nranks = self._engine.rank, self._engine.nranks
        all_bytes = np.zeros((nranks, len(mine)), np.uint8)
        all_bytes[rank] = np.frombuffer(mine, np.uint8)
        flat = all_bytes.reshape(-1)
        self.run(CallSignature(Collective.ALLGATHER, _UINT8, ReduceOp.SUM, flat.size), flat, flat)
        return [row.tobytes() for row in all_bytes]

    def barrier(self) -> None:
        """Meet all ranks."""
        call = CallSignature(Collective.BARRIER, _UINT8, ReduceOp.SUM, 0)
        self.run(call, _NOTHING, _NOTHING)

    def calibrate(self, choose: Callable[[int], Choice]) -> Rates:
        """Measure what the network gives; collective.

        Parameters
        ----------
        choose : callable
            Says what an allreduce of so many bytes runs.
        """

        def time_ns(nbytes: int, ntimes: int) -> int:
            data = np.zeros(nbytes, np.uint8)
            call = CallSignature(Collective.ALLREDUCE, _UINT8, ReduceOp.SUM, nbytes)
            took_ns = []
            for _ in range(max(2, ntimes)):
                begun_s = monotonic()
                self.run(call, data, data)
                took_ns.append(int((monotonic() - begun_s) * 1e9))
            agreed = np.array([min(took_ns[1:])])
            self.run(CallSignature(Collective.ALLREDUCE, _INT64, ReduceOp.MAX, 1), agreed, agreed)
            return int(agreed[0])

        return calibrate(time_ns, choose)

    def _run_quietly(self, plan: Plan, source: Array, output: Array) -> None:
        layout = plan.layout
        call = Call(
            layout,
            source,
            output,
            plan.reduce,
            plan.finish,
            is_bandwidth_sample=plan.is_bandwidth_sample,
        )

        def make(progress: Progress) -> list[LaneRun]:
            return [LaneRun(lane, call, progress, self._pool) for lane in layout.lanes]

        self._engine.run(plan.signature, make, layout.peers)

    def _scratch_like(self, array: Array) -> Array:
        """Return memory of this size and dtype; valid until the next call that needs some."""
        if self._scratch.nbytes < array.nbytes:
            self._scratch = np.empty(array.nbytes, np.uint8)
        return self._scratch[: array.nbytes].view(array.dtype)


__all__ = ["HostCollectives", "PlanSelector", "SelectPlan"]
