"""Primary context of a GPU: driver calls, waits with a timeout, and a registry of resources.

CuPy, Numba, torch and the CUDA runtime use the primary context too, so they can use the streams and
memory created here, and this library can use theirs.

Each call pushes the context and pops it afterwards, so every thread keeps its own current context,
from which the CUDA runtime derives the thread's device. During the call, the capture mode of the
thread is thread-local. In the default mode, the driver would refuse many calls, such as
cuEventQuery, while another thread captures a CUDA graph, and would invalidate that graph. To set
context and mode, and to restore both, takes four driver calls. A thread that makes many calls
therefore enters `PrimaryContext.current` once around all of them.

Invariant: a resource stays registered from `PrimaryContext.keep` until `PrimaryContext.end`, and
`close` frees exactly the registered resources. It frees no resource of another library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from r2ccl.clock import Clock
from r2ccl.device.bindings import Cuda
from r2ccl.errors import InternalError, TransportError, TransportTimeout

#: Shortest and longest pause between two polls, in seconds, unless the timeout ends a pause sooner.
#: Between these limits, a pause is as long as the wait has lasted so far.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
#: After each of the first `_NYIELDS` polls, a wait only yields the processor; after later polls, it
#: pauses. Short copies are done by then.
_NYIELDS = 8
#: Driver function that sets the capture mode of a thread, and returns the previous mode.
_EXCHANGE_MODE = "cuThreadExchangeStreamCaptureMode"
#: Flags of cuCtxEnablePeerAccess, which defines none.
_NO_FLAGS = 0

#: Kinds of registered resources and the driver functions that free them, in the order of closing.
_FREED_BY = {
    "event": "cuEventDestroy",
    "stream": "cuStreamDestroy",
    "mapped allocation": "cuIpcCloseMemHandle",
    "module": "cuModuleUnload",
    "pinning": "cuMemHostUnregister",
    "pinned memory": "cuMemFreeHost",
    "device memory": "cuMemFree",
}


class PrimaryContext:
    """The primary context of a GPU, retained until `close`.

    Parameters
    ----------
    cuda : Cuda
    device : CUdevice
    name : str
        Name of the GPU in messages.
    clock : Clock
    pause : callable
        ``pause(seconds)`` sleeps between polls.

    Raises
    ------
    TransportError
        If the driver refuses, for example because another process uses the GPU exclusively or the
        GPU has no memory left for a context.
    """

    def __init__(
        self, cuda: Cuda, device: Any, name: str, *, clock: Clock, pause: Callable[[float], None]
    ) -> None:
        self._cuda = cuda
        self._device = device
        self._name = name
        self._clock = clock
        self._pause = pause
        self._books: dict[str, dict[int, None]] = {kind: {} for kind in _FREED_BY}
        self._lock = threading.Lock()
        #: Per thread: ``is_inside`` is True inside of `current`.
        self._entered = threading.local()
        #: The driver's handle of the context; None after `close`.
        self._handle: int | None = int(cuda.call("cuDevicePrimaryCtxRetain", device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread inside the ``with`` block.

        While a thread captures a CUDA graph in the global mode, which is the default, the driver
        refuses potentially unsafe calls, such as cuMemAlloc and cuEventQuery, of all other threads,
        and invalidates the capture. Calls inside the block are not refused because of captures in
        other threads, and do not invalidate these captures, unless the calls use the legacy default
        stream.

        Raises
        ------
        InternalError
            If the context is closed.
        """
        if getattr(self._entered, "is_inside", False):
            yield
            return
        self._cuda.call("cuCtxPushCurrent", self._open())
        call, modes = self._cuda.call, self._cuda.api.CUstreamCaptureMode
        try:
            before = call(_EXCHANGE_MODE, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            self._entered.is_inside = True
            try:
                yield
            finally:
                self._entered.is_inside = False
                call(_EXCHANGE_MODE, before)
        finally:
            call("cuCtxPopCurrent")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function with the context current; see `Cuda.call`.

        Raises
        ------
        InternalError
            If the context is closed.
        TransportError
            If the function fails.
        """
        return self._with_context(self._cuda.call, name, *arguments)

    def is_done(self, name: str, handle: int) -> bool:
        """Return whether an event or a stream is done; see `Cuda.is_done`.

        Raises
        ------
        InternalError
            If the context is closed.
        TransportError
            If earlier work failed.
        """
        return bool(self._with_context(self._cuda.is_done, name, handle))

    def _with_context(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(self._entered, "is_inside", False):  # saves the cost of `current`
            return function(*arguments)
        with self.current():
            return function(*arguments)

    def _open(self) -> int:
        if self._handle is None:
            raise InternalError(f"{self._name} was used after it was closed")
        return self._handle

    def reach(self, peer: PrimaryContext) -> None:
        """Let work in this context access the memory of `peer`, the context of another GPU.

        The call does nothing if the access is enabled already, by this or another library of the
        process. The access is never disabled, because other libraries may use it too.

        Raises
        ------
        InternalError
            If one of the two contexts is closed.
        TransportError
            If the driver refuses, for example with status ``CUDA_ERROR_TOO_MANY_PEERS``.
        """
        try:
            self.call("cuCtxEnablePeerAccess", peer._open(), _NO_FLAGS)
        except TransportError as exc:
            if exc.status != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    def keep(self, kind: str, handle: Any) -> int:
        """Register a resource, so that `close` frees it; return its handle as an integer.

        `kind` is a key of `_FREED_BY`.
        """
        number = int(handle)
        with self._lock:
            self._books[kind][number] = None
        return number

    def end(self, kind: str, number: int) -> None:
        """Free the resource of `kind` that `keep` registered with the handle `number`.

        Raises
        ------
        InternalError
            If the resource is not registered.
        TransportError
            If the driver refuses to free the resource. The resource is then no longer registered.
        """
        with self._lock:
            if number not in self._books[kind]:
                raise InternalError(
                    f"{kind} {number:#x} was not created by {self._name}, or is already freed"
                )
            del self._books[kind][number]
        self.call(_FREED_BY[kind], number)

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Poll `is_over` at growing intervals for up to `timeout_s` seconds.

        Return whether `is_over` returned True in that time.
        """
        start = self._clock()
        npolls = 0
        while not is_over():
            passed_s = self._clock() - start
            if passed_s >= timeout_s:
                return False
            npolls += 1
            pause_s = min(max(passed_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S, timeout_s - passed_s)
            self._pause(pause_s if npolls > _NYIELDS else 0.0)
        return True

    def close(self, timeout_s: float) -> None:
        """Wait for all registered streams and events, then free all resources and the context.

        `timeout_s` is the longest time in seconds to wait for the streams and events. After a
        timeout, `close` can be called again; otherwise a further call does nothing.

        Raises
        ------
        TransportTimeout
            If work did not end within `timeout_s`. Nothing was freed, because the driver would wait
            for the work without a deadline.
        TransportError
            If the driver refused to free a resource. All other resources were freed.
        """
        if self._handle is None:
            return
        with self.current():
            unended = self._unended(timeout_s)
            if unended:
                raise TransportTimeout(
                    f"{self._name}: the work of {', '.join(unended)} did not end within "
                    f"{timeout_s:g} s, so nothing was freed: check what that work waits for, then "
                    "close again",
                    status="CUDA_ERROR_NOT_READY",
                )
            failures = [failure for kind in _FREED_BY for failure in self._free_all(kind)]
        self._handle = None
        self._cuda.call("cuDevicePrimaryCtxRelease", self._device)
        if failures:
            raise TransportError(
                f"{self._name} could not free {len(failures)} of its resources: {failures[0]}",
                status=failures[0].status,
            )

    def _unended(self, timeout_s: float) -> list[str]:
        """Wait for all streams and events; return a description of each that did not end in time.

        `timeout_s` is the longest time to wait, in seconds.
        """
        pending = [
            (query, kind, number)
            for query, kind in (("cuStreamQuery", "stream"), ("cuEventQuery", "event"))
            for number in self._books[kind]
        ]

        def is_over() -> bool:
            pending[:] = [each for each in pending if not self._has_ended(each[0], each[2])]
            return not pending

        self.wait_until(is_over, timeout_s)
        return [f"{kind} {number:#x}" for _, kind, number in pending]

    def _has_ended(self, query: str, number: int) -> bool:
        try:
            return self.is_done(query, number)
        except TransportError:  # a failed context runs no more work; freeing reports the error
            return True

    def _free_all(self, kind: str) -> list[TransportError]:
        """Free all resources of a kind, newest first; return the driver's errors."""
        failures = []
        for number in reversed(tuple(self._books[kind])):
            try:
                self.end(kind, number)
            except TransportError as exc:
                failures.append(exc)
        return failures


__all__ = ["PrimaryContext"]
