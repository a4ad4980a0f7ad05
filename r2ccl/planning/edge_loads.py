"""Flows: the load of each edge of a schedule, computed from the algorithm's shape where possible.

An *edge* is the pair of links between two ranks on one channel. The planner compares many schedules
and runs one of them. Computing loads without ops avoids generating the ops of schedules that do not
run.

Invariant: for the same schedule, the functions ``flows_of_*`` return the same loads as `flows_of`,
as multiples of the buffer. The units and the order of the flows may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from r2ccl.algos import dissemination
from r2ccl.schedule.arrays import as_arrays
from r2ccl.schedule.ir import OpKind, Schedule


class Flow(NamedTuple):
    """Load of an edge from rank `low` to rank `high` (`up`) and back (`down`); see `Flows.unit`."""

    channel: int
    low: int
    high: int
    up: int
    down: int


class Flows(NamedTuple):
    """Loads of all edges of a schedule. A load of `unit` is the size of the whole buffer."""

    flows: tuple[Flow, ...]
    unit: int


def carried(flows: Flows) -> dict[tuple[int, int], tuple[Fraction, Fraction]]:
    """Return the data that each (rank, channel) sends and receives, as multiples of the buffer."""
    found: dict[tuple[int, int], list[int]] = {}
    for channel, low, high, up, down in flows.flows:
        for rank, sent, received in ((low, up, down), (high, down, up)):
            both = found.setdefault((rank, channel), [0, 0])
            both[0] += sent
            both[1] += received
    return {
        key: (Fraction(sent, flows.unit), Fraction(received, flows.unit))
        for key, (sent, received) in found.items()
    }


def flows_of(schedule: Schedule) -> Flows:
    """Return the flows of any schedule, added up from the generated ops of all ranks."""
    ops = as_arrays(schedule).ops
    sends = ops[ops["kind"] == OpKind.SEND]
    common = math.lcm(*schedule.nchunks)
    units = [
        weight * (common // nchunks)
        for weight, nchunks in zip(schedule.weights, schedule.nchunks, strict=True)
    ]
    carried: dict[tuple[int, int, int], list[int]] = {}
    ways, counts = np.unique(sends[["channel", "rank", "peer"]], return_counts=True)
    for (channel, rank, peer), count in zip(ways.tolist(), counts.tolist(), strict=True):
        both = carried.setdefault((channel, min(rank, peer), max(rank, peer)), [0, 0])
        both[rank > peer] += count * units[channel]
    found = (Flow(*edge, *both) for edge, both in sorted(carried.items()))
    return Flows(tuple(found), sum(schedule.weights) * common)


def flows_of_dissemination(
    nranks: int, nchannels: int, *, gathers: bool = True, scatters: bool = True
) -> Flows:
    """Return the flows of a dissemination: allgather, reduce-scatter, or both (an allreduce)."""
    carried: dict[tuple[int, int], list[int]] = {}
    for distance, nparts in dissemination.steps_of(nranks):
        for rank in range(nranks):
            ahead = (rank + distance) % nranks
            both = carried.setdefault((min(rank, ahead), max(rank, ahead)), [0, 0])
            both[rank > ahead] += nparts * scatters
            both[ahead > rank] += nparts * gathers
    return Flows(
        tuple(
            Flow(channel, *pair, *both)
            for channel in range(nchannels)
            for pair, both in sorted(carried.items())
        ),
        nranks * nchannels,
    )


def flows_of_prefix_doubling(nranks: int, nchannels: int, *, is_exclusive: bool) -> Flows:
    """Return the flows of `scan.doubling`; each message carries the whole data of its channel."""
    lowest = int(is_exclusive)
    counts: dict[tuple[int, int], int] = {}
    if is_exclusive:
        counts = {(rank, rank + 1): 1 for rank in range(nranks - 1)}
    distance = 1
    while distance < nranks - lowest:
        for rank in range(lowest, nranks - distance):
            pair = rank, rank + distance
            counts[pair] = counts.get(pair, 0) + 1
        distance *= 2
    flows = (Flow(c, *pair, count, 0) for c in range(nchannels) for pair, count in counts.items())
    return Flows(tuple(flows), nchannels)


def flows_of_trees(trees: Sequence[Sequence[int]]) -> Flows:
    """Return the flows of `tree.allreduce`: each edge carries its channel once in each direction.

    `trees` has the parent of each rank, negative for the root, for each channel.
    """
    return Flows(
        tuple(
            Flow(channel, min(rank, parent), max(rank, parent), 1, 1)
            for channel, parents in enumerate(trees)
            for rank, parent in enumerate(parents)
            if parent >= 0
        ),
        len(trees),
    )


def flows_of_rings(order: Sequence[int], nchannels: int) -> Flows:
    """Return the flows of `ring.allreduce` with all channels in `order`."""
    n = len(order)
    return flows_of_cycle(order, nchannels, Fraction(2 * (n - 1), n))


def flows_of_cycle(order: Sequence[int], nchannels: int, load: Fraction) -> Flows:
    """Return the flows of rings in `order`; each rank sends `load` times the channel's data."""
    n = len(order)
    # With two ranks, one edge carries both directions.
    edges: dict[tuple[int, int], list[int]] = {}
    for place in range(n if n > 1 else 0):
        rank, after = order[place - 1], order[place]
        both = edges.setdefault((min(rank, after), max(rank, after)), [0, 0])
        both[rank > after] += load.numerator
    flows = (Flow(c, *edge, *both) for c in range(nchannels) for edge, both in edges.items())
    return Flows(tuple(flows), nchannels * load.denominator)


def flows_of_rooted_trees(trees: Sequence[Sequence[int]], *, is_down: bool) -> Flows:
    """Return the flows of `tree.broadcast` (if `is_down`) or `tree.reduce` over `trees`."""
    flows = []
    for channel, parents in enumerate(trees):
        for rank, parent in enumerate(parents):
            if parent >= 0:
                is_up = (parent < rank) == is_down
                both = (1, 0) if is_up else (0, 1)
                flows.append(Flow(channel, min(rank, parent), max(rank, parent), *both))
    return Flows(tuple(flows), len(trees))


__all__ = [
    "Flow",
    "Flows",
    "carried",
    "flows_of",
    "flows_of_cycle",
    "flows_of_dissemination",
    "flows_of_prefix_doubling",
    "flows_of_rings",
    "flows_of_rooted_trees",
    "flows_of_trees",
]
