"""Hierarchy: any allreduce among nodes becomes one among all their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from support.schedules import float_results

from r2ccl.algos import (
    dissemination,
    hierarchy,
    leaf_ring,
    nested_rings,
    one_shot,
    optcc,
    packed_trees,
    r2cc_allreduce,
    recursive_doubling,
    ring,
    tree,
)
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule

Inner = Callable[[int], Schedule]


def straggling(n: int) -> list[int]:
    return [3, *[4] * (n - 1)]


INNERS: dict[str, Inner] = {
    "dissemination": lambda n: dissemination.allreduce(n, 2),
    "leaf_ring": lambda n: leaf_ring.allreduce(straggling(n), 4),
    "nested_rings": lambda n: nested_rings.allreduce(straggling(n), 2),
    "one_shot": one_shot.allreduce,
    "optcc": lambda n: optcc.allreduce(straggling(n), 3),
    "packed_trees": lambda n: packed_trees.allreduce(straggling(n), 3),
    "r2cc": lambda n: r2cc_allreduce.allreduce(straggling(n), 2, Fraction(1, 2)),
    "recursive_doubling": lambda n: recursive_doubling.allreduce(n, 2),
    "ring": lambda n: ring.allreduce(n, 3),
    "tree": lambda n: tree.allreduce(tree.double_binary(n)),
}

#: One node, many; nodes of one rank, of many, of different numbers; ranks in turns.
NODES = [
    [(0,)],
    [(0, 1, 2)],
    [(0,), (1,), (2,)],
    [(0, 1), (2, 3)],
    [(0, 1, 2), (3,), (4, 5)],
    [(0, 3, 6), (1, 4, 7), (2, 5, 8)],
    [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)],
]


@pytest.mark.parametrize("members", NODES, ids=str)
@pytest.mark.parametrize("name", INNERS)
def test_any_allreduce_on_any_nodes(name: str, members: Sequence[Sequence[int]]) -> None:
    inner = INNERS[name](len(members))
    schedule = hierarchy.wrap(inner, members)
    check(schedule)
    assert measure(schedule) == schedule.cost
    nranks = schedule.nranks
    inputs = [np.random.default_rng(rank).integers(-999, 999, 150) for rank in range(nranks)]
    for in_place in (False, True):
        for output in interpret(schedule, inputs, np.add, in_place):
            np.testing.assert_array_equal(output, sum(inputs))


@pytest.mark.parametrize("name", INNERS)
def test_it_adds_one_message_up_and_one_down(name: str) -> None:
    inner = INNERS[name](4)
    schedule = hierarchy.wrap(inner, [(0, 1), (2, 3), (4, 5), (6, 7)])
    assert schedule.cost.steps == inner.cost.steps + 2
    assert schedule.weights == inner.weights


def test_members_take_turns_in_leading() -> None:
    """Four channels, four members: each sends as much to the others, and gets as much from them."""
    schedule = hierarchy.wrap(ring.allreduce(2, 4), [(0, 1, 2, 3), (4, 5, 6, 7)])
    inside = 2 * Fraction(3, 4)
    between = Fraction(1, 4)
    assert (schedule.cost.sent, schedule.cost.received) == (inside + between, inside + between)


def test_leaders_alone_talk_to_other_nodes() -> None:
    members = [(0, 1, 2), (3, 4, 5)]
    schedule = hierarchy.wrap(ring.allreduce(2, 3), members)
    for rank in range(6):
        for channel, ops in enumerate(schedule.program(rank).channels):
            away = {op.peer for op in ops if op.peer >= 0 and op.peer // 3 != rank // 3}
            leads = rank % 3 == channel
            assert away == ({(rank + 3) % 6} if leads else set())


@pytest.mark.parametrize("members", NODES, ids=str)
def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes(
    members: Sequence[Sequence[int]],
) -> None:
    schedule = hierarchy.wrap(recursive_doubling.allreduce(len(members), 2), members)
    assert len(float_results(schedule)) == 1


def test_only_an_allreduce_can_be_wrapped() -> None:
    with pytest.raises(InvalidArgument, match="hierarchy of 'allgather'"):
        hierarchy.wrap(ring.allgather(2), [(0,), (1,)])


@pytest.mark.parametrize(
    "members", [[(0, 1)], [(0,), ()], [(0,), (0,)], [(0,), (2,)], [(0, 1), (2,), (3,)]]
)
def test_every_rank_is_on_one_node(members: list[tuple[int, ...]]) -> None:
    with pytest.raises(InvalidArgument, match="the ranks of each of 2 nodes"):
        hierarchy.wrap(ring.allreduce(2), members)


@pytest.mark.parametrize("members", [[(2, 3), (0, 1)], [(0, 2, 4), (1, 3)]])
def test_leaders_are_in_the_order_of_their_nodes(members: list[tuple[int, ...]]) -> None:
    with pytest.raises(InvalidArgument, match="must ascend from node to node"):
        hierarchy.wrap(ring.allreduce(2, 3), members)


def test_members_lead_in_the_order_given() -> None:
    schedule = hierarchy.wrap(ring.allreduce(2, 2), [(1, 0), (2, 3)])
    check(schedule)
    assert {op.peer for op in schedule.program(1).channels[0]} == {0, 2}
