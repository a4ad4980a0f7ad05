"""Who is slowest, and by how much."""

from __future__ import annotations

from fractions import Fraction

import pytest

from r2ccl.algos import leaf_ring, nested_rings, optcc, r2cc_allreduce
from r2ccl.algos.bandwidths import Straggler, require_positive, straggler_of
from r2ccl.errors import InvalidArgument


@pytest.mark.parametrize(
    ("bandwidths", "rank", "lost"),
    [
        ([5], 0, Fraction(0)),
        ([4, 4], 0, Fraction(0)),
        ([8, 6, 8], 1, Fraction(1, 4)),
        ([8, 8, 3, 4], 2, Fraction(1, 4)),
        ([2, 1, 1], 1, Fraction(0)),
    ],
)
def test_the_slowest_is_measured_against_the_next(
    bandwidths: list[int], rank: int, lost: Fraction
) -> None:
    assert straggler_of(bandwidths) == Straggler(rank, lost)


@pytest.mark.parametrize("bandwidths", [[], [0], [3, -1]])
def test_a_rank_without_bandwidth_is_refused(bandwidths: list[int]) -> None:
    for call in (
        require_positive,
        straggler_of,
        leaf_ring.allreduce,
        nested_rings.allreduce,
        optcc.allreduce,
        r2cc_allreduce.allreduce,
    ):
        with pytest.raises(InvalidArgument, match="above 0"):
            call(bandwidths)
