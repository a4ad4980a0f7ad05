"""Direct exchanges: one message per part; tree gathers: parts forwarded to and from the root."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.slow import slow_but

from r2ccl.algos import direct_exchange, tree_gather
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule

SIZES = slow_but(range(1, 9), [*range(1, 17), 33])


def some_tree(n: int, root: int) -> tuple[int, ...]:
    """Return a random tree of `n` ranks."""
    draw = random.Random(n * 100 + root)
    order = [root, *draw.sample([rank for rank in range(n) if rank != root], n - 1)]
    parents = [-1] * n
    for place, rank in enumerate(order[1:], 1):
        parents[rank] = draw.choice(order[:place])
    return tuple(parents)


def gathers(n: int, root: int) -> list[Schedule]:
    binomial, other = tree_gather.binomial(n, root), some_tree(n, root)
    return [
        direct_exchange.gather(n, root, 2),
        tree_gather.gather(binomial, 2),
        tree_gather.gather(other, 2, "tree"),
    ]


def scatters(n: int, root: int) -> list[Schedule]:
    binomial, other = tree_gather.binomial(n, root), some_tree(n, root)
    return [
        direct_exchange.scatter(n, root, 2),
        tree_gather.scatter(binomial, 2),
        tree_gather.scatter(other, 2, "tree"),
    ]


@pytest.mark.parametrize("n", SIZES)
def test_they_are_accepted_and_cost_what_they_say(n: int) -> None:
    made = [direct_exchange.alltoall(n, 2)]
    for root in {0, n // 2, n - 1}:
        made += gathers(n, root) + scatters(n, root)
    for schedule in made:
        check(schedule)
        assert measure(schedule) == schedule.cost, schedule.name


@pytest.mark.parametrize("n", SIZES)
def test_part_k_goes_k_ranks_further(n: int) -> None:
    inputs = [100 * rank + np.arange(n) for rank in range(n)]
    outputs = interpret(direct_exchange.alltoall(n, 2), inputs, np.add)
    for rank, output in enumerate(outputs):
        assert output.tolist() == [100 * ((rank - k) % n) + k for k in range(n)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_the_root_gathers_and_scatters_all_parts(n: int, in_place: bool) -> None:
    inputs = [100 * rank + np.arange(6 * n) for rank in range(n)]
    for root in {0, n - 1}:
        for schedule in gathers(n, root):
            output = interpret(schedule, inputs, np.add, in_place)[root].reshape(n, 6)
            for rank in range(n):
                np.testing.assert_array_equal(output[rank], inputs[rank].reshape(n, 6)[rank])
        for schedule in scatters(n, root):
            for rank, output in enumerate(interpret(schedule, inputs, np.add, in_place)):
                np.testing.assert_array_equal(
                    output.reshape(n, 6)[rank], inputs[root].reshape(n, 6)[rank]
                )


@pytest.mark.parametrize(("n", "height"), [(1, 0), (2, 1), (3, 1), (4, 2), (8, 3), (9, 3), (64, 6)])
def test_a_binomial_tree_is_flat_and_its_edges_are_powers_of_two(n: int, height: int) -> None:
    parents = tree_gather.binomial(n, n - 1)
    assert tree_gather.gather(parents).cost.steps == height
    distances = [(rank - up) % n for rank, up in enumerate(parents) if up >= 0]
    assert all(distance & (distance - 1) == 0 for distance in distances)


def test_sizes_and_roots_out_of_range_are_refused() -> None:
    for make in (direct_exchange.alltoall, direct_exchange.gather, direct_exchange.scatter):
        with pytest.raises(InvalidArgument):
            make(0)
    with pytest.raises(InvalidArgument, match="root=3"):
        tree_gather.binomial(3, 3)
    with pytest.raises(InvalidArgument, match="nranks=0"):
        tree_gather.binomial(0)
    with pytest.raises(InvalidArgument, match="root=4"):
        direct_exchange.gather(4, 4)
    with pytest.raises(InvalidArgument, match="weights"):
        direct_exchange.alltoall(3, 0)
