"""Slices: the same cuts on every rank, dependencies as the schedule means them."""

import hypothesis
import pytest
from hypothesis import strategies as st

from r2ccl.algos import recursive_doubling, ring
from r2ccl.planning.lowering import Layout, cleared, lower
from r2ccl.schedule.ir import Op, OpKind, RankProgram, Schedule, Space


def layouts(schedule: Schedule, count: int, **sizes: int) -> list[Layout]:
    given = {"slice_nbytes": 64, "eager_nbytes": 16, **sizes}
    return [lower(schedule.program(rank), count, 4, **given) for rank in range(schedule.nranks)]


@hypothesis.given(
    nranks=st.integers(2, 5),
    nchannels=st.integers(1, 4),
    count=st.integers(0, 500),
    slice_nbytes=st.integers(1, 300),
    eager_nbytes=st.integers(0, 300),
    is_ring=st.booleans(),
    clears_busy_links=st.booleans(),
)
def test_both_ends_of_a_link_cut_alike(
    nranks: int,
    nchannels: int,
    count: int,
    slice_nbytes: int,
    eager_nbytes: int,
    is_ring: bool,
    clears_busy_links: bool,
) -> None:
    make = ring.allreduce if is_ring else recursive_doubling.allreduce
    ranks = layouts(
        make(nranks, nchannels),
        count,
        slice_nbytes=slice_nbytes,
        eager_nbytes=eager_nbytes,
        clears_busy_links=clears_busy_links,
    )
    for sender in ranks:
        for lane in sender.lanes:
            for peer, channel, order, _ in lane.sends:
                other = ranks[peer].lanes[channel]
                (receives,) = [way.steps for way in other.recvs if way.peer == sender.rank]
                mine = [(lane.steps[i].cuts, lane.steps[i].is_eager) for i in order]
                theirs = [(other.steps[i].cuts, other.steps[i].is_eager) for i in receives]
                assert mine == theirs


@hypothesis.given(st.integers(0, 400), st.integers(1, 64), st.integers(1, 4))
def test_slices_cover_every_chunk_and_none_is_too_large(
    count: int, slice_nbytes: int, nchannels: int
) -> None:
    (layout, *_) = layouts(ring.allreduce(3, nchannels), count, slice_nbytes=slice_nbytes)
    chunks = set()
    for lane in layout.lanes:
        for step in lane.steps:
            assert list(step.cuts) == sorted(step.cuts)
            assert step.nslices >= 1
            for lo, hi in zip(step.cuts, step.cuts[1:], strict=False):
                assert 4 * (hi - lo) <= layout.slice_nbytes
            chunks.add((step.cuts[0], step.cuts[-1]))
    assert sum(hi - lo for lo, hi in chunks) == count


def test_an_empty_chunk_still_travels_and_is_eager() -> None:
    for layout in layouts(ring.allreduce(3), 1, eager_nbytes=0):
        empty = [step for step in layout.lanes[0].steps if step.cuts[0] == step.cuts[-1]]
        assert empty
        assert all(step.is_eager and step.nslices == 1 for step in empty)


def test_dependencies_hold_by_slice_in_chunks_and_whole_between() -> None:
    ops = (
        Op(OpKind.RECV, 1, Space.OUTPUT, -1, Space.OUTPUT, 0),
        Op(OpKind.SEND, 1, Space.OUTPUT, 0, Space.OUTPUT, -1, (0,)),
        Op(OpKind.SEND, 1, Space.OUTPUT, 1, Space.OUTPUT, -1, (0,)),
    )
    layout = lower(
        RankProgram(0, 2, 1, (2,), (1,), (ops,)), 100, 4, slice_nbytes=64, eager_nbytes=0
    )
    after = [[wait[:2] for wait in step.after] for step in layout.lanes[0].steps]
    assert after == [[], [(0, True)], [(0, False)]]


@pytest.mark.parametrize("nbytes", [15, 16, 17])
def test_an_op_is_eager_if_its_largest_slice_is(nbytes: int) -> None:
    program = recursive_doubling.allreduce(2).program(0)
    layout = lower(program, nbytes, 1, slice_nbytes=64, eager_nbytes=16)
    assert {step.is_eager for step in layout.lanes[0].steps} == {nbytes <= 16}
    layout = lower(program, 4 * 16, 1, slice_nbytes=16, eager_nbytes=16)
    assert {step.is_eager for step in layout.lanes[0].steps} == {True}


@pytest.mark.parametrize(
    ("nchunks", "nbytes", "is_eager"), [(4, 64, True), (5, 64, False), (17, 16, True)]
)
def test_large_slices_are_cleared_where_much_is_sent(
    nchunks: int, nbytes: int, is_eager: bool
) -> None:
    # Rank 1 sends all chunks to rank 0, and only one back.
    sent = tuple(
        Op(OpKind.SEND, 0, Space.INPUT, chunk, Space.OUTPUT, -1) for chunk in range(nchunks)
    )
    back = Op(OpKind.RECV, 0, Space.OUTPUT, -1, Space.OUTPUT, 0)
    copied = Op(OpKind.COPY, -1, Space.INPUT, 0, Space.OUTPUT, 0)
    program = RankProgram(1, 2, 1, (nchunks,), (1,), ((*sent, back, copied),))
    given = {"slice_nbytes": 64, "eager_nbytes": 64}
    layout = lower(program, nchunks * nbytes, 1, **given, clears_busy_links=True)
    *sends, received, _ = layout.lanes[0].steps
    assert {step.is_eager for step in sends} == {is_eager}
    assert received.is_eager
    layout = lower(program, nchunks * nbytes, 1, **given)
    assert {step.is_eager for step in layout.lanes[0].steps} == {True}


def test_left_operand_is_the_lower_ranks() -> None:
    for layout in layouts(recursive_doubling.allreduce(4), 10):
        for step in layout.lanes[0].steps:
            assert step.is_left == (step.peer < layout.rank)


def test_peers_lane_totals_and_scratch() -> None:
    (layout, *_) = layouts(ring.allreduce(4, 2), 100)
    assert layout.peers == {1, 3}
    assert not layout.uses_scratch
    for lane in layout.lanes:
        assert lane.nslices == sum(step.nslices for step in lane.steps)
        indices = [i for way in (*lane.sends, *lane.recvs) for i in way.steps]
        assert sorted([*indices, *lane.locals]) == list(range(len(lane.steps)))
    copy = Op(OpKind.COPY, -1, Space.INPUT, 0, Space.SCRATCH, 0)
    program = RankProgram(0, 1, 1, (1,), (1,), ((copy,),))
    assert lower(program, 3, 4, slice_nbytes=64, eager_nbytes=0).uses_scratch


def test_a_slice_smaller_than_an_element_holds_one() -> None:
    layout = lower(ring.allreduce(2).program(0), 6, 8, slice_nbytes=1, eager_nbytes=0)
    assert layout.slice_nbytes == 8
    assert layout.lanes[0].steps[0].nslices == 3


def test_weights_share_the_buffer_between_channels() -> None:
    layout = lower(
        ring.allreduce(2, 2).program(0), 90, 4, slice_nbytes=64, eager_nbytes=0, weights=[2, 1]
    )
    chunks = [{(step.cuts[0], step.cuts[-1]) for step in lane.steps} for lane in layout.lanes]
    assert chunks == [{(0, 30), (45, 75)}, {(30, 45), (75, 90)}]


def test_a_lane_travels_on_the_links_channel_it_is_given() -> None:
    program = ring.allreduce(2, 2).program(0)
    layout = lower(program, 90, 4, slice_nbytes=64, eager_nbytes=0, channels=[5, 2])
    assert [lane.channels for lane in layout.lanes] == [(5,), (2,)]


def test_an_edge_of_a_lane_can_travel_on_another() -> None:
    program = ring.allreduce(3, 2).program(0)
    numbers = {(0, 2): 7, (1, 1): 9}
    layout = lower(
        program, 90, 4, slice_nbytes=64, eager_nbytes=0, channels=[5, 2], numbers=numbers
    )
    sends = [[(way.peer, way.channel) for way in lane.sends] for lane in layout.lanes]
    recvs = [[(way.peer, way.channel) for way in lane.recvs] for lane in layout.lanes]
    assert sends == [[(1, 5)], [(1, 9)]]
    assert recvs == [[(2, 7)], [(2, 2)]]
    assert [lane.channels for lane in layout.lanes] == [(5, 7), (2, 9)]


@pytest.mark.parametrize("count", [2, 100])
def test_without_eager_slices_all_but_empty_ones_have_a_place(count: int) -> None:
    """As if nothing were small enough; an empty slice has nothing to place."""
    small, none = (
        layouts(ring.allreduce(3, 2), count, eager_nbytes=each)[0] for each in (1_000, 0)
    )
    assert small != none
    assert cleared(small) == none
    assert all(
        step.is_eager == (step.cuts[0] == step.cuts[-1])
        for lane in cleared(small).lanes
        for step in lane.steps
    )
