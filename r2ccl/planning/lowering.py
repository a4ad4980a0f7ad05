"""Lowering: one rank's program and one call's sizes become slices the executor can walk.

Pure: values in, values out; computed once per (collective, count, dtype, op) and kept. Invariant:
the slices of equal chunk indices coincide on every rank, so a dependency can hold slice by slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.schedule.chunks import Range, layout
from r2ccl.schedule.ir import Op, OpKind, RankProgram, Space


class Step(msgspec.Struct, frozen=True, gc=False):
    """An op with its place in memory.

    ``cuts`` holds the slice boundaries in elements. Each entry of ``after`` is an op index, whether
    the dependency holds slice by slice, and whether a retired send satisfies it (else a released
    one). ``is_left`` says that what is received is the left operand.
    """

    kind: OpKind
    peer: int
    src_space: Space
    dst_space: Space
    cuts: tuple[int, ...]
    after: tuple[tuple[int, bool, bool], ...]
    is_eager: bool
    is_final: bool
    is_left: bool

    @property
    def nslices(self) -> int:
        """Slices of the op, at least one: an empty chunk still travels, so that ranks meet."""
        return len(self.cuts) - 1


class LinkSteps(NamedTuple):
    """One link of a lane, by its peer and the links' channel: the steps it sees, in order.

    ``depth`` bounds the landing places a receiver names ahead on it.
    """

    peer: int
    channel: int
    steps: tuple[int, ...]
    depth: int = 1 << 30


class Lane(msgspec.Struct, frozen=True):
    """One channel of one rank: its steps, and in which order each link sees them.

    ``channels`` are the links' channels it uses: no other lane of the call does.
    """

    steps: tuple[Step, ...]
    sends: tuple[LinkSteps, ...]
    recvs: tuple[LinkSteps, ...]
    locals: tuple[int, ...]
    nslices: int
    channels: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """What one rank does in one collective of one size."""

    rank: int
    count: int
    itemsize: int
    slice_nbytes: int
    lanes: tuple[Lane, ...]
    peers: frozenset[int]
    uses_scratch: bool


def lower(
    program: RankProgram,
    count: int,
    itemsize: int,
    *,
    slice_nbytes: int,
    eager_nbytes: int,
    weights: Sequence[int] | None = None,
    channels: Sequence[int] | None = None,
    numbers: Mapping[tuple[int, int], int] | None = None,
) -> Layout:
    """Place `program` over `count` elements of `itemsize` bytes.

    Parameters
    ----------
    weights : sequence of int, optional
        Share of each channel of the program; by default the schedule's.
    channels : sequence of int, optional
        The links' channel each of them travels on; its own number by default.
    numbers : mapping of (int, int) to int, optional
        By channel and peer, links' channels that differ from that.
    """
    nchannels = len(program.channels)
    pieces = layout(count, program.nchunks, weights or program.weights, itemsize, program.nparts)
    slice_elements = max(1, slice_nbytes // itemsize)
    lanes = []
    for at, (channel, ops, chunks) in enumerate(
        zip(channels or range(nchannels), program.channels, pieces, strict=True)
    ):
        steps = tuple(
            _place(op, ops, program.rank, chunks, slice_elements, itemsize, eager_nbytes)
            for op in ops
        )
        peers = {step.peer for step in steps if step.peer >= 0}
        lanes.append(
            _lane(steps, {peer: (numbers or {}).get((at, peer), channel) for peer in peers})
        )
    return Layout(
        program.rank,
        count,
        itemsize,
        slice_elements * itemsize,
        tuple(lanes),
        frozenset(op.peer for ops in program.channels for op in ops if op.peer >= 0),
        any(
            Space.SCRATCH in (op.src_space, op.dst_space) for ops in program.channels for op in ops
        ),
    )


def renumbered(layout: Layout, ranks: Sequence[int], channel: Callable[[int], int]) -> Layout:
    """Return a layout of other ranks and links: number i is ``ranks[i]``, ``channel(i)``."""

    def way(old: LinkSteps) -> LinkSteps:
        return old._replace(peer=ranks[old.peer], channel=channel(old.channel))

    def step(old: Step) -> Step:
        return old if old.peer < 0 else msgspec.structs.replace(old, peer=ranks[old.peer])

    lanes = tuple(
        msgspec.structs.replace(
            lane,
            steps=tuple(step(each) for each in lane.steps),
            sends=tuple(way(each) for each in lane.sends),
            recvs=tuple(way(each) for each in lane.recvs),
            channels=tuple(channel(each) for each in lane.channels),
        )
        for lane in layout.lanes
    )
    return msgspec.structs.replace(
        layout,
        rank=ranks[layout.rank],
        lanes=lanes,
        peers=frozenset(ranks[peer] for peer in layout.peers),
    )


def cleared(layout: Layout) -> Layout:
    """Return the layout without eager slices, but for empty ones, which have no place to go.

    For memory whose bytes this process cannot copy. All ranks must do the same.
    """
    return msgspec.structs.replace(layout, lanes=tuple(_cleared(each) for each in layout.lanes))


def _cleared(lane: Lane) -> Lane:
    steps = tuple(
        msgspec.structs.replace(step, is_eager=step.cuts[0] == step.cuts[-1]) for step in lane.steps
    )
    return msgspec.structs.replace(lane, steps=steps)


def _place(
    op: Op,
    ops: Sequence[Op],
    rank: int,
    chunks: Sequence[Range],
    slice_elements: int,
    itemsize: int,
    eager_nbytes: int,
) -> Step:
    lo, hi = chunks[op.chunk]
    cuts = (*range(lo, hi, slice_elements), hi) if hi > lo else (lo, hi)
    largest = min(hi - lo, slice_elements) * itemsize
    return Step(
        op.kind,
        op.peer,
        op.src_space,
        op.dst_space,
        cuts,
        tuple((index, ops[index].chunk == op.chunk, op.is_proof) for index in op.after),
        largest <= eager_nbytes,
        op.is_final,
        op.peer < rank,
    )


def _lane(steps: tuple[Step, ...], channels: Mapping[int, int]) -> Lane:
    """Sort steps by their links; `channels` has the links' channel to every peer."""
    sends: dict[int, list[int]] = {}
    recvs: dict[int, list[int]] = {}
    local: list[int] = []
    for index, step in enumerate(steps):
        if step.kind == OpKind.SEND:
            sends.setdefault(step.peer, []).append(index)
        elif step.kind in (OpKind.RECV, OpKind.RECV_REDUCE):
            recvs.setdefault(step.peer, []).append(index)
        else:
            local.append(index)
    return Lane(
        steps,
        tuple(LinkSteps(peer, channels[peer], tuple(order)) for peer, order in sends.items()),
        tuple(LinkSteps(peer, channels[peer], tuple(order)) for peer, order in recvs.items()),
        tuple(local),
        sum(step.nslices for step in steps),
        tuple(sorted(set(channels.values()))),
    )


def limit_windows(layout: Layout, nhomes: int, nbytes: int) -> Layout:
    """Bound the landing places each link names ahead: its receive window.

    Parameters
    ----------
    layout : Layout
        Of this rank.
    nhomes : int
        Rails that channels are at home on: those of equal remainder share one.
    nbytes : int
        What a port to which several peers send is to be sent at once.

    Notes
    -----
    Who receives names the places slices land in, and so decides what is sent. Where several peers
    send to one port, what they send together must fit the queue before it: a queue that runs over
    drops segments, and TCP waits 200 ms for one that nothing follows (measured, 4 nodes of 4 rails
    of 200 Mbit/s with queues of 128 KiB, packed trees of 128 KiB slices, two named ahead: 1,000
    segments sent again and 3 to 7 such waits a call, 1.4 times the time it takes with one named
    ahead). Where one peer sends to a port there is no such queue: its own port is as slow. Every
    link may have one slice under way, or ranks would wait for one another.
    """
    ways = [way for lane in layout.lanes for way in lane.recvs]
    peers = {(way.channel % nhomes, way.peer) for way in ways}
    nsenders = Counter(port for port, _ in peers)
    nlinks = Counter(way.channel % nhomes for way in ways)
    depths = {
        port: max(1, nbytes // (nlinks[port] * layout.slice_nbytes))
        for port in nlinks
        if nsenders[port] > 1
    }
    return msgspec.structs.replace(
        layout, lanes=tuple(_bounded(lane, nhomes, depths) for lane in layout.lanes)
    )


def _bounded(lane: Lane, nhomes: int, depths: dict[int, int]) -> Lane:
    recvs = tuple(
        way._replace(depth=depths.get(way.channel % nhomes, way.depth)) for way in lane.recvs
    )
    return msgspec.structs.replace(lane, recvs=recvs)


__all__ = ["Lane", "Layout", "LinkSteps", "Step", "cleared", "limit_windows", "lower", "renumbered"]
