"""Tree packing by ports: spanning trees for few nodes, some of which share only few rails.

`r2ccl.algos.packed_trees` considers the total bandwidth of a node, as if every two nodes shared all
rails. Here every edge uses a rail that both of its ends have. A port is the NIC of a node on one
rail. Trees are built one after the other as minimum spanning trees (Prim's algorithm), in which an
edge costs the sum of the prices of its two ports. Whenever a port gets an edge, its price grows by
a fraction that is larger for slower ports. Later trees therefore avoid busy ports. The slower the
prices grow and the more trees there are, the closer the result is to the optimal packing. `pack`
tries several growth rates and all numbers of trees up to a maximum.

All computations use integers and fractions; equal arguments give equal trees on every rank.

References
----------
Garg and Könemann, "Faster and simpler algorithms for multicommodity flow and other fractional
packing problems", SIAM Journal on Computing 37(2), 2007.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.errors import InvalidArgument


class PortEdge(NamedTuple):
    """Edge of a tree: two nodes, the lower one first, and the rail between them."""

    low: int
    high: int
    rail: int


class PortTree(NamedTuple):
    """Spanning tree: the parent of each node (-1 for the root), and the edges."""

    parents: tuple[int, ...]
    edges: tuple[PortEdge, ...]


def pack(shares: Sequence[Sequence[int]], most: int) -> list[PortTree]:
    """Return spanning trees whose edges load the ports about in proportion to their bandwidths.

    Parameters
    ----------
    shares : sequence of sequence of int
        Bandwidth of each port, ``shares[node][rail]``, in any unit, below 2**32; 0 means down.
    most : int
        Maximum number of trees, above 0.

    Returns
    -------
    list of PortTree
        Trees that each carry an equal part of the data. The time of a packing is that of its
        busiest port: the port's number of edges divided by its bandwidth and by the number of
        trees. The result has the fewest trees among the packings found whose time is within 1 % of
        the best.

    Raises
    ------
    InvalidArgument
        If the rails do not connect all nodes; if `shares` is empty, its rows are empty or differ in
        length, or a share is not an integer or out of range; or if `most` is below 1.
    """
    if most < 1:
        raise InvalidArgument(f"most={most}: give 1 tree or more")
    is_table = len({len(row) for row in shares}) == 1 and len(shares[0]) > 0
    every = [share for row in shares for share in row]
    if not is_table or not all(0 <= each < _PRICE and each == int(each) for each in every):
        raise InvalidArgument(
            f"shares={shares}: give one row per node, all of the same length, at least 1, with "
            f"integer shares of 0 to {_PRICE - 1}"
        )
    found = [(time, edges) for damping in _DAMPINGS for time, edges in _grow(shares, most, damping)]
    least = min(time for time, _ in found) * _AS_GOOD
    _, edges = min((each for each in found if each[0] <= least), key=lambda each: len(each[1]))
    return [PortTree(_rooted(len(shares), tree), tree) for tree in edges]


def _grow(
    shares: Sequence[Sequence[int]], most: int, damping: int
) -> Iterator[tuple[Fraction, list[tuple[PortEdge, ...]]]]:
    """Build `most` trees; after each one, yield the time of the busiest port and the trees so far.

    `damping` is one of `_DAMPINGS`.
    """
    whole = max(map(max, shares))
    prices = [[_PRICE // share if share else 0 for share in row] for row in shares]
    nedges = [[0] * len(row) for row in shares]
    busiest = Fraction(0)
    trees: list[tuple[PortEdge, ...]] = []
    for _ in range(most):
        trees.append(_cheapest(prices))
        for edge in trees[-1]:
            for node in edge[:2]:
                share = shares[node][edge.rail]
                nedges[node][edge.rail] += 1
                prices[node][edge.rail] += prices[node][edge.rail] * whole // (damping * share)
                busiest = max(busiest, Fraction(nedges[node][edge.rail], share))
        yield busiest / len(trees), trees.copy()


def _cheapest(prices: Sequence[Sequence[int]]) -> tuple[PortEdge, ...]:
    """Return the edges of the cheapest spanning tree; a port with price 0 is down."""
    nearest: dict[int, tuple[int, int, int]] = {}
    edges: list[PortEdge] = []
    outside = set(range(1, len(prices)))
    newest = 0
    while outside:
        for node in outside:
            costs = [
                (one + other, newest, rail)
                for rail, (one, other) in enumerate(zip(prices[newest], prices[node], strict=True))
                if one and other
            ]
            if costs:
                nearest[node] = min(*costs, nearest.get(node, costs[0]))
        if not nearest:
            raise InvalidArgument(
                f"rails do not connect node {min(outside)} to node 0, directly or through other "
                "nodes: repair a rail that connects them"
            )
        (_, parent, rail), newest = min((way, node) for node, way in nearest.items())
        del nearest[newest]
        outside.remove(newest)
        edges.append(PortEdge(min(parent, newest), max(parent, newest), rail))
    return tuple(edges)


def _rooted(nnodes: int, edges: Sequence[PortEdge]) -> tuple[int, ...]:
    """Return the parent of each node, with the root in the middle of the longest path."""
    neighbours: list[list[int]] = [[] for _ in range(nnodes)]
    for low, high, _ in edges:
        neighbours[low].append(high)
        neighbours[high].append(low)
    end = _walk(0, neighbours)[0][-1]
    order, parents = _walk(end, neighbours)
    path = [order[-1]]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return tuple(_walk(path[len(path) // 2], neighbours)[1])


def _walk(root: int, neighbours: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the nodes of a tree in breadth-first order, and the parent of each node."""
    parents = [-1] * len(neighbours)
    order = [root]
    for node in order:
        for other in neighbours[node]:
            if other != parents[node]:
                parents[other] = node
                order.append(other)
    return order, parents


#: Values of `damping` that `pack` tries: with each edge, the price of a port grows by the fraction
#: ``whole / (damping * share)`` of itself, where `whole` is the largest share.
_DAMPINGS = (2, 4, 8, 16)
#: Initial price of a port with share 1; the initial price of any other port is this number divided
#: by the port's share.
_PRICE = 1 << 32
#: A packing of fewer trees is preferred if its time is at most this multiple of the best time.
_AS_GOOD = Fraction(101, 100)

__all__ = ["PortEdge", "PortTree", "pack"]
