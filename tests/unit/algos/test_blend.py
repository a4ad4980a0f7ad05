"""Blends: parts keep their shares exactly, and together they are one allreduce."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from r2ccl.algos.blend import BlendPart, blend
from r2ccl.algos.leaf_ring import part
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret

HALF, THIRD = Fraction(1, 2), Fraction(1, 3)


def parts(n: int = 4) -> list[BlendPart]:
    return [part(n, range(n)), part(n, range(1, n), [(), (0,)])]


@pytest.mark.parametrize("share", [Fraction(1, 7), HALF, Fraction(99, 100)])
def test_a_blend_is_accepted_and_costs_what_its_parts_do(share: Fraction) -> None:
    schedule = blend("both", parts(), [share, 1 - share], [1, 2])
    check(schedule)
    assert measure(schedule) == schedule.cost
    assert schedule.cost.sent == max(
        share * a + (1 - share) * b for a, b in zip(*(each.sent for each in parts()), strict=True)
    )


def test_channels_of_a_part_share_its_share() -> None:
    schedule = blend("both", parts(), [THIRD, 2 * THIRD], [1, 3])
    assert schedule.weights == (3, 2, 2, 2)
    assert schedule.nchunks == (4, 6, 6, 6)


def test_a_blend_sums() -> None:
    inputs = [np.random.default_rng(rank).integers(-999, 999, 1000) for rank in range(4)]
    for output in interpret(blend("both", parts(), [THIRD, 2 * THIRD], [2, 1]), inputs, np.add):
        np.testing.assert_array_equal(output, sum(inputs))


def test_a_part_without_a_share_is_left_out() -> None:
    assert blend("one", parts(), [Fraction(0), Fraction(1)], [1, 2]).nchunks == (6, 6)


@pytest.mark.parametrize(
    ("shares", "nchannels"),
    [([HALF], [1, 1]), ([HALF, THIRD], [1, 1]), ([Fraction(-1), Fraction(2)], [1, 1]),
     ([HALF, HALF], [1])],
)  # fmt: skip
def test_shares_are_of_the_whole(shares: list[Fraction], nchannels: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="shares must be 0 or more and add up to 1"):
        blend("both", parts(), shares, nchannels)


def test_there_is_a_channel() -> None:
    with pytest.raises(InvalidArgument, match=r"nchannels=\(1, 0\)"):
        blend("both", parts(), [HALF, HALF], [1, 0])


def test_parts_are_of_the_same_ranks() -> None:
    with pytest.raises(InvalidArgument, match="parts of the same ranks"):
        blend("both", [parts(4)[0], parts(5)[0]], [HALF, HALF], [1, 1])
