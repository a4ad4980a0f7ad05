"""The published CloudLab run: 3 nodes, 2 ranks and 3 NICs each, one NIC lost.

As published, the ring is flat, over all 6 ranks, though only every other hop leaves a node; that is
T0 here. R2CC-AllReduce's partial ring leaves out both ranks of the node that lost the NIC. If it
left out one of them, that node would carry the partial ring too: the last rows show what this
costs, which neither the published model nor the published figures have in them. The library's own
schedules run among nodes (`r2ccl.algos.hierarchy`), so they can be below T0.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import msgspec
from tables_rows import NBYTES, TOLERANCE, Row

from r2ccl.algos import hierarchy, leaf_ring, packed_trees, r2cc, ring
from r2ccl.algos.blend import Part, blend
from r2ccl.schedule import Schedule
from r2ccl.schedule.cost import measure
from r2ccl.sim import Network, simulate

_NICS = 3
_BANDWIDTHS = (_NICS, _NICS, _NICS - 1)
_MEMBERS = ((0, 1), (2, 3), (4, 5))
_NRANKS = 6
_LOST = Fraction(1, _NICS)
_SLICES = 64

#: T/T0 at 4 GiB by number of chunks K, and of Balance.
_PUBLISHED = {1: "1.599", 2: "1.458", 4: "1.376", 8: "1.341", 16: "1.329"}
_PUBLISHED_BALANCE = "1.498"


def cloudlab_rows(quick: bool) -> Iterator[Row]:
    """Simulate what was published, and what this library does instead."""
    flat = ring.allreduce(_NRANKS, _NICS)
    fault_free_s = _time_s(flat, lost=0)
    yield _row("ring, Balance", flat, fault_free_s, 1 / (1 - _LOST), paper=_PUBLISHED_BALANCE)
    chunks = (1, 16) if quick else tuple(_PUBLISHED)
    for k in chunks:
        name, paper = "R2CC-AllReduce, published", _PUBLISHED[k]
        yield _row(name, published(k), fault_free_s, model_of(k), k=k, paper=paper)
    yield from _ours(fault_free_s)
    for k in chunks:
        one_out = r2cc.allreduce([_NICS] * 5 + [_NICS - 1], k, _LOST, _nchannels())
        yield _row("R2CC, one rank left out", one_out, fault_free_s, None, k=k)


def model_of(nchunks: int) -> Fraction:
    """Return the published T/T0: the flat ring's T1 and the tail's T3, P = 6, Y = X."""
    of_tail = _LOST / (1 - _LOST) * (1 + Fraction(1, nchunks))
    return 1 + _NRANKS * of_tail / (2 * (_NRANKS - 1))


def published(nchunks: int) -> Schedule:
    """Build R2CC-AllReduce as published, but with the straggler's data in the sum.

    Parameters
    ----------
    nchunks : int
        K.
    """
    healthy = (_NICS,) * 4
    inner = r2cc.allreduce((*healthy, _NICS - 1), nchunks, Fraction(1))
    partial = hierarchy.wrap(inner, [(0,), (1,), (2,), (3,), _MEMBERS[2]])
    parts = [leaf_ring.part(_NRANKS, range(_NRANKS)), _part(partial)]
    schedule = blend("r2cc_published", parts, [1 - _LOST, _LOST], _nchannels())
    return msgspec.structs.replace(schedule, cost=measure(schedule))


def _part(schedule: Schedule) -> Part:
    """Make a schedule of one channel part of a blend."""
    [nchunks] = schedule.nchunks
    return Part(
        nchunks=nchunks,
        steps=schedule.cost.steps,
        # Of the busiest rank, which a part does not tell; `published` measures the blend anew.
        sent=(schedule.cost.sent,) * schedule.nranks,
        received=(schedule.cost.received,) * schedule.nranks,
        nops=schedule.cost.ops,
        ops_of=lambda rank: schedule.program(rank).channels[0],
    )


def _nchannels() -> tuple[int, int]:
    """Give the ring of all 1 - X of every port, and the partial ring X."""
    return (1 - _LOST).numerator, _LOST.numerator


def _ours(fault_free_s: float) -> Iterator[Row]:
    leaves = hierarchy.wrap(leaf_ring.allreduce(_BANDWIDTHS, 64), _MEMBERS)
    yield _row("leaf ring among nodes", leaves, fault_free_s, _bound(), k=64)
    trees = hierarchy.wrap(packed_trees.allreduce(_BANDWIDTHS, 28), _MEMBERS)
    yield _row("packed trees among nodes", trees, fault_free_s, _bound(), trees=28)


def _row(
    name: str,
    schedule: Schedule,
    fault_free_s: float,
    model: Fraction | None,
    *,
    k: int | None = None,
    trees: int | None = None,
    paper: str = "",
) -> Row:
    simulated = _time_s(schedule, lost=1) / fault_free_s
    return Row(
        table="cloudlab",
        case=f"{_LOST} of one node",
        schedule=name,
        n=len(_BANDWIDTHS),
        k=k,
        trees=trees,
        slices=_SLICES,
        bound=float(_bound()),
        paper=paper,
        source="CloudLab" if paper else "",
        model=None if model is None else float(model),
        simulated=simulated,
        over_bound=simulated / float(_bound()),
    )


def _bound() -> Fraction:
    """Return T*/T0: the bound is on what leaves nodes, T0 the flat ring's."""
    flat = Fraction(2 * (_NRANKS - 1), _NRANKS * _NICS)
    return packed_trees.lower_bound(_BANDWIDTHS) / flat


def _time_s(schedule: Schedule, *, lost: int) -> float:
    network = Network.uniform(len(_BANDWIDTHS), _NICS, 1.0, ranks_per_node=2)
    return simulate(
        schedule,
        NBYTES,
        network.without(2, *range(lost)),
        nslices=_SLICES,
        node_ports=True,
        tolerance=TOLERANCE,
    ).time_s


__all__ = ["cloudlab_rows", "model_of", "published"]
