"""Bridged ring: ranks in an order in which neighbours share a rail.

Where rails are planes of their own, two nodes that have lost different rails may have none in
common. They can still be in one ring if others, which reach both, are between them. Starting from
any order, as long as some neighbours a, b do not reach each other: find neighbours c, d elsewhere
in the ring such that a reaches c and b reaches d, and turn around the piece from b to c. Each time
a gap is closed and none opened, so it ends; and while any two nodes that do not reach each other
reach, together, as many nodes as there are, there is such a pair.

Steps, bytes and time are those of a ring, which is as slow as its slowest node. It wins where only
the pattern of rails is in the way of one; the order serves `nested_rings` and the core of a
`leaf_ring` as well.

Imports `ring` and `errors`. Invariant: equal arguments, equal order, on every rank.

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
    """Build the ring allreduce in which neighbours reach each other.

    Parameters
    ----------
    nranks, nchannels : int
        As for `ring.allreduce`.
    reach : callable
        ``reach(a, b)``: whether two ranks can be neighbours; the same as ``reach(b, a)``.

    Raises
    ------
    InvalidArgument
        A size below 1, or no ring was found.
    """
    order = bridge(range(nranks), reach)
    schedule = ring.allreduce(nranks, nchannels, [order] * nchannels)
    return msgspec.structs.replace(schedule, name="bridged_ring")


def bridge(order: Sequence[int], reach: Reach) -> tuple[int, ...]:
    """Rearrange a ring so that neighbours reach each other.

    Parameters
    ----------
    order : sequence of int
        Nodes in ring order, which changes no more than it must; its first stays the first.
    reach : callable
        As for `allreduce`.

    Raises
    ------
    InvalidArgument
        No such ring was found.

    Notes
    -----
    *Cost*: for each gap in `order` at most ``len(order)`` squared questions to `reach`.
    """
    found = tuple(order)
    while gaps := _gaps(found, reach):
        mended = next(filter(None, (_mended(found, gap, reach) for gap in gaps)), None)
        if mended is None:
            a, b = found[gaps[0] - 1], found[gaps[0]]
            raise InvalidArgument(
                f"no ring of {len(found)} nodes found in which all neighbours share a rail, as "
                f"{a} and {b} do not; trees need less"
            )
        found = mended
    at = found.index(order[0]) if found else 0
    return found[at:] + found[:at]


def _gaps(order: Sequence[int], reach: Reach) -> list[int]:
    """Return the places whose node does not reach the one before it."""
    if len(order) < 2:
        return []
    return [place for place in range(len(order)) if not reach(order[place - 1], order[place])]


def _mended(order: tuple[int, ...], gap: int, reach: Reach) -> tuple[int, ...] | None:
    """Close the gap before a place by turning around a piece that begins there."""
    turned = order[gap:] + order[:gap]
    first, last = turned[0], turned[-1]
    for end in range(1, len(turned) - 2):
        if reach(last, turned[end]) and reach(first, turned[end + 1]):
            return turned[end::-1] + turned[end + 1 :]
    return None


__all__ = ["allreduce", "bridge"]
