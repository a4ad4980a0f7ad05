"""Leaf ring: ring allreduce among the fast ranks; the slow ranks are leaves of the ring.

An allreduce takes at least 2(n - 1) transfers of each byte. In a ring each rank makes 2(n - 1)/n of
them, so a ring is as slow as its slowest rank. Here m ranks, the core, form the ring, and the other
ranks are leaves. A leaf sends and receives each byte once, which is the minimum. A leaf with spare
bandwidth also relays for the core; it then sends and receives a byte twice.

The data is divided into segments, and each segment into m sections, one per position in the ring.
The section that starts at position p is reduced along positions p, p + 1, ... and ends at its
owner, position p - 1. Then each leaf sends its data to the owner, which reduces it and returns the
sum. Then the sum is passed along positions p, p + 1, ... to position p - 2.

In a segment in which a leaf relays, position p sends its data to the leaf instead of to position
p + 1. The leaf reduces this data with its own and sends the result to the owner. At the end, the
leaf, not position p - 3, sends the sum to position p - 2. A second relay does the same for
positions p + 1 and p - 3, and so on.

A core rank sends and receives (n + m - 2 - r)/m of the data, where r is the mean number of leaves
that relay in a segment. A leaf sends and receives the data once, and twice in segments in which it
relays. `r2ccl.algos.roles` chooses the leaves and how often they relay. With one straggler, and
usually with several, the time is `packed_trees.lower_bound`, plus latency and the time of the two
phases below that do not overlap.

Segments overlap. On each link, the reduce-scatter of a segment comes before the remaining phases of
earlier segments, so that the core has other work while it waits for a slow leaf. Two phases do not
overlap with any exchange with the leaves: the reduce-scatter of the first segment, for which the
leaves wait, and the allgather of the last segment. Both are shorter with more segments.

Steps: let h be m minus the number of leaves that relay in a segment. One segment takes 2(h - 1)
dependent messages, but at least 2 if there is a leaf, and at least 4 if a leaf relays. Each further
segment adds up to 2(h - 2), or less than 1 on average if h is 1 or 2. Bytes on the wire: as above.

Use it for large messages with few stragglers among many ranks. Every leaf must share a rail with
every core rank, and every core rank with both of its neighbors in the ring.

The owner of a section reduces all contributions of leaves in a fixed order, independent of timing.

References
----------
Chen et al., "Don't let a few network failures slow the entire AllReduce", arXiv:2606.01680, 2026.
Their straggler sends and receives the data once, without relaying: see `r2ccl.algos.optcc`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

from r2ccl.algos.blend import BlendPart, blend
from r2ccl.algos.ring import Seat, seat_of
from r2ccl.algos.roles import choose, deal
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Op, Schedule, Space

#: Number of segments by which the exchange of a segment with the leaves, and its allgather, follow
#: its reduce-scatter in program order. From simulations with 4 to 16 ranks and 8 to 32 segments:
#: with smaller lags links wait for each other, larger lags gain nothing.
_RETURN_LAG, _GATHER_LAG = 3, 6

_T = TypeVar("_T")


class _Segment(NamedTuple):
    """One segment of the data.

    ``chunks[p]`` is the chunk of the section that starts at position p. ``relays`` are the leaves
    that relay in this segment: ``relays[i]`` receives the data of position p + i for this section.
    """

    chunks: tuple[int, ...]
    relays: tuple[int, ...]


def allreduce(bandwidths: Sequence[int], nsegments: int = 16, nchannels: int = 1) -> Schedule:
    """Build a leaf ring allreduce, with roles chosen from the bandwidths of the ranks.

    Parameters
    ----------
    bandwidths : sequence of int
        Bandwidth of each rank, in any unit, above 0.
    nsegments : int
        Number of segments. With more segments, ranks wait less for each other, and the shares that
        leaves relay are closer to the optimum. Without leaves there is one segment.
    nchannels : int
        Number of independent copies of the pattern, each on its own share of the buffer.

    Raises
    ------
    InvalidArgument
        If there is no rank, or a bandwidth, `nsegments` or `nchannels` is below 1.
    """
    n = len(bandwidths)
    if nsegments < 1:
        raise InvalidArgument(f"nsegments={nsegments}; give 1 or more")
    chosen = choose(bandwidths)
    relays = deal(chosen, nsegments) if chosen.relaying else [()]
    return blend("leaf_ring", [part(n, chosen.core, relays)], [Fraction(1)], [nchannels])


def part(nranks: int, core: Sequence[int], relays: Sequence[Sequence[int]] = ((),)) -> BlendPart:
    """Return the leaf ring allreduce with the given core and relays, as one part of a blend.

    Parameters
    ----------
    nranks : int
        Number of ranks. Ranks that are not in `core` are leaves.
    core : sequence of int
        Ranks of the core in ring order. A single rank is the hub of a star.
    relays : sequence of sequence of int
        For each segment, the leaves that relay in it; their number must be below ``len(core)``.

    Returns
    -------
    BlendPart
        Has ``len(relays) * len(core)`` chunks.

    Raises
    ------
    InvalidArgument
        If `core` is empty, or contains a rank twice or a number that is not a rank; if `relays` has
        no segment; or if the relays of a segment are not all different, are not all leaves, or are
        not fewer than the ranks of `core`.
    """
    ring = tuple(core)
    size = len(ring)
    leaves = tuple(rank for rank in range(nranks) if rank not in ring)
    _require_parts(nranks, ring, leaves, relays)
    segments = [
        _Segment(tuple(range(number * size, (number + 1) * size)), tuple(each))
        for number, each in enumerate(relays)
    ]
    nchunks = len(segments) * size
    nrelayed = {leaf: sum(leaf in each for each in relays) for leaf in leaves}
    of_core = len(segments) * (nranks + size - 2) - sum(nrelayed.values())
    nsent = dict.fromkeys(ring, of_core) | {
        leaf: nchunks + size * number for leaf, number in nrelayed.items()
    }
    loads = tuple(Fraction(nsent[rank], nchunks) for rank in range(nranks))
    return BlendPart(
        nchunks=nchunks,
        steps=_steps(size, leaves, segments),
        sent=loads,
        received=loads,
        nops=max(2 * max(nsent.values()), len(segments)),
        ops_of=lambda rank: (
            _leaf_ops(ring, rank, segments)
            if rank in nrelayed
            else _core_ops(seat_of(ring, rank), leaves, segments)
        ),
    )


def _require_parts(
    nranks: int, core: Sequence[int], leaves: Sequence[int], relays: Sequence[Sequence[int]]
) -> None:
    if not core or sorted([*core, *leaves]) != list(range(nranks)):
        raise InvalidArgument(f"core={core}: give one or more different ranks, 0 to {nranks - 1}")
    if not relays or any(
        len(each) >= len(core) or len(set(each) & set(leaves)) != len(each) for each in relays
    ):
        raise InvalidArgument(
            f"relays={relays!r}: give one tuple or more, one per segment, each with fewer than "
            f"{len(core)} different ranks out of the leaves {leaves}"
        )


def _core_ops(seat: Seat, leaves: Sequence[int], segments: Sequence[_Segment]) -> tuple[Op, ...]:
    program = ProgramBuilder()
    if seat.size == 1 and not leaves:
        for chunk in range(len(segments)):
            program.copy(chunk, Space.INPUT, is_final=True)
    for to_reduce, to_complete, to_hand_around in _overlapped(segments):
        for segment in to_reduce:
            _reduce(program, seat, segment, is_final=not leaves)
        for segment in to_complete:
            chunk = segment.chunks[(seat.place + 1) % seat.size]
            for leaf in leaves:
                program.recv_reduce(leaf, chunk, is_final=leaf == leaves[-1])
            for leaf in leaves:
                program.send(leaf, chunk)
        for segment in to_hand_around:
            _hand_around(program, seat, segment)
    return program.ops()


def _reduce(program: ProgramBuilder, seat: Seat, segment: _Segment, *, is_final: bool) -> None:
    """Add the reduce-scatter of a segment; the first sends go to relays, not to the neighbor."""
    chunks, relays = segment.chunks, segment.relays
    for step in range(seat.size - 1):
        if step < len(relays):
            program.send(relays[step], chunks[seat.place - step])
            continue
        program.send(seat.right, chunks[seat.place - step])
        chunk = chunks[seat.place - step - 1]
        program.recv_reduce(seat.left, chunk, is_final=is_final and step == seat.size - 2)


def _hand_around(program: ProgramBuilder, seat: Seat, segment: _Segment) -> None:
    """Add the allgather of a segment; the last receives are from relays, not the neighbor."""
    chunks, relays = segment.chunks, segment.relays
    for step in range(seat.size - 1):
        left = seat.size - 2 - step
        if left >= len(relays):
            program.send(seat.right, chunks[(seat.place + 1 - step) % seat.size])
        source = seat.left if left >= len(relays) else relays[left]
        # The arrival of the sum proves that this rank's contribution arrived.
        program.recv(source, chunks[seat.place - step], is_proof=True)


def _leaf_ops(core: Sequence[int], rank: int, segments: Sequence[_Segment]) -> tuple[Op, ...]:
    program = ProgramBuilder()
    size = len(core)
    for to_reduce, to_complete, to_hand_around in _overlapped(segments):
        for segment in to_reduce:
            if rank in segment.relays:
                number = segment.relays.index(rank)
                for place, chunk in enumerate(segment.chunks):
                    program.recv_reduce(core[(place + number) % size], chunk)
        for segment in to_complete:
            for place, chunk in enumerate(segment.chunks):
                program.send(core[place - 1], chunk)
                program.recv(core[place - 1], chunk, is_proof=True)
        for segment in to_hand_around:
            if rank in segment.relays:
                number = segment.relays.index(rank)
                for place, chunk in enumerate(segment.chunks):
                    program.send(core[(place - 2 - number) % size], chunk)
    return program.ops()


def _overlapped(segments: Sequence[_T]) -> Iterator[tuple[Sequence[_T], ...]]:
    """Yield, for each turn, three sequences: the segments to reduce, to complete and to allgather.

    The exchange with the leaves completes a segment. Each sequence has at most one segment.
    """
    for turn in range(len(segments) + _GATHER_LAG):
        yield tuple(
            segments[max(turn - lag, 0) : max(turn - lag + 1, 0)]
            for lag in (0, _RETURN_LAG, _GATHER_LAG)
        )


def _steps(size: int, leaves: Sequence[int], segments: Sequence[_Segment]) -> int:
    """Return the number of messages on the longest chain of dependent messages.

    The step of a message is its position in the longest chain that ends with it. All positions of
    the ring behave alike. The last step so far is therefore one number for all links of the ring,
    and two numbers per leaf: for the links into the leaf, and for the links out of it. The step
    of the next message on a link is at least that of the link's last message.
    """
    ring, into, out = 0, dict.fromkeys(leaves, 0), dict.fromkeys(leaves, 0)
    reduced, given, completed, answered = [], [], [], []
    for to_reduce, to_complete, to_hand_around in _overlapped(range(len(segments))):
        for number in to_reduce:
            relays = segments[number].relays
            nhops = size - 1 - len(relays)
            ring = max(ring, 1) + nhops - 1 if nhops else ring
            into = into | {leaf: max(into[leaf], 1) for leaf in relays}
            reduced.append(ring if nhops else 0)
            given.append({leaf: into[leaf] if leaf in relays else 0 for leaf in leaves})
        for number in to_complete:
            end = reduced[number]
            for leaf in leaves:
                end = out[leaf] = max(end, out[leaf], given[number][leaf] + 1)
            into = {leaf: max(into[leaf], end + 1) for leaf in leaves}
            completed.append(end)
            answered.append(into)
        for number in to_hand_around:
            relays = segments[number].relays
            nhops = size - 1 - len(relays)
            ring = max(ring, completed[number] + 1) + nhops - 1 if nhops else ring
            out = out | {leaf: max(out[leaf], answered[number][leaf] + 1) for leaf in relays}
    return max([ring, *into.values(), *out.values()])


__all__ = ["allreduce", "part"]
