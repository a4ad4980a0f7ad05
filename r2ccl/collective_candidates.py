"""Candidates of the collectives other than allreduce, for large data.

Allgather and reduce-scatter are rings, broadcast and reduce chains or trees. On a whole network
the channels of a ring are at home on one rail each, all the way round. On others every edge is
placed on its own: a ring needs as many edges out of a node and into it as it has channels, and
their number is chosen so that those fill the ports of the node that has least.

Imports `algos` and `schedule`. Pure. Invariant: equal terms, equal candidates, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from r2ccl.algos import bridged_ring, packed_trees, ring, spanning_tree, tree
from r2ccl.candidates import MOST_EDGES, MOST_TREES_PER_HOME, Candidate, Terms
from r2ccl.errors import InvalidArgument
from r2ccl.flows import flows_of_cycle, flows_of_rooted_trees
from r2ccl.resilience.health import WHOLE
from r2ccl.schedule.ir import Schedule
from r2ccl.types import Collective


def collective_candidates(collective: Collective, root: int, terms: Terms) -> Iterator[Candidate]:
    """Make the candidates of a call.

    Parameters
    ----------
    collective : Collective
        Allgather, reduce-scatter, broadcast or reduce.
    root : int
        Of broadcast and reduce.
    terms : Terms
    """
    nranks = sum(map(len, terms.teams))
    order = ring_order(terms)
    if collective in (Collective.BROADCAST, Collective.REDUCE):
        yield from _rooted(collective, root, order, terms)
        return
    make = ring.allgather if collective == Collective.ALLGATHER else ring.reduce_scatter
    if not order:
        make_tree = (
            spanning_tree.allgather
            if collective == Collective.ALLGATHER
            else spanning_tree.reduce_scatter
        )
        parents = spanning_tree.span(nranks, terms.rank_meets())
        yield Candidate("spanning_tree", make_tree(parents, terms.nchannels))
        return
    if terms.is_whole or not terms.is_joined:
        yield Candidate("ring", make(nranks, terms.nchannels), is_ring=True)
        return
    for nchannels in _counts(terms, 1):
        schedule = make(nranks, nchannels, [order] * nchannels)
        flows = flows_of_cycle(order, nchannels, Fraction(nranks - 1, nranks))
        yield Candidate("ring", schedule, flows=flows)


def ring_order(terms: Terms) -> tuple[int, ...]:
    """Return the ranks in an order for rings and chains; () if neighbours cannot all reach others.

    Nodes keep their order unless neighbours have less in common than either of them can use; then
    those that lack something are dealt out among the others.
    """
    nodes: tuple[int, ...] = tuple(range(len(terms.teams)))
    if not terms.is_whole:
        orders = [nodes, _dealt_out(terms)]
        nodes = max(orders, key=lambda order: _narrowest(order, terms))
    if not terms.is_connected and terms.is_joined:
        try:
            nodes = bridged_ring.bridge(nodes, terms.meets())
        except InvalidArgument:
            return ()
    return tuple(rank for node in nodes for rank in terms.teams[node])


def _narrowest(order: Sequence[int], terms: Terms) -> Fraction:
    """Return what the worst neighbours have in common, of what the poorer of them can use."""
    wide = terms.bandwidths
    return min(
        (
            Fraction(
                sum(map(min, terms.shares[order[place - 1]], terms.shares[order[place]])),
                min(wide[order[place - 1]], wide[order[place]]),
            )
            for place in range(len(order))
        ),
        default=Fraction(1),
    )


def _dealt_out(terms: Terms) -> tuple[int, ...]:
    """Return the nodes with those that lack something spread evenly among the others."""
    whole = [node for node, row in enumerate(terms.shares) if set(row) == {WHOLE}]
    poor = [node for node in range(len(terms.shares)) if node not in set(whole)]
    n = len(terms.shares)
    found: list[int] = []
    for place in range(n):
        is_due = len(poor) * (place + 1) // n > len(poor) * place // n
        found.append(poor.pop(0) if poor and (is_due or not whole) else whole.pop(0))
    return tuple(found)


def _rooted(
    collective: Collective, root: int, order: tuple[int, ...], terms: Terms
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
    counts = [terms.nchannels] if terms.is_whole else _counts(terms, 1)
    for nchannels in counts:
        yield candidate("chain", [chain] * nchannels)
    if nranks == len(terms.teams) > 2 and terms.is_connected:
        for ntrees in _counts(terms, 1):
            rooms = terms.rooms(_edges_for(terms, ntrees))
            yield candidate("packed_trees", packed_trees.pack_rooted(rooms, ntrees, root))


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


__all__ = ["collective_candidates", "ring_order"]
