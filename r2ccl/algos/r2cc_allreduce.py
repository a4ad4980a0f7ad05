"""R2CC-AllReduce: a ring of all ranks beside one that leaves the straggler out; as published.

One rank has lost the fraction X of its bandwidth B. Of D bytes, a share 1 - Y takes the ring of all
n ranks; the rest takes that of the m = n - 1 healthy ones. After that partial allreduce one of them
helps the straggler: in K chunks the straggler's data goes to the helper, who adds it and lets go of
a chunk when it has all of it; the sum goes along a chain of the other healthy ranks, and back to
the straggler. So

    T1 = 2(n - 1)/n (1 - Y) D / ((1 - X) B)     the ring of all
    T2 = 2(m - 1)/m Y D / (X B)                 the healthy ranks' ring, with what that leaves
    T3 = Y D / ((1 - X) B) (1 + 1/K)            the tail
    T  = max(T1, T2) + T3

The published choice is Y = X. The best (`split`) is T1 = T2 where a byte costs the straggler less
in the tail than in the ring, 1 + 1/K < 2(n - 1)/n, which is K > n/(n - 2); else Y = 0, the ring.
The sum returns to the straggler from the chain's end: a helper that sent it both ways would send
2 Y D, and for X < 1/2 the tail would take longer than T3.

Steps: 3n - 5, and 2(n - 1) at least. Bytes on the wire: the straggler as in T1 and T3, the others
(2(n - 1)/n (1 - Y) + (2(m - 1)/m + 1) Y) D.

It is here to be compared with, and `leaf_ring` takes less time. Healthy ranks need no partial sum;
it is enough that the owner of a section has it, after the reduce-scatter. If the straggler's data
joins there, the allgather hands the whole sum around. That takes 2(n - 1) transfers of a byte
instead of 3n - 4, and no tail.

Imports `bandwidths`, `blend`, `leaf_ring`, `ring`, `schedule` and `errors`. Invariant: shares are
exact fractions of the integers given, equal on every rank.

References
----------
Wang et al., "Reliable and resilient collective communication library for LLM training and serving",
arXiv:2512.25059, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from r2ccl.algos import leaf_ring
from r2ccl.algos.bandwidths import straggler_of
from r2ccl.algos.blend import BlendPart, blend
from r2ccl.algos.ring import Seat, add_allgather, add_reduce_scatter, seat_of
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Op, Schedule, Space


def allreduce(
    bandwidths: Sequence[int],
    nchunks: int = 1,
    share: Fraction | None = None,
    nchannels: tuple[int, int] = (1, 1),
) -> Schedule:
    """Build the allreduce that spares the slowest rank.

    Parameters
    ----------
    bandwidths : sequence of int
        Of every rank, in any unit, above 0.
    nchunks : int
        K.
    share : Fraction, optional
        Y, 0 to 1. Default: what `split` says. One rank alone shares nothing out.
    nchannels : tuple of int
        Channels of the ring of all and of the healthy ranks' ring. The model lets the first have
        (1 - X) B: where channels share a port as equals, they must be as (1 - X) to X; with rails
        of their own, those of the second must be on the rails that the straggler has lost.

    Raises
    ------
    InvalidArgument
        No rank, a bandwidth or a number below 1, a share below 0 or above 1.
    """
    if nchunks < 1:
        raise InvalidArgument(f"nchunks={nchunks}; give 1 or more")
    n, straggler = len(bandwidths), straggler_of(bandwidths)
    if n == 1:
        return blend("r2cc", [leaf_ring.part(1, [0])], [Fraction(1)], nchannels[:1])
    share = split(n, straggler.lost, nchunks) if share is None else share
    parts = [leaf_ring.part(n, range(n)), _partial(n, straggler.rank, nchunks)]
    return blend("r2cc", parts, [1 - share, share], nchannels)


def split(nranks: int, lost: Fraction, nchunks: int) -> Fraction:
    """Return the share Y with which the model ends soonest.

    Parameters
    ----------
    nranks : int
    lost : Fraction
        X: of the straggler's bandwidth, 0 or more and below 1.
    nchunks : int
        K.
    """
    if nchunks * (nranks - 2) <= nranks:
        return Fraction(0)
    of_all = Fraction(2 * (nranks - 1), nranks) * lost
    of_healthy = Fraction(2 * (nranks - 2), nranks - 1) * (1 - lost)
    return of_all / (of_all + of_healthy)


def time_of(nranks: int, lost: Fraction, nchunks: int, share: Fraction) -> Fraction:
    """Return what the model says, in units of D/B; see the top of this file.

    Parameters
    ----------
    nranks : int
    lost : Fraction
        X: of the straggler's bandwidth, 0 or more and below 1; above 0 if `share` is.
    nchunks : int
        K.
    share : Fraction
        Y.
    """
    left = 1 - lost
    of_all = Fraction(2 * (nranks - 1), nranks) * (1 - share) / left
    of_healthy = Fraction(2 * (nranks - 2), nranks - 1) * share / lost if share else 0
    return max(of_all, of_healthy) + share / left * (1 + Fraction(1, nchunks))


def _partial(nranks: int, straggler: int, nchunks: int) -> BlendPart:
    """Make the allreduce of the healthy ranks, the first of which helps, with its tail."""
    ring = tuple(rank for rank in range(nranks) if rank != straggler)
    size = len(ring)
    of_healthy = Fraction(2 * (size - 1), size) + 1
    loads = tuple(Fraction(1) if rank == straggler else of_healthy for rank in range(nranks))
    return BlendPart(
        nchunks=nchunks * size,
        steps=max(2 * (size - 1), 1) + size,
        sent=loads,
        received=loads,
        nops=nchunks * (4 * (size - 1) + 3 * size + (size == 1)),
        ops_of=lambda rank: (
            _straggler_ops(ring, size * nchunks)
            if rank == straggler
            else _healthy_ops(seat_of(ring, rank), straggler, nchunks)
        ),
    )


def _healthy_ops(seat: Seat, straggler: int, nchunks: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    every = range(seat.size * nchunks)
    sections = [every[first :: seat.size] for first in range(seat.size)]
    add_reduce_scatter(program, seat, sections, is_final=False)
    add_allgather(program, seat, sections)
    following = seat.right if seat.place < seat.size - 1 else straggler
    if seat.place > 0:
        for chunk in every:
            program.recv(seat.left, chunk)
            program.send(following, chunk)
        return program.ops()
    if seat.size == 1:
        for chunk in every:
            program.copy(chunk, Space.INPUT)
    # The ring's last message is used last, so whoever waits for that waits for the ring.
    is_over = len(program) - 1
    for number in range(nchunks):
        chunks = every[number * seat.size : (number + 1) * seat.size]
        for chunk in chunks:
            # Into scratch memory, for a RECV_REDUCE might let the data come before its time.
            program.recv(straggler, chunk, after=[is_over], space=Space.SCRATCH)
            added = program.reduce(chunk, Space.SCRATCH, is_final=True)
        for chunk in chunks:
            program.send(following, chunk, after=[added])
    return program.ops()


def _straggler_ops(ring: Sequence[int], nchunks: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    for chunk in range(nchunks):
        program.send(ring[0], chunk)
        program.recv(ring[-1], chunk, is_proof=True)
    return program.ops()


__all__ = ["allreduce", "split", "time_of"]
