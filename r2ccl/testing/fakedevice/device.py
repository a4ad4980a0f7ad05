"""`FakeDevice`: implementation of `Device` for one process, on a machine without a GPU.

Every call checks its addresses and handles, and that the resources it frees are not in use. The
fake cannot see direct accesses of the host to pinned memory, so the host declares them with
`host_reads` and `host_writes`.

A call with undefined behavior or an invalid argument raises `WrongOrder`, which the library does
not handle; every later driver call raises the same error. A refusal of the driver that the library
handles raises `TransportError` with a status.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from r2ccl.device.base import Argument, Device, Event, Kernel, Stream
from r2ccl.errors import TransportError
from r2ccl.testing.fakedevice.gpu import FakeGpu
from r2ccl.testing.fakedevice.kernels import FakeKernel, Grid, Launch
from r2ccl.testing.fakedevice.memory import Bytes, MemoryKind, MemoryPiece
from r2ccl.testing.fakedevice.order import Clock, Misuse, StillInUse, caller, join
from r2ccl.testing.fakedevice.process import FakeProcess, refusal
from r2ccl.testing.fakedevice.work import (
    Copy,
    FakeOperation,
    Record,
    SetWord,
    WaitForRecord,
    WaitForWord,
)

_HANDLE_NBYTES = 64
_WORD_NBYTES = 4
#: Largest number of threads per block, on every GPU.
_MOST_THREADS = 1024

_UNKNOWN = "may be in progress: the host does not know that it is over"


class FakeDevice(FakeProcess):
    """`Device` of one process on a `FakeGpu`.

    Parameters
    ----------
    gpu : FakeGpu
        The card, which this process opens.
    name : str
        Name of the process, unique among the processes that have the card open.
    ordinal : int
        Number of the GPU in its process.
    uuid : bytes, optional
        By default the uuid of the card. With another uuid, the device looks like a second card that
        accesses the same memory.
    is_strict : bool
        If True, a call that frees memory or destroys a stream or an event raises an error unless
        the host knows that the work using the resource has finished. If False, the call waits for
        the work, as the driver does, but for at most `timeout_s`.
    timeout_s : float
        Longest time in seconds that `close` waits for work. Unless `is_strict`, also the longest
        time that any other call waits for work before it frees a resource.

    Attributes
    ----------
    refusals : dict of str to str
        Names of the methods that must fail, each with the driver's status. The test may change the
        dict at any time.

    Raises
    ------
    Misuse
        For an invalid argument, and by every driver call after `close` except a second `close`.
    Race
        By every method that accesses memory or runs work, if two accesses to the same bytes are not
        ordered and at least one of them is a write.
    StillInUse
        By every method that frees a resource, if work that uses the resource may be in progress. By
        `free`, also if another process maps the memory.
    WouldHang
        By every method that enqueues work, if it waits longer than ``FakeGpu.patience_s``. With
        ``FakeGpu.is_serial``, also by every method that manages memory or loads kernels.
    TransportError
        By the methods in `refusals`, and for a call that the driver refuses and the library
        handles, such as `map` of an unknown handle.

    Notes
    -----
    *After failure*: every later driver call of every process, on this card and on all cards of the
    same board, raises the first `WrongOrder` again.
    """

    def __init__(
        self,
        gpu: FakeGpu,
        name: str = "rank 0",
        ordinal: int = 0,
        *,
        uuid: bytes | None = None,
        is_strict: bool = True,
        timeout_s: float = 1.0,
    ) -> None:
        super().__init__(gpu, name, is_strict=is_strict, timeout_s=timeout_s)
        self._ordinal = ordinal
        self._uuid = uuid or gpu.uuid
        #: Last record of each event; None before the first.
        self._events: dict[int, Record | None] = {}
        self._kernels: dict[int, tuple[str, FakeKernel]] = {}

    @property
    def ordinal(self) -> int:
        """Implement `Device.ordinal`."""
        return self._ordinal

    @property
    def uuid(self) -> bytes:
        """Implement `Device.uuid`."""
        return self._uuid

    @property
    def bus_id(self) -> str:
        """Implement `Device.bus_id`."""
        return self._gpu.bus_id

    @property
    def capability(self) -> tuple[int, int]:
        """Implement `Device.capability`."""
        return self._gpu.capability

    @property
    def nsms(self) -> int:
        """Implement `Device.nsms`."""
        return self._gpu.nsms

    @property
    def waits_on_memory(self) -> bool:
        """Implement `Device.waits_on_memory`."""
        return self._gpu.waits_on_memory

    @property
    def reorders_remote_writes(self) -> bool:
        """Implement `Device.reorders_remote_writes`."""
        return self._gpu.reorders_remote_writes

    @property
    def kernels(self) -> dict[str, FakeKernel]:
        """Fake kernels by entry name, shared by all devices of the card; fill it before `load`."""
        return self._gpu.kernels

    def current(self) -> AbstractContextManager[None]:
        """Implement `Device.current`; it does nothing."""
        return nullcontext()

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Implement `Device.allocate`; the memory is filled with a nonzero pattern."""
        with self._managing("allocate"):
            return self._board.space.allocate(
                self._name, self._card, nbytes, MemoryKind.DEVICE
            ).address

    def free(self, address: int) -> None:
        """Implement `Device.free`."""
        with self._managing("free"):
            self._retire(self._own(address, MemoryKind.DEVICE), "free")

    def allocate_pinned(self, nbytes: int) -> Bytes:
        """Implement `Device.allocate_pinned`."""
        with self._managing("allocate_pinned"):
            return self._board.space.allocate_pinned(self._name, self._card, nbytes).memory

    def free_pinned(self, memory: Bytes) -> None:
        """Implement `Device.free_pinned`."""
        with self._managing("free_pinned"):
            self._retire(self._own(memory.ctypes.data, MemoryKind.PINNED), "free_pinned")

    def pin(self, memory: Bytes) -> int:
        """Implement `Device.pin`; the returned address always differs from the host address."""
        with self._managing("pin"):
            return self._board.space.pin(self._name, self._card, memory).address

    def unpin(self, memory: Bytes) -> None:
        """Implement `Device.unpin`."""
        with self._managing("unpin"):
            place = self._board.space.at_host(self._name, memory.ctypes.data, memory.nbytes)
            if place is None or place.offset or place.span.kind is not MemoryKind.REGISTERED:
                raise Misuse.of(f"{self._name} has not pinned these {memory.nbytes} bytes")
            self._retire(self._own(place.span.address, MemoryKind.REGISTERED), "unpin")

    # Access between GPUs and processes

    def reach(self, peer: Device) -> None:
        """Implement `Device.reach` for peers on this card or on one made by `FakeGpu.beside`."""
        with self._managing("reach"):
            if peer.uuid == self.uuid:
                return
            if not isinstance(peer, FakeDevice) or peer._board is not self._board:
                raise refusal("reach", "NO_PEER_ACCESS")
            if peer._name != self._name:
                raise Misuse.of(f"{peer._name} is another process: use `map` for its memory")
            self._reached.add(peer._card)

    def export(self, address: int) -> tuple[bytes, int]:
        """Implement `Device.export`."""
        with self._called("export"):
            span = self._find(address, 1).span
            if span.card != self._card and not span.is_host:
                raise Misuse.of(f"{span} is memory of another GPU: export it there")
            if span.kind is not MemoryKind.DEVICE:
                kind = span.kind.value
                raise TransportError(f"{kind} has no IPC handle", status="NO_IPC")
            handle = span.number.to_bytes(_HANDLE_NBYTES, "little")
            self._board.exports[handle] = span
            return handle, address - span.address

    def map(self, handle: bytes) -> int:
        """Implement `Device.map`."""
        with self._managing("map"):
            span = self._board.exports.get(handle)
            if span is None:
                raise refusal("map", "CUDA_ERROR_INVALID_HANDLE")
            if span.owner == self._name:
                raise refusal("map", "CUDA_ERROR_INVALID_CONTEXT")
            if any(each.source is span for each in self._board.space.of(self._name)):
                raise Misuse.of(f"{self._name} has mapped {span} already: unmap it first")
            return self._board.space.map(self._name, self._card, span).address

    def unmap(self, address: int) -> None:
        """Implement `Device.unmap`."""
        with self._managing("unmap"):
            self._retire(self._own(address, MemoryKind.MAPPED), "unmap")

    def buffer_id(self, address: int) -> int:
        """Implement `Device.buffer_id`."""
        with self._called("buffer_id"):
            try:
                return self._find(address, 1).span.number
            except Misuse:
                return 0

    # Writes of NICs

    def flush_remote_writes(self) -> None:
        """Implement `Device.flush_remote_writes`; set `refusals` for a GPU that cannot flush."""
        with self._called("flush_remote_writes"):
            self._gpu.flush(self._host)

    # Streams and events

    def make_stream(self, *, waits: bool = False) -> Stream:
        """Implement `Device.make_stream`; `waits` has no effect, as streams are independent."""
        with self._called("make_stream"):
            return self._new_stream(is_callers=False)

    def destroy_stream(self, stream: Stream) -> None:
        """Implement `Device.destroy_stream`."""
        with self._called("destroy_stream"):
            found = self._streams.get(stream)
            if found is None or found.is_callers:
                raise Misuse.of(f"{stream:#x} is not a stream made by {self._name}")
            self._settle(lambda: not found.queue)
            doing = f"destroy_stream of {found}, at {caller()}"
            for operation in found.queue:
                raise StillInUse.by(doing, operation.what, "has not run")
            if not found.last.is_known(self._host.clock):
                raise StillInUse.by(doing, found.last.what, _UNKNOWN)
            del self._streams[stream]
            self._board.remove_stream(found)

    def is_capturing(self, stream: Stream) -> bool:
        """Implement `Device.is_capturing`; a test begins and ends a capture with `capture`."""
        with self._called("is_capturing"):
            return self._stream(stream) in self._capturing

    def make_event(self) -> Event:
        """Implement `Device.make_event`."""
        with self._called("make_event"):
            event = self._board.new_handle()
            self._events[event] = None
            return Event(event)

    def destroy_event(self, event: Event) -> None:
        """Implement `Device.destroy_event`."""
        with self._called("destroy_event"):
            record = self._record_of(event)
            if record is not None:
                self._settle(lambda: record.is_over)
                if record.stamp is None or not record.stamp.is_known(self._host.clock):
                    doing = f"destroy_event at {caller()}"
                    raise StillInUse.by(doing, record.what, _UNKNOWN)
            del self._events[event]

    def record(self, event: Event, stream: Stream) -> None:
        """Implement `Device.record`."""
        with self._called("record"):
            self._record_of(event)
            made = Record(*self._enqueued("record", stream))
            self._events[event] = made
            self._enqueue(self._stream(stream), made)

    def wait(self, stream: Stream, event: Event) -> None:
        """Implement `Device.wait`."""
        with self._called("wait"):
            record = self._record_of(event)
            if record is not None:
                self._give(stream, WaitForRecord(*self._enqueued("wait", stream), record))

    def is_done(self, event: Event) -> bool:
        """Implement `Device.is_done`; each call may run some operations."""
        with self._called("is_done"):
            self._board.advance()
            return self._is_done(self._record_of(event))

    def synchronize(self, event: Event, timeout_s: float) -> bool:
        """Implement `Device.synchronize`; it runs operations even if `timeout_s` is 0."""
        with self._called("synchronize"):
            record = self._record_of(event)
            self._board.wait_until(lambda: record is None or record.is_over, timeout_s)
            return self._is_done(record)

    def _is_done(self, record: Record | None) -> bool:
        if record is None:
            return True
        if record.is_over:
            join(self._host.clock, record.clock)
        return record.is_over

    def _record_of(self, event: Event) -> Record | None:
        if event not in self._events:
            raise Misuse.of(f"{event:#x} is not an event of {self._name}")
        return self._events[event]

    def write_word(self, stream: Stream, address: int, value: int) -> None:
        """Implement `Device.write_word`."""
        with self._called("write_word"):
            place = self._word(address)
            what = self._enqueued(f"word {value} to {place}", stream)
            self._give(stream, SetWord(*what, place, self._board.word_at(place), value))

    def wait_word(self, stream: Stream, address: int, value: int) -> None:
        """Implement `Device.wait_word`."""
        with self._called("wait_word"):
            place = self._word(address)
            what = self._enqueued(f"wait for {value} in {place}", stream)
            self._give(stream, WaitForWord(*what, place, self._board.word_at(place), value))

    def exchange_words(
        self, stream: Stream, value: int, written: tuple[int, ...], awaited: tuple[int, ...]
    ) -> None:
        """Implement `Device.exchange_words`; check all addresses before enqueuing anything."""
        with self._called("exchange_words"):
            for address in (*written, *awaited):
                self._word(address)
        for address in written:
            self.write_word(stream, address, value)
        for address in awaited:
            self.wait_word(stream, address, value)

    def _word(self, address: int) -> MemoryPiece:
        if not self.waits_on_memory:
            raise refusal("access of a stream to a word", "CUDA_ERROR_NOT_SUPPORTED")
        if address % _WORD_NBYTES:
            raise Misuse.of(f"a word at {address:#x} is not aligned to {_WORD_NBYTES} bytes")
        place = self._find(address, _WORD_NBYTES)
        if place.span.kind is MemoryKind.MANAGED:
            raise Misuse.of(f"a stream cannot set or wait for a word in {place.span}")
        return place

    # Work

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Implement `Device.copy`."""
        with self._called("copy"):
            place, origin = self._find(target, nbytes), self._find(source, nbytes)
            self._copy(f"copy of {origin} to {place}", [(place, origin)], stream)

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        nbytes: int,
        nrows: int,
        stream: Stream,
    ) -> None:
        """Implement `Device.copy_rows`."""
        with self._called("copy_rows"):
            if nbytes > min(target_pitch, source_pitch):
                raise Misuse.of(
                    f"rows of {nbytes} bytes exceed the pitch {target_pitch} or {source_pitch}"
                )
            rows = [
                (
                    self._find(target + row * target_pitch, nbytes),
                    self._find(source + row * source_pitch, nbytes),
                )
                for row in range(nrows)
            ]
            self._copy(f"copy of {nrows} rows from {source:#x} to {target:#x}", rows, stream)

    def _copy(self, what: str, rows: list[tuple[MemoryPiece, MemoryPiece]], stream: Stream) -> None:
        if any(target.overlaps(source) for target, _ in rows for _, source in rows):
            raise Misuse.of(f"source and target of a {what} overlap")
        self._give(stream, Copy(*self._enqueued(what, stream), rows))

    def load(self, ptx: bytes, entry: str) -> Kernel:
        """Implement `Device.load`; `ptx` must contain `entry`, and `kernels` its fake kernel."""
        with self._managing("load"):
            if entry.encode() not in ptx:
                raise refusal("load", "CUDA_ERROR_NOT_FOUND")
            if entry not in self.kernels:
                raise Misuse.of(f"`kernels` has no {entry}: add a FakeKernel for it before `load`")
            handle = self._board.new_handle()
            self._kernels[handle] = (entry, self.kernels[entry])
            return Kernel(handle)

    def launch(
        self, kernel: Kernel, nblocks: int, nthreads: int, stream: Stream,
        arguments: Sequence[Argument],
    ) -> None:  # fmt: skip
        """Implement `Device.launch`."""
        with self._called("launch"):
            if kernel not in self._kernels:
                raise Misuse.of(f"{kernel:#x} is not a kernel of {self._name}")
            if nblocks < 1 or not 1 <= nthreads <= _MOST_THREADS:
                raise Misuse.of(f"{nblocks} blocks of {nthreads} threads are not a valid grid")
            entry, fake = self._kernels[kernel]
            values = [_as_passed(value, kind) for value, kind in arguments]
            grid = Grid(nblocks, nthreads, self._find)
            touched = ((), ()) if fake.touches is None else fake.touches(grid, *values)
            reads, writes = ([self._find(*each) for each in some] for some in touched)
            label, clock = self._enqueued(f"kernel {entry}", stream)
            self._give(stream, Launch(label, clock, fake, grid, values, reads, writes))

    def _enqueued(self, what: str, stream: Stream) -> tuple[str, Clock]:
        """Begin a new step of the host; return a description and a clock for a new operation.

        The caller enqueues this operation. The clock is the host's clock before the new step.
        """
        return f"{what}, on {self._stream(stream)}, enqueued at {caller()}", self._host.release()

    def _give(self, stream: Stream, operation: FakeOperation) -> None:
        self._enqueue(self._stream(stream), operation)

    def close(self) -> None:
        """Implement `Device.close`: wait for this device's own streams, and free its own memory.

        Streams and memory of the library's caller (`caller_stream`, `caller_memory`) stay.

        Raises
        ------
        StillInUse
            If other streams may still use this device's own memory, or one of its own streams does
            not finish in time.
        """
        if self._is_closed:
            return
        with self._called("close"):
            own = [each for each in self._streams.values() if not each.is_callers]
            self._board.wait_until(lambda: not any(each.queue for each in own), self._timeout_s)
            doing = f"close of {self._name}, at {caller()}"
            for stream in own:
                for operation in stream.queue:
                    raise StillInUse.by(doing, operation.what, "did not end in time")
                join(self._host.clock, stream.clock)
            for span in self._board.space.of(self._name):
                if span.card == self._card and not span.is_callers:
                    span.nmappings = 0  # the driver keeps the memory for other processes
                    self._board.check_idle(span, self._host, doing)
                    self._board.remove(span, doing)
            for stream in own:
                self._board.remove_stream(stream)
            self._board.leave(self._name, self._card)
            self._is_closed = True


def _as_passed(value: float, kind: type[Any]) -> Any:
    """Return a kernel argument converted to its C type; raise Misuse if an integer does not fit."""
    passed = kind(value).value
    if isinstance(value, int) and (passed or 0) != value:
        raise Misuse.of(f"argument {value!r} does not fit {kind.__name__}")
    return passed


__all__ = ["FakeDevice"]
