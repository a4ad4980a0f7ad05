"""Bandwidths of unequal ranks: one integer per rank, in any common unit.

All computations use integers and fractions, so that every rank gets exactly the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.errors import InvalidArgument


class Straggler(NamedTuple):
    """Slowest rank, and the fraction by which its bandwidth is below that of the next slowest rank.

    The fraction is 0 if there is only one rank.
    """

    rank: int
    lost: Fraction


def require_positive(bandwidths: Sequence[int]) -> None:
    """Check that `bandwidths` is not empty and that all values are 1 or more.

    Raises
    ------
    InvalidArgument
        If `bandwidths` is empty or contains a value below 1.
    """
    if not bandwidths or min(bandwidths) < 1:
        raise InvalidArgument(
            f"bandwidths={tuple(bandwidths)}: give an integer above 0 for every node"
        )


def straggler_of(bandwidths: Sequence[int]) -> Straggler:
    """Return the `Straggler` of all ranks; of equally slow ranks, the rank with the lowest number.

    Raises
    ------
    InvalidArgument
        If `bandwidths` is empty or contains a value below 1.
    """
    require_positive(bandwidths)
    slowest, *others = sorted(bandwidths)
    least = min(others, default=slowest)
    return Straggler(bandwidths.index(slowest), 1 - Fraction(slowest, least))


__all__ = ["Straggler", "require_positive", "straggler_of"]
