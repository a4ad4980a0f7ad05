"""R2CC-AllReduce as published: a ring of all ranks and, concurrently, a ring of the healthy ranks.

One rank, the straggler, has lost the fraction X of its bandwidth B. The buffer has D bytes. The
share 1 - Y of the buffer is reduced in the ring of all n ranks, the share Y in the ring of the
m = n - 1 healthy ranks. After this partial allreduce, the tail adds the straggler's data for the
share Y: the straggler sends it in K chunks to one healthy rank, the helper. The helper reduces each
chunk and, when a chunk is complete, sends the sum along a chain of the other healthy ranks. The
last of them sends the sum to the straggler. The times are:

    T1 = 2(n - 1)/n (1 - Y) D / ((1 - X) B)     ring of all ranks
    T2 = 2(m - 1)/m Y D / (X B)                 ring of the healthy ranks, with bandwidth X B
    T3 = Y D / ((1 - X) B) (1 + 1/K)            tail
    T  = max(T1, T2) + T3

The published choice is Y = X. The optimum (`split`) is T1 = T2 if a byte costs the straggler less
in the tail than in the ring, that is 1 + 1/K < 2(n - 1)/n, or K > n/(n - 2); otherwise it is Y = 0,
the ring alone. The helper does not return the sum to the straggler itself: it would then send 2 Y D
in the tail, which would take longer than T3 if X < 1/2 and K is large.

Steps: 2(n - 1) if Y = 0, otherwise the larger of 2(n - 1) and 3n - 5. Bytes on the wire: the
straggler sends and receives (2(n - 1)/n (1 - Y) + Y) D, each healthy rank sends and receives
(2(n - 1)/n (1 - Y) + (2(m - 1)/m + 1) Y) D.

This algorithm is here for comparison; `leaf_ring` takes less time. Healthy ranks do not need the
partial sum: it is enough that the owner of a section has it after the reduce-scatter. If the
straggler's data is added there, the allgather distributes the complete sum. This takes 2(n - 1)
transfers per byte instead of 3n - 4, and no tail.

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
    """Build the R2CC allreduce, with the slowest rank as the straggler.

    Parameters
    ----------
    bandwidths : sequence of int
        Bandwidth of each rank, in any unit, above 0.
    nchunks : int
        Number of chunks of the tail, K in the module docstring.
    share : Fraction, optional
        Share of the data for the ring of healthy ranks, Y in the module docstring, 0 to 1. Default:
        `split`. Ignored for one rank.
    nchannels : tuple of int
        Number of channels of the ring of all ranks, and of the ring of healthy ranks; with one
        rank, the second number is ignored. The times in the module docstring assume that the first
        ring has the bandwidth (1 - X) B. If channels share a port equally, the numbers must
        therefore be in the proportion (1 - X) to X. If channels are tied to rails, those of the
        second ring must be on the rails that the straggler has lost.

    Raises
    ------
    InvalidArgument
        If there is no rank; if a bandwidth, `nchunks` or a number of channels is below 1; or if
        `share` is below 0 or above 1.
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
    """Return the share Y that minimizes the time of the model in the module docstring.

    Parameters
    ----------
    nranks : int
        Number of ranks, n.
    lost : Fraction
        Fraction X of the straggler's bandwidth that is lost, 0 or more and below 1.
    nchunks : int
        Number of chunks of the tail, K.
    """
    if nchunks * (nranks - 2) <= nranks:
        return Fraction(0)
    of_all = Fraction(2 * (nranks - 1), nranks) * lost
    of_healthy = Fraction(2 * (nranks - 2), nranks - 1) * (1 - lost)
    return of_all / (of_all + of_healthy)


def time_of(nranks: int, lost: Fraction, nchunks: int, share: Fraction) -> Fraction:
    """Return the time T of the model in the module docstring, in units of D/B.

    Parameters
    ----------
    nranks : int
        Number of ranks, n.
    lost : Fraction
        Fraction X of the straggler's bandwidth that is lost, 0 or more and below 1; above 0 if
        `share` is above 0.
    nchunks : int
        Number of chunks of the tail, K.
    share : Fraction
        Share of the data for the ring of healthy ranks, Y.
    """
    left = 1 - lost
    of_all = Fraction(2 * (nranks - 1), nranks) * (1 - share) / left
    of_healthy = Fraction(2 * (nranks - 2), nranks - 1) * share / lost if share else 0
    return max(of_all, of_healthy) + share / left * (1 + Fraction(1, nchunks))


def _partial(nranks: int, straggler: int, nchunks: int) -> BlendPart:
    """Return the partial allreduce and the tail; the helper is the first healthy rank."""
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
    # The last message of the ring is processed last, so an op that waits for it waits for the ring.
    is_over = len(program) - 1
    for number in range(nchunks):
        chunks = every[number * seat.size : (number + 1) * seat.size]
        for chunk in chunks:
            # RECV into scratch memory, because the data of a RECV_REDUCE could arrive before the
            # ring is over.
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
