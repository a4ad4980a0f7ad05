"""Event graph of a schedule: matching of sends and receives, dependencies, deadlocks.

The graph has an edge from event A to event B if and only if an executor with the smallest allowed
buffers makes B wait for A. An order found here is therefore a possible execution, and a cycle found
here is a deadlock of such an executor.

Op ``i`` has three events, the nodes ``3 i``, ``3 i + 1`` and ``3 i + 2``:

====== =======================================================================================
BEGIN  the ops in its ``after`` are done: a SEND may read, a RECV may announce a landing place
LAND   receives only: the message is in this rank's memory
END    the op is done (delivered, reduced, copied or released): ops that wait for it may begin
====== =======================================================================================

With the smallest buffers there is no eager slot, and a link has room for one unreduced slice only.
A SEND therefore ends when its message lands. A message lands only after the link's earlier messages
have been delivered and, for a RECV, after the receiver has announced the landing place.

Slices
------
This graph is exact for chunks of one slice. With several slices per chunk:

- An edge between ops on the same chunk index holds for each slice separately.
- An edge between different chunk indices, or between two messages of one link, leads from the last
  slice of one op to the first slice of the other op (a *whole* edge).
- A slice lands only after the previous slice has left the link's room for unreduced data.

Consider a cycle through several slices. An edge that is not whole never leads to an earlier slice,
so the cycle contains a whole edge. Conversely, a path within a chunk index can lead to any later
slice. Therefore, with LAND and END of each receive merged into one node, a deadlock for some number
of slices exists if and only if a strongly connected component contains a whole edge, or the graph
for one slice has a cycle.
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
    source, target : ndarray of int64, shape (nedges,)
        Edges: event ``target[i]`` waits for event ``source[i]``.
    is_whole : ndarray of bool, shape (nedges,)
        True for edges whose target waits for all slices of the source.
    is_message : ndarray of bool, shape (nedges,)
        True for edges from a SEND to its receive.
    level : ndarray of int64, shape (3 * nops,)
        Topological level of each event.
    steps : int
        Number of messages on the longest path.
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
        Index into ``arrays.ops`` of the op at the other end; -1 for COPY and REDUCE.

    Raises
    ------
    ScheduleError
        If a send or receive has no counterpart, or the two work on different chunks.
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
            f"{sender['index']} sends chunk {sender['src']}; use the same order at both ends",
        )
    other = np.full(ops.size, -1, np.int64)
    other[sends] = receives
    other[receives] = sends
    return other


def build_events(arrays: ScheduleArrays, other: Ints) -> Events:
    """Build the event graph and sort it topologically; `other` is the result of `match`.

    Raises
    ------
    ScheduleError
        If the ops deadlock.
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
    """Verify that no deadlock arises when chunks are sent as several slices.

    Raises
    ------
    ScheduleError
        If the ops deadlock for some number of slices per chunk.
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
            f"waits for all slices of {_describe(arrays, waited)}, whose later slices wait for the "
            "first slices of this op: a deadlock when chunks are cut into slices; wait for an op "
            "on the same chunk index or, if both are receives from one rank, change their order",
        )


def replay_order(arrays: ScheduleArrays, events: Events) -> tuple[Ints, Ints]:
    """Return all ops, grouped by (channel, chunk), each group in a possible order of execution.

    Every op works on one chunk index, so the groups share no data.

    Returns
    -------
    order : ndarray of int64, shape (nops,)
        Indices into ``arrays.ops``.
    moment : ndarray of int64, shape (nops,)
        Topological level of the event at which each op takes effect: BEGIN for a SEND, END for all
        other ops.
    """
    is_send = arrays.ops["kind"] == OpKind.SEND
    level = events.level.reshape(-1, 3)
    moment = np.where(is_send, level[:, BEGIN], level[:, END])
    return np.lexsort((moment, arrays.chunks(), arrays.ops["channel"])), moment


def error_at(arrays: ScheduleArrays, op: int, message: str) -> ScheduleError:
    """Return a `ScheduleError` with `message` about the op in row `op` of ``arrays.ops``.

    The error also names the rank, the channel, the index in the channel, and the chunk of the op.
    """
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
    # Consecutive receives of one link, in program order.
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
    """Return, for each op, a number that identifies its link (channel, source, destination)."""
    ops = arrays.ops
    # Include the peers: a rank without ops occurs only as a peer.
    nranks = int(max(ops["rank"].max(initial=0), ops["peer"].max(initial=0))) + 1
    is_send = ops["kind"] == OpKind.SEND
    source = np.where(is_send, ops["rank"], ops["peer"]).astype(np.int64)
    sink = np.where(is_send, ops["peer"], ops["rank"])
    return (ops["channel"] * np.int64(nranks) + source) * nranks + sink


def _unmatched(arrays: ScheduleArrays, link: Ints, sends: Ints, receives: Ints) -> ScheduleError:
    # Both lists are sorted by link: the first op with the smaller link has no counterpart.
    if not receives.size or (sends.size and link[sends[0]] < link[receives[0]]):
        lone, wanted = int(sends[0]), "receive"
    else:
        lone, wanted = int(receives[0]), "send"
    peer = int(arrays.ops["peer"][lone])
    return error_at(arrays, lone, f"rank {peer} has no matching {wanted}")


def _describe(arrays: ScheduleArrays, op: int) -> str:
    row = arrays.ops[op]
    return f"{OpKind(int(row['kind'])).name} (rank {row['rank']}, op {row['index']})"


def _deadlock(arrays: ScheduleArrays, circle: list[int]) -> ScheduleError:
    distinct = list(dict.fromkeys(circle))
    start = distinct.index(min(distinct))
    names = [_describe(arrays, op) for op in distinct[start:] + distinct[:start]]
    shown = " -> ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return error_at(
        arrays,
        min(distinct),
        f"deadlock, each op waits for the one before it, and the first for the last: {shown}",
    )


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
