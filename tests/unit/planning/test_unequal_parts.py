"""Lowering of parts of any size: what is cut, sent and left out, on both ranks of a part."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r2ccl.algos import direct_exchange, ring
from r2ccl.errors import InvalidArgument
from r2ccl.planning.lowering import Layout, lower
from r2ccl.schedule.chunks import Parts, consecutive
from r2ccl.schedule.ir import OpKind, Schedule
from r2ccl.types import CallSignature, Collective

SIZES = st.sampled_from([0, 1, 3, 16, 17, 1000, 5000, 123_457])


def alltoall(sizes: list[list[int]], rank: int, whole_nbytes: int, nchannels: int = 3) -> Layout:
    """Return the layout of `rank` for parts of ``sizes[source][destination]`` 4-byte elements."""
    n = len(sizes)
    to = consecutive(sizes[rank])
    of = consecutive([row[rank] for row in sizes])
    parts = Parts(
        tuple(to[(rank + part) % n] for part in range(n)),
        tuple(of[(rank - part) % n] for part in range(n)),
    )
    return lower(
        direct_exchange.alltoall(n, nchannels).program(rank),
        0,
        4,
        slice_nbytes=4096,
        eager_nbytes=0,
        parts=parts,
        whole_nbytes=whole_nbytes,
        announces_parts=True,
    )


def slices(layout: Layout, kind: OpKind, peer: int) -> list[tuple[int, int, bool]]:
    """Return lane, number of elements and eagerness of every slice to or from a peer, in order."""
    return [
        (number, hi - lo, step.is_eager)
        for number, lane in enumerate(layout.lanes)
        for step in lane.steps
        if step.kind == kind and step.peer == peer
        for lo, hi in zip(step.cuts, step.cuts[1:], strict=False)
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(SIZES, min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    st.sampled_from([0, 64]),
)
def test_both_ranks_cut_a_part_alike(sizes: list[list[int]], whole_nbytes: int) -> None:
    layouts = [alltoall(sizes, rank, whole_nbytes) for rank in range(len(sizes))]
    for source, row in enumerate(sizes):
        for target, size in enumerate(row):
            if source == target:
                continue
            sent = slices(layouts[source], OpKind.SEND, target)
            assert sent == slices(layouts[target], OpKind.RECV, source)
            assert sum(count for _, count, _ in sent) == size
            lane, first, is_eager = sent[0]
            assert (lane, is_eager) == (0, True), "nothing tells the receiver the size at once"
            if whole_nbytes and size * 4 <= whole_nbytes:
                assert sent == [(0, size, True)]
            if whole_nbytes and size * 4 > whole_nbytes:
                assert first == 0
                assert all(count and not is_eager for _, count, is_eager in sent[1:])


@settings(deadline=None, max_examples=40)
@given(st.lists(SIZES, min_size=3, max_size=3))
def test_every_element_of_a_rank_is_read_or_written_once(row: list[int]) -> None:
    sizes = [row, row[::-1], [5, 0, 70_000]]
    for rank in range(3):
        layout = alltoall(sizes, rank, 64)
        for kind, total in (
            (OpKind.SEND, sum(sizes[rank])),
            (OpKind.RECV, sum(each[rank] for each in sizes)),
        ):
            own = [
                (step.cuts[0] + step.shift * (kind == OpKind.SEND), step.cuts[-1] - step.cuts[0])
                for lane in layout.lanes
                for step in lane.steps
                if step.kind in (kind, OpKind.COPY)
            ]
            at = 0
            for first, count in sorted(each for each in own if each[1]):
                assert first == at
                at += count
            assert at == total


def test_parts_of_more_than_2_gib_are_cut_without_a_limit() -> None:
    sizes = [[1, 3 << 30], [(5 << 30) + 1, 2]]
    for rank, peer in ((0, 1), (1, 0)):
        program = direct_exchange.alltoall(2, 2).program(rank)
        to, of = consecutive(sizes[rank]), consecutive([row[rank] for row in sizes])
        parts = Parts((to[rank], to[peer]), (of[rank], of[peer]))
        layout = lower(
            program, 0, 8, slice_nbytes=1 << 30, eager_nbytes=0, parts=parts, whole_nbytes=64
        )
        for kind, size in ((OpKind.SEND, sizes[rank][peer]), (OpKind.RECV, sizes[peer][rank])):
            cut = slices(layout, kind, peer)
            assert sum(count for _, count, _ in cut) == size
            assert max(count for _, count, _ in cut) == 1 << 27


@pytest.mark.parametrize("count", [0, 5, (1 << 31) + 3, (1 << 38) - 2])
def test_a_signature_tells_large_counts_apart(count: int) -> None:
    call = CallSignature(Collective.ALLTOALLV, 3, 0, count)
    assert CallSignature.unpack(call.pack()) == call
    other = msgspec.structs.replace(call, count=count + 1)
    assert call.pack() != other.pack()


@pytest.mark.parametrize("make", [ring.allgather, ring.reduce_scatter])
def test_a_ring_moves_all_parts_but_one(make) -> None:
    schedule: Schedule = make(4, 2)
    counts = (100_000, 0, 7, 3)
    places = consecutive(counts)
    for rank in range(4):
        layout = lower(
            schedule.program(rank), sum(counts), 4, slice_nbytes=4096, eager_nbytes=64,
            parts=Parts(places, places),
        )  # fmt: skip
        after = (rank + 1) % 4
        sent = sum(count for _, count, _ in slices(layout, OpKind.SEND, after))
        left_out = after if schedule.collective == "allgather" else rank
        assert sent == sum(counts) - counts[left_out]


def test_a_wrong_number_of_parts_is_refused() -> None:
    program = direct_exchange.alltoall(3).program(0)
    parts = Parts(((0, 1),) * 2, ((0, 1),) * 2)
    with pytest.raises(InvalidArgument, match="nparts=3"):
        lower(program, 0, 4, slice_nbytes=64, eager_nbytes=0, parts=parts)


@pytest.mark.parametrize("count", [0, 12, 12_000])
def test_equal_parts_travel_in_one_message_per_pair(count: int) -> None:
    for rank in range(4):
        program = direct_exchange.alltoall(4, 1).program(rank)
        layout = lower(program, count, 4, slice_nbytes=1 << 20, eager_nbytes=0, whole_nbytes=64)
        for peer in set(range(4)) - {rank}:
            for kind in (OpKind.SEND, OpKind.RECV):
                assert [size for _, size, _ in slices(layout, kind, peer)] == [count // 4]
