"""Base class of the GPU backends: a stream whose work waits for a signal of the host.

Each backend enqueues its work on a stream of its own, which waits for a word in pinned memory. The
host increments the word when its part of a call is done. Events are pooled.

Invariants: the word only increases; a call has its number before the stream waits for that number.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from r2ccl.device.base import Device, Event, Stream
from r2ccl.errors import TransportTimeout

#: Bytes of a cache line. Words with different writers lie on different lines.
LINE_NBYTES = 64
#: Mask of the 32-bit words that streams wait for. They wrap around, and comparisons allow for it.
WORD = 0xFFFFFFFF


class HostJob(Protocol):
    """The host's part of a call; ``error`` is the error of the call, if it failed."""

    error: BaseException | None


class SignalledStream:
    """Base class with a stream, a pool of events, and the word that the stream waits for.

    Parameters
    ----------
    device : Device
    rank : int
        Rank to name in messages.
    nlines : int
        Number of cache lines of pinned memory; the word is at the start of the first one.
    """

    def __init__(self, device: Device, rank: int, nlines: int = 1) -> None:
        self._device = device
        self._rank = rank
        self._stream = device.make_stream(waits=True)
        self._pinned = device.allocate_pinned(nlines * LINE_NBYTES)
        self._signal_word = self._pinned.view(np.uint32)[:1]
        self._events: list[Event] = []

    def examine(self, job: Any) -> None:
        """Raise the error of `job`, a `HostJob` that the device has finished, if it failed."""
        if job.error is not None:
            raise job.error

    def mark(self) -> Event:
        """Return an event that is done when all work enqueued so far is; `recycle` it after use."""
        event = self.take_event()
        self._device.record(event, self._stream)
        return event

    def take_event(self) -> Event:
        """Return an unused event; return it with `recycle` after use."""
        return self._events.pop() if self._events else self._device.make_event()

    def recycle(self, event: Event) -> None:
        """Return `event` to the pool of unused events."""
        self._events.append(event)

    def _follow(self, stream: Stream, event: Event) -> None:
        """Make this object's stream wait for the work of `stream` so far, recorded in `event`."""
        self._device.record(event, stream)
        self._device.wait(self._stream, event)

    def _wait_for_signal(self, number: int) -> None:
        """Make the stream wait until `_signal` is called with `number` or a later number."""
        self._device.wait_word(self._stream, int(self._pinned.ctypes.data), number & WORD)

    def _signal(self, number: int) -> None:
        """Let the stream continue up to `number`.

        Numbers below the current one are ignored: a later call may have been abandoned already.
        """
        if not 0 < (int(self._signal_word[0]) - number) & WORD < 1 << 31:
            self._signal_word[0] = number & WORD

    def _is_signalled(self, number: int) -> bool:
        return int(self._signal_word[0]) == number & WORD

    def _is_idle_in(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the stream; return whether it is idle."""
        last = self.mark()
        is_over = self._device.synchronize(last, timeout_s)
        self.recycle(last)
        return is_over

    def _still_busy(self, works: str, timeout_s: float) -> TransportTimeout:
        """Return the error of a device that is still busy; `works` is a verb, such as "copies"."""
        return TransportTimeout(
            f"rank {self._rank}: the GPU still {works} after {timeout_s:g} s, so its memory was "
            "not freed; end the process",
            rank=self._rank,
            status="TIMEOUT",
        )

    def _free(self) -> None:
        """Free the stream, the events and the pinned memory; the stream must be idle."""
        self._device.destroy_stream(self._stream)
        for event in self._events:
            self._device.destroy_event(event)
        self._device.free_pinned(self._pinned)


__all__ = ["LINE_NBYTES", "WORD", "HostJob", "SignalledStream"]
