"""Halving-doubling allreduce: as few bytes as a ring, in 2 log2(n) steps instead of 2(n - 1).

Let m be the largest power of two up to n. If n > m, the first 2(n - m) ranks fold in pairs: the odd
one sends its data to the even one below and gets the result at the end. The m ranks that are left,
numbered in rank order, share out m chunks. Halving: each exchanges with the number that differs in
the highest bit what belongs to the other's half, and reduces its own half, which it then halves in
the same way with the next bit, until it holds one chunk complete. Doubling: the same exchanges
backwards give everybody all chunks.

Steps: 2 log2(m) messages one after another, plus 2 if n > m. Bytes on the wire: the busiest rank
sends and receives 2(m - 1)/m times the data, plus once if n > m. Messages: a chunk each, so as many
as a ring's; it is only their chain that is shorter.

It wins over a ring where a step's latency counts and n is a power of two; over recursive doubling
where bytes count more than messages.

Imports `schedule` and `errors`.

References
----------
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19(1), 2005; the algorithm is Rabenseifner's.
"""

from __future__ import annotations

from fractions import Fraction

from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Cost, Op, Schedule, Space


def allreduce(nranks: int, nchannels: int = 1) -> Schedule:
    """Build the halving-doubling allreduce of `nranks` ranks.

    Parameters
    ----------
    nranks : int
        Size of the communicator, any number; with one rank the schedule copies input to output.
    nchannels : int
        Independent copies of the pattern, each over its own share of the buffer.

    Returns
    -------
    Schedule
        As many chunks a channel as the largest power of two up to `nranks`.

    Raises
    ------
    InvalidArgument
        A size below 1.
    """
    doublings = max(nranks, 1).bit_length() - 1
    size = 1 << doublings
    has_fold = nranks > size
    share = Fraction(2 * (size - 1), size) + has_fold
    return Schedule(
        name="halving_doubling",
        collective="allreduce",
        nranks=nranks,
        nchunks=(size,) * nchannels,
        cost=Cost(
            2 * (doublings + has_fold), share, share, max(1, 4 * (size - 1) + 2 * size * has_fold)
        ),
        generate=lambda rank: (_program(nranks, rank),) * nchannels,
    )


def _program(n: int, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    size = 1 << (n.bit_length() - 1)
    extra = n - size
    if n == 1:
        program.copy(0, Space.INPUT, is_final=True)
    elif rank < 2 * extra and rank % 2:
        for chunk in range(size):
            program.send(rank - 1, chunk)
        for chunk in range(size):
            program.recv(rank - 1, chunk, is_proof=True)
    elif rank < 2 * extra:
        for chunk in range(size):
            program.recv_reduce(rank + 1, chunk)
        _exchange(program, rank // 2, size, extra)
        for chunk in range(size):
            program.send(rank + 1, chunk)
    else:
        _exchange(program, rank - extra, size, extra)
    return program.ops()


def _exchange(program: ProgramBuilder, number: int, size: int, extra: int) -> None:
    """Halve, then double; `number` is that of this rank among those that are left."""
    bits = [1 << at for at in range(size.bit_length() - 1)]
    for bit in reversed(bits):
        peer = _rank_of(number ^ bit, extra)
        for chunk in _block(number ^ bit, bit):
            program.send(peer, chunk)
        for chunk in _block(number, bit):
            program.recv_reduce(peer, chunk, is_final=bit == 1)
    for bit in bits:
        peer = _rank_of(number ^ bit, extra)
        for chunk in _block(number, bit):
            program.send(peer, chunk)
        for chunk in _block(number ^ bit, bit):
            # A complete chunk proves that the part of it which went there arrived.
            program.recv(peer, chunk, is_proof=True)


def _block(number: int, length: int) -> range:
    """Return the chunks of the aligned block of this length in which `number` lies."""
    first = number // length * length
    return range(first, first + length)


def _rank_of(number: int, extra: int) -> int:
    return 2 * number if number < extra else number + extra


__all__ = ["allreduce"]
