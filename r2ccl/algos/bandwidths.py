"""What algorithms for unequal ranks are told: an integer for each, in any unit.

Imports `errors`. Invariant: integers and fractions only, so that ranks never round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.errors import InvalidArgument


class Straggler(NamedTuple):
    """The slowest rank, and the fraction of bandwidth it has lost against the next slowest."""

    rank: int
    lost: Fraction


def require_positive(bandwidths: Sequence[int]) -> None:
    """Refuse bandwidths of nobody, or below 1.

    Raises
    ------
    InvalidArgument
    """
    if not bandwidths or min(bandwidths) < 1:
        raise InvalidArgument(
            f"bandwidths={tuple(bandwidths)}: give an integer above 0 for every node"
        )


def straggler_of(bandwidths: Sequence[int]) -> Straggler:
    """Find the slowest rank, the first one of several.

    Raises
    ------
    InvalidArgument
        No rank, or a bandwidth below 1.
    """
    require_positive(bandwidths)
    slowest, *others = sorted(bandwidths)
    least = min(others, default=slowest)
    return Straggler(bandwidths.index(slowest), 1 - Fraction(slowest, least))


__all__ = ["Straggler", "require_positive", "straggler_of"]
