"""Text views of a schedule: a one-line summary, and a table of ops.

A schedule with malformed ops can be shown too: invalid values appear as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Op, OpKind, Schedule, Space

#: Default number of columns of a table: more are wider than a terminal.
DEFAULT_RANKS = 4

_SPACES: dict[int, str] = {Space.INPUT: "in", Space.OUTPUT: "out", Space.SCRATCH: "scratch"}


def summary(schedule: Schedule) -> str:
    """Return a one-line description of `schedule`, with the cost that it declares."""
    cost = schedule.cost
    return (
        f"{schedule.collective} {schedule.name}: {_count(schedule.nranks, 'rank')}, "
        f"{_count(schedule.nchannels, 'channel')} of {_chunks(schedule)}, "
        f"{_count(cost.steps, 'step')}, "
        f"each rank sends at most {cost.sent} and receives at most {cost.received} of the data, "
        f"at most {_count(cost.ops, 'op')} per rank and channel"
    )


def table(schedule: Schedule, ranks: Sequence[int] | None = None, channel: int = 0) -> str:
    """Return a table of ops of one channel: one column per rank, one line per op.

    Parameters
    ----------
    schedule : Schedule
    ranks : sequence of int, optional
        Ranks to show. Default: the first four.
    channel : int
        Channel to show.

    Returns
    -------
    str
        A cell shows the destination, the operands in order, the indices of the ops that the op
        waits for (after ``@``), and ``!`` if the op completes a reduction. If the program of a rank
        lacks the channel, the cell says how many channels the program has.

    Raises
    ------
    InvalidArgument
        If a rank or the channel does not exist.
    ScheduleError
        If `Schedule.program` refuses the program of a rank.

    Examples
    --------
    >>> from r2ccl.algos import ring
    >>> print(table(ring.allreduce(2)))
    channel 0
      op  rank 0                          rank 1
       0  to 1: in[0]                     to 0: in[1]
       1  out[1] = in[1] + from 1 !       out[0] = from 0 + in[0] !
       2  to 1: out[1] @1                 to 0: out[0] @1
       3  out[0] = from 1 @0              out[1] = from 0 @0
    """
    if ranks is None:
        ranks = range(min(schedule.nranks, DEFAULT_RANKS))
    if not 0 <= channel < schedule.nchannels:
        raise InvalidArgument(f"channel={channel}; allowed is 0 to {schedule.nchannels - 1}")
    columns = []
    for rank in ranks:
        channels = schedule.program(rank).channels
        if channel < len(channels):
            cells = [_cell(op, rank) for op in channels[channel]]
        else:
            cells = [f"has only {_count(len(channels), 'channel')}"]
        columns.append([f"rank {rank}", *cells])
    width = 2 + max((len(cell) for column in columns for cell in column), default=0)
    width = max(width, 32)
    lines = [f"channel {channel}"]
    for i in range(max(map(len, columns), default=0)):
        cells = [column[i] if i < len(column) else "" for column in columns]
        label = "op" if i == 0 else str(i - 1)
        lines.append(f"{label:>4}  {''.join(cell.ljust(width) for cell in cells)}".rstrip())
    return "\n".join(lines)


def _cell(op: Op, rank: int) -> str:
    try:
        return _text(op, rank)
    except (AttributeError, TypeError):  # no Op, or a field of a wrong type
        return repr(op)


def _text(op: Op, rank: int) -> str:
    if op.kind not in set(OpKind):
        return repr(op)
    source, target = _memory(op.src_space, op.src), _memory(op.dst_space, op.dst)
    received = f"from {op.peer}"
    if op.kind == OpKind.SEND:
        text = f"to {op.peer}: {source}"
    elif op.kind == OpKind.RECV:
        text = f"{target} = {received}"
    elif op.kind == OpKind.RECV_REDUCE:
        left, right = (received, source) if op.peer < rank else (source, received)
        text = f"{target} = {left} + {right}"
    elif op.kind == OpKind.COPY:
        text = f"{target} = {source}"
    else:
        text = f"{target} = {target} + {source}"
    waits = " @" + ",".join(map(str, op.after)) if op.after else ""
    return text + waits + (" !" if op.is_final else "")


def _chunks(schedule: Schedule) -> str:
    kinds = dict.fromkeys(schedule.nchunks)
    if len(kinds) == 1:
        return _count(schedule.nchunks[0], "chunk")
    return f"{' or '.join(map(str, kinds))} chunks"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _memory(space: int, chunk: int) -> str:
    return f"{_SPACES.get(space, f'space {space}')}[{chunk}]"


__all__ = ["DEFAULT_RANKS", "summary", "table"]
