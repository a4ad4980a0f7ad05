"""A schedule made compact: every op once, whatever the number of channels that run it.

Imports `schedule` and NumPy. Invariant: what is here says the same as the schedule's own ops; an
op is a *row*, and rows of one rank's channel lie together in program order.

Channels of one shape share their ops: those of a ring over 1,024 ranks with eight channels are 33
million, of which 4 million differ. So an op that happens is a pair: the row and the channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.flowsim.loops.state import MESSAGE_DTYPE, ROW_DTYPE, Records
from r2ccl.schedule.arrays import ScheduleArrays, as_arrays
from r2ccl.schedule.check import check_fields
from r2ccl.schedule.events import match
from r2ccl.schedule.graph import Ints
from r2ccl.schedule.ir import Op, OpKind, Schedule


class Program(NamedTuple):
    """What all ranks do, made once a schedule, for any size and any network.

    Arrays and integers alone, so it can be sent to other processes.

    Parameters
    ----------
    nranks, nparts : int
    nchunks, weights : tuple of int
        As in the schedule.
    shapes : ndarray of int64, shape (nchannels,)
        Shape of each channel: channels of one shape run the same rows.
    rows : Records of ROW_DTYPE, shape (nrows + 1,)
        Shape by shape, rank by rank; the last one only ends the one before it.
    after : ndarray of int32
        Rows that row ``i`` waits for: ``after[rows.after[i]:rows.after[i + 1]]``.
    starts : ndarray of int64, shape (nshapes, nranks + 1)
        First row of every rank.
    messages : Records of MESSAGE_DTYPE
        Rows that send and receive each message: link by link, in the order of the link.
    links : ndarray of int64, shape (nlinks, 5)
        Shape, source, destination, first message, the one behind the last: of every shape's
        links, in order.
    """

    nranks: int
    nparts: int
    nchunks: tuple[int, ...]
    weights: tuple[int, ...]
    shapes: Ints
    rows: Records
    after: npt.NDArray[np.int32]
    starts: Ints
    messages: Records
    links: Ints


def compile_schedule(schedule: Schedule) -> Program:
    """Make `schedule` compact.

    Raises
    ------
    ScheduleError
        A field contradicts its op's kind, or a send meets no receive. Whether the schedule is
        right is not looked at: that is `r2ccl.schedule.check`.

    Notes
    -----
    *Cost*: the ops of all ranks are generated once, and once more whenever channels that were alike
    so far turn out to differ on a later rank.
    """
    arrays, leaders = _distinct(schedule)
    check_fields(schedule, arrays)
    other = match(arrays)
    nranks, ops = schedule.nranks, arrays.ops
    shape_of_leader = np.cumsum(np.isin(np.arange(schedule.nchannels), leaders)) - 1
    lane = shape_of_leader[ops["channel"]] * nranks + ops["rank"]
    starts = np.searchsorted(lane, np.arange((shape_of_leader[-1] + 1) * nranks + 1))
    windows = np.lib.stride_tricks.sliding_window_view(starts, nranks + 1)
    messages, links = _links(ops, other, lane, nranks)
    return Program(
        nranks,
        schedule.nparts,
        schedule.nchunks,
        schedule.weights,
        shape_of_leader[leaders],
        _rows(arrays),
        arrays.waits()[1].astype(np.int32),
        windows[::nranks].copy(),
        messages,
        links,
    )


def _rows(arrays: ScheduleArrays) -> Records:
    kind = arrays.ops["kind"]
    rows = np.zeros(kind.size + 1, ROW_DTYPE)
    rows["after"] = arrays.offsets
    rows["chunk"][:-1] = arrays.chunks()
    rows["kind"][:-1] = kind
    rows["is_direct"][:-1] = kind == OpKind.RECV
    rows["is_reducing"][:-1] = np.isin(kind, (OpKind.RECV_REDUCE, OpKind.REDUCE))
    rows["is_local"][:-1] = np.isin(kind, (OpKind.COPY, OpKind.REDUCE))
    return rows


def _links(ops: npt.NDArray[np.void], other: Ints, lane: Ints, nranks: int) -> tuple[Records, Ints]:
    """List the messages link by link, and the links."""
    sends = np.flatnonzero(ops["kind"] == OpKind.SEND)
    key = lane[sends] * nranks + ops["peer"][sends]
    order = np.argsort(key, kind="stable")  # stable: the order of a link is the program's
    sends, key = sends[order], key[order]
    messages = np.empty(sends.size, MESSAGE_DTYPE)
    messages["send"] = sends
    messages["recv"] = other[sends]
    found, first = np.unique(key, return_index=True)
    end = np.append(first[1:], sends.size) if first.size else first
    shape_and_source, destination = np.divmod(found, nranks)
    shape, source = np.divmod(shape_and_source, nranks)
    return messages, np.stack([shape, source, destination, first, end], axis=1)


class _Leaders:
    """Generates the ops of the first channel of every shape, and none for the others.

    ``channels`` names that channel for every channel; ``seen`` does once shapes are split that
    differ on a rank generated so far.
    """

    def __init__(self, schedule: Schedule, channels: list[int]) -> None:
        self._schedule = schedule
        self.channels = self.seen = channels

    def generate(self, rank: int) -> tuple[tuple[Op, ...], ...]:
        programs = self._schedule.generate(rank)
        if len(programs) != len(self.channels):
            return programs  # refused by who asked
        self.seen = _refined(self.seen, programs)
        pairs = zip(self.channels, programs, strict=True)
        return tuple(ops if at == leader else () for at, (leader, ops) in enumerate(pairs))


def _distinct(schedule: Schedule) -> tuple[ScheduleArrays, Ints]:
    """Lay out the ops of the first channel of every shape; name that channel for each channel."""
    leaders = _Leaders(schedule, _refined([0] * schedule.nchannels, schedule.generate(0)))
    while True:
        arrays = as_arrays(msgspec.structs.replace(schedule, generate=leaders.generate))
        if leaders.seen == leaders.channels:
            return _by_channel(arrays), np.array(leaders.channels)
        leaders = _Leaders(schedule, leaders.seen)


def _refined(leaders: Sequence[int], channels: Sequence[object]) -> list[int]:
    """Split shapes whose channels differ on one more rank."""
    first: dict[tuple[int, int], int] = {}
    pairs = zip(leaders, channels, strict=False)  # a wrong number is refused by `as_arrays`
    return [first.setdefault((leader, id(ops)), at) for at, (leader, ops) in enumerate(pairs)]


def _by_channel(arrays: ScheduleArrays) -> ScheduleArrays:
    """Order the ops by channel first."""
    order = np.argsort(arrays.ops["channel"], kind="stable")
    counts = np.diff(arrays.offsets)[order]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    moved = np.repeat(arrays.offsets[:-1][order] - offsets[:-1], counts)
    return ScheduleArrays(arrays.ops[order], offsets, arrays.after[np.arange(moved.size) + moved])


__all__ = ["Program", "compile_schedule"]
