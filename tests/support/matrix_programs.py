"""Cells of the matrix of collectives, and the program that runs them.

A cell is one call with the contents, computed with NumPy, that each of its arrays must have
afterwards. Data are small integers, whose results are exact in every element type and order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from support import values

import r2ccl
from r2ccl import Communicator

Array = np.ndarray[Any, Any]
Start = Callable[..., Any]
Arrays = list[tuple[Array, Array]]

#: Elements of a part, and whether the arrays begin one element after an aligned address: none, one,
#: an odd number, unaligned, and several slices.
SIZES = ((0, False), (1, False), (7, False), (301, True), (5003, False))
#: Settings with which the smaller sizes are one eager slice, the largest several slices.
SETTINGS = {"eager_nbytes": 1 << 10, "slice_nbytes": 1 << 12}


class Reduction(NamedTuple):
    """An operation of this rank, and the function that does the same to the inputs of all."""

    name: str
    op: Any
    of: Callable[[list[Array]], Array]


class Case(NamedTuple):
    """Arguments of a cell: `count` elements in each part."""

    comm: Communicator
    dtype: str
    reduction: Reduction | None
    count: int
    is_in_place: bool = False
    is_shifted: bool = False
    root: int = 0

    def data(self, rank: int, count: int) -> Array:
        is_sum = self.reduction is not None and self.reduction.name in ("SUM", "AVG")
        return _data(rank, count, self.dtype, is_sum and self.dtype.startswith("float8"))

    def inputs(self, count: int) -> list[Array]:
        return [self.data(rank, count) for rank in range(self.comm.nranks)]

    def reduced(self, inputs: list[Array]) -> Array:
        assert self.reduction is not None
        return self.reduction.of(inputs)

    def options(self, method: Any) -> dict[str, Any]:
        """Return the operation and the root as arguments of a collective."""
        named = {} if self.reduction is None else {"op": self.reduction.op}
        return named | ({"root": self.root} if method.__name__ in ROOTED else {})

    def put(self, values: Array) -> Array:
        """Return a copy of `values` in memory of its own."""
        room = np.zeros(values.size + 1, values.dtype)
        x = room[1:] if self.is_shifted else room[:-1]
        x[:] = values
        return x

    def blank(self, count: int) -> Array:
        """Return an output that differs from memory that nothing was written to."""
        return self.put(np.ones(count, values.dtype_of(self.dtype)))

    @property
    def sizes(self) -> list[int]:
        """Sizes of the parts of a collective whose parts differ."""
        sizes = (self.count, 0, self.count // 2 + 1)
        return [sizes[rank % 3] for rank in range(self.comm.nranks)]


class Cell(NamedTuple):
    """A call, which `start` begins, and the arrays with the contents that they must have then."""

    start: Start
    arrays: Arrays

    @property
    def is_right(self) -> bool:
        return all(values.same(found, wanted) for found, wanted in self.arrays)


@functools.lru_cache(maxsize=64)
def _data(rank: int, count: int, dtype: str, is_small: bool) -> Array:
    """Return the input of a rank, if `is_small` of 0 and 1: sums of 8-bit floats are then exact."""
    x = values.data_of(rank, count, dtype)
    return (x.astype(np.float32) - 1).astype(x.dtype) if is_small else x


# Collectives whose output has as many elements as the input


def _alike(case: Case, method: Start, x: Array, wanted: Array | None, **named: Any) -> Cell:
    """Return a call with `wanted` as its output; None: the output is left as it is."""
    x = case.put(x)
    named |= case.options(method)
    if case.is_in_place:
        # Without out, all but alltoall are in place.
        args = (x, x) if method.__name__.startswith("alltoall") else (x,)
        return Cell(
            functools.partial(method, *args, **named), [(x, x.copy() if wanted is None else wanted)]
        )
    out = case.blank(x.size)
    arrays = [(out, out.copy() if wanted is None else wanted), (x, x.copy())]
    return Cell(functools.partial(method, x, out, **named), arrays)


def _allreduce(case: Case) -> Cell:
    inputs = case.inputs(case.count)
    return _alike(case, case.comm.allreduce, inputs[case.comm.rank], case.reduced(inputs))


def _broadcast(case: Case) -> Cell:
    inputs = case.inputs(case.count)
    return _alike(case, case.comm.broadcast, inputs[case.comm.rank], inputs[case.root])


def _reduce(case: Case) -> Cell:
    inputs = case.inputs(case.count)
    wanted = case.reduced(inputs) if case.comm.rank == case.root else None
    return _alike(case, case.comm.reduce, inputs[case.comm.rank], wanted)


def _scan(case: Case) -> Cell:
    inputs, rank = case.inputs(case.count), case.comm.rank
    return _alike(case, case.comm.scan, inputs[rank], case.reduced(inputs[: rank + 1]))


def _exscan(case: Case) -> Cell:
    inputs, rank = case.inputs(case.count), case.comm.rank
    wanted = case.reduced(inputs[:rank]) if rank else None
    return _alike(case, case.comm.exscan, inputs[rank], wanted)


def _alltoall(case: Case) -> Cell:
    n, rank = case.comm.nranks, case.comm.rank
    inputs = case.inputs(n * case.count)
    parts = [each[rank * case.count : (rank + 1) * case.count] for each in inputs]
    return _alike(case, case.comm.alltoall, inputs[rank], np.concatenate(parts))


def _alltoallv(case: Case) -> Cell:
    n, rank = case.comm.nranks, case.comm.rank
    kinds = (case.count, 0, 1, case.count // 2 + 1)
    counts = [kinds[(rank + peer) % 4] for peer in range(n)]  # each pair exchanges equal parts
    x, wanted = (
        np.concatenate(
            [
                case.data(n * source + to, count)
                for count, source, to in zip(counts, *ends, strict=True)
            ]
        )
        for ends in (([rank] * n, range(n)), (range(n), [rank] * n))
    )
    return _alike(case, case.comm.alltoallv, x, wanted, sendcounts=counts, recvcounts=counts)


# Collectives of which the input or the output is one part


def _own(sizes: Sequence[int], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def _gathering(case: Case, method: Start, sizes: Sequence[int], **named: Any) -> Cell:
    rank = case.comm.rank
    named |= case.options(method)
    parts = [case.data(peer, size) for peer, size in enumerate(sizes)]
    whole = np.concatenate(parts)
    if "root" in named and rank != case.root:
        x = case.put(parts[rank])
        return Cell(functools.partial(method, x, **named), [(x, parts[rank])])
    out = case.blank(whole.size)
    x = out[_own(sizes, rank)] if case.is_in_place else case.blank(sizes[rank])
    x[:] = parts[rank]
    return Cell(functools.partial(method, x, out, **named), [(out, whole), (x, parts[rank])])


def _scattering(case: Case, method: Start, sizes: Sequence[int], **named: Any) -> Cell:
    """Return a scatter, or if the case has an operation, a reduction that is scattered."""
    rank = case.comm.rank
    named |= case.options(method)
    inputs = case.inputs(sum(sizes))
    whole = case.reduced(inputs) if case.reduction else inputs[case.root]
    own = _own(sizes, rank)
    if case.reduction is None and rank != case.root:
        out = case.blank(sizes[rank])
        return Cell(functools.partial(method, None, out, **named), [(out, whole[own])])
    x = case.put(inputs[rank])
    out = x[own] if case.is_in_place else case.blank(sizes[rank])
    arrays = [(out, whole[own])]
    if case.reduction is None or not case.is_in_place:
        arrays.append((x, x.copy()))
    return Cell(functools.partial(method, x, out, **named), arrays)


def _equal(case: Case) -> list[int]:
    return [case.count] * case.comm.nranks


def _counts_at_root(case: Case) -> dict[str, Any]:
    return {"counts": case.sizes} if case.comm.rank == case.root else {}


COLLECTIVES: dict[str, Callable[[Case], Cell]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "scan": _scan,
    "exscan": _exscan,
    "reduce_scatter": lambda case: _scattering(case, case.comm.reduce_scatter, _equal(case)),
    "reduce_scatterv": lambda case: _scattering(
        case, case.comm.reduce_scatterv, case.sizes, counts=case.sizes
    ),
    "broadcast": _broadcast,
    "allgather": lambda case: _gathering(case, case.comm.allgather, _equal(case)),
    "allgatherv": lambda case: _gathering(
        case, case.comm.allgatherv, case.sizes, counts=case.sizes
    ),
    "gather": lambda case: _gathering(case, case.comm.gather, _equal(case)),
    "gatherv": lambda case: _gathering(
        case, case.comm.gatherv, case.sizes, **_counts_at_root(case)
    ),
    "scatter": lambda case: _scattering(case, case.comm.scatter, _equal(case)),
    "scatterv": lambda case: _scattering(
        case, case.comm.scatterv, case.sizes, **_counts_at_root(case)
    ),
    "alltoall": _alltoall,
    "alltoallv": _alltoallv,
}
REDUCING = ("allreduce", "reduce", "scan", "exscan", "reduce_scatter", "reduce_scatterv")
ROOTED = ("reduce", "broadcast", "gather", "gatherv", "scatter", "scatterv")

#: Types with which the operations that are no `ReduceOp` are tried.
_WITH_OTHER_OPERATIONS = ("int32", "float64", "float16", "bfloat16")


def _scaled(inputs: list[Array]) -> Array:
    scaled = [x.astype(np.float64) * (rank + 1) for rank, x in enumerate(inputs)]
    return np.asarray(sum(scaled)).astype(inputs[0].dtype)


def reductions(collective: str, dtype: str, rank: int) -> list[Reduction]:
    """Return the operations of a collective on a type; `rank` is the one that passes them."""
    found = [
        Reduction(op.name, op, functools.partial(values.reduced, op=op))
        for op in values.ops_of(dtype)
        if op is not r2ccl.AVG or not collective.endswith("scan")
    ]
    if dtype in _WITH_OTHER_OPERATIONS:
        last = r2ccl.user_op(lambda a, b: np.array(b), name="last", is_commutative=False)
        found.append(Reduction("user_op", last, lambda inputs: inputs[-1]))
        found.append(Reduction("premul_sum", r2ccl.premul_sum(rank + 1), _scaled))
    if dtype in ("float16", "bfloat16"):
        wide = r2ccl.accumulate_float32(r2ccl.SUM)
        total = functools.partial(values.reduced, op=r2ccl.SUM)
        found.append(Reduction("accumulate_float32", wide, total))
    return found


def rows(rank: int) -> Iterator[tuple[str, str, Reduction | None]]:
    """Yield every collective with every type and operation."""
    for collective, dtype in itertools.product(COLLECTIVES, values.DTYPES):
        found = reductions(collective, dtype, rank) if collective in REDUCING else [None]
        yield from ((collective, dtype, each) for each in found)


def _blocking(comm: Communicator, cells: list[Cell]) -> None:
    for each in cells:
        each.start()


def _asynchronous(comm: Communicator, cells: list[Cell]) -> None:
    for work in [each.start(async_op=True) for each in cells]:
        work.wait()


def _grouped(comm: Communicator, cells: list[Cell]) -> None:
    with comm.group():
        for each in cells:
            each.start()


MODES = {"blocking": _blocking, "asynchronous": _asynchronous, "grouped": _grouped}


def matrix(every: int) -> tuple[int, list[str]]:
    """Run one of `every` rows of the matrix; return the number of cells, and the wrong ones."""
    ncells, wrong = 0, []
    with r2ccl.init(**SETTINGS) as comm:
        for number, (collective, dtype, reduction) in enumerate(rows(comm.rank)):
            if number % every:
                continue
            for at, (mode, run) in enumerate(MODES.items()):
                places = list(itertools.product(SIZES, (False, True)))
                cells = [
                    COLLECTIVES[collective](
                        Case(
                            comm, dtype, reduction, *(count, is_in_place, is_shifted),
                            root=(number + at) % comm.nranks,
                        )
                    )
                    for (count, is_shifted), is_in_place in places
                ]  # fmt: skip
                run(comm, cells)
                ncells += len(cells)
                name = f"{mode} {collective} {dtype} {reduction.name if reduction else ''}"
                wrong += [
                    f"{name} of {place}"
                    for cell, place in zip(cells, places, strict=True)
                    if not cell.is_right
                ]
    return ncells, wrong
