"""Candidate schedules of large collectives other than allreduce.

Allgather and reduce-scatter run as rings or disseminations; broadcast and reduce run as chains or
packed trees. If no ring of all ranks is found, all four run as spanning trees. Scan and exscan run
as chains in rank order or by doubling. In a healthy network, each channel of a ring, a
dissemination or a scan is usually placed on one home rail. In a degraded network, and for all other
candidates, each edge is placed separately. In a degraded network, the number of channels is chosen
to fill the ports of the node with the least bandwidth. This does not apply to spanning trees, or to
rings if home rails do not connect all nodes.

Invariant: equal terms give equal candidates in the same order, on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

from r2ccl.algos import bridged_ring, dissemination, packed_trees, ring, scan, spanning_tree, tree
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE
from r2ccl.planning.allreduce_registry import (
    MOST_EDGES,
    MOST_TREES_PER_HOME,
    Candidate,
    Terms,
    at_home,
)
from r2ccl.planning.edge_loads import (
    Flows,
    flows_of_cycle,
    flows_of_dissemination,
    flows_of_prefix_doubling,
    flows_of_rooted_trees,
)
from r2ccl.planning.placement import EdgeAtHome
from r2ccl.schedule.ir import Schedule
from r2ccl.types import PREFIXES, Collective


def collective_candidates(
    collective: Collective, root: int, terms: Terms, *, keeps_order: bool = False
) -> Iterator[Candidate]:
    """Yield the candidate schedules of a call.

    Parameters
    ----------
    collective : Collective
        Allgather, reduce-scatter, broadcast, reduce, scan or exscan.
    root : int
        Root rank of broadcast and reduce.
    terms : Terms
    keeps_order : bool
        If True, yield only rings and chains or, if no ring is found, only spanning trees. Rings and
        chains are in rank order if every two neighbors in this order share a node or have a common
        home rail. In rank order, the result of the call has the same bits whichever ports have
        failed.
    """
    if collective in PREFIXES:
        is_exclusive = collective == Collective.EXSCAN
        yield from _prefixes(terms, is_exclusive=is_exclusive, is_chain=keeps_order)
        return
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
    """Return an allgather or a reduce-scatter with `nchannels` equal channels.

    It is the ring in rank order if every two nodes have a common home rail, or if home rails do not
    connect all nodes even over other nodes. Otherwise it is a ring in which every two neighbors
    share a node or have a common home rail, or a spanning tree if no such ring is found.
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
    # With several ranks per node, nearly all data would travel between nodes.
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
    """Return the order of ranks in rings and chains; () if no ring is found.

    The result is () if home rails connect all nodes, but no order was found in which every two
    neighboring nodes have a common home rail. If home rails do not connect all nodes, neighbors
    in the result may have no common home rail.

    Nodes keep their order if every two neighbors share the whole usable bandwidth of the poorer
    neighbor. Otherwise, degraded nodes are spread among healthy nodes and, with few nodes, pairs of
    nodes are swapped. Both are done only if they raise the least bandwidth that two neighbors
    share. With `keeps_order`, the result is the rank order if every two neighbors in this order
    share a node or have a common home rail, or if home rails do not connect all nodes.
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
    """Return the least bandwidth that two neighbors of the ring `order` share.

    It is a fraction of the usable bandwidth of the poorer neighbor. `wide` is
    ``terms.bandwidths``, computed once for many orders.
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
    """Return `order` after a series of swaps of two nodes, which raise `_narrowest`.

    Each step makes the swap that raises `_narrowest` most. The steps end when no swap raises it.
    """
    best = _narrowest(order, terms, wide)
    while best < 1:
        swaps = []
        for a, b in combinations(range(len(order)), 2):
            tried = list(order)
            tried[a], tried[b] = tried[b], tried[a]
            swaps.append((_narrowest(tried, terms, wide), tuple(tried)))
        # Ties go to the first pair, so all ranks choose the same order.
        found, better = max(swaps, key=lambda swap: swap[0], default=(best, order))
        if found <= best:
            break
        best, order = found, better
    return order


def _dealt_out(terms: Terms) -> tuple[int, ...]:
    """Return an order of the nodes that spreads degraded nodes evenly among healthy ones."""
    whole: list[int] = []
    poor: list[int] = []
    for node, row in enumerate(terms.shares):
        (whole if set(row) == {WHOLE} else poor).append(node)
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


def _prefixes(terms: Terms, *, is_exclusive: bool, is_chain: bool) -> Iterator[Candidate]:
    nranks = sum(map(len, terms.teams))
    counts = [terms.nchannels] if terms.is_whole else _counts(terms, 1)
    for nchannels in counts:
        schedule = scan.chain(nranks, nchannels, is_exclusive=is_exclusive)
        flows = flows_of_rooted_trees([tree.chain(range(nranks))] * nchannels, is_down=True)
        edges = _turns_at_home(flows, nchannels, terms)
        yield Candidate(schedule.name, schedule, schedule.cost.steps, flows=flows, edges=edges)
        if not is_chain:
            schedule = scan.doubling(nranks, nchannels, is_exclusive=is_exclusive)
            flows = flows_of_prefix_doubling(nranks, nchannels, is_exclusive=is_exclusive)
            edges = _turns_at_home(flows, nchannels, terms)
            yield Candidate(schedule.name, schedule, flows=flows, edges=edges)


def _turns_at_home(flows: Flows, nchannels: int, terms: Terms) -> tuple[EdgeAtHome, ...]:
    """Return the edges of `at_home` that join two nodes, for channels that load all rails equally.

    All channels have equal edges, so equally many channels per rail load all rails equally, and no
    search finds a better placement. If `nchannels` is not a multiple of the number of home rails,
    the result leaves out the channels beyond the last multiple. If, in addition, edges differ in
    load, the result leaves out one more channel per home rail, because fewer channels could not
    even out the loads. The caller places the edges of the omitted channels one by one.
    """
    node_of = {rank: node for node, team in enumerate(terms.teams) for rank in team}
    rest = nchannels % terms.nhomes
    if rest and len({max(flow.up, flow.down) for flow in flows.flows}) > 1:
        rest += terms.nhomes
    return tuple(
        edge
        for edge in at_home(flows, terms)
        if edge[0] < nchannels - rest and node_of[edge[1]] != node_of[edge[2]]
    )


def _crossings(order: Sequence[int], terms: Terms) -> int:
    """Return the largest number of times that a ring of ranks in `order` leaves the same node."""
    node_of = {rank: node for node, team in enumerate(terms.teams) for rank in team}
    nodes = [node_of[rank] for rank in order]
    left = Counter(node for node, after in pairwise([*nodes, nodes[0]]) if node != after)
    return max(left.values(), default=1)


def _counts(terms: Terms, degree: int) -> list[int]:
    """Return channel counts that evenly fill the ports of the node with the least bandwidth.

    Each channel has `degree` edges into a node and `degree` out of it. The result has the smallest
    counts whose time is within 1, 3 and 7 % of the least time; if no count fits the ports, it is
    the number of channels in `terms`.
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
    """Return the least `edges` for which ``Terms.rooms(edges)`` is `count` or more on all nodes.

    Returns `MOST_EDGES` if there is none.
    """
    return next(
        (each for each in range(1, MOST_EDGES + 1) if min(terms.rooms(each)) >= count), MOST_EDGES
    )


#: Functions that build an allgather or a reduce-scatter by dissemination.
DISSEMINATIONS: dict[Collective, Callable[..., Schedule]] = {
    Collective.ALLGATHER: dissemination.allgather,
    Collective.REDUCE_SCATTER: dissemination.reduce_scatter,
}
#: Fewest nodes for which a dissemination has fewer steps than a ring, and the most edges of a
#: dissemination that are placed one by one (20 ms).
_FEW_NODES, _MOST_EDGES_PLACED = 4, 2000
#: Largest number of nodes for which `_swapped` improves the order of a ring (12 nodes: 5 ms).
_MOST_SWAPPED = 12
#: Functions that build an allgather or a reduce-scatter of rings.
_RINGS: dict[Collective, Callable[..., Schedule]] = {
    Collective.ALLGATHER: ring.allgather,
    Collective.REDUCE_SCATTER: ring.reduce_scatter,
}

__all__ = ["DISSEMINATIONS", "collective_candidates", "parted", "ring_order"]
