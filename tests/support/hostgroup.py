"""Reference collectives among threads, for tests of code built on top of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.types import CallSignature, Collective, ReduceOp

Array = npt.NDArray[Any]
_TIMEOUT_S = 20.0


class HostGroup:
    """Ranks as threads: each calls `run` with its own arrays."""

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self.calls: list[CallSignature] = []
        self._sources: list[Any] = [None] * nranks
        self._meeting = threading.Barrier(nranks)

    def run(self, rank: int, call: CallSignature, source: Array, output: Array) -> None:
        """Run a collective."""
        self._sources[rank] = (call, source.copy())
        self._meeting.wait(_TIMEOUT_S)
        calls = {each for each, _ in self._sources}
        assert len(calls) == 1, calls
        if rank == 0:
            self.calls.append(call)
        meant = expected(call, [each for _, each in self._sources], rank)
        self._meeting.wait(_TIMEOUT_S)
        if meant is not None:
            output[meant[0]] = meant[1]

    def abort(self) -> None:
        """Fail all current and future waits."""
        self._meeting.abort()


def expected(call: CallSignature, sources: list[Array], rank: int) -> tuple[slice, Array] | None:
    """Return the part of a rank's output that a collective defines, and its contents."""
    count, nranks = call.count, len(sources)
    kind, width = call.collective, count // nranks
    if kind == Collective.ALLGATHER:
        # In the host's form, each rank's part is already in its place.
        parts = [each[at * width : (at + 1) * width] for at, each in enumerate(sources)]
        return slice(0, count), np.concatenate(parts)
    if kind == Collective.BROADCAST:
        return slice(0, count), sources[call.root]
    if kind == Collective.REDUCE and rank != call.root:
        return None
    reduced = combine(sources, ReduceOp(call.op))
    if kind == Collective.REDUCE_SCATTER:
        own = slice(rank * width, (rank + 1) * width)
        return own, reduced[own]
    return slice(0, count), reduced


def combine(sources: list[Array], op: ReduceOp) -> Array:
    """Reduce integers, or floats with integer values."""
    function: dict[ReduceOp, Callable[..., Array]] = {
        ReduceOp.SUM: np.add,
        ReduceOp.AVG: np.add,
        ReduceOp.PROD: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }
    total = sources[0].copy()
    for each in sources[1:]:
        total = function[op](total, each)
    if op is ReduceOp.AVG:
        total = (total / len(sources)).astype(total.dtype)
    return total
