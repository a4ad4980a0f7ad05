"""Inputs, expected results and buffers of each measured collective.

The buffer size of a case is that of nccl-tests: the larger of the input and the output of a rank.
The benches in ``bench/`` measure other libraries with the same definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from r2ccl.cli.perf.forms import CollectiveForm, DataExtent

Array = np.ndarray[Any, np.dtype[Any]]


#: NumPy function that combines two inputs exactly, in 64-bit integers, for each operation; an
#: average is a sum that `_reduced` divides.
_EXACT: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
#: Value that the elements of the result array have before a call, unless they hold its input.
UNTOUCHED = 77


@dataclass(frozen=True)
class Case:
    """One line of the table: a collective of `nranks` ranks, its buffer, operation and root.

    Attributes
    ----------
    total : int
        Number of elements of the whole buffer.
    op : str
        ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or ``"avg"``; ignored if the collective does
        not reduce.
    """

    form: CollectiveForm
    nranks: int
    total: int
    dtype: np.dtype[Any]
    op: str = "sum"
    root: int = 0

    @classmethod
    def of(
        cls, form: CollectiveForm, nranks: int, nbytes: int, dtype: np.dtype[Any], **more: Any
    ) -> Case:
        """Return the case with the largest buffer of at most `nbytes`.

        If the parts must be equal, the number of elements is a multiple of the number of parts.
        Unless `nbytes` is 0 or ranks pass no data, the buffer has at least one element or, if the
        parts must be equal, one element per part, even if this is more than `nbytes`.
        """
        unit = nranks if form.has_parts and not form.is_unequal else 1
        total = nbytes // dtype.itemsize
        total = max(total - total % unit, unit if nbytes else 0)
        return cls(form, nranks, 0 if form.sends is DataExtent.NONE else total, dtype, **more)

    @property
    def nbytes(self) -> int:
        """Size of the whole buffer."""
        return self.total * self.dtype.itemsize

    @property
    def count(self) -> int:
        """Number of elements that nccl-tests shows.

        If the parts are equal, this is the size of one part, otherwise the size of the whole
        buffer.
        """
        is_part = self.form.has_parts and not self.form.is_unequal
        return self.total // self.nranks if is_part else self.total

    @property
    def parts(self) -> list[int]:
        """Number of elements of each rank's part; unequal parts grow linearly with the rank."""
        n = self.nranks
        weights = range(1, n + 1) if self.form.is_unequal else [1] * n
        sums = [self.total * each // sum(weights) for each in accumulate(weights, initial=0)]
        return [high - low for low, high in pairwise(sums)]

    def exchanged(self, rank: int) -> list[int]:
        """Return the number of elements that `rank` sends to each rank in an alltoallv.

        The number received from each rank is the same. Ranks i and j exchange
        ``parts[(i + j) % nranks]`` elements, so every rank sends and receives the whole buffer.
        """
        parts = self.parts
        return [parts[(rank + peer) % self.nranks] for peer in range(self.nranks)]

    def part(self, rank: int) -> slice:
        """Return the range of the part of `rank` in the whole buffer."""
        begin = sum(self.parts[:rank])
        return slice(begin, begin + self.parts[rank])

    def sends(self, rank: int) -> int | None:
        """Return the number of elements that `rank` passes; None if it passes no array."""
        return self._extent(self.form.sends, rank)

    def receives(self, rank: int) -> int | None:
        """Return the number of elements of the result array of `rank`; None if it has no result."""
        return self._extent(self.form.receives, rank)

    def _extent(self, extent: DataExtent, rank: int) -> int | None:
        if extent is DataExtent.NONE or (extent is DataExtent.ROOT and rank != self.root):
            return None
        return self.parts[rank] if extent is DataExtent.PART else self.total


def make_inputs(case: Case, seed: Sequence[int]) -> list[Array | None]:
    """Return the input of each rank, or None for a rank that passes no input.

    Equal seeds give equal inputs. The inputs of reductions are small integers, so that no order of
    operations rounds a partial result: sums stay in the range in which bfloat16 holds all integers,
    and factors are powers of two. The inputs of other collectives are random bytes.
    """
    rng = np.random.default_rng(seed)
    return [_draw(rng, case, rank) for rank in range(case.nranks)]


def _draw(rng: np.random.Generator, case: Case, rank: int) -> Array | None:
    count = case.sends(rank)
    if count is None:
        return None
    if not case.form.reduces:
        return rng.integers(0, 256, count * case.dtype.itemsize, np.uint8).view(case.dtype)
    if case.op == "prod":
        # Float16 holds 2**14; further ranks multiply by one.
        return rng.integers(1, 3 if rank < 14 else 2, count, np.int8).astype(case.dtype)
    # Bfloat16 holds every integer up to 256; ranks from the 121st on add zero.
    bound = max(1, 120 // case.nranks) if rank < 120 else 0
    lowest = 0 if case.dtype.kind == "u" else -bound
    return rng.integers(lowest, bound + 1, count, np.int8).astype(case.dtype)


def expected(case: Case, inputs: Sequence[Array | None], rank: int) -> Array | None:
    """Return the data that `rank` must receive; None if it receives no data."""
    if case.receives(rank) is None:
        return None
    name = case.form.name
    given = [each for each in inputs if each is not None]
    if name in ("scan", "exscan"):
        given = given[: rank + (name == "scan")]
        return _reduced(case, given) if given else None
    if case.form.reduces:
        whole = _reduced(case, given)
        return whole[case.part(rank)] if case.form.receives is DataExtent.PART else whole
    if name == "sendrecv":
        return given[rank - 1]
    if name == "broadcast":
        return given[case.root]
    if name in ("scatter", "scatterv"):
        return given[0][case.part(rank)]
    if name == "alltoall":
        return np.concatenate([each[case.part(rank)] for each in given])
    if name == "alltoallv":
        return np.concatenate([_sent(case, each, peer, rank) for peer, each in enumerate(given)])
    return np.concatenate(given)


def _reduced(case: Case, inputs: Sequence[Array]) -> Array:
    exact = np.real(inputs[0]).astype(np.int64)
    for values in inputs[1:]:
        _EXACT[case.op](exact, np.real(values).astype(np.int64), out=exact)
    if case.op != "avg":
        return exact.astype(case.dtype)
    average = exact / len(inputs)  # rounding it again is harmless: 53 >= 2 * 24 + 2 bits
    return (np.trunc(average) if case.dtype.kind in "iu" else average).astype(case.dtype)


def _sent(case: Case, values: Array, source: int, to: int) -> Array:
    """Return the part of `values`, the input of `source`, that an alltoallv sends to rank `to`."""
    counts = case.exchanged(source)
    begin = sum(counts[:to])
    return values[begin : begin + counts[to]]


class Buffers(NamedTuple):
    """Arrays that a rank passes to a call; None for an array that the rank does not pass."""

    x: Any
    out: Any


def place(
    case: Case,
    rank: int,
    data: Array | None,
    *,
    in_place: bool,
    move: Callable[[Array], Any] = lambda block: block,
) -> Buffers:
    """Return the arrays that `rank` passes to a call, with a copy of `data` as the input.

    `data` is None if the rank has no input. If the rank passes two arrays and `in_place` is True,
    they share memory. `move` returns its argument, or a copy of it in the measured memory, for
    example on a GPU.
    """
    count = case.receives(rank)
    if data is None or count is None or not in_place:
        x = None if data is None else move(data.copy())
        out = None if count is None else move(np.full(count, UNTOUCHED, case.dtype))
        return Buffers(x, out)
    part = case.part(rank)
    if case.form.sends is DataExtent.PART:
        block = np.full(count, UNTOUCHED, case.dtype)
        block[part] = data
        out = move(block)
        return Buffers(out[part], out)
    x = move(data.copy())
    return Buffers(x, x[part] if case.form.receives is DataExtent.PART else x)


def count_wrong(
    case: Case, rank: int, inputs: Sequence[Array | None], buffers: Buffers, *, in_place: bool
) -> int:
    """Return the number of wrong elements after a call on `buffers`, compared bit for bit.

    Unless input and output share memory, this includes elements of the input that were changed.
    """
    x, out = buffers
    mine, wanted = inputs[rank], expected(case, inputs, rank)
    is_shared = in_place and x is not None and out is not None
    wrong = 0
    if out is not None:
        if wanted is None:
            wanted = mine if is_shared else np.full(len(out), UNTOUCHED, case.dtype)
        assert wanted is not None
        wrong += count_different(out, wanted)
    if x is not None and mine is not None and not is_shared:
        wrong += count_different(x, mine)
    return wrong


def count_different(found: Array, wanted: Array) -> int:
    """Return the number of elements whose bits differ."""
    size = wanted.itemsize
    rows = [np.ascontiguousarray(each).view(np.uint8).reshape(-1, size) for each in (found, wanted)]
    return int(np.count_nonzero((rows[0] != rows[1]).any(axis=1)))


__all__ = [
    "UNTOUCHED",
    "Array",
    "Buffers",
    "Case",
    "count_different",
    "count_wrong",
    "expected",
    "make_inputs",
    "place",
]
