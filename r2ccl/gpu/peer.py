"""Collectives among the GPUs of one node, each of which reads and writes the others' memory.

Theory of operation
-------------------
Each rank does an equal part of the work: one kernel reads that part of every rank's input and
writes the result to its destinations. No data passes through the host or a rail, and no data is
copied twice. The kernel is enqueued when the user calls, before the addresses of the other ranks'
arrays are known. It reads them from a table that the host fills later. Work on the stream, in this
order:

::

    ready[me] = n          my input is complete, my output may be overwritten
    wait for the host      all ranks have called, and the table is filled
    wait for ready[all]
    run the kernel
    done[me] = n
    wait for done[all]     my input was read, my output is complete

The words ``ready`` and ``done`` are on an `IpcBoard`, in memory that all processes of the node and
their GPUs share. Ranks also post the locations of their arrays there. The communicator's worker
thread reads these messages, maps the other ranks' allocations (once each), fills the table, lets
the stream continue, and waits until the device has finished. If a rank dies in between, the other
ranks' hosts write its words, so that no stream hangs, and the communicator ends.

Invariants: a stream waits only for its own earlier work, for a host, or for a word that another
rank's stream writes without waiting for later work; a peer's memory is accessed only between the
peer's ``ready`` and this rank's ``done``.
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
from r2ccl.kernels.cuda.form import has_kernels
from r2ccl.runtime.progress import describe
from r2ccl.types import CallSignature, Collective

Array = npt.NDArray[Any]

#: Number of bytes that kernels read and write at once; parts begin at multiples of it.
_VECTOR_NBYTES = 16
#: Number of address tables, which calls use in turn. Before `PeerBackend.finish` fills a table, it
#: waits until the previous call with that table is done.
_NTABLES = 64
#: Largest number of ranks on a node; a kernel has one operand per rank.
MOST_RANKS = 8
#: Number of calls that exceeds the lead of any rank over another.
_AHEAD = 1 << 20
#: Interval at which the board is polled, and interval at which a wait for the device checks whether
#: the communicator has ended, in seconds.
_POLL_S = 20e-6
_LOOK_S = 0.05

_CALL_INFO = struct.Struct("<QQ64sQQ64sQ")


class _ArrayHandle(NamedTuple):
    """Location of a rank's array: its allocation's number and IPC handle, and the byte offset."""

    allocation: int
    handle: bytes
    offset: int


class CallInfo(NamedTuple):
    """Message that a rank posts for a call: the packed signature, and where its arrays are."""

    signature: int
    source: _ArrayHandle
    output: _ArrayHandle

    def pack(self) -> bytes:
        """Return the message as bytes."""
        return _CALL_INFO.pack(self.signature, *self.source, *self.output)

    @classmethod
    def unpack(cls, packed: bytes) -> CallInfo:
        """Return the message from the bytes that `pack` returned."""
        signature, *places = _CALL_INFO.unpack_from(packed)
        return cls(signature, _ArrayHandle(*places[:3]), _ArrayHandle(*places[3:]))


class InterNodeJob(NamedTuple):
    """The part of a call between nodes: the backend that executes it, and that backend's job."""

    backend: Any
    job: Any


class PeerJob(msgspec.Struct, eq=False):
    """The host's part of a call.

    The stream waits until the host signals ``number``; the event ``done`` is done when the stream
    has passed the call. ``between`` is the part between nodes, if there are several nodes.
    ``error`` is the error of the call, if it failed.
    """

    call: DeviceCall
    number: int
    done: Event
    between: InterNodeJob | None = None
    error: BaseException | None = None


class _Share(NamedTuple):
    """A rank's part of the work: elements ``[start, start + length)`` of rows of `width`."""

    start: int
    length: int
    width: int


class PeerKernels(Protocol):
    """Loader and launcher of kernels that read the addresses of their operands from a table."""

    def prepare_from_table(self, call: CallSignature, ninputs: int, noutputs: int) -> None:
        """Load the kernel that `launch_from_table` launches; may wait for the device."""
        ...

    def launch_from_table(
        self, call: CallSignature, ninputs: int, noutputs: int, table: int, count: int,
        nranks: int, stream: Stream,
    ) -> None:  # fmt: skip
        """Enqueue a kernel that reduces or copies `count` elements.

        `table` is the address of a table with the addresses of all inputs, then of all outputs. If
        the first address in it is 0 when the kernel runs, the kernel does nothing.
        """
        ...


class PeerBackend(SignalledStream):
    """Collectives of one rank with kernels that access the memory of all GPUs of its node.

    Parameters
    ----------
    device : Device
    kernels : PeerKernels
    board : IpcBoard
        Board shared by all ranks of the node, with one section per rank in the order of `members`.
    members : sequence of int
        Ranks of the node.
    check : callable
        Raises the error that ended the communicator, if it has ended.
    clock : Clock
    sleep : callable
        ``sleep(seconds)`` lets other threads run.
    timeout_s : float
        Time limit for the other ranks to call, and for the device to finish, in seconds.
    """

    #: Index of each kernel's first address in a table.
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
        #: This rank's index in the node, and the number of ranks in the node.
        self._at, self._nlocal = board.index, board.nlocal
        self._check = check
        self._clock = clock
        self._timeout_s = timeout_s
        self._words = device.pin(board.memory)
        self._tables = device.allocate_pinned(_NTABLES * _TABLE_NBYTES)
        self._number = 0
        #: Collective, dtype and op of loaded kernels.
        self._prepared: set[tuple[int, int, int]] = set()
        #: Calls in progress. The caller's thread appends to the list, only the worker removes.
        self._jobs: list[PeerJob] = []
        #: First error after which `_release_streams` was called; it makes every later call fail.
        self._broken: BaseException | None = None
        #: Handles and bases of this rank's allocations, by allocation number.
        self._exported: dict[int, tuple[bytes, int]] = {}
        #: Mapped addresses of other ranks' allocations, by rank and allocation number.
        self._mapped: dict[tuple[int, int], int] = {}

    def supports(self, call: DeviceCall) -> bool:
        """Return whether `call` has no user-defined schedule, and there are kernels for it."""
        return call.schedule is None and has_kernels(call.signature)

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether `begin` can be called without `prepare`."""
        return _kernels_of(call) in self._prepared

    def prepare(self, call: DeviceCall) -> None:
        """Load the kernels of `call`.

        Raises
        ------
        InvalidArgument
            If the GPU is too old for the kernels.
        TransportError
            If the device failed, or a kernel cannot be compiled.
        """
        self._load(call.signature)
        self._prepared.add(_kernels_of(call))

    def begin(self, call: DeviceCall, stream: Stream) -> tuple[PeerJob, Event]:
        """Enqueue all of the device's work on the backend's stream, after the work of `stream`.

        If another rank of the node has not read the message of 64 calls ago, wait for that rank.

        Returns
        -------
        PeerJob
            Argument of `finish`, which must be called for each job in the order of `begin`, even if
            the job's ``error`` is set. ``error`` is set if not all work could be enqueued, or if
            the call could not be posted to the other ranks.
        Event
            Event that is done when the result is complete. Return it with `recycle`.

        Raises
        ------
        TransportError
            If the device could not create an event; nothing was enqueued.
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
            if self._broken is not None:  # this rank's words no longer count calls
                raise self._broken
            self._board.post(number, info.pack())
        except Exception as exc:
            job.error = exc
        return job, done

    def finish(self, job: PeerJob) -> None:
        """Fill the table when all ranks have called, then wait for the device; runs in the worker.

        Return without waiting for the device if a later call was begun. After an error, no stream
        of the node waits for this rank any more, and all later calls fail.

        Raises
        ------
        InvalidArgument
            If another rank made a different call.
        TransportTimeout
            If another rank did not call, or the device did not finish, in time.
        TransportError
            If the device failed.
        R2cclError
            If the communicator ended.
        Exception
            The job's ``error``, if `begin` set it, or the error of an earlier call that failed.
        """
        try:
            error = job.error or self._broken
            if error is not None:
                raise error
            until_s = self._clock() + self._timeout_s
            infos = [self._read(at, job.number, until_s) for at in range(self._nlocal)]
            self._require_same(infos)
            while not self._board.has_done(self._at, job.number - _NTABLES):
                self._device.is_done(job.done)  # raises if the device failed
                self._pause(job.number, until_s, "the GPU has not caught up with earlier calls")
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
        """Raise the error of a call that the device has finished, if the call failed.

        Raises
        ------
        R2cclError
            If the communicator ended at this rank, or at a rank that released the node's streams.
        """
        if job.error is None and self._board.is_spoiled(job.number):
            self._check()
            job.error = CommunicatorRevoked(
                f"rank {self._rank}: another rank of this node failed during collective "
                f"{job.number} on GPU memory; see the error of that rank"
            )
        super().examine(job)

    def close(self, timeout_s: float) -> None:
        """Fail the calls not executed yet, wait for the stream, then free all resources.

        The worker must be idle.

        Raises
        ------
        TransportTimeout
            If the device is still busy after `timeout_s` seconds; nothing was freed.
        TransportError
            If the device failed; not all resources were freed.
        """
        if not self._is_signalled(self._number):
            self._release_streams(
                CommunicatorRevoked(f"rank {self._rank}: closed before its collectives were done")
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
        """Enqueue the kernels of the call, between the waits for ``ready`` and ``done``."""
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
        """Execute host work that overlaps the device's work."""

    def _share_of(self, call: CallSignature, at: int | None = None) -> _Share:
        """Return the part of a call that member `at` works on; default: this member.

        Elements are divided in units of whole vectors; no part is larger than the first. In
        allgather and reduce_scatter every member works on one whole row, so its part starts at 0.
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
        """Wait until all ranks of the node have read the message that this call overwrites."""
        until_s = self._clock() + self._timeout_s
        while not self._board.may_post(number):
            self._pause(number, until_s, "other ranks of this node have not caught up")

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
                f"rank {self._rank}: {why} for {self._timeout_s:g} s, in collective {number} on "
                "GPU memory; check what that rank or GPU does, or raise R2CC_TIMEOUT_S",
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
        """Write the addresses of the kernel's operands to the table of the call."""
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
        """Return the addresses of all ranks' inputs and outputs in this process."""
        sources = [self._address(at, info.source) for at, info in enumerate(infos)]
        outputs = [self._address(at, info.output) for at, info in enumerate(infos)]
        sources[self._at], outputs[self._at] = job.call.source, job.call.output
        return sources, outputs

    def _address(self, peer: int, place: _ArrayHandle) -> int:
        """Return the address of an array of `peer` in this process; map its allocation once."""
        if not place.allocation or peer == self._at:
            return 0
        key = (peer, place.allocation)
        base = self._mapped.get(key)
        if base is None:
            base = self._mapped[key] = self._device.map(place.handle)
        return base + place.offset

    def _watch(self, job: PeerJob, until_s: float) -> None:
        """Wait until the device has finished the call.

        Return early if a later call was begun, because the wait for that call includes this one.
        """
        while job.number == self._number and not self._device.synchronize(job.done, _LOOK_S):
            self._check()
            if self._clock() >= until_s:
                raise TransportTimeout(
                    f"rank {self._rank}: the GPU did not finish collective {job.number} on GPU "
                    f"memory in {self._timeout_s:g} s; look for a kernel that hangs on a GPU of "
                    "this node, or raise R2CC_TIMEOUT_S",
                    rank=self._rank,
                    status="TIMEOUT",
                )

    def _release_streams(self, error: BaseException) -> None:
        """Let the streams of all ranks of the node continue, because the communicator ends.

        Kernels that have not run do nothing, and calls that are not complete fail. This rank's
        stream will still write the numbers of its enqueued calls, which may replace the higher
        numbers that a host just wrote to this rank's words. Therefore the last number that the
        stream writes exceeds the call numbers of all ranks.
        """
        self._broken = self._broken or error
        number = self._number
        for job in tuple(self._jobs):
            if not self._board.has_done(self._at, job.number):
                job.error = job.error or error
        # Clear only the first address for each kernel: a kernel that has read it needs the others.
        self._tables.view(np.uint64).reshape(_NTABLES, -1)[:, self._heads] = 0
        self._signal(number)
        self._board.release(number)
        # A failed device writes nothing. Its error is dropped: the caller raises the first error.
        with contextlib.suppress(TransportError):
            for at in (self._board.ready_at(self._at), self._board.done_at(self._at)):
                self._device.write_word(self._stream, self._words + at, number + _AHEAD & WORD)

    def _drop_done(self, number: int) -> None:
        """Remove finished calls up to `number` from the calls in progress."""
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
    """Return the number of arrays that a kernel reads, and the number that it writes."""
    ninputs = 1 if collective in (Collective.ALLGATHER, Collective.BROADCAST) else nranks
    noutputs = 1 if collective in (Collective.REDUCE, Collective.REDUCE_SCATTER) else nranks
    return ninputs, noutputs


_TABLE_NBYTES = 3 * MOST_RANKS * 8

__all__ = ["MOST_RANKS", "CallInfo", "InterNodeJob", "PeerBackend", "PeerJob", "PeerKernels"]
