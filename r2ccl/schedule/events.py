"""When things happen: sends meet receives, and the graph of what waits for what.

Imports the IR's arrays and `graph`. Invariant: an edge is there iff an executor with the smallest
buffers allowed makes its target wait for its source; so an order found here is one that really
can happen, and a circle found here is a real deadlock of such an executor.

Each op has three events, nodes ``3 i``, ``3 i + 1`` and ``3 i + 2``:

====== ===============================================================================
BEGIN  its ``after`` holds: a SEND may read, a RECV names its landing place
LAND   receives only: the message is in this rank's memory
END    what ``after`` on this op waits for: delivered, reduced, copied, or released
====== ===============================================================================

The smallest buffers: no eager slot, and room for one unreduced slice a link. So a SEND ends when
its message lands (not before the receiver named a place), and a receive's message lands when
the link's earlier ones have been delivered.

Slices
------
The graph above is right for chunks of one slice. With more, an edge within a chunk index holds
slice by slice, one between indices leads from a last slice to a first one ("whole"), and a slice
lands only when the one before it has left the scratch slot. Follow any circle through the
slices: no edge within an index goes back to an earlier slice, so some edge of it is whole. And
any path within an index may climb from slice to slice at will. Hence, with the events LAND and
END of each receive taken as one node, a deadlock for some number of slices exists iff a strongly
connected component contains a whole edge, or the graph for one slice has a circle.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from r2ccl.errors import ScheduleError
from r2ccl.schedule.arrays import ScheduleArrays
from r2ccl.schedule.graph import Bools, Ints, find_cycle, strong_components, topological_levels
from r2ccl.schedule.ir import OpKind

BEGIN, LAND, END = 0, 1, 2


class Events(NamedTuple):
    """The event graph of a schedule.

    Parameters
    ----------
    source, target : ndarray of int64
        Edges between events.
    is_whole : ndarray of bool
        Edges that wait for all slices.
    is_message : ndarray of bool
        Edges along which a message travels.
    level : ndarray of int64, shape (3 * nops,)
        Topological level of each event.
    steps : int
        Messages on the longest path.
    """

    source: Ints
    target: Ints
    is_whole: Bools
    is_message: Bools
    level: Ints
    steps: int


def match(arrays: ScheduleArrays) -> Ints:
    """Pair the sends and receives of each directed link, in program order.

    Returns
    -------
    ndarray of int64, shape (nops,)
        The op at the other end, as an index into ``arrays.ops``; -1 for COPY and REDUCE.

    Raises
    ------
    ScheduleError
        An op without its counterpart, or a pair on different chunks.
    """
    ops = arrays.ops
    is_send = ops["kind"] == OpKind.SEND
    is_receive = (ops["kind"] == OpKind.RECV) | (ops["kind"] == OpKind.RECV_REDUCE)
    link = _links(arrays)
    sends, receives = np.flatnonzero(is_send), np.flatnonzero(is_receive)
    # Stable: the ops of a link stay in program order, as they are in the arrays.
    sends = sends[np.argsort(link[sends], kind="stable")]
    receives = receives[np.argsort(link[receives], kind="stable")]
    common = min(sends.size, receives.size)
    differs = np.flatnonzero(link[sends[:common]] != link[receives[:common]])
    if differs.size or sends.size != receives.size:
        at = int(differs[0]) if differs.size else common
        raise _unmatched(arrays, link, sends[at:], receives[at:])
    chunks = ops["src"][sends] != ops["dst"][receives]
    if chunks.any():
        at = int(np.flatnonzero(chunks)[0])
        sender = ops[int(sends[at])]
        raise error_at(
            arrays,
            int(receives[at]),
            f"receives chunk {ops['dst'][receives[at]]} where rank {sender['rank']} op "
            f"{sender['index']} sends chunk {sender['src']}; a link keeps program order",
        )
    other = np.full(ops.size, -1, np.int64)
    other[sends] = receives
    other[receives] = sends
    return other


def build_events(arrays: ScheduleArrays, other: Ints) -> Events:
    """Build the event graph and order it.

    Raises
    ------
    ScheduleError
        Ops wait for each other in a circle.
    """
    source, target, is_whole, is_message = _edges(arrays, other)
    nnodes = 3 * arrays.ops.size
    order = topological_levels(nnodes, source, target, is_message.astype(np.int64))
    stuck = order.level < 0
    if stuck.any():
        inside = stuck[source] & stuck[target]
        circle = [node // 3 for node in find_cycle(nnodes, source[inside], target[inside])]
        raise _deadlock(arrays, circle)
    steps = int(order.distance.max(initial=0))
    return Events(source, target, is_whole, is_message, order.level, steps)


def check_slices(arrays: ScheduleArrays, events: Events) -> None:
    """Refuse a deadlock that shows only when chunks travel as several slices.

    Raises
    ------
    ScheduleError
        Slices of some number wait for each other in a circle.
    """
    nnodes = 3 * arrays.ops.size
    node = np.arange(nnodes)
    is_receive = np.isin(arrays.ops["kind"], (OpKind.RECV, OpKind.RECV_REDUCE))
    node[3 * np.flatnonzero(is_receive) + LAND] += END - LAND
    source, target = node[events.source], node[events.target]
    keep = source != target
    source, target, is_whole = source[keep], target[keep], events.is_whole[keep]
    order = topological_levels(nnodes, source, target, np.zeros(source.size, np.int64))
    inside = (order.level[source] < 0) & (order.level[target] < 0)
    if not inside.any():
        return
    label = strong_components(nnodes, source[inside], target[inside])
    bad = is_whole[inside] & (label[source[inside]] == label[target[inside]])
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        waits, waited = int(target[inside][at]) // 3, int(source[inside][at]) // 3
        raise error_at(
            arrays,
            waits,
            f"waits for all of {_describe(arrays, waited)}, whose later slices wait for this op's "
            "first ones: a deadlock when chunks are cut in slices; wait on the same chunk index",
        )


def replay_order(arrays: ScheduleArrays, events: Events) -> tuple[Ints, Ints]:
    """Order the ops as one legal execution, each (channel, chunk) in one run.

    Every op works on one chunk index, so these runs have no data in common.

    Returns
    -------
    order : ndarray of int64, shape (nops,)
        Indices into ``arrays.ops``.
    moment : ndarray of int64, shape (nops,)
        Level at which each op acts: a SEND hands its data over when it begins, the others do
        their work when they end.
    """
    is_send = arrays.ops["kind"] == OpKind.SEND
    level = events.level.reshape(-1, 3)
    moment = np.where(is_send, level[:, BEGIN], level[:, END])
    return np.lexsort((moment, arrays.chunks(), arrays.ops["channel"])), moment


def error_at(arrays: ScheduleArrays, op: int, message: str) -> ScheduleError:
    """Make the error that names rank, channel, index and chunk of op number `op`."""
    row = arrays.ops[op]
    kind = int(row["kind"])
    name = OpKind(kind).name if kind in set(OpKind) else f"kind {kind}"
    return ScheduleError(
        f"{name} of chunk {arrays.chunks()[op]}: {message}",
        rank=int(row["rank"]),
        channel=int(row["channel"]),
        op=int(row["index"]),
    )


def _edges(arrays: ScheduleArrays, other: Ints) -> tuple[Ints, Ints, Bools, Bools]:
    ops = arrays.ops
    every = np.arange(ops.size)
    chunk = arrays.chunks()
    waiting, waited = arrays.waits()
    receives = np.flatnonzero(np.isin(ops["kind"], (OpKind.RECV, OpKind.RECV_REDUCE)))
    lands = receives[ops["kind"][receives] == OpKind.RECV]
    sends = other[receives]
    # Receives of one link, one behind the other in program order.
    link = _links(arrays)[receives]
    by_link = np.argsort(link, kind="stable")
    queue = receives[by_link]
    follows = np.flatnonzero(np.diff(link[by_link]) == 0)
    groups = [
        (3 * every + BEGIN, 3 * every + END, False, False),
        (3 * waited + END, 3 * waiting + BEGIN, chunk[waited] != chunk[waiting], False),
        (3 * lands + BEGIN, 3 * lands + LAND, False, False),
        (3 * receives + LAND, 3 * receives + END, False, False),
        (3 * sends + BEGIN, 3 * receives + LAND, False, True),
        (3 * receives + LAND, 3 * sends + END, False, False),
        (3 * queue[follows] + END, 3 * queue[follows + 1] + LAND, True, False),
    ]
    return (
        np.concatenate([group[0] for group in groups]),
        np.concatenate([group[1] for group in groups]),
        np.concatenate([np.broadcast_to(group[2], group[0].shape) for group in groups]),
        np.concatenate([np.broadcast_to(group[3], group[0].shape) for group in groups]),
    )


def _links(arrays: ScheduleArrays) -> Ints:
    """Give each op the number of its directed link: channel, source rank, destination rank."""
    ops = arrays.ops
    # Not the ranks alone: one without ops is still a peer.
    nranks = int(max(ops["rank"].max(initial=0), ops["peer"].max(initial=0))) + 1
    is_send = ops["kind"] == OpKind.SEND
    source = np.where(is_send, ops["rank"], ops["peer"]).astype(np.int64)
    sink = np.where(is_send, ops["peer"], ops["rank"])
    return (ops["channel"] * np.int64(nranks) + source) * nranks + sink


def _unmatched(arrays: ScheduleArrays, link: Ints, sends: Ints, receives: Ints) -> ScheduleError:
    # Both lists are sorted by link: of the two heads, the smaller one has no counterpart.
    if not receives.size or (sends.size and link[sends[0]] < link[receives[0]]):
        lone, wanted = int(sends[0]), "receive"
    else:
        lone, wanted = int(receives[0]), "send"
    peer = int(arrays.ops["peer"][lone])
    return error_at(arrays, lone, f"no {wanted} of rank {peer} meets it")


def _describe(arrays: ScheduleArrays, op: int) -> str:
    row = arrays.ops[op]
    return f"{OpKind(int(row['kind'])).name} (rank {row['rank']}, op {row['index']})"


def _deadlock(arrays: ScheduleArrays, circle: list[int]) -> ScheduleError:
    distinct = list(dict.fromkeys(circle))
    start = distinct.index(min(distinct))
    names = [_describe(arrays, op) for op in distinct[start:] + distinct[:start]]
    shown = " -> ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return error_at(arrays, min(distinct), f"deadlock, each waits for the one before it: {shown}")


__all__ = [
    "BEGIN",
    "END",
    "LAND",
    "Events",
    "build_events",
    "check_slices",
    "error_at",
    "match",
    "replay_order",
]
