"""Kernels of the fake GPU: Python functions in place of compiled code.

A kernel accesses memory only through its `Grid`. If the kernel declares the memory that it touches
(`FakeKernel.touches`), the grid refuses other accesses; otherwise the grid records each access when
it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from r2ccl.testing.fakedevice.memory import Bytes, MemoryPiece
from r2ccl.testing.fakedevice.order import Access, Clock, Misuse, Stamp
from r2ccl.testing.fakedevice.work import FakeOperation

#: Body of a fake kernel: ``run(grid, *values)``.
Run = Callable[..., None]
#: Declaration of a fake kernel: ``touches(grid, *values)`` returns two lists of (address, nbytes),
#: of the memory it reads and of the memory it writes.
Touches = Callable[..., tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]]


class FakeKernel(msgspec.Struct, frozen=True):
    """Kernel of the fake GPU, as Python functions.

    Parameters
    ----------
    run : callable
        ``run(grid, *values)`` does the work of all blocks; `grid` is a `Grid`.
    touches : callable, optional
        ``touches(grid, *values)`` is called by the launch and returns two lists of (address,
        nbytes): the memory that the kernel reads, and the memory that it writes completely. It must
        not access memory through `grid`. Without `touches`, the accesses of the kernel are checked
        only when they happen, and an access of the host to pinned memory that the kernel uses is
        detected only if the host declares it.
    """

    run: Run
    touches: Touches | None = None


class Grid:
    """Launch parameters of a fake kernel, and its access to memory.

    Attributes
    ----------
    nblocks : int
        Number of blocks.
    nthreads : int
        Number of threads per block.
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
        """Return a read-only view of `nbytes` bytes at an address of the GPU.

        Raises
        ------
        Misuse
            If the kernel is not running, the address is invalid, or the kernel declares accesses
            but not this access.
        Race
            If the kernel declares no accesses, and this access is not ordered with an earlier one.
        """
        view = self._reach(Access.READ, address, nbytes).view
        view.flags.writeable = False
        return view

    def write(self, address: int, nbytes: int) -> Bytes:
        """Return a writable view of `nbytes` bytes at an address of the GPU.

        Raises
        ------
        Misuse, Race
            As for `read`.
        """
        return self._reach(Access.WRITE, address, nbytes).view

    def hold_against(self, declared: FakeOperation) -> None:
        """Refuse accesses to memory that the operation `declared` does not list.

        The grid then records no accesses, because the accesses that `declared` lists are recorded
        when the operation starts.
        """
        self._declared = declared

    @contextmanager
    def running(self, stamp: Stamp, clock: Clock) -> Iterator[None]:
        """Allow accesses in the body of the ``with``, as step `stamp` of a stream with `clock`."""
        self._now = (stamp, clock)
        try:
            yield
        finally:
            self._now = None

    def _step(self) -> tuple[Stamp, Clock]:
        if self._now is None:
            raise Misuse.of("a grid is used while its kernel does not run")
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
    """Operation that runs a kernel."""

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
        """Run all blocks of the kernel."""
        with self._grid.running(stamp, clock):
            self._kernel.run(self._grid, *self._values)


__all__ = ["FakeKernel", "Grid", "Launch", "Run", "Touches"]
