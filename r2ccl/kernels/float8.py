"""Loops that reduce 8-bit floats with one table lookup per element.

A type has only 65,536 pairs of values, so an operation is a table of 64 KiB, which stays in cache.
The sum of 64 KiB takes about 25 µs. Importing this module imports Numba (about 0.5 s), so only
`host` imports it, the first time an 8-bit float is reduced.

Semantics: as in `r2ccl.kernels.half`. SUM, PROD and division are computed in float32 and rounded
once to nearest even, as in ml_dtypes. float8_e4m3fn has no infinity: a result beyond its largest
number, 448, is NaN, while float8_e5m2 overflows to infinity. MIN and MAX order -0 below +0. Any NaN
gives the one quiet NaN of the type, so the result has the same bits for any order of operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numba import types

from r2ccl.kernels.half import compile_loop
from r2ccl.types import ReduceOp

Bits = npt.NDArray[np.uint8]

_OPERAND = types.Array(types.uint8, 1, "C", readonly=True)
_RESULT = types.Array(types.uint8, 1, "C")
_ALL = np.arange(256, dtype=np.uint8)


def compile_reducer(dtype: np.dtype[Any], op: ReduceOp) -> Callable[[Bits, Bits, Bits], None]:
    """Return ``kernel(left, right, out)`` for SUM, PROD, MIN or MAX of an 8-bit float type."""
    values = _ALL.view(dtype).astype(np.float32)
    left, right = values[:, None], values
    if op in (ReduceOp.SUM, ReduceOp.PROD):
        with np.errstate(invalid="ignore"):  # operands may be NaN or infinite
            table = _bits(left + right if op is ReduceOp.SUM else left * right, dtype)
    else:
        # Bits in the order of the values: the magnitude, negated if there is a sign.
        order = np.where(_ALL < 128, _ALL.astype(np.int16), 127 - _ALL.astype(np.int16))
        is_left = order[:, None] <= order if op is ReduceOp.MIN else order[:, None] >= order
        table = _bits(np.where(is_left, left, right), dtype)
        table[np.isnan(left) | np.isnan(right)] = _nan(dtype)
    lookup = compile_loop(_reduce_bits, types.void(_OPERAND, _OPERAND, _RESULT, _OPERAND))
    flat = table.reshape(-1)
    return lambda left, right, out: lookup(left, right, out, flat)


def compile_map(
    dtype: np.dtype[Any], function: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
) -> Callable[[Bits, Bits], None]:
    """Return ``kernel(source, out)``, which applies `function` to each element of an 8-bit type.

    `function` takes and returns float32 arrays; its results are rounded to `dtype`.
    """
    table = _bits(function(_ALL.view(dtype).astype(np.float32)), dtype)
    lookup = compile_loop(_map_bits, types.void(_OPERAND, _RESULT, _OPERAND))
    return lambda source, out: lookup(source, out, table)


def _reduce_bits(left: Bits, right: Bits, out: Bits, table: Bits) -> None:
    for i in range(out.size):
        out[i] = table[np.intp(left[i]) * 256 + np.intp(right[i])]


def _map_bits(source: Bits, out: Bits, table: Bits) -> None:
    for i in range(out.size):
        out[i] = table[source[i]]


def _bits(values: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> Bits:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(dtype)
    bits = rounded.view(np.uint8)
    bits[np.isnan(rounded)] = _nan(dtype)
    return bits


def _nan(dtype: np.dtype[Any]) -> int:
    """Return the bits of the quiet NaN of an 8-bit float type."""
    return 0x7E if dtype == ml_dtypes.float8_e5m2 else 0x7F


__all__ = ["compile_map", "compile_reducer"]
