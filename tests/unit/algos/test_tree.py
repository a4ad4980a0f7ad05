"""Trees: right for every number of ranks, as flat and as evenly shared as they claim."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import strategies as st
from support.slow import given

from r2ccl.algos import tree
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule


@st.composite
def parents(draw: st.DrawFn) -> tree.Parents:
    """Any tree of 1 to 12 ranks, numbered at random."""
    n = draw(st.integers(1, 12))
    order = draw(st.permutations(range(n)))
    found = [-1] * n
    for at in range(1, n):
        found[order[at]] = order[draw(st.integers(0, at - 1))]
    return tuple(found)


def require_sound(schedule: Schedule) -> None:
    check(schedule)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize("n", [*range(1, 20), 31, 32, 33, 64])
def test_double_binary_trees_are_accepted(n: int) -> None:
    require_sound(tree.allreduce(tree.double_binary(n)))


@pytest.mark.parametrize("n", range(2, 70))
def test_double_binary_trees_are_flat_and_share_the_work(n: int) -> None:
    trees = [tree.grow(each) for each in tree.double_binary(n)]
    assert all(each.heights[each.root] <= n.bit_length() for each in trees)
    assert all(len(children) <= 2 for each in trees for children in each.children)
    # Of half the data each: twice the data is the most any rank sends.
    assert max(sum(each.degree(rank) for each in trees) for rank in range(n)) <= 4


@given(20, 60, parents())
def test_any_tree_reduces_broadcasts_and_does_both(one: tree.Parents) -> None:
    for make in (tree.allreduce, tree.reduce, tree.broadcast):
        require_sound(make([one]))


@given(15, 30, parents(), st.integers(0, 50))
def test_trees_sum(one: tree.Parents, count: int) -> None:
    inputs = [np.arange(count, dtype=np.int64) * (rank + 1) for rank in range(len(one))]
    for result in interpret(tree.allreduce([one, one]), inputs, np.add):
        np.testing.assert_array_equal(result, sum(inputs))


def test_roots_are_those_of_the_tree() -> None:
    schedule = tree.broadcast([(1, -1, 1), (2, -1, 1)])
    assert schedule.root == 1
    require_sound(schedule)
    inputs = [np.full(6, rank) for rank in range(3)]
    for result in interpret(schedule, inputs, np.add):
        assert (result == 1).all()


def test_lower_subtrees_come_first() -> None:
    grown = tree.grow((-1, 0, 0, 1, 3))
    assert grown.children[0] == (2, 1)
    assert grown.heights == (3, 2, 0, 1, 0)
    assert [grown.degree(rank) for rank in range(5)] == [2, 2, 1, 2, 1]


def test_a_chain_is_a_tree() -> None:
    assert tree.chain([2, 0, 1]) == (2, 0, -1)


def test_the_cost_is_that_of_the_busiest_rank() -> None:
    star = tree.allreduce([(-1, 0, 0, 0)])
    assert (star.cost.steps, star.cost.sent, star.cost.ops) == (2, Fraction(3), 6)


@pytest.mark.parametrize("wrong", [(), (0,), (-1, -1), (1, 0), (-1, 2, 1), (-1, 5)])
def test_what_is_no_tree_is_refused(wrong: tree.Parents) -> None:
    with pytest.raises(InvalidArgument, match="exactly one rank, which is the root"):
        tree.allreduce([wrong])


@pytest.mark.parametrize("nranks", [0, -1])
def test_there_is_no_double_tree_without_ranks(nranks: int) -> None:
    with pytest.raises(InvalidArgument, match=f"nranks={nranks}; give 1 or more"):
        tree.double_binary(nranks)


@pytest.mark.parametrize("trees", [[], [(-1,), (-1, 0)]])
def test_trees_are_of_the_same_ranks(trees: list[tree.Parents]) -> None:
    with pytest.raises(InvalidArgument, match="all with the same number of ranks"):
        tree.allreduce(trees)


@pytest.mark.parametrize("make", [tree.broadcast, tree.reduce])
def test_a_rooted_collective_has_one_root(make: object) -> None:
    with pytest.raises(InvalidArgument, match="give trees with one common root"):
        make([(-1, 0), (1, -1)])  # type: ignore[operator]
