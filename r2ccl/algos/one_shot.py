"""One-shot allreduce: every rank sends its data to all others, and reduces all data itself.

All ranks reduce in the same order, from the highest rank down to rank 0, independent of timing;
otherwise their sums would differ in the last bits. In scratch memory, a rank first reduces the data
of the ranks above it, then its own data, then the data of each rank below it. The data of the ranks
below lands in OUTPUT, one rank at a time, after the data of the previous rank is reduced. The first
of these receives waits until the rank has sent its own data: in an in-place call, OUTPUT holds that
data. One chunk of scratch memory is enough.

Steps: 1. Bytes on the wire: each rank sends and receives n - 1 times the data.

Use it for a few bytes among few ranks, especially three, where recursive doubling takes three
steps. With many ranks, sending n - 1 messages takes longer than log2(n) dependent messages.
"""

from __future__ import annotations

from fractions import Fraction

from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space


def allreduce(nranks: int, nchannels: int = 1) -> Schedule:
    """Build the one-shot allreduce of `nranks` ranks.

    Parameters
    ----------
    nranks : int
        Number of ranks. With one rank the schedule copies input to output.
    nchannels : int
        Number of independent copies of the pattern, each on its own share of the buffer.

    Returns
    -------
    Schedule
        Has one chunk per channel, and at most 3n - 1 ops per rank and channel.

    Raises
    ------
    InvalidArgument
        If `nranks` or `nchannels` is below 1.
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
    # Every rank starts with a different peer, so that no rank receives all messages at once.
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
