"""Kernels of the fake GPU: Python functions that stand for compiled ones.

Must not know processes or streams. Invariant: a kernel reaches memory through its `Grid` alone,
which notes every access in the shadow, or holds it against what the kernel declared.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from r2ccl.testing.fakedevice.memory import Bytes, Piece
from r2ccl.testing.fakedevice.order import Access, Clock, Misuse, Stamp
from r2ccl.testing.fakedevice.work import Operation, Word

_WORD_NBYTES = 4


class Until(msgspec.Struct, frozen=True):
    """What a persistent kernel yields: it goes on when the word is `value` or more.

    The word is known from then on: of what hosts wrote to it before, the last value counts.
    """

    address: int
    value: int


#: A kernel in Python: ``run(grid, *values)``; a persistent one is a generator of `Until`.
Run = Callable[..., Generator[Until, None, None] | None]
#: ``touches(grid, *values)``: (address, nbytes) of all it reads, and of all it writes.
Touches = Callable[..., tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]]


class FakeKernel(msgspec.Struct, frozen=True):
    """What stands for a kernel.

    Parameters
    ----------
    run : callable
        ``run(grid, *values)`` does at once what all blocks do; `grid` is a `Grid`. A generator
        function is a persistent kernel: it runs from one `Until` to the next.
    touches : callable, optional
        ``touches(grid, *values)`` returns what is read and what is written, as lists of (address,
        nbytes), before the kernel runs; it must write all of what it writes. Without it, memory is
        looked at as the kernel comes to it, and a host that touches pinned memory meanwhile is
        found only where it says so.
    """

    run: Run
    touches: Touches | None = None


class Grid:
    """What a kernel in Python sees of its launch.

    Attributes
    ----------
    nblocks, nthreads : int
    """

    def __init__(
        self, nblocks: int, nthreads: int, find: Callable[[int, int], Piece],
        word_at: Callable[[Piece], Word],
    ) -> None:  # fmt: skip
        self.nblocks = nblocks
        self.nthreads = nthreads
        self._find = find
        self._word_at = word_at
        self._declared: Operation | None = None
        self._now: tuple[Stamp, Clock] | None = None

    def read(self, address: int, nbytes: int) -> Bytes:
        """Return bytes to be read."""
        view = self._reach(Access.READ, address, nbytes).view
        view.flags.writeable = False
        return view

    def write(self, address: int, nbytes: int) -> Bytes:
        """Return bytes to be written."""
        return self._reach(Access.WRITE, address, nbytes).view

    def set_word(self, address: int, value: int) -> None:
        """Write a word after all before it, as ``__threadfence_system()`` and a store do."""
        stamp, clock = self._step()
        place, word = self.word(address)
        place.touch(Access.SET, stamp, clock)
        word.set(value, clock)

    def word(self, address: int) -> tuple[Piece, Word]:
        """Return where a word is, and the word."""
        place = self._find(address, _WORD_NBYTES)
        return place, self._word_at(place)

    def hold_against(self, declared: Operation) -> None:
        """Refuse what is not among the pieces of an operation, whose accesses are noted."""
        self._declared = declared

    @contextmanager
    def running(self, stamp: Stamp, clock: Clock) -> Iterator[None]:
        """Note accesses as this step, by who has `clock`."""
        self._now = (stamp, clock)
        try:
            yield
        finally:
            self._now = None

    def _step(self) -> tuple[Stamp, Clock]:
        if self._now is None:
            raise Misuse.of("a kernel's memory is used while the kernel does not run")
        return self._now

    def _reach(self, access: Access, address: int, nbytes: int) -> Piece:
        stamp, clock = self._step()
        piece = self._find(address, nbytes)
        declared = self._declared
        if declared is None:
            piece.touch(access, stamp, clock)
        else:
            among = declared.writes if access is Access.WRITE else declared.pieces
            if not any(each.covers(piece) for each in among):
                raise Misuse.of(f"{declared.what} {access.value} {piece}, which it did not declare")
        return piece


class Launch(Operation):
    """A kernel's run."""

    def __init__(
        self, what: str, clock: Clock, kernel: FakeKernel, grid: Grid, values: Sequence[Any],
        reads: Sequence[Piece], writes: Sequence[Piece],
    ) -> None:  # fmt: skip
        super().__init__(what, clock, reads, writes)
        self._kernel = kernel
        self._grid = grid
        self._values = values
        self._steps: Generator[Until, None, None] | None = None
        #: Where the word is that it waits for, the word, and for what value.
        self._until: tuple[Piece, Word, int] | None = None
        self.is_open_ended = kernel.touches is None
        if not self.is_open_ended:
            grid.hold_against(self)

    def is_ready(self) -> bool:
        """Whether the word that it waits for is there."""
        return self._until is None or self._until[1].has_reached(self._until[2])

    def learn(self, clock: Clock) -> None:
        """Know what those who wrote the word knew."""
        super().learn(clock)
        if self._until is not None:
            self._until[1].learn(clock, self._until[2])

    def touch(self, stamp: Stamp, clock: Clock) -> None:
        """Note what it declared, or that it looked at a word."""
        if self._until is not None:
            self._until[0].touch(Access.WAIT, stamp, clock)
        else:
            super().touch(stamp, clock)

    def run(self, stamp: Stamp, clock: Clock) -> bool:
        """Run it to its end, or to the next word it waits for."""
        with self._grid.running(stamp, clock):
            if self._steps is None:
                self._steps = self._kernel.run(self._grid, *self._values)
            until = None if self._steps is None else next(self._steps, None)
        if until is None:
            return True
        if not self.is_open_ended:
            raise Misuse.of(f"{self.what} is persistent, and declared what it touches")
        self._until = (*self._grid.word(until.address), until.value)
        return False


__all__ = ["FakeKernel", "Grid", "Launch", "Run", "Touches", "Until"]
