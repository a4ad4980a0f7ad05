"""Base classes of the GPU backends, which let streams of the caller wait for calls.

The caller's thread records an event on the caller's stream and submits the call to the
communicator's worker. Then it lets the caller's stream wait for a word in pinned memory
(`SignalledStream.hold`). The worker enqueues all work of the call on streams of the backend, and
then a write of the word. A stream therefore never waits for a call that is not submitted yet. So
there is no deadlock even if enqueuing blocks, as it does when a launch queue is full, or when
CUDA_LAUNCH_BLOCKING=1 is set.

Invariants: the word only increases (modulo 2**32), in the order of calls; every call that was begun
ends, and then the word has reached the number of the call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from r2ccl.clock import Clock
from r2ccl.device.base import Device, Event, Stream
from r2ccl.errors import TransportError, TransportTimeout
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.streams import PER_THREAD
from r2ccl.schedule.ir import Schedule
from r2ccl.types import CallSignature

#: Bytes of a cache line. Words with different writers lie on different lines.
LINE_NBYTES = 64
#: Mask of the 32-bit words that streams wait for. They wrap around, and comparisons allow for it.
WORD = 0xFFFFFFFF


#: Interval at which a wait for the device checks whether the communicator has ended, in seconds.
_LOOK_S = 0.05
#: Number of callers' streams whose events are kept. Beyond it, `hold` recycles the oldest event if
#: this event is done.
_MOST_STREAMS = 64


class DeviceCall(NamedTuple):
    """A collective on GPU memory.

    ``source`` and ``output`` are addresses; ``output`` is 0 if this rank has no output.
    ``schedule`` is the user-defined schedule of an allreduce, or None. ``request`` is None except
    for collectives that `r2ccl.gpu.copied` executes.
    """

    signature: CallSignature
    source: int
    output: int
    schedule: Schedule | None = None
    request: Request | None = None


class DeviceJob(msgspec.Struct, eq=False, weakref=True, kw_only=True):
    """A call that a backend has begun with `begin`, and that the backend executes with `finish`.

    The event ``before`` is done when the work that precedes the call on its stream is done.
    ``number`` is the argument for `hold`: the calls of the backend are numbered from 1. A part of
    another call has number 0; streams wait for the event ``done`` of a part instead. When the
    worker ends the call, ``is_over`` becomes True and ``done`` is recorded behind the work of the
    call, which the device may still be executing. ``error`` is the error of the call; None unless
    it failed.
    """

    call: DeviceCall
    before: Event
    done: Event
    number: int
    is_over: bool = False
    error: BaseException | None = None


_Job = TypeVar("_Job", bound=DeviceJob)


class SignalledStream:
    """Base class with a stream, a pool of events, and a word in pinned memory for streams.

    Parameters
    ----------
    device : Device
    rank : int
        Number of this rank.
    check : callable
        Raises the error that ended the communicator, if it has ended.
    clock : Clock
    timeout_s : float
        Longest wait for work of the device, in seconds.
    nlines : int
        Number of cache lines of pinned memory; the word is at the start of the first one.
    waits : bool
        True if the backend's own stream waits for words, too; see `Device.make_stream`.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        *,
        check: Callable[[], None],
        clock: Clock,
        timeout_s: float,
        nlines: int = 1,
        waits: bool = False,
    ) -> None:
        self._device = device
        self._rank = rank
        self._check = check
        self._clock = clock
        self._timeout_s = timeout_s
        self._stream = device.make_stream(waits=waits)
        self._pinned = device.allocate_pinned(nlines * LINE_NBYTES)
        self._signal_word = self._pinned.view(np.uint32)[:1]
        self._events: list[Event] = []
        #: Number of calls begun.
        self._number = 0
        #: For each stream of a caller, the event that is done when the stream has passed its last
        #: wait for the word. The key is the stream and None. The handle `PER_THREAD` stands for a
        #: different stream in each thread, so its key has an object that belongs to the thread
        #: instead of None; the identifier of a thread may be reused by a later thread.
        self._passed: dict[tuple[Stream, object], Event] = {}
        self._of_thread = threading.local()
        #: Held during `hold`, which several threads may call.
        self._holding = threading.Lock()

    def examine(self, job: DeviceJob) -> None:
        """Raise the error of the call of `job`, if the call failed.

        The device must have finished the call.
        """
        if job.error is not None:
            raise job.error

    def hold(self, stream: Stream, number: int) -> None:
        """Make work enqueued on `stream` from now on wait until call `number` has ended.

        The call must have been submitted to the worker. Any thread may call this method.

        Raises
        ------
        TransportError
            If the device failed.
        """
        key = stream, self._own_object() if stream == PER_THREAD else None
        with self._holding:
            self._device.wait_word(stream, int(self._pinned.ctypes.data), number & WORD)
            passed = self._passed.pop(key, None)
            if passed is None:
                while len(self._passed) >= _MOST_STREAMS and self._device.is_done(
                    self._oldest_passed()
                ):
                    self.recycle(self._passed.pop(next(iter(self._passed))))
                passed = self.take_event()
            self._device.record(passed, stream)
            self._passed[key] = passed

    def _own_object(self) -> object:
        """Return the object that identifies the calling thread in the keys of `_passed`."""
        return self._of_thread.__dict__.setdefault("own", object())

    def _oldest_passed(self) -> Event:
        return next(iter(self._passed.values()))

    def take_event(self) -> Event:
        """Return an unused event, which the caller gives back with `recycle`.

        Raises
        ------
        TransportError
            If the device failed.
        """
        try:  # the caller's thread and the worker share the pool
            return self._events.pop()
        except IndexError:
            return self._device.make_event()

    def recycle(self, event: Event) -> None:
        """Return `event` to the pool of unused events."""
        self._events.append(event)

    def _recorded(self, stream: Stream) -> Event:
        """Return an event that is done when all work enqueued on `stream` so far is done."""
        event = self.take_event()
        self._device.record(event, stream)
        return event

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _end(self, job: DeviceJob) -> None:
        """End a call: let streams that wait for it continue after the work enqueued so far.

        If the call has ended already, do nothing.

        Raises
        ------
        TransportError
            If the device failed and the call has no error yet.
        """
        if job.is_over:
            return
        job.is_over = True
        self.recycle(job.before)
        try:
            if job.number:
                self._signal(job.number)
            self._device.record(job.done, self._stream)
        except TransportError as exc:
            if job.error is None:
                job.error = exc
                raise

    def _signal(self, number: int) -> None:
        """Set the word to `number`, after the work enqueued so far on the backend's stream.

        Streams that wait for calls up to `number` continue then. If the device fails, the host
        writes the word, so that no stream hangs, and the error is raised.
        """
        try:
            self._device.write_word(self._stream, int(self._pinned.ctypes.data), number & WORD)
        except TransportError:
            self._signal_word[0] = number & WORD
            raise

    def _wait(self, is_over: Callable[[float], bool], until_s: float, what: str) -> None:
        """Wait until `is_over` returns True.

        Parameters
        ----------
        is_over : callable
            ``is_over(seconds)`` waits up to `seconds` for the device; returns whether it is done.
        until_s : float
            Time on the clock at which the wait ends: `_timeout_s` after the start of the wait or
            of the call.
        what : str
            Description of the awaited work, for the error message.

        Raises
        ------
        TransportTimeout
            If the device is not done in time.
        TransportError
            If the device failed.
        R2cclError
            If the communicator ended.
        """
        while not is_over(_LOOK_S):
            self._check()
            if self._clock() >= until_s:
                raise TransportTimeout(
                    f"rank {self._rank}: the GPU did not finish {what} in {self._timeout_s:g} s; "
                    "look for a kernel that hangs, or raise the timeout (timeout_s= or "
                    "R2CC_TIMEOUT_S)",
                    rank=self._rank,
                    status="TIMEOUT",
                )

    def _wait_for(self, event: Event, what: str) -> None:
        """Wait until `event` is done; `what` and the errors are as in `_wait`."""
        is_over = partial(self._device.synchronize, event)
        self._wait(is_over, self._clock() + self._timeout_s, what)

    def _is_idle_in(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the backend's stream; return whether it is idle."""
        last = self._recorded(self._stream)
        is_over = self._device.synchronize(last, timeout_s)
        self.recycle(last)
        return is_over

    def _let_go(self, timeout_s: float) -> bool:
        """Let callers' streams continue, then wait for them and for the backend's stream.

        Afterwards no stream waits for a call. The worker must be idle. `timeout_s` limits each
        wait, in seconds. Return True if all streams are done; only then may the pinned memory with
        the word be freed.
        """
        self._signal(self._number)
        return self._is_idle_in(timeout_s) and all(
            self._device.synchronize(event, timeout_s) for event in self._passed.values()
        )

    def _copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, nbytes: int,
        nrows: int, stream: Stream,
    ) -> None:  # fmt: skip
        """Enqueue a copy of rows; see `Device.copy_rows`."""
        if nrows == 1:
            self._device.copy(target, source, nbytes, stream)
        elif nrows:
            self._device.copy_rows(
                target, target_pitch, source, source_pitch, nbytes, nrows, stream
            )

    def _still_busy(self, works: str, timeout_s: float) -> TransportTimeout:
        """Return the error of a device that is still busy; `works` is a verb, such as "copies"."""
        return TransportTimeout(
            f"rank {self._rank}: the GPU still {works} for earlier collectives after a wait of "
            f"{timeout_s:g} s; look for a kernel that hangs, and end the process, which frees the "
            "memory that the GPU uses",
            rank=self._rank,
            status="TIMEOUT",
        )

    def _free(self) -> None:
        """Free the stream, the events and the pinned memory; `_let_go` must have returned True."""
        self._device.destroy_stream(self._stream)
        for event in (*self._events, *self._passed.values()):
            self._device.destroy_event(event)
        self._events.clear()
        self._passed.clear()
        self._device.free_pinned(self._pinned)


class HostMemoryBackend(SignalledStream, Generic[_Job]):
    """Base class of the backends that run collectives on copies in host memory.

    The parameters are those of `SignalledStream`.
    """

    def finish(self, job: _Job) -> None:
        """Execute the call of `job`; runs in the worker thread.

        On return, the device may still be copying the output back.

        Raises
        ------
        TransportTimeout
            If the device did not finish the caller's earlier work, or a copy, in time.
        TransportError
            If the device failed.
        R2cclError
            If the collective failed or the communicator ended.
        """
        try:
            self._carry_out(job)
        except BaseException as exc:
            job.error = exc
            # Copies that were enqueued still read the caller's array. Further errors are dropped.
            with contextlib.suppress(TransportError):
                self._follow_copies()
            raise
        finally:
            self._end(job)

    def close(self, timeout_s: float) -> None:
        """Wait for the device, then free all resources; the worker must be idle.

        `timeout_s` limits the wait for the backend's stream, and for each stream of a caller.

        Raises
        ------
        TransportTimeout
            If one of these streams is still busy after its wait; nothing was freed.
        TransportError
            If the device failed; not all resources were freed.
        """
        self._follow_copies()
        if not self._let_go(timeout_s):
            raise self._still_busy("copies", timeout_s)
        self._free()

    def _carry_out(self, job: _Job) -> None:
        """Enqueue the copies of the call of `job`, and run its collective."""
        raise NotImplementedError

    def _follow_copies(self) -> None:
        """Make later work on `_stream` wait for copies on other streams of the backend.

        This class has no other streams; subclasses with other streams override the method.
        """

    def _await_copies(self, event: Event) -> None:
        """Wait until `event` is done, and recycle it.

        `event` is recorded after copies that follow the caller's earlier work on the device.
        Raises the errors of `_wait`.
        """
        self._wait_for(
            event, "the copies of this collective, or the work that precedes it on its stream,"
        )
        self.recycle(event)


__all__ = [
    "LINE_NBYTES",
    "WORD",
    "DeviceCall",
    "DeviceJob",
    "HostMemoryBackend",
    "SignalledStream",
]
