"""A process on a fake GPU: what its calls have in common, and what its host says of itself.

Must not know the interface `Device`. Invariant: whatever a process does, it does in one call of the
board (`Board.entered`).
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
from r2ccl.testing.fakedevice.order import Access, Clock, Misuse, caller, join

#: CU_STREAM_LEGACY, CU_STREAM_PER_THREAD.
_LEGACY, _PER_THREAD = 1, 2


class FakeProcess:
    """A process on a `FakeGpu`; see `FakeDevice` for the parameters."""

    def __init__(self, gpu: FakeGpu, name: str, *, is_strict: bool, timeout_s: float) -> None:
        self.refusals: dict[str, str] = {}
        self._gpu = gpu
        self._name = name
        self._is_strict = is_strict
        self._timeout_s = timeout_s
        self._board = gpu.board
        self._card = gpu.number
        self._host = self._board.admit(name, self._card)
        #: Cards whose memory the work given here can use.
        self._reached = {self._card}
        self._streams: dict[int, FakeStream] = {}
        #: The default stream of each thread.
        self._threads: dict[int, FakeStream] = {}
        self._is_closed = False

    @contextmanager
    def _called(self, method: str) -> Iterator[None]:
        with self._board.entered():
            if self._is_closed:
                raise Misuse.of(f"{method} of {self._name}, which is closed")
            if method in self.refusals:
                raise refusal(method, self.refusals[method])
            yield

    # What is there

    def _find(self, address: int, nbytes: int) -> MemoryPiece:
        return self._board.space.find(self._name, self._reached, address, nbytes)

    def _own(self, address: int, kind: MemoryKind) -> Span:
        """Return what begins at `address` and was made here."""
        span = self._find(address, 0).span
        if (
            span.address != address
            or span.kind is not kind
            or span.is_callers
            or span.card != self._card
        ):
            raise Misuse.of(f"{address:#x} is no {kind.value} made here: it is in {span}")
        return span

    def _retire(self, span: Span, verb: str) -> None:
        doing = f"{verb} of {span}, at {caller()}"
        self._settle(lambda: not self._board.users(span))
        self._board.check_idle(span, self._host, doing)
        self._board.remove(span, doing)

    def _settle(self, is_over: Callable[[], bool]) -> None:
        """Wait as the driver does, where that is allowed."""
        if not self._is_strict and self._board.wait_until(is_over, self._timeout_s):
            self._board.learn_all(self._host, self._card)

    def _new_stream(self, *, is_callers: bool) -> Stream:
        stream = self._board.add_stream(self._name, self._card, is_callers=is_callers)
        self._streams[stream.handle] = stream
        return Stream(stream.handle)

    def _stream(self, handle: Stream) -> FakeStream:
        """Return a stream; the default ones are made when they are first named."""
        if handle in (0, _LEGACY):
            return self._default(self._streams, _LEGACY, _LEGACY)
        if handle == _PER_THREAD:
            return self._default(self._threads, threading.get_ident(), _PER_THREAD)
        if handle not in self._streams:
            raise Misuse.of(f"{handle:#x} is no stream of {self._name}")
        return self._streams[handle]

    def _default(self, among: dict[int, FakeStream], key: int, handle: int) -> FakeStream:
        if key not in among:
            among[key] = self._board.add_stream(self._name, self._card, handle, is_callers=True)
        return among[key]

    # What only a fake has

    def caller_stream(self) -> Stream:
        """Make a stream as the library's caller does: `close` does not wait for it."""
        with self._called("caller_stream"):
            return self._new_stream(is_callers=True)

    def caller_memory(self, nbytes: int, kind: MemoryKind = MemoryKind.DEVICE) -> int:
        """Allocate as the library's caller does: device memory, of a pool, or managed."""
        with self._called("caller_memory"):
            if kind.is_host or kind is MemoryKind.MAPPED:
                raise Misuse.of(f"{kind.value} is not what a caller allocates on a device")
            space, card = self._board.space, self._card
            return space.allocate(self._name, card, nbytes, kind, is_callers=True).address

    def free_caller_memory(self, address: int) -> None:
        """Free what `caller_memory` returned: no work of the library may be left on it."""
        with self._called("free_caller_memory"):
            span = self._find(address, 0).span
            if span.address != address or not span.is_callers or span.card != self._card:
                raise Misuse.of(f"{address:#x} is no memory of the caller")
            self._retire(span, "the caller's free")

    def host_reads(self, view: npt.NDArray[Any]) -> None:
        """Say that the host reads pinned memory now."""
        self._host_touches(Access.READ, view)

    def host_writes(self, view: npt.NDArray[Any]) -> None:
        """Say that the host writes pinned memory now."""
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
            raise Misuse.of(f"{memory.size} bytes that {self._name} has not pinned")
        return place

    def tell(self) -> Clock:
        """Return what the host knows: to `hear` in a process that it sends a message."""
        with self._called("tell"):
            return self._host.release()

    def hear(self, message: Clock) -> None:
        """Take what another process told."""
        with self._called("hear"):
            join(self._host.clock, message)

    def read(self, address: int, nbytes: int) -> Bytes:
        """Return a copy of memory, as the host reads it now."""
        with self._called("read"):
            place = self._find(address, nbytes)
            self._touch(Access.READ, place)
            return place.view.copy()

    def write(self, address: int, data: npt.NDArray[Any]) -> None:
        """Write memory, as the host does it now."""
        with self._called("write"):
            memory = as_bytes(data)
            place = self._find(address, memory.size)
            self._touch(Access.WRITE, place)
            place.view[:] = memory

    def nic_write(self, address: int, data: npt.NDArray[Any]) -> None:
        """Write memory as a NIC does whose completion the host has polled.

        On a card that reorders such writes, work that is given before `flush_remote_writes` may
        miss it; the host, and NICs, do not.
        """
        with self._called("nic_write"):
            memory = as_bytes(data)
            place = self._find(address, memory.size)
            if place.span.card != self._card and not place.span.is_host:
                raise Misuse.of(f"a NIC's write to {place} is said of another GPU")
            what = f"a NIC of {self._name}, which writes {place} at {caller()}"
            self._gpu.touch_remotely(place, self._host, what)
            place.view[:] = memory

    def pending(self) -> list[str]:
        """Say what the streams of this process were given here and has not run."""
        return self._board.pending(self._name, self._card)


def refusal(method: str, status: str) -> TransportError:
    """Return what a call raises that the driver refuses."""
    return TransportError(f"{method} failed: {status}", status=status)


__all__ = ["FakeProcess", "refusal"]
