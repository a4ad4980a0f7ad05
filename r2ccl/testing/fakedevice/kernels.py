"""Kernels of the fake GPU: Python functions that stand for compiled ones.

Must not know processes or streams. Invariant: a kernel reaches memory through its `Grid` alone,
which notes every access in the shadow, or holds it against what the kernel declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from r2ccl.testing.fakedevice.memory import Bytes, MemoryPiece
from r2ccl.testing.fakedevice.order import Access, Clock, Misuse, Stamp
from r2ccl.testing.fakedevice.work import FakeOperation

#: A kernel in Python: ``run(grid, *values)``.
Run = Callable[..., None]
#: ``touches(grid, *values)``: (address, nbytes) of all it reads, and of all it writes.
Touches = Callable[..., tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]]


class FakeKernel(msgspec.Struct, frozen=True):
    """What stands for a kernel.

    Parameters
    ----------
    run : callable
        ``run(grid, *values)`` does at once what all blocks do; `grid` is a `Grid`.
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
        self, nblocks: int, nthreads: int, find: Callable[[int, int], MemoryPiece]
    ) -> None:
        self.nblocks = nblocks
        self.nthreads = nthreads
        self._find = find
        self._declared: FakeOperation | None = None
        self._now: tuple[Stamp, Clock] | None = None

    def read(self, address: int, nbytes: int) -> Bytes:
        """Return bytes to be read."""
        view = self._reach(Access.READ, address, nbytes).view
        view.flags.writeable = False
        return view

    def write(self, address: int, nbytes: int) -> Bytes:
        """Return bytes to be written."""
        return self._reach(Access.WRITE, address, nbytes).view

    def hold_against(self, declared: FakeOperation) -> None:
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

    def _reach(self, access: Access, address: int, nbytes: int) -> MemoryPiece:
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


class Launch(FakeOperation):
    """A kernel's run."""

    def __init__(
        self, what: str, clock: Clock, kernel: FakeKernel, grid: Grid, values: Sequence[Any],
        reads: Sequence[MemoryPiece], writes: Sequence[MemoryPiece],
    ) -> None:  # fmt: skip
        super().__init__(what, clock, reads, writes)
        self._kernel = kernel
        self._grid = grid
        self._values = values
        self.is_undeclared = kernel.touches is None
        if not self.is_undeclared:
            grid.hold_against(self)

    def run(self, stamp: Stamp, clock: Clock) -> None:
        """Run it."""
        with self._grid.running(stamp, clock):
            self._kernel.run(self._grid, *self._values)


__all__ = ["FakeKernel", "Grid", "Launch", "Run", "Touches"]
