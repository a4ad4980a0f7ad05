"""Make the calls of a `LocalGroup` that a case of `collectives` measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from collectives import Buffers, Case

import r2ccl
from r2ccl.bootstrap.auth import SECRET_NBYTES, Secret
from r2ccl.dtypes import CODES
from r2ccl.shm.group import LocalGroup

_NOTHING = np.empty(0, np.float32)
#: Collectives of a `LocalGroup` that have a form in `collectives`.
COLLECTIVES = (
    "barrier",
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "allgatherv",
    "gatherv",
    "scatterv",
    "alltoallv",
)


@contextmanager
def open_group(comm: r2ccl.Communicator) -> Iterator[LocalGroup]:
    """Share memory between all ranks of a communicator."""

    def exchange(mine: bytes) -> list[bytes]:
        return [row.tobytes() for row in comm.allgather(np.frombuffer(mine, np.uint8))]

    key = comm.broadcast(np.frombuffer(np.random.bytes(SECRET_NBYTES), np.uint8).copy()).tobytes()
    group = LocalGroup.connect(
        range(comm.nranks), comm.rank, exchange, Secret(key), timeout_s=comm.config.timeout_s
    )
    try:
        yield group
    finally:
        group.close()


def call_of(group: LocalGroup, rank: int, case: Case, buffers: Buffers) -> Callable[[], Any]:
    """Return the function that makes one call."""
    name = case.form.name
    if name == "barrier":
        return group.barrier
    x, out = (_NOTHING if each is None else each.reshape(-1) for each in buffers)
    given: list[Any] = [x, out, CODES[np.dtype(case.dtype)]]
    if case.form.reduces:
        given.append(int(r2ccl.ReduceOp.SUM))
    if name == "alltoallv":
        ranges = _ranges(case.exchanged(rank))
        given += [ranges, ranges]
    elif case.form.is_unequal:
        given.append(_ranges(case.parts))
    if case.form.is_rooted:
        given.append(case.root)
    return partial(getattr(group, name), *given)


def _ranges(counts: Any) -> list[tuple[int, int]]:
    starts = accumulate(counts, initial=0)
    return [(start, count) for start, count in zip(starts, counts, strict=False)]


__all__ = ["COLLECTIVES", "call_of", "open_group"]
