"""Rings: reduce-scatter, allgather, and the allreduce that is one after the other.

Place p in the ring sends to p + 1 and receives from p - 1, and the data is cut in n sections. In
step s of the reduce-scatter, place p passes on section p - s and adds section p - s - 1; after
n - 1 steps it holds section p + 1 complete. In step s of the allgather it passes on section
p + 1 - s, its own first, and receives section p - s. Each send waits for the receive just before it
and nothing else, so slices of all steps are in flight together.

Steps: n - 1 messages one after another for each of the two. Bytes on the wire: every rank sends and
receives (n - 1)/n of the data for each, the least any schedule of equal ranks can do.

They win where bandwidth decides and all ranks have the same; a ring is as slow as its slowest rank.
Broadcast and reduce have no file of their own here: `tree.broadcast` and `tree.reduce` over
``[tree.chain(order)]`` for each channel are the pipeline along a chain, every rank sending and
receiving the data at most once.

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
    """A rank's place in a ring, counted from 0, the ring's size, and the two neighbours."""

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
        Size of the communicator; with one rank the schedule copies input to output.
    nchannels : int
        Independent rings, each over its own share of the buffer.
    rank_orders : sequence of sequence of int, optional
        For every channel the ranks in ring order. Default: 0 to n - 1 on every channel.

    Returns
    -------
    Schedule
        ``nranks`` chunks a channel; 4(n - 1) ops a rank and channel.

    Raises
    ------
    InvalidArgument
        A size below 1, or orders that are not one permutation of the ranks for each channel.
    """
    return _schedule("allreduce", nranks, nchannels, rank_orders, _allreduce_ops)


def reduce_scatter(
    nranks: int, nchannels: int = 1, rank_orders: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Build the ring reduce-scatter: rank r ends with chunk r; else as `allreduce`."""
    return _schedule("reduce_scatter", nranks, nchannels, rank_orders, _reduce_scatter_ops)


def allgather(
    nranks: int, nchannels: int = 1, rank_orders: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Build the ring allgather: rank r starts with chunk r; else as `allreduce`."""
    return _schedule("allgather", nranks, nchannels, rank_orders, _allgather_ops)


def seat_of(order: Sequence[int], rank: int) -> Seat:
    """Find the seat of `rank` in the ring `order`."""
    place = order.index(rank)
    return Seat(place, len(order), order[place - 1], order[(place + 1) % len(order)])


def add_reduce_scatter(
    program: ProgramBuilder, seat: Seat, sections: Sequence[Sequence[int]], *, is_final: bool = True
) -> None:
    """Reduce section by section around the ring.

    Parameters
    ----------
    program : ProgramBuilder
        Of the rank in `seat`.
    seat : Seat
    sections : sequence of sequence of int
        One a place, each of any chunks. The rank ends with section ``place + 1``.
    is_final : bool
        That one is then complete: nobody outside of the ring has anything to add.
    """
    for step in range(seat.size - 1):
        for chunk in sections[(seat.place - step) % seat.size]:
            program.send(seat.right, chunk)
        for chunk in sections[(seat.place - step - 1) % seat.size]:
            program.recv_reduce(seat.left, chunk, is_final=is_final and step == seat.size - 2)


def add_allgather(program: ProgramBuilder, seat: Seat, sections: Sequence[Sequence[int]]) -> None:
    """Give everybody in the ring each section, as the reduce-scatter leaves them.

    What replaces a part that was sent in the reduce-scatter must contain it.
    """
    for step in range(seat.size - 1):
        for chunk in sections[(seat.place + 1 - step) % seat.size]:
            program.send(seat.right, chunk)
        for chunk in sections[(seat.place - step) % seat.size]:
            # That the sum is there proves that this rank's part of it arrived.
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
        # Channels that run in the same order share one tuple.
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
            f"rank_orders={orders!r}: give {nchannels} permutations of 0 to {nranks - 1}, "
            "one a channel"
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
    """Name the sections so that each rank's own is the one behind its place."""
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
