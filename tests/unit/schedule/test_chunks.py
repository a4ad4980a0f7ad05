"""Channels and chunks cover a buffer exactly, in proportion, the same on every rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.chunks import MIN_GRANULES, cut, layout

#: Shared cores stall for longer than any one example needs.
relaxed = settings(deadline=None)

counts = st.integers(0, 1 << 40)
itemsizes = st.sampled_from([1, 2, 4, 8, 12, 16])
weights = st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any)


@relaxed
@given(counts, weights, itemsizes)
def test_pieces_cover_the_buffer_in_order(count, shares, itemsize):
    bounds = cut(count, shares, itemsize)
    assert len(bounds) == len(shares) + 1
    assert (bounds[0], bounds[-1]) == (0, count)
    assert list(bounds) == sorted(bounds)


@relaxed
@given(counts, weights, itemsizes)
def test_pieces_follow_the_weights_within_an_alignment(count, shares, itemsize):
    total = sum(shares)
    for (lo, hi), share in zip(pairwise(cut(count, shares, itemsize)), shares, strict=True):
        assert abs((hi - lo) * total - count * share) <= 65 * total
        assert share or lo == hi, "a piece without weight is empty"


@relaxed
@given(st.integers(0, 1 << 30), st.integers(1, 32), itemsizes)
def test_pieces_of_large_buffers_start_on_cache_lines(extra, nchannels, itemsize):
    count = MIN_GRANULES * 64 * nchannels + extra
    bounds = cut(count, [1] * nchannels, itemsize)
    assert all(bound * itemsize % 64 == 0 for bound in bounds[:-1])


def test_small_buffers_are_shared_to_the_element():
    assert cut(10, [1, 1], 4) == (0, 5, 10)


@pytest.mark.parametrize(
    "arguments",
    [(-1, [1]), (4, []), (4, [0, 0]), (4, [2, -1]), (4, [1], 0)],
)
def test_cuts_refuse_nonsense(arguments):
    with pytest.raises(InvalidArgument):
        cut(*arguments)


@relaxed
@given(counts, weights, st.integers(1, 20), itemsizes)
def test_the_parts_of_all_channels_cover_every_chunk_in_order(count, shares, nchunks, itemsize):
    parts = layout(count, [nchunks] * len(shares), shares, itemsize)
    assert [len(chunks) for chunks in parts] == [nchunks] * len(shares)
    in_order = [parts[channel][k] for k in range(nchunks) for channel in range(len(shares))]
    assert (in_order[0][0], in_order[-1][1]) == (0, count)
    assert all(before[1] == after[0] for before, after in pairwise(in_order))
    assert all(lo <= hi for lo, hi in in_order)


@relaxed
@given(st.integers(0, 1 << 20), weights, weights, st.integers(1, 20), itemsizes)
def test_an_elements_chunk_depends_on_no_channel_and_no_weight(
    count, shares, others, nchunks, itemsize
):
    def chunk_starts(weights):
        parts = layout(count, [nchunks] * len(weights), weights, itemsize)
        return [lo for lo, _ in parts[0]], [hi for _, hi in parts[-1]]

    assert chunk_starts(shares) == chunk_starts(others)


@pytest.mark.parametrize("nchunks", [0, -1])
def test_a_layout_has_a_chunk(nchunks):
    with pytest.raises(InvalidArgument):
        layout(4, [nchunks], [1])


def test_chunks_are_cut_first():
    assert layout(12, [3, 3], [1, 1]) == (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))


def test_a_layout_wants_one_weight_a_channel():
    with pytest.raises(InvalidArgument, match="give 3 integers"):
        layout(12, [1, 1, 1], [1, 1])


@relaxed
@given(counts, st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=9))
def test_channels_of_unequal_chunk_counts_cover_the_buffer(count, channels):
    nchunks, shares = zip(*channels, strict=True)
    parts = layout(count, nchunks, shares)
    assert tuple(map(len, parts)) == nchunks
    every = sorted(piece for pieces in parts for piece in pieces if piece[0] < piece[1])
    assert [lo for lo, _ in every] == [0, *(hi for _, hi in every)][: len(every)]
    assert not count or every[-1][1] == count


def test_channels_of_unequal_chunk_counts_share_common_chunks():
    assert layout(12, [2, 4], [1, 2]) == (
        ((0, 2), (6, 8)),
        ((2, 4), (4, 6), (8, 10), (10, 12)),
    )


@relaxed
@given(st.integers(0, 1 << 20), st.integers(1, 9), st.integers(1, 5), weights, itemsizes)
def test_parts_are_equal_and_cut_alike(size, nparts, nchunks, shares, itemsize):
    parts = layout(size * nparts, [nchunks * nparts] * len(shares), shares, itemsize, nparts)
    alone = layout(size, [nchunks] * len(shares), shares, itemsize)
    for pieces, of_one in zip(parts, alone, strict=True):
        assert list(pieces) == [
            (part * size + lo, part * size + hi) for part in range(nparts) for lo, hi in of_one
        ]


@pytest.mark.parametrize(("count", "nchunks", "nparts"), [(7, [2], 2), (8, [3], 2), (8, [2], 0)])
def test_parts_divide_the_buffer_and_the_chunks(count, nchunks, nparts):
    with pytest.raises(InvalidArgument, match=f"nparts={nparts}"):
        layout(count, nchunks, [1], nparts=nparts)
