"""Tests of `r2ccl.kernels.compiling`: copies in compiled code."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from r2ccl.kernels.compiling import copy_bytes

PAGE = 4096


@numba.njit
def copy(target: Any, source: Any, nbytes: Any) -> None:
    copy_bytes(target, source, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1024, 1025, 3 * PAGE + 7])
def test_copies_are_exact_in_pieces_and_at_once(nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(1, 256, nbytes + PAGE, np.uint8)
    target = np.zeros(nbytes + 3 * PAGE, np.uint8)
    even = (source.ctypes.data - target.ctypes.data) % PAGE
    # The distances modulo a page at which copies are made in pieces, and those beside them.
    for ahead in (*range(34), 64, PAGE - 1):
        start = PAGE + (even + ahead) % PAGE
        target.fill(0)
        copy(target.ctypes.data + start, source.ctypes.data, nbytes)
        assert np.array_equal(target[start : start + nbytes], source[:nbytes])
        assert not target[:start].any()
        assert not target[start + nbytes :].any()
