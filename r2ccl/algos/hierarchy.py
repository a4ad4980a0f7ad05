"""Hierarchical allreduce: extends an allreduce among nodes to all ranks of the nodes.

The ranks of a node are its members. On channel c, the leader of a node is its member c modulo the
number of members. First the other members send their data to the leader, which reduces it. Then the
leaders run the inner schedule, an allreduce among nodes, on the sums of their nodes. Then each
leader sends the result to the other members. Nodes may have different numbers of ranks. If the
number of channels is a multiple of the number of members, all members of a node lead equally many
channels.

Every allreduce that `r2ccl.schedule.check` accepts can be the inner schedule. Where the inner
schedule reads INPUT, the leader of a node with several members reads the node's sum from OUTPUT
instead. This is correct because accepted schedules are correct in place. The operand order of
RECV_REDUCE depends on the rank numbers, so the ranks of a channel's leaders must ascend from node
to node; otherwise ranks could end with different sums.

Data is reduced in a fixed order, independent of timing: within a node, the leader's data first,
then that of the other members in their order.

Steps: those of the inner schedule, plus one message to the leader and one from the leader. Bytes on
the wire between nodes: those of the inner schedule. Within a node of L ranks that lead equal
shares, each rank sends and receives 2(L - 1)/L of the data.

Use it if nodes have several ranks: each byte then crosses the network for only one rank per node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.cost import measure
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space

#: For each (node, channel), the data that the node sends and receives on the channel, as multiples
#: of the buffer.
Carried: TypeAlias = Mapping[tuple[int, int], tuple[Fraction, Fraction]]


def wrap(
    inner: Schedule, members: Sequence[Sequence[int]], carried: Carried | None = None
) -> Schedule:
    """Build a hierarchical allreduce among ranks from an allreduce among nodes.

    Parameters
    ----------
    inner : Schedule
        An allreduce in which rank v stands for node v.
    members : sequence of sequence of int
        Ranks of each node; together they are 0 to ``nranks - 1``.
    carried : mapping, optional
        Data that each node sends and receives on each channel of `inner`, as multiples of the
        buffer. If given, the cost is usually computed without generating the ops; see Notes.

    Raises
    ------
    InvalidArgument
        If `inner` is not an allreduce, `members` does not have one entry per rank of `inner`, a
        rank is missing or on two nodes, a node has no rank, or the rank numbers of a channel's
        leaders do not ascend from node to node.

    Notes
    -----
    *Cost*: generates the ops of all ranks once to compute the cost, because the inner schedule
    declares the load of its busiest node but not which node that is. The ops are not generated if
    `carried` is given, there are at least two nodes, all nodes have the same number of ranks, and
    all channels have the same number of chunks.
    """
    teams = [tuple(team) for team in members]
    _require_teams(inner, teams)
    leaders = [[team[channel % len(team)] for team in teams] for channel in range(inner.nchannels)]
    node_of = {rank: node for node, team in enumerate(teams) for rank in team}

    def generate(rank: int) -> tuple[tuple[Op, ...], ...]:
        node = node_of[rank]
        programs = inner.program(node).channels
        return tuple(
            _lead(ops, [member for member in teams[node] if member != rank], leading)
            if leading[node] == rank
            else _follow(ops, leading[node])
            for ops, leading in zip(programs, leaders, strict=True)
        )

    schedule = Schedule(
        name=f"hierarchy/{inner.name}",
        collective=inner.collective,
        nranks=len(node_of),
        nchunks=inner.nchunks,
        weights=inner.weights,
        cost=Cost(0, Fraction(0), Fraction(0), 0),
        generate=generate,
    )
    is_even = len(teams) > 1 and len(set(map(len, teams))) == 1
    if carried is not None and is_even and len(set(inner.nchunks)) == 1:
        cost = _cost(inner, teams, carried)
    else:
        cost = measure(schedule)
    return msgspec.structs.replace(schedule, cost=cost)


def _cost(inner: Schedule, teams: Sequence[tuple[int, ...]], carried: Carried) -> Cost:
    """Return the cost of the hierarchical schedule, as `measure` does, without generating the ops.

    There must be at least two nodes. All nodes must have equally many ranks, and all channels
    equally many chunks.
    """
    size, total = len(teams[0]), sum(inner.weights)
    # A leader exchanges the data of its channels with all other members, a member with its leader.
    inside = [Fraction(0)] * size
    for channel, weight in enumerate(inner.weights):
        for place in range(size) if size > 1 else ():
            leads = channel % size == place
            inside[place] += Fraction(weight * (size - 1 if leads else 1), total)
    sums = {
        (node, place): (each, each)
        for node in range(len(teams))
        for place, each in enumerate(inside)
    }
    for (node, channel), (sent, received) in carried.items():
        before = sums[node, channel % size]
        sums[node, channel % size] = before[0] + sent, before[1] + received
    most = [max(column) for column in zip(*sums.values(), strict=True)]
    nmessages = 2 * inner.nchunks[0] * (size - 1)
    steps = inner.cost.steps + 2 * (size > 1)
    return Cost(steps, most[0], most[1], inner.cost.ops + nmessages)


def _follow(inner: Sequence[Op], leader: int) -> tuple[Op, ...]:
    """Return the ops of a non-leader: send every chunk to the leader and receive the results."""
    program = ProgramBuilder()
    for chunk in _by_first_use(inner):
        program.send(leader, chunk)
    for chunk in _by_completion(inner):
        program.recv(leader, chunk, is_proof=True)
    return program.ops()


def _lead(inner: Sequence[Op], others: Sequence[int], leaders: Sequence[int]) -> tuple[Op, ...]:
    """Return the ops of a leader: reduce the members' data, run the inner ops, send the results.

    If there is only one node and it has several members, the inner ops are left out, because the
    sum of the node is already the result.
    """
    is_only_node = len(leaders) == 1
    program = ProgramBuilder()
    ready: dict[int, int] = {}
    for chunk in _by_first_use(inner) if others else ():
        for other in others:
            is_final = is_only_node and other == others[-1]
            ready[chunk] = program.recv_reduce(other, chunk, is_final=is_final)
    ops = list(program.ops())
    if not (is_only_node and others):
        ops += [_moved(inner, op, ready, len(ops), leaders) for op in inner]
    writers: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        if _is_output(op):
            writers.setdefault(op.dst, []).append(index)
    for chunk in _by_completion(inner):
        after = tuple(writers[chunk])
        ops += [
            Op(OpKind.SEND, other, Space.OUTPUT, chunk, Space.OUTPUT, -1, after) for other in others
        ]
    return tuple(ops)


def _moved(
    inner: Sequence[Op], op: Op, ready: dict[int, int], by: int, leaders: Sequence[int]
) -> Op:
    """Return `op` of `inner` as an op of a leader.

    The peer of the returned op is a leader, and the indices in its ``after`` are larger by `by`. If
    `ready` is not empty, the returned op reads OUTPUT instead of INPUT. If, in addition, `op` waits
    for no op on its chunk, the returned op waits for the op in `ready` that completes the node's
    sum of this chunk.
    """
    after = tuple(by + index for index in op.after)
    source = op.src_space
    if ready:
        if not any(inner[index].chunk == op.chunk for index in op.after):
            after = (ready[op.chunk], *after)
        source = Space.OUTPUT if source == Space.INPUT else source
    peer = op.peer if op.peer < 0 else leaders[op.peer]
    return msgspec.structs.replace(op, peer=peer, src_space=source, after=after)


def _by_first_use(inner: Sequence[Op]) -> list[int]:
    return list(dict.fromkeys(op.chunk for op in inner))


def _by_completion(inner: Sequence[Op]) -> list[int]:
    last = {op.dst: index for index, op in enumerate(inner) if _is_output(op)}
    return sorted(last, key=lambda chunk: last[chunk])


def _is_output(op: Op) -> bool:
    return op.dst >= 0 and op.dst_space == Space.OUTPUT


def _require_teams(inner: Schedule, teams: Sequence[Sequence[int]]) -> None:
    if inner.collective != "allreduce":
        raise InvalidArgument(
            f"hierarchy of {inner.collective!r} is not supported: give an allreduce among nodes"
        )
    ranks = [rank for team in teams for rank in team]
    if len(teams) != inner.nranks or not all(teams) or sorted(ranks) != list(range(len(ranks))):
        raise InvalidArgument(
            f"members={tuple(teams)}: give the ranks of each of {inner.nranks} nodes: one or more "
            "per node, every rank from 0 on exactly once"
        )
    for channel in range(inner.nchannels):
        leaders = [team[channel % len(team)] for team in teams]
        if leaders != sorted(leaders):
            raise InvalidArgument(
                f"members={tuple(teams)}: the leaders of channel {channel} are ranks {leaders}, "
                "which must ascend from node to node; reorder the nodes, or the ranks within a node"
            )


__all__ = ["wrap"]
