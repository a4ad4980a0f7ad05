"""Reference interpreter: runs a schedule on NumPy arrays, all ranks in one thread.

The interpreter runs the ops as `r2ccl.schedule.ir` defines them, on whole chunks. Tests compare its
results with the executor's. The interpreter does not use the checker, so tests can also use it to
verify the checker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InvalidArgument, ScheduleError
from r2ccl.schedule.chunks import Range, layout
from r2ccl.schedule.ir import Op, OpKind, Schedule, Space

Array = npt.NDArray[Any]

#: A message: source rank, destination rank, channel, position among the messages of this link.
Ticket = tuple[int, int, int, int]

#: ``reduce(left, right)`` reduces two arrays element by element.
Reduce = Callable[[Array, Array], Array]


class _Task(NamedTuple):
    number: int
    rank: int
    channel: int
    op: Op
    ticket: Ticket


def interpret(
    schedule: Schedule,
    inputs: Sequence[Array],
    op: Reduce,
    in_place: bool = False,
    *,
    finish: Callable[[Array], Array] | None = None,
    weights: Sequence[int] | None = None,
    parts: Sequence[Range] = (),
) -> list[Array]:
    """Run `schedule` on NumPy arrays and return the output of every rank.

    Parameters
    ----------
    schedule : Schedule
    inputs : sequence of ndarray, shape (count,)
        One array per rank, all with the same length and dtype; never written. Object arrays are
        allowed.
    op : callable
        ``op(left, right)`` reduces two arrays element by element. `OpKind` defines the order of the
        operands.
    in_place : bool
        If True, INPUT and OUTPUT are the same memory.
    finish : callable, optional
        ``finish(chunk)`` is applied to the result of every op with `is_final`, for example to
        divide for AVG. Default: the results stay as they are.
    weights : sequence of int, optional
        Share of each channel. Default: the weights of the schedule.
    parts : sequence of Range, optional
        Range of elements of each part, the same in every array. Default: equal parts.

    Returns
    -------
    list of ndarray, shape (count,)
        Output of each rank. Elements that an out-of-place schedule never writes are 0 (None in
        object arrays).

    Raises
    ------
    InvalidArgument
        If `inputs` is not one flat array per rank, if the arrays differ in length or dtype, if
        `in_place` is True and the collective cannot be in place, or if
        `r2ccl.schedule.chunks.layout` cannot divide the arrays with these `weights` and `parts`.
    ScheduleError
        If `Schedule.program` refuses the program of a rank, the ops deadlock, or an op waits for a
        message that no rank sends.
    """
    _require_alike(schedule, inputs)
    if in_place and not schedule.can_be_in_place:
        raise InvalidArgument(f"{schedule.collective} cannot be in place: pass in_place=False")
    machine = _Machine(schedule, inputs, op, finish, weights, parts, in_place=in_place)
    waiting = _tasks(schedule)
    while waiting:
        left = [task for task in waiting if not machine.advance(task)]
        if len(left) == len(waiting):
            first, nothers = left[0], len(left) - 1
            others = f", as do {nothers} other ops" if nothers > 1 else ", as does 1 other op"
            raise ScheduleError(
                f"{first.op!r} waits forever{others if nothers else ''}; run check() to find the "
                "cause",
                rank=first.rank,
                channel=first.channel,
                op=first.number,
            )
        waiting = left
    return [memory[Space.OUTPUT] for memory in machine.memories]


class _Machine:
    """Memory of all ranks, and the messages in flight between them."""

    def __init__(
        self,
        schedule: Schedule,
        inputs: Sequence[Array],
        op: Reduce,
        finish: Callable[[Array], Array] | None,
        weights: Sequence[int] | None,
        parts: Sequence[Range],
        *,
        in_place: bool,
    ) -> None:
        count, dtype = inputs[0].size, inputs[0].dtype
        self._op = op
        self._finish = finish
        weights = weights or schedule.weights
        self._chunks = layout(
            count, schedule.nchunks, weights, dtype.itemsize, schedule.nparts, parts=parts
        )
        self._done: set[tuple[int, int, int]] = set()
        self._messages: dict[Ticket, Array] = {}
        self.memories: list[dict[int, Array]] = []
        empty = None if dtype == np.dtype(object) else 0
        for array in inputs:
            source = array.copy()
            target = source if in_place else np.full_like(source, empty)
            scratch = np.full_like(source, empty)
            self.memories.append(
                {Space.INPUT: source, Space.OUTPUT: target, Space.SCRATCH: scratch}
            )

    def advance(self, task: _Task) -> bool:
        """Run `task` if its dependencies are done and the message that it receives was sent.

        A task that receives nothing needs only its dependencies. Return True if the task ran.
        """
        op, rank, channel = task.op, task.rank, task.channel
        if any((rank, channel, i) not in self._done for i in op.after):
            return False
        is_receive = op.kind in (OpKind.RECV, OpKind.RECV_REDUCE)
        if is_receive and task.ticket not in self._messages:
            return False
        where = slice(*self._chunks[channel][op.chunk])
        source = self.memories[rank][op.src_space][where]
        if op.kind == OpKind.SEND:
            self._messages[task.ticket] = source.copy()
        else:
            received = self._messages.pop(task.ticket) if is_receive else source
            target = self.memories[rank][op.dst_space][where]
            target[:] = _result(task, source, target, received, self._op)
            if op.is_final and self._finish is not None:
                target[:] = self._finish(target)
        self._done.add((rank, channel, task.number))
        return True


def _result(task: _Task, source: Array, target: Array, received: Array, reduce: Reduce) -> Array:
    op = task.op
    if op.kind == OpKind.RECV:
        return received
    if op.kind == OpKind.RECV_REDUCE:
        return reduce(received, source) if op.peer < task.rank else reduce(source, received)
    if op.kind == OpKind.REDUCE:
        return reduce(target, source)
    return source


def _tasks(schedule: Schedule) -> list[_Task]:
    """Return all ops, sorted by index so that one pass runs most ops of a regular schedule."""
    tasks = []
    posted: dict[tuple[bool, int, int, int], int] = {}
    for rank in range(schedule.nranks):
        for channel, ops in enumerate(schedule.program(rank).channels):
            for index, op in enumerate(ops):
                is_send = op.kind == OpKind.SEND
                ends = (rank, op.peer) if is_send else (op.peer, rank)
                position = posted.get((is_send, *ends, channel), 0)
                posted[is_send, *ends, channel] = position + 1
                ticket = (*ends, channel, position)
                tasks.append(_Task(index, rank, channel, op, ticket))
    return sorted(tasks, key=lambda task: task[:3])


def _require_alike(schedule: Schedule, inputs: Sequence[Array]) -> None:
    forms = {f"{array.dtype} of shape {array.shape}" for array in inputs}
    if len(inputs) != schedule.nranks or len(forms) != 1 or inputs[0].ndim != 1:
        given = f" ({', '.join(sorted(forms))})" if forms else ""
        raise InvalidArgument(
            f"the schedule has {schedule.nranks} ranks; {len(inputs)} inputs were given{given}: "
            "give one flat array per rank, all with the same length and dtype"
        )


__all__ = ["interpret"]
