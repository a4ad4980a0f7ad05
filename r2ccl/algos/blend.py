"""Blended allreduces: several algorithms run concurrently, each on its share of the buffer.

The channels of a schedule can run different ops. A `BlendPart` describes the ops of one channel; a
blend assigns each part a share of the buffer. A rank with little work in one part can do more in
another, so that all ranks finish together. The caller chooses the shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Cost, Op, Schedule


class BlendPart(NamedTuple):
    """One algorithm of a blend: an allreduce on one channel, and its cost.

    Attributes
    ----------
    nchunks : int
        Number of chunks of the channel.
    steps : int
        Number of messages on the longest chain of dependent messages.
    sent, received : tuple of Fraction
        Data that each rank sends and receives, as a multiple of the part's data.
    nops : int
        Maximum number of ops per rank.
    ops_of : callable
        ``ops_of(rank)`` returns the ops of `rank`.
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
    """Build an allreduce that runs all `parts`, each on its share of the buffer.

    Parameters
    ----------
    name : str
        Name of the schedule.
    parts : sequence of BlendPart
        Parts with the same number of ranks.
    shares : sequence of Fraction
        Share of the buffer for each part. The shares add up to 1; parts with share 0 are left out.
    nchannels : sequence of int
        Number of channels of each part, among which its share is divided equally. Channels are
        numbered part by part.

    Raises
    ------
    InvalidArgument
        If there is not one share and one number of channels per part, a share is below 0, the
        shares do not add up to 1, a number of channels is below 1, or the parts have different
        numbers of ranks.
    """
    if not len(parts) == len(shares) == len(nchannels) or sum(shares) != 1 or min(shares) < 0:
        raise InvalidArgument(
            f"shares {', '.join(map(str, shares))} and channels {tuple(nchannels)} of {len(parts)} "
            "parts: give one share and one number of channels per part; shares must be 0 or more "
            "and add up to 1"
        )
    if min(nchannels) < 1:
        raise InvalidArgument(f"nchannels={tuple(nchannels)}; give 1 or more")
    if len({len(part.sent) for part in parts}) != 1:
        raise InvalidArgument("parts differ in their number of ranks: give parts of the same ranks")
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
    """Return the smallest integers in the same proportions as `shares`."""
    scale = math.lcm(*(share.denominator for share in shares))
    weights = [int(share * scale) for share in shares]
    return tuple(weight // math.gcd(*weights) for weight in weights)


def _busiest(loads: Sequence[Sequence[Fraction]]) -> Fraction:
    """Return the load of the busiest rank: the sum of its loads in all parts."""
    return max(sum(each, Fraction(0)) for each in zip(*loads, strict=True))


__all__ = ["BlendPart", "blend"]
