"""R2CC-AllReduce: whole sums, and the time its authors' model gives."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from support.schedules import float_results
from support.slow import slow_but

from r2ccl.algos import r2cc_allreduce
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret

SHARES = [None, Fraction(0), Fraction(1, 3), Fraction(1)]
CASES = list(product(range(1, 9), (1, 2, 5), SHARES))


@pytest.mark.parametrize(
    ("n", "nchunks", "share"),
    slow_but([*(case for case in CASES if case[0] < 5), (7, 2, Fraction(1, 3))], CASES),
)
def test_it_is_accepted_and_costs_what_it_says(
    n: int, nchunks: int, share: Fraction | None
) -> None:
    for straggler in {0, n // 2, n - 1}:
        of = [4] * n
        of[straggler] = 3
        schedule = r2cc_allreduce.allreduce(of, nchunks, share, (1, 2))
        check(schedule)
        assert measure(schedule) == schedule.cost


@pytest.mark.parametrize(("n", "nchunks"), slow_but([(16, 4)], [(16, 4), (33, 2), (64, 1)]))
def test_many_ranks(n: int, nchunks: int) -> None:
    schedule = r2cc_allreduce.allreduce([3, *[4] * (n - 1)], nchunks, Fraction(1, 4))
    check(schedule)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_rank_gets_the_sum(n: int, in_place: bool) -> None:
    inputs = [np.random.default_rng(rank).integers(-999, 999, 200) for rank in range(n)]
    schedule = r2cc_allreduce.allreduce([2] * (n - 1) + [1], 3, Fraction(1, 2))
    for output in interpret(schedule, inputs, np.add, in_place):
        np.testing.assert_array_equal(output, sum(inputs))


@pytest.mark.parametrize("straggler", range(5))
def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes(straggler: int) -> None:
    of = [2] * 5
    of[straggler] = 1
    assert len(float_results(r2cc_allreduce.allreduce(of, 4, Fraction(1, 2)))) == 1


@pytest.mark.parametrize(
    ("nchunks", "ratio"), [(1, "1.6"), (2, "1.45"), (4, "1.375"), (8, "1.3375"), (16, "1.31875")]
)
def test_the_model_gives_the_published_figures(nchunks: int, ratio: str) -> None:
    """Six ranks in one ring, a third of one's bandwidth lost; against a ring without a failure."""
    lost = Fraction(1, 3)
    assert r2cc_allreduce.time_of(6, lost, nchunks, lost) / Fraction(5, 3) == Fraction(ratio)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 16])
@pytest.mark.parametrize("nchunks", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("lost", [Fraction(0), Fraction(1, 8), Fraction(1, 3), Fraction(1, 2)])
def test_no_other_share_is_sooner_by_the_model(n: int, nchunks: int, lost: Fraction) -> None:
    best = r2cc_allreduce.time_of(n, lost, nchunks, r2cc_allreduce.split(n, lost, nchunks))
    shares = [Fraction(number, 60) for number in range(61)] if lost else [Fraction(0)]
    assert all(best <= r2cc_allreduce.time_of(n, lost, nchunks, share) for share in shares)


def test_it_beats_the_ring_above_n_over_n_minus_two_chunks() -> None:
    lost = Fraction(1, 4)
    for n in range(3, 9):
        for nchunks in range(1, 6):
            assert bool(r2cc_allreduce.split(n, lost, nchunks)) == (nchunks * (n - 2) > n)


@pytest.mark.parametrize("nchannels", [(0, 1), (1, 0)])
def test_channels_are_needed(nchannels: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match="give 1 or more"):
        r2cc_allreduce.allreduce([3, 4, 4], 2, Fraction(1, 2), nchannels)


def test_the_data_comes_in_a_chunk_at_least() -> None:
    with pytest.raises(InvalidArgument, match="nchunks=0"):
        r2cc_allreduce.allreduce([3, 4, 4], 0)


@pytest.mark.parametrize("share", [Fraction(-1, 2), Fraction(3, 2)])
def test_a_share_is_one(share: Fraction) -> None:
    with pytest.raises(InvalidArgument, match="add up to 1"):
        r2cc_allreduce.allreduce([3, 4, 4], 2, share)
