"""Operations of the user: forms of functions, digests and refusals."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest

import r2ccl
from r2ccl.dtypes import CODES, pair_dtype
from r2ccl.errors import InvalidArgument
from r2ccl.kernels import UserOp, user_op
from r2ccl.kernels.user import user_reducer

Array = np.ndarray[Any, np.dtype[Any]]


@numba.njit
def of_scalars(a: Any, b: Any) -> Any:
    return a + b - a * b


@numba.njit
def of_arrays(left: Array, right: Array, out: Array) -> None:
    for i in range(out.size):
        out[i] = left[i] + right[i] - left[i] * right[i]


def in_python(left: Array, right: Array) -> Array:
    return left + right - left * right


def in_python_with_out(left: Array, right: Array, out: Array) -> None:
    out[:] = left  # would spoil `right` if `out` were the same memory
    out += right
    out -= left * right


FORMS = [of_scalars, of_arrays, in_python, in_python_with_out]


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "complex64"])
@pytest.mark.parametrize("function", FORMS, ids=lambda each: each.__name__)
def test_every_form_gives_the_same_result(function: Callable[..., Any], name: str) -> None:
    rng = np.random.default_rng(1)
    left, right = (rng.integers(-9, 9, 1000).astype(name) for _ in range(2))
    reduce = user_op(function).reducer(CODES[left.dtype])
    expected = in_python(left, right)
    for at in (None, 0, 1):
        operands = left.copy(), right.copy()
        out = np.empty_like(left) if at is None else operands[at]
        reduce(*operands, out)
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("function", FORMS, ids=lambda each: each.__name__)
def test_operands_may_be_read_only(function: Callable[..., Any]) -> None:
    left, right = np.frombuffer(np.arange(8.0).tobytes()), np.arange(8.0)
    out = np.empty(8)
    user_op(function).reducer(CODES[out.dtype])(left, right, out)
    assert out.tolist() == in_python(left, right).tolist()


def test_ufuncs_and_pairs_are_reduced() -> None:
    left, right, out = np.array([3.0, 5]), np.array([4.0, 12]), np.empty(2)
    user_op(np.hypot).reducer(CODES[out.dtype])(left, right, out)
    assert out.tolist() == [5, 13]

    def with_more(left: Array, right: Array) -> Array:
        return np.where(left["index"] >= right["index"], left, right)

    dtype = pair_dtype("f4")
    pairs = [np.array([(1, a), (2, b)], dtype) for a, b in ((3, 4), (5, 0))]
    found = np.empty(2, dtype)
    user_op(with_more).reducer(CODES[dtype])(*pairs, found)
    assert found.tolist() == [(1, 5), (2, 4)]


def made(factor: Any) -> Callable[[Array, Array], Array]:
    def weighted(left: Array, right: Array) -> Array:
        return left + factor * right

    return weighted


def test_digests_differ_where_the_operations_do() -> None:
    ops = [
        *(user_op(each) for each in (*FORMS, np.add, np.multiply, made(2), made(3))),
        user_op(made(2), name="other"),
        user_op(made(2), is_commutative=False),
        user_op(made(np.arange(3))),
        user_op(made(np.arange(1, 4))),
        user_op(lambda left, right: left + 2 * right, name="weighted"),
        user_op(lambda left, right: left + 3 * right, name="weighted"),
    ]
    assert len({op.digest for op in ops}) == len(ops)
    assert all(0 < op.digest < 1 << 32 for op in ops)
    assert user_op(made(2)).digest == user_op(made(2)).digest


def with_default(weight: Any) -> Callable[[Array, Array], Array]:
    def weighted(left: Array, right: Array, *, weight: Any = weight) -> Array:
        return left + weight * right

    return weighted


@pytest.mark.parametrize("make", [lambda w: made((1, w)), with_default], ids=["tuple", "keyword"])
def test_long_arrays_within_values_are_compared(make: Callable[..., Any]) -> None:
    weights = [np.ones(5_000) for _ in range(2)]
    assert user_op(make(weights[0])).digest == user_op(make(weights[1])).digest
    weights[1][2_500] = 2.0  # which repr() leaves out
    assert user_op(make(weights[0])).digest != user_op(make(weights[1])).digest


def test_one_function_by_element_and_by_slice() -> None:
    def larger(left: Any, right: Any) -> Any:
        return left if left > right else right

    by_element, by_slice = user_op(numba.njit(larger)), user_op(larger)
    x, y, out = np.arange(3.0), np.ones(3), np.empty(3)
    user_reducer(by_element.digest, CODES[x.dtype])(x, y, out)
    assert out.tolist() == [1.0, 1.0, 2.0]
    with pytest.raises(InvalidArgument, match="truth value"):
        user_reducer(by_slice.digest, CODES[x.dtype])


def test_digests_are_equal_in_all_processes(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import numba, numpy as np, r2ccl\n"
        "def f(a, b): return a if a in {'x', 'y', 'z'} else a + b\n"
        "print(r2ccl.user_op(f).digest, r2ccl.user_op(numba.njit(f)).digest, hash('x'))"
    )
    # Strings have another hash in this process.
    seed = next(each for each in ("1", "2") if each != os.environ.get("PYTHONHASHSEED"))
    other = subprocess.check_output(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        text=True,
        timeout=60,
    )
    exec(script, {"__name__": "__main__"})
    *digests, hashed = capsys.readouterr().out.split()
    *expected, also_hashed = other.split()
    assert digests == expected
    assert hashed != also_hashed


def no_array(left: Array, right: Array) -> str:
    return "no array"


def failing(left: Array, right: Array) -> Array:
    raise ZeroDivisionError("on purpose")


def one_number(left: Array, right: Array) -> Any:
    return max(left.max(initial=0), right.max(initial=0))


def test_a_result_of_another_size_is_no_result() -> None:
    reduce = user_op(lambda left, right: (left + right)[:1], name="first").reducer(7)
    x = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"returned shape \(1,\) for arrays of shape \(3,\)"):
        reduce(x, x, np.empty_like(x))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: user_op(one_number).reducer(7), r"\(one_number\) .*: the function returned shape"),
        (lambda: user_op(3), r"user_op\(3\): pass a Python function"),  # type: ignore[arg-type]
        (lambda: user_op(print), "user_op.*print.*: pass a Python function"),
        (lambda: user_op(lambda a: a, name="one"), r"user_op\(one\): .*two parameters, or three"),
        (lambda: user_op(np.exp), r"user_op\(exp\): .*two parameters"),
        (lambda: user_op(made(object())), r"user_op\(weighted\): .*depends on <object.*use only"),
        (lambda: user_op(made((1, object()))), r"user_op\(weighted\): .*depends on <object"),
        (lambda: user_op(with_default(object())), r"user_op\(weighted\): .*depends on <object"),
        (lambda: user_op(made(np.array([object()]))), r"user_op\(weighted\): .*depends on array"),
        (lambda: user_op(failing).reducer(7), "for dtype float32: ZeroDivisionError: on purpose"),
        (lambda: user_op(no_array).reducer(7), r"user_op\(no_array\) for dtype float32"),
        (lambda: user_op(of_scalars).reducer(9), r"user_op\(of_scalars\) for dtype bfloat16: Num"),
        (lambda: user_op(np.hypot).reducer(18), r"user_op\(hypot\) for dtype complex64: TypeErr"),
        (lambda: user_op(np.hypot).reducer(63), "dtype number 63"),
    ],
)
def test_what_is_no_operation_is_refused(call: Callable[[], UserOp], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call()


def halved(a: Any, b: Any) -> Any:
    return 0.5 * (a + b)


def turned(a: Any, b: Any) -> Any:
    return a + 1j * b


def widened(a: Any, b: Any) -> Any:
    return a + 2 * b


#: Functions, and dtypes that their results are not converted to.
LOSSY = [(halved, "int32"), (halved, "bool"), (widened, "bool"), (turned, "float64")]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *((make, name) for each, name in LOSSY for make in (each, numba.njit(each))),
        (numba.njit("f8(f8, f8)")(halved), "int32"),
        (np.true_divide, "int32"),
        (np.frompyfunc(halved, 2, 1), "int32"),
    ],
)
def test_results_of_another_kind_are_refused(function: Callable[..., Any], name: str) -> None:
    op, dtype = user_op(function, name="f"), np.dtype(name)
    with pytest.raises(InvalidArgument, match=rf"f\) for dtype {name}: TypeError: .* not convert"):
        op.reducer(CODES[dtype])


@pytest.mark.parametrize("name", ["float32", "complex64", "uint8", "uint64", "int16"])
@pytest.mark.parametrize("function", [widened, numba.njit(widened)])
def test_results_of_the_same_kind_are_converted(function: Callable[..., Any], name: str) -> None:
    x = np.arange(200).astype(name)
    out = np.empty_like(x)
    user_op(function).reducer(CODES[x.dtype])(x, x, out)
    assert out.tolist() == (3 * np.arange(200)).astype(name).tolist()


def test_small_floats_may_be_computed_in_float32() -> None:
    x = np.arange(20).astype(ml_dtypes.bfloat16)
    out = np.empty_like(x)
    op = user_op(lambda left, right: left.astype(np.float32) + right, name="wide")
    op.reducer(CODES[x.dtype])(x, x, out)
    assert out.tolist() == (2 * np.arange(20)).tolist()


def test_names_and_kinds() -> None:
    assert repr(r2ccl.user_op(in_python)) == "user_op(in_python)"
    assert repr(r2ccl.user_op(in_python, name="union")) == "user_op(union)"
    assert r2ccl.user_op(in_python).is_commutative
    assert not r2ccl.user_op(in_python, is_commutative=False).is_commutative


class Scaled:
    """Object whose method is an operation that depends on the object."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def combine(self, left: Array, right: Array) -> Array:
        return (left + right) * self.factor


def test_methods_of_different_objects_are_different_operations() -> None:
    out = np.empty(3, "f4")
    ops = [user_op(Scaled(factor).combine) for factor in (2, 3, 2)]
    for factor, op in zip((2, 3), ops, strict=False):
        op.reducer(CODES[out.dtype])(np.arange(3, dtype="f4"), np.ones(3, "f4"), out)
        assert out.tolist() == [factor, 2 * factor, 3 * factor]
    assert ops[0].digest == ops[2].digest != ops[1].digest


def test_a_method_of_an_opaque_object_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="attributes of a method's object"):
        user_op(Scaled(object()).combine)


def test_a_function_around_a_compiled_one_runs_itself() -> None:
    @functools.wraps(of_scalars)
    def around(left: Array, right: Array) -> Array:
        return left - right

    out = np.empty(3, "f4")
    user_op(around).reducer(CODES[out.dtype])(np.arange(3, dtype="f4"), np.ones(3, "f4"), out)
    assert out.tolist() == [-1, 0, 1]


def recursive(step: int) -> Callable[..., Any]:
    def combine(left: Array, right: Array) -> Any:
        return left + right if left.size < step else combine(left[:0], right[:0])

    return combine


def test_a_recursive_function_has_a_digest() -> None:
    assert user_op(recursive(5)).digest == user_op(recursive(5)).digest
    assert user_op(recursive(5)).digest != user_op(recursive(6)).digest


def test_a_variable_without_a_value_is_refused() -> None:
    def combine(left: Array, right: Array) -> Any:
        return left + right * scale

    with pytest.raises(InvalidArgument, match=r"user_op\(combine\): .* before .* has a value"):
        user_op(combine)
    scale = 1
