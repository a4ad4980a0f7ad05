"""Execution of the collectives of one communicator on host memory.

A collective runs in one of three ways: in memory that all ranks share, in two levels
(`r2ccl.runtime.two_level`), or over the network. All ranks choose the same way, because the choice
depends only on values that are equal on all ranks. This module also makes the copies that a
collective needs before and after it.

Invariant: one collective runs at a time, because all of them use the same memory for partial sums
and converted inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl import kernels
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.clock import monotonic
from r2ccl.dtypes import CODES, dtype_of, raw_dtype
from r2ccl.failover.health.table import Health
from r2ccl.planning.calibration import calibrate
from r2ccl.planning.cost_model import Rates
from r2ccl.planning.plan_cache import Plan, PlanCache
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import HostLanes, LandingPool
from r2ccl.runtime.grouping import batches, joined
from r2ccl.runtime.local import LocalCalls, connect
from r2ccl.runtime.repeats import Make, NetworkRepeats, Repeats
from r2ccl.runtime.staged_call import BlockCopy, StagedCall
from r2ccl.runtime.two_level import RunEngine, TwoLevelCalls
from r2ccl.runtime.two_level import connect as connect_nodes
from r2ccl.schedule.chunks import Parts
from r2ccl.transport.aligned import aligned_memory
from r2ccl.types import (
    ORDERED_OP,
    PREFIXES,
    AllgatherBytes,
    CallSignature,
    Collective,
    ReduceOp,
)

Array = npt.NDArray[Any]

_FLOAT32 = CODES[np.dtype(np.float32)]
_INT64 = CODES[np.dtype(np.int64)]
_UINT8 = CODES[np.dtype(np.uint8)]


class HostCollectives:
    """Collectives of one communicator on host memory.

    Callers of `run`, `run_group`, `collect`, `run_plan` and `free_memory` must have the turn (see
    `r2ccl.runtime.turn`), which lasts from the first copy of a collective to its last.

    Parameters
    ----------
    engine : Engine
    plans : PlanCache
    pool : LandingPool

    Attributes
    ----------
    pool : LandingPool
    run_engine : RunEngine
    local : LocalCalls or None
        Calls in memory that all ranks share; None if the ranks share none.
    two_level : TwoLevelCalls or None
        Calls in shared memory within nodes and over the network between them; None if no call runs
        in two levels.
    network_repeats : NetworkRepeats
        Calls over the network that can be run again.
    repeats : Repeats
        Calls that can be run again: those of `local` or, without it, `network_repeats`.
    """

    def __init__(self, engine: Engine, plans: PlanCache, pool: LandingPool) -> None:
        self._engine = engine
        self._plans = plans
        self.pool = pool
        self._rank = engine.rank
        #: Memory that calls need besides the caller's arrays, for example for partial sums.
        self._scratch = np.empty(0, np.uint8)
        #: Memory for converted inputs, for results that are converted back, and for the joint copy
        #: of a group's arrays; by purpose.
        self._converted: dict[str, Array] = {}
        #: Calls a function in a context in which NumPy does not warn about overflow and the like.
        run_quietly: Callable[..., None] = kernels.quiet_context().run
        self._run_quietly = run_quietly
        self.run_engine: RunEngine = partial(run_quietly, engine.run)
        self.local: LocalCalls | None = None
        self.two_level: TwoLevelCalls | None = None
        self.network_repeats = NetworkRepeats(engine, pool, run_quietly, self._memory_of)
        self.repeats: Repeats = self.network_repeats

    # Shared memory

    def share_memory(
        self,
        control: ControlPlane,
        allgather: AllgatherBytes,
        obstacle: str,
    ) -> None:
        """Use memory that all ranks of the communicator share, from now on.

        Parameters
        ----------
        control : ControlPlane
        allgather : callable
            Allgathers bytes between the ranks of the communicator.
        obstacle : str
            Reason why this rank cannot share memory; empty if it can.

        Raises
        ------
        TransportError
            If any two of the ranks cannot share memory; then no rank does.

        Notes
        -----
        *Collective*: all ranks.
        """
        local = connect(self._engine, control, allgather, obstacle)
        self._engine.messenger.share_memory(local.rings, self._engine)
        self.local, self.repeats = local, local.repeats

    def share_memory_in_nodes(
        self,
        control: ControlPlane,
        allgather: AllgatherBytes,
        obstacle: str,
        teams: Sequence[Sequence[int]],
    ) -> None:
        """Use memory that the ranks of each node share, from now on.

        `teams` lists the ranks of each node, numbered as in the communicator; all nodes have the
        same number of ranks. The other parameters are those of `share_memory`.

        Raises
        ------
        TransportError
            If any two ranks of a node cannot share memory; then no rank does.

        Notes
        -----
        *Collective*: all ranks.
        """
        self.two_level = connect_nodes(
            self._engine,
            control,
            allgather,
            obstacle,
            teams=teams,
            one_level=self._plans,
            pool=self.pool,
            run_engine=self.run_engine,
            scratch=self._scratch_of,
        )
        self.network_repeats.forget()  # from now on, these calls may run in two levels

    @property
    def shares_memory(self) -> bool:
        """True if ranks of the communicator share memory: all of them, or those of each node."""
        return self.local is not None or self.two_level is not None

    @property
    def is_local(self) -> bool:
        """True if all ranks of the communicator share memory."""
        return self.local is not None

    def count_chunks(self, nbytes: int, health: Health) -> int:
        """Return the number of chunks of an allreduce of `nbytes`; 0 if it runs in one level."""
        return 0 if self.two_level is None else self.two_level.count_chunks(nbytes, health)

    def free_memory(self, timeout_s: float) -> bool:
        """Free shared memory; return False if a message or thread still uses it.

        Wait up to `timeout_s` seconds for each of these.
        """
        if self.local is not None:
            if not self._engine.messenger.free_memory(timeout_s):
                return False
            self.local.close()
            self.local, self.repeats = None, self.network_repeats
        if self.two_level is not None:
            if not self.two_level.close(timeout_s):
                return False
            self.two_level = None
        return True

    # Calls

    def run(self, request: Request) -> None:
        """Run a collective, including the copies before and after it."""
        if request.conversion is not None:
            self._run_converted(request, request.conversion)
            return
        if self.local is not None and self.local.run(request) is not None:
            return
        source, output = request.source, request.output
        assert isinstance(source, Buffer)
        if (
            self.two_level is not None
            and request.schedule is None
            and self.two_level.run(
                request.signature,
                source.array,
                output.array if isinstance(output, Buffer) else None,
                partial(self._run_over_network, request),
                request.parts,
            )
        ):
            return
        self._run_over_network(request)

    def remember(
        self, make: Make, x: Any, out: Any, rest: tuple[Any, ...], request: Request
    ) -> None:
        """Remember a call that `run` has run over the network, if it can be run again.

        ``make(x, out, *rest)`` made `request`.
        """
        if self.two_level is None and request.conversion is None:
            self.network_repeats.remember_last(make, x, out, rest, request)

    def run_group(self, requests: Sequence[Request]) -> None:
        """Run the collectives of a group, small allreduces as one; see `batches`."""
        for batch in batches(requests):
            if len(batch) == 1:
                self.run(batch[0])
            else:
                self._run_joined(batch)

    def collect(
        self,
        call: CallSignature,
        source: Array,
        output: Array,
        parts: Parts | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Run a collective from `source` to `output`, without copies before or after it.

        The collective runs in shared memory or in one level over the network. If `Engine.enter` has
        been called for the collective, `plan` is its plan; None: this method selects the plan.
        """
        if self.local is not None and parts is None and self.local.collect(call, source, output):
            return
        select = partial(self._plans, call, parts=parts) if plan is None else plan
        self.run_engine(select, HostLanes(self.pool, source, output))

    def run_plan(self, plan: Plan, source: Array, output: Array) -> None:
        """Run `plan`; `Engine.enter` must have been called for its collective."""
        self.run_engine(plan, HostLanes(self.pool, source, output))

    def calibrate(self) -> Rates:
        """Measure the latency and the bandwidth of the network; return rates equal on all ranks.

        Notes
        -----
        *Collective*: all ranks. Must be called before any other call can be made; the caller need
        not have the turn.
        """
        health = self._engine.whole_health

        def time_ns(nbytes: int, ntimes: int) -> int:
            data = np.zeros(nbytes, np.uint8)
            call = CallSignature(Collective.ALLREDUCE, _UINT8, ReduceOp.SUM, nbytes)
            took_ns = []
            for _ in range(max(2, ntimes)):
                begun_s = monotonic()
                self.collect(call, data, data)
                took_ns.append(int((monotonic() - begun_s) * 1e9))
            agreed = np.array([min(took_ns[1:])])
            call = CallSignature(Collective.ALLREDUCE, _INT64, ReduceOp.MAX, 1)
            self.collect(call, agreed, agreed)
            return int(agreed[0])

        return calibrate(time_ns, lambda nbytes: self._plans.choose(nbytes, health))

    def _run_over_network(self, request: Request, plan: Plan | None = None) -> None:
        """Run a collective in one level, including the copies before and after it.

        For `plan`, see `collect`.
        """
        call = self._memory_of(request)
        call.begin()
        if request.schedule is None:
            self.collect(request.signature, call.source, call.output, call.parts, plan)
        else:
            select = partial(self._plans, request.signature, own=request.schedule)
            self.run_engine(select, HostLanes(self.pool, call.source, call.output))
        call.finish()

    def _memory_of(self, request: Request) -> StagedCall:
        """Return the arrays and copies of a collective over the network.

        `request` must not have a conversion.
        """
        source, output, call = request.source, request.output, request.signature
        assert isinstance(source, Buffer)
        data, parts = source.array, request.parts
        if output is None:
            is_gather = call.collective in (Collective.GATHER, Collective.GATHERV)
            return StagedCall(data, data[:0] if is_gather else self._scratch_like(data), parts)
        assert isinstance(output, Buffer)
        result = output.array
        if call.collective == Collective.ALLGATHER:
            own = self._own_part(result, source.count, parts)
            before = None if request.is_in_place else BlockCopy(own, data)
            return StagedCall(result, result, parts, before)
        if call.collective == Collective.REDUCE_SCATTER:
            sums = self._scratch_like(data)
            after = BlockCopy(result, self._own_part(sums, output.count, parts))
            # In rank order, a rank's part comes from an allreduce.
            return StagedCall(data, sums, None if call.op == ORDERED_OP else parts, after=after)
        if request.schedule is None and request.is_in_place:
            copy = self._scratch_like(data)  # the schedule needs separate memory
            return StagedCall(copy, result, parts, BlockCopy(copy, data))
        return StagedCall(data, result, parts)

    def _own_part(self, whole: Array, count: int, parts: Parts | None) -> Array:
        """Return this rank's part (`count` elements) of `whole`, which has all ranks' parts."""
        at = self._rank * count if parts is None else parts.inputs[self._rank][0]
        return whole[at : at + count]

    def _run_converted(self, request: Request, op: kernels.ConvertedOp) -> None:
        """Convert the input, run the collective on it, and round a float32 result if necessary."""
        source, output, call = request.source, request.output, request.signature
        assert isinstance(source, Buffer)
        code = _FLOAT32 if op.is_wide else call.dtype
        converted = self._reused("converted", source.count, code)
        self._run_quietly(op.converter(call.dtype), source.array, converted.array)
        result = output
        if op.is_wide and isinstance(output, Buffer):
            # An exscan needs separate memory; a scan is treated alike.
            is_same = output.count == source.count and call.collective not in PREFIXES
            result = converted if is_same else self._reused("result", output.count, code)
        self.run(
            msgspec.structs.replace(
                request,
                signature=msgspec.structs.replace(call, dtype=code),
                source=converted,
                output=result,
                conversion=None,
            )
        )
        has_result = call.collective != Collective.EXSCAN or self._rank > 0
        if result is not output and has_result:
            assert isinstance(output, Buffer)
            assert isinstance(result, Buffer)
            self._run_quietly(kernels.narrower(call.dtype), result.array, output.array)

    def _run_joined(self, batch: Sequence[Request]) -> None:
        """Run several allreduces as one, on a joint copy of their arrays."""
        call = joined(batch)
        copy = self._reused("joined", call.count, call.dtype).array
        at = 0
        for request in batch:
            source = request.source
            assert isinstance(source, Buffer)
            copy[at : at + source.count] = source.array
            at += source.count
        run = partial(self.collect, call, copy, copy, None)
        if self.two_level is None or not self.two_level.run(call, copy, copy, run):
            run()
        at = 0
        for request in batch:
            output = request.output
            assert isinstance(output, Buffer)
            output.array[:] = copy[at : at + output.count]
            at += output.count

    def _reused(self, name: str, count: int, code: int) -> Buffer:
        """Return memory for `count` elements; later calls with this name use the memory again."""
        dtype = dtype_of(code)
        nbytes = count * dtype.itemsize
        memory = self._converted.get(name)
        if memory is None or memory.nbytes < nbytes:
            memory = self._converted[name] = aligned_memory(nbytes)
        array = memory[:nbytes].view(dtype if dtype.names is None else raw_dtype(dtype))
        return Buffer(array, code, count, dtype.itemsize, nbytes, memory)

    def _scratch_like(self, array: Array) -> Array:
        """Return memory with the size and dtype of `array`; later calls use the memory again."""
        return self._scratch_of(array.size, array.dtype)

    def _scratch_of(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory for `count` elements of `dtype`; later calls use the memory again."""
        nbytes = count * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self.network_repeats.forget()  # repeated calls would use the former memory
            self._scratch = aligned_memory(nbytes)
        return self._scratch[:nbytes].view(dtype)


__all__ = ["HostCollectives"]
