"""Collectives on device memory: what is given to the device at the call, what the host does later.

The caller's thread gives the device everything at once and goes on; the communicator's worker does
the host's part. Which backend a call supports was found out by `r2ccl.gpu.backends`. The caller's stream
waits for the result unless a `Work` was asked for, which can order any stream after it.

Must not import links. Invariants: all ranks take the same backend; arrays are kept alive until the
device is done with them, whatever the caller does with its own references.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from r2ccl.device.base import Device, Event, Stream
from r2ccl.errors import InvalidArgument, TransportError, TransportTimeout
from r2ccl.gpu.host_signal import HostJob
from r2ccl.gpu.staged import DeviceCall
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.cuda import DeviceBuffer, streams_of
from r2ccl.runtime.arrays.streams import stream_of
from r2ccl.runtime.async_work import Task, Work, Worker

if TYPE_CHECKING:
    from r2ccl.gpu.backends import GpuBackend, GpuKernels

#: Gives the GPU of a number, and its kernels.
OpenDevice: TypeAlias = "Callable[[int], tuple[Device, GpuKernels]]"
#: Gives the backends calls on a GPU's memory can take, the best first; the last supports all.
SelectBackends: TypeAlias = "Callable[[Device, GpuKernels], Sequence[GpuBackend]]"


class _BorrowedArrays(NamedTuple):
    """Arrays that the device works on until `done`."""

    done: Event
    request: Request
    backend: GpuBackend


class _ActiveDevice(NamedTuple):
    """The GPU in use, the backends its calls can take, and the arrays it still works on.

    ``is_closed`` is set before the device is closed, which is done with all calls then.
    """

    device: Device
    backends: Sequence[GpuBackend]
    borrowed: deque[_BorrowedArrays]
    is_closed: threading.Event


class DeviceOutcome:
    """What a call does to device memory, also once the GPU is closed: its `Effects`."""

    def __init__(
        self, active: _ActiveDevice, job: HostJob, stream: Stream, backend: GpuBackend
    ) -> None:
        self._active = active
        self._job = job
        self._backend = backend
        self._done = backend.mark()
        self._stream = stream
        weakref.finalize(self, backend.recycle, self._done)

    def is_done(self) -> bool:
        """See `Effects`."""
        return self._active.is_closed.is_set() or self._active.device.is_done(self._done)

    def synchronize(self, timeout_s: float) -> bool:
        """See `Effects`."""
        active = self._active
        is_over = active.is_closed.is_set() or active.device.synchronize(self._done, timeout_s)
        if is_over:
            self._backend.examine(self._job)
        return is_over

    def order(self, stream: Any) -> None:
        """See `Effects`; by default it is the stream that was current at the call."""
        later = stream_of(stream, self._stream)
        if not self._active.is_closed.is_set():
            self._active.device.wait(later, self._done)


class DeviceCollectives:
    """Device memory's part of a communicator.

    Parameters
    ----------
    rank : int
    timeout_s : float
        Of a call.
    worker : Worker
        Does the host's part, in the order of the calls.
    check : callable
        Raises what ended the communicator, if anything did.
    open_device : callable
        Gives the GPU of a number.
    select_backends : callable
        Finds out with all ranks which backends calls can take.
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
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._worker = worker
        self._check = check
        self._open_device = open_device
        self._select_backends = select_backends
        self._active: _ActiveDevice | None = None

    def start(self, request: Request, stream: Any, is_async: bool) -> Any:
        """Begin a collective; return its result, or a `Work`.

        Parameters
        ----------
        request : Request
            On device memory.
        stream : object or None
            As callers pass it.
        is_async : bool
            Whether a `Work` is returned, and the stream goes on without the result.

        Raises
        ------
        InvalidArgument
            Another GPU than before, or no stream.
        TransportError
            The device failed; the communicator ends.
        R2cclError
            What ended the communicator before.
        """
        source, output = request.source, request.output
        assert isinstance(source, DeviceBuffer)
        buffers = (source,) if output is None else (source, output)
        given, others = streams_of(stream, *buffers)
        self._check()
        active = self._open(source.ordinal)
        self._let_go(active)
        call = _call_of(request)
        backend = next(each for each in active.backends if each.supports(call))
        if not backend.is_prepared(call):
            self._await_calls()
            backend.prepare(call)
        for other in others:
            self._order(active.device, given, other, backend)
        task, job, done = self._begin(backend, call, given)
        active.borrowed.append(_BorrowedArrays(done, request, backend))
        if is_async:
            outcome = DeviceOutcome(active, job, given, backend)
            return Work(task, request.result, self._timeout_s, outcome)
        for each in (given, *others):
            active.device.wait(each, done)
        return request.result

    def _await_calls(self) -> None:
        """Wait until no stream waits for the worker: what waits for the device may be done then."""
        if not self._worker.drain(self._timeout_s):
            raise TransportTimeout(
                f"rank {self._rank}: collectives begun before are not over in "
                f"{self._timeout_s:g} s; look for a kernel that hangs, or raise R2CC_TIMEOUT_S",
                rank=self._rank,
                status="TIMEOUT",
            )
        self._check()

    def close(self, timeout_s: float) -> None:
        """Wait for the device and free everything; the worker has nothing left to do.

        Raises
        ------
        TransportTimeout
            The device still works: what it works on, and what is closed after that, is kept.
        TransportError
            Something could not be freed; all else was.
        """
        active, self._active = self._active, None
        if active is None:
            return
        failures: list[TransportError] = []
        for backend in active.backends:
            try:
                backend.close(timeout_s)
            except TransportTimeout:
                raise
            except TransportError as exc:
                failures.append(exc)
        active.borrowed.clear()
        active.is_closed.set()
        active.device.close()
        if failures:
            raise failures[0]

    def _begin(
        self, backend: GpuBackend, call: DeviceCall, stream: Stream
    ) -> tuple[Task, HostJob, Event]:
        """Give the device its part, and the worker the host's."""
        job, done = backend.begin(call, stream)
        # Also of a call that could not be begun: what was begun of it must end.
        task = self._worker.submit(lambda: backend.finish(job))
        if job.error is not None:
            task.wait()
            backend.recycle(done)
            task.succeed()
        return task, job, done

    @staticmethod
    def _order(device: Device, later: Stream, earlier: Stream, backend: GpuBackend) -> None:
        event = backend.take_event()
        device.record(event, earlier)
        device.wait(later, event)
        backend.recycle(event)

    def _open(self, ordinal: int) -> _ActiveDevice:
        active = self._active
        if active is None:
            active = self._active = self._make(ordinal)
        if active.device.ordinal != ordinal:
            raise InvalidArgument(
                f"rank {self._rank}: an array on GPU {ordinal}, but this communicator works on GPU "
                f"{active.device.ordinal}, where its first one was: copy it, or make another "
                "communicator"
            )
        return active

    def _make(self, ordinal: int) -> _ActiveDevice:
        device, kernels = self._open_device(ordinal)
        try:
            return _ActiveDevice(
                device, self._select_backends(device, kernels), deque(), threading.Event()
            )
        except BaseException:
            device.close()
            raise

    def _let_go(self, active: _ActiveDevice) -> None:
        """Let go of arrays the device is done with."""
        while active.borrowed and active.device.is_done(active.borrowed[0].done):
            arrays = active.borrowed.popleft()
            arrays.backend.recycle(arrays.done)


def _call_of(request: Request) -> DeviceCall:
    output = request.output
    return DeviceCall(
        request.signature,
        request.source.address,
        0 if output is None else output.address,
        request.schedule,
    )


__all__ = ["DeviceCollectives", "DeviceOutcome", "OpenDevice", "SelectBackends"]
