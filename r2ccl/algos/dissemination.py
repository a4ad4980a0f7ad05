"""Dissemination allgather and reduce-scatter in ceil(log2 n) steps; allreduce runs both.

In step k of the allgather, rank r sends the 2^k parts of ranks r, r + 1, ... to rank r - 2^k, and
receives 2^k parts from rank r + 2^k; in the last step only the parts still missing are sent. The
reduce-scatter runs these steps backwards, the largest distance first, and reduces the parts it
receives. Parts are sent in the order in which they arrive, so that steps overlap.

Steps: ceil(log2 n) each for the allgather and the reduce-scatter; the longest chain of dependent
messages has floor(log2 n) messages. Bytes on the wire: every rank sends and receives (n - 1)/n of
the data in each of them, as in a ring.

Dissemination beats a ring if the latency of n - 1 steps exceeds the time to transfer the data. More
than a third of what a rank sends goes to a single distant rank, so dissemination suits networks
whose rails have equal bandwidths.

References
----------
Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8(11), 1997.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Cost, Op, Schedule, Space


class Stride(NamedTuple):
    """One step: distance in ranks between sender and receiver, and number of parts sent."""

    distance: int
    nparts: int


def allreduce(nranks: int, nchannels: int = 1) -> Schedule:
    """Build a dissemination allreduce: the reduce-scatter, then the allgather.

    Parameters
    ----------
    nranks : int
        Number of ranks. With one rank the schedule copies input to output.
    nchannels : int
        Number of independent copies of the pattern, each on its own share of the buffer.

    Raises
    ------
    InvalidArgument
        If `nranks` or `nchannels` is below 1.
    """
    return _schedule("allreduce", nranks, nchannels, _allreduce_ops)


def allgather(nranks: int, nchannels: int = 1) -> Schedule:
    """Build a dissemination allgather: rank r starts with chunk r.

    Arguments and errors as in `allreduce`.
    """
    return _schedule("allgather", nranks, nchannels, _allgather_ops)


def reduce_scatter(nranks: int, nchannels: int = 1) -> Schedule:
    """Build a dissemination reduce-scatter: rank r ends with chunk r.

    Arguments and errors as in `allreduce`.
    """
    return _schedule("reduce_scatter", nranks, nchannels, _reduce_scatter_ops)


def steps_of(nranks: int) -> list[Stride]:
    """Return the steps of the allgather, in order; the reduce-scatter runs them in reverse."""
    distances = [1 << k for k in range((nranks - 1).bit_length())]
    return [Stride(each, min(each, nranks - each)) for each in distances]


def _schedule(
    collective: str,
    nranks: int,
    nchannels: int,
    ops_of: Callable[[int, int], tuple[Op, ...]],
) -> Schedule:
    passes = 2 if collective == "allreduce" else 1
    share = Fraction(passes * (nranks - 1), max(nranks, 1))
    ncopies = 1 if nranks == 1 or collective == "allgather" else 0
    # A part makes one hop for each 1 bit in the distance between its source and destination.
    nsteps = passes * (max(nranks, 1).bit_length() - 1)
    return Schedule(
        name="dissemination",
        collective=collective,
        nranks=nranks,
        nchunks=(nranks,) * nchannels,
        cost=Cost(nsteps, share, share, 2 * passes * (nranks - 1) + ncopies),
        generate=lambda rank: (ops_of(nranks, rank),) * nchannels,
    )


def _allreduce_ops(nranks: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    _add_reduce_scatter(program, nranks, rank)
    _add_allgather(program, nranks, rank)
    return program.ops()


def _allgather_ops(nranks: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    program.copy(rank, Space.INPUT)
    _add_allgather(program, nranks, rank)
    return program.ops()


def _reduce_scatter_ops(nranks: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    _add_reduce_scatter(program, nranks, rank)
    return program.ops()


def _add_allgather(program: ProgramBuilder, nranks: int, rank: int) -> None:
    for distance, nparts in steps_of(nranks):
        ahead, behind = (rank + distance) % nranks, (rank - distance) % nranks
        for part in range(nparts):
            program.send(behind, (rank + part) % nranks)
        for part in range(nparts):
            # In an allreduce, the arrival of the sum proves that this rank's contribution arrived.
            program.recv(ahead, (ahead + part) % nranks, is_proof=True)


def _add_reduce_scatter(program: ProgramBuilder, nranks: int, rank: int) -> None:
    if nranks == 1:
        program.copy(0, Space.INPUT, is_final=True)
    for distance, nparts in reversed(steps_of(nranks)):
        ahead, behind = (rank + distance) % nranks, (rank - distance) % nranks
        for part in reversed(range(nparts)):
            program.send(ahead, (ahead + part) % nranks)
        for part in reversed(range(nparts)):
            is_final = distance == 1 and part == 0
            program.recv_reduce(behind, (rank + part) % nranks, is_final=is_final)


__all__ = ["Stride", "allgather", "allreduce", "reduce_scatter", "steps_of"]
