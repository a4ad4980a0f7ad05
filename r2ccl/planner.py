"""Planner: which schedule a call runs; the same answer on every rank.

Pure: it reads what all ranks share (the call, the configuration, the number of wires) and nothing
a rank measured for itself. Today's choice is by size alone: recursive doubling while the data fits
one eager slice, where latency decides, and the ring above it, where bandwidth does.
"""

from __future__ import annotations

from r2ccl.algos import recursive_doubling, ring
from r2ccl.config import Config
from r2ccl.schedule.ir import Schedule

#: A channel is worth its overhead from this many bytes per chunk on: below it the ring's steps
#: cost more than the rails gain.
_MIN_CHUNK_NBYTES = 64 << 10


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


__all__ = ["full_channels", "plan_allreduce"]
