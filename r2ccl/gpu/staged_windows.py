"""Cuts a collective on memory of any size into collectives that fit a bounce buffer.

A call's memory is *rows* of equal length: one for an allreduce, a broadcast or a reduce, one a rank
for an allgather or a reduce_scatter. A window is the same columns of every row, packed. The
collective of a window is of the same kind over fewer elements; all windows together make the call.

Pure. Invariant: equal calls and limits give equal windows on every rank, at least one; an empty
call has one empty window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from r2ccl.types import CallSignature, Collective

_BY_RANK = frozenset({Collective.ALLGATHER, Collective.REDUCE_SCATTER})
#: Collectives whose partial sums need memory of their own.
_SUMMED_APART = frozenset({Collective.REDUCE, Collective.REDUCE_SCATTER})


class Window(NamedTuple):
    """Columns ``[start, start + length)`` of every row, in elements, and the call over them."""

    start: int
    length: int
    call: CallSignature


class WindowGrid(NamedTuple):
    """Dimensions of the windows of a call.

    ``nrows`` rows of ``width`` elements; ``nwindows`` of ``length`` columns, fewer at the end.
    """

    nrows: int
    width: int
    length: int
    nwindows: int


def window_grid(
    call: CallSignature, itemsize: int, nranks: int, limit_nbytes: int, widest: int = 0
) -> WindowGrid:
    """Return the grid whose windows, with their partial sums, fit `limit_nbytes`.

    Parameters
    ----------
    call : CallSignature
        An allgather counts the elements of its output, a reduce_scatter of its input.
    itemsize : int
        Bytes of an element.
    nranks : int
    limit_nbytes : int
        A window has at least one column of every row, whatever the limit.
    widest : int, optional
        Columns of the widest of several calls with equal numbers of windows; default: this call's.
    """
    nrows = nranks if call.collective in _BY_RANK else 1
    width = call.count // nrows
    column_nbytes = nrows * itemsize * (2 if call.collective in _SUMMED_APART else 1)
    widest = max(1, width, widest)
    length = max(1, min(widest, limit_nbytes // column_nbytes))
    return WindowGrid(nrows, width, length, -(-widest // length))


def windows(call: CallSignature, grid: WindowGrid) -> Iterator[Window]:
    """Yield the windows of `call` in order; those beyond its end are empty."""
    for at in range(grid.nwindows):
        start = min(at * grid.length, grid.width)
        length = min(grid.length, grid.width - start)
        part = msgspec.structs.replace(call, count=length * grid.nrows)
        yield Window(start, length, part)


__all__ = ["Window", "WindowGrid", "window_grid", "windows"]
