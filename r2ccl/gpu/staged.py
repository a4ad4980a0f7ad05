"""Collectives on GPU memory through pinned host memory, for rails that access only host memory.

Theory of operation
-------------------
A call is divided into windows (`r2ccl.gpu.staged_windows`). When the user calls, all of the
device's work is enqueued on one stream: copy windows 0 and 1 out, into two slots of pinned memory;
wait until the host has finished window 0; copy its result in; copy window 2 out into the same slot;
and so on. The stream waits for a word in pinned memory that counts windows
(`r2ccl.gpu.host_signal`). For each window the communicator's worker waits for the copy, runs the
collective on the slot, and increments the word. So the copies of one window overlap the collective
of another, and the caller's thread never waits.

A full hardware queue cannot cause a deadlock: the copy that must precede an increment of the word
was enqueued on the same stream before the wait. After a failed call the host increments the word
past all windows of the call, so that no stream hangs; the result is undefined then, and the
communicator ends.

Invariants: the stream's order ensures that a slot is written only after its previous contents were
copied in; the word only increases, in the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt

from r2ccl.clock import Clock
from r2ccl.device.base import Device, Event, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.errors import TransportTimeout
from r2ccl.gpu.host_signal import SignalledStream
from r2ccl.gpu.plan_selector import EnterCall
from r2ccl.gpu.staged_windows import Window, WindowGrid, window_grid, windows
from r2ccl.schedule.ir import Schedule
from r2ccl.types import CallSignature, Collective

Array = npt.NDArray[Any]
#: Function that runs a collective on host memory, given its plan, source and output.
HostRun = Callable[[Any, Array, Array], None]

_NSLOTS = 2
#: Interval at which a wait for the device checks whether the communicator has ended, in seconds.
_LOOK_S = 0.05


class DeviceCall(NamedTuple):
    """A collective on GPU memory.

    ``source`` and ``output`` are addresses; ``output`` is 0 if this rank has no output.
    ``schedule`` is the user-defined schedule of an allreduce, if there is one.
    """

    signature: CallSignature
    source: int
    output: int
    schedule: Schedule | None = None


class _Rows(NamedTuple):
    """Rows of a window that are copied: `number` of them from `first`."""

    first: int
    number: int


class StagedJob(msgspec.Struct, eq=False):
    """The host's part of a call.

    ``enter`` begins the collective of a window and returns its plan. ``grid`` divides the call into
    windows.
    """

    call: DeviceCall
    enter: EnterCall
    grid: WindowGrid
    #: Windows enqueued so far, each with the event of its copy out and its number.
    windows: list[tuple[Window, Event, int]]
    #: Error of the call, if it failed.
    error: BaseException | None = None


class StagedBackend(SignalledStream):
    """Collectives of one rank through two staging buffers (slots) in pinned memory.

    Parameters
    ----------
    device : Device
    rank, nranks : int
    slot_nbytes : int
        Size of each slot in bytes; at least `least_limit_nbytes` of
        `r2ccl.gpu.staged_windows`, or windows of few elements exceed the slot.
    enter : callable
        Begins a collective among all ranks and returns its plan.
    run : callable
        Runs a planned collective on host memory.
    check : callable
        Raises the error that ended the communicator, if it has ended.
    clock : Clock
    timeout_s : float
        Time limit for the caller's earlier work on the device, in seconds.
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
        super().__init__(device, rank)
        self._nranks = nranks
        self._enter = enter
        self._run = run
        self._check = check
        self._clock = clock
        self._timeout_s = timeout_s
        self._slot_nbytes = slot_nbytes
        self._slots = [device.allocate_pinned(slot_nbytes) for _ in range(_NSLOTS)]
        #: Number of windows that all calls have enqueued.
        self._nenqueued = 0

    def supports(self, call: DeviceCall, nranks: int = 0) -> bool:
        """Return True: every call is supported."""
        return True

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return True: no call needs `prepare`."""
        return True

    def prepare(self, call: DeviceCall) -> None:
        """Do nothing: no call needs preparation."""

    def begin(
        self, call: DeviceCall, stream: Stream, enter: EnterCall | None = None, widest: int = 0
    ) -> tuple[StagedJob, Event]:
        """Enqueue all of the device's work on the backend's stream, after the work of `stream`.

        Parameters
        ----------
        call : DeviceCall
        stream : Stream
            Stream of the caller, whose earlier work precedes the call.
        enter : callable, optional
            Begins the collective of each window and returns its plan; default: a collective of all
            ranks.
        widest : int, optional
            Number of elements of the widest call that must have as many windows as this one.

        Returns
        -------
        StagedJob
            Argument of `finish` or `abandon`; the caller must call one of them, in the order of
            `begin`, even if the job's ``error`` is set. ``error`` is set if not all work could be
            enqueued; the backend's stream may wait nevertheless.
        Event
            Event that is done when the result is complete. Return it with `recycle`.

        Raises
        ------
        TransportError
            If the device could not create an event; nothing was enqueued.
        """
        done = self.take_event()
        itemsize = dtype_of(call.signature.dtype).itemsize
        grid = window_grid(call.signature, itemsize, self._nranks, self._slot_nbytes, widest)
        job = StagedJob(call, enter or self._enter, grid, [])
        try:
            self._follow(stream, done)
            self._enqueue(job, itemsize)
            self._device.record(done, self._stream)
        except Exception as exc:
            job.error = exc
        return job, done

    def abandon(self, job: StagedJob, error: BaseException) -> None:
        """Let the stream continue, because another part of the call failed.

        Call it instead of `finish`, or after `finish` if the other part failed later. A repeated
        call does nothing.
        """
        job.error = job.error or error
        self._end(job)

    def finish(self, job: StagedJob) -> None:
        """Run the collective of each window after its copy out; runs in the worker thread.

        Raises
        ------
        TransportTimeout
            If the device did not finish the caller's earlier work in time.
        TransportError
            If the device failed.
        R2cclError
            If the collective failed.
        Exception
            The job's ``error``, if `begin` set it.
        """
        try:
            self.examine(job)
            for window, fetched, number in job.windows:
                self._await(fetched)
                self._run_window(window, number, job)
                self._signal(number)
        except BaseException as exc:
            job.error = exc
            raise
        finally:
            # Signal after a failure too, so that no stream hangs.
            self._end(job)

    def _end(self, job: StagedJob) -> None:
        if job.windows:
            self._signal(job.windows[-1][2])
        self._events += [event for _, event, _ in job.windows]
        job.windows = []

    def close(self, timeout_s: float) -> None:
        """Wait for the stream, then free all resources; the worker must be idle.

        Raises
        ------
        TransportTimeout
            If the device is still busy after `timeout_s` seconds; nothing was freed.
        TransportError
            If the device failed; not all resources were freed.
        """
        # Let the stream pass calls that were not finished.
        self._signal(self._nenqueued)
        if not self._is_idle_in(timeout_s):
            raise self._still_busy("copies", timeout_s)
        self._free()
        for slot in self._slots:
            self._device.free_pinned(slot)

    # Device

    def _enqueue(self, job: StagedJob, itemsize: int) -> None:
        """Enqueue two copies out, then alternately one copy in and one copy out."""
        ahead = list(windows(job.call.signature, job.grid))
        first = self._nenqueued
        for at, window in enumerate(ahead[:_NSLOTS]):
            self._enqueue_copy_out(job, window, first + at + 1, itemsize)
        for at, window in enumerate(ahead):
            self._enqueue_copy_in(job, window, first + at + 1, itemsize)
            if at + _NSLOTS < len(ahead):
                number = first + at + _NSLOTS + 1
                self._enqueue_copy_out(job, ahead[at + _NSLOTS], number, itemsize)

    def _enqueue_copy_out(self, job: StagedJob, window: Window, number: int, itemsize: int) -> None:
        """Enqueue the copy of `window` to its slot."""
        rows = self._rows_read(job.call.signature)
        if rows.number and window.length:
            # The input of an allgather has only this rank's row.
            is_part = job.call.signature.collective == Collective.ALLGATHER
            skip = rows.first if is_part else 0
            nbytes, pitch = window.length * itemsize, job.grid.width * itemsize
            source = job.call.source + window.start * itemsize + (rows.first - skip) * pitch
            target = self._address(number) + rows.first * nbytes
            self._copy(target, nbytes, source, pitch, nbytes, rows.number)
        # Record the event even if nothing is copied: it is done when the slot is free, because its
        # previous result was copied in.
        event = self.take_event()
        self._device.record(event, self._stream)
        self._nenqueued = number
        job.windows.append((window, event, number))

    def _enqueue_copy_in(self, job: StagedJob, window: Window, number: int, itemsize: int) -> None:
        """Enqueue a wait for the host's signal, then the copy of the result from the slot."""
        self._wait_for_signal(number)
        rows = self._rows_written(job.call)
        if not (rows.number and window.length):
            return
        is_part = job.call.signature.collective == Collective.REDUCE_SCATTER
        nbytes, pitch = window.length * itemsize, job.grid.width * itemsize
        target = job.call.output + window.start * itemsize
        target += 0 if is_part else rows.first * pitch
        source = self._address(number) + self._sums_at(job, window) * itemsize
        source += rows.first * nbytes
        self._copy(target, pitch, source, nbytes, nbytes, rows.number)

    def _copy(
        self, target: int, target_pitch: int, source: int, source_pitch: int, nbytes: int,
        nrows: int,
    ) -> None:  # fmt: skip
        if nrows > 1 and max(target_pitch, source_pitch) <= _MAX_PITCH:
            self._device.copy_rows(
                target, target_pitch, source, source_pitch, nbytes, nrows, self._stream
            )
            return
        for row in range(nrows):
            self._device.copy(
                target + row * target_pitch, source + row * source_pitch, nbytes, self._stream
            )

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

    def _sums_at(self, job: StagedJob, window: Window) -> int:
        """Return the offset of a window's result in its slot, in elements."""
        kind = job.call.signature.collective
        is_apart = kind in (Collective.REDUCE_SCATTER, Collective.REDUCE)
        return window.length * job.grid.nrows if is_apart else 0

    # Host

    def _await(self, event: Event) -> None:
        until_s = self._clock() + self._timeout_s
        while not self._device.synchronize(event, _LOOK_S):
            self._check()
            if self._clock() >= until_s:
                raise TransportTimeout(
                    f"rank {self._rank}: the GPU did not finish the work that precedes this "
                    f"collective on its stream within {self._timeout_s:g} s; look for a kernel "
                    "that hangs, or raise R2CC_TIMEOUT_S",
                    rank=self._rank,
                    status="TIMEOUT",
                )

    def _run_window(self, window: Window, number: int, job: StagedJob) -> None:
        dtype = dtype_of(window.call.dtype)
        slot = self._slots[number % _NSLOTS]
        data = slot[: window.call.count * dtype.itemsize].view(dtype)
        at = self._sums_at(job, window) * dtype.itemsize
        sums = slot[at : at + data.nbytes].view(dtype)
        self._run(job.enter(window.call, job.call.schedule), data, sums)

    def _address(self, number: int) -> int:
        return int(self._slots[number % _NSLOTS].ctypes.data)


#: Limit of a pitch in bytes: CU_DEVICE_ATTRIBUTE_MAX_PITCH of all GPUs known so far.
_MAX_PITCH = (1 << 31) - 1

__all__ = ["DeviceCall", "HostRun", "StagedBackend", "StagedJob"]
