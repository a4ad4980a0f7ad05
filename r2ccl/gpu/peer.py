"""Collectives among the GPUs of one node, each of which reads and writes the others' memory.

Theory of operation
-------------------
Each rank does an equal part of the work: one kernel reads that part of every rank's input and
writes the result to its destinations. No data passes through the host or a rail, and none is copied
twice. The kernel is enqueued at the call, before the addresses of the others' arrays are known: it
reads them from a table that the host fills later. In the stream's order:

::

    ready[me] = n          my input is complete, my output may be overwritten
    wait for the host      all ranks have called, and the table is filled
    wait for ready[all]
    the kernel
    done[me] = n
    wait for done[all]     my input was read, my output is complete

These words are on an `IpcBoard`, in memory that all processes of the node and their GPUs share,
where ranks also post the locations of their arrays. In the communicator's worker, the host reads
these messages, maps the others' allocations (once each), fills the table, lets the stream continue,
and watches the device until it has finished. If a rank dies meanwhile, other hosts write its words,
so that no stream hangs, and the communicator ends.

Invariants: what a stream waits for was enqueued on it before, or is written by a host or by another
rank's stream that waits for nothing later; a peer's memory is accessed only between its ``ready``
and this rank's ``done``.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.clock import Clock
from r2ccl.device.base import Device, Event, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.errors import CommunicatorRevoked, InvalidArgument, TransportError, TransportTimeout
from r2ccl.gpu.host_signal import WORD, SignalledStream
from r2ccl.gpu.ipc_board import IpcBoard
from r2ccl.gpu.staged import DeviceCall
from r2ccl.runtime.progress import describe
from r2ccl.types import CallSignature, Collective

Array = npt.NDArray[Any]

#: Kernels read and write 16 bytes at once; parts begin at multiples of it.
_VECTOR_NBYTES = 16
#: Tables: more than the calls in progress before a message is overwritten.
_NTABLES = 64
#: Limit of ranks on a node: operands of one kernel.
MOST_RANKS = 8
#: More calls than a rank can be ahead of another.
_AHEAD = 1 << 20
_POLL_S = 20e-6
_LOOK_S = 0.05

_CALL_INFO = struct.Struct("<QQ64sQQ64sQ")


class _ArrayHandle(NamedTuple):
    """Location of a rank's array: number and IPC handle of its allocation, and the offset there."""

    allocation: int
    handle: bytes
    offset: int


class CallInfo(NamedTuple):
    """Message about a call: the packed signature, the input, the output."""

    signature: int
    source: _ArrayHandle
    output: _ArrayHandle

    def pack(self) -> bytes:
        """Return the bytes to post."""
        return _CALL_INFO.pack(self.signature, *self.source, *self.output)

    @classmethod
    def unpack(cls, packed: bytes) -> CallInfo:
        """Invert `pack`."""
        signature, *places = _CALL_INFO.unpack_from(packed)
        return cls(signature, _ArrayHandle(*places[:3]), _ArrayHandle(*places[3:]))


class InterNodeJob(NamedTuple):
    """The part of a call between nodes: the backend that carries it out, and that backend's job."""

    backend: Any
    job: Any


class PeerJob(msgspec.Struct, eq=False):
    """The host's part of a call.

    ``between`` is the part between nodes, if there are several; ``error`` is why the call failed,
    if it did.
    """

    call: DeviceCall
    number: int
    done: Event
    between: InterNodeJob | None = None
    error: BaseException | None = None


class _Share(NamedTuple):
    """A rank's part of the work: elements ``[start, start + length)`` of a row of `width`."""

    start: int
    length: int
    width: int


class PeerKernels(Protocol):
    """Loads and launches kernels that take addresses from a table."""

    def prepare_from_table(self, call: CallSignature, ninputs: int, noutputs: int) -> None:
        """Load the kernel of `launch_from_table`; may wait for the device."""
        ...

    def launch_from_table(
        self, call: CallSignature, ninputs: int, noutputs: int, table: int, count: int,
        nranks: int, stream: Stream,
    ) -> None:  # fmt: skip
        """Enqueue a kernel that reduces or copies `count` elements.

        `table` holds the addresses of inputs, then outputs. If the first is 0 when the kernel
        runs, it does nothing.
        """
        ...


class PeerBackend(SignalledStream):
    """The collectives of one rank on the memory of all GPUs of its node.

    Parameters
    ----------
    device : Device
    kernels : PeerKernels
    board : IpcBoard
        Shared by all ranks of the node, whose pages are in their order.
    members : sequence of int
        The ranks of the node, by their numbers in the communicator.
    check : callable
        Raises the error that ended the communicator, if any.
    clock : Clock
    sleep : callable
        ``sleep(seconds)``; lets other threads run.
    timeout_s : float
        Limit for the others to call, and for the device to finish.
    """

    #: Index of each kernel's addresses in a table.
    _heads: Sequence[int] = (0,)

    def __init__(
        self,
        device: Device,
        kernels: PeerKernels,
        board: IpcBoard,
        members: Sequence[int],
        *,
        check: Callable[[], None],
        clock: Clock,
        sleep: Callable[[float], None],
        timeout_s: float,
    ) -> None:
        members = tuple(members)
        super().__init__(device, members[board.index])
        self._sleep = sleep
        self._kernels = kernels
        self._board = board
        self._members = members
        #: This rank's index in the node, and the number of ranks there.
        self._at, self._nlocal = board.index, board.nlocal
        self._check = check
        self._clock = clock
        self._timeout_s = timeout_s
        self._words = device.pin(board.memory)
        self._tables = device.allocate_pinned(_NTABLES * _TABLE_NBYTES)
        self._number = 0
        #: Collective, dtype and op of loaded kernels.
        self._prepared: set[tuple[int, int, int]] = set()
        #: Calls in progress. The caller's thread adds to them, only the worker removes them.
        self._jobs: list[PeerJob] = []
        #: Error after which streams were let go, if any: every later call fails.
        self._broken: BaseException | None = None
        #: Handles and bases of this rank's allocations, by allocation number.
        self._exported: dict[int, tuple[bytes, int]] = {}
        #: Mapped addresses of other ranks' allocations, by rank and allocation number.
        self._mapped: dict[tuple[int, int], int] = {}

    def supports(self, call: DeviceCall) -> bool:
        """Return whether `call` has no schedule of the caller's own."""
        return call.schedule is None

    def is_prepared(self, call: DeviceCall) -> bool:
        """See `GpuBackend`."""
        return _kernels_of(call) in self._prepared

    def prepare(self, call: DeviceCall) -> None:
        """See `GpuBackend`; loads the kernels of a call.

        Raises
        ------
        TransportError
            The device failed.
        """
        self._load(call.signature)
        self._prepared.add(_kernels_of(call))

    def begin(self, call: DeviceCall, stream: Stream) -> tuple[PeerJob, Event]:
        """Enqueue all of the device's work; nothing is enqueued on the caller's `stream`.

        Returns
        -------
        PeerJob
            For `finish`, which must follow, in the order of `begin`. Its ``error`` is why
            work could not be enqueued, if so.
        Event
            Done when the result is complete. Return it with `recycle`.
        """
        number = self._number + 1
        done = self.take_event()
        job = PeerJob(call, number, done)
        try:
            info = self._info_of(call)
            self._await_room(number)
            self._number = number
            self._jobs.append(job)
            self._give(job, done, stream)
            if self._broken is not None:  # this rank's words do not count calls any more
                raise self._broken
            self._board.post(number, info.pack())
        except Exception as exc:
            job.error = exc
        return job, done

    def finish(self, job: PeerJob) -> None:
        """Fill the table once all ranks have called, and wait for the device; in the worker.

        Raises
        ------
        InvalidArgument
            Another rank made a different call.
        TransportTimeout
            Another rank did not call, or the device did not finish.
        TransportError
            The device failed.
        R2cclError
            The communicator ended.
        """
        try:
            error = job.error or self._broken
            if error is not None:
                raise error
            until_s = self._clock() + self._timeout_s
            infos = [self._read(at, job.number, until_s) for at in range(self._nlocal)]
            self._require_same(infos)
            while not self._board.has_done(self._at, job.number - _NTABLES):
                self._device.is_done(job.done)  # raises if it failed
                self._pause(job.number, until_s, "the GPU is far behind")
            self._fill(job, infos)
            self._board.take(job.number)
            self._signal(job.number)
            self._meanwhile(job)
            self._watch(job, until_s)
            if self._device.is_done(job.done):
                self.examine(job)
            self._drop_done(job.number)
        except BaseException as exc:
            job.error = job.error or exc
            self._release_streams(exc)
            raise

    def examine(self, job: PeerJob) -> None:
        """Raise the error of a call that the device has finished, if it has one.

        Raises
        ------
        R2cclError
            The communicator ended here, or at a rank that let the streams go.
        """
        if job.error is None and self._board.is_spoiled(job.number):
            self._check()
            job.error = CommunicatorRevoked(
                f"rank {self._rank}: another rank of this node gave up during collective "
                f"{job.number} on GPU memory; see its own error"
            )
        super().examine(job)

    def close(self, timeout_s: float) -> None:
        """Wait for the stream, then free everything; no job is left.

        Raises
        ------
        TransportTimeout
            The device is still busy; nothing was freed.
        """
        if not self._is_signalled(self._number):
            self._release_streams(
                CommunicatorRevoked(f"rank {self._rank}: closed before it was done")
            )
        if not self._is_idle_in(timeout_s):
            raise self._still_busy("works", timeout_s)
        self._free()
        for address in self._mapped.values():
            self._device.unmap(address)
        self._mapped.clear()
        self._device.unpin(self._board.memory)
        self._device.free_pinned(self._tables)

    # Device

    def _load(self, call: CallSignature) -> None:
        """Load the kernels of a call."""
        self._kernels.prepare_from_table(call, *_operands(call.collective, self._nlocal))

    def _give(self, job: PeerJob, done: Event, stream: Stream) -> None:
        device, own, board, word = self._device, self._stream, self._board, job.number & WORD
        self._follow(stream, done)
        device.write_word(own, self._words + board.ready_at(self._at), word)
        self._wait_for_signal(job.number)
        for at in range(self._nlocal):
            device.wait_word(own, self._words + board.ready_at(at), word)
        self._work(job)
        device.write_word(own, self._words + board.done_at(self._at), word)
        for at in range(self._nlocal):
            device.wait_word(own, self._words + board.done_at(at), word)
        device.record(done, own)

    def _work(self, job: PeerJob) -> None:
        """Give the stream what lies between the inputs' being there and the result."""
        call = job.call.signature
        ninputs, noutputs = _operands(call.collective, self._nlocal)
        self._launch(call, ninputs, noutputs, self._table_of(job.number))

    def _launch(self, call: CallSignature, ninputs: int, noutputs: int, table: Array) -> None:
        length = self._share_of(call).length
        if length:
            self._kernels.launch_from_table(
                call, ninputs, noutputs, int(table.ctypes.data), length, self._nlocal, self._stream
            )

    def _meanwhile(self, job: PeerJob) -> None:
        """Do the host's work that overlaps the device's."""

    def _share_of(self, call: CallSignature, at: int | None = None) -> _Share:
        """Share a call's elements out, by whole vectors; where rows are ranks', by rows.

        Returns the part of the rank at place `at`, by default this one's; the first has most.
        """
        if call.collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):
            width = call.count // self._nlocal
            return _Share(0, width, width)
        vector = max(1, _VECTOR_NBYTES // dtype_of(call.dtype).itemsize)
        each = -(-call.count // (vector * self._nlocal)) * vector
        start = min(call.count, (self._at if at is None else at) * each)
        return _Share(start, min(each, call.count - start), call.count)

    # Host

    def _info_of(self, call: DeviceCall) -> CallInfo:
        source = self._place_of(call.source, call.signature.count)
        output = self._place_of(call.output, call.signature.count)
        return CallInfo(call.signature.pack(), source, output)

    def _place_of(self, address: int, count: int) -> _ArrayHandle:
        if not address or not count:
            return _ArrayHandle(0, b"", 0)
        allocation = self._device.buffer_id(address)
        known = self._exported.get(allocation)
        if known is None:
            handle, offset = self._device.export(address)
            known = self._exported[allocation] = (handle, address - offset)
        handle, base = known
        return _ArrayHandle(allocation, handle, address - base)

    def _await_room(self, number: int) -> None:
        """Wait, at the call, for ranks that are many calls behind."""
        until_s = self._clock() + self._timeout_s
        while not self._board.may_post(number):
            self._pause(number, until_s, "ranks of this node are far behind")

    def _read(self, at: int, number: int, until_s: float) -> CallInfo:
        packed = self._board.read(at, number)
        while packed is None:
            self._pause(number, until_s, f"rank {self._members[at]} has not called")
            packed = self._board.read(at, number)
        return CallInfo.unpack(packed)

    def _pause(self, number: int, until_s: float, why: str) -> None:
        self._check()
        if self._clock() >= until_s:
            raise TransportTimeout(
                f"rank {self._rank}: {why} for {self._timeout_s:g} s, in collective "
                f"{number} on GPU memory; see what it does, or raise R2CC_TIMEOUT_S",
                rank=self._rank,
                status="TIMEOUT",
            )
        self._sleep(_POLL_S)

    def _require_same(self, infos: Sequence[CallInfo]) -> None:
        mine = infos[self._at].signature
        for peer, info in zip(self._members, infos, strict=True):
            if info.signature != mine:
                raise InvalidArgument(
                    f"call differs between ranks: rank {self._rank} called {describe(mine)}, rank "
                    f"{peer} called {describe(info.signature)}; all ranks must pass the same "
                    "collective, dtype, op, root, count and schedule"
                )

    def _fill(self, job: PeerJob, infos: Sequence[CallInfo]) -> None:
        """Write the addresses this rank's kernel works on."""
        call = job.call.signature
        share, itemsize = self._share_of(call), dtype_of(call.dtype).itemsize
        if not share.length:
            return
        sources, outputs = self._addresses(job, infos)
        row = self._at * share.width * itemsize
        at = share.start * itemsize
        kind = call.collective
        if kind == Collective.ALLGATHER:
            addresses = [sources[self._at], *(address + row for address in outputs)]
        elif kind == Collective.REDUCE_SCATTER:
            addresses = [*(address + row for address in sources), outputs[self._at]]
        elif kind == Collective.BROADCAST:
            addresses = [sources[call.root] + at, *(address + at for address in outputs)]
        elif kind == Collective.REDUCE:
            addresses = [*(address + at for address in sources), outputs[call.root] + at]
        else:
            addresses = [address + at for address in (*sources, *outputs)]
        self._table_of(job.number)[: len(addresses)] = addresses

    def _addresses(self, job: PeerJob, infos: Sequence[CallInfo]) -> tuple[list[int], list[int]]:
        """Return this process's addresses of all ranks' inputs and outputs."""
        sources = [self._address(at, info.source) for at, info in enumerate(infos)]
        outputs = [self._address(at, info.output) for at, info in enumerate(infos)]
        sources[self._at], outputs[self._at] = job.call.source, job.call.output
        return sources, outputs

    def _address(self, peer: int, place: _ArrayHandle) -> int:
        """Return this process's address of an array of `peer`, whose allocation it maps once."""
        if not place.allocation or peer == self._at:
            return 0
        key = (peer, place.allocation)
        base = self._mapped.get(key)
        if base is None:
            base = self._mapped[key] = self._device.map(place.handle)
        return base + place.offset

    def _watch(self, job: PeerJob, until_s: float) -> None:
        """Wait for the device, unless a later call was begun, whose wait covers this one."""
        while job.number == self._number and not self._device.synchronize(job.done, _LOOK_S):
            self._check()
            if self._clock() >= until_s:
                raise TransportTimeout(
                    f"rank {self._rank}: the GPU has not finished collective {job.number} in "
                    f"{self._timeout_s:g} s; look for a kernel that hangs on a GPU of this node, "
                    "or raise R2CC_TIMEOUT_S",
                    rank=self._rank,
                    status="TIMEOUT",
                )

    def _release_streams(self, error: BaseException) -> None:
        """Let the streams of all ranks of the node continue: the communicator ends on all of them.

        Kernels that have not run do nothing; calls that are not complete fail. The stream will
        still write older numbers, perhaps over words that were just written for other ranks;
        therefore the last number it writes is ahead of all ranks' calls.
        """
        self._broken = self._broken or error
        number = self._number
        for job in tuple(self._jobs):
            if not self._board.has_done(self._at, job.number):
                job.error = job.error or error
        # Only the first address of each is cleared: a kernel that has read it needs the others.
        self._tables.view(np.uint64).reshape(_NTABLES, -1)[:, self._heads] = 0
        self._signal(number)
        self._board.release(number)
        # A failed device writes nothing; the first error is the one that is raised.
        with contextlib.suppress(TransportError):
            for at in (self._board.ready_at(self._at), self._board.done_at(self._at)):
                self._device.write_word(self._stream, self._words + at, number + _AHEAD & WORD)

    def _drop_done(self, number: int) -> None:
        """Forget finished calls up to `number`."""
        while self._jobs and self._jobs[0].number <= number:
            if not self._board.has_done(self._at, self._jobs[0].number):
                return
            del self._jobs[0]

    def _table_of(self, number: int) -> Array:
        at = number % _NTABLES * _TABLE_NBYTES
        return self._tables[at : at + _TABLE_NBYTES].view(np.uint64)


def _kernels_of(call: DeviceCall) -> tuple[int, int, int]:
    """Return the key of a call's kernels: collective, dtype, op."""
    return call.signature.collective, call.signature.dtype, call.signature.op


def _operands(collective: int, nranks: int) -> tuple[int, int]:
    """Return how many arrays a kernel reads, and how many it writes."""
    ninputs = 1 if collective in (Collective.ALLGATHER, Collective.BROADCAST) else nranks
    noutputs = 1 if collective in (Collective.REDUCE, Collective.REDUCE_SCATTER) else nranks
    return ninputs, noutputs


_TABLE_NBYTES = 3 * MOST_RANKS * 8

__all__ = ["MOST_RANKS", "CallInfo", "InterNodeJob", "PeerBackend", "PeerJob", "PeerKernels"]
