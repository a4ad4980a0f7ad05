"""Schedules that a simulated job can run: one or more variants of each algorithm in `r2ccl.algos`.

In the schedules for ranks of unequal bandwidth, rank 0 has the least bandwidth. Equal arguments
give equal schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from r2ccl.algos import (
    bridged_ring,
    direct_exchange,
    dissemination,
    hierarchy,
    leaf_ring,
    nested_rings,
    one_shot,
    optcc,
    packed_trees,
    r2cc_allreduce,
    recursive_doubling,
    ring,
    scan,
    spanning_tree,
    tree,
    tree_gather,
)
from r2ccl.algos.packed_trees import Reach
from r2ccl.schedule.ir import Schedule

#: Function ``make(nranks, nchannels)`` that returns a schedule for at least two ranks. Some
#: functions use more or fewer channels than `nchannels`.
Maker = Callable[[int, int], Schedule]


def _uneven(nranks: int) -> range:
    """Return relative bandwidths of the ranks, which increase with the rank."""
    return range(2, nranks + 2)


def _mild(nranks: int) -> list[int]:
    """Return relative bandwidths: 15 for rank 0, which can still relay data, 16 for the others."""
    return [15] + [16] * (nranks - 1)


def _severe(nranks: int) -> list[int]:
    """Return relative bandwidths: 1 for rank 0, 2 for the others."""
    return [1] + [2] * (nranks - 1)


def _turning_rings(nranks: int, nchannels: int) -> Schedule:
    """Return an allreduce in rings that run in alternating directions."""
    orders = [tuple(range(nranks))[:: 1 - 2 * (at % 2)] for at in range(nchannels)]
    return ring.allreduce(nranks, nchannels, orders)


def _double_binary(nranks: int, nchannels: int) -> Schedule:
    return tree.allreduce(tree.double_binary(nranks) * max(1, nchannels // 2))


def _chains(nranks: int, nchannels: int) -> list[tree.Parents]:
    """Return one chain per channel, from the last rank to the first."""
    return [tree.chain(range(nranks)[::-1])] * nchannels


def _flat(nranks: int, nchannels: int) -> list[tree.Parents]:
    """Return one binary tree per channel, with the last rank as its root."""
    return [tree.turned(tree.double_binary(nranks)[0], nranks - 1)] * nchannels


def _reach(nranks: int) -> Reach:
    """Return a function ``reach(a, b)`` that is True if ranks `a` and `b` reach each other.

    All pairs of ranks reach each other, except ranks 0 and 1 if there are four ranks or more.
    """
    return lambda a, b: nranks < 4 or {a, b} != {0, 1}


def _bridged(nranks: int, nchannels: int) -> Schedule:
    return bridged_ring.allreduce(nranks, nchannels, _reach(nranks))


def _spanning(nranks: int) -> tree.Parents:
    return spanning_tree.span(nranks, _reach(nranks))


def _teams(nranks: int) -> list[range]:
    """Return the ranks of each node: two, but one in the last node if `nranks` is odd."""
    return [range(first, min(first + 2, nranks)) for first in range(0, nranks, 2)]


def _ring_of_nodes(nranks: int, nchannels: int) -> Schedule:
    teams = _teams(nranks)
    return hierarchy.wrap(ring.allreduce(len(teams), nchannels), teams)


def _trees_of_nodes(nranks: int, nchannels: int) -> Schedule:
    teams = _teams(nranks)
    return hierarchy.wrap(packed_trees.allreduce(_uneven(len(teams)), nchannels), teams)


#: Schedules in which `r2ccl.planning.placement.place` chooses the rail of each channel and the
#: channel's share of the buffer.
RINGS: dict[str, Maker] = {
    "ring": ring.allreduce,
    "ring/allgather": ring.allgather,
    "ring/reduce_scatter": ring.reduce_scatter,
    "recursive_doubling": recursive_doubling.allreduce,
    "dissemination": dissemination.allreduce,
    "dissemination/allgather": dissemination.allgather,
    "dissemination/reduce_scatter": dissemination.reduce_scatter,
    "one_shot": one_shot.allreduce,
    "tree/broadcast": lambda n, c: tree.broadcast(_flat(n, c)),
    "tree/reduce": lambda n, c: tree.reduce(_flat(n, c)),
    "chain/allreduce": lambda n, c: tree.allreduce(_chains(n, c)),
    "chain/broadcast": lambda n, c: tree.broadcast(_chains(n, c)),
    "chain/reduce": lambda n, c: tree.reduce(_chains(n, c)),
    "line/reduce": lambda n, c: tree.reduce([tree.line(n, n // 2)] * c, "line"),
    "binomial/gather": lambda n, c: tree_gather.gather(tree_gather.binomial(n, n - 1), c),
    "binomial/scatter": lambda n, c: tree_gather.scatter(tree_gather.binomial(n, n - 1), c),
    "doubling/scan": scan.doubling,
    "doubling/exscan": lambda n, c: scan.doubling(n, c, is_exclusive=True),
    "chain/scan": scan.chain,
    "chain/exscan": lambda n, c: scan.chain(n, c, is_exclusive=True),
    "bridged_ring": _bridged,
    "spanning_tree/allgather": lambda n, c: spanning_tree.allgather(_spanning(n), c),
    "spanning_tree/reduce_scatter": lambda n, c: spanning_tree.reduce_scatter(_spanning(n), c),
    "hierarchy/ring": _ring_of_nodes,
}

#: Schedules whose rails `r2ccl.planning.placement.place_edges` chooses. The channels of most of
#: them differ in their ops or their shares of the buffer.
UNEVEN: dict[str, Maker] = {
    "ring/turning": _turning_rings,
    "direct/alltoall": direct_exchange.alltoall,
    "direct/gather": lambda n, c: direct_exchange.gather(n, n - 1, c),
    "direct/scatter": lambda n, c: direct_exchange.scatter(n, n - 1, c),
    "double_binary_tree": _double_binary,
    "packed_trees": lambda n, c: packed_trees.allreduce(_uneven(n), c),
    "leaf_ring": lambda n, c: leaf_ring.allreduce(_severe(n), 2, c),
    "leaf_ring/relaying": lambda n, c: leaf_ring.allreduce(_mild(n), 2, c),
    "r2cc": lambda n, c: r2cc_allreduce.allreduce(_mild(n), 2, Fraction(1, 3), (c, 1)),
    "optcc": lambda n, c: optcc.allreduce(_severe(n), 3, c),
    "nested_rings": lambda n, c: nested_rings.allreduce(_uneven(n), 2, c),
    "hierarchy/packed_trees": _trees_of_nodes,
}

#: All schedules, by their names in `CallSpec.algorithm`.
SCHEDULES: dict[str, Maker] = RINGS | UNEVEN

__all__ = ["RINGS", "SCHEDULES", "UNEVEN", "Maker"]
