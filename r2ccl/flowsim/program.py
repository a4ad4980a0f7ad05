"""Compact form of a schedule: channels that run the same ops share one copy of them.

Two channels have the same *shape* if, on every rank, the schedule has the same tuple of ops (the
same object) for both. The ops of a shape are stored once, as *rows*; a row and a channel together
identify an op of the schedule. The rows of one rank and shape are adjacent and in program order. A
ring over 1,024 ranks with eight channels has 33 million ops, but only 4 million rows.
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
    """Compact form of the ops of all ranks, independent of buffer size and network.

    The module docstring defines rows and shapes. A program can be pickled.

    Parameters
    ----------
    nranks, nparts : int
        As in the schedule.
    nchunks, weights : tuple of int
        As in the schedule.
    shapes : ndarray of int64, shape (nchannels,)
        Number of the shape of each channel.
    rows : Records of ROW_DTYPE, shape (nrows + 1,)
        Ops, ordered by shape, then rank. The last record is a sentinel for ``after``.
    after : ndarray of int32
        Dependencies: row ``i`` waits for the rows ``after[rows.after[i]:rows.after[i + 1]]``.
    starts : ndarray of int64, shape (nshapes, nranks + 1)
        First row of every rank; the last column is the end of the shape's rows.
    messages : Records of MESSAGE_DTYPE
        Send row and receive row of each message, grouped by link, in the link's order.
    links : ndarray of int64, shape (nlinks, 5)
        Per link: shape, source rank, destination rank, first message, end of its messages
        (exclusive). Ordered by the first three columns.
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
    """Return the compact form of `schedule`.

    Channels share their rows if `Schedule.generate` returns the same tuple of ops for them (the
    same object) on every rank. `compile_schedule` does not check that the schedule computes its
    collective; `r2ccl.schedule.check` does.

    Raises
    ------
    ScheduleError
        If a field of an op is invalid or contradicts its kind, a send or receive has no
        counterpart for the same chunk, or a rank has a different number of channels than the
        schedule.

    Notes
    -----
    *Cost*: generates the ops of all ranks once, and those of rank 0 twice. Channels with the same
    ops on rank 0 are assumed to have the same shape; if they differ on another rank, the ops are
    generated again.
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
    """Return ``messages`` and ``links`` of the `Program`.

    Op ``i`` of `ops` is matched with op ``other[i]``; ``lane[i]`` is the shape number of op ``i``
    times `nranks`, plus the rank of op ``i``.
    """
    sends = np.flatnonzero(ops["kind"] == OpKind.SEND)
    key = lane[sends] * nranks + ops["peer"][sends]
    order = np.argsort(key, kind="stable")  # stable: keeps the program order in a link
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
    """Generator of a schedule's ops that omits the ops of all channels except the leaders.

    The leader of a shape is its first channel. ``channels`` has the assumed leader of every
    channel. ``seen`` has the leader of every channel according to the ranks generated so far:
    channels that differ on one of these ranks have different leaders.
    """

    def __init__(self, schedule: Schedule, channels: list[int]) -> None:
        self._schedule = schedule
        self.channels = self.seen = channels

    def generate(self, rank: int) -> tuple[tuple[Op, ...], ...]:
        programs = self._schedule.program(rank).channels
        if len(programs) != len(self.channels):
            return programs  # `as_arrays` raises the error
        self.seen = _refined(self.seen, programs)
        pairs = zip(self.channels, programs, strict=True)
        return tuple(ops if at == leader else () for at, (leader, ops) in enumerate(pairs))


def _distinct(schedule: Schedule) -> tuple[ScheduleArrays, Ints]:
    """Return the ops of each shape's first channel (its leader), and the leader of each channel."""
    leaders = _Leaders(schedule, _refined([0] * schedule.nchannels, schedule.program(0).channels))
    while True:
        arrays = as_arrays(msgspec.structs.replace(schedule, generate=leaders.generate))
        if leaders.seen == leaders.channels:
            return _by_channel(arrays), np.array(leaders.channels)
        leaders = _Leaders(schedule, leaders.seen)


def _refined(leaders: Sequence[int], channels: Sequence[object]) -> list[int]:
    """Return the leader of each channel after splitting the shapes by the ops of one more rank.

    `leaders` are the leaders before the split. `channels` are that rank's tuples of ops, one per
    channel. Two channels keep their common leader if they have the same tuple object.
    """
    first: dict[tuple[int, int], int] = {}
    pairs = zip(leaders, channels, strict=False)  # `as_arrays` rejects a wrong number
    return [first.setdefault((leader, id(ops)), at) for at, (leader, ops) in enumerate(pairs)]


def _by_channel(arrays: ScheduleArrays) -> ScheduleArrays:
    """Return `arrays` with the ops ordered by channel, then rank, then index."""
    order = np.argsort(arrays.ops["channel"], kind="stable")
    counts = np.diff(arrays.offsets)[order]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    moved = np.repeat(arrays.offsets[:-1][order] - offsets[:-1], counts)
    return ScheduleArrays(arrays.ops[order], offsets, arrays.after[np.arange(moved.size) + moved])


__all__ = ["Program", "compile_schedule"]
