"""Ring allreduce computes the right thing, in the right order, in any rank order."""

from __future__ import annotations

import numpy as np
import pytest
from support.schedules import float_results
from support.slow import slow_but

from r2ccl.algos import ring
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import OpKind, Space

SIZES = slow_but(range(1, 10), [*range(1, 18), 32, 64])


def integers(n, count):
    return [np.random.default_rng(rank).integers(-999, 999, count) for rank in range(n)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_every_rank_gets_the_sum(n, in_place):
    inputs = integers(n, 3 * n + 2)
    outputs = interpret(ring.allreduce(n, 2), inputs, np.add, in_place)
    assert all((output == sum(inputs)).all() for output in outputs)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 1000])
def test_any_count_will_do(count):
    inputs = integers(4, count)
    outputs = interpret(ring.allreduce(4, 3), inputs, np.add, weights=(2, 0, 5))
    assert all((output == sum(inputs)).all() for output in outputs)


@pytest.mark.parametrize("in_place", [False, True])
def test_average_divides_exactly_once(in_place):
    inputs = [np.full(10, 2.0**rank) for rank in range(5)]
    outputs = interpret(ring.allreduce(5), inputs, np.add, in_place, finish=lambda chunk: chunk / 5)
    assert all((output == 31 / 5).all() for output in outputs)


@pytest.mark.parametrize("n", [2, 3, 7, 8])
def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes(n):
    assert len(float_results(ring.allreduce(n, 2))) == 1


def test_operands_keep_rank_order_on_the_way_round_the_ring():
    """A chunk's sum starts at its own rank; where the ring closes, lower ranks go to the left."""
    inputs = [np.array([str(rank)] * 4, object) for rank in range(4)]
    outputs = interpret(ring.allreduce(4), inputs, lambda a, b: a + b)
    assert [list(output) for output in outputs] == [["0123", "0123", "0231", "0312"]] * 4


def test_channels_may_run_in_different_orders():
    orders = [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 3, 1, 4)]
    schedule = ring.allreduce(5, 3, orders)
    check(schedule)
    inputs = integers(5, 50)
    outputs = interpret(schedule, inputs, np.add)
    assert all((output == sum(inputs)).all() for output in outputs)
    for order, ops in zip(orders, schedule.program(3).channels, strict=True):
        at = order.index(3)
        assert {op.peer for op in ops if op.kind == OpKind.SEND} == {order[(at + 1) % 5]}
        assert {op.peer for op in ops if op.kind != OpKind.SEND} == {order[at - 1]}


def test_an_order_equal_to_the_default_changes_nothing():
    explicit = ring.allreduce(4, 2, [range(4)] * 2)
    default = ring.allreduce(4, 2)
    assert all(explicit.program(rank) == default.program(rank) for rank in range(4))


@pytest.mark.parametrize(
    "orders", [[(0, 1, 2)], [(0, 1, 2), (0, 1)], [(0, 1, 2), (0, 1, 1)], [(0, 1, 2), (1, 2, 3)]]
)
def test_orders_that_are_no_permutations_are_refused(orders):
    with pytest.raises(InvalidArgument, match="one permutation of 0 to 2 for each of the 2"):
        ring.allreduce(3, 2, orders)


@pytest.mark.parametrize(
    ("n", "nchannels", "wrong"),
    [(0, 1, "nranks=0; give 1"), (-1, 1, "nranks=-1; give 1"), (3, 0, "give one channel or more")],
)
def test_sizes_below_one_are_refused(n, nchannels, wrong):
    with pytest.raises(InvalidArgument, match=wrong):
        ring.allreduce(n, nchannels)


@pytest.mark.parametrize("n", range(2, 9))
def test_the_shape_is_a_reduce_scatter_then_an_allgather(n):
    for rank in range(n):
        [ops] = ring.allreduce(n).program(rank).channels
        kinds = [op.kind for op in ops]
        half = 2 * (n - 1)
        assert kinds[:half] == [OpKind.SEND, OpKind.RECV_REDUCE] * (n - 1)
        assert kinds[half:] == [OpKind.SEND, OpKind.RECV] * (n - 1)
        assert [i for i, op in enumerate(ops) if op.is_final] == [half - 1]
        assert ops[0].src_space == Space.INPUT


@pytest.mark.parametrize("make", [ring.allreduce, ring.reduce_scatter, ring.allgather])
@pytest.mark.parametrize("n", SIZES)
def test_all_three_are_accepted_and_cost_what_they_say(make, n):
    schedule = make(n, 2, [range(n), [*range(0, n, 2), *range(1, n, 2)]])
    check(schedule)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_reduce_scatter_leaves_each_rank_its_part_of_the_sum(n, in_place):
    inputs = integers(n, 4 * n)
    order = [*range(0, n, 2), *range(1, n, 2)]
    outputs = interpret(ring.reduce_scatter(n, 2, [range(n), order]), inputs, np.add, in_place)
    for rank, output in enumerate(outputs):
        part = slice(4 * rank, 4 * (rank + 1))
        assert (output[part] == sum(inputs)[part]).all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_allgather_gives_each_rank_all_parts(n, in_place):
    inputs = integers(n, 4 * n)
    order = [*range(0, n, 2), *range(1, n, 2)]
    whole = np.concatenate([inputs[rank][4 * rank : 4 * (rank + 1)] for rank in range(n)])
    for output in interpret(ring.allgather(n, 2, [range(n), order]), inputs, np.add, in_place):
        np.testing.assert_array_equal(output, whole)
