"""Input data of simulated ranks, and the results that a call must produce, bit for bit.

Because a floating-point sum depends on the order of the additions, the expected results come from
`r2ccl.schedule.interpret`, which runs the schedule op by op with NumPy's arithmetic. Reductions are
compared with a reduction in rank order, within the rounding error. This module does not reduce with
`r2ccl.kernels`, because its results are used to check these kernels. Equal arguments give equal
data.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.dtypes import DTYPES, dtype_name, raw_dtype
from r2ccl.kernels.table import OPS
from r2ccl.schedule.chunks import Range, consecutive
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule
from r2ccl.types import ReduceOp

Array = npt.NDArray[Any]

#: Code of each element type (a key of `DTYPES`), by name.
CODES: dict[str, int] = {dtype_name(code): code for code in DTYPES}
#: All valid pairs of element type (by name) and operation.
PAIRS: tuple[tuple[str, ReduceOp], ...] = tuple(
    (dtype_name(code), op) for code in DTYPES for op in sorted(OPS[code])
)


_FUNCTIONS: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.LAND: lambda x, y: ((x != 0) & (y != 0)).astype(x.dtype),
    ReduceOp.LOR: lambda x, y: ((x != 0) | (y != 0)).astype(x.dtype),
    ReduceOp.LXOR: lambda x, y: ((x != 0) ^ (y != 0)).astype(x.dtype),
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
#: Operations whose result is one of the inputs.
_EXACT = frozenset((ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MINLOC, ReduceOp.MAXLOC))
#: Collectives without reduction.
_MOVES = frozenset({"allgather", "alltoall", "broadcast", "gather", "scatter"})
#: Machine epsilon of the types that ``np.finfo`` does not support: the gap between 1 and the next
#: number.
_EPS = {"bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2}


@functools.lru_cache(maxsize=4096)
def draw(dtype: str, count: int, call: int, rank: int) -> Array:
    """Return random input data of one rank for one call; do not write to the array.

    Integers cover the whole range of their type, and some are 0. The magnitudes of floats vary so
    much that sums in different orders mostly round differently, but a product of up to seven floats
    does not overflow. Pairs (for MINLOC and MAXLOC) often have equal values; an array of pairs has
    the dtype that `raw_dtype` returns.
    """
    kind = DTYPES[CODES[dtype]]
    random = np.random.default_rng((count, call, rank))
    if kind.kind in "iu":
        info = np.iinfo(kind)
        values = random.integers(info.min, info.max, count, kind, endpoint=True)
        return np.where(random.random(count) < 1 / 4, kind.type(0), values)
    if kind.kind == "b":
        return random.random(count) < 1 / 2
    if kind.names is not None:
        pairs = np.zeros(count, kind)
        pairs["value"] = random.integers(-2, 3, count)
        pairs["index"] = random.integers(0, 9, count)
        return pairs.view(raw_dtype(kind))
    if kind.kind == "c":
        return np.asarray(_floats(random, count, 4) + 1j * _floats(random, count, 4)).astype(kind)
    return _floats(random, count, {1: 0, 2: 1}.get(kind.itemsize, 12)).astype(kind)


def parts_of(schedule: Schedule, count: int, sizes: Sequence[int]) -> tuple[Range, ...]:
    """Return the range of elements of each part: consecutive parts with these `sizes`.

    If `sizes` is empty, each part has `count` divided by the number of parts, rounded down.
    """
    return consecutive(sizes or [count // schedule.nparts] * schedule.nparts)


def part(schedule: Schedule, rank: int, count: int, sizes: Sequence[int] = ()) -> slice:
    """Return the range of elements of a rank's output whose content the collective defines.

    The rest of the output may have any content.
    """
    if schedule.collective in ("reduce_scatter", "scatter"):
        return slice(*parts_of(schedule, count, sizes)[rank])
    if schedule.collective == "exscan":
        return slice(0, count if rank else 0)
    is_promised = schedule.collective not in ("reduce", "gather") or rank == schedule.root
    return slice(0, count if is_promised else 0)


@functools.lru_cache(maxsize=512)
def expected(
    schedule: Schedule,
    dtype: str,
    count: int,
    call: int,
    op: ReduceOp,
    sizes: tuple[int, ...] = (),
) -> tuple[bytes, ...]:
    """Return the bytes that each rank must have in its `part` of the output.

    Raises
    ------
    AssertionError
        If the result of the interpreted schedule differs from a reduction in rank order by more
        than the rounding error; without reduction, if it differs from the inputs.
    """
    inputs = [draw(dtype, count, call, rank) for rank in range(schedule.nranks)]
    finish = functools.partial(_mean, nranks=schedule.nranks) if op is ReduceOp.AVG else None
    parts = parts_of(schedule, count, sizes)
    outputs = interpret(schedule, inputs, _function(dtype, op), finish=finish, parts=parts)
    results = []
    for rank, output in enumerate(outputs):
        promised = part(schedule, rank, count, sizes)
        if schedule.collective in _MOVES:
            moved = _moved(schedule, inputs, rank, parts)
            np.testing.assert_array_equal(output[promised], moved[promised])
        elif output[promised].size:
            reduced = inputs[: _nreduced(schedule, rank)]
            _require_near(output[promised], [each[promised] for each in reduced], dtype, op)
        results.append(output[promised].tobytes())
    return tuple(results)


def _function(dtype: str, op: ReduceOp) -> Callable[[Array, Array], Array]:
    if op not in (ReduceOp.MINLOC, ReduceOp.MAXLOC):
        return _FUNCTIONS[op]
    return functools.partial(_best, DTYPES[CODES[dtype]], 1 if op is ReduceOp.MINLOC else -1)


def _best(kind: np.dtype[Any], sign: int, left: Array, right: Array) -> Array:
    """Return, per element, the pair with the least ``sign * value``; on ties, least index."""
    pairs = zip(left.view(kind).tolist(), right.view(kind).tolist(), strict=True)
    best = [min(pair, key=lambda each: (sign * each[0], each[1])) for pair in pairs]
    result = np.zeros(left.size, kind)
    result[:] = best
    return result.view(left.dtype)


def _floats(random: np.random.Generator, count: int, spread: int) -> Array:
    """Draw floats of random sign with magnitudes from ``2**-spread`` to ``2**(spread + 1)``."""
    scale = 2.0 ** random.integers(-spread, spread, count, endpoint=True)
    return np.asarray(random.uniform(1, 2, count) * random.choice((-1.0, 1.0), count) * scale)


def _mean(total: Array, nranks: int) -> Array:
    if total.dtype.kind in "iu":  # round toward zero, as C does
        is_above = (total < 0) & (total % nranks != 0)
        return np.asarray(total // nranks + is_above, total.dtype)
    # Divide real and imaginary parts separately: NumPy's complex division may round differently.
    parts = total.view(total.real.dtype)
    if parts.itemsize < 4:  # an 8-bit float cannot represent 9, for example
        return np.asarray(parts.astype(np.float32) / np.float32(nranks)).astype(total.dtype)
    return np.asarray(parts / parts.dtype.type(nranks)).view(total.dtype)


def _nreduced(schedule: Schedule, rank: int) -> int:
    """Return the number of ranks, from rank 0 on, that contribute to the result of `rank`."""
    return {"scan": rank + 1, "exscan": rank}.get(schedule.collective, schedule.nranks)


def _moved(schedule: Schedule, inputs: list[Array], rank: int, parts: Sequence[Range]) -> Array:
    """Return the output of `rank` for a collective without reduction."""
    if schedule.collective in ("broadcast", "scatter"):
        return inputs[schedule.root]
    n, is_alltoall = schedule.nranks, schedule.collective == "alltoall"
    sources = [(rank - part) % n if is_alltoall else part for part in range(n)]
    return np.concatenate(
        [inputs[source][slice(*place)] for source, place in zip(sources, parts, strict=True)]
    )


def _require_near(found: Array, inputs: list[Array], name: str, op: ReduceOp) -> None:
    """Assert that `found` equals the reduction of `inputs` in rank order.

    For floats, it may differ by the rounding error.
    """
    function, nranks, dtype = _function(name, op), len(inputs), found.dtype
    if dtype.kind in "iub" or op in _EXACT:
        total = functools.reduce(function, inputs)
        np.testing.assert_array_equal(found, _mean(total, nranks) if op is ReduceOp.AVG else total)
        return
    wide = [_wide(each) for each in inputs]
    total = functools.reduce(function, wide)
    reach = functools.reduce(function, [np.abs(each) for each in wide])
    eps = _EPS.get(dtype.name) or float(np.finfo(dtype).eps)
    off = np.abs(_wide(found) - (total / nranks if op is ReduceOp.AVG else total))
    assert np.all(off <= 4 * nranks * eps * reach), (
        f"{op.name} of {dtype.name} off by up to {off.max()}"
    )


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


__all__ = ["CODES", "PAIRS", "draw", "expected", "part", "parts_of"]
