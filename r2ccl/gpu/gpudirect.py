"""Collectives on device memory over RDMA NICs: slices travel from and to the memory itself.

Theory of operation
-------------------
A call goes the way of one on host memory: the same plan, lanes, links and repairs. What differs is
that its spaces are device memory which every NIC has registered, and that slices are reduced by
kernels (`r2ccl.gpu.device_reduction`). All the device is given at the call is to wait, on a stream
of this room's own, for the gate: a word in pinned memory that counts calls. The host, in the
communicator's worker, waits for what the caller's stream was given before, runs the collective to
the end of its last kernel, and lets the gate go on. A call that fails opens the gate too: what is
there then is worthless, the communicator has ended, and no stream hangs.

*What NICs wrote* may be read by a kernel of the caller that was launched before they did, and waits
behind the gate. So the last work of every call is given to the device after the last completion was
polled, and the gate opens once that work is known to be done.

*What a call needs* of memory and of kernels is made in `GpuDirectBackend.prepare`, before the device is given
anything that waits, because that may wait for the device. What only the plan knows (scratch of some
schedules, more landing places than there ever were) is allocated in the worker instead.

*Groups.* A call may be one of some ranks only, entered by what `begin` is given; see
`r2ccl.gpu.hierarchical`.

*Small calls* are for another way: `GpuDirectBackend.supports`.

Must not import a transport but its interface. Invariants: memory is registered while slices of it
travel; the gate only goes up, in the order of calls.
"""

from __future__ import annotations

import contextlib

import msgspec

from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.device.base import Device, Event, Stream
from r2ccl.errors import TransportError, TransportTimeout
from r2ccl.gpu.device_reduction import ReductionKernels, ReductionStream
from r2ccl.gpu.host_signal import LINE_NBYTES, SignalledStream
from r2ccl.gpu.operands import DeviceOperands, forms_of
from r2ccl.gpu.pxn.routes import PxnRoutes
from r2ccl.gpu.registered_memory import AreaPurpose, RegisteredDeviceMemory
from r2ccl.gpu.staged import DeviceCall
from r2ccl.gpu.staging import StagingBuffers, nbytes_of
from r2ccl.kernels.cuda.form import Form
from r2ccl.planning.lowering import Layout, cleared
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.entry import Enter
from r2ccl.runtime.executor import LandingPool, LaneRun


class GpuDirectJob(msgspec.Struct, eq=False):
    """The host's part of a call.

    ``enter`` enters it; ``before`` is done when earlier work on its arrays is; ``number`` is the
    call's at the gate. ``error`` is what spoiled it, if anything did.
    """

    call: DeviceCall
    enter: Enter
    before: Event
    number: int
    is_over: bool = False
    error: BaseException | None = None


class GpuDirectBackend(SignalledStream):
    """Collectives of one rank on the memory of one device; a `r2ccl.gpu.collectives.GpuBackend`.

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
        BackendSelector to far NICs; owned.
    config : Config
    clock : Clock
    """

    def __init__(
        self,
        device: Device,
        kernels: ReductionKernels,
        *,
        engine: Engine,
        enter: Enter,
        memory: RegisteredDeviceMemory,
        pxn_routes: PxnRoutes | None,
        config: Config,
        clock: Clock,
    ) -> None:
        super().__init__(device, engine.progress.rank, nlines=2)
        self._kernels = kernels
        self._engine = engine
        self._enter = enter
        self._memory = memory
        self._pxn_routes = pxn_routes
        self._config = config
        self._clock = clock
        self._nranks = engine.progress.nranks
        self._pool = LandingPool(memory.place)
        self._reductions = ReductionStream(device, kernels)
        #: A word that only gives the device something to do last.
        self._last_word = int(self._pinned.ctypes.data) + LINE_NBYTES
        self._number = 0
        self._arrays = StagingBuffers(device, memory, self._rank, self._nranks)
        self._prepared: set[Form] = set()
        #: Layouts of plans, and what they become here.
        self._cleared: dict[int, tuple[Layout, Layout]] = {}

    def supports(self, call: DeviceCall, nranks: int = 0) -> bool:
        """Whether a call of so many ranks, 0: all, is large enough for this way; alike on them.

        Where a rank's part is one eager slice, a window's two copies through pinned memory cost
        less than a kernel for each step does.
        """
        return nbytes_of(call.signature) > self._config.eager_nbytes * (nranks or self._nranks)

    def is_prepared(self, call: DeviceCall) -> bool:
        """See `GpuBackend`."""
        is_route_due = self._pxn_routes is not None and self._pxn_routes.are_due
        return (
            not is_route_due
            and self._prepared.issuperset(forms_of(call.signature))
            and self._arrays.are_ready(call)
        )

    def prepare(self, call: DeviceCall) -> None:
        """See `GpuBackend`; opens pxn_routes, loads kernels, makes memory: for a new size, array, operation.

        Raises
        ------
        TransportError
            The device failed, or there is no memory.
        """
        self._memory.tidy()
        if self._pxn_routes is not None:
            self._pxn_routes.open()
        for form in forms_of(call.signature):
            if form not in self._prepared:
                self._kernels.prepare(form)
                self._prepared.add(form)
        self._arrays.make_ready(call)

    def begin(
        self, call: DeviceCall, stream: Stream, enter: Enter | None = None, widest: int = 0
    ) -> tuple[GpuDirectJob, Event]:
        """Have the device wait for the call's end; the caller's `stream` is not touched but read.

        Parameters
        ----------
        call : DeviceCall
        stream : Stream
        enter : callable, optional
            Enters it; default: as one of all ranks.
        widest : int, optional
            Of other ways; this one carries out every call as one collective.

        Returns
        -------
        GpuDirectJob
            For `finish` or `abandon`, one of which must follow, in the order of `begin`. Its
            ``error`` says what could not be given.
        Event
            Done when the result is there. To be given back with `recycle`.
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
        """Run the collective, and let the device go on; in the worker.

        Raises
        ------
        TransportTimeout
            The device did not end the work that the caller had given it before, or a kernel.
        TransportError
            The device failed, or there is no memory.
        R2cclError
            What ended the collective.
        """
        try:
            self.examine(job)
            self._await(job.before)
            self._carry_out(job)
        except BaseException as exc:
            job.error = exc
            # ReductionKernels and copies under way still write; they wait for nothing. What failed first is
            # told.
            with contextlib.suppress(TransportError):
                self._reductions.drain(_FAILED_S)
            if self._pxn_routes is not None:
                self._pxn_routes.drain(_FAILED_S)
            raise
        finally:
            self._end(job)

    def abandon(self, job: GpuDirectJob, error: BaseException) -> None:
        """Let the stream go on without `finish`: the call has failed elsewhere."""
        job.error = job.error or error
        if not job.is_over:
            self._end(job)

    def close(self, timeout_s: float) -> None:
        """Wait for the device, and free everything; no job is left.

        Raises
        ------
        TransportTimeout
            A device still works on it: memory was not freed.
        """
        # Of calls that nobody finished.
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

    # What the host does

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
            is_gauge=plan.is_gauge,
        )

        def make() -> list[LaneRun]:
            return [LaneRun(lane, operands, engine.progress, self._pool) for lane in layout.lanes]

        engine.run(plan.signature, make, layout.peers, self._reductions)

    def _cleared_of(self, layout: Layout) -> Layout:
        # The key names the layout for as long as it is held here.
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


#: The communicator's end is looked for this often while the device is waited for.
_LOOK_S = 0.05
#: How long the kernels, and then the copies, of a call that failed are waited for.
_FAILED_S = 5.0
_MOST_LAYOUTS = 256

__all__ = ["GpuDirectBackend", "GpuDirectJob"]
