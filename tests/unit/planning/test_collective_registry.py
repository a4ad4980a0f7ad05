"""Collectives other than allreduce and direct exchanges, made for what nodes have left."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow

from r2ccl.algos import packed_trees, tree
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.allreduce_registry import Terms
from r2ccl.planning.collective_registry import collective_candidates, ring_order
from r2ccl.planning.cost_model import Fabric, Rates, put
from r2ccl.planning.edge_loads import flows_of
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.types import PARTED, PREFIXES, Collective

TREES = (Collective.BROADCAST, Collective.REDUCE)
COLLECTIVES = sorted((*PARTED, *TREES, *PREFIXES))
Rows = list[tuple[int, ...]]


def terms(rows: Rows, nchannels: int = 6) -> Terms:
    return Terms(tuple(rows), tuple((node,) for node in range(len(rows))), nchannels)


def load(collective: Collective, rows: Rows) -> Fraction:
    """Return the least load of the candidates, as a multiple of what a whole rail takes."""
    nrails = len(rows[0])
    fabric = Fabric(range(nrails), nrails, (), Rates(10_000, 10**9))
    health = Health(1, nrails, bytes(share for row in rows for share in row))
    placed = [
        put(each, fabric, health) for each in collective_candidates(collective, 0, terms(rows))
    ]
    return min(each.load for each in placed if each.has_way)


@slow.given(
    15,
    60,
    st.lists(st.tuples(*[st.sampled_from([0, 3, WHOLE])] * 3).filter(any), min_size=2, max_size=7),
    st.sampled_from(COLLECTIVES),
    st.booleans(),
)
def test_every_candidate_is_right_and_its_flows_are_its_ops(
    rows: Rows, collective: Collective, keeps_order: bool
) -> None:
    root = len(rows) - 1
    for found in collective_candidates(collective, root, terms(rows), keeps_order=keeps_order):
        check(found.schedule)
        assert found.schedule.cost == measure(found.schedule)
        if found.flows is not None:
            known, counted = found.flows, flows_of(found.schedule)
            assert sorted(
                flow._replace(up=flow.up * counted.unit, down=flow.down * counted.unit)
                for flow in known.flows
            ) == sorted(
                flow._replace(up=flow.up * known.unit, down=flow.down * known.unit)
                for flow in counted.flows
            )


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "odd", [(16, 16, 16, 0), (16, 0, 16, 0), (16, 8, 16, 16), (0, 0, 4, 16)], ids=str
)
def test_a_straggler_costs_what_it_must(collective: Collective, odd: tuple[int, ...]) -> None:
    """It has to receive, or send, all the data (or all but its own part) over what it has left."""
    rows: Rows = [(16,) * 4, odd, *[(16,) * 4] * 4]
    part = Fraction(5, 6) if collective in PARTED else Fraction(1)
    assert load(collective, rows) <= part * WHOLE / sum(odd) * Fraction(107, 100)


def test_nodes_that_lack_something_are_kept_apart() -> None:
    rows: Rows = [(16, 16), (16, 0), (0, 16), (16, 16), (16, 16), (16, 16)]
    order = ring_order(terms(rows))
    assert abs(order.index(1) - order.index(2)) not in (1, 5)
    assert ring_order(terms([(16, 16)] * 5)) == (0, 1, 2, 3, 4)
    many: Rows = [(16, 16)] * 10
    many[1], many[5], many[6] = (16, 0), (3, 16), (16, 0)
    order = ring_order(terms(many))
    places = sorted(order.index(node) for node in (1, 5, 6))
    assert min(b - a for a, b in pairwise([*places, places[0] + 10])) >= 2
    assert ring_order(terms(rows[3:] + rows[:2])) == (0, 1, 2, 3, 4), "nothing is gained"


def test_the_order_of_ranks_is_kept_where_bits_must_not_change() -> None:
    rows: Rows = [(16, 16), (16, 1), (1, 16), (16, 16), (16, 16)]
    assert ring_order(terms(rows), keeps_order=True) == (0, 1, 2, 3, 4)
    for collective in TREES:
        names = {
            each.schedule.name
            for each in collective_candidates(collective, 0, terms(rows), keeps_order=True)
        }
        assert names == {"chain"}


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 99))
def test_rooted_trees_are_flat_and_fit_the_room(n: int, ntrees: int, seed: int) -> None:
    root = seed % n
    rooms = [ntrees * (1 + (seed >> node) % 2) for node in range(n)]
    trees = packed_trees.pack_rooted(rooms, ntrees, root)
    down = [0] * n
    for parents in trees:
        grown = tree.grow(parents)
        assert grown.root == root
        for node in range(n):
            down[node] += len(grown.children[node])
    assert all(each <= room for each, room in zip(down, rooms, strict=True))


@pytest.mark.parametrize("ntrees", [1, 2, 5])
def test_nodes_with_room_for_two_have_two_children_others_none(ntrees: int) -> None:
    """One node that lost a NIC of two bounds the trees; a chain through the others is no matter."""
    rooms = [2 * ntrees] * 60
    rooms[53] = ntrees
    for parents in packed_trees.pack_rooted(rooms, ntrees, 0):
        assert tree.grow(parents).heights[0] <= 7


def test_trees_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="and 3 edges or more for every node"):
        packed_trees.pack_rooted([3, 2, 3], 3, 0)


@pytest.mark.parametrize("collective", sorted(PREFIXES))
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("nchannels", [3, 4, 6, 11])
def test_scans_are_at_home_only_if_no_placement_is_better(
    collective: Collective, ranks_per_node: int, nchannels: int
) -> None:
    """Placing every edge of a scan one by one took 7 s with 512 ranks of 8 rails."""
    for nnodes in (2, 3, 5, 8):
        nranks = nnodes * ranks_per_node
        nodes = [rank // ranks_per_node for rank in range(nranks)]
        teams = [tuple(rank for rank in range(nranks) if nodes[rank] == at) for at in range(nnodes)]
        given = Terms(((WHOLE,) * 4,) * nnodes, tuple(teams), nchannels)
        fabric, health = Fabric(range(4), 4, nodes), Health.whole(nranks, 4)
        for found in collective_candidates(collective, 0, given):
            quick, slowly = (
                put(each, fabric, health) for each in (found, found._replace(edges=()))
            )
            assert (quick.load, quick.nlinks) <= (slowly.load, slowly.nlinks)
            edges = [[edge[:3] for edge in each.placement.edges] for each in (quick, slowly)]
            assert sorted(edges[0]) == sorted(edges[1])
            assert {edge[0] for edge in found.edges} >= set(range(nchannels // 4 * 4 - 4))
