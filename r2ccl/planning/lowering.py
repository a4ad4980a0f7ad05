"""Lowering: turn one rank's program and one call's sizes into slices that the executor runs.

The result is computed once per plan and kept in the plan cache. A *link channel* is the channel
number that links use; `r2ccl.planning.placement` assigns one to each edge of the schedule.

Invariant: a chunk is cut into the same slices at both ends of its message, and in both memories of
an op, so an op can wait for single slices of another op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from r2ccl.schedule.chunks import Parts, Range, layout
from r2ccl.schedule.ir import Op, OpKind, RankProgram, Space

#: A link is busy if it carries more bytes in eager slices than this multiple of ``eager_nbytes``,
#: and a slice of more than ``eager_nbytes / _MUCH`` bytes.
_MUCH = 4


class Step(msgspec.Struct, frozen=True, gc=False):
    """An op with its position in memory and its slice boundaries.

    ``cuts`` holds the slice boundaries, as indices of elements in the memory that the op writes;
    for a send, in the memory that it reads. An op that reads and writes memory reads element
    ``i + shift`` to write element i. ``is_eager`` is true if the message is sent eagerly.
    ``is_final`` has the same meaning as in `r2ccl.schedule.ir.Op`. For a RECV_REDUCE, ``is_left``
    is true if the received data is the left operand. Each entry of ``after`` describes another op
    that this op waits for:

    1. Index of the other op.
    2. True if slice k waits only for slice k of the other op; False if it waits for all slices.
    3. Applies if the other op sends cleared slices. True if the wait for a slice ends when the
       transport no longer reads the slice's memory; False if, with `Config.is_resilient`, the peer
       must also have confirmed the slice.
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
    shift: int = 0

    @property
    def nslices(self) -> int:
        """Number of slices of the op, at least 1: an empty chunk is sent as one empty slice."""
        return len(self.cuts) - 1


class LinkSteps(NamedTuple):
    """Steps of a lane that send on one link, or steps that receive from it, in slice order.

    ``peer`` and ``channel`` identify the link; ``channel`` is a link channel, which may differ from
    the schedule's channel. ``steps`` has indices in `Lane.steps`. ``depth`` is the maximum number
    of landing places that the receiver announces ahead, if it is less than
    ``R2CC_LANDING_DEPTH``.
    """

    peer: int
    channel: int
    steps: tuple[int, ...]
    depth: int = 1 << 30


class Lane(msgspec.Struct, frozen=True):
    """One channel of one rank: its steps, and the order of sends and receives on each link.

    ``locals`` are the indices of steps without a peer. ``nslices`` is the number of slices of all
    steps together. ``channels`` are the link channels that the lane uses; no other lane of the call
    uses them.
    """

    steps: tuple[Step, ...]
    sends: tuple[LinkSteps, ...]
    recvs: tuple[LinkSteps, ...]
    locals: tuple[int, ...]
    nslices: int
    channels: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """The slices that one rank sends, receives and reduces in one collective of one size.

    Attributes
    ----------
    rank : int
    count, itemsize : int
        Number of elements of the whole buffer, and bytes of an element.
    slice_nbytes : int
        Largest size of a slice in bytes: a whole number of elements, at least one.
    lanes : tuple of Lane
        One lane per channel of the schedule. If `lower` was called with ``whole_nbytes``, channels
        without any step are left out.
    peers : frozenset of int
        Ranks that the ops of this rank's program send to or receive from.
    uses_scratch : bool
        True if an op reads or writes scratch memory.
    """

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
    parts: Parts | None = None,
    whole_nbytes: int = 0,
    announces_parts: bool = False,
    clears_busy_links: bool = False,
) -> Layout:
    """Map `program` to a buffer of `count` elements of `itemsize` bytes and cut it into slices.

    Parameters
    ----------
    program : RankProgram
    count, itemsize : int
        Number of elements of the whole buffer, and bytes of an element.
    slice_nbytes : int
        Largest size of a slice. An element larger than this is a slice of its own.
    eager_nbytes : int
        Ops whose slices have at most this size are sent eagerly.
    weights : sequence of int, optional
        Weight of each channel's share of the buffer. Default: the program's weights.
    channels : sequence of int, optional
        Link channel that each channel of the program travels on. Default: the same number.
    numbers : mapping of (int, int) to int, optional
        Link channels of edges with a link channel of their own, by channel of the program and peer;
        they override `channels`.
    parts : Parts, optional
        Places of the parts in this rank's memory; scratch memory has equal parts. Default: equal
        parts that follow one another everywhere.
    whole_nbytes : int
        If above 0, parts of at most this size are sent whole and eagerly on the first channel, and
        all larger parts on the other channels. Ops of empty chunks are then left out if they wait
        for no op and no op waits for them. The first channel, however, keeps these ops if `count`
        is 0 or `announces_parts` is True.
    announces_parts : bool
        If True and `whole_nbytes` is above 0, the first channel sends an empty message for each
        part that travels on other channels. A receiver that expects another size then learns this
        without waiting for the part.
    clears_busy_links : bool
        If True and `whole_nbytes` is 0, only empty chunks are sent eagerly on busy links. A link is
        busy if more than ``4 * eager_nbytes`` bytes would be sent eagerly on it, and one of these
        slices has more than ``eager_nbytes / 4`` bytes. This is faster on loopback, but a network
        with a long round trip needs more slices in flight than there are landing places. Must be
        equal on all ranks.

    Raises
    ------
    InvalidArgument
        If `parts` does not have one range per part; if, without `parts`, `count` is not a multiple
        of the program's ``nparts``; or if the weights are not one integer per channel, 0 or more
        and not all 0.
    """
    nchannels = len(program.channels)
    pieces = _pieces(program, count, itemsize, weights or program.weights, parts, whole_nbytes)
    slice_elements = max(1, slice_nbytes // itemsize)
    lanes = []
    for at, (channel, every) in enumerate(
        zip(channels or range(nchannels), program.channels, strict=True)
    ):
        ops, eager = every, eager_nbytes
        if whole_nbytes:
            if at or (count and not announces_parts):
                ops = _without_empty(every, pieces, at)
            eager = eager_nbytes if at else max(eager_nbytes, whole_nbytes)
            if not ops:
                continue
        steps = tuple(
            _place(op, ops, program.rank, pieces, at, slice_elements, itemsize, eager) for op in ops
        )
        if clears_busy_links and not whole_nbytes:
            steps = _clear_busy_links(steps, itemsize, eager)
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
        _uses_scratch(program),
    )


def renumbered(layout: Layout, ranks: Sequence[int], channel: Callable[[int], int]) -> Layout:
    """Return `layout` with rank i replaced by ``ranks[i]``, link channel i by ``channel(i)``."""

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
    """Return the layout in which all slices are cleared, except empty ones, which are eager.

    Calls on memory that this process cannot copy from need such a layout. If one rank uses it for a
    call, all ranks must use it.
    """
    return msgspec.structs.replace(layout, lanes=tuple(_cleared(each) for each in layout.lanes))


def _cleared(lane: Lane) -> Lane:
    return msgspec.structs.replace(lane, steps=tuple(map(_without_eager, lane.steps)))


#: Ranges of elements by space, channel and chunk.
_Pieces: TypeAlias = Mapping[Space, Sequence[Sequence[Range]]]


def _pieces(
    program: RankProgram,
    count: int,
    itemsize: int,
    weights: Sequence[int],
    parts: Parts | None,
    whole_nbytes: int,
) -> _Pieces:
    def divide(ranges: Sequence[Range] = ()) -> tuple[tuple[Range, ...], ...]:
        return layout(
            count, program.nchunks, weights, itemsize, program.nparts,
            parts=ranges, whole=whole_nbytes // itemsize,
        )  # fmt: skip

    if parts is None:
        return dict.fromkeys(Space, divide())
    found = {Space.INPUT: divide(parts.inputs), Space.OUTPUT: divide(parts.outputs)}
    if _uses_scratch(program):
        found[Space.SCRATCH] = divide()
    return found


def _uses_scratch(program: RankProgram) -> bool:
    return any(
        Space.SCRATCH in (op.src_space, op.dst_space) for ops in program.channels for op in ops
    )


def _without_empty(ops: Sequence[Op], pieces: _Pieces, channel: int) -> tuple[Op, ...]:
    """Return `ops` without isolated ops of empty chunks.

    An op is isolated if it waits for no op and no op waits for it.
    """
    awaited = {index for op in ops for index in op.after}
    kept = []
    for index, op in enumerate(ops):
        lo, hi = pieces[op.memory][channel][op.chunk]
        if hi > lo or op.after or index in awaited:
            kept.append(index)
    places = {index: place for place, index in enumerate(kept)}
    return tuple(
        msgspec.structs.replace(ops[index], after=tuple(places[each] for each in ops[index].after))
        for index in kept
    )


def _place(
    op: Op,
    ops: Sequence[Op],
    rank: int,
    pieces: _Pieces,
    channel: int,
    slice_elements: int,
    itemsize: int,
    eager_nbytes: int,
) -> Step:
    lo, hi = pieces[op.memory][channel][op.chunk]
    has_both = op.src >= 0 and op.dst >= 0
    shift = pieces[op.src_space][channel][op.src][0] - lo if has_both else 0
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
        shift,
    )


def _clear_busy_links(
    steps: tuple[Step, ...], itemsize: int, eager_nbytes: int
) -> tuple[Step, ...]:
    """Return `steps`, with cleared slices on links that would carry many large eager slices.

    An eager slice needs two more copies than a cleared slice, and a link waits once it has a few
    unconfirmed eager slices. The receiver must announce a landing place for a cleared slice, but on
    a link with many slices, it does so while earlier slices are in flight. For a large slice, the
    announcement costs less than the copies. Both ends of a link clear the same slices, because they
    have the same slices.

    Measured with 4 ranks over loopback: an exscan of 1 MiB, whose links carry 16 slices of 32 KiB
    each, takes half of the time; other collectives take the same time.
    """
    carried: Counter[tuple[int, bool]] = Counter()
    largest: dict[tuple[int, bool], int] = {}
    for step in steps:
        if step.is_eager and step.peer >= 0:
            link = _link_of(step)
            carried[link] += (step.cuts[-1] - step.cuts[0]) * itemsize
            largest[link] = max(largest.get(link, 0), (step.cuts[1] - step.cuts[0]) * itemsize)
    busy = {
        link
        for link, nbytes in carried.items()
        if nbytes > _MUCH * eager_nbytes and _MUCH * largest[link] > eager_nbytes
    }
    return tuple(
        _without_eager(step) if step.peer >= 0 and _link_of(step) in busy else step
        for step in steps
    )


def _without_eager(step: Step) -> Step:
    """Return `step` with cleared slices, or with one eager slice if `step` is empty."""
    return msgspec.structs.replace(step, is_eager=step.cuts[0] == step.cuts[-1])


def _link_of(step: Step) -> tuple[int, bool]:
    """Return the link of a step: its peer, and whether the step sends."""
    return step.peer, step.kind == OpKind.SEND


def _lane(steps: tuple[Step, ...], channels: Mapping[int, int]) -> Lane:
    """Group steps by link; `channels` maps each peer to the link channel used with it."""
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
    """Return the layout with a bounded receive window for links into ports with several senders.

    Parameters
    ----------
    layout : Layout
        Layout of this rank.
    nhomes : int
        Number of home rails. Link channels with equal remainder modulo `nhomes` share a port.
    nbytes : int
        In-flight byte budget of a port with several senders. If ranks share the port, the links of
        the other ranks are not counted.

    Notes
    -----
    A receiver limits the data in flight by the number of landing places that it announces. If
    several peers send to one port, the data in flight to that port must fit the switch queue before
    it. A queue that overflows drops segments, and TCP waits 200 ms to retransmit the last segment
    of a burst.
    Measured with 4 nodes of 4 rails of 200 Mbit/s, queues of 128 KiB, packed trees and slices of
    128 KiB: with two landing places ahead, a call retransmits 1,000 segments, waits 200 ms 3 to 7
    times and takes 1.4 times as long as with one. A port with one sender needs no bound, because
    the sender's port is not faster. Every link keeps at least one slice in flight; otherwise ranks
    would wait for one another.
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
