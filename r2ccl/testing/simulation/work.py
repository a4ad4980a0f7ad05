"""The data and plans of a simulated job, made once per `Workload` and shared by its many runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.algos import packed_trees, recursive_doubling, ring
from r2ccl.lowering import Layout, lower
from r2ccl.resilience.health import Health
from r2ccl.schedule.ir import Schedule
from r2ccl.spread import Placement, place, place_edges
from r2ccl.testing.simulation.plan import CallSpec, Workload
from r2ccl.types import CallSignature, Collective, ReduceOp

Array = npt.NDArray[Any]
_FLOAT32 = 7


class Work:
    """What the ranks of one `Workload` do.

    Parameters
    ----------
    workload : Workload
    expected : sequence of bytes, optional
        Result of each call, from a run without faults.
    """

    def __init__(self, workload: Workload, expected: tuple[bytes, ...] = ()) -> None:
        self.workload = workload
        self.calls = workload.calls
        self._expected = expected

    def layout(self, call: int, rank: int, homes: Sequence[int], health: Health) -> Layout:
        """Return the lowered program of `rank`, placed as the planner does it.

        The schedule itself stays whatever the health says: then its result does, bit for bit.
        """
        spec = self.calls[call]
        if spec.algorithm == "packed_trees":
            placement = place_edges(_trees(self.workload.nranks, spec.channels), homes, health)
        else:
            placement = place(spec.channels, homes, health)
        return _layout(self.workload, spec, rank, placement)

    def memory(self, call: int, rank: int) -> tuple[Array, Array]:
        """Return fresh input and output memory, the same array when in place."""
        source = _data(self.calls[call].count, call, rank).copy()
        return source, source if self.calls[call].is_in_place else np.empty_like(source)

    def signature(self, call: int) -> int:
        """Return the packed signature."""
        count = self.calls[call].count
        return CallSignature(Collective.ALLREDUCE, _FLOAT32, ReduceOp.SUM, count).pack()

    def expected(self, call: int) -> bytes | None:
        """Return the result's bytes, if they are known."""
        return self._expected[call] if self._expected else None

    def total(self, call: int) -> Array:
        """Return the sum in float64, to hold a result against."""
        spec = self.calls[call]
        ranks = range(self.workload.nranks)
        parts = [_data(spec.count, call, rank).astype(np.float64) for rank in ranks]
        return np.asarray(sum(parts))

    def busy_s(self, rank: int) -> float:
        """Return how long `rank` computes before a call."""
        busy = self.workload.busy_ms
        return busy[rank % len(busy)] / 1e3 if busy else 0.0


@functools.lru_cache(maxsize=4096)
def _layout(workload: Workload, spec: CallSpec, rank: int, placement: Placement) -> Layout:
    if spec.algorithm == "packed_trees":
        schedule = _trees(workload.nranks, spec.channels)
    else:
        make = ring.allreduce if spec.algorithm == "ring" else recursive_doubling.allreduce
        schedule = make(workload.nranks, spec.channels)
    return lower(
        schedule.program(rank),
        spec.count,
        4,
        slice_nbytes=workload.slice_nbytes,
        eager_nbytes=workload.eager_nbytes,
        weights=placement.weights,
        channels=placement.channels,
        numbers=placement.numbers(rank),
    )


@functools.lru_cache(maxsize=64)
def _trees(nranks: int, ntrees: int) -> Schedule:
    """Trees for ranks of which the later ones have more to give."""
    return packed_trees.allreduce(range(2, nranks + 2), ntrees)


@functools.lru_cache(maxsize=4096)
def _data(count: int, call: int, rank: int) -> Array:
    """Draw numbers whose float32 sum depends on the order of the additions."""
    random = np.random.default_rng((count, call, rank))
    return random.standard_normal(count).astype(np.float32) * np.float32(10.0) ** random.integers(
        -4, 4, count
    ).astype(np.float32)


__all__ = ["Work"]
