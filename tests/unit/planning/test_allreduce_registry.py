"""What there is to choose from: every candidate right, made for what nodes have left."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import strategies as st
from support.slow import given

from r2ccl.config import ALGOS
from r2ccl.planning.allreduce_registry import FAMILIES, Terms, candidates, expand
from r2ccl.planning.edge_loads import flows_of
from r2ccl.planning.placement import Placement
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure


def terms(*rows: tuple[int, ...], teams: tuple[tuple[int, ...], ...] = ()) -> Terms:
    alone = tuple((node,) for node in range(len(rows)))
    return Terms(rows, teams or alone, 6)


WHOLE = (16, 16, 16)
LOST = (16, 0, 16)


def test_every_family_has_a_name_that_users_can_give() -> None:
    assert set(FAMILIES) == set(ALGOS) - {"auto"}


@given(
    15,
    40,
    st.lists(st.tuples(*[st.sampled_from([0, 4, 16])] * 3), min_size=1, max_size=6),
    st.sampled_from(sorted(FAMILIES)),
)
def test_a_candidate_is_right_whatever_is_left(rows: list[tuple[int, ...]], name: str) -> None:
    for found in candidates(name, terms(*rows)):
        check(found.schedule)
        assert found.schedule.nranks == len(rows)
        assert measure(found.schedule) == found.schedule.cost
        if found.flows is not None:
            known, counted = found.flows, flows_of(found.schedule)
            assert [
                flow._replace(up=flow.up * counted.unit, down=flow.down * counted.unit)
                for flow in sorted(known.flows)
            ] == [
                flow._replace(up=flow.up * known.unit, down=flow.down * known.unit)
                for flow in sorted(counted.flows)
            ]


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_that_share_a_node_send_through_one_of_them(name: str) -> None:
    teams = ((0, 1), (2, 3), (4, 5))
    made = []
    for found in candidates(name, terms(WHOLE, WHOLE, LOST, teams=teams)):
        schedule = found.schedule
        if found.is_among_nodes:
            schedule, _ = expand(schedule, Placement((), ()), teams)
        made.append(schedule)
        check(schedule)
        assert schedule.nranks == 6
        assert schedule.name.startswith("hierarchy/") or (name, schedule.name) == ("ring", "ring")
    assert (not made) == (name == "bridged_ring"), "any two nodes meet: there is nothing to bridge"


def test_nodes_whose_ranks_have_no_order_run_a_flat_ring() -> None:
    for teams in (((0, 3), (1, 2)), ((0, 2, 4), (1, 3))):
        mixed = terms(WHOLE, WHOLE, teams=teams)
        assert [len(list(candidates(name, mixed))) for name in ("ring", "packed_trees")] == [1, 0]
    turns = terms(WHOLE, WHOLE, teams=((0, 2), (1, 3)))
    assert list(candidates("packed_trees", turns)), "ranks dealt out one by one are in order"


def test_nodes_without_a_common_rail_are_bridged() -> None:
    rows = ((16, 0), (0, 16), (16, 16), (16, 16))
    (found,) = candidates("bridged_ring", terms(*rows))
    for rank in range(4):
        for op in found.schedule.program(rank).channels[0]:
            assert op.peer < 0 or any(map(min, rows[rank], rows[op.peer]))
    assert not list(candidates("bridged_ring", terms((16, 0), (0, 16)))), "there is no such ring"


@pytest.mark.parametrize("name", ["r2cc", "optcc"])
def test_what_spares_one_straggler_needs_one(name: str) -> None:
    assert not list(candidates(name, terms(WHOLE, WHOLE, WHOLE)))
    (found,) = candidates(name, terms(WHOLE, LOST, WHOLE, WHOLE))
    assert found.schedule.cost.sent < Fraction(3)
