"""Loops that reduce 8-bit floats with one table lookup per element.

A type has only 65,536 pairs of values, so an operation is a table of 64 KiB, which stays in cache.
The sum of 64 KiB takes about 25 µs. The loops are compiled once per host; see
`r2ccl.kernels.native`.

Semantics: as in `r2ccl.kernels.half`. SUM, PROD and division are computed in float32 and rounded
once to nearest even, as in ml_dtypes. float8_e4m3fn has no infinity: a result is NaN if it would
round to more than the largest number, 448, while float8_e5m2 overflows to infinity. MIN and MAX
order -0 below +0. Any NaN gives the one quiet NaN of the type, so the result has the same bits for
any order of operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import callable_of
from r2ccl.types import ReduceOp

Bits = npt.NDArray[np.uint8]

_ALL = np.arange(256, dtype=np.uint8)


def reducer_of(dtype: np.dtype[Any], op: ReduceOp) -> Callable[[Bits, Bits, Bits], None]:
    """Return ``kernel(left, right, out)`` for SUM, PROD, MIN or MAX of an 8-bit float type."""
    values = _ALL.view(dtype).astype(np.float32)
    left, right = values[:, None], values
    if op in (ReduceOp.SUM, ReduceOp.PROD):
        with np.errstate(invalid="ignore"):  # operands may be NaN or infinite
            table = _bits(left + right if op is ReduceOp.SUM else left * right, dtype)
    else:
        # Integers in the order of the values: the bits, or below zero if the sign bit is set.
        order = np.where(_ALL < 128, _ALL.astype(np.int16), 127 - _ALL.astype(np.int16))
        is_left = order[:, None] <= order if op is ReduceOp.MIN else order[:, None] >= order
        table = _bits(np.where(is_left, left, right), dtype)
        table[np.isnan(left) | np.isnan(right)] = _nan(dtype)
    look_up = callable_of("r2ccl.kernels.float8:make_pair_lookup")

    def reduce(left: Bits, right: Bits, out: Bits) -> None:
        look_up(data_of(left), data_of(right), data_of(out), out.size, data_of(table))

    return reduce


def map_of(
    dtype: np.dtype[Any], function: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
) -> Callable[[Bits, Bits], None]:
    """Return ``kernel(source, out)``, which applies `function` to each element.

    `dtype` is an 8-bit float type; `source` and `out` are arrays of its bits. `function` takes and
    returns float32 arrays; its results are rounded to `dtype`. `map_of` calls it once, with all 256
    values of the type.
    """
    table = _bits(function(_ALL.view(dtype).astype(np.float32)), dtype)
    look_up = callable_of("r2ccl.kernels.float8:make_lookup")

    def convert(source: Bits, out: Bits) -> None:
        look_up(data_of(source), data_of(out), out.size, data_of(table))

    return convert


def make_pair_lookup() -> Callable[..., int]:
    """Return the loop that looks up pairs of elements, for `r2ccl.kernels.native`.

    ``look_up(left, right, out, count, table)`` takes the addresses of three arrays of `count`
    elements and of a table. The result for elements x and y, as bits, is ``table[256 * x + y]``.
    """
    from r2ccl.kernels.compiling import pointer  # imports Numba

    def look_up(left: Any, right: Any, out: Any, count: Any, table: Any) -> int:
        x, y = pointer(left, np.uint8), pointer(right, np.uint8)
        target, results = pointer(out, np.uint8), pointer(table, np.uint8)
        for i in range(count):
            target[i] = results[np.intp(x[i]) * 256 + np.intp(y[i])]
        return 0

    return look_up


def make_lookup() -> Callable[..., int]:
    """Return the loop that looks up single elements, for `r2ccl.kernels.native`.

    ``look_up(source, out, count, table)`` takes the addresses of two arrays of `count` elements and
    of a table. The result for an element x, as bits, is ``table[x]``.
    """
    from r2ccl.kernels.compiling import pointer  # imports Numba

    def look_up(source: Any, out: Any, count: Any, table: Any) -> int:
        x, target = pointer(source, np.uint8), pointer(out, np.uint8)
        results = pointer(table, np.uint8)
        for i in range(count):
            target[i] = results[np.intp(x[i])]
        return 0

    return look_up


def _bits(values: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> Bits:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(dtype)
    bits = rounded.view(np.uint8)
    bits[np.isnan(rounded)] = _nan(dtype)
    return bits


def _nan(dtype: np.dtype[Any]) -> int:
    """Return the bits of the quiet NaN of an 8-bit float type."""
    return 0x7E if dtype == ml_dtypes.float8_e5m2 else 0x7F


__all__ = ["make_lookup", "make_pair_lookup", "map_of", "reducer_of"]
