"""Scan and exscan: reductions over the ranks up to each rank, in rank order.

A rank always holds the reduction of consecutive ranks, and reduces it only with that of the ranks
just below. The reduction therefore needs to be associative, but not commutative.

`doubling` reduces over 1, 2, 4, ... ranks below: a rank sends what it holds to the rank at that
distance above. `chain` passes the reduction of all ranks below from each rank to the next, as a
pipeline. In the exscan every rank first gets the data of the rank below (doubling), or receives the
reduction directly as its result and reduces its own data into a copy of the result (chain).

Steps: with doubling, ceil(log2 n) exchanges, of which floor(log2 n) depend on each other; an exscan
takes one exchange, then doubles over n - 1 ranks. A chain takes n - 1. Bytes on the wire: a rank
sends the data once per exchange with doubling, and once in a chain.

References
----------
Hillis and Steele, "Data parallel algorithms", Communications of the ACM 29(12), 1986.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import msgspec

from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.cost import measure
from r2ccl.schedule.ir import Cost, Op, Schedule, Space


def doubling(nranks: int, nchannels: int = 1, *, is_exclusive: bool = False) -> Schedule:
    """Build the scan, or with `is_exclusive` the exscan, over growing distances.

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
        If a size is below 1.
    """
    ops_of = _exclusive_doubling if is_exclusive else _doubling
    return _schedule("prefix_doubling", nranks, nchannels, 1, ops_of, is_exclusive=is_exclusive)


def chain(nranks: int, nchannels: int = 1, *, is_exclusive: bool = False) -> Schedule:
    """Build the scan, or with `is_exclusive` the exscan, as a pipeline through all ranks.

    Arguments and errors as in `doubling`. In an exscan, each channel has 16 chunks: a rank reduces
    a chunk as a whole before it sends it on.
    """
    if is_exclusive:
        nchunks, ops_of = _NCHUNKS, _exclusive_chain
    else:
        nchunks, ops_of = 1, _chain
    return _schedule("prefix_chain", nranks, nchannels, nchunks, ops_of, is_exclusive=is_exclusive)


def _schedule(
    name: str,
    nranks: int,
    nchannels: int,
    nchunks: int,
    ops_of: Callable[[int, int], tuple[Op, ...]],
    *,
    is_exclusive: bool,
) -> Schedule:
    schedule = Schedule(
        name=name,
        collective="exscan" if is_exclusive else "scan",
        nranks=nranks,
        nchunks=(nchunks,) * nchannels,
        cost=Cost(0, Fraction(0), Fraction(0), 0),
        generate=lambda rank: (ops_of(nranks, rank),) * nchannels,
    )
    return msgspec.structs.replace(schedule, cost=measure(schedule))


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
    """Add the ops of a scan over the ranks from `lowest` on, of what each rank holds."""
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


#: Chunks of a channel in the chain of an exscan; filling it takes 1/16 of the data per rank.
_NCHUNKS = 16

__all__ = ["chain", "doubling"]
