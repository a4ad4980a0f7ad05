"""Trees packed by ports: for few nodes of which some have little in common.

`r2ccl.algos.packed_trees` looks at what a node carries on all rails together, as if any two nodes
shared them all. Here every edge is on a rail that its ends have in common. Trees are grown one
after another (Prim), each where it is cheapest: with every edge a port gets, its price grows by a
part of itself, the larger the less the port carries, so that the prices of busy ports drive the
next trees elsewhere. The slower prices grow and the more trees there are, the closer that comes to
the best packing; of a few growths and all numbers of trees the best is taken.

Pure arithmetic on integers. Invariant: equal arguments, equal trees, on every rank.

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
    """Two nodes, the lower one first, and the rail between them."""

    low: int
    high: int
    rail: int


class PortTree(NamedTuple):
    """A spanning tree: of every node its parent, -1 for the root, and the edges."""

    parents: tuple[int, ...]
    edges: tuple[PortEdge, ...]


def pack(shares: Sequence[Sequence[int]], most: int) -> list[PortTree]:
    """Pack trees by what ports carry.

    Parameters
    ----------
    shares : sequence of sequence of int
        What each node's port on each rail carries, in any unit, below 2**32; 0: nothing.
    most : int
        Trees at most, above 0.

    Returns
    -------
    list of PortTree
        The fewest that take up to 1 % more than the best number of them.

    Raises
    ------
    InvalidArgument
        Rails do not join all nodes, or there may be no tree.
    """
    if most < 1:
        raise InvalidArgument(f"most={most}: give room for one tree or more")
    found = [(time, edges) for damping in _DAMPINGS for time, edges in _grow(shares, most, damping)]
    least = min(time for time, _ in found) * _AS_GOOD
    _, edges = min((each for each in found if each[0] <= least), key=lambda each: len(each[1]))
    return [PortTree(_rooted(len(shares), tree), tree) for tree in edges]


def _grow(
    shares: Sequence[Sequence[int]], most: int, damping: int
) -> Iterator[tuple[Fraction, list[tuple[PortEdge, ...]]]]:
    """Yield what the busiest port takes, as a part of the data, after each tree; and the trees."""
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
    """Return the edges of the spanning tree whose ports cost least; a port of price 0 is down."""
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
            raise InvalidArgument(f"rails do not join node {min(outside)} to node 0")
        (_, parent, rail), newest = min((way, node) for node, way in nearest.items())
        del nearest[newest]
        outside.remove(newest)
        edges.append(PortEdge(min(parent, newest), max(parent, newest), rail))
    return tuple(edges)


def _rooted(nnodes: int, edges: Sequence[PortEdge]) -> tuple[int, ...]:
    """Return parents such that the root is in the middle of the longest path."""
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
    """Visit a tree in breadth; return the nodes in that order, and of every node its parent."""
    parents = [-1] * len(neighbours)
    order = [root]
    for node in order:
        for other in neighbours[node]:
            if other != parents[node]:
                parents[other] = node
                order.append(other)
    return order, parents


#: A port's price grows by ``whole / (damping * share)`` of itself with each edge.
_DAMPINGS = (2, 4, 8, 16)
#: Price of a port that carries 1, at first.
_PRICE = 1 << 32
#: Fewer trees are taken if they take no more than this much of the least time.
_AS_GOOD = Fraction(101, 100)

__all__ = ["PortEdge", "PortTree", "pack"]
