"""Reductions in host memory: with NumPy, or with compiled loops for 16-bit and 8-bit floats.

For 16-bit and 8-bit floats, `reducer` and `divider` load the compiled loop; the functions that they
return only call it. The loop is thus loaded during planning and not between two slices.

Invariant: a kernel keeps no state, allocates no memory that grows with the message, and accepts
`left` or `right` itself as `out`.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from r2ccl.dtypes import EXTENSIONS, dtype_of, raw_dtype
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import callable_of, why_not_compiled
from r2ccl.kernels.table import check_op
from r2ccl.types import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]
#: ``reduce(left, right, out)``: elementwise ``out = left (op) right``.
Reducer = Callable[[Array, Array, Array], object]
#: ``divide(out)``: divides `out` in place.
Divider = Callable[[Array], object]


def _minimum(left: Array, right: Array, out: Array) -> None:
    np.minimum(left, right, out=out)  # NumPy deprecates a positional `out` for MIN and MAX only


def _maximum(left: Array, right: Array, out: Array) -> None:
    np.maximum(left, right, out=out)


def _float_extreme(dtype: np.dtype[Any], op: ReduceOp) -> Reducer:
    """Return the function for MIN or MAX of a block of floats, with -0 below +0.

    If both operands are zero, the sign of NumPy's result depends on the processor. The sign bit of
    the minimum is the OR of the two sign bits, and that of the maximum is the AND; all other bits
    of the operands are equal.
    """
    is_min = op is ReduceOp.MIN
    choose, merge = (_minimum, np.bitwise_or) if is_min else (_maximum, np.bitwise_and)
    bits = np.dtype(f"u{dtype.itemsize}")

    def reduce_floats(left: Array, right: Array, out: Array) -> None:
        if left.all() or right.all():  # no two zeros meet
            choose(left, right, out)
            return
        is_tie, tied = left == right, merge(left.view(bits), right.view(bits))
        choose(left, right, out)
        np.copyto(out.view(bits), tied, where=is_tie)

    return reduce_floats


def _complex_product(left: Array, right: Array, out: Array) -> None:
    if out.size == 1:
        # NumPy treats a single element in place as a reduction, whose loop rounds differently: the
        # last bits would depend on where slices are cut and on whether the call is in place.
        out[:] = np.multiply(left, right)
    else:
        np.multiply(left, right, out=out)


def _with_one_nan(combine: Reducer, dtype: np.dtype[Any]) -> Reducer:
    """Return a reducer like `combine`, but with the quiet NaN for every NaN in the result.

    `dtype` is a float or complex dtype. If both operands are NaN, the bits that NumPy and compiled
    loops return depend on where slices are cut and on whether the call is in place. Ranks that add
    the same numbers would then get different bits.
    """
    real = np.empty(0, dtype).real.dtype

    def reduce_block(left: Array, right: Array, out: Array) -> None:
        combine(left, right, out)
        parts = out if real is dtype else out.view(real)
        # The highest element is a NaN if there is one; to find it takes half the time of a mask.
        if parts.size and math.isnan(parts[parts.argmax()]):
            parts[np.isnan(parts)] = np.nan

    def reduce(left: Array, right: Array, out: Array) -> None:
        if out.size <= _BLOCK:
            reduce_block(left, right, out)
            return
        for start in range(0, out.size, _BLOCK):  # bounds the temporaries, and stays in cache
            reduce_block(*(each[start : start + _BLOCK] for each in (left, right, out)))

    return reduce


def _pair_reducer(dtype: np.dtype[Any], op: ReduceOp) -> Reducer:
    """Return the function for MINLOC or MAXLOC of (value, index) pairs; see `reducer`."""
    is_better = np.less if op is ReduceOp.MINLOC else np.greater
    raw = raw_dtype(dtype)

    def reduce_pairs(left: Array, right: Array, out: Array) -> None:
        for start in range(0, out.size, _BLOCK):  # bounds the size of the temporaries
            x, y = (each[start : start + _BLOCK].view(dtype) for each in (left, right))
            a, b = x["value"], y["value"]
            is_tie = (a == b) | (np.isnan(a) & np.isnan(b))
            is_right = is_better(b, a) | (np.isnan(b) & ~np.isnan(a))
            is_right |= is_tie & (y["index"] < x["index"])
            out[start : start + _BLOCK].view(raw)[:] = np.where(is_right, y.view(raw), x.view(raw))

    return reduce_pairs


_FUNCTIONS: dict[ReduceOp, Reducer] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.LAND: np.logical_and,
    ReduceOp.LOR: np.logical_or,
    ReduceOp.LXOR: np.logical_xor,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}

#: Names of the 16-bit floats, which `half` reduces.
HALVES = ("float16", "bfloat16")
#: Names of the types that are computed in float32.
SMALL = frozenset(("float16", *EXTENSIONS.values()))
#: Elements per block if a temporary is needed. A block has at most 512 KiB, so it stays in cache.
_BLOCK = 1 << 15


@functools.cache
def reducer(dtype_code: int, op: ReduceOp | int) -> Reducer:
    """Return the function that combines two slices.

    Parameters
    ----------
    dtype_code : int
        Number from `r2ccl.dtypes`.
    op : ReduceOp or int
        Operation. AVG gives the function of SUM; `divider` gives the division.

    Returns
    -------
    Reducer
        ``reduce(left, right, out)`` on three C-contiguous 1-D arrays of that dtype (pairs also as
        their `raw_dtype`) and of equal length; `out` may be `left` or `right` itself, but not a
        shifted view of them.

    Raises
    ------
    InvalidArgument
        If the dtype is unknown or does not support `op`, or `require_compiled` raises it.
    ImportError, TransportError
        For 16-bit and 8-bit floats, if `r2ccl.kernels.native.callable_of` raises it.

    Notes
    -----
    Integers wrap. MIN and MAX give NaN if either operand is NaN; -0 is below +0. Except in pairs, a
    result that is NaN has the bits of the quiet NaN, whatever NaNs the operands are. MINLOC and
    MAXLOC give the pair whose value is NaN, if there is one. If the values of two pairs are equal
    or both NaN, the result is the pair with the lower index. 16-bit and 8-bit floats are computed
    in float32 and rounded to their own type at every step. NumPy warns about overflow and invalid
    values in float32, float64 and complex, so call the function inside `quiet_context`.

    *Cost*: in addition to the arithmetic, a call of the returned function takes 0.3 µs, but
    1 µs for 16-bit floats, 3 µs for 8-bit floats, and 2 µs for other floats and complex numbers.
    For other floats and complex numbers, the search for NaN also takes up to as long as the
    arithmetic. For a 16-bit or 8-bit float, `reducer` itself loads a compiled loop, which takes
    30 ms the first time in a process and later some ms. If no process of this host has stored the
    loop, `reducer` compiles it in about 1 s. Call `reducer` during planning.
    """
    op = check_op(dtype_code, op)
    dtype = dtype_of(dtype_code)
    name = dtype.name
    if dtype.names is not None:
        return _pair_reducer(dtype, op)
    if name not in SMALL:
        combine = _FUNCTIONS[op]
        if dtype.kind == "c" and op is ReduceOp.PROD:
            combine = _complex_product
        elif dtype.kind == "f" and op in (ReduceOp.MIN, ReduceOp.MAX):
            combine = _float_extreme(dtype, op)
        return _with_one_nan(combine, dtype) if dtype.kind in "fc" else combine
    require_compiled(name)
    op = ReduceOp.SUM if op is ReduceOp.AVG else op
    if name not in HALVES:
        from r2ccl.kernels import float8  # ml_dtypes takes 10 ms to import

        kernel = float8.reducer_of(dtype, op)
        bits = np.dtype(np.uint8)
        return lambda left, right, out: kernel(left.view(bits), right.view(bits), out.view(bits))
    reduce_bits = callable_of("r2ccl.kernels.half:make_reducer", name, int(op))

    def reduce_halves(left: Array, right: Array, out: Array) -> None:
        reduce_bits(data_of(left), data_of(right), data_of(out), out.size)

    return reduce_halves


@functools.cache
def divider(dtype_code: int, nranks: int) -> Divider:
    """Return the function that divides a sum by `nranks` in place, for AVG.

    Parameters
    ----------
    dtype_code : int
        Number from `r2ccl.dtypes` of a dtype that supports AVG.
    nranks : int
        Divisor, at least 1.

    Returns
    -------
    Divider
        ``divide(out)`` on a C-contiguous 1-D array of that dtype.

    Raises
    ------
    InvalidArgument
        If the dtype is unknown, `nranks` is below 1, or `require_compiled` raises it.
    ImportError, TransportError
        For 16-bit and 8-bit floats, if `r2ccl.kernels.native.callable_of` raises it.

    Notes
    -----
    Integer quotients are truncated toward zero, as in NCCL (``FuncSumPostDiv`` in its
    reduce_kernel.h divides the magnitude and restores the sign) and as with C's ``/``. The sum may
    have wrapped before the division, as in NCCL. Floats are divided by `nranks` after the sum,
    rounding once; NCCL multiplies each input by 1/`nranks` instead, which rounds at every rank.
    """
    dtype = dtype_of(dtype_code)
    if nranks < 1:
        raise InvalidArgument(f"nranks={nranks!r}: allowed is 1 or more")
    if nranks == 1:
        return _leave
    if dtype.kind == "u":
        return _unsigned_divider(dtype, nranks)
    if dtype.kind == "i":
        return _signed_divider(dtype, nranks)
    if dtype.name in SMALL:
        require_compiled(dtype.name)
        return _small_divider(dtype, nranks)
    return _real_divider(dtype, nranks)


def require_compiled(name: str) -> None:
    """Check that compiled code can be used if arrays of the dtype `name` need it.

    Raises
    ------
    InvalidArgument
        If `name` is a 16-bit or 8-bit float, and compiled code cannot be used.
    """
    if name in SMALL and why_not_compiled():
        raise InvalidArgument(
            f"arrays of dtype {name} are reduced in compiled code, but {why_not_compiled()}; or "
            "convert the arrays to float32"
        )


def quiet_context() -> contextvars.Context:
    """Return a context in which NumPy does not warn about overflow, NaN or infinity.

    ``context.run(function)`` costs 0.1 µs, ``np.errstate`` 0.9 µs. Keep one context for each thread
    that runs kernels, because two threads cannot be in the same context at once. Enter the context
    once per collective. NumPy keeps its error state in a context variable since version 2.0.
    """
    context = contextvars.copy_context()
    context.run(np.seterr, all="ignore")
    return context


def _leave(out: Array) -> None:
    """Leave `out` unchanged: division by 1."""


def _unsigned_divider(dtype: np.dtype[Any], nranks: int) -> Divider:
    if nranks > np.iinfo(dtype).max:
        return _fill_zero
    divisor = dtype.type(nranks)
    return lambda out: np.floor_divide(out, divisor, out=out)


def _signed_divider(dtype: np.dtype[Any], nranks: int) -> Divider:
    info = np.iinfo(dtype)
    if nranks > -int(info.min):
        return _fill_zero
    if nranks > info.max:  # nranks is -min: the quotient of min is -1, all others are 0
        return _minus_one_where_lowest
    divisor = dtype.type(nranks)
    lift = dtype.type(nranks - 1)

    def divide(out: Array) -> None:
        for start in range(0, out.size, _BLOCK):  # bounds the size of the mask below
            block = out[start : start + _BLOCK]
            # floor((x + n - 1) / n) rounds the quotient up, which is toward zero for x < 0.
            np.add(block, lift, out=block, where=block < 0)
            np.floor_divide(block, divisor, out=block)

    return divide


def _small_divider(dtype: np.dtype[Any], nranks: int) -> Divider:
    if dtype.name in HALVES:
        divide = callable_of("r2ccl.kernels.half:make_divider", dtype.name)
        return lambda out: divide(data_of(out), out.size, nranks)
    from r2ccl.kernels import float8  # ml_dtypes takes 10 ms to import

    divisor = np.float32(nranks)
    look_up = float8.map_of(dtype, lambda values: values / divisor)
    return lambda out: look_up(out.view(np.uint8), out.view(np.uint8))


def _real_divider(dtype: np.dtype[Any], nranks: int) -> Divider:
    # Divide real and imaginary parts separately: a complex division would turn infinities to NaN.
    real = np.empty(0, dtype).real.dtype
    divisor = real.type(nranks)

    def divide(out: Array) -> None:
        parts = out.view(real)
        np.divide(parts, divisor, out=parts)

    return divide


def _minus_one_where_lowest(out: Array) -> None:
    np.equal(out, np.iinfo(out.dtype).min, out=out, casting="unsafe")
    np.negative(out, out=out)


def _fill_zero(out: Array) -> None:
    out.fill(0)


__all__ = [
    "HALVES",
    "SMALL",
    "Array",
    "Divider",
    "Reducer",
    "divider",
    "quiet_context",
    "reducer",
    "require_compiled",
]
