"""A GPU's primary context: calls with it current, waits, and the books of what was made in it.

The primary context is the one CuPy, Numba, torch and the CUDA runtime use: their streams and memory
are usable here, and what is made here there. Must not know what is made, only how it is freed.

A call looks whether the context is current on its thread, which costs one call of the driver; where
it is not, it is pushed and popped again, so that no thread is left with another context than it
had: the runtime takes a thread's device from it. A thread that makes many calls enters
`PrimaryContext.current` once around them.

Invariant: what was made is in the books until it was given back to the driver, so `close` frees all
of it, and nothing that another made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from r2ccl.clock import Clock
from r2ccl.device.bindings import Cuda
from r2ccl.errors import InternalError, TransportError, TransportTimeout

#: First pause of a wait after those of no length, and the longest, in seconds. A pause is as long
#: as all before it, so a wait ends at most that much, or the longest, too late.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
#: Polls that only yield the processor: short copies are done by then.
_NYIELDS = 8
#: Of cuCtxEnablePeerAccess, which has none.
_NO_FLAGS = 0

#: What is kept in the books, and the call that frees it: in the order of closing.
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
        The GPU, for messages.
    clock : Clock
    pause : callable
        ``pause(seconds)``.

    Raises
    ------
    TransportError
        The GPU is in use by another process alone, or has no memory left for a context.
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
        #: The driver's handle; None, which is no thread's context: closed.
        self._handle: int | None = int(cuda.call("cuDevicePrimaryCtxRetain", device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Have the context current on this thread, for a while."""
        self._push()
        try:
            yield
        finally:
            self._cuda.call("cuCtxPopCurrent")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver with the context current; see `Cuda.call`."""
        call = self._cuda.call
        if int(call("cuCtxGetCurrent")) == self._handle:
            return call(name, *arguments)
        self._push()
        try:
            return call(name, *arguments)
        finally:
            call("cuCtxPopCurrent")

    def _push(self) -> None:
        self._cuda.call("cuCtxPushCurrent", self._open())

    def _open(self) -> int:
        if self._handle is None:
            raise InternalError(f"{self._name} was used after it was closed")
        return self._handle

    def reach(self, peer: PrimaryContext) -> None:
        """Let work in this context use the memory of another GPU's; whoever asked for it before.

        It is never undone: another library of the process may use it too.

        Raises
        ------
        TransportError
            The driver's: ``CUDA_ERROR_TOO_MANY_PEERS``.
        """
        try:
            self.call("cuCtxEnablePeerAccess", peer._open(), _NO_FLAGS)
        except TransportError as exc:
            if exc.status != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    def keep(self, kind: str, handle: Any) -> int:
        """Enter what was made into the books; return its number."""
        number = int(handle)
        with self._lock:
            self._books[kind][number] = None
        return number

    def end(self, kind: str, number: int) -> None:
        """Give back what was made.

        Raises
        ------
        InternalError
            It is not in the books.
        TransportError
            The driver refused; it is out of the books none the less.
        """
        with self._lock:
            if number not in self._books[kind]:
                raise InternalError(
                    f"{kind} {number:#x} of {self._name} was not made here, or is gone"
                )
            del self._books[kind][number]
        self.call(_FREED_BY[kind], number)

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Poll, ever less often, whether `is_over` is true; return whether it came true in time."""
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
        """Wait for what was made, free it, release the context; again: nothing, or try again.

        Raises
        ------
        TransportTimeout
            Work did not end; nothing was freed, since the driver would wait for it for ever.
        TransportError
            The driver refused to free something; all else was freed.
        """
        if self._handle is None:
            return
        with self.current():
            unended = self._unended(timeout_s)
            if unended:
                raise TransportTimeout(
                    f"{self._name}: work of {', '.join(unended)} has not ended within "
                    f"{timeout_s:g} s, and nothing was freed: look at what it waits for, then "
                    "close again",
                    status="CUDA_ERROR_NOT_READY",
                )
            failures = [failure for kind in _FREED_BY for failure in self._free_all(kind)]
        self._handle = None
        self._cuda.call("cuDevicePrimaryCtxRelease", self._device)
        if failures:
            raise TransportError(
                f"{self._name} could not free {len(failures)} of its things: {failures[0]}",
                status=failures[0].status,
            )

    def _unended(self, timeout_s: float) -> list[str]:
        """Wait for the streams and the events; say which have not ended in time."""
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
            return self._cuda.is_done(query, number)
        except TransportError:  # a failed context runs nothing any more; freeing will tell of it
            return True

    def _free_all(self, kind: str) -> list[TransportError]:
        """Free all of a kind, the last made first; return what the driver refused."""
        failures = []
        for number in reversed(tuple(self._books[kind])):
            try:
                self.end(kind, number)
            except TransportError as exc:
                failures.append(exc)
        return failures


__all__ = ["PrimaryContext"]
