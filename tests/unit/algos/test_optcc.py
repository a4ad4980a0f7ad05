"""OptCC: right for any number of ranks and segments, with the loads that were published."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from support.schedules import float_results
from support.slow import slow_but

from r2ccl.algos import optcc
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure, wire_nbytes
from r2ccl.schedule.interpret import interpret

CASES = list(product(range(1, 11), (1, 2, 3, 4, 7)))


@pytest.mark.parametrize(
    ("n", "nsegments"), slow_but([*(case for case in CASES if case[0] < 6), (8, 3)], CASES)
)
def test_it_is_accepted_and_costs_what_it_says(n: int, nsegments: int) -> None:
    for straggler in {0, n // 2, n - 1}:
        of = [2] * n
        of[straggler] = 1
        schedule = optcc.allreduce(of, nsegments)
        check(schedule)
        assert measure(schedule) == schedule.cost


@pytest.mark.parametrize(("n", "nsegments"), slow_but([(16, 6)], [(16, 6), (33, 3), (64, 2)]))
def test_many_ranks(n: int, nsegments: int) -> None:
    schedule = optcc.allreduce([1, *[2] * (n - 1)], nsegments)
    check(schedule)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_rank_gets_the_sum(n: int, in_place: bool) -> None:
    inputs = [np.random.default_rng(rank).integers(-999, 999, 200) for rank in range(n)]
    for output in interpret(optcc.allreduce([2] * (n - 1) + [1], 5), inputs, np.add, in_place):
        np.testing.assert_array_equal(output, sum(inputs))


@pytest.mark.parametrize("straggler", range(5))
def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes(straggler: int) -> None:
    of = [2] * 5
    of[straggler] = 1
    assert len(float_results(optcc.allreduce(of, 4))) == 1


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_the_straggler_sends_the_data_once_others_share_the_rest(n: int) -> None:
    of = [2] * n
    of[1] = 1
    schedule = optcc.allreduce(of, 4)
    count = schedule.nchunks[0] << 12
    for found in wire_nbytes(schedule, count, 1):
        shares = [Fraction(int(each), count) for each in found]
        assert shares.pop(1) == 1
        assert set(shares) == {Fraction(2 * n - 3, n - 1)}


@pytest.mark.parametrize(("nsegments", "nchannels"), [(0, 1), (1, 0)])
def test_numbers_below_one_are_refused(nsegments: int, nchannels: int) -> None:
    with pytest.raises(InvalidArgument, match="give 1 or more"):
        optcc.allreduce([3, 4, 4], nsegments, nchannels)
