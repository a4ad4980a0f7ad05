"""Scan and exscan: reductions over the ranks up to each rank, in rank order.

A rank always holds the reduction of consecutive ranks. It combines this reduction only with the
reduction of the ranks just below them. The reduction therefore needs to be associative, but not
commutative.

In exchange k of `doubling`, for k = 0, 1, ..., a rank sends the reduction that it holds to the rank
2^k above it. In the exscan by `doubling`, every rank first sends its own data to the next rank, and
the scan then runs over the data received.

In a `chain`, a rank receives the reduction of all ranks below, reduces it with its own data and
sends it to the next rank, as a pipeline. In the exscan by `chain`, the received reduction is the
rank's result. The rank reduces its own data into a copy of the result, and sends the copy to the
next rank.

Steps: with doubling, a scan takes ceil(log2 n) exchanges; its longest chain of dependent messages
has this length or, for some n, is one message shorter. An exscan takes one exchange, and then those
of a scan over n - 1 ranks. A chain takes n - 1 dependent messages. Bytes on the wire: a rank sends
the data at most once per exchange with doubling, and at most once in a chain.

References
----------
Hillis and Steele, "Data parallel algorithms", Communications of the ACM 29(12), 1986.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import msgspec

from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.cost import measure
from r2ccl.schedule.ir import Cost, Op, Schedule, Space


def doubling(nranks: int, nchannels: int = 1, *, is_exclusive: bool = False) -> Schedule:
    """Build the scan, or with `is_exclusive` the exscan, by exchanges at distances 1, 2, 4, ....

    Parameters
    ----------
    nranks : int
        Number of ranks. With one rank a scan copies input to output, and an exscan does nothing.
    nchannels : int
        Number of independent copies of the pattern, each on its own share of the buffer.
    is_exclusive : bool
        If True, rank r gets the reduction of the ranks below r, and the output of rank 0 is
        undefined.

    Raises
    ------
    InvalidArgument
        If `nranks` or `nchannels` is below 1.
    """
    ops_of = _exclusive_doubling if is_exclusive else _doubling
    make = partial(_schedule, "prefix_doubling", nranks, 1, ops_of, is_exclusive=is_exclusive)
    # All channels have the same ops, so one channel with all the data has the same cost.
    return msgspec.structs.replace(make(nchannels), cost=measure(make(1)))


def chain(nranks: int, nchannels: int = 1, *, is_exclusive: bool = False) -> Schedule:
    """Build the scan, or with `is_exclusive` the exscan, as a pipeline through all ranks.

    Arguments and errors as in `doubling`. In an exscan, each channel has 16 chunks, because a rank
    must reduce a whole chunk before it sends the chunk to the next rank.
    """
    if is_exclusive:
        nchunks, ops_of = _NCHUNKS, _exclusive_chain
        nops = _NCHUNKS * (0, 0, 1, 4)[max(0, min(3, nranks))]
    else:
        nchunks, ops_of, nops = 1, _chain, min(2, nranks)
    made = _schedule("prefix_chain", nranks, nchunks, ops_of, nchannels, is_exclusive=is_exclusive)
    share = Fraction(min(1, nranks - 1))
    return msgspec.structs.replace(made, cost=Cost(nranks - 1, share, share, nops))


def _schedule(
    name: str,
    nranks: int,
    nchunks: int,
    ops_of: Callable[[int, int], tuple[Op, ...]],
    nchannels: int,
    *,
    is_exclusive: bool,
) -> Schedule:
    """Return the schedule without its cost."""
    return Schedule(
        name=name,
        collective="exscan" if is_exclusive else "scan",
        nranks=nranks,
        nchunks=(nchunks,) * nchannels,
        cost=Cost(0, Fraction(0), Fraction(0), 0),
        generate=lambda rank: (ops_of(nranks, rank),) * nchannels,
    )


def _doubling(nranks: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    if rank == 0:
        program.copy(0, Space.INPUT)
    _double(program, nranks, rank, 0)
    return program.ops()


def _exclusive_doubling(nranks: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder(can_be_in_place=False)
    if rank + 1 < nranks:
        program.send(rank + 1, 0)
    if rank > 0:
        program.recv(rank - 1, 0)
        _double(program, nranks, rank, 1)
    return program.ops()


def _double(program: ProgramBuilder, nranks: int, rank: int, lowest: int) -> None:
    """Add the ops of a scan by doubling over the ranks from `lowest` on.

    The scan starts from the data that each rank has in OUTPUT, or else in INPUT.
    """
    distance = 1
    while distance < nranks - lowest:
        if rank + distance < nranks:
            program.send(rank + distance, 0)
        if rank - distance >= lowest:
            program.recv_reduce(rank - distance, 0)
        distance *= 2


def _chain(nranks: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    if rank > 0:
        program.recv_reduce(rank - 1, 0)
    else:
        program.copy(0, Space.INPUT)
    if rank + 1 < nranks:
        program.send(rank + 1, 0)
    return program.ops()


def _exclusive_chain(nranks: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder(can_be_in_place=False)
    for chunk in range(_NCHUNKS):
        if rank > 0:
            program.recv(rank - 1, chunk)
        if rank + 1 == nranks:
            continue
        if rank > 0:
            program.copy(chunk, Space.OUTPUT, Space.SCRATCH)
            program.reduce(chunk, Space.INPUT, Space.SCRATCH)
        program.send(rank + 1, chunk, space=Space.SCRATCH if rank > 0 else Space.INPUT)
    return program.ops()


#: Chunks of a channel in the chain of an exscan: a rank waits only for a 16th of the channel's data
#: before it sends.
_NCHUNKS = 16

__all__ = ["chain", "doubling"]
