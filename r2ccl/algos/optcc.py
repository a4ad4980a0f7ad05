"""OptCC: one straggler is a leaf of the others' ring, in segments of alternating order.

One rank has lost the fraction X of its bandwidth B. D bytes are cut in k segments, a segment in
m = n - 1 sections, and each segment takes four stages: S1, the m healthy ranks reduce it around
their ring, until place p owns section p + 1; S2, the owners send their sections to the straggler;
S3, the straggler adds its own data and sends the sums back; S4, the healthy ranks hand them around.
Every other segment takes the stages in the order S3 S1 S4 S2: the straggler's data goes to where
the sections set out, and the owners return the sums. So the straggler sends one segment while it
receives another, and the healthy ranks work on a third: on their links the reduce-scatter of a
segment goes before the allgather of the segment two before it.

The straggler sends and receives D, the least there can be; the healthy ranks (2n - 3)/(n - 1) D. If
that takes these no longer, for l = 1/(1 - X) >= (2n - 3)/(n - 1), the time is l (k + 1)/k D/B, as
published: all the straggler waits for is its first segment.

Steps: 2n - 2 messages one after another for one segment, about 2n - 6 more for each further one.
Bytes on the wire: as above.

It wins with one straggler that has lost about half of its bandwidth, and large messages. With less
lost the straggler idles, and the healthy ranks are busier than in a ring of all: `leaf_ring` fills
that, and merges the straggler's data at the owner, which takes fewer messages one after another.

Imports `bandwidths`, `blend`, `ring`, `schedule` and `errors`.

References
----------
Chen et al., "Don't let a few network failures slow the entire AllReduce", arXiv:2606.01680, 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.algos.bandwidths import straggler_of
from r2ccl.algos.blend import BlendPart, blend
from r2ccl.algos.ring import Seat, add_allgather, add_reduce_scatter, seat_of
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Op, Schedule, Space

#: Segments that are reduced before one is handed around: the straggler's answer takes so long.
_LAG = 2


class _Segment(NamedTuple):
    """Its sections, named by where they set out, and whether the straggler's data comes first."""

    sections: tuple[tuple[int], ...]
    is_reversed: bool


def allreduce(bandwidths: Sequence[int], nsegments: int = 1, nchannels: int = 1) -> Schedule:
    """Build the allreduce that spares the slowest rank.

    Parameters
    ----------
    bandwidths : sequence of int
        Of every rank, in any unit, above 0.
    nsegments : int
        k.
    nchannels : int
        Independent copies of the pattern, each over its own share of the buffer.

    Raises
    ------
    InvalidArgument
        No rank, a bandwidth or a number below 1.
    """
    if nsegments < 1:
        raise InvalidArgument(f"nsegments={nsegments}; give 1 or more")
    n, straggler = len(bandwidths), straggler_of(bandwidths).rank
    # A rank that is alone is its own healthy one.
    healthy = tuple(rank for rank in range(n) if rank != straggler) or (0,)
    return blend("optcc", [_part(n, healthy, nsegments)], [Fraction(1)], [nchannels])


def _part(nranks: int, ring: tuple[int, ...], nsegments: int) -> BlendPart:
    size = len(ring)
    # A ring of one has nothing to do meanwhile, and gains nothing by waiting.
    segments = [
        _Segment(
            tuple((number * size + place,) for place in range(size)), number % 2 == 1 or size == 1
        )
        for number in range(nsegments)
    ]
    of_healthy = Fraction(nranks + size - 2, size)
    loads = tuple(of_healthy if rank in ring else Fraction(1) for rank in range(nranks))
    straggler = next((rank for rank in range(nranks) if rank not in ring), -1)
    return BlendPart(
        nchunks=nsegments * size,
        steps=_steps(nranks, segments),
        sent=loads,
        received=loads,
        nops=int(2 * of_healthy * size) * nsegments or nsegments,
        ops_of=lambda rank: (
            _straggler_ops(ring, segments)
            if rank == straggler
            else _healthy_ops(seat_of(ring, rank), straggler, segments)
        ),
    )


def _healthy_ops(seat: Seat, straggler: int, segments: Sequence[_Segment]) -> tuple[Op, ...]:
    program = ProgramBuilder()
    if straggler < 0:
        for chunk in range(len(segments)):
            program.copy(chunk, Space.INPUT, is_final=True)
        return program.ops()
    for segment, before in _overlapped(segments):
        if segment:
            if segment.is_reversed:
                [chunk] = segment.sections[seat.place]
                program.recv_reduce(straggler, chunk, is_final=seat.size == 1)
            add_reduce_scatter(program, seat, segment.sections, is_final=segment.is_reversed)
            program.send(straggler, _owned(seat, segment))
        if before:
            if not before.is_reversed:
                program.recv(straggler, _owned(seat, before), is_proof=True)
            add_allgather(program, seat, before.sections)
    return program.ops()


def _straggler_ops(ring: Sequence[int], segments: Sequence[_Segment]) -> tuple[Op, ...]:
    """Listed as the owners list theirs; what goes when follows from what is there."""
    program = ProgramBuilder()
    for segment, before in _overlapped(segments):
        if segment:
            for place, [chunk] in enumerate(segment.sections):
                if segment.is_reversed:
                    program.send(ring[place], chunk)
                    program.recv(ring[place - 1], chunk, is_proof=True)
                else:
                    program.recv_reduce(ring[place - 1], chunk, is_final=True)
        if before and not before.is_reversed:
            for place, [chunk] in enumerate(before.sections):
                program.send(ring[place - 1], chunk)
    return program.ops()


def _owned(seat: Seat, segment: _Segment) -> int:
    [chunk] = segment.sections[(seat.place + 1) % seat.size]
    return chunk


def _overlapped(
    segments: Sequence[_Segment],
) -> Iterator[tuple[_Segment | None, _Segment | None]]:
    """Say turn by turn which segment is to be reduced, and which to be handed around."""
    none = [None] * _LAG
    return zip([*segments, *none], [*none, *segments], strict=True)


def _steps(nranks: int, segments: Sequence[_Segment]) -> int:
    """Count the messages on the longest chain: a link takes one ring pass after the other.

    The first message of a pass joins the queue, if its data is there, or makes the chain longer.
    """
    nhops = nranks - 2
    if nhops < 1:
        return 2 * (nranks - 1)
    end, ready = 0, dict[int, int]()
    for segment, before in _overlapped(segments):
        if segment:
            end = max(end, 1 + segment.is_reversed) + nhops - 1
            ready[segment.sections[0][0]] = end + (0 if segment.is_reversed else 2)
        if before:
            end = max(end, ready[before.sections[0][0]] + 1) + nhops - 1
    return end


__all__ = ["allreduce"]
