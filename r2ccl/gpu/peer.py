"""Collectives among the GPUs of one node, which read and write each other's memory.

Theory of operation
-------------------
Each rank does a part of the work: one kernel reads that part of the inputs and writes the result
to its destinations. No data passes through the host or a rail. When the user calls a
collective, the rank posts the location of its arrays on an `IpcBoard`, in memory that all processes
of the node and their GPUs share. The communicator's worker reads the messages of all ranks, and
then enqueues the work of the call on a stream of its own, in *rounds*:

::

    tell all: ready = n    my input is complete, my output may be overwritten
    wait for ready of all
    run the kernel
    tell all: done = n
    wait for done of all   my input was read, my output is complete

The words ``ready`` and ``done`` are on the board, in the section of the rank that reads them. A
call is one round if all ranks have mapped all its arrays (`r2ccl.gpu.peer_memory`). Otherwise the
call is divided into windows that fit the ranks' areas, with a round for each window. A rank whose
input is not mapped copies each input window to its area; a rank whose output is not mapped copies
each output window from its area.

If a rank dies, the CPU of each surviving rank writes the words for which its own stream waits, so
that no stream hangs, and the communicator ends. Kernels that have not run yet then do nothing: a
kernel reads the addresses of its operands from a table in pinned memory, and the CPU sets the first
of these addresses to 0.

Invariants: a stream waits only for earlier work of its own rank, or for a word that another rank's
stream writes without waiting for later work; a peer's memory is accessed only between the peer's
``ready`` and this rank's ``done``.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from r2ccl.clock import Clock
from r2ccl.device.base import Device, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.errors import CommunicatorRevoked, InvalidArgument, TransportError, TransportTimeout
from r2ccl.gpu.host_signal import DeviceCall, DeviceJob, SignalledStream
from r2ccl.gpu.ipc_board import MOST_RANKS
from r2ccl.gpu.peer_memory import ABSENT, COPIED, AllocationOffer, ArrayPlace, PeerMemory
from r2ccl.gpu.staged_windows import Window, WindowGrid, window_grid, windows
from r2ccl.kernels.cuda.form import has_kernels
from r2ccl.runtime.progress import describe
from r2ccl.types import CallSignature, Collective

Array = npt.NDArray[Any]

#: Number of bytes that kernels read and write at once; parts begin at multiples of it.
_VECTOR_NBYTES = 16
#: Number of address tables, which rounds use in turn. It limits how many rounds are enqueued ahead:
#: a launch queue holds about 1,024 operations, and a round of 8 ranks has some 30.
_NTABLES = 16
#: Number of rounds that is larger than the lead of any rank over another rank.
_AHEAD = 1 << 20
#: Interval at which the board is polled, in seconds.
_POLL_S = 20e-6
#: Number of calls whose addresses are kept for later calls with the same messages.
_MOST_REPEATED = 64
#: Size limit of windows if all arrays are mapped: none.
_UNLIMITED = 1 << 62

_CALL_INFO = struct.Struct("<QbQbQBQ64sQ")


class CallInfo(NamedTuple):
    """Message that a rank posts for a call.

    ``signature`` is the packed `CallSignature`, ``source`` and ``output`` are the places of the
    rank's arrays, and ``offer`` and ``gone`` are the results of `PeerMemory.take_news`.
    """

    signature: int
    source: ArrayPlace
    output: ArrayPlace
    offer: AllocationOffer
    gone: int

    def pack(self) -> bytes:
        """Return the message as bytes."""
        return _CALL_INFO.pack(self.signature, *self.source, *self.output, *self.offer, self.gone)

    @classmethod
    def unpack(cls, packed: bytes) -> CallInfo:
        """Return the message from the bytes that `pack` returned."""
        signature, *given, gone = _CALL_INFO.unpack_from(packed)
        return cls(
            signature,
            ArrayPlace(*given[:2]),
            ArrayPlace(*given[2:4]),
            AllocationOffer(*given[4:]),
            gone,
        )


class PeerJob(DeviceJob):
    """A call that a `PeerBackend` has begun.

    ``last`` is the number of the last round enqueued for the call; 0 before the first one.
    """

    last: int = 0


class Rows(NamedTuple):
    """A window of an array: address of its first row, and distance between its rows in bytes."""

    address: int
    pitch: int

    def row(self, number: int) -> int:
        """Return the address of row `number` of the window, counted from 0."""
        return self.address + number * self.pitch


class _Share(NamedTuple):
    """A rank's part of the work: elements ``[start, start + length)``."""

    start: int
    length: int


class _Views(NamedTuple):
    """Signature of a window's call, and the window of each rank's input and output.

    The windows are ordered by the position of the ranks in the node.
    """

    call: CallSignature
    sources: list[Rows]
    outputs: list[Rows]


class PeerKernels(Protocol):
    """Loader and launcher of kernels that read the addresses of their operands from a table."""

    def prepare_from_table(self, call: CallSignature, ninputs: int, noutputs: int) -> None:
        """Load the kernel that `launch_from_table` launches with the same first three arguments.

        May wait for the device.

        Raises
        ------
        InvalidArgument
            If the GPU is too old for the kernel.
        TransportError
            If the kernel cannot be compiled, or the device failed.
        """
        ...

    def launch_from_table(
        self, call: CallSignature, ninputs: int, noutputs: int, table: int, count: int,
        nranks: int, stream: Stream,
    ) -> None:  # fmt: skip
        """Enqueue a kernel that reduces or copies `count` elements.

        Parameters
        ----------
        call : CallSignature
            Call with the dtype and the op.
        ninputs, noutputs : int
            Number of inputs and outputs. A single input is copied, and with AVG divided.
        table : int
            Address of a table with the addresses of all inputs, then of all outputs, 8 bytes each.
            If the first address is 0 when the kernel runs, the kernel does nothing.
        count : int
            Number of elements of each input and output.
        nranks : int
            Divisor of AVG.
        stream : Stream

        Raises
        ------
        TransportError
            If the device failed.
        """
        ...


class PeerBackend(SignalledStream):
    """Collectives of one rank with kernels that access the memory of all GPUs of its node.

    Parameters
    ----------
    device : Device
    kernels : PeerKernels
    memory : PeerMemory
        Memory of the ranks of the node; the backend owns and closes it.
    members : sequence of int
        Ranks of the node, in the order of the sections of the board.
    check : callable
        Raises the error that ended the communicator, if it has ended.
    clock : Clock
    sleep : callable
        ``sleep(seconds)`` lets other threads run.
    timeout_s : float
        Longest wait in `prepare`, `begin` or `finish`, in seconds.
    """

    #: Index of each kernel's first address in a table.
    _heads: Sequence[int] = (0,)

    def __init__(
        self,
        device: Device,
        kernels: PeerKernels,
        memory: PeerMemory,
        members: Sequence[int],
        *,
        check: Callable[[], None],
        clock: Clock,
        sleep: Callable[[float], None],
        timeout_s: float,
    ) -> None:
        members, board = tuple(members), memory.board
        super().__init__(
            device, members[board.index], check=check, clock=clock, timeout_s=timeout_s, waits=True
        )
        self._sleep = sleep
        self._kernels = kernels
        self._memory = memory
        self._board = board
        self._members = members
        #: This rank's index in the node, and the number of ranks in the node.
        self._at, self._nlocal = board.index, board.nlocal
        self._words = device.pin(board.memory)
        #: Addresses of the words that this rank's stream writes, and of those that it waits for:
        #: before the kernel of a round, and after the kernel.
        self._ready = self._words_of(board.ready_at)
        self._done = self._words_of(board.done_at)
        self._tables = device.allocate_pinned(_NTABLES * _TABLE_NBYTES)
        #: Number of rounds enqueued; only the worker changes it.
        self._nrounds = 0
        #: Views of calls with one round, by the call and the messages of all ranks.
        self._repeated: dict[tuple[DeviceCall, tuple[bytes, ...]], _Views] = {}
        #: Collective, dtype and op of loaded kernels.
        self._prepared: set[tuple[int, int, int]] = set()
        #: Calls that were enqueued and may still be in progress.
        self._jobs: list[PeerJob] = []
        #: First error after which `_release_streams` was called; it makes every later call fail.
        self._broken: BaseException | None = None

    def supports(self, call: DeviceCall) -> bool:
        """Return whether `call` has no user-defined schedule, and kernels for `call` exist."""
        return call.schedule is None and has_kernels(call.signature)

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether `begin` can be called for `call` without calling `prepare` first."""
        return not self._memory.is_change_due and _kernels_of(call) in self._prepared

    def prepare(self, call: DeviceCall) -> None:
        """Load the kernels of `call`, and map memory that other ranks have offered.

        Raises
        ------
        InvalidArgument
            If the GPU is too old for the kernels.
        TransportTimeout
            If the device is still busy with earlier calls after the timeout.
        TransportError
            If the device failed, or a kernel cannot be compiled.
        """
        if self._memory.is_change_due:
            if not self._is_idle_in(self._timeout_s):
                raise self._still_busy("works", self._timeout_s)
            self._memory.map_news()
            self._repeated.clear()
        if _kernels_of(call) not in self._prepared:
            self._load(call.signature)
            self._prepared.add(_kernels_of(call))

    def begin(self, call: DeviceCall, stream: Stream) -> PeerJob:
        """Begin a call that follows the work on `stream` so far, and post it to the other ranks.

        If another rank of the node has not read the message of 64 calls ago, wait for that rank.
        Only an event is enqueued on `stream`.

        Returns
        -------
        PeerJob
            Argument of `finish`, which the worker must call for each job in the order of `begin`.

        Raises
        ------
        TransportTimeout
            If another rank has not read that message in time; the call was not begun.
        TransportError
            If the device failed; the call was not begun.
        R2cclError
            If the communicator ended during the wait for that rank.
        """
        number = self._number + 1
        self._await_room(number)
        count = call.signature.count
        output = source = self._memory.place_of(call.source if count else 0)
        if call.output != call.source:
            output = self._memory.place_of(call.output if count else 0)
        before = self._recorded(stream)
        done = self.take_event()
        info = CallInfo(call.signature.pack(), source, output, *self._memory.take_news())
        self._board.post(number, info.pack())
        return PeerJob(call=call, before=before, done=done, number=self._next_number())

    def finish(self, job: PeerJob) -> None:
        """Execute the call of `job`: enqueue its work, and wait until the device has finished it.

        This method runs in the worker thread. Before it enqueues the work, it waits until all ranks
        of the node have made the call. If a later call was begun, that call waits for the
        device instead. After an error, this rank lets its own stream continue and, if its GPU still
        works, the streams of the other ranks; all later calls fail.

        Raises
        ------
        InvalidArgument
            If another rank made a different call.
        TransportTimeout
            If another rank did not call, or the device did not finish, in time.
        TransportError
            If the device failed, or another rank of the node failed before it finished its part.
        R2cclError
            If the communicator ended.
        Exception
            The error of an earlier call, if one has failed.
        """
        try:
            if self._broken is not None:
                raise self._broken
            until_s = self._clock() + self._timeout_s
            packed = tuple(self._read(at, job.number, until_s) for at in range(self._nlocal))
            self._board.take(job.number)
            self._jobs.append(job)
            repeated = self._repeated.get((job.call, packed))
            if repeated is None:
                self._enqueue_new(job, packed, until_s)
            else:
                self._device.wait(self._stream, job.before)
                self._round(job, repeated, until_s)
            self._end(job)
            self._watch(job, until_s)
            if self._device.is_done(job.done):
                self.examine(job)
            self._drop_done()
        except BaseException as exc:
            job.error = job.error or exc
            self._release_streams(exc)
            self._end(job)
            raise

    def examine(self, job: DeviceJob) -> None:
        """Raise the error of the call of `job`, if the call failed.

        The device must have finished the call. If another rank of the node had failed before it
        finished its part, this call has failed too, although the rounds of this call have ended.
        """
        assert isinstance(job, PeerJob)
        if job.error is None:
            job.error = self._error_of_others(job.last)
        super().examine(job)

    def close(self, timeout_s: float) -> None:
        """Wait for the device, then free all resources; calls that are not complete fail.

        The worker must be idle. Only the area of this rank (`PeerMemory`) stays allocated until the
        device is closed.

        Raises
        ------
        TransportTimeout
            If a stream of the backend or of a caller is still busy after a wait of `timeout_s`
            seconds; nothing was freed.
        TransportError
            If the device failed; not all resources were freed.
        """
        if not self._board.is_complete(self._nrounds):
            self._release_streams(
                CommunicatorRevoked(
                    f"rank {self._rank}: the communicator was closed before its collectives on GPU "
                    "memory were done; wait for them first"
                )
            )
        if not self._let_go(timeout_s):
            raise self._still_busy("works", timeout_s)
        self._free()
        self._memory.close()
        self._device.unpin(self._board.memory)
        self._device.free_pinned(self._tables)

    def _error_of_others(self, number: int) -> TransportError | None:
        """Return an error if a rank of the node failed before it finished round `number`.

        If this rank knows the error that ended the communicator, raise that error instead.
        """
        for at in self._board.failed_before(number):
            self._check()
            return TransportError(
                f"rank {self._rank}: rank {self._members[at]} failed in a collective on GPU "
                "memory, so the result of this collective may be incomplete; the log of "
                "that rank has the cause",
                rank=self._rank,
                peer=self._members[at],
                status="PEER_FAILED",
            )
        return None

    # Device

    def _load(self, call: CallSignature) -> None:
        self._kernels.prepare_from_table(call, *_operands(call.collective, self._nlocal))

    def _enqueue_new(self, job: PeerJob, packed: tuple[bytes, ...], until_s: float) -> None:
        """Enqueue the work of a call that has no entry in `_repeated`."""
        infos = [CallInfo.unpack(each) for each in packed]
        self._require_same(infos)
        for at, info in enumerate(infos):
            if at != self._at:
                self._memory.learn(at, info.offer, info.gone)
        signature = job.call.signature
        is_copied = any(COPIED in (info.source.slot, info.output.slot) for info in infos)
        grid = self._grid(signature, self._limit(is_copied))
        self._device.wait(self._stream, job.before)
        for window in windows(signature, grid):
            views = self._views(job, infos, grid, window)
            if infos[self._at].source.slot == COPIED:
                self._copy_in(job, grid, window)
            self._round(job, views, until_s)
            if is_copied:
                # Nothing that uses an area may be enqueued behind a round that may fail.
                self._await_round(job, self._board.is_complete, self._nrounds, until_s)
                if infos[self._at].output.slot == COPIED:
                    self._copy_out(job, grid, window)
            elif grid.nwindows == 1 and not any(info.offer.number or info.gone for info in infos):
                if len(self._repeated) >= _MOST_REPEATED:
                    self._repeated.clear()
                self._repeated[job.call, packed] = views

    def _await_round(
        self, job: PeerJob, is_over: Callable[[int], bool], number: int, until_s: float
    ) -> None:
        while not is_over(number):
            self._device.is_done(job.before)  # raises if the device failed
            self._pause(job.number, until_s, "GPUs of its node have not finished earlier work")

    def _limit(self, is_copied: bool) -> int:
        """Return the size limit in bytes of the windows of a call, the same on all ranks.

        `is_copied` is True if a rank copies an array of the call through its area.
        """
        return self._memory.area_nbytes if is_copied else _UNLIMITED

    def _grid(self, call: CallSignature, limit_nbytes: int) -> WindowGrid:
        return window_grid(call, dtype_of(call.dtype).itemsize, self._nlocal, limit_nbytes)

    def _round(self, job: PeerJob, views: _Views, until_s: float) -> None:
        """Enqueue the barriers and kernels of a window."""
        self._await_round(job, self._board.has_done, self._nrounds + 1 - _NTABLES, until_s)
        self._nrounds += 1
        job.last = number = self._nrounds
        self._device.exchange_words(self._stream, number, *self._ready)
        self._work(*views, self._table_of(number))
        self._device.exchange_words(self._stream, number, *self._done)

    def _views(
        self, job: PeerJob, infos: Sequence[CallInfo], grid: WindowGrid, window: Window
    ) -> _Views:
        call, half = job.call, self._memory.area_nbytes
        sources = [
            self._rows(at, info.source, call.source, grid, window, 0)
            for at, info in enumerate(infos)
        ]
        outputs = [
            self._rows(at, info.output, call.output, grid, window, half)
            for at, info in enumerate(infos)
        ]
        return _Views(window.call, sources, outputs)

    def _rows(
        self, at: int, place: ArrayPlace, own: int, grid: WindowGrid, window: Window, half: int
    ) -> Rows:
        """Return the window of an array of member `at`.

        `place` is the place of the array. `own` is the address of the array if this rank is member
        `at`. `half` is the offset in bytes of the window in the area of member `at`, if the array
        is copied.
        """
        itemsize = dtype_of(window.call.dtype).itemsize
        if place.slot == ABSENT:
            return Rows(0, 0)
        if place.slot == COPIED:
            return Rows(self._memory.areas[at] + half, window.length * itemsize)
        address = own if at == self._at else self._memory.address(at, place)
        return Rows(address + window.start * itemsize, grid.width * itemsize)

    def _copy_in(self, job: PeerJob, grid: WindowGrid, window: Window) -> None:
        """Copy a window of this rank's array to its area, if the array is read."""
        at, nbytes, pitch = self._window_of(grid, window)
        kind, root = job.call.signature.collective, job.call.signature.root
        if nbytes and (kind != Collective.BROADCAST or root == self._rank):
            nrows = 1 if kind == Collective.ALLGATHER else grid.nrows
            area, array = self._memory.areas[self._at], job.call.source + at
            self._copy_rows(area, nbytes, array, pitch, nbytes, nrows, self._stream)

    def _copy_out(self, job: PeerJob, grid: WindowGrid, window: Window) -> None:
        """Copy a window of the result from this rank's area to its array."""
        at, nbytes, pitch = self._window_of(grid, window)
        if nbytes:
            is_part = job.call.signature.collective == Collective.REDUCE_SCATTER
            area = self._memory.areas[self._at] + self._memory.area_nbytes
            nrows = 1 if is_part else grid.nrows
            array = job.call.output + at
            self._copy_rows(array, pitch, area, nbytes, nbytes, nrows, self._stream)

    @staticmethod
    def _window_of(grid: WindowGrid, window: Window) -> tuple[int, int, int]:
        """Return a window's offset and size in one row, and the distance between rows, in bytes."""
        itemsize = dtype_of(window.call.dtype).itemsize
        return window.start * itemsize, window.length * itemsize, grid.width * itemsize

    def _words_of(
        self, word_at: Callable[[int, int], int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the addresses of the words that this rank's stream writes, and of those it awaits.

        In a round, the stream writes this rank's word in the sections of all ranks, and waits for
        the words of the other ranks in this rank's section. `word_at` is `IpcBoard.ready_at` or
        `IpcBoard.done_at`.
        """
        me, first, members = self._at, self._words, range(self._nlocal)
        written = tuple(first + word_at(at, me) for at in members)
        return written, tuple(first + word_at(me, at) for at in members if at != me)

    def _work(
        self, call: CallSignature, sources: Sequence[Rows], outputs: Sequence[Rows], table: Array
    ) -> None:
        """Enqueue the kernel of a window, after filling its table of addresses."""
        share = self._share_of(call)
        at = share.start * dtype_of(call.dtype).itemsize
        kind, me = call.collective, self._at
        if kind == Collective.ALLGATHER:
            addresses = [sources[me].address, *(each.row(me) for each in outputs)]
        elif kind == Collective.REDUCE_SCATTER:
            addresses = [*(each.row(me) for each in sources), outputs[me].address]
        elif kind == Collective.BROADCAST:
            addresses = [sources[call.root].address + at, *(row.address + at for row in outputs)]
        elif kind == Collective.REDUCE:
            addresses = [*(row.address + at for row in sources), outputs[call.root].address + at]
        else:
            addresses = [row.address + at for row in (*sources, *outputs)]
        ninputs, noutputs = _operands(kind, self._nlocal)
        self._launch(call, ninputs, noutputs, table, addresses)

    def _launch(
        self, call: CallSignature, ninputs: int, noutputs: int, table: Array,
        addresses: Sequence[int],
    ) -> None:  # fmt: skip
        length = self._share_of(call).length
        if length:
            table[: len(addresses)] = addresses
            self._kernels.launch_from_table(
                call, ninputs, noutputs, int(table.ctypes.data), length, self._nlocal, self._stream
            )

    def _share_of(self, call: CallSignature, at: int | None = None) -> _Share:
        """Return the elements of a call on which the kernel of member `at` works.

        The default of `at` is this rank. Parts that are not empty begin at multiples of
        `_VECTOR_NBYTES` bytes; no part is larger than the first. In allgather and reduce_scatter
        every member works on one whole row, so its part starts at 0.
        """
        if call.collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):
            return _Share(0, call.count // self._nlocal)
        vector = max(1, _VECTOR_NBYTES // dtype_of(call.dtype).itemsize)
        each = -(-call.count // (vector * self._nlocal)) * vector
        start = min(call.count, (self._at if at is None else at) * each)
        return _Share(start, min(each, call.count - start))

    # Host

    def _await_room(self, number: int) -> None:
        """Wait until all ranks of the node have read the message that this call overwrites."""
        until_s = self._clock() + self._timeout_s
        while not self._board.may_post(number):
            self._pause(number, until_s, "ranks of the same node are still 64 calls behind")

    def _read(self, at: int, number: int, until_s: float) -> bytes:
        packed = self._board.read(at, number)
        while packed is None:
            self._pause(number, until_s, f"rank {self._members[at]} has not made this call")
            packed = self._board.read(at, number)
        return packed[: _CALL_INFO.size]

    def _pause(self, number: int, until_s: float, why: str) -> None:
        self._check()
        if self._clock() >= until_s:
            raise TransportTimeout(
                f"rank {self._rank}: {why} after a wait of {self._timeout_s:g} s in collective "
                f"{number} on GPU memory; look for a late rank on the same node or a kernel that "
                "hangs, or raise the timeout (timeout_s= or R2CC_TIMEOUT_S)",
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

    def _watch(self, job: PeerJob, until_s: float) -> None:
        """Wait until the device has finished the call.

        Return early if a later call was begun, because waiting for the later call is enough.
        """
        self._wait(
            lambda s: job.number != self._number or self._device.synchronize(job.done, s),
            until_s,
            f"collective {job.number} on the memory of its node's GPUs",
        )

    def _release_streams(self, error: BaseException) -> None:
        """Let this rank's stream continue without the other ranks, because the communicator ends.

        The first call of this method tells the other ranks of the node that this rank fails
        (`IpcBoard.fail`). Kernels that have not run do nothing, and calls that are not complete
        fail with `error`. The host sets the words for which this rank's stream waits to the number
        of the last round. Streams of other ranks may still overwrite these words with lower
        numbers, until those ranks call this method, too. Last, this rank enqueues a write to its
        words in the sections of all ranks, with a number above that of any round, so that no stream
        waits for this rank.
        """
        if self._broken is None:
            self._board.fail()
        self._broken = self._broken or error
        number = self._nrounds
        for job in self._jobs:
            if not self._board.is_complete(job.last):
                job.error = job.error or error
        # Clear only the first address for each kernel: a kernel that has read it needs the others.
        self._tables.view(np.uint64).reshape(_NTABLES, -1)[:, self._heads] = 0
        self._board.release(number)
        # A failed device writes nothing. Its error is dropped: the caller raises the first error.
        with contextlib.suppress(TransportError):
            for written, _ in (self._ready, self._done):
                self._device.exchange_words(self._stream, number + _AHEAD, written, ())

    def _drop_done(self) -> None:
        while self._jobs and self._board.is_complete(self._jobs[0].last):
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

__all__ = ["CallInfo", "PeerBackend", "PeerJob", "PeerKernels", "Rows"]
