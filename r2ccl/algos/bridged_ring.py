"""Bridged ring: ring allreduce in a rank order in which all neighbors share a rail.

If rails are separate networks, two nodes that have lost different rails may have no rail in common.
A ring is still possible in an order in which no two such nodes are neighbors.

The order is found by repeated reversals. A gap in the ring is a pair of neighbors a, b that share
no rail. While the ring has a gap, find neighbors c, d further along the ring such that a and c
share a rail, and b and d share a rail. Then reverse the piece from b to c. Each reversal closes a
gap and opens none, so the procedure ends. Such a pair c, d always exists under Ore's condition: for
any two nodes without a common rail, the numbers of nodes with which they share a rail add up to at
least the number of all nodes.

Steps, bytes and time are those of a ring, which is as slow as its slowest node. Use a bridged ring
if all nodes have about the same bandwidth but some pairs share no rail. `bridge` can also order the
core of a `leaf_ring`.

References
----------
Palmer, "The hidden algorithm of Ore's theorem on Hamiltonian cycles", Computers & Mathematics with
Applications 34(11), 1997.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from r2ccl.algos import ring
from r2ccl.algos.packed_trees import Reach
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Schedule


def allreduce(nranks: int, nchannels: int, reach: Reach) -> Schedule:
    """Build a ring allreduce in which all neighbors share a rail.

    Parameters
    ----------
    nranks, nchannels : int
        As for `ring.allreduce`.
    reach : callable
        ``reach(a, b)`` returns True if ranks a and b can be neighbors. It must be symmetric.

    Raises
    ------
    InvalidArgument
        If `nranks` or `nchannels` is below 1, or no ring was found.
    """
    order = bridge(range(nranks), reach)
    schedule = ring.allreduce(nranks, nchannels, [order] * nchannels)
    return msgspec.structs.replace(schedule, name="bridged_ring")


def bridge(order: Sequence[int], reach: Reach) -> tuple[int, ...]:
    """Return `order` rearranged so that all neighbors in the ring reach each other.

    Parameters
    ----------
    order : sequence of int
        Nodes in ring order. The first node is also the first of the result. If all neighbors reach
        each other already, the result is `order`.
    reach : callable
        As for `allreduce`.

    Raises
    ------
    InvalidArgument
        If no such ring was found. Such a ring may still exist if Ore's condition does not hold.

    Notes
    -----
    *Cost*: for each pair of neighbors in `order` that do not reach each other, usually about 3n
    calls of `reach` for n nodes, and at most about 2n^2.
    """
    found = tuple(order)
    while gaps := _gaps(found, reach):
        mended = next(filter(None, (_mended(found, gap, reach) for gap in gaps)), None)
        if mended is None:
            a, b = found[gaps[0] - 1], found[gaps[0]]
            raise InvalidArgument(
                f"no ring of {len(found)} nodes was found in which all neighbors share a rail: "
                f"nodes {a} and {b} share none, and every reversal of a part of the ring that "
                "separates them makes another pair of neighbors that share none; use a tree of "
                "r2ccl.algos.spanning_tree.span"
            )
        found = mended
    at = found.index(order[0]) if found else 0
    return found[at:] + found[:at]


def _gaps(order: Sequence[int], reach: Reach) -> list[int]:
    """Return the positions in the ring at which a node does not reach the node before it."""
    if len(order) < 2:
        return []
    return [place for place in range(len(order)) if not reach(order[place - 1], order[place])]


def _mended(order: tuple[int, ...], gap: int, reach: Reach) -> tuple[int, ...] | None:
    """Return the ring after a reversal that closes the gap before position `gap`.

    Return None if no reversal closes it without opening another gap.
    """
    turned = order[gap:] + order[:gap]
    first, last = turned[0], turned[-1]
    for end in range(1, len(turned) - 2):
        if reach(last, turned[end]) and reach(first, turned[end + 1]):
            return turned[end::-1] + turned[end + 1 :]
    return None


__all__ = ["allreduce", "bridge"]
