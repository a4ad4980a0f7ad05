"""Collectives of one communicator: starts them one at a time, and runs those on host memory.

A blocking call runs in the caller's thread, an asynchronous one in the communicator's worker, in
the order in which they were made. A call that fails outside the data loop ends the communicator, so
that no peer waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock, get_ident
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl import kernels
from r2ccl.clock import monotonic
from r2ccl.dtypes import CODES
from r2ccl.errors import (
    CommunicatorRevoked,
    ConcurrentCalls,
    InvalidArgument,
    R2cclError,
    ScheduleError,
)
from r2ccl.planning.calibration import calibrate
from r2ccl.planning.cost_model import Rates
from r2ccl.planning.plan_cache import Plan, PlanCache
from r2ccl.runtime import arguments
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.arrays.cuda import DeviceBuffer
from r2ccl.runtime.async_work import Task, Work, Worker
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import LandingPool, host_lanes
from r2ccl.types import CallSignature, Collective, ReduceOp

Array = npt.NDArray[Any]
#: Starts a collective on device memory: its request, the caller's stream, and whether it is
#: asynchronous; returns its result or a `Work`.
StartOnDevice = Callable[[Request, Any, bool], Any]

_NOTHING = np.empty(0, np.uint8)
_INT64 = CODES[np.dtype(np.int64)]
_UINT8 = CODES[np.dtype(np.uint8)]


class Collectives:
    """Starts the collectives of one communicator.

    Parameters
    ----------
    engine : Engine
    plans : PlanCache
    pool : LandingPool
    worker : Worker
        Runs asynchronous calls.
    turn : Lock
        Held while a collective is under way, from its first copy to its last; the worker's too.
    start_on_device : callable
        See `StartOnDevice`.
    """

    def __init__(
        self,
        engine: Engine,
        plans: PlanCache,
        pool: LandingPool,
        *,
        worker: Worker,
        turn: Lock,
        start_on_device: StartOnDevice,
    ) -> None:
        self._engine = engine
        self._plans = plans
        self._pool = pool
        self._worker = worker
        self._turn = turn
        self._start_on_device = start_on_device
        self._rank = engine.rank
        #: Thread of the blocking call under way; 0: there is none.
        self._caller = 0
        #: Makes the error that calls are refused with; None while they are not.
        self._refusal: Callable[[], R2cclError] | None = None
        #: Memory for partial sums that are not this rank's result.
        self._scratch = np.empty(0, np.uint8)
        #: Runs the engine where NumPy does not warn of overflow and the like.
        run_quietly: Callable[..., None] = kernels.quiet_context().run
        self._run_engine = partial(run_quietly, engine.run)

    # What the communicator asks

    @property
    def is_closed(self) -> bool:
        """Whether calls are refused."""
        return self._refusal is not None

    def close(self, refusal: Callable[[], R2cclError]) -> None:
        """Refuse all calls from now on, each with a new error from `refusal`."""
        self._refusal = refusal

    @property
    def is_blocking(self) -> bool:
        """Whether a blocking call is under way, in any thread."""
        return self._worker.is_idle and self._turn.locked()

    @property
    def is_below(self) -> bool:
        """Whether this is a signal handler that interrupted a blocking call of this thread."""
        return self._caller == get_ident()

    def require_seen(self) -> None:
        """Raise the error of an asynchronous call that nobody has waited for."""
        error = self._worker.unseen()
        if error is not None:
            raise CommunicatorRevoked(
                f"rank {self._rank}: the communicator was revoked: {error}",
                reason=error if isinstance(error, R2cclError) else None,
            ) from error

    # Calls

    def start(self, stream: Any, is_async: bool, make: Callable[..., Request], *given: Any) -> Any:
        """Validate a call and run it, or have it run.

        Parameters
        ----------
        stream : object or None
            As the caller passed it; allowed for device memory alone.
        is_async : bool
            Return a `Work` at once.
        make : callable
            One of `r2ccl.runtime.arguments`, called with what was `given`.

        Returns
        -------
        object
            The result, or a `Work`.

        Raises
        ------
        InvalidArgument, ScheduleError
            If the arguments are wrong; no call was begun.
        ConcurrentCalls
            If a blocking call is under way, in another thread or below this signal handler.
        R2cclError
            If the collective failed; the communicator has ended.
        """
        if self._refusal is not None:
            raise self._refusal()
        worker = self._worker
        if worker.failed is not None:
            self.require_seen()
        try:
            request = make(*given)
            if stream is None and not is_async and type(request.source) is Buffer:
                if not worker.is_idle:
                    self.in_turn(partial(self._run, request))
                    return request.result
                if not self._turn.acquire(blocking=False):
                    raise self._concurrent()
                try:
                    self._caller = get_ident()
                    output = request.output
                    if request.is_staged or type(output) is not Buffer:
                        self._run(request)
                    else:  # the same, without a function call
                        self._run_engine(
                            partial(self._plans, request.signature, own=request.schedule),
                            partial(host_lanes, self._pool, request.source.array, output.array),
                        )
                    return request.result
                finally:
                    self._caller = 0
                    self._turn.release()
            arguments.check_op(request)
            if isinstance(request.source, DeviceBuffer):
                return self._start_on_device(request, stream, is_async)
            if stream is not None:
                raise InvalidArgument(
                    f"stream={stream!r} was given for arrays in host memory, which no stream "
                    "works on: leave it out"
                )
            return self._submit(request)
        except (InvalidArgument, ScheduleError, ConcurrentCalls):
            raise
        except BaseException as exc:
            self._engine.fail_call(exc)
            raise

    def barrier(self) -> None:
        """Wait until all ranks have called it.

        Raises
        ------
        ConcurrentCalls, R2cclError
            As `start`.
        """
        if self._refusal is not None:
            raise self._refusal()
        self.require_seen()
        try:
            call = CallSignature(Collective.BARRIER, _UINT8, ReduceOp.SUM, 0)
            self.in_turn(partial(self._collect, call, _NOTHING, _NOTHING))
        except ConcurrentCalls:
            raise
        except BaseException as exc:
            self._engine.fail_call(exc)
            raise

    def in_turn(self, fn: Callable[[], None]) -> None:
        """Run `fn` after all asynchronous calls issued so far; return when it has run.

        Raises
        ------
        ConcurrentCalls
            If a blocking call is under way, in another thread or below this signal handler.
        """
        if self._worker.is_idle:
            if not self._turn.acquire(blocking=False):
                raise self._concurrent()
            try:
                self._caller = get_ident()
                fn()
            finally:
                self._caller = 0
                self._turn.release()
            return
        task = Task(fn)
        try:
            self._worker.enqueue(task)
            task.wait()
        except BaseException as exc:
            # Ctrl-C: the call must not continue behind the caller's back.
            self._engine.revoke(f"interrupted by {exc!r}")
            self._worker.settle(task)
            raise
        if task.error is not None:
            self._worker.unseen()  # earlier tasks failed for the same reason, raised here
        task.succeed()

    def run_plan(self, plan: Plan, source: Array, output: Array) -> None:
        """Run a collective on host memory that was entered."""
        self._run_engine(plan, partial(host_lanes, self._pool, source, output))

    def allgather_bytes(self, mine: bytes) -> list[bytes]:
        """Exchange `mine` with all ranks, in turn; all give as many bytes. Return all, by rank."""
        rows = np.zeros((self._engine.nranks, len(mine)), np.uint8)
        rows[self._rank] = np.frombuffer(mine, np.uint8)
        flat = rows.reshape(-1)
        call = CallSignature(Collective.ALLGATHER, _UINT8, ReduceOp.SUM, flat.size)
        self.in_turn(partial(self._collect, call, flat, flat))
        return [row.tobytes() for row in rows]

    def calibrate(self) -> Rates:
        """Measure the latency and the bandwidth of the network, together with all ranks."""
        health = self._engine.whole_health

        def time_ns(nbytes: int, ntimes: int) -> int:
            data = np.zeros(nbytes, np.uint8)
            call = CallSignature(Collective.ALLREDUCE, _UINT8, ReduceOp.SUM, nbytes)
            took_ns = []
            for _ in range(max(2, ntimes)):
                begun_s = monotonic()
                self._collect(call, data, data)
                took_ns.append(int((monotonic() - begun_s) * 1e9))
            agreed = np.array([min(took_ns[1:])])
            call = CallSignature(Collective.ALLREDUCE, _INT64, ReduceOp.MAX, 1)
            self._collect(call, agreed, agreed)
            return int(agreed[0])

        return calibrate(time_ns, lambda nbytes: self._plans.choose(nbytes, health))

    def _submit(self, request: Request) -> Work:
        task = Task(partial(self._run, request))
        try:
            self._worker.enqueue(task)
            return Work(task, request.result, self._engine.config.timeout_s)
        except BaseException as exc:
            self._engine.fail_call(exc)
            self._worker.settle(task)
            raise

    def _run(self, request: Request) -> None:
        """Run a collective on host memory, with the copies that it needs before and after."""
        source, output, call = request.source, request.output, request.signature
        assert isinstance(source, Buffer)
        if output is None:
            self._collect(call, source.array, self._scratch_like(source.array))
            return
        assert isinstance(output, Buffer)
        if call.collective == Collective.ALLGATHER:
            if not request.is_in_place:
                at = self._rank * source.count
                output.array[at : at + source.count] = source.array
            self._collect(call, output.array, output.array)
        elif call.collective == Collective.REDUCE_SCATTER:
            sums = self._scratch_like(source.array)
            self._collect(call, source.array, sums)
            at = self._rank * output.count
            output.array[:] = sums[at : at + output.count]
        else:
            select = partial(self._plans, call, own=request.schedule)
            self._run_engine(select, partial(host_lanes, self._pool, source.array, output.array))

    def _collect(self, call: CallSignature, source: Array, output: Array) -> None:
        """Run a collective from `source` to `output` as they are."""
        select = partial(self._plans, call)
        self._run_engine(select, partial(host_lanes, self._pool, source, output))

    def _scratch_like(self, array: Array) -> Array:
        """Return memory of this size and dtype; valid until the next call that needs some."""
        if self._scratch.nbytes < array.nbytes:
            self._scratch = np.empty(array.nbytes, np.uint8)
        return self._scratch[: array.nbytes].view(array.dtype)

    def _concurrent(self) -> ConcurrentCalls:
        return ConcurrentCalls(
            f"rank {self._rank}: a call while another one is under way, in another thread or below "
            "a signal handler; allowed is one thread at a time, or a communicator for each"
        )


__all__ = ["Collectives", "StartOnDevice"]
