"""A stream whose work waits for the host, common to all backends of collectives on GPU memory.

Each backend enqueues its work on a stream of its own, which waits at a word in pinned memory. The
host increments the word when its part of a call is done. Events are pooled.

Invariants: the word only increases; work that a stream waits for was numbered before it waits.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from r2ccl.device.base import Device, Event, Stream
from r2ccl.errors import TransportTimeout

#: Cache line: words with different writers lie on different lines.
LINE_NBYTES = 64
#: Words that streams wait for wrap; so do comparisons.
WORD = 0xFFFFFFFF


class HostJob(Protocol):
    """The host's part of a call; ``error`` is why the call failed, if it did."""

    error: BaseException | None


class SignalledStream:
    """Base class: a stream, its events, and the word at which it waits for the host.

    Parameters
    ----------
    device : Device
    rank : int
        For messages.
    nlines : int
        Cache lines of pinned memory; the first starts with the word.
    """

    def __init__(self, device: Device, rank: int, nlines: int = 1) -> None:
        self._device = device
        self._rank = rank
        self._stream = device.make_stream(waits=True)
        self._pinned = device.allocate_pinned(nlines * LINE_NBYTES)
        self._signal_word = self._pinned.view(np.uint32)[:1]
        self._events: list[Event] = []

    def examine(self, job: Any) -> None:
        """Raise the error of `job`, a `HostJob` that the device has finished, if it has one."""
        if job.error is not None:
            raise job.error

    def mark(self) -> Event:
        """Return an event that is done when all work so far is, to be returned with `recycle`."""
        event = self.take_event()
        self._device.record(event, self._stream)
        return event

    def take_event(self) -> Event:
        """Return an unused event, to be returned with `recycle`."""
        return self._events.pop() if self._events else self._device.make_event()

    def recycle(self, event: Event) -> None:
        """Take an event back."""
        self._events.append(event)

    def _follow(self, stream: Stream, event: Event) -> None:
        """Make the own stream wait for the work of `stream` so far, by recording `event`."""
        self._device.record(event, stream)
        self._device.wait(self._stream, event)

    def _wait_for_signal(self, number: int) -> None:
        """Make the stream wait for `_signal` of `number` or more."""
        self._device.wait_word(self._stream, int(self._pinned.ctypes.data), number & WORD)

    def _signal(self, number: int) -> None:
        """Let the stream pass `number`; ignored below the current: calls may be abandoned early."""
        if not 0 < (int(self._signal_word[0]) - number) & WORD < 1 << 31:
            self._signal_word[0] = number & WORD

    def _is_signalled(self, number: int) -> bool:
        return int(self._signal_word[0]) == number & WORD

    def _is_idle_in(self, timeout_s: float) -> bool:
        """Wait until the stream is idle; return whether it is."""
        last = self.mark()
        is_over = self._device.synchronize(last, timeout_s)
        self.recycle(last)
        return is_over

    def _still_busy(self, works: str, timeout_s: float) -> TransportTimeout:
        """Return the error of a device that is still busy; `works`: a verb."""
        return TransportTimeout(
            f"rank {self._rank}: the GPU still {works} after {timeout_s:g} s: its memory is kept; "
            "end the process",
            rank=self._rank,
            status="TIMEOUT",
        )

    def _free(self) -> None:
        """Free the stream, which is idle, the events and the pinned memory."""
        self._device.destroy_stream(self._stream)
        for event in self._events:
            self._device.destroy_event(event)
        self._device.free_pinned(self._pinned)


__all__ = ["LINE_NBYTES", "WORD", "HostJob", "SignalledStream"]
