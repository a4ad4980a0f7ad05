"""Ring reduce-scatter and allgather, and the ring allreduce, which consists of both.

Position p in the ring sends to p + 1 and receives from p - 1. The data is divided into n sections.
In step s of the reduce-scatter, position p sends section p - s and reduces section p - s - 1; after
n - 1 steps its section p + 1 is complete. In step s of the allgather it sends section p + 1 - s,
that is, its complete section first, and receives section p - s. Each send depends only on the
receive of the step before, so slices of all steps are in flight at the same time.

Steps: n - 1 dependent messages for the reduce-scatter, and n - 1 for the allgather. Bytes on the
wire: in each of the two, every rank sends and receives (n - 1)/n of the data, the minimum for equal
ranks.

Use rings for large messages among ranks with equal bandwidths: a ring is as slow as its slowest
rank. For a pipelined broadcast or reduce along a chain, pass ``[tree.chain(order)]`` to
`tree.broadcast` or `tree.reduce`: every rank then sends and receives the data at most once.

References
----------
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Cost, Op, Schedule, Space


class Seat(NamedTuple):
    """Position of a rank in a ring (from 0), the ring's size, and the rank's two neighbors."""

    place: int
    size: int
    left: int
    right: int


def allreduce(
    nranks: int, nchannels: int = 1, rank_orders: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Build the ring allreduce of `nranks` ranks.

    Parameters
    ----------
    nranks : int
        Number of ranks. With one rank the schedule copies input to output.
    nchannels : int
        Number of independent rings, each on its own share of the buffer.
    rank_orders : sequence of sequence of int, optional
        Ranks in ring order, for each channel. Default: 0 to n - 1 on every channel.

    Returns
    -------
    Schedule
        Has ``nranks`` chunks per channel, and 4(n - 1) ops per rank and channel, or one op if n is
        1.

    Raises
    ------
    InvalidArgument
        If `nranks` or `nchannels` is below 1, or `rank_orders` is not one permutation of the ranks
        per channel.
    """
    return _schedule("allreduce", nranks, nchannels, rank_orders, _allreduce_ops)


def reduce_scatter(
    nranks: int, nchannels: int = 1, rank_orders: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Build the ring reduce-scatter: rank r ends with chunk r.

    Arguments and errors as in `allreduce`.
    """
    return _schedule("reduce_scatter", nranks, nchannels, rank_orders, _reduce_scatter_ops)


def allgather(
    nranks: int, nchannels: int = 1, rank_orders: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Build the ring allgather: rank r starts with chunk r.

    Arguments and errors as in `allreduce`.
    """
    return _schedule("allgather", nranks, nchannels, rank_orders, _allgather_ops)


def seat_of(order: Sequence[int], rank: int) -> Seat:
    """Return the position and the neighbors of `rank` in the ring `order`."""
    place = order.index(rank)
    return Seat(place, len(order), order[place - 1], order[(place + 1) % len(order)])


def add_reduce_scatter(
    program: ProgramBuilder, seat: Seat, sections: Sequence[Sequence[int]], *, is_final: bool = True
) -> None:
    """Add the ops of a ring reduce-scatter to `program`.

    Parameters
    ----------
    program : ProgramBuilder
        Program of the rank at `seat`.
    seat : Seat
    sections : sequence of sequence of int
        Chunks of each section; one section per position. At the end, the rank has the sum of
        section ``seat.place + 1``, modulo the number of sections.
    is_final : bool
        True if that sum is the result; False if a rank outside the ring contributes to it later.
    """
    for step in range(seat.size - 1):
        for chunk in sections[(seat.place - step) % seat.size]:
            program.send(seat.right, chunk)
        for chunk in sections[(seat.place - step - 1) % seat.size]:
            program.recv_reduce(seat.left, chunk, is_final=is_final and step == seat.size - 2)


def add_allgather(program: ProgramBuilder, seat: Seat, sections: Sequence[Sequence[int]]) -> None:
    """Add the ops of a ring allgather to `program`.

    The rank at `seat` starts with section ``seat.place + 1``, modulo the number of sections, which
    is the result of a ring reduce-scatter. ``sections[p]`` are the chunks of section p. The
    receives have `Op.is_proof`: if the rank contributed to a section earlier in the program, the
    arrival of that section proves that the contribution arrived.
    """
    for step in range(seat.size - 1):
        for chunk in sections[(seat.place + 1 - step) % seat.size]:
            program.send(seat.right, chunk)
        for chunk in sections[(seat.place - step) % seat.size]:
            program.recv(seat.left, chunk, is_proof=True)


def _schedule(
    collective: str,
    nranks: int,
    nchannels: int,
    rank_orders: Sequence[Sequence[int]] | None,
    ops_of: Callable[[tuple[int, ...], int], tuple[Op, ...]],
) -> Schedule:
    orders = _orders(nranks, nchannels, rank_orders)
    passes = 2 if collective == "allreduce" else 1
    share = Fraction(passes * (nranks - 1), max(nranks, 1))
    ncopies = 1 if nranks == 1 or collective == "allgather" else 0

    def generate(rank: int) -> tuple[tuple[Op, ...], ...]:
        # Channels with the same order share one tuple.
        built = {order: ops_of(order, rank) for order in dict.fromkeys(orders)}
        return tuple(built[order] for order in orders)

    return Schedule(
        name="ring",
        collective=collective,
        nranks=nranks,
        nchunks=(nranks,) * nchannels,
        cost=Cost(passes * (nranks - 1), share, share, 2 * passes * (nranks - 1) + ncopies),
        generate=generate,
    )


def _orders(
    nranks: int, nchannels: int, rank_orders: Sequence[Sequence[int]] | None
) -> list[tuple[int, ...]]:
    if rank_orders is None:
        return [tuple(range(nranks))] * nchannels
    orders = [tuple(order) for order in rank_orders]
    every = list(range(nranks))
    if len(orders) != nchannels or any(sorted(order) != every for order in orders):
        raise InvalidArgument(
            f"rank_orders={orders!r}: give one permutation of 0 to {nranks - 1} for each of the "
            f"{nchannels} channels"
        )
    return orders


def _allreduce_ops(order: tuple[int, ...], rank: int) -> tuple[Op, ...]:
    program, seat = ProgramBuilder(), seat_of(order, rank)
    sections = [(chunk,) for chunk in range(len(order))]
    if len(order) == 1:
        program.copy(0, Space.INPUT, is_final=True)
    add_reduce_scatter(program, seat, sections)
    add_allgather(program, seat, sections)
    return program.ops()


def _reduce_scatter_ops(order: tuple[int, ...], rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    if len(order) == 1:
        program.copy(0, Space.INPUT, is_final=True)
    add_reduce_scatter(program, seat_of(order, rank), _by_owner(order))
    return program.ops()


def _allgather_ops(order: tuple[int, ...], rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    program.copy(rank, Space.INPUT)
    add_allgather(program, seat_of(order, rank), _by_owner(order))
    return program.ops()


def _by_owner(order: tuple[int, ...]) -> list[tuple[int]]:
    """Return sections of one chunk each: section p + 1 is the chunk of the rank at position p."""
    return [(order[place - 1],) for place in range(len(order))]


__all__ = [
    "Seat",
    "add_allgather",
    "add_reduce_scatter",
    "allgather",
    "allreduce",
    "reduce_scatter",
    "seat_of",
]
