"""What simulated ranks bring into a call, and what must come out: by NumPy and nothing of ours.

A float's sum depends on the order of the additions, and so do the results here: they are those of
the schedule, run op by op (`r2ccl.schedule.interpret`) with NumPy's own arithmetic, and held
against what NumPy makes of the data in whatever order.

Must not reduce with `kernels`: it testifies against them. Invariant: equal arguments, equal data.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.dtypes import DTYPES
from r2ccl.kernels.table import OPS
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule
from r2ccl.types import ReduceOp

Array = npt.NDArray[Any]

#: Element types by name, and their numbers.
CODES: dict[str, int] = {dtype.name: code for code, dtype in DTYPES.items()}
#: Every element type, by name, and operation that there is.
PAIRS: tuple[tuple[str, ReduceOp], ...] = tuple(
    (DTYPES[code].name, op) for code in DTYPES for op in sorted(OPS[code])
)

_FUNCTIONS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
#: Collectives in which nothing is reduced.
_MOVES = frozenset({"allgather", "broadcast"})
#: Of bfloat16, which NumPy knows nothing of: the gap between 1 and the next number.
_BFLOAT16_EPS = 2.0**-7


@functools.lru_cache(maxsize=4096)
def draw(dtype: str, count: int, call: int, rank: int) -> Array:
    """Draw data whose every element counts: integers of all sizes, floats that round.

    Floats have magnitudes of which a sum of a few rounds in most orders differently, and no product
    of up to seven overflows.
    """
    kind = DTYPES[CODES[dtype]]
    random = np.random.default_rng((count, call, rank))
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return random.integers(info.min, info.max, count, kind, endpoint=True)
    if kind.kind == "c":
        return np.asarray(_floats(random, count, 4) + 1j * _floats(random, count, 4)).astype(kind)
    return _floats(random, count, 1 if kind.itemsize == 2 else 12).astype(kind)


def part(schedule: Schedule, rank: int, count: int) -> slice:
    """Say which elements of its output a rank is promised."""
    if schedule.collective == "reduce_scatter":
        return slice(rank * count // schedule.nranks, (rank + 1) * count // schedule.nranks)
    is_promised = schedule.collective != "reduce" or rank == schedule.root
    return slice(0, count if is_promised else 0)


@functools.lru_cache(maxsize=512)
def expected(
    schedule: Schedule, dtype: str, count: int, call: int, op: ReduceOp
) -> tuple[bytes, ...]:
    """Return what each rank must end with in the `part` that it is promised."""
    inputs = [draw(dtype, count, call, rank) for rank in range(schedule.nranks)]
    finish = functools.partial(_mean, nranks=schedule.nranks) if op is ReduceOp.AVG else None
    outputs = interpret(schedule, inputs, _FUNCTIONS[op], finish=finish)
    results = []
    for rank, output in enumerate(outputs):
        promised = part(schedule, rank, count)
        if schedule.collective in _MOVES:
            np.testing.assert_array_equal(output[promised], _moved(schedule, inputs)[promised])
        else:
            _require_near(output[promised], [each[promised] for each in inputs], op)
        results.append(output[promised].tobytes())
    return tuple(results)


def _floats(random: np.random.Generator, count: int, spread: int) -> Array:
    """Draw magnitudes from ``2**-spread`` to ``2**(spread + 1)``, and signs."""
    scale = 2.0 ** random.integers(-spread, spread, count, endpoint=True)
    return np.asarray(random.uniform(1, 2, count) * random.choice((-1.0, 1.0), count) * scale)


def _mean(total: Array, nranks: int) -> Array:
    if total.dtype.kind in "iu":  # toward zero, as C does it
        is_above = (total < 0) & (total % nranks != 0)
        return np.asarray(total // nranks + is_above, total.dtype)
    # A complex sum is divided part by part; NumPy's complex division may round differently.
    parts = total.view(total.real.dtype)
    return np.asarray(parts / parts.dtype.type(nranks)).view(total.dtype)


def _moved(schedule: Schedule, inputs: list[Array]) -> Array:
    """Return what every rank ends with where nothing is reduced."""
    if schedule.collective == "broadcast":
        return inputs[schedule.root]
    count = inputs[0].size // schedule.nranks
    return np.concatenate([each[rank * count :][:count] for rank, each in enumerate(inputs)])


def _require_near(found: Array, inputs: list[Array], op: ReduceOp) -> None:
    """Hold a reduction against one in the order of the ranks: equal, or as close as it can be."""
    function, nranks, dtype = _FUNCTIONS[op], len(inputs), found.dtype
    if dtype.kind in "iu" or op in (ReduceOp.MIN, ReduceOp.MAX):
        total = functools.reduce(function, inputs)
        np.testing.assert_array_equal(found, _mean(total, nranks) if op is ReduceOp.AVG else total)
        return
    wide = [_wide(each) for each in inputs]
    total = functools.reduce(function, wide)
    reach = functools.reduce(function, [np.abs(each) for each in wide])
    eps = _BFLOAT16_EPS if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
    off = np.abs(_wide(found) - (total / nranks if op is ReduceOp.AVG else total))
    assert np.all(off <= 4 * nranks * eps * reach), f"{op.name} of {dtype.name}: off by {off.max()}"


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


__all__ = ["CODES", "PAIRS", "draw", "expected", "part"]
