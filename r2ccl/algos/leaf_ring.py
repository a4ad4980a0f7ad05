"""Leaf ring: a ring among the fast ranks; slow ones are its leaves, or relay for it now and then.

An allreduce takes 2(n - 1) transfers of every byte, however they are spread. In a ring each rank
makes 2(n - 1)/n of them, so that it is as slow as its slowest rank. Here m ranks, the core, form
the ring, and the others are leaves. A leaf makes one transfer each way, the least there can be; if
that leaves it bandwidth to spare, it relays for the core, which is one more.

The data is cut in segments, and a segment in m sections, one a place in the ring. The section that
sets out at place p is reduced along p, p + 1, ... to its owner at place p - 1. Then each leaf gives
the owner its data, the owner adds it and returns the sum, and the sum goes along p, p + 1, ... to
place p - 2. In a segment in which a leaf relays, place p gives its data to the leaf instead of its
neighbour, the leaf adds its own before it gives both to the owner, and in the end it is the leaf
that gives the sum to place p - 2. A second relay does so for places p + 1 and p - 3, and so on.

A rank of the core sends (n + m - 2 - r)/m of the data, with r leaves relaying, and receives as
much; a leaf the data once, or twice in the segments in which it relays. `r2ccl.algos.roles` chooses
who is a leaf and how often it relays, such that all end together: for a single straggler, and
mostly for several, at `packed_trees.lower_bound`.

Passes of several segments overlap. On each link a segment's reduce-scatter goes before what is left
to do of the segments before it, so that the core has other work while a leaf is slow to answer.
What remains are the start and the end: leaves wait for the first segment's reduce-scatter, and the
core, at last, for the allgather of the last segment. Both are shorter, the more segments there are.

Steps: 2(m - 1) messages one after another for one segment, 4 at least with a relay, and up to
2(m - 2) more for each further segment. Bytes on the wire: as above.

It wins with large messages and few stragglers among many ranks. All leaves must reach all of the
core, and neighbours in the core each other.

Imports `blend`, `ring`, `roles`, `schedule` and `errors`. Invariant: the sum of a
section is completed by its owner alone, in the same order whatever arrives first.

References
----------
Chen et al., "Don't let a few network failures slow the entire AllReduce", arXiv:2606.01680, 2026:
a straggler that sends and receives the data once, which is `r2ccl.algos.optcc`; without relays.
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

#: Segments that are reduced before the leaves have their answer to one, and before that is handed
#: around. Simulated with 4 to 16 ranks and 8 to 32 segments: with shorter lags links have to wait
#: for each other, with longer ones nothing is won.
_RETURN_LAG, _GATHER_LAG = 3, 6

_T = TypeVar("_T")


class _Segment(NamedTuple):
    """A chunk for every place, named by where the section sets out; and who relays."""

    chunks: tuple[int, ...]
    relays: tuple[int, ...]


def allreduce(bandwidths: Sequence[int], nsegments: int = 16, nchannels: int = 1) -> Schedule:
    """Build the allreduce that spares slow ranks.

    Parameters
    ----------
    bandwidths : sequence of int
        Of every rank, in any unit, above 0.
    nsegments : int
        The more there are, the less ranks wait for each other, and the closer relaying comes to the
        shares wanted. With equal bandwidths the data is one segment.
    nchannels : int
        Independent copies of the pattern, each over its own share of the buffer.

    Raises
    ------
    InvalidArgument
        No rank, a bandwidth or a number below 1.
    """
    n = len(bandwidths)
    if nsegments < 1:
        raise InvalidArgument(f"nsegments={nsegments}; give 1 or more")
    chosen = choose(bandwidths)
    relays = deal(chosen, nsegments) if chosen.relaying else [()]
    return blend("leaf_ring", [part(n, chosen.core, relays)], [Fraction(1)], [nchannels])


def part(nranks: int, core: Sequence[int], relays: Sequence[Sequence[int]] = ((),)) -> BlendPart:
    """Make the allreduce of `nranks` ranks over a ring of some of them.

    Parameters
    ----------
    nranks : int
        Size of the communicator. Ranks that are not in `core` are leaves.
    core : sequence of int
        Ranks in ring order; one alone is the hub of a star.
    relays : sequence of sequence of int
        For every segment the leaves that relay, fewer than the core has ranks.

    Returns
    -------
    BlendPart
        As many chunks as segments times ranks of the core.

    Raises
    ------
    InvalidArgument
        A core that is not made of different ranks; no segment; relays that are no leaves, or too
        many.
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
            f"relays={relays!r}: give some of the leaves {leaves} for every segment, fewer than "
            f"{len(core)}"
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
    """As `ring.add_reduce_scatter`, but what sets out first goes to the relays."""
    chunks, relays = segment.chunks, segment.relays
    for step in range(seat.size - 1):
        if step < len(relays):
            program.send(relays[step], chunks[seat.place - step])
            continue
        program.send(seat.right, chunks[seat.place - step])
        chunk = chunks[seat.place - step - 1]
        program.recv_reduce(seat.left, chunk, is_final=is_final and step == seat.size - 2)


def _hand_around(program: ProgramBuilder, seat: Seat, segment: _Segment) -> None:
    """As `ring.add_allgather`, but what comes last comes from the relays."""
    chunks, relays = segment.chunks, segment.relays
    for step in range(seat.size - 1):
        left = seat.size - 2 - step
        if left >= len(relays):
            program.send(seat.right, chunks[(seat.place + 1 - step) % seat.size])
        source = seat.left if left >= len(relays) else relays[left]
        # That the sum is there proves that this rank's part of it arrived.
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
    """Say turn by turn which segment is to be reduced, which completed, which handed around."""
    for turn in range(len(segments) + _GATHER_LAG):
        yield tuple(
            segments[max(turn - lag, 0) : max(turn - lag + 1, 0)]
            for lag in (0, _RETURN_LAG, _GATHER_LAG)
        )


def _steps(size: int, leaves: Sequence[int], segments: Sequence[_Segment]) -> int:
    """Count the messages on the longest chain.

    All places do the same, so it is enough to know, around the ring and between leaves and ranks of
    the core, when the last message of a link was used: the next one is not used sooner.
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
