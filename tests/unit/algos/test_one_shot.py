"""One shot: a single step, and the same order of additions on every rank all the same."""

from __future__ import annotations

import numpy as np
import pytest
from support.slow import slow_but

from r2ccl.algos import one_shot
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret

SIZES = slow_but(range(1, 9), [*range(1, 14), 32, 64])


@pytest.mark.parametrize("n", SIZES)
def test_it_is_accepted_and_costs_what_it_says(n: int) -> None:
    schedule = one_shot.allreduce(n, 2 if n < 32 else 1)
    check(schedule)
    assert measure(schedule) == schedule.cost
    assert schedule.cost.steps == (n > 1)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_every_rank_adds_up_from_the_highest_rank_down(n: int, in_place: bool) -> None:
    inputs = [np.array([str(rank)], object) for rank in range(n)]
    outputs = interpret(
        one_shot.allreduce(n), inputs, lambda left, right: "(" + left + right + ")", in_place
    )
    expected = str(n - 1)
    for rank in range(n - 2, -1, -1):
        expected = f"({expected}{rank})"
    assert [output[0] for output in outputs] == [expected] * n


@pytest.mark.parametrize("n", SIZES)
def test_every_rank_gets_the_sum(n: int) -> None:
    inputs = [np.random.default_rng(rank).integers(-999, 999, 5) for rank in range(n)]
    for output in interpret(one_shot.allreduce(n), inputs, np.add):
        np.testing.assert_array_equal(output, sum(inputs))


def test_average_divides_exactly_once() -> None:
    inputs = [np.full(3, 2.0**rank) for rank in range(4)]
    outputs = interpret(one_shot.allreduce(4), inputs, np.add, finish=lambda chunk: chunk / 4)
    assert all((output == 15 / 4).all() for output in outputs)


@pytest.mark.parametrize(("n", "nchannels"), [(0, 1), (-3, 1), (2, 0)])
def test_sizes_below_one_are_refused(n: int, nchannels: int) -> None:
    with pytest.raises(InvalidArgument):
        one_shot.allreduce(n, nchannels)
