"""The tables for 8-bit floats give the values that ml_dtypes gives, for every pair of values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from r2ccl.dtypes import CODES
from r2ccl.kernels import divider, quiet_context, reducer
from r2ccl.types import ReduceOp

TYPES = [
    pytest.param(np.dtype(each), id=each.__name__)
    for each in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def every_pair(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    every = np.arange(256, dtype=np.uint8)
    return np.repeat(every, 256).view(dtype), np.tile(every, 256).view(dtype)


@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_pair_of_values(dtype: np.dtype, op: ReduceOp) -> None:
    left, right = every_pair(dtype)
    out = np.empty_like(left)
    expected = np.empty_like(left)

    def run() -> None:
        reducer(CODES[dtype], op)(left, right, out)
        expected[:] = UFUNCS[op](left, right)

    quiet_context().run(run)

    # By value: ml_dtypes does not say which of two zeros of different sign is the lower.
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("dtype", TYPES)
def test_order_of_operands_does_not_change_a_bit(dtype: np.dtype, op: ReduceOp) -> None:
    left, right = every_pair(dtype)
    one, other = np.empty_like(left), np.empty_like(left)

    reducer(CODES[dtype], op)(left, right, one)
    reducer(CODES[dtype], op)(right, left, other)

    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_minus_zero_is_below_zero(dtype: np.dtype) -> None:
    left, right = np.array([-0.0, 0.0], dtype), np.array([0.0, -0.0], dtype)
    low, high = np.empty_like(left), np.empty_like(left)

    reducer(CODES[dtype], ReduceOp.MIN)(left, right, low)
    reducer(CODES[dtype], ReduceOp.MAX)(left, right, high)

    assert low.view(np.uint8).tolist() == [0x80, 0x80]
    assert high.view(np.uint8).tolist() == [0, 0]


@pytest.mark.parametrize("nranks", [2, 3, 300])
@pytest.mark.parametrize("dtype", TYPES)
def test_average_rounds_once(dtype: np.dtype, nranks: int) -> None:
    total = np.arange(256, dtype=np.uint8).view(dtype)
    out = total.copy()

    divider(CODES[dtype], nranks)(out)

    exact = (total.astype(np.float32) / np.float32(nranks)).astype(dtype)
    np.testing.assert_array_equal(out.astype(np.float32), exact.astype(np.float32))


def test_overflow_is_nan_without_infinity() -> None:
    for dtype, is_nan in ((ml_dtypes.float8_e4m3fn, True), (ml_dtypes.float8_e5m2, False)):
        top = np.array([ml_dtypes.finfo(dtype).max], dtype)
        out = np.empty_like(top)
        reducer(CODES[top.dtype], ReduceOp.SUM)(top, top, out)
        assert bool(np.isnan(out[0])) is is_nan
        assert bool(np.isinf(out[0])) is not is_nan
