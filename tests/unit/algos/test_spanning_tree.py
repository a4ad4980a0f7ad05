"""Schedules over one spanning tree: right for every shape, and only neighbours talk."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from support.slow import given

from r2ccl.algos import spanning_tree, tree
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.ir import Schedule


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    n = draw(st.integers(1, 9))
    return [-1, *(draw(st.integers(0, rank - 1)) for rank in range(1, n))]


def talk_over(schedule: Schedule, parents: list[int]) -> bool:
    return all(
        op.peer < 0 or op.peer == parents[rank] or parents[op.peer] == rank
        for rank in range(schedule.nranks)
        for ops in schedule.program(rank).channels
        for op in ops
    )


@given(15, 40, trees(), st.integers(1, 3))
def test_every_tree_carries_every_collective(parents: list[int], nchannels: int) -> None:
    for make in (spanning_tree.allgather, spanning_tree.reduce_scatter):
        schedule = make(parents, nchannels)
        check(schedule)
        assert schedule.cost == measure(schedule)
        assert talk_over(schedule, parents)
        assert schedule.cost.steps == diameter(parents)


def diameter(parents: list[int]) -> int:
    """Return the number of edges between the two ranks that are furthest apart."""
    above = [{rank: 0} for rank in range(len(parents))]
    for rank, parent in enumerate(parents):
        while parent >= 0:
            above[rank][parent] = len(above[rank])
            parent = parents[parent]
    return max(
        min(one[rank] + other[rank] for rank in one.keys() & other.keys())
        for one in above
        for other in above
    )


@given(30, 60, st.integers(1, 10), st.integers(0, 999))
def test_a_tree_is_found_wherever_there_is_one(n: int, seed: int) -> None:
    rng = random.Random(seed)
    edges = {frozenset((rank, rng.randrange(rank))) for rank in range(1, n)}
    edges |= {frozenset(rng.choices(range(n), k=2)) for _ in range(rng.randrange(n))}
    root = rng.randrange(n)
    parents = spanning_tree.span(n, lambda a, b: frozenset((a, b)) in edges, root)
    assert parents[root] == -1
    assert all(p < 0 or frozenset((rank, p)) in edges for rank, p in enumerate(parents))
    tree.grow(parents)


def test_where_all_reach_each_other_it_is_binary() -> None:
    found = tree.grow(spanning_tree.span(15, lambda a, b: True, root=3))
    assert found.heights[3] == 3


def test_ranks_that_nobody_reaches_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"ranks \[2\] share no rail with any of \[0, 1\]"):
        spanning_tree.span(3, lambda a, b: 2 not in (a, b))


@pytest.mark.parametrize(
    ("nranks", "root", "why"),
    [(3, 5, "root=5; allowed is 0 to 2"), (3, -1, "root=-1"), (0, 0, "nranks=0; give 1 or more")],
)
def test_a_root_that_is_no_rank_is_refused(nranks: int, root: int, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        spanning_tree.span(nranks, lambda a, b: True, root)
