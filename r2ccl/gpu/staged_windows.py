"""Divides a collective of any size into collectives that each fit a staging buffer.

A call's memory consists of *rows* of equal length: one row for an allreduce, a broadcast or a
reduce; one row per rank for an allgather or a reduce_scatter. A window consists of the same columns
of every row, packed. The collective of a window is of the same kind as the call, over the window's
elements; all windows together perform the call.

Invariant: equal calls and limits give equal windows on every rank. Every call has at least one
window; the windows of an empty call are empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from r2ccl.dtypes import DTYPES
from r2ccl.types import CallSignature, Collective

_BY_RANK = frozenset({Collective.ALLGATHER, Collective.REDUCE_SCATTER})
#: Collectives whose partial sums need memory in addition to the input.
_SUMMED_APART = frozenset({Collective.REDUCE, Collective.REDUCE_SCATTER})


class Window(NamedTuple):
    """Columns ``[start, start + length)`` of every row, and the signature of their collective.

    ``start`` and ``length`` are in elements of one row; ``call.count`` is the number of elements of
    the window in all rows together.
    """

    start: int
    length: int
    call: CallSignature


class WindowGrid(NamedTuple):
    """Dimensions of a call's rows and windows.

    The call has ``nrows`` rows of ``width`` elements and ``nwindows`` windows of ``length``
    columns; the last windows may have fewer columns, or none.
    """

    nrows: int
    width: int
    length: int
    nwindows: int


def least_limit_nbytes(nranks: int) -> int:
    """Return the smallest size limit in bytes for which a window always has room for one column.

    The limit holds for every collective and dtype of a communicator with `nranks` ranks.
    """
    return 2 * nranks * max(dtype.itemsize for dtype in DTYPES.values())


def window_grid(
    call: CallSignature, itemsize: int, nranks: int, limit_nbytes: int, widest: int = 0
) -> WindowGrid:
    """Return the grid of a call: windows of at most `limit_nbytes`, including partial sums.

    Parameters
    ----------
    call : CallSignature
        The call. Its count is the number of elements of the output for an allgather, and of the
        input for a reduce_scatter.
    itemsize : int
        Size of an element in bytes.
    nranks : int
    limit_nbytes : int
        Size limit of a window in bytes, at least `least_limit_nbytes`: a window always has at least
        one column of every row.
    widest : int, optional
        Number of columns of the widest of several calls that must have the same number of
        windows; default: the number of columns of this call.

    Returns
    -------
    WindowGrid
    """
    nrows = nranks if call.collective in _BY_RANK else 1
    width = call.count // nrows
    column_nbytes = nrows * itemsize * (2 if call.collective in _SUMMED_APART else 1)
    widest = max(1, width, widest)
    length = max(1, min(widest, limit_nbytes // column_nbytes))
    return WindowGrid(nrows, width, length, -(-widest // length))


def windows(call: CallSignature, grid: WindowGrid) -> Iterator[Window]:
    """Yield the windows of `call` in order; windows beyond the end of the rows are empty."""
    for at in range(grid.nwindows):
        start = min(at * grid.length, grid.width)
        length = min(grid.length, grid.width - start)
        part = msgspec.structs.replace(call, count=length * grid.nrows)
        yield Window(start, length, part)


__all__ = ["Window", "WindowGrid", "least_limit_nbytes", "window_grid", "windows"]
