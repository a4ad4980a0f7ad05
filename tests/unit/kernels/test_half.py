"""The compiled loops for 16-bit floats give the bits that NumPy and ml_dtypes give."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r2ccl.dtypes import BFLOAT16_CODE, CODES, DTYPES
from r2ccl.kernels import divider, native, quiet_context, reducer
from r2ccl.types import ReduceOp

FLOAT16_CODE = CODES[np.dtype(np.float16)]
HALVES = [pytest.param(code, id=DTYPES[code].name) for code in (FLOAT16_CODE, BFLOAT16_CODE)]
UFUNCS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
# fmt: off
#: Signed zeros, the smallest and largest subnormals, one and its neighbours, powers of two near
#: the rounding limits, the largest finite numbers, infinities, quiet and signalling NaN.
SPECIAL = {
    FLOAT16_CODE: (
        0x0000, 0x0001, 0x0002, 0x03FF, 0x0400, 0x0401, 0x1400, 0x3BFF, 0x3C00, 0x3C01,
        0x3555, 0x5000, 0x6400, 0x7800, 0x7BFE, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF,
    ),
    BFLOAT16_CODE: (
        0x0000, 0x0001, 0x0002, 0x007F, 0x0080, 0x0081, 0x2000, 0x3F7F, 0x3F80, 0x3F81,
        0x3EAB, 0x4300, 0x5F00, 0x7F00, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF,
    ),
}
# fmt: on
EVERY = np.arange(1 << 16, dtype=np.uint16)


def assert_same(out: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Compare the bits, except that any NaN equals any NaN."""
    differ = out.view(np.uint16) != expected.view(np.uint16)
    differ &= ~(np.isnan(out) & np.isnan(expected))
    assert not differ.any(), (out[differ][:5], expected[differ][:5])


def partners(code: int) -> np.ndarray[Any, Any]:
    """List special values of both signs, and random ones."""
    special = np.array(SPECIAL[code], np.uint16)
    random = np.random.default_rng(11).integers(0, 1 << 16, 60, np.uint16)
    return np.concatenate([special, special | np.uint16(0x8000), random])


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD])
@pytest.mark.parametrize("code", HALVES)
def test_sum_and_product_of_every_value_with_partners(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    left, reduce = EVERY.view(dtype), reducer(code, op)
    out = np.empty_like(left)

    def run() -> None:
        for partner in partners(code):
            right = np.full(EVERY.size, partner).view(dtype)
            reduce(left, right, out)
            assert_same(out, UFUNCS[op](left, right))

    quiet_context().run(run)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("code", HALVES)
def test_min_and_max_of_every_value_with_partners(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    left, reduce = EVERY.view(dtype), reducer(code, op)
    out = np.empty_like(left)
    zero_bits = 0x8000 if op is ReduceOp.MIN else 0x0000

    def run() -> None:
        for partner in partners(code):
            right = np.full(EVERY.size, partner).view(dtype)
            reduce(left, right, out)
            # By value: NumPy does not say which of two zeros of different sign it returns.
            np.testing.assert_array_equal(
                out.astype(np.float32), UFUNCS[op](left, right).astype(np.float32)
            )
            if partner & 0x7FFF == 0:
                assert out.view(np.uint16)[partner ^ 0x8000] == zero_bits

    quiet_context().run(run)


@pytest.mark.parametrize("op", list(UFUNCS))
@pytest.mark.parametrize("code", HALVES)
def test_order_of_operands_does_not_change_a_bit(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    rng = np.random.default_rng(12)
    left, right = (rng.integers(0, 1 << 16, 100_003, np.uint16).view(dtype) for _ in range(2))
    forward, backward, in_place = np.empty_like(left), np.empty_like(left), right.copy()
    reduce = reducer(code, op)

    reduce(left, right, forward)
    reduce(right, left, backward)
    reduce(left, in_place, in_place)

    assert forward.tobytes() == backward.tobytes() == in_place.tobytes()


@pytest.mark.parametrize("nranks", [2, 3, 7, 16, 1000])
@pytest.mark.parametrize("code", HALVES)
def test_division_of_every_value(code: int, nranks: int) -> None:
    dtype = DTYPES[code]
    out = EVERY.copy().view(dtype)

    def run() -> None:
        divider(code, nranks)(out)
        assert_same(out, (EVERY.view(dtype).astype(np.float32) / np.float32(nranks)).astype(dtype))

    quiet_context().run(run)


@pytest.mark.parametrize("code", HALVES)
def test_average_reduces_like_sum(code: int) -> None:
    dtype = DTYPES[code]
    left = np.linspace(-9, 9, 501).astype(dtype)
    total, average = np.empty_like(left), np.empty_like(left)

    reducer(code, ReduceOp.SUM)(left, left, total)
    reducer(code, ReduceOp.AVG)(left, left, average)

    assert total.tobytes() == average.tobytes()


@pytest.mark.parametrize("code", HALVES)
def test_random_chains_round_at_every_step(code: int) -> None:
    """A sum over eight ranks has the bits of eight roundings, in the order of the ranks."""
    dtype = DTYPES[code]
    ranks = np.random.default_rng(13).normal(size=(8, 4096)).astype(dtype)
    out, reduce = ranks[0].copy(), reducer(code, ReduceOp.SUM)

    for contribution in ranks[1:]:
        reduce(out, contribution, out)

    expected = ranks[0]
    for contribution in ranks[1:]:
        expected = (expected.astype(np.float32) + contribution.astype(np.float32)).astype(dtype)
    assert out.tobytes() == expected.tobytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let this process and those that it starts store kernels in a new directory."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """Make this process look for the directory and the kernels again."""
    for each in (native._directory, native._addresses_of, native.callable_of, reducer, divider):
        each.cache_clear()


def test_a_second_process_does_not_import_numba(cache: Path) -> None:
    x = np.ones(3, np.float16)
    reducer(FLOAT16_CODE, ReduceOp.SUM)(x, x, x)
    divider(FLOAT16_CODE, 4)(x)
    assert x.tolist() == [0.5, 0.5, 0.5]
    stored = sorted(cache.glob("*.o"))
    assert len(stored) == 2
    script = (
        "import sys, numpy as np; from r2ccl.kernels import divider, reducer\n"
        "x = np.ones(3, np.float16); reducer(6, 0)(x, x, x); divider(6, 4)(x)\n"
        "print(x.tolist(), 'numba' in sys.modules)"
    )
    second = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60)
    assert second == "[0.5, 0.5, 0.5] False\n"
    assert sorted(cache.glob("*.o")) == stored
