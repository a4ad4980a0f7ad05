"""Every operation on every element type, against references that do not share its code."""

from __future__ import annotations

import operator
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from r2ccl.dtypes import CODES, DTYPES, dtype_name, pair_dtype
from r2ccl.errors import InvalidArgument
from r2ccl.kernels import OPS, divider, quiet_context, reducer
from r2ccl.types import ReduceOp

PAIRS = [
    pytest.param(code, op, id=f"{dtype_name(code)}-{op.name}")
    for code in sorted(DTYPES)
    for op in sorted(OPS[code])
]
INTEGERS = [
    pytest.param(code, id=dtype.name) for code, dtype in DTYPES.items() if dtype.kind in "iu"
]


def values(dtype: np.dtype[Any], count: int, seed: int) -> np.ndarray[Any, Any]:
    """Small integers and halves, signed where the type is: every operation on two is exact."""
    rng = np.random.default_rng(seed)
    if dtype.names is not None:
        pairs = np.zeros(count, dtype)
        pairs["value"], pairs["index"] = rng.integers(-2, 3, count), rng.integers(0, 5, count)
        return pairs
    # 8-bit floats hold the integers up to 8, and the products of integers up to 2.
    most = 2 if dtype.name.startswith("float8") else 11
    low = 0 if dtype.kind in "ub" else -most
    out = rng.integers(low, most + 1, count).astype(dtype)
    if dtype.kind == "c":
        out += 1j * rng.integers(-11, 12, count).astype(out.real.dtype)
    return out


FUNCTIONS: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.PROD: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.LAND: lambda x, y: int(x != 0 and y != 0),
    ReduceOp.LOR: lambda x, y: int(x != 0 or y != 0),
    ReduceOp.LXOR: lambda x, y: int((x != 0) != (y != 0)),
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
    ReduceOp.MINLOC: min,
    ReduceOp.MAXLOC: lambda x, y: min(x, y, key=lambda pair: (-pair[0], pair[1])),
}


def reference(op: ReduceOp, left: Any, right: Any) -> Any:
    """Compute one element in Python's own unbounded arithmetic."""
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return left + right
    return FUNCTIONS[op](left, right)


def copy_of(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy all bytes, with those between the fields of pairs, which NumPy does not copy."""
    return np.frombuffer(bytearray(x.tobytes()), x.dtype)


def python(x: np.ndarray[Any, Any]) -> list[Any]:
    """Convert to Python numbers, exactly."""
    is_extension = x.dtype.kind in "Vf" and x.dtype.names is None
    return (x.astype(np.float64) if is_extension else x).tolist()


@pytest.mark.parametrize(("code", "op"), PAIRS)
def test_result_equals_python_arithmetic(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    for count in (0, 1, 7, 64, 1000):
        left, right = values(dtype, count, 1), values(dtype, count, 2)
        out = np.empty(count, dtype)

        reducer(code, op)(left, right, out)

        expected = [reference(op, x, y) for x, y in zip(python(left), python(right), strict=True)]
        if dtype.kind in "iu":
            bits = dtype.itemsize * 8
            signed = 1 << (bits - 1) if dtype.kind == "i" else 0
            expected = [(value + signed) % (1 << bits) - signed for value in expected]
        assert python(out) == expected, count


@pytest.mark.parametrize(("code", "op"), PAIRS)
def test_out_may_be_either_operand(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    left, right = values(dtype, 333, 3), values(dtype, 333, 4)
    reduce = reducer(code, op)
    apart = np.empty_like(left)
    reduce(left, right, apart)
    in_left, in_right = copy_of(left), copy_of(right)

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
    assert cut.tobytes() == whole.tobytes()


@pytest.mark.parametrize(("code", "op"), PAIRS)
def test_result_does_not_depend_on_whether_it_is_in_place(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    reduce = reducer(code, op)
    rng = np.random.default_rng(9)
    for size in (1, 2, 3, 17) * 30:
        left, right = (rng.standard_normal((2, size, 2)) * 10).round(3)
        parts = [
            (each[:, 0] + 1j * each[:, 1] if dtype.kind == "c" else each[:, 0] % 7).astype(dtype)
            if dtype.names is None
            else values(dtype, size, int(each[0, 0] * 1e3) % 1000)
            for each in (left, right)
        ]
        fresh = np.empty_like(parts[0])
        reduce(*parts, fresh)
        for at in range(2):
            operands = [copy_of(each) for each in parts]
            reduce(*operands, operands[at])
            assert operands[at].tobytes() == fresh.tobytes(), (size, at)


@pytest.mark.parametrize(
    ("code", "op"),
    [
        each
        for each in PAIRS
        if DTYPES[each.values[0]].names is None and DTYPES[each.values[0]].kind not in "iub"
    ],
)
def test_nan_has_the_same_bits_for_any_operands(code: int, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    real = np.empty(0, dtype).real.dtype
    for size in (1, 2, 19, 40_000):
        operands = [np.full((2, size), dtype.type(1)), np.full((2, size), dtype.type(1))]
        for each, sign in zip(operands, (1, -1), strict=True):
            each.view(real)[:] = np.copysign(np.float32(np.nan), sign)
        for left, right in (operands, operands[::-1]):
            for out in (np.empty(size, dtype), left[0], right[1]):
                quiet_context().run(reducer(code, op), left[0], right[1], out)
                assert set(out.view(f"u{real.itemsize}")) == {_quiet_nan(real)}, size


def _quiet_nan(dtype: np.dtype[Any]) -> int:
    return int(np.array([np.nan], np.float32).astype(dtype).view(f"u{dtype.itemsize}")[0])


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


@pytest.mark.parametrize("code", INTEGERS)
def test_integer_average_truncates_toward_zero(code: int) -> None:
    dtype = DTYPES[code]
    info = np.iinfo(dtype)
    edge = [info.min, info.min + 1, info.max, info.max - 1]
    for nranks in (1, 2, 3, 7, 127, 128, 129, 255, 256, 1000, 40_000):
        near = [x for x in range(-2 * nranks - 2, 2 * nranks + 3) if info.min <= x <= info.max]
        out = np.array(edge + near, dtype)

        divider(code, nranks)(out)

        expected = [abs(int(x)) // nranks * (-1 if x < 0 else 1) for x in edge + near]
        assert out.tolist() == expected, nranks


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
        (lambda: reducer(7, 99), "op=99 for dtype float32.*SUM"),
        (lambda: divider(63, 2), "dtype number 63"),
        (lambda: divider(7, 0), "nranks=0"),
    ],
)
def test_unknown_numbers_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call()


def test_wire_numbers_stay_what_they_are() -> None:
    assert {code: dtype_name(code) for code in DTYPES} == {
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
        10: "float8_e4m3fn",
        11: "float8_e5m2",
        16: "int16",
        17: "uint16",
        18: "complex64",
        19: "complex128",
        20: "bool",
        21: "float32_index",
        22: "float64_index",
        23: "int32_index",
        24: "int64_index",
    }
    assert [op.name for op in ReduceOp] == [
        *("SUM", "PROD", "MIN", "MAX", "AVG", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR"),
        *("MINLOC", "MAXLOC"),
    ]
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


def test_without_ml_dtypes_all_but_its_types_work() -> None:
    script = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from r2ccl.errors import InvalidArgument\n"
        "from r2ccl.dtypes import DTYPES, dtype_name\n"
        "from r2ccl.kernels import reducer\n"
        "reducer(7, 0)\n"
        "print(len(DTYPES), dtype_name(9), dtype_name(10))\n"
        "for code in (9, 10):\n"
        "    try: reducer(code, 0)\n"
        "    except InvalidArgument as exc: print(exc)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.splitlines()[0] == "18 bfloat16 float8_e4m3fn"
    assert "bfloat16 needs the package ml_dtypes" in run.stdout
    assert "float8_e4m3fn needs the package ml_dtypes" in run.stdout


@pytest.mark.parametrize(
    ("name", "op", "words"),
    [
        ("bool", ReduceOp.SUM, "MIN, MAX, LAND.*; for a sum, convert to an integer"),
        ("float32", ReduceOp.BOR, "allowed are SUM, PROD, MIN, MAX, AVG$"),
        ("float64", ReduceOp.LAND, "allowed are SUM, PROD, MIN, MAX, AVG$"),
        ("int32", ReduceOp.MINLOC, "allowed are SUM.*BXOR$"),
    ],
)
def test_other_pairs_are_refused(name: str, op: ReduceOp, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"op={op.name} for dtype {name}: .*{words}"):
        reducer(CODES[np.dtype(name)], op)


@pytest.mark.parametrize("op", [ReduceOp.MINLOC, ReduceOp.MAXLOC])
def test_nan_is_the_best_value_at_its_lowest_index(op: ReduceOp) -> None:
    dtype = pair_dtype(np.float32)
    nan = float("nan")
    left = np.array([(nan, 3), (1, 0), (nan, 7), (2, 4)], dtype)
    right = np.array([(1, 0), (nan, 3), (nan, 5), (2, 1)], dtype)
    out = np.empty_like(left)

    reducer(CODES[dtype], op)(left, right, out)

    assert out["index"].tolist() == [3, 3, 5, 1]
    assert np.isnan(out["value"]).tolist() == [True, True, True, False]


def test_pairs_have_the_layout_of_c_structs() -> None:
    sizes = [pair_dtype(name).itemsize for name in ("f4", "f8", "i4", "i8")]
    assert sizes == [8, 16, 8, 16]
    assert pair_dtype(np.float64).fields["index"][1] == 8
    for given in ("x", "(2,", 3):
        with pytest.raises(InvalidArgument, match=r"pair_dtype\(.*\): allowed are float32"):
            pair_dtype(given)
    with pytest.raises(InvalidArgument, match=r"pair_dtype\(int16\): allowed are float32"):
        pair_dtype(np.int16)


def test_bytes_between_fields_are_reduced_too() -> None:
    dtype = pair_dtype(np.float64)
    left, right = (np.full(32, fill, np.uint8).view(dtype) for fill in (1, 2))
    left["value"], right["value"] = [1, 4], [3, 2]
    out = np.zeros_like(left)

    reducer(CODES[dtype], ReduceOp.MINLOC)(left, right, out)

    assert out[:1].tobytes() == left[:1].tobytes()
    assert out[1:].tobytes() == right[1:].tobytes()
