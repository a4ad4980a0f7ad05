"""Packed trees: right for any bandwidths, near the lower bound, flat."""

from __future__ import annotations

from fractions import Fraction
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r2ccl.algos import packed_trees, tree
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure

bandwidths = st.lists(st.integers(1, 16), min_size=1, max_size=24)


def load(trees: list[tree.Tree], of: list[int]) -> Fraction:
    """Time the busiest node takes for one unit of data."""
    n = len(of)
    sums = [sum(each.degree(node) for each in trees) for node in range(n)]
    return max(Fraction(sums[node], len(trees) * of[node]) for node in range(n))


@settings(deadline=None)
@given(bandwidths)
def test_degrees_are_those_of_a_tree_and_follow_bandwidth(of: list[int]) -> None:
    n = len(of)
    found = packed_trees.degrees(of)
    if n == 1:
        assert found == (0,)
        return
    assert sum(found) == 2 * (n - 1)
    assert all(1 <= each <= n - 1 for each in found)
    level = {d / b for d, b in zip(found, of, strict=True) if 1 < d < n - 1}
    assert len(level) <= 1, "those between the limits are in proportion"
    if level:
        (theta,) = level
        assert all(theta * b <= 1 for d, b in zip(found, of, strict=True) if d == 1)
        assert all(theta * b >= n - 1 for d, b in zip(found, of, strict=True) if d == n - 1)


@settings(deadline=None, max_examples=60)
@given(bandwidths, st.integers(1, 30))
def test_all_edges_are_dealt_to_whom_they_belong(of: list[int], ntrees: int) -> None:
    trees = [tree.grow(each) for each in packed_trees.pack(of, ntrees)]
    wanted = packed_trees.degrees(of)
    for node, mean in enumerate(wanted):
        assert abs(sum(each.degree(node) for each in trees) - ntrees * mean) < 1


def test_edges_of_many_nodes_are_dealt_in_a_time_per_edge() -> None:
    """Every edge was a search among all nodes: 2 s with 512 nodes of 8 rails, 8 s with 1,024."""
    times = []
    for n in (200, 3200):
        tries = []
        for _ in range(3):  # the machine, or a garbage collection, may slow one down
            began_s = process_time()
            packed_trees.pack([112, *[128] * (n - 1)], 6)
            packed_trees.pack_rooted([7, *[8] * (n - 1)], 6, 1)
            tries.append(process_time() - began_s)
        times.append(min(tries))
    assert times[1] < 80 * times[0], "16 times the nodes; 256 times the searches"


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 8))
def test_edges_are_dealt_to_the_nodes_that_lag_most(of: list[int], ntrees: int) -> None:
    sums = packed_trees._round([ntrees * each for each in packed_trees.degrees(of)])
    extra = [each - ntrees for each in sums]
    left, nodd, nsingles, n = list(extra), sum(each % 2 for each in extra), 0, len(of)
    for turn, row in enumerate(packed_trees._deal(sums, ntrees), 1):
        single = nodd * turn // ntrees - nsingles
        single += (n - single) % 2
        nsingles += single
        found, missing = [1] * n, n - 2
        while missing:
            is_pair = missing > single
            fit = [v for v in range(n) if (left[v] > 1 if is_pair else left[v] % 2)]
            fit = fit or [v for v in range(n) if left[v]]
            lags = [((left[v] - extra[v]) * ntrees + extra[v] * turn, -v) for v in fit]
            node = -max(lags)[1]
            number = min(2 if is_pair else 1, left[node], missing)
            left[node] -= number
            found[node] += number
            missing -= number
        assert row == found


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=10), st.integers(1, 8))
def test_packed_trees_are_accepted(of: list[int], ntrees: int) -> None:
    schedule = packed_trees.allreduce(of, ntrees)
    check(schedule)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize("n", [4, 8, 16, 64])
@pytest.mark.parametrize("lost", [0, 3, 6, 8, 12, 18])
def test_the_load_is_near_the_bound_and_the_trees_are_flat(n: int, lost: int) -> None:
    of = [24 - lost, *[24] * (n - 1)]
    trees = [tree.grow(each) for each in packed_trees.pack(of, 28)]
    assert load(trees, of) <= Fraction(102, 100) * packed_trees.lower_bound(of)
    # Three edges at most inner nodes: as flat as a binary tree.
    assert max(each.heights[each.root] for each in trees) <= (n - 1).bit_length()


def test_a_node_with_little_left_is_a_leaf() -> None:
    trees = [tree.grow(each) for each in packed_trees.pack([1, 8, 8, 8, 8], 12)]
    assert all(each.degree(0) == 1 for each in trees)


@pytest.mark.parametrize(
    ("of", "bound"),
    [
        ([7], 0),
        ([1, 1], 1),
        ([4, 4, 4, 4], Fraction(3, 8)),
        ([1, 4, 4, 4], 1),
        ([3, 4], Fraction(1, 3)),
    ],
)
def test_the_bound(of: list[int], bound: Fraction) -> None:
    assert packed_trees.lower_bound(of) == bound


def test_neighbours_share_a_rail() -> None:
    rails = [{0}, {1}, {0, 1}, {0, 1}, {0}]

    def reach(a: int, b: int) -> bool:
        return bool(rails[a] & rails[b])

    for each in packed_trees.pack([1, 1, 2, 2, 1], 10, reach):
        assert all(parent < 0 or reach(node, parent) for node, parent in enumerate(each))
        tree.grow(each)


def test_nodes_without_a_common_rail_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"nodes \[1\] share no rail with any of \[0, 2\]"):
        packed_trees.pack([1, 1, 1], 2, lambda a, b: 1 not in (a, b))


@pytest.mark.parametrize("of", [[], [1, 0], [-1]])
def test_a_node_without_bandwidth_is_refused(of: list[int]) -> None:
    for call in (packed_trees.lower_bound, packed_trees.degrees):
        with pytest.raises(InvalidArgument, match="above 0"):
            call(of)


def test_there_is_a_tree() -> None:
    with pytest.raises(InvalidArgument, match="ntrees=0"):
        packed_trees.pack([1, 1], 0)
