"""Planner: which schedule a call runs, and on which rails; the same answer on every rank.

Pure: it reads what all ranks share (the call, the configuration, the number of wires, the agreed
health) and nothing a rank measured for itself. Today's choice of a schedule is by size alone:
recursive doubling while the data fits one eager slice, where latency decides, and the ring above
it, where bandwidth does.

Balance: a ring is as slow as its slowest channel, and a channel as its slowest hop. So the channels
that are at home on a rail get the share of the work which the worst port of that rail can carry,
and then all of them end together. A port that is down is no reason to spare its rail elsewhere: its
channels make a detour at that one hop (`r2ccl.routing`), and carry as much as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from r2ccl.algos import recursive_doubling, ring
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.resilience.health import WHOLE, Health
from r2ccl.schedule.ir import Schedule

#: A channel is worth its overhead from this many bytes per chunk on: below it the ring's steps
#: cost more than the rails gain.
_MIN_CHUNK_NBYTES = 64 << 10


class Placement(NamedTuple):
    """Where a schedule's channels go.

    Attributes
    ----------
    channels : tuple of int
        For each of them the links' channel it travels on.
    weights : tuple of int
        Its share of the work.
    """

    channels: tuple[int, ...]
    weights: tuple[int, ...]


def plan_allreduce(nbytes: int, nranks: int, nwires: int, config: Config) -> Schedule:
    """Choose the allreduce schedule for `nbytes` bytes.

    `nwires` is the number of rails that add bandwidth to one another: rails on one wire, as on
    loopback, are backups of each other and get one channel together (measured there, 1 against 2
    channels: 8 to 30 % less time from 256 KiB to 64 MiB, with 2 and 4 ranks).
    """
    if nbytes <= config.eager_nbytes:
        return recursive_doubling.allreduce(nranks)
    most = config.channels or full_channels(nwires)
    worthwhile = max(1, nbytes // (nranks * _MIN_CHUNK_NBYTES))
    return ring.allreduce(nranks, min(most, worthwhile))


def full_channels(nrails: int) -> int:
    """Channels that keep every rail busy, also when one is lost.

    Each rail carries a multiple of ``nrails - 1`` channels, so that those of a lost rail spread
    evenly over the others.
    """
    return nrails * max(1, nrails - 1)


def place(nchannels: int, homes: Sequence[int], health: Health) -> Placement:
    """Spread the channels of a schedule over the rails, the best ones first.

    Parameters
    ----------
    nchannels : int
    homes : sequence of int
        Rails that channels are at home on: the links' channel c on ``homes[c % len(homes)]``.
    health : Health
        What the ports of all ranks carry.

    Returns
    -------
    Placement
        Of a whole network the channels in order, all of one weight.

    Raises
    ------
    InvalidArgument
        There is no home, or no such rail.
    """
    if not homes:
        raise InvalidArgument("channels need at least one rail to be at home on")
    worst = [min(health.share(rank, rail) for rank in range(health.nranks)) for rail in homes]
    order = sorted(range(len(homes)), key=lambda at: -worst[at])
    # What makes a detour shares the rails of others: as if its own were as good as the best.
    detour = worst[order[0]] or WHOLE
    channels, weights = [], []
    for number in range(nchannels):
        turn, place = divmod(number, len(homes))
        at = order[place]
        channels.append(at + turn * len(homes))
        weights.append(worst[at] or detour)
    return Placement(tuple(channels), tuple(weights))


__all__ = ["Placement", "full_channels", "place", "plan_allreduce"]
