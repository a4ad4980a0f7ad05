"""StagedBackend buffers: collectives on device memory over rails that reach host memory alone.

Theory of operation
-------------------
A call is cut into windows (`r2ccl.gpu.staged_windows`). All the device has to do for all of them is
given to one stream at the call: copy window 0 and 1 out, into two slots of pinned memory; wait for
window 0 to come back; copy it in; copy window 2 out into its slot; and so on. *Coming back* is a
word in pinned memory, the gate, which counts windows: the host, in the communicator's worker, waits
for a window's copy, runs the collective on the slot, and lets the gate go on. So the copies of one
window overlap the collective of another, the caller's thread never waits, and everything on the
device is ordered by what the driver sees.

Nothing can wait for ever for want of a place in a queue of the hardware: what the gate waits for
was given to the same stream before. A call that fails opens the gate for all its windows: what is
copied in then is worthless, the communicator has ended, and no stream hangs.

Must not import links. Invariants: a slot is written by anybody only after what was in
it was copied in, by the order of the stream; the gate only ever goes up, in the order of calls.
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
from r2ccl.gpu.staged_windows import Grid, Window, grid_of, windows
from r2ccl.schedule.ir import Schedule
from r2ccl.types import CallSignature, Collective

Array = npt.NDArray[Any]
#: Enters a collective, by an allreduce of the caller's own if there is one; returns its plan.
Enter = Callable[[CallSignature, Schedule | None], Any]
#: Runs a collective on host memory: its plan, what it reads, what it writes.
HostRun = Callable[[Any, Array, Array], None]

_NSLOTS = 2
#: The communicator's end is looked for this often while the device is waited for.
_LOOK_S = 0.05


class DeviceCall(NamedTuple):
    """A collective on device memory.

    ``source`` and ``output`` are addresses; a rank that has no output gives 0. ``schedule`` is an
    allreduce of the caller's own.
    """

    signature: CallSignature
    source: int
    output: int
    schedule: Schedule | None = None


class _Rows(NamedTuple):
    """Which rows of a window are copied: `number` of them from `first`."""

    first: int
    number: int


class StagedJob(msgspec.Struct, eq=False):
    """The part of a call that the host has to do; for one `StagedBackend.run`."""

    call: DeviceCall
    enter: Enter
    grid: Grid
    #: Windows given to the stream so far: what each is, its event, its number at the gate.
    windows: list[tuple[Window, Event, int]]
    #: What spoiled the call, if anything did.
    error: BaseException | None = None


class StagedBackend(SignalledStream):
    """The bounce buffers of one communicator on one device.

    Parameters
    ----------
    device : Device
    rank, nranks : int
    slot_nbytes : int
        Size of each of the two slots.
    enter, run : callable
        Enter a collective and run it on host memory.
    check : callable
        Raises what ended the communicator, if anything did.
    clock : Clock
    timeout_s : float
        How long the work that the caller gave the device before may take.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        nranks: int,
        *,
        slot_nbytes: int,
        enter: Enter,
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
        #: Windows given to the stream since the beginning.
        self._given = 0

    def supports(self, call: DeviceCall, nranks: int = 0) -> bool:
        """Whether a call can be carried out: every one."""
        return True

    def is_prepared(self, call: DeviceCall) -> bool:
        """See `GpuBackend`: every call is."""
        return True

    def prepare(self, call: DeviceCall) -> None:
        """See `GpuBackend`: there is nothing to do."""

    def begin(
        self, call: DeviceCall, stream: Stream, enter: Enter | None = None, widest: int = 0
    ) -> tuple[StagedJob, Event]:
        """Give the device all it has to do; the caller's `stream` is not touched but read.

        Parameters
        ----------
        call : DeviceCall
        stream : Stream
        enter : callable, optional
            Enters the collective of each window; default: of all ranks.
        widest : int, optional
            There are as many windows as for a call of so many columns, if that is wider.

        Returns
        -------
        StagedJob
            For `finish` or `abandon`, one of which must follow, in the order of `begin`. Its
            ``error`` says what could not be given.
        Event
            Done when the result is there. To be given back with `recycle`.
        """
        done = self.take_event()
        itemsize = dtype_of(call.signature.dtype).itemsize
        grid = grid_of(call.signature, itemsize, self._nranks, self._slot_nbytes, widest)
        job = StagedJob(call, enter or self._enter, grid, [])
        try:
            self._follow(stream, done)
            self._give(job, itemsize)
            self._device.record(done, self._stream)
        except Exception as exc:
            job.error = exc
        return job, done

    def abandon(self, job: StagedJob, error: BaseException) -> None:
        """Let the stream go on, `finish` or not: the call has failed elsewhere."""
        job.error = job.error or error
        self._end(job)

    def finish(self, job: StagedJob) -> None:
        """Run the collective of every window once it has been copied out; in the worker.

        Raises
        ------
        TransportTimeout
            The device did not end the work that the caller had given it before.
        TransportError
            The device failed.
        R2cclError
            What ended the collective.
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
            # A failed call too: no stream may hang.
            self._end(job)

    def _end(self, job: StagedJob) -> None:
        if job.windows:
            self._signal(job.windows[-1][2])
        self._events += [event for _, event, _ in job.windows]
        job.windows = []

    def close(self, timeout_s: float) -> None:
        """Wait for the stream, and free everything; no job is left.

        Raises
        ------
        TransportTimeout
            The device still works on it; nothing was freed.
        """
        # Of calls that nobody finished.
        self._signal(self._given)
        if not self._is_idle_in(timeout_s):
            raise self._still_busy("copies", timeout_s)
        self._free()
        for slot in self._slots:
            self._device.free_pinned(slot)

    # What the device does

    def _give(self, job: StagedJob, itemsize: int) -> None:
        """Two copies out, then in turns one in and one out."""
        ahead = list(windows(job.call.signature, job.grid))
        first = self._given
        for at, window in enumerate(ahead[:_NSLOTS]):
            self._give_out(job, window, first + at + 1, itemsize)
        for at, window in enumerate(ahead):
            self._give_in(job, window, first + at + 1, itemsize)
            if at + _NSLOTS < len(ahead):
                number = first + at + _NSLOTS + 1
                self._give_out(job, ahead[at + _NSLOTS], number, itemsize)

    def _give_out(self, job: StagedJob, window: Window, number: int, itemsize: int) -> None:
        """Copy what the collective of `window` reads to its slot."""
        rows = self._rows_read(job.call.signature)
        if rows.number and window.length:
            # An allgather's input is this rank's row alone.
            is_part = job.call.signature.collective == Collective.ALLGATHER
            skip = rows.first if is_part else 0
            nbytes, pitch = window.length * itemsize, job.grid.width * itemsize
            source = job.call.source + window.start * itemsize + (rows.first - skip) * pitch
            target = self._address(number) + rows.first * nbytes
            self._copy(target, nbytes, source, pitch, nbytes, rows.number)
        # Also where nothing is copied: what was in the slot before has been copied in.
        event = self.take_event()
        self._device.record(event, self._stream)
        self._given = number
        job.windows.append((window, event, number))

    def _give_in(self, job: StagedJob, window: Window, number: int, itemsize: int) -> None:
        """Copy the result of `window` from its slot, once the gate is there."""
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
        """Where in a slot the result is, in elements."""
        kind = job.call.signature.collective
        is_apart = kind in (Collective.REDUCE_SCATTER, Collective.REDUCE)
        return window.length * job.grid.nrows if is_apart else 0

    # What the host does

    def _await(self, event: Event) -> None:
        until_s = self._clock() + self._timeout_s
        while not self._device.synchronize(event, _LOOK_S):
            self._check()
            if self._clock() >= until_s:
                raise TransportTimeout(
                    f"rank {self._rank}: the GPU has not done in {self._timeout_s:g} s what its "
                    "stream was given before this collective; look for a kernel that hangs, or "
                    "raise R2CC_TIMEOUT_S",
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


#: CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far.
_MAX_PITCH = (1 << 31) - 1

__all__ = ["DeviceCall", "Enter", "HostRun", "StagedBackend", "StagedJob"]
