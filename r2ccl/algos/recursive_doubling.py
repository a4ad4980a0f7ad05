"""Recursive doubling allreduce: log2(n) exchanges of the whole buffer, for small messages.

Let m be the largest power of two that is at most n. If n > m, the first 2(n - m) ranks fold in
pairs: the odd rank sends its data to the even rank below it, and gets the result at the end. The
remaining m ranks are numbered in rank order. In step k each of them exchanges its data with the
rank whose number differs in bit k, and reduces.

Order: a rank always holds the sum of a contiguous interval of ranks; its partner's interval is
adjacent, on the side of the partner's rank. The received data is the left operand if and only if
the peer is the lower rank, so both partners compute ``lower + upper`` with the same operands. Every
rank ends with the same expression, in rank order, and with the same bits.

Steps: log2(m) dependent messages, plus 2 if n > m. Bytes on the wire: the busiest rank sends and
receives the data log2(m) times, and once more if n > m.

References
----------
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19(1), 2005.
"""

from __future__ import annotations

from fractions import Fraction

from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space


def allreduce(nranks: int, nchannels: int = 1) -> Schedule:
    """Build the recursive doubling allreduce of `nranks` ranks.

    Parameters
    ----------
    nranks : int
        Number of ranks, which need not be a power of two. With one rank the schedule copies input
        to output.
    nchannels : int
        Number of independent copies of the pattern, each on its own share of the buffer.

    Returns
    -------
    Schedule
        Has one chunk per channel, and at most 2 log2(n) + 2 ops per rank and channel.

    Raises
    ------
    InvalidArgument
        If `nranks` or `nchannels` is below 1.
    """
    doublings = max(nranks, 1).bit_length() - 1
    has_fold = nranks > 1 << doublings
    share = Fraction(doublings + has_fold)
    return Schedule(
        name="recursive_doubling",
        collective="allreduce",
        nranks=nranks,
        nchunks=(1,) * nchannels,
        cost=Cost(doublings + 2 * has_fold, share, share, max(1, 2 * doublings + 2 * has_fold)),
        generate=lambda rank: (_program(nranks, rank),) * nchannels,
    )


def _program(n: int, rank: int) -> tuple[Op, ...]:
    doublings = n.bit_length() - 1
    extra = n - (1 << doublings)
    if n == 1:
        return (Op(OpKind.COPY, -1, Space.INPUT, 0, Space.OUTPUT, 0, (), True),)
    if rank < 2 * extra and rank % 2:
        return (
            _send(rank - 1, Space.INPUT),
            Op(OpKind.RECV, rank - 1, Space.OUTPUT, -1, Space.OUTPUT, 0, (0,)),
        )
    held, ops = Space.INPUT, []
    if rank < 2 * extra:
        ops.append(_reduce(rank + 1, held, (), False))
        held = Space.OUTPUT
    number = rank // 2 if rank < 2 * extra else rank - extra
    for bit in range(doublings):
        partner = number ^ (1 << bit)
        peer = 2 * partner if partner < extra else partner + extra
        ready = (len(ops) - 1,) if ops else ()
        ops.append(_send(peer, held, ready))
        # The reduction overwrites the memory that the send reads; in place, already in step 0.
        ops.append(_reduce(peer, held, (len(ops) - 1,), bit == doublings - 1))
        held = Space.OUTPUT
    if rank < 2 * extra:
        ops.append(_send(rank + 1, held, (len(ops) - 1,)))
    return tuple(ops)


def _send(peer: int, space: Space, after: tuple[int, ...] = ()) -> Op:
    return Op(OpKind.SEND, peer, space, 0, Space.OUTPUT, -1, after)


def _reduce(peer: int, space: Space, after: tuple[int, ...], is_final: bool) -> Op:
    return Op(OpKind.RECV_REDUCE, peer, space, 0, Space.OUTPUT, 0, after, is_final)


__all__ = ["allreduce"]
