"""What streams are given: operations, run when the fake's scheduler picks them.

An operation is ready when what it waits for has happened; that it is first in its stream is the
scheduler's business. Kernels are in `r2ccl.testing.fakedevice.kernels`. Must not know processes.

Invariant: an operation touches memory only through pieces whose accesses were noted in the shadow,
by its stream's clock, before the bytes move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r2ccl.testing.fakedevice.memory import MemoryPiece
from r2ccl.testing.fakedevice.order import Access, Clock, Stamp, join

_MODULUS, _HALF = 1 << 32, 1 << 31
#: Values of a word that are kept apart; who waits for an older one is taken to rely on these.
_KEPT = 256


class Word:
    """A 32-bit word that streams set or wait for.

    Parameters
    ----------
    piece : MemoryPiece
        Its four bytes.
    clock : Clock
        What those know who may have written it until now.
    """

    def __init__(self, piece: MemoryPiece, clock: Clock) -> None:
        self.piece = piece
        #: Values, in the order they were written, with what their writers knew.
        self._written = [(self.value, clock)]

    @property
    def value(self) -> int:
        """What is in memory."""
        return int(self.piece.view.view(np.uint32)[0])

    @property
    def has_changed(self) -> bool:
        """Whether memory holds something that is not noted: a host wrote it."""
        return self.value != self._written[-1][0]

    def note(self, clock: Clock) -> None:
        """Take what is in memory for written by someone who has `clock`."""
        value = self.value
        if not _is_at_least(value, self._written[-1][0]):
            self._written.clear()  # it went back: whoever waits from now on waits for what follows
        self._written.append((value, dict(clock)))
        del self._written[:-_KEPT]

    def set(self, value: int, clock: Clock) -> None:
        """Write it, as whoever has `clock`."""
        self.piece.view.view(np.uint32)[0] = value % _MODULUS
        self.note(clock)

    def has_reached(self, value: int) -> bool:
        """Whether it is known to be `value` or more, as a difference modulo 2**32."""
        return _is_at_least(self._written[-1][0], value)

    def learn(self, clock: Clock, value: int) -> None:
        """Have `clock` know what whoever waited for `value` can rely on: its first writer."""
        join(clock, next(known for found, known in self._written if _is_at_least(found, value)))


def _is_at_least(value: int, other: int) -> bool:
    return (value - other) % _MODULUS < _HALF


class FakeOperation:
    """Something a stream was given.

    Parameters
    ----------
    what : str
        What it is and where it was enqueued, for messages.
    clock : Clock
        What the host knew then.
    reads, writes : sequence of MemoryPiece
        What it touches.
    words : sequence of MemoryPiece
        Words that it sets or waits for.
    """

    #: Whether what it touches is known only when it runs: until then nothing after it is guarded.
    is_undeclared = False

    def __init__(
        self,
        what: str,
        clock: Clock,
        reads: Sequence[MemoryPiece] = (),
        writes: Sequence[MemoryPiece] = (),
        words: Sequence[MemoryPiece] = (),
    ) -> None:
        self.what = what
        self.clock = clock
        self.reads = tuple(each for each in reads if each.nbytes)
        self.writes = tuple(each for each in writes if each.nbytes)
        #: All that it reaches, as far as it is known before it runs.
        self.pieces = (*self.reads, *self.writes, *words)
        self.is_over = False
        #: Whether nothing but the GPU's leisure keeps it from running.
        self.is_exposed = False

    def is_ready(self) -> bool:
        """Whether it can run now."""
        return True

    def is_due(self) -> bool:
        """Whether it can run before the host does anything more."""
        return self.is_ready()

    def learn(self, clock: Clock) -> None:
        """Have its stream know what it waited for."""
        join(clock, self.clock)

    def touch(self, stamp: Stamp, clock: Clock) -> None:
        """Note its accesses."""
        for piece in self.reads:
            piece.touch(Access.READ, stamp, clock)
        for piece in self.writes:
            piece.touch(Access.WRITE, stamp, clock)

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Do it."""

    def reaches(self, piece: MemoryPiece) -> bool:
        """Whether it touches any of these bytes."""
        return any(each.overlaps(piece) for each in self.pieces)


class Copy(FakeOperation):
    """Copies; a row each."""

    def __init__(
        self, what: str, clock: Clock, rows: Sequence[tuple[MemoryPiece, MemoryPiece]]
    ) -> None:
        super().__init__(what, clock, [row[1] for row in rows], [row[0] for row in rows])

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Copy all rows."""
        for target, source in zip(self.writes, self.reads, strict=True):
            target.view[:] = source.view


class Record(FakeOperation):
    """What an event stands for: all of the stream before it."""

    #: The step of its stream that it was; None: not yet.
    stamp: Stamp | None = None

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Keep what is known now for whoever waits."""
        self.clock = dict(clock)
        self.stamp = stamp


class WaitForRecord(FakeOperation):
    """Wait for what an event stood for when this was enqueued."""

    def __init__(self, what: str, clock: Clock, record: Record) -> None:
        super().__init__(what, clock)
        self._record = record

    def is_ready(self) -> bool:
        """Whether the event was reached."""
        return self._record.is_over

    def is_due(self) -> bool:
        """Whether it will be reached without the host."""
        return self._record.is_over or self._record.is_exposed

    def learn(self, clock: Clock) -> None:
        """Know what the other stream knew."""
        super().learn(clock)
        join(clock, self._record.clock)


class SetWord(FakeOperation):
    """Write a word for others to wait for."""

    def __init__(self, what: str, clock: Clock, place: MemoryPiece, word: Word, value: int) -> None:
        super().__init__(what, clock, words=[place])
        self._place = place
        self._word = word
        self._value = value

    def touch(self, stamp: Stamp, clock: Clock) -> None:
        """Note it."""
        self._place.touch(Access.SET, stamp, clock)

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Set it: all that is known here is known to whoever waits for it."""
        self._word.set(self._value, clock)


class WaitForWord(FakeOperation):
    """Wait until a word is something, or more."""

    def __init__(self, what: str, clock: Clock, place: MemoryPiece, word: Word, value: int) -> None:
        super().__init__(what, clock, words=[place])
        self._place = place
        self._word = word
        self._value = value

    def is_ready(self) -> bool:
        """Whether it is."""
        return self._word.has_reached(self._value)

    def learn(self, clock: Clock) -> None:
        """Know what those who wrote it knew."""
        super().learn(clock)
        self._word.learn(clock, self._value)

    def touch(self, stamp: Stamp, clock: Clock) -> None:
        """Note it."""
        self._place.touch(Access.WAIT, stamp, clock)


__all__ = [
    "Copy",
    "FakeOperation",
    "Record",
    "SetWord",
    "WaitForRecord",
    "WaitForWord",
    "Word",
]
