"""Compiled loops that reduce float16 and bfloat16, passed as their bits (uint16).

NumPy converts 16-bit floats one element at a time; these loops are vectorized. The sum of 64 KiB
takes 16 µs instead of 180 µs for float16, and 6 µs instead of 45 µs for bfloat16, measured on an
EPYC with AVX-512. Importing this module imports Numba (about 0.5 s), so a process imports it only
if no file holds a loop that it needs; compiling the loop takes 0.2-0.4 s. See
`r2ccl.kernels.native`.

Semantics: SUM, PROD and division are computed in float32 and rounded once to nearest even, as in
NumPy and ml_dtypes. MIN and MAX compare bit patterns in IEEE 754's total order, where -0 is below
+0. Any NaN gives the one quiet NaN of the type, so the result has the same bits for any order of
operands.

References: IEEE 754-2019, sections 4.3.1 (rounding), 5.10 (totalOrder), 9.6 (minimum, maximum).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from r2ccl.kernels.compiling import inlined as _inline
from r2ccl.kernels.compiling import pointer
from r2ccl.types import ReduceOp

_BF16_INF, _BF16_NAN = 0x7F80, 0x7FC0
_F16_INF, _F16_NAN = 0x7C00, 0x7E00
_F32_INF = 0x7F800000


@_inline
def _float_of_bf16(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@_inline
def _bf16_of_float(value: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    # Add half a unit in the last place, minus one if the kept part is even: ties go to even.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(_F32_INF)
    return np.uint16(np.uint32(_BF16_NAN) if is_nan else rounded)


@_inline
def _float_of_f16(bits: Any) -> Any:
    magnitude = np.uint32(bits & np.uint16(0x7FFF))
    sign = np.uint32(np.uint32(bits & np.uint16(0x8000)) << np.uint32(16))
    # Exponent bias 15 becomes 127 (+112); an exponent of all ones stays all ones (+112 again).
    bias = np.uint32((127 - 15) << 23) * np.uint32(2 if magnitude >= np.uint32(_F16_INF) else 1)
    normal = np.uint32(np.uint32(magnitude << np.uint32(13)) + bias)
    # A subnormal is its mantissa times 2**-24, exact in float32.
    tiny = np.float32(np.float32(magnitude) * np.float32(2.0**-24)).view(np.uint32)
    chosen = tiny if magnitude < np.uint32(0x400) else normal
    return np.uint32(chosen | sign).view(np.float32)


@_inline
def _f16_of_float(value: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Exponent bias 127 becomes 15, modulo 2**32; a rounding carry may turn the result to infinity.
    odd = np.uint32(magnitude >> np.uint32(13)) & np.uint32(1)
    shifted = np.uint32(magnitude + np.uint32((15 - 127) * 2**23 % 2**32) + np.uint32(0xFFF) + odd)
    rounded = np.uint32(shifted >> np.uint32(13))
    # Below 2**-14: adding 0.5 puts the last place at 2**-24, so the addition itself rounds.
    half = np.float32(0.5)
    sum_bits = np.float32(magnitude.view(np.float32) + half).view(np.uint32)
    if magnitude < np.uint32((127 - 14) << 23):
        rounded = np.uint32(sum_bits - half.view(np.uint32))
    if magnitude >= np.uint32((127 + 16) << 23):
        rounded = np.uint32(_F16_INF)
    is_nan = magnitude > np.uint32(_F32_INF)
    return np.uint16(np.uint32(_F16_NAN) if is_nan else (rounded | sign))


@_inline
def _order(bits: Any) -> Any:
    # Convert sign and magnitude to two's complement: integers in the order of the floats.
    signed = np.int16(bits)
    return np.int16(signed ^ np.int16(np.int16(signed >> 15) & np.int16(0x7FFF)))


@_inline
def _bf16_sum(x: Any, y: Any) -> Any:
    return _bf16_of_float(_float_of_bf16(x) + _float_of_bf16(y))


@_inline
def _bf16_prod(x: Any, y: Any) -> Any:
    return _bf16_of_float(_float_of_bf16(x) * _float_of_bf16(y))


@_inline
def _f16_sum(x: Any, y: Any) -> Any:
    return _f16_of_float(_float_of_f16(x) + _float_of_f16(y))


@_inline
def _f16_prod(x: Any, y: Any) -> Any:
    return _f16_of_float(_float_of_f16(x) * _float_of_f16(y))


@_inline
def _pick(x: Any, y: Any, chosen: Any, inf: Any, nan: Any) -> Any:
    mask = np.uint16(0x7FFF)
    is_nan = ((x & mask) > np.uint16(inf)) | ((y & mask) > np.uint16(inf))
    return np.uint16(nan) if is_nan else np.uint16(chosen)


@_inline
def _bf16_min(x: Any, y: Any) -> Any:
    return _pick(x, y, x if _order(x) <= _order(y) else y, _BF16_INF, _BF16_NAN)


@_inline
def _bf16_max(x: Any, y: Any) -> Any:
    return _pick(x, y, x if _order(x) >= _order(y) else y, _BF16_INF, _BF16_NAN)


@_inline
def _f16_min(x: Any, y: Any) -> Any:
    return _pick(x, y, x if _order(x) <= _order(y) else y, _F16_INF, _F16_NAN)


@_inline
def _f16_max(x: Any, y: Any) -> Any:
    return _pick(x, y, x if _order(x) >= _order(y) else y, _F16_INF, _F16_NAN)


_COMBINE = {
    ("bfloat16", ReduceOp.SUM): _bf16_sum,
    ("bfloat16", ReduceOp.PROD): _bf16_prod,
    ("bfloat16", ReduceOp.MIN): _bf16_min,
    ("bfloat16", ReduceOp.MAX): _bf16_max,
    ("float16", ReduceOp.SUM): _f16_sum,
    ("float16", ReduceOp.PROD): _f16_prod,
    ("float16", ReduceOp.MIN): _f16_min,
    ("float16", ReduceOp.MAX): _f16_max,
}

_CONVERT = {
    "bfloat16": (_float_of_bf16, _bf16_of_float),
    "float16": (_float_of_f16, _f16_of_float),
}


@_inline
def _bf16_quotient(x: Any, divisor: Any) -> Any:
    return _bf16_of_float(np.float32(_float_of_bf16(x) / np.float32(divisor)))


@_inline
def _f16_quotient(x: Any, divisor: Any) -> Any:
    return _f16_of_float(np.float32(_float_of_f16(x) / np.float32(divisor)))


_DIVIDE = {"bfloat16": _bf16_quotient, "float16": _f16_quotient}


def scalar_reducer(dtype_name: str, op: ReduceOp) -> Callable[[Any, Any], Any]:
    """Return the function that combines two elements, given as bits, for use in compiled code."""
    return _COMBINE[dtype_name, op]


def scalar_divider(dtype_name: str) -> Callable[[Any, Any], Any]:
    """Return ``divide(bits, divisor)``, which divides one element, for use in compiled code."""
    return _DIVIDE[dtype_name]


def make_reducer(dtype_name: str, op: int) -> Callable[..., int]:
    """Return the loop of SUM, PROD, MIN or MAX, for `r2ccl.kernels.native`.

    ``reduce(left, right, out, count)`` takes the addresses of three arrays of `count` elements.
    `out` may be `left` or `right` itself, but not a shifted view of them.
    """
    combine = _COMBINE[dtype_name, ReduceOp(op)]

    def reduce_bits(left: Any, right: Any, out: Any, count: Any) -> int:
        target, x, y = pointer(out, np.uint16), pointer(left, np.uint16), pointer(right, np.uint16)
        # LLVM checks at run time that arrays do not overlap and otherwise runs a scalar loop, 8
        # times slower. An in-place loop that names the array once is vectorized. Operands may be
        # swapped, because the operations commute.
        if out == left:
            for i in range(count):
                target[i] = combine(target[i], y[i])
        elif out == right:
            for i in range(count):
                target[i] = combine(target[i], x[i])
        else:
            for i in range(count):
                target[i] = combine(x[i], y[i])
        return 0

    return reduce_bits


def make_divider(dtype_name: str) -> Callable[..., int]:
    """Return the loop that divides in place, for `r2ccl.kernels.native`.

    ``divide(out, count, nranks)`` divides each of the `count` elements at address `out` by
    `nranks`.
    """
    quotient = _DIVIDE[dtype_name]

    def divide_bits(out: Any, count: Any, nranks: Any) -> int:
        target = pointer(out, np.uint16)
        for i in range(count):
            target[i] = quotient(target[i], nranks)
        return 0

    return divide_bits


def make_scaler(dtype_name: str) -> Callable[..., int]:
    """Return the loop that multiplies each element by a factor, for `r2ccl.kernels.native`.

    Each product is rounded to float32 and then to the dtype.

    ``scale(source, out, count, factor)`` takes the addresses of two arrays of `count` elements, and
    the bits of the factor as a float32.
    """
    widen, narrow = _CONVERT[dtype_name]

    def scale_bits(source: Any, out: Any, count: Any, factor: Any) -> int:
        x, target = pointer(source, np.uint16), pointer(out, np.uint16)
        real = np.uint32(factor).view(np.float32)
        for i in range(count):
            target[i] = narrow(np.float32(widen(x[i]) * real))
        return 0

    return scale_bits


def make_widener(dtype_name: str) -> Callable[..., int]:
    """Return a loop like the loop of `make_scaler` that stores the products as float32."""
    widen, _ = _CONVERT[dtype_name]

    def widen_bits(source: Any, out: Any, count: Any, factor: Any) -> int:
        x, target = pointer(source, np.uint16), pointer(out, np.float32)
        real = np.uint32(factor).view(np.float32)
        for i in range(count):
            target[i] = widen(x[i]) * real
        return 0

    return widen_bits


def make_narrower(dtype_name: str) -> Callable[..., int]:
    """Return the loop that rounds float32 to the type `dtype_name`, for `r2ccl.kernels.native`.

    ``narrow(source, out, count)`` takes the addresses of two arrays of `count` elements.
    """
    _, narrow = _CONVERT[dtype_name]

    def narrow_bits(source: Any, out: Any, count: Any) -> int:
        x, target = pointer(source, np.float32), pointer(out, np.uint16)
        for i in range(count):
            target[i] = narrow(x[i])
        return 0

    return narrow_bits


__all__ = [
    "make_divider",
    "make_narrower",
    "make_reducer",
    "make_scaler",
    "make_widener",
    "scalar_divider",
    "scalar_reducer",
]
