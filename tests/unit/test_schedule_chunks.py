"""Channels and chunks cover a buffer exactly, in proportion, the same on every rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.chunks import MIN_GRANULES, channel_bounds, chunk_bounds, layout

#: Shared cores stall for longer than any one example needs.
relaxed = settings(deadline=None)

counts = st.integers(0, 1 << 40)
itemsizes = st.sampled_from([1, 2, 4, 8, 12, 16])
weights = st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any)


@relaxed
@given(counts, weights, itemsizes)
def test_channels_cover_the_buffer_in_order(count, shares, itemsize):
    bounds = channel_bounds(count, shares, itemsize)
    assert len(bounds) == len(shares) + 1
    assert (bounds[0], bounds[-1]) == (0, count)
    assert list(bounds) == sorted(bounds)


@relaxed
@given(counts, weights, itemsizes)
def test_channels_follow_the_weights_within_an_alignment(count, shares, itemsize):
    total = sum(shares)
    for (lo, hi), share in zip(
        pairwise(channel_bounds(count, shares, itemsize)), shares, strict=True
    ):
        assert abs((hi - lo) * total - count * share) <= 65 * total
        assert share or lo == hi, "a channel without weight carries nothing"


@relaxed
@given(st.integers(0, 1 << 30), st.integers(1, 32), itemsizes)
def test_channels_of_large_buffers_start_on_cache_lines(extra, nchannels, itemsize):
    count = MIN_GRANULES * 64 * nchannels + extra
    bounds = channel_bounds(count, [1] * nchannels, itemsize)
    assert all(bound * itemsize % 64 == 0 for bound in bounds[:-1])


def test_small_buffers_are_shared_to_the_element():
    assert channel_bounds(10, [1, 1], 4) == (0, 5, 10)


@relaxed
@given(st.integers(0, 1 << 40), counts, st.integers(1, 300))
def test_chunks_cover_their_channel_and_differ_by_one_element(lo, size, nchunks):
    bounds = chunk_bounds(lo, lo + size, nchunks)
    sizes = [high - low for low, high in pairwise(bounds)]
    assert len(sizes) == nchunks
    assert (bounds[0], bounds[-1]) == (lo, lo + size)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 0


@pytest.mark.parametrize(
    "arguments",
    [(-1, [1]), (4, []), (4, [0, 0]), (4, [2, -1]), (4, [1], 0)],
)
def test_channels_refuse_nonsense(arguments):
    with pytest.raises(InvalidArgument):
        channel_bounds(*arguments)


@pytest.mark.parametrize("arguments", [(2, 1, 1), (0, 1, 0)])
def test_chunks_refuse_nonsense(arguments):
    with pytest.raises(InvalidArgument):
        chunk_bounds(*arguments)


@relaxed
@given(counts, weights, st.integers(1, 20), itemsizes)
def test_a_layout_is_the_chunks_of_every_channel(count, shares, nchunks, itemsize):
    chunks = layout(count, len(shares), nchunks, itemsize=itemsize, weights=shares)
    bounds = channel_bounds(count, shares, itemsize)
    assert chunks == tuple(chunk_bounds(lo, hi, nchunks) for lo, hi in pairwise(bounds))


def test_channels_weigh_the_same_unless_told():
    assert layout(12, 2, 3) == ((0, 2, 4, 6), (6, 8, 10, 12))


def test_a_layout_wants_one_weight_a_channel():
    with pytest.raises(InvalidArgument, match="give 3 integers"):
        layout(12, 3, 1, weights=[1, 1])
