"""Ring allreduce: a reduce-scatter, then an allgather, over n chunks.

Position p in the ring sends to p + 1 and receives from p - 1. In step s of the reduce-scatter it
passes on chunk p - s and adds chunk p - s - 1; after n - 1 steps it holds chunk p + 1 complete,
which travels once more around the ring. Each send waits for the receive just before it and
nothing else, so slices of all steps are in flight together.

Steps: 2(n - 1) messages one after another. Bytes on the wire: every rank sends and receives
2(n - 1)/n of the data, the least any allreduce of equal ranks can do.

References
----------
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Cost, Kind, Op, Schedule, Space


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
    if rank_orders is None:
        orders = [tuple(range(nranks))] * nchannels
    else:
        orders = [tuple(order) for order in rank_orders]
        every = list(range(nranks))
        if len(orders) != nchannels or any(sorted(order) != every for order in orders):
            raise InvalidArgument(
                f"rank_orders={orders!r}: give {nchannels} permutations of 0 to {nranks - 1}, "
                "one a channel"
            )
    places = [{rank: place for place, rank in enumerate(order)} for order in orders]
    share = Fraction(2 * (nranks - 1), max(nranks, 1))

    def generate(rank: int) -> tuple[tuple[Op, ...], ...]:
        built: dict[tuple[int, int, int], tuple[Op, ...]] = {}
        channels = []
        for order, place in zip(orders, places, strict=True):
            at = place[rank]
            key = (at, order[at - 1], order[(at + 1) % nranks])
            if key not in built:  # channels that run in the same order share one tuple
                built[key] = _program(nranks, *key)
            channels.append(built[key])
        return tuple(channels)

    return Schedule(
        name="ring",
        collective="allreduce",
        nranks=nranks,
        nchunks=(nranks,) * nchannels,
        cost=Cost(2 * (nranks - 1), share, share, max(1, 4 * (nranks - 1))),
        generate=generate,
    )


def _program(n: int, p: int, left: int, right: int) -> tuple[Op, ...]:
    """Ops of position `p`: step s of the 2(n - 1) is op 2s, a send, and op 2s + 1, a receive."""
    own, out = Space.INPUT, Space.OUTPUT
    if n == 1:
        return (Op(Kind.COPY, -1, own, 0, out, 0, (), True),)
    ops = []
    for s in range(n - 1):  # reduce-scatter; the first send alone reads this rank's own data
        source, after = (out, (2 * s - 1,)) if s else (own, ())
        ops.append(Op(Kind.SEND, right, source, (p - s) % n, out, -1, after))
        chunk = (p - s - 1) % n
        ops.append(Op(Kind.RECV_REDUCE, left, own, chunk, out, chunk, (), s == n - 2))
    for s in range(n - 1):  # allgather
        forward, chunk = (p + 1 - s) % n, (p - s) % n
        ops.append(Op(Kind.SEND, right, out, forward, out, -1, (2 * (n - 1 + s) - 1,)))
        # The complete chunk replaces the partial one that reduce-scatter step s sent from there.
        # That it is complete proves that the partial one arrived.
        ops.append(Op(Kind.RECV, left, out, -1, out, chunk, (2 * s,), False, True))
    return tuple(ops)


__all__ = ["allreduce"]
