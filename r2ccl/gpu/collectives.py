"""Collectives on GPU memory, ordered on a stream and asynchronous to the host.

The caller's thread submits a call to the communicator's worker thread, lets the caller's stream
wait for the result, and returns. The worker executes the call with a backend (see `r2ccl.gpu`). If
the caller asked for a `Work`, no stream waits; the `Work` can make any stream wait.

Invariants: all ranks use the same backend for a call; arrays stay referenced until the device has
finished using them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from r2ccl.clock import monotonic
from r2ccl.device.base import Device, Stream
from r2ccl.errors import InvalidArgument, TransportError, TransportTimeout
from r2ccl.gpu.copied import CopiedBackend, is_copied
from r2ccl.gpu.hardware import Hardware
from r2ccl.gpu.host_signal import DeviceCall, DeviceJob
from r2ccl.gpu.plan_selector import PlanSelector
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.cuda import ANY_GPU, DeviceBuffer, streams_of
from r2ccl.runtime.arrays.streams import stream_of
from r2ccl.runtime.async_work import Task, Work, Worker
from r2ccl.runtime.participant import Participant

if TYPE_CHECKING:
    from r2ccl.gpu.backends import GpuBackend, GpuKernels
    from r2ccl.gpu.pxn.transport import PxnTransport

#: Function that opens the GPU with a given ordinal, and returns the GPU and its kernels.
OpenDevice: TypeAlias = "Callable[[int], tuple[Device, GpuKernels]]"
#: Function that returns the backends for a GPU, in order of preference, for the calls that
#: `CopiedBackend` does not execute; the last supports all these calls.
SelectBackends: TypeAlias = "Callable[[Device, GpuKernels], Sequence[GpuBackend]]"


#: Largest number of calls in progress: those that the worker has not finished. Each enqueues some
#: operations on the caller's stream, and the launch queue of a stream that waits has room for about
#: 1,024 operations.
_MOST_CALLS = 64


class _BorrowedArrays(NamedTuple):
    """A call whose arrays the device may still use.

    The device no longer uses them once ``task`` has ended and the event ``job.done`` is done.
    """

    task: Task
    job: DeviceJob
    request: Request


#: Arrays that a GPU may still use, because closing a communicator timed out or was interrupted.
#: They stay referenced until the process ends.
_never_dropped: list[deque[_BorrowedArrays]] = []


class _ActiveDevice(NamedTuple):
    """The GPU in use, the backends of its calls, and the arrays it still uses.

    ``copies`` executes the calls that run on copies of whole arrays in host memory; ``backends``
    execute all other calls. ``is_closed`` is set when all calls are done, just before the device is
    closed.
    """

    device: Device
    backends: Sequence[GpuBackend]
    copies: CopiedBackend
    borrowed: deque[_BorrowedArrays]
    is_closed: threading.Event


class DeviceOutcome:
    """Completion of one call on GPU memory; implements `r2ccl.runtime.async_work.Effects`.

    After the GPU was closed, the call counts as done.
    """

    def __init__(
        self, active: _ActiveDevice, job: DeviceJob, stream: Stream, backend: GpuBackend
    ) -> None:
        self._active = active
        self._job = job
        self._backend = backend
        self._stream = stream

    def is_done(self) -> bool:
        """Return whether the device has finished the call; the call's task must have ended."""
        return self._active.is_closed.is_set() or self._active.device.is_done(self._job.done)

    def synchronize(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the device; return whether it finished the call.

        If the call failed, raise its error. The call's task must have ended.
        """
        active = self._active
        is_over = active.is_closed.is_set() or active.device.synchronize(self._job.done, timeout_s)
        if is_over:
            self._backend.examine(self._job)
        return is_over

    def order(self, stream: Any) -> None:
        """Make work enqueued on `stream` from now on wait for the call; see `Effects.order`."""
        later = stream_of(stream, self._stream)
        if not self._active.is_closed.is_set():
            require_no_capture(self._active.device, later)
            self._backend.hold(later, self._job.number)


class DeviceCollectives:
    """Collectives of one communicator on GPU memory.

    The GPU is opened, and its backends are selected, when the first collective starts.

    Parameters
    ----------
    rank : int
    timeout_s : float
        Time limit of a call, in seconds.
    worker : Worker
        Executes the host's part of calls, in their order.
    check : callable
        Raises the error that ended the communicator, if it has ended.
    open_device : callable
        See `OpenDevice`.
    select_backends : callable
        See `SelectBackends`.
    run : callable
        Runs a request on host memory.
    """

    def __init__(
        self,
        rank: int,
        *,
        timeout_s: float,
        worker: Worker,
        check: Callable[[], None],
        open_device: OpenDevice,
        select_backends: SelectBackends,
        run: Callable[[Request], None],
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._worker = worker
        self._check = check
        self._open_device = open_device
        self._select_backends = select_backends
        self._run = run
        self._active: _ActiveDevice | None = None

    def start(self, request: Request, stream: Any, is_async: bool) -> Any:
        """Begin a collective, without waiting for its result.

        The first call also opens the GPU and selects the backends; see `BackendSelector.select` for
        the errors of the selection.

        Parameters
        ----------
        request : Request
            The call, with arrays in device memory.
        stream : object or None
            Stream argument of the caller; None selects the stream of the input array.
        is_async : bool
            True to return a `Work` instead of making the stream wait for the result.

        Returns
        -------
        Work or object
            With `is_async` a `Work`. Otherwise ``request.result``, which work enqueued on the
            stream from now on may use.

        Raises
        ------
        InvalidArgument
            If the arrays are not on the GPU of earlier calls, if `stream` is not a stream, or if
            `stream` or the stream of an array captures a CUDA graph.
        TransportError
            If the device or a NIC failed, memory is full, a kernel cannot be compiled, or the GPU
            is too old for the kernels (status ``GPU_TOO_OLD``). In the first call also if the
            driver is missing. The caller must end the communicator.
        TransportTimeout
            If the call needs kernels or memory that are not ready yet (`GpuBackend.prepare`), and
            earlier collectives do not finish in time; if 64 calls are in progress, and the oldest
            of them does not finish in time; or if another rank of the node stays 64 calls behind
            for too long.
        R2cclError
            If the communicator has ended.
        """
        source, output = request.source, request.output
        assert isinstance(source, DeviceBuffer)
        buffers = (source,) if output is None else (source, output)
        given, others = streams_of(stream, *buffers)
        self._check()
        streams = (given, *others)
        # All known ordinals are equal, and greater than `ANY_GPU`.
        ordinal = max(each.ordinal for each in buffers if isinstance(each, DeviceBuffer))
        active = self._open(ordinal, streams)
        with active.device.current():
            for each in streams:
                require_no_capture(active.device, each)
            return self._start(active, request, given, others, is_async)

    def _start(
        self,
        active: _ActiveDevice,
        request: Request,
        given: Stream,
        others: Sequence[Stream],
        is_async: bool,
    ) -> Any:
        self._drop_finished(active)
        call = _call_of(request)
        backends = (active.copies, *active.backends)
        backend = next(each for each in backends if each.supports(call))
        if not backend.is_prepared(call):
            self._await_calls()
            self._prepare(backend, call)
        self._await_room(active)
        for other in others:
            self._order(active.device, given, other, backend)
        job = backend.begin(call, given)
        weakref.finalize(job, backend.recycle, job.done).atexit = False
        task = self._worker.submit(partial(_finish, active.device, backend, job))
        active.borrowed.append(_BorrowedArrays(task, job, request))
        if is_async:
            outcome = DeviceOutcome(active, job, given, backend)
            return Work(task, request.result, self._timeout_s, outcome)
        for each in (given, *others):
            backend.hold(each, job.number)
        return request.result

    def _prepare(self, backend: GpuBackend, call: DeviceCall) -> None:
        try:
            backend.prepare(call)
        except InvalidArgument as exc:
            # The GPUs of other ranks may be newer: these ranks have begun the call, and wait until
            # the communicator ends. An InvalidArgument would not end it.
            raise TransportError(
                f"rank {self._rank}: {exc}", rank=self._rank, status="GPU_TOO_OLD"
            ) from exc

    def _await_calls(self) -> None:
        """Wait until the worker has executed all calls, as `GpuBackend.prepare` requires."""
        if not self._worker.drain(self._timeout_s):
            raise self._still_running()
        self._check()

    def _await_room(self, active: _ActiveDevice) -> None:
        """Wait until fewer than `_MOST_CALLS` calls are in progress."""
        if len(active.borrowed) >= _MOST_CALLS:
            if not active.borrowed[-_MOST_CALLS].task.wait(self._timeout_s):
                raise self._still_running()
            self._check()

    def _still_running(self) -> TransportTimeout:
        return TransportTimeout(
            f"rank {self._rank}: earlier collectives did not finish in {self._timeout_s:g} s; look "
            "for a rank that is late or a kernel that hangs, or raise the timeout (timeout_s= or "
            "R2CC_TIMEOUT_S)",
            rank=self._rank,
            status="TIMEOUT",
        )

    def close(self, timeout_s: float) -> None:
        """Wait for the device and free all resources; the worker must be idle.

        Parameters
        ----------
        timeout_s : float
            Time limit for each wait of a backend, in seconds; see `GpuBackend.close`.

        Raises
        ------
        TransportTimeout
            If the work of a backend on the device has not ended after such a wait. The memory of
            this backend and of the following ones is then not freed, the device is not closed, and
            the arrays that the device may still use stay referenced until the process ends.
            Also if other work on the device does not end within the device's own time limit. All
            backends are then closed, but the device is not.
        TransportError
            If a backend or the device could not free all its resources; the other backends were
            closed.
        """
        active, self._active = self._active, None
        if active is None:
            return
        try:
            failures = self._close_backends(active, timeout_s)
        except BaseException:
            _never_dropped.append(active.borrowed)
            raise
        active.borrowed.clear()
        active.is_closed.set()
        active.device.close()
        if failures:
            raise failures[0]

    @staticmethod
    def _close_backends(active: _ActiveDevice, timeout_s: float) -> list[TransportError]:
        failures: list[TransportError] = []
        for backend in (*active.backends, active.copies):
            try:
                backend.close(timeout_s)
            except TransportTimeout:
                raise
            except TransportError as exc:
                failures.append(exc)
        return failures

    @staticmethod
    def _order(device: Device, later: Stream, earlier: Stream, backend: GpuBackend) -> None:
        event = backend.take_event()
        device.record(event, earlier)
        device.wait(later, event)
        backend.recycle(event)

    def _open(self, ordinal: int, streams: Sequence[Stream]) -> _ActiveDevice:
        """Return the GPU in use; if there is none, open GPU `ordinal`, or GPU 0 for `ANY_GPU`."""
        active = self._active
        if active is None:
            active = self._active = self._make(max(ordinal, 0), streams)
        if ordinal not in (ANY_GPU, active.device.ordinal):
            raise InvalidArgument(
                f"rank {self._rank}: the array is on GPU {ordinal}, but this communicator uses GPU "
                f"{active.device.ordinal}, which its first call on GPU arrays opened: copy the "
                "array, or create another communicator"
            )
        return active

    def _make(self, ordinal: int, streams: Sequence[Stream]) -> _ActiveDevice:
        device, kernels = self._open_device(ordinal)
        try:
            for stream in streams:  # selecting backends allocates, which invalidates a capture
                require_no_capture(device, stream)
            copies = CopiedBackend(
                device, self._rank, run=self._run, check=self._check, clock=monotonic,
                timeout_s=self._timeout_s,
            )  # fmt: skip
            backends = self._select_backends(device, kernels)
            return _ActiveDevice(device, backends, copies, deque(), threading.Event())
        except BaseException:
            device.close()
            raise

    def _drop_finished(self, active: _ActiveDevice) -> None:
        """Drop references to arrays that the device no longer uses."""
        while active.borrowed:
            task, job, _ = active.borrowed[0]
            if not task.has_ended or not active.device.is_done(job.done):
                return
            active.borrowed.popleft()


def _finish(device: Device, backend: GpuBackend, job: DeviceJob) -> None:
    with device.current():
        backend.finish(job)


def require_no_capture(device: Device, stream: Stream) -> None:
    """Refuse a stream that captures a CUDA graph, before anything is enqueued on it.

    Raises
    ------
    InvalidArgument
        If `stream` captures a CUDA graph, or is the default stream while another stream captures.
    """
    if device.is_capturing(stream):
        raise InvalidArgument(
            f"stream {stream:#x} captures a CUDA graph, or is the default stream while another "
            "stream captures one; a graph cannot contain a collective: end the capture first, or "
            "capture the work before and after the collective in two graphs"
        )


def device_collectives(
    participant: Participant, *, hardware: Hardware, pxn: PxnTransport | None
) -> DeviceCollectives:
    """Return the `DeviceCollectives` of one communicator.

    Parameters
    ----------
    participant : Participant
        Runs the calls of the communicator.
    hardware : Hardware
    pxn : PxnTransport or None
        Transport that can send slices through other GPUs; None if it is not available. Only the
        job's first communicator uses it.
    """
    engine = participant.engine

    def select(device: Device, kernels: GpuKernels) -> Sequence[GpuBackend]:
        from r2ccl.gpu.backends import BackendSelector  # takes 18 ms with its kernels

        ranks_on: dict[str, list[int]] = {}
        for rank, host in enumerate(participant.hosts):
            ranks_on.setdefault(host, []).append(rank)
        selector = BackendSelector(
            engine,
            PlanSelector(engine, participant.plans),
            participant.on_host.run_plan,
            config=engine.config,
            nodes=list(ranks_on.values()),
            allgather=participant.collectives.allgather_bytes,
            labels=[participant.rails[rail].name for rail in engine.joined],
            hardware=hardware,
            pxn=None if engine.context.context_id else pxn,
        )
        return selector.select(device, kernels)

    return DeviceCollectives(
        engine.rank,
        timeout_s=engine.config.timeout_s,
        worker=participant.worker,
        check=engine.check,
        open_device=hardware.open,
        select_backends=select,
        run=participant.on_host.run,
    )


def _call_of(request: Request) -> DeviceCall:
    output = request.output
    return DeviceCall(
        request.signature,
        request.source.address,
        0 if output is None else output.address,
        request.schedule,
        request if is_copied(request) else None,
    )


__all__ = [
    "DeviceCollectives",
    "DeviceOutcome",
    "OpenDevice",
    "SelectBackends",
    "device_collectives",
    "require_no_capture",
]
