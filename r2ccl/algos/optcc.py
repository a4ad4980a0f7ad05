"""OptCC: allreduce in a ring of all ranks but one straggler, which sends and gets the data once.

One rank, the straggler, has lost the fraction X of its bandwidth B. The D bytes of data are divided
into k segments, and each segment into m = n - 1 sections. Each segment takes four stages:

- S1: the m healthy ranks reduce-scatter the segment in their ring; position p owns section p + 1.
- S2: the owners send their sections to the straggler.
- S3: the straggler adds its own data and returns the sums.
- S4: the healthy ranks allgather the sums.

Every other segment (with two ranks, every segment) takes the stages in the order S3 S1 S4 S2: the
straggler sends its data to the positions where the sections start, and later the owners send the
sums to the straggler (S2, which does not wait for S4). The straggler can thus send one segment
while it receives another and the healthy ranks work on a third. On the links of the ring, the
reduce-scatter of segment i comes before the allgather of segment i - 2.

The straggler sends and receives D bytes, which is the minimum; the healthy ranks send and receive
(2n - 3)/(n - 1) D. Let l be 1/(1 - X). The straggler takes at least as long as the healthy ranks if
l >= (2n - 3)/(n - 1). The time is then l (k + 1)/k D/B, as published: the straggler waits for its
first segment only.

Steps: 2n - 2 dependent messages for one segment. Each further segment adds about 2n - 6, but less
than 1 on average if n is 3, and none if n is 2. Bytes on the wire: as above.

Use it for large messages with one straggler that has lost about half of its bandwidth. If it has
lost less, it idles while the healthy ranks have more work than in a ring of all ranks. `leaf_ring`
uses that idle time. In `leaf_ring` the owner of a section always adds the straggler's data, which
makes the chains of dependent messages shorter.

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

#: Number of segments by which the allgather of a segment follows its reduce-scatter in program
#: order; meanwhile the straggler exchanges the segment with the owners.
_LAG = 2


class _Segment(NamedTuple):
    """One segment of the data.

    Attributes
    ----------
    sections : tuple of tuple of int
        The chunk of each section; section p starts at position p of the ring.
    is_reversed : bool
        True if the stages have the order S3 S1 S4 S2, False for S1 S2 S3 S4.
    """

    sections: tuple[tuple[int], ...]
    is_reversed: bool


def allreduce(bandwidths: Sequence[int], nsegments: int = 1, nchannels: int = 1) -> Schedule:
    """Build the OptCC allreduce, with the slowest rank as the straggler.

    Parameters
    ----------
    bandwidths : sequence of int
        Bandwidth of each rank, in any unit, above 0.
    nsegments : int
        Number of segments, k in the module docstring.
    nchannels : int
        Number of independent copies of the pattern, each on its own share of the buffer.

    Raises
    ------
    InvalidArgument
        If there is no rank, or a bandwidth, `nsegments` or `nchannels` is below 1.
    """
    if nsegments < 1:
        raise InvalidArgument(f"nsegments={nsegments}; give 1 or more")
    n, straggler = len(bandwidths), straggler_of(bandwidths).rank
    # A single rank counts as healthy.
    healthy = tuple(rank for rank in range(n) if rank != straggler) or (0,)
    return blend("optcc", [_part(n, healthy, nsegments)], [Fraction(1)], [nchannels])


def _part(nranks: int, ring: tuple[int, ...], nsegments: int) -> BlendPart:
    size = len(ring)
    # With one healthy rank there is no ring to overlap with, so all segments are reversed.
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
    """Return the straggler's ops, in an order that matches the ops of the healthy ranks.

    The order matters only among the ops of one link; dependencies decide when an op runs.
    """
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
    """Yield pairs: a segment to reduce-scatter, and the segment to allgather after that.

    The segment to allgather is `_LAG` segments behind. At the start and at the end, None stands for
    a missing segment.
    """
    none = [None] * _LAG
    return zip([*segments, *none], [*none, *segments], strict=True)


def _steps(nranks: int, segments: Sequence[_Segment]) -> int:
    """Return the number of messages on the longest chain of dependent messages.

    The links of the ring handle the passes around the ring one after another. A pass starts after
    the previous pass, or when its data is ready, whichever is later.
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
