"""Windows cover a call's memory once, fit the limit, and are collectives of the same kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import KINDS

from r2ccl.dtypes import DTYPES
from r2ccl.gpu.staged_windows import least_limit_nbytes, window_grid, windows
from r2ccl.types import CallSignature, Collective, ReduceOp

_BY_RANK = (Collective.ALLGATHER, Collective.REDUCE_SCATTER)


def call_of(kind: Collective, count: int) -> CallSignature:
    return CallSignature(kind, 7, ReduceOp.SUM, count, 0)


@given(
    kind=st.sampled_from(KINDS),
    nranks=st.integers(1, 9),
    width=st.integers(0, 1000),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    limit=st.integers(16, 5000),
)
def test_windows_cover_every_row_once_and_fit(
    kind: Collective, nranks: int, width: int, itemsize: int, limit: int
) -> None:
    nrows = nranks if kind in _BY_RANK else 1
    grid = window_grid(call_of(kind, nrows * width), itemsize, nranks, limit)
    assert (grid.nrows, grid.width) == (nrows, width)
    seen = np.zeros(width, int)
    for window in windows(call_of(kind, nrows * width), grid):
        seen[window.start : window.start + window.length] += 1
        assert window.call.count == nrows * window.length
        assert window.call.collective == kind
        areas = 2 if kind in (Collective.REDUCE, Collective.REDUCE_SCATTER) else 1
        assert window.length <= 1 or window.call.count * itemsize * areas <= limit
    assert (seen == 1).all()


@given(
    kind=st.sampled_from(KINDS),
    nranks=st.integers(1, 9),
    width=st.integers(1, 9),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_one_column_of_every_call_fits_the_least_limit(
    kind: Collective, nranks: int, width: int, dtype: int
) -> None:
    limit, itemsize = least_limit_nbytes(nranks), DTYPES[dtype].itemsize
    call = call_of(kind, width * (nranks if kind in _BY_RANK else 1))
    areas = 2 if kind in (Collective.REDUCE, Collective.REDUCE_SCATTER) else 1
    for window in windows(call, window_grid(call, itemsize, nranks, limit)):
        assert window.call.count * itemsize * areas <= limit


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_call_has_one_empty_window(kind: Collective) -> None:
    call = call_of(kind, 0)
    found = list(windows(call, window_grid(call, 4, 3, 100)))
    assert [(window.start, window.length, window.call.count) for window in found] == [(0, 0, 0)]


def test_what_fits_is_one_window() -> None:
    call = call_of(Collective.ALLREDUCE, 25)
    assert len(list(windows(call, window_grid(call, 4, 8, 100)))) == 1
    assert len(list(windows(call, window_grid(call, 4, 8, 99)))) == 2
