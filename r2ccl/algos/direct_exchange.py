"""Direct exchanges: every part travels from its source to its destination in one step.

In the alltoall, rank r sends one part to each of the ranks r + 1, r + 2, ..., and receives one part
from each of the ranks r - 1, r - 2, ..., in this order. Ranks that proceed at the same pace thus
never send to the same rank at the same time. In the gather, each rank except the root sends its
part to the root; in the scatter, the root sends a part to each of these ranks.

Steps: 1. Bytes on the wire: every part once, except the parts that a rank has for itself; no rank
forwards parts of others.

Channel 0 carries the parts that are too small to be divided; larger parts are divided among the
other channels. If part sizes can differ between pairs of ranks, channel 0 also carries an empty
message for every divided part. A receiver thus gets a message on channel 0 from every rank that it
expects a part from, and detects a wrong size without waiting for the part.
`r2ccl.planning.lowering.lower` with ``whole_nbytes`` and ``announces_parts`` divides parts in this
way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Cost, Op, Schedule, Space


def alltoall(nranks: int, nchannels: int = 1) -> Schedule:
    """Build the direct alltoall: part k of rank r goes to rank r + k, modulo `nranks`.

    Parameters
    ----------
    nranks : int
        Number of ranks. With one rank the schedule copies input to output.
    nchannels : int
        Number of channels among which a large part is divided. Channel 0 is not counted.

    Raises
    ------
    InvalidArgument
        If `nranks` or `nchannels` is below 1.
    """
    share = _others(nranks)
    cost = Cost(min(1, nranks - 1), share, share, 2 * nranks - 1)
    return _schedule("alltoall", nranks, nchannels, lambda rank: _exchange(nranks, rank), cost)


def gather(nranks: int, root: int = 0, nchannels: int = 1) -> Schedule:
    """Build the direct gather: rank `root` gets part r from rank r.

    Arguments and errors as in `alltoall`; also raises `InvalidArgument` if `root` is not a rank.
    """
    cost = _rooted_cost(nranks)
    ops_of = partial(_rooted, nranks, root, is_gather=True)
    return _schedule("gather", nranks, nchannels, ops_of, cost, root)


def scatter(nranks: int, root: int = 0, nchannels: int = 1) -> Schedule:
    """Build the direct scatter: rank r gets part r from rank `root`.

    Arguments and errors as in `gather`.
    """
    cost = _rooted_cost(nranks)
    cost = msgspec.structs.replace(cost, sent=cost.received, received=cost.sent)
    ops_of = partial(_rooted, nranks, root, is_gather=False)
    return _schedule("scatter", nranks, nchannels, ops_of, cost, root)


def lower_bound(sizes: Sequence[Sequence[int]], ports: Sequence[Sequence[int]]) -> Fraction:
    """Return a lower bound on the time of any direct exchange, without latency.

    The bound is the longest of these times: the time in which a rank can send all its parts through
    its ports, the time in which it can receive all its parts, and the time in which a part can
    cross the common rails of its two ranks. For two ranks without a common rail, only the first two
    times count, because a bypass carries their data.

    Parameters
    ----------
    sizes : sequence of sequence of int
        ``sizes[i][j]`` is the size of the part that rank i has for rank j, in any unit.
    ports : sequence of sequence of int
        ``ports[i][k]`` is the bandwidth of rank i on rail k, in the unit of `sizes` per unit of
        time; 0 means down. The bandwidth of a port counts only up to the sum of the bandwidths of
        all other ranks on the rail.

    Raises
    ------
    InvalidArgument
        If a rank that exchanges data has no rail in common with any other.
    """
    ranks = range(len(sizes))
    totals = [sum(column) for column in zip(*ports, strict=True)]
    least = Fraction(0)
    for rank, row in enumerate(ports):
        peers = [peer for peer in ranks if peer != rank]
        rate = sum(min(own, total - own) for own, total in zip(row, totals, strict=True))
        sent = sum(sizes[rank][peer] for peer in peers)
        load = max(sent, sum(sizes[peer][rank] for peer in peers))
        if load and not rate:
            raise InvalidArgument(
                f"ports={ports}: rank {rank} exchanges data, but has no rail in common with any "
                "other rank; give the rank a rail that another rank has"
            )
        least = max(least, Fraction(load, rate or 1))
        for peer in peers:
            shared = sum(map(min, row, ports[peer]))
            least = max(least, Fraction(sizes[rank][peer], shared) if shared else least)
    return least


def _others(nranks: int) -> Fraction:
    return Fraction(nranks - 1, max(nranks, 1))


def _rooted_cost(nranks: int) -> Cost:
    own = Fraction(min(1, nranks - 1), max(nranks, 1))
    return Cost(min(1, nranks - 1), own, _others(nranks), nranks)


def _schedule(
    collective: str,
    nranks: int,
    nchannels: int,
    ops_of: Callable[[int], tuple[Op, ...]],
    cost: Cost,
    root: int = 0,
) -> Schedule:
    # With channel 0 alone, no weight would be above 0; `Schedule` refuses that.
    return Schedule(
        name="direct",
        collective=collective,
        nranks=nranks,
        nchunks=(nranks,) * (nchannels + 1),
        cost=cost,
        generate=lambda rank: (ops_of(rank),) * (nchannels + 1),
        weights=(0,) + (1,) * nchannels,
        root=root,
    )


def _exchange(nranks: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder(can_be_in_place=False)
    program.copy(0, Space.INPUT)
    for distance in range(1, nranks):
        program.send((rank + distance) % nranks, distance)
        program.recv((rank - distance) % nranks, distance)
    return program.ops()


def _rooted(nranks: int, root: int, rank: int, *, is_gather: bool) -> tuple[Op, ...]:
    """Return the ops of `rank` in a gather to `root`, or in a scatter from it."""
    program = ProgramBuilder()
    at_root: Callable[[int, int], int] = program.recv if is_gather else program.send
    at_others: Callable[[int, int], int] = program.send if is_gather else program.recv
    if rank != root:
        at_others(root, rank)
        return program.ops()
    program.copy(root, Space.INPUT)
    for distance in range(1, nranks):
        peer = (root + distance) % nranks
        at_root(peer, peer)
    return program.ops()


__all__ = ["alltoall", "gather", "lower_bound", "scatter"]
