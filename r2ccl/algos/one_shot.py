"""One-shot allreduce: everybody sends everything to everybody, and reduces for itself.

All ranks must reduce in the same order, or their sums would differ in the last bits: from the
highest rank down to rank 0, whatever arrives first. So a rank first adds up the data of those above
it, in scratch memory; then its own; then that of each rank below it, which lands in the output when
the one before has been added, and when its own data, which may lie there, has been sent. Scratch
memory has room for one chunk, and more is not needed.

Steps: 1. Bytes on the wire: each rank sends and receives n - 1 times the data.

It wins for a few bytes among few ranks, three above all, where recursive doubling takes three
steps; with many ranks, sending n - 1 messages takes longer than waiting for log2(n) of them.

Imports `schedule` and `errors`.
"""

from __future__ import annotations

from fractions import Fraction

from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space


def allreduce(nranks: int, nchannels: int = 1) -> Schedule:
    """Build the one-shot allreduce of `nranks` ranks.

    Parameters
    ----------
    nranks : int
        Size of the communicator; with one rank the schedule copies input to output.
    nchannels : int
        Independent copies of the pattern, each over its own share of the buffer.

    Returns
    -------
    Schedule
        One chunk a channel; at most 3n - 1 ops a rank and channel.

    Raises
    ------
    InvalidArgument
        A size below 1.
    """
    share = Fraction(nranks - 1)
    return Schedule(
        name="one_shot",
        collective="allreduce",
        nranks=nranks,
        nchunks=(1,) * nchannels,
        cost=Cost(min(1, nranks - 1), share, share, 3 * nranks - 1 if nranks > 1 else 1),
        generate=lambda rank: (_program(nranks, rank),) * nchannels,
    )


def _program(n: int, rank: int) -> tuple[Op, ...]:
    own, out, scratch = Space.INPUT, Space.OUTPUT, Space.SCRATCH
    if n == 1:
        return (Op(OpKind.COPY, -1, own, 0, out, 0, (), True),)
    # Everybody starts with another peer, so that nobody gets all messages at once.
    peers = [(rank + distance) % n for distance in range(1, n)]
    ops = [Op(OpKind.SEND, peer, own, 0, out, -1) for peer in peers]
    for peer in range(n - 1, rank, -1):
        if peer == n - 1:
            ops.append(Op(OpKind.RECV, peer, out, -1, scratch, 0))
        else:
            ops.append(Op(OpKind.RECV_REDUCE, peer, scratch, 0, scratch, 0, (len(ops) - 1,)))
    if rank == n - 1:
        ops.append(Op(OpKind.COPY, -1, own, 0, scratch, 0))
    else:
        ops.append(Op(OpKind.REDUCE, -1, own, 0, scratch, 0, (len(ops) - 1,), rank == 0))
    sent = tuple(range(n - 1))
    for peer in range(rank - 1, -1, -1):
        is_first = peer == rank - 1
        after = (*(sent if is_first else ()), len(ops) - 1)
        ops.append(Op(OpKind.RECV, peer, out, -1, out, 0, after))
        ops.append(Op(OpKind.REDUCE, -1, out, 0, scratch, 0, (len(ops) - 1,), peer == 0))
    ops.append(Op(OpKind.COPY, -1, scratch, 0, out, 0, (*sent, len(ops) - 1)))
    return tuple(ops)


__all__ = ["allreduce"]
