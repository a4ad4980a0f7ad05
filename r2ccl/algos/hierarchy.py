"""Hierarchy: an allreduce among nodes becomes one among all ranks of the nodes.

On channel c, member c of a node (counted round) leads it. First the other members send their data
to the leader, who adds it up; then the leaders run the inner schedule, each on its node's sum; then
they send the result to the other members. Nodes may have different numbers of ranks. With as many
channels as a node has ranks, or a multiple, every rank leads an equal share, and so do the rails
next to them.

The inner schedule is any that the checker accepts. It reads INPUT where nothing was written yet;
here the node's sum is in OUTPUT, and the inner ops read that: legitimate, because what the checker
accepts is right in place. The operand order of RECV_REDUCE depends on who has the lower number;
leaders must have the order of their nodes, or ranks could end with different sums.

Steps: those of the inner schedule, plus one message up and one down. Bytes on the wire between
nodes: those of the inner schedule; within a node of L ranks that take equal turns in leading, each
sends and receives 2(L - 1)/L of the data.

It wins where ranks share a node: only one of them need talk to others about each byte.

Imports `schedule` and `errors`. Invariant: the data is reduced in the same order whatever arrives
first; within a node in the order of its members, beginning with the leader.
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

#: By node and channel, what is sent and received.
Carried: TypeAlias = Mapping[tuple[int, int], tuple[Fraction, Fraction]]


def wrap(
    inner: Schedule, members: Sequence[Sequence[int]], carried: Carried | None = None
) -> Schedule:
    """Make an allreduce among nodes one among ranks.

    Parameters
    ----------
    inner : Schedule
        An allreduce; its rank v stands for node v.
    members : sequence of sequence of int
        Of every node its ranks. All together are 0 to ``nranks - 1``.
    carried : mapping, optional
        What each (node, channel) sends and receives, as a multiple of the buffer, where that is
        known without the inner schedule's ops.

    Raises
    ------
    InvalidArgument
        Another collective, ranks that are missing or at more than one node, a node without any,
        leaders that are not in the order of their nodes.

    Notes
    -----
    *Cost*: all ranks' ops are generated once, to count them: an inner schedule declares what its
    busiest node does, and not which one that is. With `carried`, and nodes of equal numbers of
    ranks, they are not.
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
    """Count what `measure` does, for two or more nodes of equal numbers of ranks."""
    size, total = len(teams[0]), sum(inner.weights)
    # A leader exchanges its channels with all other members, a member those that others lead.
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
    """Give the leader every chunk, and get it back."""
    program = ProgramBuilder()
    for chunk in _by_first_use(inner):
        program.send(leader, chunk)
    for chunk in _by_completion(inner):
        program.recv(leader, chunk, is_proof=True)
    return program.ops()


def _lead(inner: Sequence[Op], others: Sequence[int], leaders: Sequence[int]) -> tuple[Op, ...]:
    """Add up what the other members have, run the node's ops, give them the result."""
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
    """Have an inner op meet leaders instead of nodes, and wait for its node's sum."""
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
        raise InvalidArgument(f"{inner.collective} between nodes: give an allreduce")
    ranks = [rank for team in teams for rank in team]
    if len(teams) != inner.nranks or not all(teams) or sorted(ranks) != list(range(len(ranks))):
        raise InvalidArgument(
            f"members={tuple(teams)}: give every one of {inner.nranks} nodes its ranks, each rank "
            "from 0 on once"
        )
    for channel in range(inner.nchannels):
        leaders = [team[channel % len(team)] for team in teams]
        if leaders != sorted(leaders):
            raise InvalidArgument(
                f"members={tuple(teams)}: the leaders of channel {channel} are ranks {leaders}, "
                "which must ascend from node to node; reorder the nodes, or the ranks within a node"
            )


__all__ = ["wrap"]
