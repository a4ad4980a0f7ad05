"""Inputs are scaled and widened in the arithmetic that the documentation promises."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import r2ccl
from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument
from r2ccl.kernels import ConvertedOp, narrower, quiet_context

HALVES = (np.float16, ml_dtypes.bfloat16)
SMALL = [
    pytest.param(np.dtype(each), id=each.__name__)
    for each in (*HALVES, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]


def every_value(dtype: np.dtype[Any]) -> np.ndarray:
    """All bit patterns, in read-only memory as a caller may pass it."""
    values = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    values.flags.writeable = False
    return values


def converted(op: ConvertedOp, x: np.ndarray, dtype: Any) -> np.ndarray:
    out = np.empty(x.size, dtype)
    op.check(CODES[x.dtype])
    quiet_context().run(op.converter(CODES[x.dtype]), x, out)
    return out


@pytest.mark.parametrize("factor", [0.3, -2.0, 1e5])
@pytest.mark.parametrize("dtype", SMALL)
def test_small_floats_are_scaled_in_float32(dtype: np.dtype[Any], factor: float) -> None:
    x = every_value(dtype)

    found = converted(r2ccl.premul_sum(factor), x, dtype)

    with np.errstate(all="ignore"):
        exact = (x.astype(np.float32) * np.float32(factor)).astype(dtype)
    np.testing.assert_array_equal(found.astype(np.float32), exact.astype(np.float32))


@pytest.mark.parametrize("given", ["x", "2", None, [2.0], np.ones(3), r2ccl.SUM.name])
def test_a_factor_that_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^premul_sum\(.*\): pass a number$"):
        r2ccl.premul_sum(given)


@pytest.mark.parametrize("given", [2, True, "max", None, r2ccl.user_op(lambda a, b: a)])
def test_what_is_no_op_is_not_widened(given: Any) -> None:
    """A number means different operations in different libraries."""
    with pytest.raises(InvalidArgument, match=r"^accumulate_float32\(.*\): pass r2ccl\.SUM, "):
        r2ccl.accumulate_float32(given)


@pytest.mark.parametrize("dtype", SMALL)
def test_wide_products_are_not_rounded(dtype: np.dtype[Any]) -> None:
    x = every_value(dtype)
    op = r2ccl.accumulate_float32(r2ccl.premul_sum(0.3))

    with np.errstate(all="ignore"):
        exact = x.astype(np.float32) * np.float32(0.3)
    np.testing.assert_array_equal(converted(op, x, np.float32), exact)


@pytest.mark.parametrize("dtype", SMALL)
def test_results_are_rounded_to_nearest(dtype: np.dtype[Any]) -> None:
    wide = np.random.default_rng(1).standard_normal(10_000).astype(np.float32) * 50
    wide[:3] = np.inf, -np.inf, np.nan
    out = np.empty(wide.size, dtype)

    quiet_context().run(narrower(CODES[dtype]), wide, out)

    np.testing.assert_array_equal(out.astype(np.float32), wide.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", SMALL)
def test_nan_is_rounded_to_one_nan(dtype: np.dtype[Any]) -> None:
    wide = np.array([np.nan, -np.nan], np.float32)
    out = np.empty(2, dtype)

    quiet_context().run(narrower(CODES[dtype]), wide, out)

    assert out.tobytes() == wide[[0, 0]].astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("name", "factor"), [("float64", 0.1), ("complex64", 2 - 1j), ("int8", -3), ("uint64", 7)]
)
def test_other_types_are_scaled_in_their_own(name: str, factor: Any) -> None:
    dtype = np.dtype(name)
    x = np.arange(5).astype(dtype)

    found = converted(r2ccl.premul_sum(factor), x, dtype)

    assert found.tolist() == (x * dtype.type(factor)).tolist()


@pytest.mark.parametrize(
    ("op", "name", "words"),
    [
        (r2ccl.premul_sum(0.5), "int32", r"premul_sum\(0.5\) for dtype int32: pass an integer"),
        (r2ccl.premul_sum(300), "uint8", "pass an integer that the dtype can hold"),
        (r2ccl.premul_sum(1j), "float16", "pass a real number"),
        (r2ccl.premul_sum(1e300), "float16", "pass a real number that float32 can hold"),
        (r2ccl.premul_sum(1e300), "float32", "pass a real number that the dtype can hold"),
        (r2ccl.premul_sum(1e300j), "complex64", "pass a number that the dtype can hold"),
        (r2ccl.premul_sum(np.complex64(1 + 2j)), "float32", "pass a real number"),
        (r2ccl.premul_sum(2), "bool", "op=SUM for dtype bool"),
        (r2ccl.accumulate_float32(), "float32", "accumulate_float32.* float32.*bfloat16"),
        (r2ccl.accumulate_float32(r2ccl.BOR), "float16", "op=BOR for dtype float16"),
    ],
)
def test_what_cannot_be_converted_is_refused(op: ConvertedOp, name: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        op.check(CODES[np.dtype(name)])
