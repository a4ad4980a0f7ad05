"""Compiled loop that reduces the arrays of several ranks at once; see `r2ccl.kernels.fold`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from r2ccl.dtypes import dtype_of
from r2ccl.kernels import half
from r2ccl.kernels.compiling import copy_bytes, inlined, intrinsic, pointer
from r2ccl.kernels.host import HALVES
from r2ccl.types import ReduceOp

_I64 = ir.IntType(64)
#: Bytes that a kernel combines at a time: much less than the first-level cache, so that the partial
#: result is still in the cache when the next source is combined with it.
_BLOCK_NBYTES = 8192


def make_fold(dtype_code: int, op: int) -> Callable[..., int]:
    """Return the kernel of `r2ccl.kernels.fold.fold_kernel` as a function that Numba compiles."""
    dtype = dtype_of(dtype_code)
    is_average = op == ReduceOp.AVG
    step = ReduceOp.SUM if is_average else ReduceOp(op)
    combine: Callable[..., Any]
    if dtype.name in HALVES:
        combine, divide = half.scalar_reducer(dtype.name, step), half.scalar_divider(dtype.name)
        element: Any = np.uint16
    else:
        combines = _COMBINE | _COMBINE_OF_KIND.get(dtype.kind, {})
        combine, divide = combines[step], _DIVIDE[dtype.kind]
        element = np.uint8 if dtype.kind == "b" else dtype.type
    itemsize = dtype.itemsize

    def fold(sources: Any, count: Any, target: Any, nbytes: Any) -> int:
        addresses = pointer(sources, np.int64)
        # LLVM vectorizes a loop only if its arrays do not overlap, so the result is collected in
        # separate memory if the target is a source.
        scratch = np.int64(0)
        for rank in range(count):
            if addresses[rank] < target + nbytes and target < addresses[rank] + nbytes:
                scratch = _scratch()
        for at in range(0, nbytes, _BLOCK_NBYTES):
            length = min(_BLOCK_NBYTES, nbytes - at)
            size = length // itemsize
            place = scratch if scratch else target + at
            out = pointer(place, element)
            first = pointer(addresses[0] + at, element)
            if count == 1:
                copy_bytes(place, addresses[0] + at, length)
            else:
                second = pointer(addresses[1] + at, element)
                for i in range(size):
                    out[i] = combine(first[i], second[i])
            for rank in range(2, count):
                other = pointer(addresses[rank] + at, element)
                for i in range(size):
                    out[i] = combine(out[i], other[i])
            if is_average and count > 1:
                for i in range(size):
                    out[i] = divide(out[i], count)
            if scratch:
                copy_bytes(target + at, place, length)
        return 0

    return fold


@intrinsic
def _scratch(typing_context: Any) -> Any:
    """Return the address of a block on the stack, which is valid until the kernel returns."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Words instead of one array: Numba zeroes the first element, here 8 bytes.
        words = cgutils.alloca_once(builder, _I64, size=_I64(_BLOCK_NBYTES // 8))
        return builder.ptrtoint(words, _I64)

    return types.int64(), generate


@inlined
def _add(x: Any, y: Any) -> Any:
    return x + y


@inlined
def _multiply(x: Any, y: Any) -> Any:
    return x * y


@inlined
def _minimum(x: Any, y: Any) -> Any:
    return x if x <= y else y


@inlined
def _maximum(x: Any, y: Any) -> Any:
    return x if x >= y else y


@inlined
def _one_nan(x: Any) -> Any:
    # Which of two NaNs an addition returns depends on the instructions that LLVM chooses.
    return x if x == x else type(x)(np.nan)


@inlined
def _float_sum(x: Any, y: Any) -> Any:
    return _one_nan(x + y)


@inlined
def _float_product(x: Any, y: Any) -> Any:
    return _one_nan(x * y)


@inlined
def _float_minimum(x: Any, y: Any) -> Any:
    # If one of them is NaN, so is the result. If both are zero, the last line gives -0 if one of
    # them is -0.
    found = x if (x < y) | (x != x) else y
    return -((-x) - y) if (x == 0) & (y == 0) else _one_nan(found)


@inlined
def _float_maximum(x: Any, y: Any) -> Any:
    found = x if (x > y) | (x != x) else y
    return x + y if (x == 0) & (y == 0) else _one_nan(found)


@inlined
def _complex_sum(x: Any, y: Any) -> Any:
    return complex(_one_nan(x.real + y.real), _one_nan(x.imag + y.imag))


@inlined
def _logical_and(x: Any, y: Any) -> Any:
    return (x != 0) & (y != 0)


@inlined
def _logical_or(x: Any, y: Any) -> Any:
    return (x != 0) | (y != 0)


@inlined
def _logical_xor(x: Any, y: Any) -> Any:
    return (x != 0) ^ (y != 0)


@inlined
def _and(x: Any, y: Any) -> Any:
    return x & y


@inlined
def _or(x: Any, y: Any) -> Any:
    return x | y


@inlined
def _xor(x: Any, y: Any) -> Any:
    return x ^ y


_COMBINE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: _add,
    ReduceOp.PROD: _multiply,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.LAND: _logical_and,
    ReduceOp.LOR: _logical_or,
    ReduceOp.LXOR: _logical_xor,
    ReduceOp.BAND: _and,
    ReduceOp.BOR: _or,
    ReduceOp.BXOR: _xor,
}
#: By `dtype.kind`, what replaces `_COMBINE` so that each NaN has the same bits. PROD of complex
#: numbers has no kernel.
_COMBINE_OF_KIND: dict[str, dict[ReduceOp, Callable[..., Any]]] = {
    "f": {
        ReduceOp.SUM: _float_sum,
        ReduceOp.PROD: _float_product,
        ReduceOp.MIN: _float_minimum,
        ReduceOp.MAX: _float_maximum,
    },
    "c": {ReduceOp.SUM: _complex_sum},
}


@inlined
def _divide_signed(x: Any, count: Any) -> Any:
    # Rounds toward zero: `//` rounds down, so a negative sum is rounded up first.
    wide = np.int64(x)
    return (wide + (count - 1 if wide < 0 else 0)) // count


@inlined
def _divide_unsigned(x: Any, count: Any) -> Any:
    return np.uint64(x) // np.uint64(count)


@inlined
def _divide_float(x: Any, count: Any) -> Any:
    return x / type(x)(count)


@inlined
def _divide_complex(x: Any, count: Any) -> Any:
    return complex(x.real / count, x.imag / count)


_DIVIDE: dict[str, Callable[..., Any]] = {
    "i": _divide_signed,
    "u": _divide_unsigned,
    "b": _divide_unsigned,  # bools have no AVG
    "f": _divide_float,
    "c": _divide_complex,
}

__all__ = ["make_fold"]
