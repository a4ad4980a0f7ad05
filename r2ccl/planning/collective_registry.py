"""Candidates of the collectives other than allreduce, for large data.

Allgather and reduce-scatter are rings or disseminations, or a spanning tree where no ring exists;
broadcast and reduce chains or packed trees. On a whole network channels are at home on one rail
each. On others every edge is placed on its own: a ring needs as many edges out of a node and into
it as it has channels, and their number is chosen so that those fill the ports of the node that has
least.

Imports `algos` and `schedule`. Pure. Invariant: equal terms, equal candidates, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

from r2ccl.algos import bridged_ring, dissemination, packed_trees, ring, spanning_tree, tree
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE
from r2ccl.planning.allreduce_registry import (
    MOST_EDGES,
    MOST_TREES_PER_HOME,
    Candidate,
    Terms,
    at_home,
)
from r2ccl.planning.edge_loads import flows_of_cycle, flows_of_dissemination, flows_of_rooted_trees
from r2ccl.schedule.ir import Schedule
from r2ccl.types import Collective


def collective_candidates(
    collective: Collective, root: int, terms: Terms, *, keeps_order: bool = False
) -> Iterator[Candidate]:
    """Make the candidates of a call.

    Parameters
    ----------
    collective : Collective
        Allgather, reduce-scatter, broadcast or reduce.
    root : int
        Of broadcast and reduce.
    terms : Terms
    keeps_order : bool
        Reduce in the order of ranks, whatever is lost, wherever neighbours in it have a home in
        common: the result has the same bits then.
    """
    order = ring_order(terms, keeps_order=keeps_order)
    if collective in (Collective.BROADCAST, Collective.REDUCE):
        yield from _rooted(collective, root, order, terms, is_chain=keeps_order)
        return
    if not order or terms.is_whole or not terms.is_joined:
        schedule = parted(collective, terms, terms.nchannels)
        yield Candidate(schedule.name, schedule, is_ring=bool(order))
    else:
        nranks = len(order)
        for nchannels in _counts(terms, _crossings(order, terms)):
            schedule = _RINGS[collective](nranks, nchannels, [order] * nchannels)
            flows = flows_of_cycle(order, nchannels, Fraction(nranks - 1, nranks))
            yield Candidate("ring", schedule, flows=flows)
    if not keeps_order:
        yield from _disseminations(collective, terms)


def parted(collective: Collective, terms: Terms, nchannels: int) -> Schedule:
    """Return an allgather or a reduce-scatter of so many channels, each the same.

    It is the ring in the order of ranks while all nodes have a home in common, else one in another
    order, or a tree where there is no such ring.
    """
    nranks = sum(map(len, terms.teams))
    if terms.is_connected or not terms.is_joined:
        return _RINGS[collective](nranks, nchannels)
    order = ring_order(terms)
    if order:
        return _RINGS[collective](nranks, nchannels, [order] * nchannels)
    parents = spanning_tree.span(nranks, terms.rank_meets())
    if collective == Collective.ALLGATHER:
        return spanning_tree.allgather(parents, nchannels)
    return spanning_tree.reduce_scatter(parents, nchannels)


def _disseminations(collective: Collective, terms: Terms) -> Iterator[Candidate]:
    """Make them for one rank a node: with several, nearly all would be sent between nodes."""
    n = len(terms.shares)
    if n < _FEW_NODES or not terms.is_connected or any(len(team) > 1 for team in terms.teams):
        return
    make = DISSEMINATIONS[collective]
    gathers = collective == Collective.ALLGATHER
    for nchannels in (terms.nhomes,) if terms.is_whole else _counts(terms, 1):
        flows = flows_of_dissemination(n, nchannels, gathers=gathers, scatters=not gathers)
        edges = at_home(flows, terms)
        if edges or len(flows.flows) <= _MOST_EDGES_PLACED:
            yield Candidate("dissemination", make(n, nchannels), flows=flows, edges=edges)


def ring_order(terms: Terms, *, keeps_order: bool = False) -> tuple[int, ...]:
    """Return the ranks in an order for rings and chains; () if there is none without gaps.

    Nodes keep their order unless neighbours have less in common than either of them can use; then
    those that lack something are dealt out among the others. With `keeps_order` it is the order of
    ranks, if neighbours in that have a home in common.
    """
    if keeps_order:
        reach, nranks = terms.rank_meets(), sum(map(len, terms.teams))
        if not terms.is_joined or all(reach((rank - 1) % nranks, rank) for rank in range(nranks)):
            return tuple(range(nranks))
    nodes: tuple[int, ...] = tuple(range(len(terms.teams)))
    if not terms.is_whole:
        orders = [nodes, _dealt_out(terms)]
        wide = terms.bandwidths
        nodes = max(orders, key=lambda order: _narrowest(order, terms, wide))
        if len(nodes) <= _MOST_SWAPPED:
            nodes = _swapped(nodes, terms, wide)
    if not terms.is_connected and terms.is_joined:
        try:
            nodes = bridged_ring.bridge(nodes, terms.meets())
        except InvalidArgument:
            return ()
    return tuple(rank for node in nodes for rank in terms.teams[node])


def _narrowest(order: Sequence[int], terms: Terms, wide: Sequence[int]) -> Fraction:
    """Return what the worst neighbours have in common, of what the poorer of them can use.

    `wide` are the bandwidths of `terms`, worked out once for many orders.
    """
    shares = terms.shares
    return min(
        (
            Fraction(sum(map(min, shares[one], shares[other])), min(wide[one], wide[other]))
            for one, other in zip(order, [*order[1:], *order[:1]], strict=True)
        ),
        default=Fraction(1),
    )


def _swapped(order: tuple[int, ...], terms: Terms, wide: Sequence[int]) -> tuple[int, ...]:
    """Exchange two nodes at a time as long as the worst neighbours have more in common then."""
    best = _narrowest(order, terms, wide)
    while best < 1:
        swaps = []
        for a, b in combinations(range(len(order)), 2):
            tried = list(order)
            tried[a], tried[b] = tried[b], tried[a]
            swaps.append((_narrowest(tried, terms, wide), tuple(tried)))
        # Ties go to the first, so that all ranks take the same.
        found, better = max(swaps, key=lambda swap: swap[0], default=(best, order))
        if found <= best:
            break
        best, order = found, better
    return order


def _dealt_out(terms: Terms) -> tuple[int, ...]:
    """Return the nodes with those that lack something spread evenly among the others."""
    whole = [node for node, row in enumerate(terms.shares) if set(row) == {WHOLE}]
    poor = [node for node in range(len(terms.shares)) if node not in set(whole)]
    n, npoor = len(terms.shares), len(poor)
    found: list[int] = []
    for place in range(n):
        is_due = npoor * (place + 1) // n > npoor * place // n
        found.append(poor.pop(0) if poor and (is_due or not whole) else whole.pop(0))
    return tuple(found)


def _rooted(
    collective: Collective, root: int, order: tuple[int, ...], terms: Terms, *, is_chain: bool
) -> Iterator[Candidate]:
    make: Callable[..., Schedule]
    make = tree.broadcast if collective == Collective.BROADCAST else tree.reduce
    is_down = collective == Collective.BROADCAST
    nranks = sum(map(len, terms.teams))

    def candidate(name: str, trees: Sequence[tree.Parents]) -> Candidate:
        schedule = make(trees, name)
        flows = flows_of_rooted_trees(trees, is_down=is_down)
        return Candidate(name, schedule, schedule.cost.steps, flows=flows)

    if not order:
        parents = spanning_tree.span(nranks, terms.rank_meets(), root)
        yield candidate("spanning_tree", [parents] * terms.nchannels)
        return
    at = order.index(root)
    chain = tree.chain(order[at:] + order[:at])
    counts = [terms.nchannels]
    if not terms.is_whole:
        counts = _counts(terms, _crossings(order[at:] + order[:at], terms))
    for nchannels in counts:
        yield candidate("chain", [chain] * nchannels)
    if not is_chain and nranks == len(terms.teams) > 2 and terms.is_connected:
        for ntrees in _counts(terms, 1):
            rooms = terms.rooms(_edges_for(terms, ntrees))
            yield candidate("packed_trees", packed_trees.pack_rooted(rooms, ntrees, root))


def _crossings(order: Sequence[int], terms: Terms) -> int:
    """Return how often a ring in this order leaves the node that it leaves most often."""
    node_of = {rank: node for node, team in enumerate(terms.teams) for rank in team}
    nodes = [node_of[rank] for rank in order]
    left = Counter(node for node, after in pairwise([*nodes, nodes[0]]) if node != after)
    return max(left.values(), default=1)


def _counts(terms: Terms, degree: int) -> list[int]:
    """Return numbers of channels that fill the ports of the node that has least, evenly.

    Each channel has `degree` edges into a node and as many out of it. Of the numbers that come
    within 1, 3 and 7 % of the best, the smallest.
    """
    found: dict[int, Fraction] = {}
    for edges in range(1, MOST_EDGES + 1):
        count = min(terms.rooms(edges)) // degree
        if 0 < count <= MOST_TREES_PER_HOME * terms.nhomes:
            found.setdefault(count, Fraction(edges, count))
    if not found:
        return [terms.nchannels]
    least = min(found.values())
    bounds = (Fraction(101, 100), Fraction(103, 100), Fraction(107, 100))
    return list(
        dict.fromkeys(
            min(count for count, time in found.items() if time <= least * bound) for bound in bounds
        )
    )


def _edges_for(terms: Terms, count: int) -> int:
    """Return for how many edges a whole port must have room, for `count` at every node."""
    return next(
        (each for each in range(1, MOST_EDGES + 1) if min(terms.rooms(each)) >= count), MOST_EDGES
    )


#: Makes an allgather or a reduce-scatter by dissemination.
DISSEMINATIONS: dict[Collective, Callable[..., Schedule]] = {
    Collective.ALLGATHER: dissemination.allgather,
    Collective.REDUCE_SCATTER: dissemination.reduce_scatter,
}
#: Fewest nodes with which a ring has more exchanges; edges placed one by one at most (20 ms).
_FEW_NODES, _MOST_EDGES_PLACED = 4, 2000
#: Nodes up to which their order in a ring is looked over again (12: 5 ms).
_MOST_SWAPPED = 12
#: Makes an allgather or a reduce-scatter of rings.
_RINGS: dict[Collective, Callable[..., Schedule]] = {
    Collective.ALLGATHER: ring.allgather,
    Collective.REDUCE_SCATTER: ring.reduce_scatter,
}

__all__ = ["DISSEMINATIONS", "collective_candidates", "parted", "ring_order"]
