"""Candidate schedules of a large allreduce, built for the bandwidth that each node has left.

Each schedule family has one function, which yields one candidate per variant, for example per
number of trees, or none if the family does not apply. Candidates are schedules over nodes, except
spanning trees and some rings, which are over ranks. If several ranks share a node, `expand` turns a
chosen schedule over nodes into one over ranks (`r2ccl.algos.hierarchy`), in which a node's ports
carry each byte once for all ranks of the node.

Invariant: equal terms give equal candidates in the same order, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import NamedTuple

import msgspec

from r2ccl.algos import (
    bridged_ring,
    dissemination,
    hierarchy,
    leaf_ring,
    nested_rings,
    one_shot,
    optcc,
    packed_trees,
    port_packing,
    r2cc_allreduce,
    recursive_doubling,
    ring,
    spanning_tree,
    tree,
)
from r2ccl.algos.bandwidths import straggler_of
from r2ccl.algos.packed_trees import Reach
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE
from r2ccl.planning.edge_loads import (
    Flows,
    carried,
    flows_of_dissemination,
    flows_of_rings,
    flows_of_trees,
)
from r2ccl.planning.placement import Edge, EdgeAtHome, Placement
from r2ccl.schedule.ir import Schedule


class Terms(NamedTuple):
    """Input of the candidate functions: port shares, ranks of nodes, and number of channels.

    Attributes
    ----------
    shares : tuple of tuple of int
        One row per node, with one number per home rail (`Fabric.homes`): the share of bandwidth
        that the node's port on this rail has left, 0 (down) to `WHOLE`.
    teams : tuple of tuple of int
        Ranks of each node.
    nchannels : int
        Number of channels of rings, chains, scans and spanning trees, unless a candidate function
        chooses the number that fills degraded ports evenly.
    """

    shares: tuple[tuple[int, ...], ...]
    teams: tuple[tuple[int, ...], ...]
    nchannels: int

    @property
    def nhomes(self) -> int:
        """Number of home rails."""
        return len(self.shares[0])

    @property
    def bandwidths(self) -> list[int]:
        """For each node, the sum of the usable shares of its ports, at least 1."""
        return [max(1, sum(row)) for row in self.usable]

    @property
    def usable(self) -> list[list[int]]:
        """Share of each port, capped by the sum of the other nodes' shares on the same rail."""
        totals = [sum(column) for column in zip(*self.shares, strict=True)]
        return [
            [min(own, total - own) for own, total in zip(row, totals, strict=True)]
            for row in self.shares
        ]

    def rooms(self, edges: int) -> list[int]:
        """Return, for each node, the number of edges that all its ports together can take.

        A port whose usable share is s takes ``edges * s // WHOLE`` edges; a port with its full
        bandwidth takes `edges`.
        """
        return [sum(edges * share // WHOLE for share in row) for row in self.usable]

    @property
    def is_whole(self) -> bool:
        """True if all nodes have the same shares and no port is down."""
        return len(set(self.shares)) == 1 and min(self.shares[0]) > 0

    @property
    def masks(self) -> tuple[int, ...]:
        """Bit set of the home rails that are up, for every node."""
        return tuple(sum(1 << at for at, share in enumerate(row) if share) for row in self.shares)

    @property
    def is_connected(self) -> bool:
        """True if every two nodes have a common home rail that is up at both."""
        masks = set(self.masks)
        return len(self.shares) == 1 or (
            0 not in masks and all(a & b for a, b in combinations(masks, 2))
        )

    @property
    def is_joined(self) -> bool:
        """True if home rails that are up connect all nodes, directly or over other nodes."""
        parts: list[int] = []
        for mask in set(self.masks):
            joined = mask
            apart = []
            for part in parts:
                if part & mask:
                    joined |= part
                else:
                    apart.append(part)
            parts = [*apart, joined]
        return len(parts) == 1 and (parts[0] > 0 or len(self.shares) == 1)

    @property
    def is_sparse(self) -> bool:
        """True if `is_joined`, but a pair of nodes has little bandwidth on common home rails.

        Little means at most half of the bandwidth that the poorer node has on all home rails.
        """
        if not self.is_joined:
            return False
        return any(
            2 * sum(map(min, one, other)) <= min(sum(one), sum(other))
            for one, other in combinations(set(self.shares), 2)
        )

    def meets(self) -> Reach:
        """Return ``reach(a, b)``, true if nodes `a` and `b` have a common home rail that is up."""
        masks = self.masks
        return lambda a, b: bool(masks[a] & masks[b])

    def rank_meets(self) -> Reach:
        """Return ``reach(a, b)``, true if ranks `a` and `b` can be neighbors.

        Two ranks can be neighbors if they share a node, or if their nodes have a common home rail
        that is up.
        """
        masks = self.masks
        node_of = {rank: node for node, team in enumerate(self.teams) for rank in team}
        return lambda a, b: node_of[a] == node_of[b] or bool(masks[node_of[a]] & masks[node_of[b]])


class Candidate(NamedTuple):
    """A schedule that a call may run, with the data needed to place it and to predict its time.

    Attributes
    ----------
    name : str
        Name of the schedule's family.
    schedule : Schedule
        Schedule over nodes if `is_among_nodes`, else over ranks.
    fill : int
        Time to fill and drain the pipeline, during which some ports are idle, in units of the time
        of one slice of a channel.
    is_ring : bool
        True if every channel is a ring of all ranks or nodes, placed on one rail as a whole.
    flows : Flows or None
        Load of each edge; None if it is not known without generating the ops of the schedule.
    is_among_nodes : bool
        True if the schedule is over nodes with several ranks; `expand` turns it into one over
        ranks.
    edges : tuple of EdgeAtHome
        Edges that are placed already, with their rails. A channel with any edge here needs no
        further placement. Unless `is_ring`, `r2ccl.planning.cost_model.put` places the edges of
        all other channels one by one. If `is_among_nodes`, an edge joins nodes instead of ranks.
    """

    name: str
    schedule: Schedule
    fill: int = 0
    is_ring: bool = False
    flows: Flows | None = None
    is_among_nodes: bool = False
    edges: tuple[EdgeAtHome, ...] = ()


def candidates(name: str, terms: Terms) -> Iterator[Candidate]:
    """Yield the candidates of one family; none if it does not apply or there are too many nodes.

    Parameters
    ----------
    name : str
        One of `FAMILIES`, or ``spanning_tree``. If nodes have several ranks, a schedule over nodes
        requires that the leaders of each channel, one per node, have rank numbers that ascend from
        node to node (`r2ccl.algos.hierarchy`). If the ranks are numbered otherwise, only
        ``spanning_tree`` and ``ring`` have candidates, because these two can be built over ranks.
    terms : Terms
    """
    is_flat = all(len(team) == 1 for team in terms.teams)
    if name == "ring" and not is_flat:
        nranks = sum(map(len, terms.teams))
        yield Candidate("ring", ring.allreduce(nranks, terms.nchannels), is_ring=True)
    if name == "spanning_tree":
        yield from _spanning_trees(terms)
        return
    if len(terms.teams) > _MOST_NODES.get(name, len(terms.teams)):
        return
    if is_flat:
        yield from FAMILIES[name](terms)
    elif _can_lead(terms.teams):
        for found in FAMILIES[name](terms):
            yield found._replace(fill=found.fill + 1, is_among_nodes=True)


def _spanning_trees(terms: Terms) -> Iterator[Candidate]:
    if terms.is_joined:
        nranks = sum(map(len, terms.teams))
        parents = spanning_tree.span(nranks, terms.rank_meets())
        trees = [parents] * terms.nchannels
        schedule = tree.allreduce(trees, "spanning_tree")
        flows = flows_of_trees(trees)
        yield Candidate("spanning_tree", schedule, schedule.cost.steps // 2, flows=flows)


def expand(
    schedule: Schedule,
    placement: Placement,
    teams: Sequence[Sequence[int]],
    flows: Flows | None = None,
) -> tuple[Schedule, Placement]:
    """Turn a schedule over nodes and its placement into a schedule over ranks and its placement.

    `teams` has the ranks of each node. With `flows`, the loads of the edges of `schedule`, the cost
    of the result can usually be computed without generating its ops.
    """
    edges = []
    for channel, low, high, number in placement.edges:
        one, other = (teams[node][channel % len(teams[node])] for node in (low, high))
        edges.append(Edge(channel, min(one, other), max(one, other), number))
    wrapped = hierarchy.wrap(schedule, teams, carried(flows) if flows else None)
    return wrapped, placement._replace(edges=tuple(edges))


def _can_lead(teams: Sequence[Sequence[int]]) -> bool:
    """Return whether the leaders of each channel have rank numbers that ascend from node to node.

    The leader of channel c in a team is ``team[c % len(team)]``. If teams differ in size, the
    result is True only if all ranks of a team precede the ranks of the next team.
    `r2ccl.algos.hierarchy` explains why this matters.
    """
    if all(max(team) < min(after) for team, after in pairwise(teams)):
        return True
    is_even = len({len(team) for team in teams}) == 1
    return is_even and all(list(leaders) == sorted(leaders) for leaders in zip(*teams, strict=True))


def _rings(terms: Terms) -> Iterator[Candidate]:
    n = len(terms.shares)
    # `put` places a ring without its flows, but `expand` uses them.
    has_fellows = any(len(team) > 1 for team in terms.teams)
    flows = flows_of_rings(range(n), terms.nchannels) if has_fellows else None
    yield Candidate("ring", ring.allreduce(n, terms.nchannels), is_ring=True, flows=flows)


def _double_trees(terms: Terms) -> Iterator[Candidate]:
    trees = tree.double_binary(len(terms.shares)) * max(1, terms.nhomes // 2)
    schedule = tree.allreduce(trees, "double_binary_tree")
    flows = flows_of_trees(trees)
    yield Candidate("tree", schedule, schedule.cost.steps // 2, flows=flows)


def _recursive_doubling(terms: Terms) -> Iterator[Candidate]:
    yield Candidate("recursive_doubling", recursive_doubling.allreduce(len(terms.shares), 1))


def _disseminations(terms: Terms) -> Iterator[Candidate]:
    n = len(terms.shares)
    schedule = dissemination.allreduce(n, terms.nhomes)
    flows = flows_of_dissemination(n, terms.nhomes)
    yield Candidate("dissemination", schedule, flows=flows, edges=at_home(flows, terms))


def at_home(flows: Flows, terms: Terms) -> tuple[EdgeAtHome, ...]:
    """Return the edges of `flows`, with every edge of channel c on home rail ``c % nhomes``.

    Return () unless all ports have the same share, above 0.
    """
    if not terms.is_whole or len(set(terms.shares[0])) > 1:
        return ()
    return tuple((*flow[:3], flow.channel % terms.nhomes) for flow in flows.flows)


def _one_shot(terms: Terms) -> Iterator[Candidate]:
    yield Candidate("one_shot", one_shot.allreduce(len(terms.shares), terms.nhomes))


def _packed_trees(terms: Terms) -> Iterator[Candidate]:
    if not terms.is_joined:
        return
    reach = None if terms.is_connected else terms.meets()
    for ntrees, bandwidths in _counts_of_trees(terms):
        trees = packed_trees.pack(bandwidths, ntrees, reach)
        schedule = tree.allreduce(trees, "packed_trees")
        flows = flows_of_trees(trees)
        yield Candidate("packed_trees", schedule, schedule.cost.steps // 2, flows=flows)
    most = _PACKED_BY_PORTS if terms.is_sparse else _ALWAYS_BY_PORTS
    if len(terms.shares) <= most and not terms.is_whole:
        yield _port_packed(terms)


def _port_packed(terms: Terms) -> Candidate:
    packed = port_packing.pack(terms.shares, MOST_TREES_PER_HOME * terms.nhomes)
    trees = [each.parents for each in packed]
    schedule = tree.allreduce(trees, "packed_trees")
    edges = tuple((at, *edge) for at, each in enumerate(packed) for edge in each.edges)
    return Candidate(
        "packed_trees",
        schedule,
        schedule.cost.steps // 2,
        flows=flows_of_trees(trees),
        edges=edges,
    )


def _counts_of_trees(terms: Terms) -> list[tuple[int, list[int]]]:
    """Return tree counts whose edges fill the ports evenly, each with the nodes' edge capacities.

    If a port with its full bandwidth takes k edges, at most t trees fit the ports (`Terms.rooms`),
    and their time is proportional to k / t. In general, no integer k reaches the lower bound of the
    time, but some values of k come close. There are two fits. The *loose* fit leaves one edge end
    per node free. The *tight* fit does so only if k is odd. The factors of a fit are `_EVEN` or,
    above `_MANY_NODES` nodes, `_LOOSE` or `_TIGHT`. For each factor, the result has the smallest
    tree count whose time is at most the factor times the least time of the fit. If no tree fits,
    the result is one tree per home rail.
    """
    n = len(terms.shares)
    tight: dict[int, tuple[Fraction, list[int]]] = {}
    loose: dict[int, tuple[Fraction, list[int]]] = {}
    for edges in range(2, MOST_EDGES + 1):
        room = terms.rooms(edges)
        # Edges can fill all ports exactly only if their number per port is even (Petersen's
        # theorem), and not in all networks. Leaving one edge end free per node suffices.
        for found, slack in ((tight, edges % 2 * n), (loose, n)):
            ntrees = min((sum(room) - slack) // (2 * (n - 1)) if n > 1 else 1, *room)
            ntrees = min(ntrees, MOST_TREES_PER_HOME * terms.nhomes)
            if ntrees > 0:
                found.setdefault(ntrees, (Fraction(edges, ntrees), room))
    # Fewer trees have larger slices, so prefer the smallest of about equally good counts.
    counts: dict[int, list[int]] = {}
    for found, few in ((tight, _TIGHT), (loose, _LOOSE)):
        least = min((time for time, _ in found.values()), default=Fraction(0))
        for bound in (_EVEN if n <= _MANY_NODES else few) if found else ():
            count = min(c for c, (time, _) in found.items() if time <= least * bound)
            counts.setdefault(count, found[count][1])
    return list(counts.items()) or [(terms.nhomes, terms.bandwidths)]


def _leaf_rings(terms: Terms) -> Iterator[Candidate]:
    for times in _RINGS_PER_HOME if len(terms.shares) < _LARGE_RING else (1,):
        schedule = leaf_ring.allreduce(terms.bandwidths, _SEGMENTS, times * terms.nhomes)
        yield Candidate("leaf_ring", schedule, 1)


def _nested_rings(terms: Terms) -> Iterator[Candidate]:
    yield Candidate(
        "nested_rings", nested_rings.allreduce(terms.bandwidths, _SEGMENTS, 2 * terms.nhomes), 1
    )


def _bridged_rings(terms: Terms) -> Iterator[Candidate]:
    n = len(terms.shares)
    if terms.is_connected or n == 1:
        return  # the family "ring" covers this case
    try:
        order = bridged_ring.bridge(range(n), terms.meets())
    except InvalidArgument:  # no ring was found in which every two neighbors have a common rail
        return
    schedule = ring.allreduce(n, terms.nchannels, [order] * terms.nchannels)
    schedule = msgspec.structs.replace(schedule, name="bridged_ring")
    yield Candidate("bridged_ring", schedule, flows=flows_of_rings(order, terms.nchannels))


def _r2cc(terms: Terms) -> Iterator[Candidate]:
    lost = straggler_of(terms.bandwidths).lost
    if len(terms.shares) > 2 and lost:
        # Channel counts are proportional to the rails that the straggler has left and has lost.
        # The factors make enough channels for an even spread: the load is 1.21 (4 nodes) and 1.19
        # (8 nodes) times the ring's; with a third as many channels it is 1.5 times.
        rest = max(1, round((1 - lost) * terms.nhomes))
        channels = (3 * rest, 6 * max(1, terms.nhomes - rest))
        yield Candidate("r2cc", r2cc_allreduce.allreduce(terms.bandwidths, _CHUNKS, None, channels))


def _optcc(terms: Terms) -> Iterator[Candidate]:
    if len(terms.shares) > 2 and straggler_of(terms.bandwidths).lost:
        yield Candidate("optcc", optcc.allreduce(terms.bandwidths, _CHUNKS, 3 * terms.nhomes))


#: For each family, the function that yields its candidates over nodes.
FAMILIES: dict[str, Callable[[Terms], Iterator[Candidate]]] = {
    "recursive_doubling": _recursive_doubling,
    "one_shot": _one_shot,
    "ring": _rings,
    "bridged_ring": _bridged_rings,
    "dissemination": _disseminations,
    "tree": _double_trees,
    "packed_trees": _packed_trees,
    "leaf_ring": _leaf_rings,
    "nested_rings": _nested_rings,
    "optcc": _optcc,
    "r2cc": _r2cc,
}

#: Largest number of nodes for which a family yields candidates. Beyond it, a call would wait for
#: seconds while candidates are made and placed (all families together, 8 rails per node: 0.4 s with
#: 16 nodes, 1.5 s with 32).
_MOST_NODES = {
    "bridged_ring": 64,
    "dissemination": 256,
    "leaf_ring": 32,
    "nested_rings": 32,
    "one_shot": 32,
    "optcc": 32,
    "r2cc": 32,
}
#: Largest number of nodes for which trees are packed by ports: in a sparse network
#: (`Terms.is_sparse`), and in other networks (8 rails per node: 20 ms with 12 nodes, 5 ms with 6).
_PACKED_BY_PORTS, _ALWAYS_BY_PORTS = 12, 6
#: Maximum number of trees per home rail: with more, slices are too few or too small.
MOST_TREES_PER_HOME = 8
#: Maximum number of edges at a port with its full bandwidth.
MOST_EDGES = 16
#: Multiples of the least time that `_counts_of_trees` accepts: `_EVEN` up to `_MANY_NODES` nodes;
#: for more nodes, `_TIGHT` with a tight fit and `_LOOSE` with a loose one.
_EVEN = tuple(Fraction(each, 100) for each in (100, 101, 103, 107))
_TIGHT, _LOOSE = (Fraction(101, 100),), (Fraction(107, 100),)
#: Channels of a leaf ring per home rail, below `_LARGE_RING` nodes; more channels spread edges more
#: evenly.
_RINGS_PER_HOME = (2, 3)
_LARGE_RING = 16
#: Number of nodes above which fewer variants are tried.
_MANY_NODES = 32
#: Segments of leaf rings and nested rings: enough to divide the data nearly in proportion to the
#: bandwidths.
_SEGMENTS = 8
#: Parameter K of R2CC-AllReduce and k of OptCC.
_CHUNKS = 8

__all__ = [
    "FAMILIES",
    "MOST_EDGES",
    "MOST_TREES_PER_HOME",
    "Candidate",
    "Terms",
    "at_home",
    "candidates",
    "expand",
]
