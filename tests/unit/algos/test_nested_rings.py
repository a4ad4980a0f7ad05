"""Nested rings: exactly the lower bound, for any bandwidths."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow
from support.schedules import float_results

from r2ccl.algos import nested_rings, packed_trees
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret

bandwidths = st.lists(st.integers(1, 8), min_size=1, max_size=8)


@slow.given(15, 40, bandwidths, st.integers(1, 3), st.integers(1, 2), st.randoms())
def test_any_bandwidths_are_accepted(
    of: list[int], nsegments: int, nchannels: int, order: object
) -> None:
    places = list(range(len(of)))
    order.shuffle(places)  # type: ignore[attr-defined]
    schedule = nested_rings.allreduce(of, nsegments, nchannels, places)
    check(schedule)
    assert measure(schedule) == schedule.cost


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_all_nodes_together_take_the_lower_bound(of: list[int]) -> None:
    n = len(of)
    ntransfers = [Fraction(0)] * n
    shares = Fraction(0)
    for core, share in nested_rings.rings(of):
        assert share >= 0
        shares += share
        for node in range(n):
            ntransfers[node] += share * (
                Fraction(n + len(core) - 2, len(core)) if node in core else 1
            )
    assert shares == 1
    assert max(ntransfers[node] / of[node] for node in range(n)) == packed_trees.lower_bound(of)


@pytest.mark.parametrize("of", [[3], [3, 3, 3], [2, 1], [4, 4, 3], [1, 2, 3, 4], [1, 8, 8, 8, 8]])
def test_the_busiest_node_carries_its_bandwidth_times_the_bound(of: list[int]) -> None:
    cost = nested_rings.allreduce(of, 2).cost
    bound = packed_trees.lower_bound(of)
    assert cost.sent == cost.received
    assert cost.sent <= max(of) * bound


@settings(deadline=None, max_examples=20)
@given(bandwidths, st.booleans())
def test_every_rank_gets_the_sum(of: list[int], in_place: bool) -> None:
    inputs = [np.random.default_rng(rank).integers(-999, 999, 300) for rank in range(len(of))]
    for output in interpret(nested_rings.allreduce(of, 2), inputs, np.add, in_place):
        np.testing.assert_array_equal(output, sum(inputs))


def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes() -> None:
    assert len(float_results(nested_rings.allreduce([3, 8, 6, 8, 6, 4], 3))) == 1


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (1, 2, 3)])
def test_an_order_is_one_of_all_nodes(order: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="a permutation of 0 to 2"):
        nested_rings.allreduce([1, 2, 3], order=order)


@pytest.mark.parametrize(("nsegments", "nchannels"), [(0, 1), (1, 0)])
def test_numbers_below_one_are_refused(nsegments: int, nchannels: int) -> None:
    with pytest.raises(InvalidArgument):
        nested_rings.allreduce([3, 4, 4], nsegments, nchannels)
