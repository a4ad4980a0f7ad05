"""Collectives on GPU memory over RDMA NICs, which read and write the memory directly.

Theory of operation
-------------------
A call runs like a call on host memory, with the same plan, channels, links and migration. Its
buffers are device memory registered with every NIC, and kernels reduce its slices
(`r2ccl.gpu.device_reduction`). The communicator's worker waits for the earlier work of the caller's
stream, runs the collective until its last kernel is done, and then lets the caller's stream
continue (`r2ccl.gpu.host_signal`). After a failure the stream continues too, but the result is
undefined and the communicator ends.

*Remote writes.* Before NICs have written the result, the caller may enqueue a kernel that reads it;
on the device, this kernel waits for the end of the call. So that the kernel sees the data, the last
work of every call is enqueued after the last completion was polled, and the call ends once that
work is done.

*Memory and kernels* of a call are prepared in `GpuDirectBackend.prepare`, while no stream waits for
a call, because allocating and loading may wait for the device. The worker allocates only memory
that `prepare` cannot foresee: scratch memory of some schedules, landing places beyond the number
used so far, and the staging copy of an array whose registration fails. If the driver waits for all
work of the device in such an allocation, and the caller's stream already waits for the call, the
call hangs; ``make bench-gpu`` shows whether cuMemAlloc waits.

*Groups.* `GpuDirectBackend.begin_part` begins a collective among a subset of the ranks; see
`r2ccl.gpu.hierarchical`.

*Small calls* are executed by another backend; see `GpuDirectBackend.supports`.

Invariant: memory is registered while its slices are in flight.
"""

from __future__ import annotations

import contextlib

from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.device.base import Device, Stream
from r2ccl.errors import R2cclError, TransportError
from r2ccl.failover.migration.links import Links
from r2ccl.gpu.device_reduction import ReductionKernels, ReductionStream
from r2ccl.gpu.host_signal import LINE_NBYTES, DeviceCall, DeviceJob, SignalledStream
from r2ccl.gpu.operands import DeviceOperands, forms_of
from r2ccl.gpu.plan_selector import EnterCall
from r2ccl.gpu.pxn.routes import PxnRoutes
from r2ccl.gpu.registered_memory import AreaPurpose, RegisteredDeviceMemory
from r2ccl.gpu.staging import StagingBuffers, nbytes_of
from r2ccl.kernels.cuda.form import Form, has_kernels
from r2ccl.planning.lowering import Layout, cleared
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import LandingPool, LaneRun


class GpuDirectJob(DeviceJob):
    """A call that a `GpuDirectBackend` has begun.

    ``enter`` enters the collective and returns its plan.
    """

    enter: EnterCall


class GpuDirectBackend(SignalledStream):
    """Collectives of one rank over NICs that access the memory of its GPU; a `GpuBackend`.

    Parameters
    ----------
    device : Device
    kernels : ReductionKernels
    engine : Engine
        Runs the collectives.
    enter : callable
        Enters a collective among all ranks and returns its plan; see `EnterCall`.
    memory : RegisteredDeviceMemory
        Memory for landing places, staging copies, partial sums and scratch; the backend owns and
        closes it.
    pxn_routes : PxnRoutes or None
        Routes to distant NICs through other GPUs; the backend owns and closes them.
    config : Config
    clock : Clock
    """

    def __init__(
        self,
        device: Device,
        kernels: ReductionKernels,
        *,
        engine: Engine,
        enter: EnterCall,
        memory: RegisteredDeviceMemory,
        pxn_routes: PxnRoutes | None,
        config: Config,
        clock: Clock,
    ) -> None:
        super().__init__(
            device, engine.rank, check=engine.check, clock=clock, timeout_s=config.timeout_s,
            nlines=2,
        )  # fmt: skip
        self._kernels = kernels
        self._engine = engine
        self._enter = enter
        self._memory = memory
        self._pxn_routes = pxn_routes
        self._config = config
        self._nranks = engine.nranks
        self._pool = LandingPool(memory.place, config.landing_depth)
        self._reductions = ReductionStream(device, kernels)
        #: Address of a word in pinned memory; the write of this word is the last work of each call.
        self._last_word = int(self._pinned.ctypes.data) + LINE_NBYTES
        self._arrays = StagingBuffers(device, memory, self._rank, self._nranks)
        self._prepared: set[Form] = set()
        #: Layouts of plans, each with its `cleared` form, by the ``id`` of the layout.
        self._cleared: dict[int, tuple[Layout, Layout]] = {}

    def supports(self, call: DeviceCall, nranks: int = 0) -> bool:
        """Return whether `call` is large enough for this backend, and kernels for `call` exist.

        A call is large enough if its input or its output is larger than R2CC_EAGER_NBYTES times the
        number of ranks. For smaller calls, two copies through pinned memory (`StagedBackend`) cost
        less than one kernel per step.

        Parameters
        ----------
        call : DeviceCall
        nranks : int
            Number of ranks that make the call; 0 means all ranks.
        """
        limit = self._config.eager_nbytes * (nranks or self._nranks)
        return nbytes_of(call.signature) > limit and has_kernels(call.signature)

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether `begin` can be called for `call` without calling `prepare` first."""
        is_route_due = self._pxn_routes is not None and self._pxn_routes.is_open_needed
        return (
            not is_route_due
            and self._prepared.issuperset(forms_of(call.signature))
            and self._arrays.are_ready(call)
        )

    def prepare(self, call: DeviceCall) -> None:
        """Open the PXN routes needed now; load the kernels and allocate the memory for `call`.

        Also try to register the arrays of `call`, and free the areas that earlier calls replaced.
        The worker must have finished all earlier calls.

        Raises
        ------
        InvalidArgument
            If the GPU is too old for the kernels.
        TransportError
            If the device or a NIC failed, if memory is full, or if a kernel cannot be compiled.
        """
        self._memory.free_replaced()
        if self._pxn_routes is not None:
            self._pxn_routes.open()
        for form in forms_of(call.signature):
            if form not in self._prepared:
                self._kernels.prepare(form)
                self._prepared.add(form)
        self._arrays.make_ready(call)

    def begin(self, call: DeviceCall, stream: Stream) -> GpuDirectJob:
        """Begin a call of all ranks; see `StagedBackend.begin`."""
        return GpuDirectJob(
            call=call, before=self._recorded(stream), done=self.take_event(),
            number=self._next_number(), enter=self._enter,
        )  # fmt: skip

    def begin_part(
        self, call: DeviceCall, stream: Stream, enter: EnterCall, widest: int
    ) -> GpuDirectJob:
        """Begin a call that is a part of another call; see `StagedBackend.begin_part`.

        `widest` is ignored: the part is never divided into windows.
        """
        return GpuDirectJob(
            call=call, before=self._recorded(stream), done=self.take_event(), number=0, enter=enter
        )

    def finish(self, job: GpuDirectJob) -> None:
        """Execute the call of `job`; runs in the worker thread.

        On return, the device has finished the call, and the caller's stream may continue.

        Raises
        ------
        TransportTimeout
            If the device did not finish the caller's earlier work, or a kernel, in time.
        TransportError
            If the device or a NIC failed, or memory is full.
        R2cclError
            If the collective failed or the communicator ended.
        """
        try:
            self._wait_for(job.before, "the work that precedes this collective on its stream")
            self._carry_out(job)
        except BaseException as exc:
            job.error = exc
            # Wait for enqueued kernels and copies, which still write. Further errors are dropped.
            with contextlib.suppress(TransportError):
                self._reductions.drain(_FAILED_S)
            if self._pxn_routes is not None:
                with contextlib.suppress(R2cclError):
                    self._pxn_routes.drain(_FAILED_S)
            raise
        finally:
            self._end(job)

    def close(self, timeout_s: float) -> None:
        """Wait for the device, then free all resources; the worker must be idle.

        `timeout_s` limits each wait, in seconds.

        Raises
        ------
        TransportTimeout
            If this GPU, or a GPU of a PXN route, is still busy after such a wait; the memory that
            it uses was not freed.
        TransportError
            If the device failed; not all resources were freed, but all memory was deregistered
            from the NICs.
        """
        until_s = self._clock() + timeout_s
        with contextlib.ExitStack() as steps:
            # Even if the device failed: closing it does not deregister its memory from the NICs.
            steps.callback(self._close_memory, timeout_s)
            is_over = self._let_go(timeout_s)
            if not is_over or not self._reductions.drain(max(0.0, until_s - self._clock())):
                steps.pop_all()
                raise self._still_busy("reduces", timeout_s)
            self._reductions.close()
            self._free()

    def _close_memory(self, timeout_s: float) -> None:
        if self._pxn_routes is not None and not self._pxn_routes.close(timeout_s):
            raise self._still_busy("copies through other GPUs", timeout_s)
        self._memory.close()

    # Host

    def _carry_out(self, job: GpuDirectJob) -> None:
        with self._arrays.hold(job.call, self._reductions) as places:
            self._settle()
            self._run(job, *places)
        self._reductions.mark(self._last_word, 0)
        self._settle()

    def _run(self, job: GpuDirectJob, source: int, output: int) -> None:
        engine, signature = self._engine, job.call.signature
        plan = job.enter(signature, job.call.schedule)
        layout = self._cleared_of(plan.layout)
        scratch = 0
        if layout.uses_scratch:
            scratch = self._memory.area(AreaPurpose.SCRATCH, nbytes_of(signature))
        operands = DeviceOperands(
            layout,
            signature,
            (source, output, scratch),
            nranks=self._nranks,
            reductions=self._reductions,
            is_bandwidth_sample=plan.is_bandwidth_sample,
        )

        def make(_: Plan, links: Links) -> list[LaneRun]:
            return [LaneRun(lane, operands, links, self._pool) for lane in layout.lanes]

        engine.run(plan, make, self._reductions)

    def _cleared_of(self, layout: Layout) -> Layout:
        # The table keeps the layout alive, so its id is not reused.
        found = self._cleared.get(id(layout))
        if found is None:
            if len(self._cleared) >= _MOST_LAYOUTS:
                self._cleared.pop(next(iter(self._cleared)))
            found = self._cleared[id(layout)] = (layout, cleared(layout))
        return found[1]

    def _settle(self) -> None:
        """Wait for all kernels and copies of the call."""
        until_s = self._clock() + self._timeout_s
        self._wait(self._reductions.drain, until_s, "the kernels of a collective")


#: Longest wait for the kernels of a failed call, and then for its PXN copies in each direction, in
#: seconds.
_FAILED_S = 5.0
_MOST_LAYOUTS = 256

__all__ = ["GpuDirectBackend", "GpuDirectJob"]
