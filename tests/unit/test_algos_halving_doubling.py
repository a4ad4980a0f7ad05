"""Halving-doubling: a ring's bytes in a logarithmic number of steps, for any number of ranks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from r2ccl.algos import halving_doubling
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret

SIZES = [*range(1, 20), 31, 32, 33, 64]


@pytest.mark.parametrize("n", SIZES)
def test_it_is_accepted_and_costs_what_it_says(n: int) -> None:
    schedule = halving_doubling.allreduce(n, 2)
    check(schedule)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_every_rank_gets_the_sum(n: int, in_place: bool) -> None:
    inputs = [np.random.default_rng(rank).integers(-999, 999, 3 * n + 1) for rank in range(n)]
    for output in interpret(halving_doubling.allreduce(n, 2), inputs, np.add, in_place):
        np.testing.assert_array_equal(output, sum(inputs))


@pytest.mark.parametrize("n", [2, 3, 6, 8, 13])
def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes(n: int) -> None:
    inputs = [
        (np.random.default_rng(rank).standard_normal(101) * 10.0 ** (rank % 7)).astype(np.float32)
        for rank in range(n)
    ]
    schedule = halving_doubling.allreduce(n)
    results = {
        output.tobytes()
        for in_place in (False, True)
        for output in interpret(schedule, inputs, np.add, in_place)
    }
    assert len(results) == 1


@pytest.mark.parametrize(
    ("n", "steps", "share"),
    [
        (1, 0, Fraction(0)),
        (2, 2, Fraction(1)),
        (3, 4, Fraction(2)),
        (8, 6, Fraction(7, 4)),
        (9, 8, Fraction(11, 4)),
        (64, 12, Fraction(63, 32)),
    ],
)
def test_the_cost_is_logarithmic_in_steps_and_a_rings_in_bytes(
    n: int, steps: int, share: Fraction
) -> None:
    cost = halving_doubling.allreduce(n).cost
    assert (cost.steps, cost.sent, cost.received) == (steps, share, share)


@pytest.mark.parametrize(("n", "nchannels"), [(0, 1), (-3, 1), (2, 0)])
def test_sizes_below_one_are_refused(n: int, nchannels: int) -> None:
    with pytest.raises(InvalidArgument):
        halving_doubling.allreduce(n, nchannels)
