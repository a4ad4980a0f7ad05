"""Blends: several ways of doing one allreduce at the same time, each over its share of the data.

Channels of one schedule need not do the same: here each `BlendPart` is what one channel does, and a
blend gives every part its share of the buffer. Ranks that have little to do in one part can do more
in another, so that all of them end together. How large the shares must be for that is the business
of whoever blends.

Imports `schedule` and `errors`. Invariant: what a rank sends in the blend is what it sends in the
parts, in proportion to their shares; exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Cost, Op, Schedule


class BlendPart(NamedTuple):
    """An allreduce over one channel.

    Attributes
    ----------
    nchunks : int
    steps : int
        Messages on the longest chain of messages that wait for one another.
    sent, received : tuple of Fraction
        What each rank puts on and takes off the wire, as a multiple of the part's share.
    nops : int
        Ops of the busiest rank.
    ops_of : callable
        ``ops_of(rank)``: that rank's ops.
    """

    nchunks: int
    steps: int
    sent: tuple[Fraction, ...]
    received: tuple[Fraction, ...]
    nops: int
    ops_of: Callable[[int], tuple[Op, ...]]


def blend(
    name: str, parts: Sequence[BlendPart], shares: Sequence[Fraction], nchannels: Sequence[int]
) -> Schedule:
    """Build the allreduce of all `parts`.

    Parameters
    ----------
    name : str
        Who chose the parts.
    parts : sequence of BlendPart
        Of the same ranks.
    shares : sequence of Fraction
        Of the data, one a part, adding up to 1. A part with share 0 is left out.
    nchannels : sequence of int
        Channels of each part, of equal weight; one part's behind the other's.

    Raises
    ------
    InvalidArgument
        Shares that are not one a part, below 0, or do not add up to 1; parts of different ranks;
        no channel.
    """
    if not len(parts) == len(shares) == len(nchannels) or sum(shares) != 1 or min(shares) < 0:
        raise InvalidArgument(
            f"shares {', '.join(map(str, shares))} and channels {tuple(nchannels)} of {len(parts)} "
            "parts: give one each a part, shares of 0 or more that add up to 1"
        )
    if min(nchannels) < 1:
        raise InvalidArgument(f"nchannels={tuple(nchannels)}; give 1 or more")
    if len({len(part.sent) for part in parts}) != 1:
        raise InvalidArgument("parts of different numbers of ranks: give parts of the same ranks")
    used = [at for at, share in enumerate(shares) if share]
    channels = [at for at in used for _ in range(nchannels[at])]

    def generate(rank: int) -> tuple[tuple[Op, ...], ...]:
        programs = {at: parts[at].ops_of(rank) for at in used}
        return tuple(programs[at] for at in channels)

    return Schedule(
        name=name,
        collective="allreduce",
        nranks=len(parts[0].sent),
        nchunks=tuple(parts[at].nchunks for at in channels),
        weights=_whole([shares[at] / nchannels[at] for at in channels]),
        cost=Cost(
            max(parts[at].steps for at in used),
            _busiest([[shares[at] * each for each in parts[at].sent] for at in used]),
            _busiest([[shares[at] * each for each in parts[at].received] for at in used]),
            max(parts[at].nops for at in used),
        ),
        generate=generate,
    )


def _whole(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the smallest integers in the same proportion."""
    scale = math.lcm(*(share.denominator for share in shares))
    weights = [int(share * scale) for share in shares]
    return tuple(weight // math.gcd(*weights) for weight in weights)


def _busiest(loads: Sequence[Sequence[Fraction]]) -> Fraction:
    """Add up every rank's loads; return the largest sum."""
    return max(sum(each, Fraction(0)) for each in zip(*loads, strict=True))


__all__ = ["BlendPart", "blend"]
