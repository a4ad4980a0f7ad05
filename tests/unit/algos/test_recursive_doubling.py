"""Recursive doubling computes the same expression on every rank, in rank order."""

from __future__ import annotations

import numpy as np
import pytest
from support.schedules import float_results
from support.slow import slow_but

from r2ccl.algos import recursive_doubling
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import OpKind

SIZES = slow_but(range(1, 10), range(1, 34))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_every_rank_gets_the_sum(n, in_place):
    inputs = [np.random.default_rng(rank).integers(-999, 999, 17) for rank in range(n)]
    outputs = interpret(recursive_doubling.allreduce(n, 2), inputs, np.add, in_place)
    assert all((output == sum(inputs)).all() for output in outputs)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_operands_are_in_rank_order_everywhere(n, in_place):
    """Concatenation is associative but not commutative: any exchange of operands would show."""
    inputs = [np.array([f"{rank} "], object) for rank in range(n)]
    outputs = interpret(
        recursive_doubling.allreduce(n), inputs, lambda left, right: left + right, in_place
    )
    in_order = "".join(f"{rank} " for rank in range(n))
    assert [output[0] for output in outputs] == [in_order] * n


@pytest.mark.parametrize("n", SIZES)
def test_every_rank_evaluates_the_same_tree(n):
    """Not associative either: equal brackets everywhere, so equal rounding."""
    inputs = [np.array([str(rank)], object) for rank in range(n)]
    outputs = interpret(
        recursive_doubling.allreduce(n), inputs, lambda left, right: "(" + left + "+" + right + ")"
    )
    assert len({output[0] for output in outputs}) == 1


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 8, 12, 16, 31])
def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes(n):
    assert len(float_results(recursive_doubling.allreduce(n))) == 1


@pytest.mark.parametrize("n", [1, 2, 3, 6, 8])
def test_average_divides_exactly_once(n):
    inputs = [np.full(3, 2.0**rank) for rank in range(n)]
    outputs = interpret(
        recursive_doubling.allreduce(n), inputs, np.add, finish=lambda chunk: chunk / n
    )
    assert all((output == (2.0**n - 1) / n).all() for output in outputs)


@pytest.mark.parametrize(("n", "folded"), [(4, 0), (5, 1), (6, 2), (7, 3), (8, 0), (9, 1)])
def test_extra_ranks_send_once_and_receive_once(n, folded):
    schedule = recursive_doubling.allreduce(n)
    kinds = [[op.kind for op in schedule.program(rank).channels[0]] for rank in range(n)]
    extras = [rank for rank in range(n) if kinds[rank] == [OpKind.SEND, OpKind.RECV]]
    assert extras == [2 * i + 1 for i in range(folded)]


@pytest.mark.parametrize(("n", "nchannels"), [(0, 1), (-3, 1), (2, 0)])
def test_sizes_below_one_are_refused(n, nchannels):
    with pytest.raises(InvalidArgument):
        recursive_doubling.allreduce(n, nchannels)
