"""Operations that are enqueued to streams of the fake GPU; the `Board` runs them.

A wait is ready once the record of its event has run or its word has reached the value; all other
operations are always ready. The board runs an operation only when it is the first of its stream.
Before an operation moves bytes, the accesses that it declares are recorded in the `Shadow` of the
memory, with the clock of its stream. Kernel launches are in `r2ccl.testing.fakedevice.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

from r2ccl.testing.fakedevice.memory import MemoryPiece
from r2ccl.testing.fakedevice.order import Access, Clock, Stamp, join

_MODULUS, _HALF = 1 << 32, 1 << 31
#: Number of values remembered per word. A wait for an older value is ordered after the oldest
#: remembered one.
_KEPT = 256


class Word:
    """32-bit word that streams set or wait for.

    Parameters
    ----------
    piece : MemoryPiece
        Memory of the word, four bytes.
    clock : Clock
        Joined clocks of all hosts that may have written the initial value.
    """

    def __init__(self, piece: MemoryPiece, clock: Clock) -> None:
        self.move(piece)
        #: Values in the order written, each with the clock of its writer.
        self._written = [(self.value, clock)]

    def move(self, piece: MemoryPiece) -> None:
        """Access the word through `piece`: the same bytes, perhaps in another span."""
        self.piece = piece
        self._cell = piece.view.data.cast("I")

    @property
    def value(self) -> int:
        """Value in memory."""
        return self._cell[0]

    @property
    def has_changed(self) -> bool:
        """True if a host changed the word: its value differs from the last recorded value."""
        return self._cell[0] != self._written[-1][0]

    def note(self, clock: Clock) -> None:
        """Record the value that is in memory now as written by an actor with `clock`."""
        value = self.value
        if not _is_at_least(value, self._written[-1][0]):
            self._written.clear()  # it decreased: later waits refer to this and later values
        self._written.append((value, dict(clock)))
        del self._written[:-_KEPT]

    def set(self, value: int, clock: Clock) -> None:
        """Write the word as an actor with `clock`."""
        self._cell[0] = value % _MODULUS
        self.note(clock)

    def has_reached(self, value: int) -> bool:
        """Return True if the newest recorded value is at least `value`, compared modulo 2**32."""
        return _is_at_least(self._written[-1][0], value)

    def learn(self, clock: Clock, value: int) -> None:
        """Merge into `clock` the clock of the actor that first wrote `value` or more.

        A stream that waits for `value` calls this method with its clock, so that its later work is
        ordered after that write. Before the call, the word must have reached `value`.
        """
        join(clock, next(known for found, known in self._written if _is_at_least(found, value)))


def _is_at_least(value: int, other: int) -> bool:
    return (value - other) % _MODULUS < _HALF


class FakeOperation:
    """Operation of a stream; this base class does nothing.

    Parameters
    ----------
    what : str
        Description for messages, with the place in the code that enqueued the operation.
    clock : Clock
        Clock of the host when it enqueued the operation.
    reads, writes : sequence of MemoryPiece
        Memory that the operation reads and writes.
    words : sequence of MemoryPiece
        Words that the operation sets or waits for.
    """

    #: True if its accesses are known only when it runs. Until it has run, later operations of its
    #: stream are not exposed.
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
        #: All memory that it accesses, as far as known before it runs.
        self.pieces = (*self.reads, *self.writes, *words)
        self.is_over = False
        #: True once the GPU could start it at any time.
        self.is_exposed = False

    def is_ready(self) -> bool:
        """Return True if the operation can run now."""
        return True

    def is_due(self) -> bool:
        """Return True if it is certain that the operation can run without a further host action."""
        return self.is_ready()

    def learn(self, clock: Clock) -> None:
        """Merge the clock of the host at the time of the enqueue into the stream's `clock`.

        A wait also merges the clock of the record or word that it waited for.
        """
        join(clock, self.clock)

    def touch(self, stamp: Stamp, clock: Clock) -> None:
        """Record the accesses known before the run; raise Race if an access is not ordered."""
        for piece in self.reads:
            piece.touch(Access.READ, stamp, clock)
        for piece in self.writes:
            piece.touch(Access.WRITE, stamp, clock)

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Do the work of the operation."""

    def reaches(self, piece: MemoryPiece) -> bool:
        """Return True if the operation accesses any byte of `piece`."""
        return any(each.overlaps(piece) for each in self.pieces)


class Copy(FakeOperation):
    """Copy of one or more rows; each row is a (target, source) pair."""

    def __init__(
        self, what: str, clock: Clock, rows: Sequence[tuple[MemoryPiece, MemoryPiece]]
    ) -> None:
        super().__init__(what, clock, [row[1] for row in rows], [row[0] for row in rows])

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Copy the bytes of each row from its source to its target."""
        for target, source in zip(self.writes, self.reads, strict=True):
            target.view[:] = source.view


class Record(FakeOperation):
    """Operation that records an event; it runs when all earlier work of the stream has finished."""

    #: Stamp of its step in the stream; None until it has run.
    stamp: Stamp | None = None

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Store the stream's clock, for `WaitForRecord` and for hosts that find the event done."""
        self.clock = dict(clock)
        self.stamp = stamp


class WaitForRecord(FakeOperation):
    """Wait for the newest record that an event had when the wait was enqueued."""

    def __init__(self, what: str, clock: Clock, record: Record) -> None:
        super().__init__(what, clock)
        self._record = record

    def is_ready(self) -> bool:
        """Return True if the record has run."""
        return self._record.is_over

    def is_due(self) -> bool:
        """Return True if the record has run, or the GPU could run it at any time."""
        return self._record.is_over or self._record.is_exposed

    def learn(self, clock: Clock) -> None:
        """Merge the clock of the record into the stream's `clock`."""
        super().learn(clock)
        join(clock, self._record.clock)


class SetWord(FakeOperation):
    """Write of a word for which other streams or hosts wait."""

    def __init__(self, what: str, clock: Clock, place: MemoryPiece, word: Word, value: int) -> None:
        super().__init__(what, clock, words=[place])
        self._place = place
        self._word = word
        self._value = value

    def touch(self, stamp: Stamp, clock: Clock) -> None:
        """Record the access to the word."""
        self._place.touch(Access.SET, stamp, clock)

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Set the word; a wait for its value is ordered after all earlier work of the stream."""
        self._word.set(self._value, clock)


class WaitForWord(FakeOperation):
    """Wait until a word is at least a value, modulo 2**32."""

    def __init__(self, what: str, clock: Clock, place: MemoryPiece, word: Word, value: int) -> None:
        super().__init__(what, clock, words=[place])
        self._place = place
        self._word = word
        self._value = value

    def is_ready(self) -> bool:
        """Return True if the word has reached the value."""
        return self._word.has_reached(self._value)

    def learn(self, clock: Clock) -> None:
        """Merge the clock of the word's writer into the stream's `clock`."""
        super().learn(clock)
        self._word.learn(clock, self._value)

    def touch(self, stamp: Stamp, clock: Clock) -> None:
        """Record the access to the word."""
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
