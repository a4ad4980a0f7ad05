"""`FakeProcess`: base class of `FakeDevice` with the methods that `Device` does not have.

With these methods a test declares accesses of the host to pinned memory, and emulates memory and
streams of the library's caller, messages between processes, and writes of NICs. The board's lock is
held during each driver call of a process (`Board.entered`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from r2ccl.device.base import Stream
from r2ccl.errors import TransportError
from r2ccl.testing.fakedevice.board import FakeStream
from r2ccl.testing.fakedevice.gpu import FakeGpu
from r2ccl.testing.fakedevice.memory import Bytes, MemoryKind, MemoryPiece, Span, as_bytes
from r2ccl.testing.fakedevice.order import Access, Clock, Misuse, WouldHang, caller, join
from r2ccl.testing.fakedevice.work import FakeOperation

#: Handles CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
_LEGACY, _PER_THREAD = 1, 2


class FakeProcess:
    """Process on a `FakeGpu`; see `FakeDevice` for the parameters and the errors."""

    def __init__(self, gpu: FakeGpu, name: str, *, is_strict: bool, timeout_s: float) -> None:
        self.refusals: dict[str, str] = {}
        self._gpu = gpu
        self._name = name
        self._is_strict = is_strict
        self._timeout_s = timeout_s
        self._board = gpu.board
        self._card = gpu.number
        self._host = self._board.admit(name, self._card)
        #: Cards whose memory can be used by work of this device.
        self._reached = {self._card}
        self._streams: dict[int, FakeStream] = {}
        #: Default stream of each thread, as attribute ``default``.
        self._of_thread = threading.local()
        self._is_closed = False
        #: Streams that capture a graph.
        self._capturing: set[FakeStream] = set()

    @contextmanager
    def _called(self, method: str) -> Iterator[None]:
        with self._board.entered():
            if self._is_closed:
                raise Misuse.of(f"{method} of {self._name}, which is closed")
            if method in self.refusals:
                raise refusal(method, self.refusals[method])
            yield

    @contextmanager
    def _managing(self, method: str) -> Iterator[None]:
        """Enter a call that manages memory or loads a kernel.

        On a GPU with ``is_serial``, wait for all work of the process on the card first.
        """
        with self._called(method):
            if self._gpu.is_serial:
                what = f"{method} of {self._name}"
                self._wait(lambda: not self._unfinished(), what, self._unfinished)
                self._board.learn_all(self._host, self._name, self._card)
            yield

    def _unfinished(self) -> str:
        """Describe an operation of this device that has not run; return "" if there is none."""
        return next(iter(self._board.pending(self._name, self._card)), "")

    def _wait(self, is_over: Callable[[], bool], what: str, why: Callable[[], str]) -> None:
        """Wait inside a driver call until `is_over()` is true.

        `what` describes the call, and ``why()`` the operation that does not run, for the message.

        Raises
        ------
        WouldHang
            If the wait takes longer than ``FakeGpu.patience_s``.
        """
        if not self._board.wait_until(is_over, self._gpu.patience_s):
            raise WouldHang.by(what, why())

    def _enqueue(self, stream: FakeStream, operation: FakeOperation) -> None:
        """Append an operation to a stream, once its launch queue has room.

        On a GPU with ``is_blocking``, wait until the operation has finished.
        """
        if stream in self._capturing:
            raise Misuse.of(f"{operation.what}, whose stream captures a graph")
        limit = self._gpu.queue_limit
        queue = stream.queue
        if len(queue) >= limit:
            self._wait(lambda: len(queue) < limit, operation.what, lambda: queue[0].what)
        self._board.enqueue(stream, operation)
        if self._gpu.is_blocking:
            self._wait(lambda: operation.is_over, operation.what, lambda: queue[0].what)

    # Memory and streams

    def _find(self, address: int, nbytes: int) -> MemoryPiece:
        return self._board.space.find(self._name, self._reached, address, nbytes)

    def _own(self, address: int, kind: MemoryKind) -> Span:
        """Return this device's span of `kind` at `address`; raise Misuse if there is none."""
        span = self._find(address, 0).span
        if (
            span.address != address
            or span.kind is not kind
            or span.is_callers
            or span.card != self._card
        ):
            raise Misuse.of(
                f"{address:#x} is not the start of {kind.value} of this device: it is in {span}"
            )
        return span

    def _retire(self, span: Span, verb: str) -> None:
        doing = f"{verb} of {span}, at {caller()}"
        self._settle(lambda: not self._board.users(span))
        self._board.check_idle(span, self._host, doing)
        self._board.remove(span, doing)

    def _settle(self, is_over: Callable[[], bool]) -> None:
        """Unless `is_strict`, wait until `is_over()` is true, for at most `timeout_s`.

        After a wait that succeeded, the host knows of all work of this device that has run.
        """
        if not self._is_strict and self._board.wait_until(is_over, self._timeout_s):
            self._board.learn_all(self._host, self._name, self._card)

    def _new_stream(self, *, is_callers: bool) -> Stream:
        stream = self._board.add_stream(self._name, self._card, is_callers=is_callers)
        self._streams[stream.handle] = stream
        return Stream(stream.handle)

    def _stream(self, handle: Stream) -> FakeStream:
        """Return the stream of a handle; default streams are made on first use."""
        if handle in (0, _LEGACY):
            return self._default(self._streams, _LEGACY, _LEGACY)
        if handle == _PER_THREAD:
            return self._default(self._of_thread.__dict__, "default", _PER_THREAD)
        if handle not in self._streams:
            raise Misuse.of(f"{handle:#x} is not a stream of {self._name}")
        return self._streams[handle]

    def _default(self, among: dict[Any, FakeStream], key: Any, handle: int) -> FakeStream:
        if key not in among:
            among[key] = self._board.add_stream(self._name, self._card, handle, is_callers=True)
        return among[key]

    # Methods that `Device` does not have

    def caller_stream(self) -> Stream:
        """Make a stream that belongs to the library's caller: `close` does not wait for it."""
        with self._called("caller_stream"):
            return self._new_stream(is_callers=True)

    def capture(self, stream: Stream, *, is_capturing: bool = True) -> None:
        """Begin, or end, the capture of a graph by a stream.

        During the capture, calls that enqueue work on the stream raise `Misuse`.
        """
        with self._called("capture"):
            change = self._capturing.add if is_capturing else self._capturing.discard
            change(self._stream(stream))

    def caller_memory(self, nbytes: int, kind: MemoryKind = MemoryKind.DEVICE) -> int:
        """Allocate device, pooled or managed memory for the library's caller; return its address.

        The memory is freed by `free_caller_memory`, not by `close`.
        """
        with self._called("caller_memory"):
            if kind.is_host or kind is MemoryKind.MAPPED:
                raise Misuse.of(f"a caller cannot allocate {kind.value} on a device")
            space, card = self._board.space, self._card
            return space.allocate(self._name, card, nbytes, kind, is_callers=True).address

    def free_caller_memory(self, address: int) -> None:
        """Free memory from `caller_memory`.

        Other processes that have mapped the memory keep it, as on a real GPU.

        Raises
        ------
        Misuse
            If `address` is not the start of memory from `caller_memory` of this device.
        StillInUse
            If work on the memory, of this or another process, has not run, or the host does not
            know that the work of this process has finished.
        """
        with self._called("free_caller_memory"):
            span = self._find(address, 0).span
            if span.address != address or not span.is_callers or span.card != self._card:
                raise Misuse.of(f"{address:#x} is not the start of memory of the caller")
            span.nmappings = 0
            self._retire(span, "the caller's free")

    def host_reads(self, view: npt.NDArray[Any]) -> None:
        """Declare that the host reads the pinned memory of the contiguous array `view` now."""
        self._host_touches(Access.READ, view)

    def host_writes(self, view: npt.NDArray[Any]) -> None:
        """Declare that the host writes the pinned memory of the contiguous array `view` now."""
        self._host_touches(Access.WRITE, view)

    def _host_touches(self, access: Access, view: npt.NDArray[Any]) -> None:
        with self._called("host access"):
            self._touch(access, self._pinned(view))

    def _touch(self, access: Access, place: MemoryPiece) -> None:
        what = f"the host of {self._name}, which {access.value} {place} at {caller()}"
        self._board.touch(access, place, self._host, self._host.step(what))

    def _pinned(self, view: npt.NDArray[Any]) -> MemoryPiece:
        memory = as_bytes(view)
        place = self._board.space.at_host(self._name, memory.ctypes.data, memory.size)
        if place is None:
            raise Misuse.of(f"{self._name} has not pinned these {memory.size} bytes")
        return place

    def tell(self) -> Clock:
        """Return the host's clock, to be sent with a message; its receiver passes it to `hear`."""
        with self._called("tell"):
            return self._host.release()

    def hear(self, message: Clock) -> None:
        """Learn everything that another process knew when its `tell` returned `message`."""
        with self._called("hear"):
            join(self._host.clock, message)

    def read(self, address: int, nbytes: int) -> Bytes:
        """Return a copy of `nbytes` bytes at a GPU address; checked for races as a host read."""
        with self._called("read"):
            place = self._find(address, nbytes)
            self._touch(Access.READ, place)
            return place.view.copy()

    def write(self, address: int, data: npt.NDArray[Any]) -> None:
        """Write the contiguous array `data` to a GPU address; checked for races as a host write."""
        with self._called("write"):
            memory = as_bytes(data)
            place = self._find(address, memory.size)
            self._touch(Access.WRITE, place)
            place.view[:] = memory

    def nic_write(self, address: int, data: npt.NDArray[Any]) -> None:
        """Write the contiguous array `data` as a NIC, and poll the completion of the write.

        The bytes change at once. On a card that reorders NIC writes, only operations enqueued after
        a later `flush_remote_writes` are ordered after a write to the card's memory. Later accesses
        of the host and of NICs need no flush.

        Raises
        ------
        Misuse
            If the address is invalid, or in the memory of another GPU.
        Race
            If work that uses the memory is not ordered with the write.
        """
        with self._called("nic_write"):
            memory = as_bytes(data)
            place = self._find(address, memory.size)
            if place.span.card != self._card and not place.span.is_host:
                raise Misuse.of(
                    f"nic_write to {place}, which is in the memory of another GPU: call nic_write "
                    "of that GPU's FakeDevice"
                )
            what = f"a NIC of {self._name}, which writes {place} at {caller()}"
            self._gpu.touch_remotely(place, self._host, what)
            place.view[:] = memory

    def pending(self) -> list[str]:
        """Return descriptions of this device's operations that have not run."""
        return self._board.pending(self._name, self._card)


def refusal(method: str, status: str) -> TransportError:
    """Return the error for a call that the driver refuses with `status`."""
    return TransportError(f"{method} failed: {status}", status=status)


__all__ = ["FakeProcess", "refusal"]
