"""Bridged ring: neighbours share a rail wherever enough nodes do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from r2ccl.algos import bridged_ring, ring
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret


def shares_rail(rails: list[set[int]]) -> bridged_ring.Reach:
    return lambda a, b: bool(rails[a] & rails[b])


@settings(deadline=None)
@given(st.lists(st.sampled_from([{0}, {1}, {0, 1}]), min_size=3, max_size=20))
def test_nodes_with_both_rails_separate_nodes_that_lost_either(
    rails: list[set[int]],
) -> None:
    n = len(rails)
    reach = shares_rail(rails)
    degrees = [sum(reach(a, b) for b in range(n) if b != a) for a in range(n)]
    strangers = [(a, b) for a in range(n) for b in range(a) if not reach(a, b)]
    assume(all(degrees[a] + degrees[b] >= n for a, b in strangers))
    order = bridged_ring.bridge(range(n), reach)
    assert sorted(order) == list(range(n))
    assert order[0] == 0
    assert all(reach(order[at - 1], order[at]) for at in range(n))


def test_an_order_without_gaps_stays() -> None:
    assert bridged_ring.bridge((3, 1, 0, 2), lambda a, b: True) == (3, 1, 0, 2)


def test_a_gap_is_closed_by_turning_a_piece_around() -> None:
    rails = [{0}, {1}, {0, 1}, {0, 1}, {0, 1}]
    assert bridged_ring.bridge(range(5), shares_rail(rails)) == (0, 2, 1, 3, 4)


def test_the_allreduce_is_a_ring_in_that_order() -> None:
    rails = [{0}, {1}, {0, 1}, {0, 1}, {0, 1}]
    schedule = bridged_ring.allreduce(5, 2, shares_rail(rails))
    check(schedule)
    assert measure(schedule) == schedule.cost == ring.allreduce(5, 2).cost
    inputs = [np.full(20, 10**rank) for rank in range(5)]
    for output in interpret(schedule, inputs, np.add):
        assert (output == 11111).all()
    peers = {op.peer for rank in (0, 1) for ops in schedule.program(rank).channels for op in ops}
    assert not peers & {0, 1}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_nodes(n: int) -> None:
    assert bridged_ring.bridge(range(n), lambda a, b: True) == tuple(range(n))


@pytest.mark.parametrize("n", [2, 3, 4, 9])
def test_nodes_that_reach_nobody_are_named(n: int) -> None:
    with pytest.raises(InvalidArgument, match=f"no ring of {n} nodes was .* nodes .*0 .*share no"):
        bridged_ring.bridge(range(n), lambda a, b: 0 not in (a, b))


def test_nobody_needs_no_ring() -> None:
    assert bridged_ring.bridge((), lambda a, b: True) == ()
