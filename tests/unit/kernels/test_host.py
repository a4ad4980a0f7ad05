"""Every operation on every element type, against references that do not share its code."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from r2ccl.dtypes import CODES, DTYPES, dtype_name
from r2ccl.errors import InvalidArgument
from r2ccl.kernels import OPS, divider, quiet_context, reducer
from r2ccl.types import ReduceOp

PAIRS = [
    pytest.param(code, op, id=f"{DTYPES[code].name}-{op.name}")
    for code in sorted(DTYPES)
    for op in sorted(OPS[code])
]
INTEGERS = [
    pytest.param(code, id=dtype.name) for code, dtype in DTYPES.items() if dtype.kind in "iu"
]


def values(dtype: np.dtype[Any], count: int, seed: int) -> np.ndarray[Any, Any]:
    """Small integers and halves, signed where the type is: every operation on two is exact."""
    rng = np.random.default_rng(seed)
    low = 0 if dtype.kind == "u" else -11
    out = rng.integers(low, 12, count).astype(dtype)
    if dtype.kind == "c":
        out += 1j * rng.integers(-11, 12, count).astype(out.real.dtype)
    return out


def reference(op: ReduceOp, left: Any, right: Any) -> Any:
    """Compute one element in Python's own unbounded arithmetic."""
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return left + right
    if op is ReduceOp.PROD:
        return left * right
    return min(left, right) if op is ReduceOp.MIN else max(left, right)


def python(x: np.ndarray[Any, Any]) -> list[Any]:
    """Convert to Python numbers, exactly."""
    return (x.astype(np.float64) if x.dtype.kind == "V" else x).tolist()


@pytest.mark.parametrize(("code", "op"), PAIRS)
@pytest.mark.parametrize("count", [0, 1, 7, 64, 1000])
def test_result_equals_python_arithmetic(code: int, op: ReduceOp, count: int) -> None:
    dtype = DTYPES[code]
    left, right = values(dtype, count, 1), values(dtype, count, 2)
    out = np.empty(count, dtype)

    reducer(code, op)(left, right, out)

    expected = [reference(op, x, y) for x, y in zip(python(left), python(right), strict=True)]
    if dtype.kind in "iu":
        bits = dtype.itemsize * 8
        signed = 1 << (bits - 1) if dtype.kind == "i" else 0
        expected = [(value + signed) % (1 << bits) - signed for value in expected]
    assert python(out) == expected


@pytest.mark.parametrize(("code", "op"), PAIRS)
def test_out_may_be_either_operand(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    left, right = values(dtype, 333, 3), values(dtype, 333, 4)
    reduce = reducer(code, op)
    apart = np.empty_like(left)
    reduce(left, right, apart)
    in_left, in_right = left.copy(), right.copy()

    reduce(in_left, right, in_left)
    reduce(left, in_right, in_right)

    assert in_left.tobytes() == apart.tobytes()
    assert in_right.tobytes() == apart.tobytes()


@pytest.mark.parametrize(("code", "op"), PAIRS)
def test_operands_may_be_read_only_and_stay_as_they_are(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    left, right = values(dtype, 65, 5), values(dtype, 65, 6)
    before = left.tobytes(), right.tobytes()
    left.flags.writeable = right.flags.writeable = False

    reducer(code, op)(left, right, np.empty_like(left))

    assert (left.tobytes(), right.tobytes()) == before


@pytest.mark.parametrize(("code", "op"), PAIRS)
def test_result_does_not_depend_on_where_slices_are_cut(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    rng = np.random.default_rng(7)
    left, right = (
        np.frombuffer(rng.bytes(1001 * dtype.itemsize), np.uint8).view(dtype) for _ in range(2)
    )
    reduce = reducer(code, op)
    whole, cut = np.empty_like(left), np.empty_like(left)

    def run() -> None:
        reduce(left, right, whole)
        for start, stop in ((0, 1), (1, 18), (18, 500), (500, 1001)):
            reduce(left[start:stop], right[start:stop], cut[start:stop])

    quiet_context().run(run)
    if dtype.kind in "fc":
        np.testing.assert_array_equal(cut, whole)  # NaN equals NaN, whatever its payload
    else:
        assert cut.tobytes() == whole.tobytes()


@pytest.mark.parametrize(("code", "op"), PAIRS)
@pytest.mark.parametrize("size", [1, 2, 3, 17])
def test_result_does_not_depend_on_whether_it_is_in_place(
    code: int, op: ReduceOp, size: int
) -> None:
    dtype = DTYPES[code]
    reduce = reducer(code, op)
    rng = np.random.default_rng(size)
    for _ in range(50):
        left, right = (rng.standard_normal((2, size, 2)) * 10).round(3)
        parts = [
            (each[:, 0] + 1j * each[:, 1] if dtype.kind == "c" else each[:, 0] % 7).astype(dtype)
            for each in (left, right)
        ]
        fresh = np.empty_like(parts[0])
        reduce(*parts, fresh)
        for at in range(2):
            operands = [each.copy() for each in parts]
            reduce(*operands, operands[at])
            assert operands[at].tobytes() == fresh.tobytes()


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_min_and_max_propagate_nan_from_either_side(name: str, op: ReduceOp) -> None:
    dtype = np.dtype(name)
    nan, inf = float("nan"), float("inf")
    left = np.array([nan, 1, nan, nan, -inf, inf], dtype)
    right = np.array([1, nan, nan, inf, nan, 2], dtype)
    out = np.empty_like(left)

    reducer(CODES[dtype], op)(left, right, out)

    assert np.isnan(out).tolist() == [True, True, True, True, True, False]
    assert float(out[5]) == (2.0 if op is ReduceOp.MIN else inf)


@pytest.mark.parametrize("code", INTEGERS)
def test_integer_sum_and_product_wrap(code: int) -> None:
    dtype = DTYPES[code]
    highest, bits = np.iinfo(dtype).max, dtype.itemsize * 8
    left, right = np.full(3, highest, dtype), np.array([1, 2, highest], dtype)
    total, product = np.empty_like(left), np.empty_like(left)

    reducer(code, ReduceOp.SUM)(left, right, total)
    reducer(code, ReduceOp.PROD)(left, right, product)

    for out, exact in (
        (total, [int(highest) + int(y) for y in right]),
        (product, [int(highest) * int(y) for y in right]),
    ):
        assert [int(value) % (1 << bits) for value in out] == [y % (1 << bits) for y in exact]


@pytest.mark.parametrize("nranks", [1, 2, 3, 7, 127, 128, 129, 255, 256, 1000, 40_000])
@pytest.mark.parametrize("code", INTEGERS)
def test_integer_average_truncates_toward_zero(code: int, nranks: int) -> None:
    dtype = DTYPES[code]
    info = np.iinfo(dtype)
    edge = [info.min, info.min + 1, info.max, info.max - 1]
    near = [x for x in range(-2 * nranks - 2, 2 * nranks + 3) if info.min <= x <= info.max]
    out = np.array(edge + near, dtype)

    divider(code, nranks)(out)

    expected = [abs(int(x)) // nranks * (-1 if x < 0 else 1) for x in edge + near]
    assert out.tolist() == expected


def test_integer_average_of_more_than_one_block() -> None:
    out = np.arange(-50_000, 50_000, dtype=np.int32)
    expected = [int(x / 3) for x in out.tolist()]

    divider(CODES[out.dtype], 3)(out)

    assert out.tolist() == expected


@pytest.mark.parametrize("nranks", [2, 3, 300, 5000])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_float_average_rounds_once(name: str, nranks: int) -> None:
    dtype = np.dtype(name)
    total = (np.random.default_rng(8).normal(size=2000) * 100).astype(dtype)
    out = total.copy()

    divider(CODES[dtype], nranks)(out)

    wide = np.float64 if dtype == np.float64 else np.float32  # nranks itself must be exact in it
    assert out.tobytes() == (total.astype(wide) / wide(nranks)).astype(dtype).tobytes()


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex_average_divides_both_parts(name: str) -> None:
    out = np.array([6 + 9j, -3 + 0j, complex("inf"), 0], name)

    divider(CODES[out.dtype], 3)(out)

    assert out.tolist() == [2 + 3j, -1 + 0j, complex("inf"), 0]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex_numbers_have_no_order(name: str, op: ReduceOp) -> None:
    with pytest.raises(InvalidArgument, match=f"op={op.name} for dtype {name}.*SUM, PROD, AVG"):
        reducer(CODES[np.dtype(name)], op)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: reducer(63, ReduceOp.SUM), "dtype number 63.*float32"),
        (lambda: reducer(7, 9), "op=9 for dtype float32.*SUM"),
        (lambda: divider(63, 2), "dtype number 63"),
        (lambda: divider(7, 0), "nranks=0"),
    ],
)
def test_unknown_numbers_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call()


def test_wire_numbers_stay_what_they_are() -> None:
    assert {code: dtype.name for code, dtype in DTYPES.items()} == {
        0: "int8",
        1: "uint8",
        2: "int32",
        3: "uint32",
        4: "int64",
        5: "uint64",
        6: "float16",
        7: "float32",
        8: "float64",
        9: "bfloat16",
        16: "int16",
        17: "uint16",
        18: "complex64",
        19: "complex128",
    }
    assert (dtype_name(7), dtype_name(9), dtype_name(50)) == ("float32", "bfloat16", "number 50")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_overflow_and_nan_are_silent_inside_the_quiet_context(name: str) -> None:
    dtype = np.dtype(name)
    top = ml_dtypes.finfo(dtype).max if name == "bfloat16" else np.finfo(dtype).max
    left, right = np.array([top, np.inf], dtype), np.array([top, -np.inf], dtype)
    code = CODES[dtype]

    def run() -> None:
        for op in (ReduceOp.SUM, ReduceOp.PROD):
            reducer(code, op)(left, right, np.empty_like(left))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_context().run(run)
        assert np.geterr()["over"] == "warn"  # and outside it nothing has changed


def test_numba_is_imported_for_16_bit_floats_only() -> None:
    script = (
        "import sys; from r2ccl.kernels import reducer, divider\n"
        "reducer(7, 0); divider(7, 4); reducer(19, 0); reducer(0, 2)\n"
        "print('numba' in sys.modules)\n"
        "reducer(6, 0)\n"
        "print('numba' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.split() == ["False", "True"]


def test_without_ml_dtypes_everything_but_bfloat16_works() -> None:
    script = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from r2ccl.errors import InvalidArgument\n"
        "from r2ccl.dtypes import DTYPES, dtype_name\n"
        "from r2ccl.kernels import reducer\n"
        "reducer(7, 0)\n"
        "print(len(DTYPES), dtype_name(9))\n"
        "try: reducer(9, 0)\n"
        "except InvalidArgument as exc: print(exc)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.startswith("13 bfloat16")
    assert "needs the package ml_dtypes" in run.stdout
