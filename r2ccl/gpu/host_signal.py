"""A gate: what all ways of collectives on device memory have in common.

Each gives its work to a stream of its own and has it wait at a word in pinned memory that counts
up: the gate, which the host opens, number by number. Events are kept and used again.

Must not import kernels or anything of ranks. Invariants: the gate only goes up; what a stream waits
for there was numbered before.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from r2ccl.device.base import Device, Event, Stream
from r2ccl.errors import TransportTimeout

#: Bytes of a line of memory: words that are written apart lie on lines apart.
LINE_NBYTES = 64
#: Words that streams wait for wrap; so do comparisons.
WORD = 0xFFFFFFFF


class HostJob(Protocol):
    """What the host has to do of a call; ``error`` is what spoiled the call, if anything did."""

    error: BaseException | None


class SignalledStream:
    """A stream, its events and its gate; a base class.

    Parameters
    ----------
    device : Device
    rank : int
        For messages.
    nlines : int
        Lines of pinned memory; the gate is at the start of the first.
    """

    def __init__(self, device: Device, rank: int, nlines: int = 1) -> None:
        self._device = device
        self._rank = rank
        self._stream = device.make_stream(waits=True)
        self._pinned = device.allocate_pinned(nlines * LINE_NBYTES)
        self._signal_word = self._pinned.view(np.uint32)[:1]
        self._events: list[Event] = []

    def examine(self, job: Any) -> None:
        """Raise what spoiled a call that the device is done with, if anything did; a `HostJob`."""
        if job.error is not None:
            raise job.error

    def mark(self) -> Event:
        """Return an event that is done when all that was begun so far is; to be given back."""
        event = self.take_event()
        self._device.record(event, self._stream)
        return event

    def take_event(self) -> Event:
        """Return an event that nothing waits for; to be given back with `recycle`."""
        return self._events.pop() if self._events else self._device.make_event()

    def recycle(self, event: Event) -> None:
        """Take an event back."""
        self._events.append(event)

    def _follow(self, stream: Stream, event: Event) -> None:
        """Have the own stream wait for what `stream` has been given, by `event`."""
        self._device.record(event, stream)
        self._device.wait(self._stream, event)

    def _wait_for_signal(self, number: int) -> None:
        """Have the stream wait until the gate is open for `number`."""
        self._device.wait_word(self._stream, int(self._pinned.ctypes.data), number & WORD)

    def _signal(self, number: int) -> None:
        """Open the gate for `number`, unless it is open for more: calls may be abandoned early."""
        if not 0 < (int(self._signal_word[0]) - number) & WORD < 1 << 31:
            self._signal_word[0] = number & WORD

    def _is_signalled(self, number: int) -> bool:
        return int(self._signal_word[0]) == number & WORD

    def _is_idle_in(self, timeout_s: float) -> bool:
        """Wait until the stream has done all it was given; whether it has."""
        last = self.mark()
        is_over = self._device.synchronize(last, timeout_s)
        self.recycle(last)
        return is_over

    def _still_busy(self, works: str, timeout_s: float) -> TransportTimeout:
        """Make the error of a device that still `works`."""
        return TransportTimeout(
            f"rank {self._rank}: the GPU still {works} after {timeout_s:g} s: its memory is kept; "
            "end the process",
            rank=self._rank,
            status="TIMEOUT",
        )

    def _free(self) -> None:
        """Free the stream, which is idle, the events and the gate."""
        self._device.destroy_stream(self._stream)
        for event in self._events:
            self._device.destroy_event(event)
        self._device.free_pinned(self._pinned)


__all__ = ["LINE_NBYTES", "WORD", "SignalledStream", "HostJob"]
