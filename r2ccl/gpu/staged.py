"""Collectives on GPU memory that pass through pinned host memory in windows.

Theory of operation
-------------------
A call is divided into windows (`r2ccl.gpu.staged_windows`), which use two slots of pinned memory in
turn. The communicator's worker thread enqueues the copy of a window to its slot on one stream,
waits for the copy, runs the collective on the slot, and enqueues the copy of the result on another
stream.
Two copies to slots are enqueued ahead, so the collective of one window overlaps copies of others.
The caller's stream waits for the call (`r2ccl.gpu.host_signal`); no stream of this module waits
for the host.

Copies *out* go from the caller's arrays to the slots; copies *in* go from the slots to the caller's
arrays. Invariant: a slot is overwritten only after its previous contents were copied in, which an
event ensures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import numpy.typing as npt

from r2ccl.clock import Clock
from r2ccl.device.base import Device, Event, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.gpu.host_signal import DeviceCall, DeviceJob, HostMemoryBackend
from r2ccl.gpu.plan_selector import EnterCall
from r2ccl.gpu.staged_windows import Window, WindowGrid, window_grid, windows
from r2ccl.types import CallSignature, Collective

Array = npt.NDArray[Any]
#: Function that runs a collective on host memory, given its plan, source and output.
HostRun = Callable[[Any, Array, Array], None]

_NSLOTS = 2


class _Rows(NamedTuple):
    """Rows of a window that are copied: ``number`` rows, starting with row ``first``."""

    first: int
    number: int


class StagedJob(DeviceJob):
    """A call that a `StagedBackend` has begun.

    ``enter`` enters the collective of a window and returns its plan. If ``widest`` is larger than
    the number of elements of the call, the call has as many windows as a call of ``widest``
    elements.
    """

    enter: EnterCall
    widest: int = 0


class StagedBackend(HostMemoryBackend[StagedJob]):
    """Collectives of one rank through two staging buffers (slots) in pinned memory.

    Parameters
    ----------
    device : Device
    rank, nranks : int
    slot_nbytes : int
        Size of each slot in bytes; at least `r2ccl.gpu.staged_windows.least_limit_nbytes`.
    enter : callable
        Enters a collective among all ranks and returns its plan; see `EnterCall`.
    run : callable
        Runs a planned collective on host memory; see `HostRun`.
    check, clock, timeout_s
        See `HostMemoryBackend`.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        nranks: int,
        *,
        slot_nbytes: int,
        enter: EnterCall,
        run: HostRun,
        check: Callable[[], None],
        clock: Clock,
        timeout_s: float,
    ) -> None:
        super().__init__(device, rank, check=check, clock=clock, timeout_s=timeout_s)
        self._nranks = nranks
        self._enter = enter
        self._run = run
        self._slot_nbytes = slot_nbytes
        self._slots = [device.allocate_pinned(slot_nbytes) for _ in range(_NSLOTS)]
        #: By slot, the event after the last copy from the slot.
        self._copied_in = [device.make_event() for _ in range(_NSLOTS)]
        #: Recorded by `_follow_copies` after the last copy to a slot.
        self._copied_out = device.make_event()
        #: Stream of copies to the slots; `_stream` has those from the slots.
        self._out = device.make_stream()

    def supports(self, call: DeviceCall, nranks: int = 0) -> bool:
        """Return True: this backend supports every call that `CopiedBackend` does not execute."""
        return True

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return True: no call needs `prepare`."""
        return True

    def prepare(self, call: DeviceCall) -> None:
        """Do nothing: no call needs preparation."""

    def begin(self, call: DeviceCall, stream: Stream) -> StagedJob:
        """Begin a call of all ranks that follows all work enqueued on `stream` so far.

        Only an event is enqueued on `stream`.

        Parameters
        ----------
        call : DeviceCall
        stream : Stream
            Stream of the caller.

        Returns
        -------
        StagedJob
            Argument of `finish`, which the worker must call for each job in the order of `begin`.

        Raises
        ------
        TransportError
            If the device failed; the call was not begun.
        """
        return StagedJob(
            call=call, before=self._recorded(stream), done=self.take_event(),
            number=self._next_number(), enter=self._enter,
        )  # fmt: skip

    def begin_part(
        self, call: DeviceCall, stream: Stream, enter: EnterCall, widest: int
    ) -> StagedJob:
        """Begin a call that is a part of another call; only the worker thread may call this method.

        The part has no number, so `hold` cannot make a stream wait for it. Instead, after `finish`,
        the caller must make its stream wait for the event ``done`` of the job, and then give the
        event back with `recycle`.

        Parameters
        ----------
        call : DeviceCall
            Signature and arrays of the part.
        stream : Stream
            The part follows all work enqueued on this stream so far.
        enter : callable
            Enters the collective of each window and returns its plan; see `EnterCall`.
        widest : int
            Number of elements of the largest part among all ranks. Every part is divided into as
            many windows as the largest one, so that all ranks run the same number of collectives.

        Returns
        -------
        StagedJob
            Argument of `finish`, which the worker must call for the part.

        Raises
        ------
        TransportError
            If the device failed; the part was not begun.
        """
        return StagedJob(
            call=call, before=self._recorded(stream), done=self.take_event(), number=0,
            enter=enter, widest=widest,
        )  # fmt: skip

    def _free(self) -> None:
        self._events += [*self._copied_in, self._copied_out]
        super()._free()
        self._device.destroy_stream(self._out)
        for slot in self._slots:
            self._device.free_pinned(slot)

    def _follow_copies(self) -> None:
        self._device.record(self._copied_out, self._out)
        self._device.wait(self._stream, self._copied_out)

    # Host

    def _carry_out(self, job: StagedJob) -> None:
        signature = job.call.signature
        itemsize = dtype_of(signature.dtype).itemsize
        grid = window_grid(signature, itemsize, self._nranks, self._slot_nbytes, job.widest)
        self._device.wait(self._out, job.before)
        for event in self._copied_in:  # the previous call may have written the same arrays
            self._device.wait(self._out, event)
        ahead, pending = windows(signature, grid), deque[tuple[Window, Event]]()
        for at, window in enumerate(islice(ahead, _NSLOTS)):
            pending.append((window, self._copy_out(job, grid, window, at % _NSLOTS)))
        at = 0
        while pending:
            window, fetched = pending.popleft()
            self._await_copies(fetched)
            self._run_window(window, at % _NSLOTS, job, grid)
            self._copy_in(job, grid, window, at % _NSLOTS)
            for following in islice(ahead, 1):
                event = self._copy_out(job, grid, following, at % _NSLOTS)
                pending.append((following, event))
            at += 1

    def _copy_out(self, job: StagedJob, grid: WindowGrid, window: Window, slot: int) -> Event:
        """Enqueue the copy of `window` to its slot.

        The copy waits on the GPU until the slot is free. Return the event that is done when the
        slot contains the window or, if this rank reads nothing, when the slot is free.
        """
        self._device.wait(self._out, self._copied_in[slot])
        signature = job.call.signature
        rows = self._rows_read(signature)
        if rows.number and window.length:
            # The input of an allgather has only this rank's row.
            skip = rows.first if signature.collective == Collective.ALLGATHER else 0
            itemsize = dtype_of(signature.dtype).itemsize
            nbytes, pitch = window.length * itemsize, grid.width * itemsize
            source = job.call.source + window.start * itemsize + (rows.first - skip) * pitch
            target = self._address(slot) + rows.first * nbytes
            self._copy_rows(target, nbytes, source, pitch, nbytes, rows.number, self._out)
        # Record the event even if nothing is copied: it is done when the slot is free.
        return self._recorded(self._out)

    def _copy_in(self, job: StagedJob, grid: WindowGrid, window: Window, slot: int) -> None:
        """Enqueue the copy of a window's result from its slot."""
        rows = self._rows_written(job.call)
        if rows.number and window.length:
            is_part = job.call.signature.collective == Collective.REDUCE_SCATTER
            itemsize = dtype_of(job.call.signature.dtype).itemsize
            nbytes, pitch = window.length * itemsize, grid.width * itemsize
            target = job.call.output + window.start * itemsize
            target += 0 if is_part else rows.first * pitch
            source = self._address(slot) + self._sums_at(job, grid, window) * itemsize
            source += rows.first * nbytes
            self._copy_rows(target, pitch, source, nbytes, nbytes, rows.number, self._stream)
        self._device.record(self._copied_in[slot], self._stream)

    def _rows_read(self, signature: CallSignature) -> _Rows:
        kind = signature.collective
        if kind == Collective.ALLGATHER:
            return _Rows(self._rank, 1)
        if kind == Collective.REDUCE_SCATTER:
            return _Rows(0, self._nranks)
        is_source = kind != Collective.BROADCAST or signature.root == self._rank
        return _Rows(0, int(is_source))

    def _rows_written(self, call: DeviceCall) -> _Rows:
        kind = call.signature.collective
        if kind == Collective.ALLGATHER:
            return _Rows(0, self._nranks)
        if kind == Collective.REDUCE_SCATTER:
            return _Rows(self._rank, 1)
        return _Rows(0, int(call.output != 0))

    def _sums_at(self, job: StagedJob, grid: WindowGrid, window: Window) -> int:
        """Return the offset of a window's result in its slot, in elements."""
        kind = job.call.signature.collective
        is_apart = kind in (Collective.REDUCE_SCATTER, Collective.REDUCE)
        return window.length * grid.nrows if is_apart else 0

    def _run_window(self, window: Window, at: int, job: StagedJob, grid: WindowGrid) -> None:
        dtype = dtype_of(window.call.dtype)
        slot = self._slots[at]
        data = slot[: window.call.count * dtype.itemsize].view(dtype)
        first = self._sums_at(job, grid, window) * dtype.itemsize
        sums = slot[first : first + data.nbytes].view(dtype)
        self._run(job.enter(window.call, job.call.schedule), data, sums)

    def _address(self, slot: int) -> int:
        return int(self._slots[slot].ctypes.data)


__all__ = ["HostRun", "StagedBackend", "StagedJob"]
