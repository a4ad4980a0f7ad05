"""Dissemination: a ring's bytes in a logarithmic number of steps, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from support.schedules import float_results
from support.slow import slow_but

from r2ccl.algos import dissemination
from r2ccl.errors import InvalidArgument
from r2ccl.planning.edge_loads import carried, flows_of, flows_of_dissemination
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule

SIZES = slow_but(range(1, 10), [*range(1, 20), 31, 32, 33, 64])


MAKERS = [dissemination.allreduce, dissemination.allgather, dissemination.reduce_scatter]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("n", SIZES)
def test_it_is_accepted_and_costs_what_it_says(n: int, make: Callable[..., Schedule]) -> None:
    schedule = make(n, 2)
    check(schedule)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_parts_are_gathered_and_scattered(n: int, in_place: bool) -> None:
    inputs = [np.random.default_rng(rank).integers(-999, 999, 6 * n) for rank in range(n)]
    mine = [slice(6 * rank, 6 * (rank + 1)) for rank in range(n)]
    outputs = interpret(dissemination.reduce_scatter(n, 2), inputs, np.add, in_place)
    for part, output in zip(mine, outputs, strict=True):
        np.testing.assert_array_equal(output[part], sum(inputs)[part])
    whole = np.concatenate([each[part] for part, each in zip(mine, inputs, strict=True)])
    for output in interpret(dissemination.allgather(n, 2), inputs, np.add, in_place):
        np.testing.assert_array_equal(output, whole)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("n", [2, 3, 5, 8, 11])
def test_the_flows_are_those_of_the_ops(n: int, make: Callable[..., Schedule]) -> None:
    schedule = make(n, 3)
    gathers = schedule.collective != "reduce_scatter"
    scatters = schedule.collective != "allgather"
    known = flows_of_dissemination(n, 3, gathers=gathers, scatters=scatters)
    assert carried(known) == carried(flows_of(schedule))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_every_rank_gets_the_sum(n: int, in_place: bool) -> None:
    inputs = [np.random.default_rng(rank).integers(-999, 999, 3 * n + 1) for rank in range(n)]
    for output in interpret(dissemination.allreduce(n, 2), inputs, np.add, in_place):
        np.testing.assert_array_equal(output, sum(inputs))


@pytest.mark.parametrize("n", [2, 3, 6, 8, 13])
def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes(n: int) -> None:
    assert len(float_results(dissemination.allreduce(n))) == 1


@pytest.mark.parametrize(
    ("n", "steps", "share"),
    [
        (1, 0, Fraction(0)),
        (2, 2, Fraction(1)),
        (3, 2, Fraction(4, 3)),
        (8, 6, Fraction(7, 4)),
        (9, 6, Fraction(16, 9)),
        (64, 12, Fraction(63, 32)),
    ],
)
def test_the_cost_is_logarithmic_in_steps_and_a_rings_in_bytes(
    n: int, steps: int, share: Fraction
) -> None:
    cost = dissemination.allreduce(n).cost
    assert (cost.steps, cost.sent, cost.received) == (steps, share, share)


@pytest.mark.parametrize(("n", "nchannels"), [(0, 1), (-3, 1), (2, 0)])
def test_sizes_below_one_are_refused(n: int, nchannels: int) -> None:
    with pytest.raises(InvalidArgument):
        dissemination.allreduce(n, nchannels)
