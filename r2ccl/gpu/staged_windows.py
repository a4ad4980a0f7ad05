"""Windows: a collective on memory of any size, cut into collectives that fit a bounce buffer.

A call's memory is *rows* of equal length: one for an allreduce, a broadcast or a reduce, one a rank
for an allgather or a reduce_scatter. A window is the same columns of every row, packed; the
collective of a window is one of the same kind over fewer elements, so the windows of a call make
its result.

Pure. Invariant: equal calls and limits give equal windows on every rank, at least one; an empty
call has one, which is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from r2ccl.types import CallSignature, Collective

_BY_RANK = frozenset({Collective.ALLGATHER, Collective.REDUCE_SCATTER})
#: Those that need memory for partial sums beside what they read.
_SUMMED_APART = frozenset({Collective.REDUCE, Collective.REDUCE_SCATTER})


class Window(NamedTuple):
    """Columns ``[start, start + length)`` of every row, in elements, and the call over them."""

    start: int
    length: int
    call: CallSignature


class Grid(NamedTuple):
    """How a call's memory is cut.

    ``nrows`` rows of ``width`` elements; ``nwindows`` of ``length`` columns, fewer at the end.
    """

    nrows: int
    width: int
    length: int
    nwindows: int


def grid_of(
    call: CallSignature, itemsize: int, nranks: int, limit_nbytes: int, widest: int = 0
) -> Grid:
    """Cut a call so that a window with what it needs beside fits `limit_nbytes`.

    Parameters
    ----------
    call : CallSignature
        Of the collective as it is called: an allgather counts its output, a reduce_scatter its
        input.
    itemsize : int
        Bytes of an element.
    nranks : int
    limit_nbytes : int
        At least one column of every row is taken, whatever the limit.
    widest : int, optional
        Columns of the widest of several calls that must have as many windows; default: this one's.
    """
    nrows = nranks if call.collective in _BY_RANK else 1
    width = call.count // nrows
    column_nbytes = nrows * itemsize * (2 if call.collective in _SUMMED_APART else 1)
    widest = max(1, width, widest)
    length = max(1, min(widest, limit_nbytes // column_nbytes))
    return Grid(nrows, width, length, -(-widest // length))


def windows(call: CallSignature, grid: Grid) -> Iterator[Window]:
    """Yield the windows of `call` in order; those beyond its end are empty."""
    for at in range(grid.nwindows):
        start = min(at * grid.length, grid.width)
        length = min(grid.length, grid.width - start)
        part = msgspec.structs.replace(call, count=length * grid.nrows)
        yield Window(start, length, part)


__all__ = ["Grid", "Window", "grid_of", "windows"]
