"""Collectives on GPU memory over RDMA NICs, which read and write the memory directly.

Theory of operation
-------------------
A call runs as one on host memory: the same plan, lanes, links and repairs. Its buffers are device
memory registered with every NIC, and kernels reduce its slices (`r2ccl.gpu.device_reduction`). At
the call, all that is enqueued on the device, on a stream of this module's own, is to wait for the
host: for a word in pinned memory that counts calls (`r2ccl.gpu.host_signal`). The communicator's
worker waits for the earlier work of the caller's stream, runs the collective up to the end of its
last kernel, and increments the word. It does so after a failure too: the result is undefined then,
the communicator has ended, and no stream hangs.

*Remote writes.* A kernel of the caller may have been launched before a NIC's write that it reads,
and wait behind the word. Therefore the last work of every call is enqueued after the last
completion was polled, and the word is incremented once that work is done.

*Memory and kernels* of a call are made in `GpuDirectBackend.prepare`, before the device waits for
the host, since making them may wait for the device. The worker allocates what only the plan knows:
scratch memory of some schedules, and landing places beyond the number used so far.

*Groups.* `begin` may be given an `enter` for a subset of the ranks; see `r2ccl.gpu.hierarchical`.

*Small calls* are left to another backend: see `GpuDirectBackend.supports`.

Invariants: memory is registered while its slices are in flight; the word increases in the order of
calls.
"""

from __future__ import annotations

import contextlib

import msgspec

from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.device.base import Device, Event, Stream
from r2ccl.errors import TransportError, TransportTimeout
from r2ccl.failover.migration.links import Links
from r2ccl.gpu.device_reduction import ReductionKernels, ReductionStream
from r2ccl.gpu.host_signal import LINE_NBYTES, SignalledStream
from r2ccl.gpu.operands import DeviceOperands, forms_of
from r2ccl.gpu.plan_selector import EnterCall
from r2ccl.gpu.pxn.routes import PxnRoutes
from r2ccl.gpu.registered_memory import AreaPurpose, RegisteredDeviceMemory
from r2ccl.gpu.staged import DeviceCall
from r2ccl.gpu.staging import StagingBuffers, nbytes_of
from r2ccl.kernels.cuda.form import Form
from r2ccl.planning.lowering import Layout, cleared
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import LandingPool, LaneRun


class GpuDirectJob(msgspec.Struct, eq=False):
    """The host's part of a call.

    ``enter`` enters it; ``before`` is done when earlier work on its arrays is; the stream waits for
    ``number``. ``error`` is why the call failed, if it did.
    """

    call: DeviceCall
    enter: EnterCall
    before: Event
    number: int
    is_over: bool = False
    error: BaseException | None = None


class GpuDirectBackend(SignalledStream):
    """Collectives of one rank on the memory of one GPU; a `r2ccl.gpu.backends.GpuBackend`.

    Parameters
    ----------
    device : Device
    kernels : ReductionKernels
    engine : Engine
        Runs the collectives.
    enter : callable
        Enters them.
    memory : RegisteredDeviceMemory
        Owned.
    pxn_routes : PxnRoutes or None
        Routes to far NICs through other GPUs; owned.
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
        super().__init__(device, engine.rank, nlines=2)
        self._kernels = kernels
        self._engine = engine
        self._enter = enter
        self._memory = memory
        self._pxn_routes = pxn_routes
        self._config = config
        self._clock = clock
        self._nranks = engine.nranks
        self._pool = LandingPool(memory.place, config.landing_depth)
        self._reductions = ReductionStream(device, kernels)
        #: A word in pinned memory whose write is the last work of each call.
        self._last_word = int(self._pinned.ctypes.data) + LINE_NBYTES
        self._number = 0
        self._arrays = StagingBuffers(device, memory, self._rank, self._nranks)
        self._prepared: set[Form] = set()
        #: Layouts of plans and their `cleared` forms, by the id of the layout.
        self._cleared: dict[int, tuple[Layout, Layout]] = {}

    def supports(self, call: DeviceCall, nranks: int = 0) -> bool:
        """Return whether a call of `nranks` ranks (0: all) is large enough for this backend.

        Where a rank's part is one eager slice, the two copies of a window through pinned memory
        cost less than one kernel a step.
        """
        return nbytes_of(call.signature) > self._config.eager_nbytes * (nranks or self._nranks)

    def is_prepared(self, call: DeviceCall) -> bool:
        """See `GpuBackend`."""
        is_route_due = self._pxn_routes is not None and self._pxn_routes.is_open_needed
        return (
            not is_route_due
            and self._prepared.issuperset(forms_of(call.signature))
            and self._arrays.are_ready(call)
        )

    def prepare(self, call: DeviceCall) -> None:
        """See `GpuBackend`; opens PXN routes, loads kernels, registers and allocates memory.

        Raises
        ------
        TransportError
            The device failed, or there is no memory.
        """
        self._memory.free_replaced()
        if self._pxn_routes is not None:
            self._pxn_routes.open()
        for form in forms_of(call.signature):
            if form not in self._prepared:
                self._kernels.prepare(form)
                self._prepared.add(form)
        self._arrays.make_ready(call)

    def begin(
        self, call: DeviceCall, stream: Stream, enter: EnterCall | None = None, widest: int = 0
    ) -> tuple[GpuDirectJob, Event]:
        """Make the device wait for the call's end; nothing is enqueued on the caller's `stream`.

        Parameters
        ----------
        call : DeviceCall
        stream : Stream
        enter : callable, optional
            Enters it; default: as a collective of all ranks.
        widest : int, optional
            Ignored: every call is one collective.

        Returns
        -------
        GpuDirectJob
            For `finish` or `abandon`, one of which must follow, in the order of `begin`. Its
            ``error`` is why nothing was enqueued, if so.
        Event
            Done when the result is complete. Return it with `recycle`.
        """
        done = self.take_event()
        job = GpuDirectJob(call, enter or self._enter, self.take_event(), self._number)
        try:
            self._follow(stream, job.before)
            self._number += 1
            job.number = self._number
            self._wait_for_signal(job.number)
            self._device.record(done, self._stream)
        except Exception as exc:
            job.error = exc
        return job, done

    def finish(self, job: GpuDirectJob) -> None:
        """Run the collective, then let the stream continue; in the worker.

        Raises
        ------
        TransportTimeout
            The device did not finish the caller's earlier work, or a kernel.
        TransportError
            The device failed, or is out of memory.
        R2cclError
            The collective failed.
        """
        try:
            self.examine(job)
            self._await(job.before)
            self._carry_out(job)
        except BaseException as exc:
            job.error = exc
            # Enqueued kernels and copies still write; a further error is dropped.
            with contextlib.suppress(TransportError):
                self._reductions.drain(_FAILED_S)
            if self._pxn_routes is not None:
                self._pxn_routes.drain(_FAILED_S)
            raise
        finally:
            self._end(job)

    def abandon(self, job: GpuDirectJob, error: BaseException) -> None:
        """Let the stream continue without `finish`: the call failed elsewhere."""
        job.error = job.error or error
        if not job.is_over:
            self._end(job)

    def close(self, timeout_s: float) -> None:
        """Wait for the device, then free everything; no job is left.

        Raises
        ------
        TransportTimeout
            A device is still busy: its memory was not freed.
        """
        # Calls that were not finished.
        self._signal(self._number)
        until_s = self._clock() + timeout_s
        is_over = self._is_idle_in(timeout_s)
        if not is_over or not self._reductions.drain(max(0.0, until_s - self._clock())):
            raise self._still_busy("reduces", timeout_s)
        self._reductions.close()
        self._free()
        if self._pxn_routes is not None and not self._pxn_routes.close(timeout_s):
            raise self._still_busy("copies through others", timeout_s)
        self._memory.close()

    # Host

    def _carry_out(self, job: GpuDirectJob) -> None:
        with self._arrays.hold(job.call, self._reductions) as places:
            self._settle()
            self._run(job, *places)
        self._reductions.mark(self._last_word, 0)
        self._settle()

    def _end(self, job: GpuDirectJob) -> None:
        self._signal(job.number)
        self._events.append(job.before)
        job.is_over = True

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
        # The id stays unique while the layout is held here.
        found = self._cleared.get(id(layout))
        if found is None:
            if len(self._cleared) >= _MOST_LAYOUTS:
                self._cleared.pop(next(iter(self._cleared)))
            found = self._cleared[id(layout)] = (layout, cleared(layout))
        return found[1]

    def _await(self, event: Event) -> None:
        until_s = self._clock() + self._config.timeout_s
        while not self._device.synchronize(event, _LOOK_S):
            self._require_time(until_s, "the GPU has not done what its stream was given before")

    def _settle(self) -> None:
        """Wait for copies that nothing else waits for."""
        until_s = self._clock() + self._config.timeout_s
        while not self._reductions.drain(_LOOK_S):
            self._require_time(until_s, "the GPU has not done its copies of a collective")

    def _require_time(self, until_s: float, what: str) -> None:
        self._engine.check()
        if self._clock() >= until_s:
            raise TransportTimeout(
                f"rank {self._rank}: {what} in {self._config.timeout_s:g} s; look for a kernel "
                "that hangs, or raise R2CC_TIMEOUT_S",
                rank=self._rank,
                status="TIMEOUT",
            )


#: Interval of checks for the end of the communicator while waiting for the device.
_LOOK_S = 0.05
#: Longest waits for the kernels, and then the copies, of a failed call.
_FAILED_S = 5.0
_MOST_LAYOUTS = 256

__all__ = ["GpuDirectBackend", "GpuDirectJob"]
