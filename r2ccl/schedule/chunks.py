"""Where channels and chunks lie in a buffer: integers only, the same on every rank.

Imports `errors` alone. Invariant: boundaries start at the first element, never decrease, end
behind the last, and depend on nothing but the arguments, so ranks that agree on count, weights
and item size agree on every byte's place without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from r2ccl.errors import InvalidArgument

#: Channel boundaries of large buffers fall on multiples of this: a cache line on x86 and on most
#: Arm cores, so that two channels' kernels and DMA never share one.
ALIGNMENT_NBYTES = 64

#: Alignment moves a boundary by less than one granule; a channel of this many granules on average
#: loses less than 2 % of its share by it. Smaller buffers are cut at the exact element.
MIN_GRANULES = 64


def channel_bounds(count: int, weights: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Share `count` elements among channels in proportion to `weights`.

    Parameters
    ----------
    count : int
        Elements of the buffer, 0 or more.
    weights : sequence of int
        One weight a channel, 0 or more, not all 0. Integers, because ranks must round alike.
    itemsize : int
        Bytes of an element; inner boundaries of large buffers are multiples of 64 bytes.

    Returns
    -------
    tuple of int
        ``len(weights) + 1`` boundaries in elements: channel ``c`` owns ``[b[c], b[c + 1])``.

    Raises
    ------
    InvalidArgument
        A negative count or weight, no positive weight, an item size below 1.
    """
    if count < 0 or itemsize < 1:
        raise InvalidArgument(
            f"count={count}, itemsize={itemsize}: give a count of 0 or more, an item size above 0"
        )
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise InvalidArgument(
            f"weights={tuple(weights)}: give one integer of 0 or more a channel, one above 0"
        )
    granule = ALIGNMENT_NBYTES // math.gcd(ALIGNMENT_NBYTES, itemsize)
    if count < MIN_GRANULES * granule * len(weights):
        granule = 1
    cut = [count * share // total // granule * granule for share in accumulate(weights)]
    # The boundary behind the last positive weight is the end, whatever the granule.
    return (0, *(count if bound >= cut[-1] else bound for bound in cut))


def chunk_bounds(lo: int, hi: int, nchunks: int) -> tuple[int, ...]:
    """Cut elements ``[lo, hi)`` into `nchunks` chunks whose sizes differ by at most one element.

    Returns
    -------
    tuple of int
        ``nchunks + 1`` boundaries in elements: chunk ``i`` is ``[b[i], b[i + 1])``.

    Raises
    ------
    InvalidArgument
        ``hi < lo``, or fewer than one chunk.
    """
    if hi < lo or nchunks < 1:
        raise InvalidArgument(
            f"lo={lo}, hi={hi}, nchunks={nchunks}: give lo <= hi and one chunk or more"
        )
    return tuple(lo + (hi - lo) * i // nchunks for i in range(nchunks + 1))


def layout(
    count: int,
    nchannels: int,
    nchunks: int,
    *,
    itemsize: int = 1,
    weights: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Cut a buffer into the chunks of all channels.

    Parameters
    ----------
    count, itemsize : int
        Elements of the buffer, bytes of an element.
    nchannels, nchunks : int
        Channels, and chunks of each.
    weights : sequence of int, optional
        Share of each channel; default equal.

    Returns
    -------
    tuple of tuple of int
        ``nchunks + 1`` boundaries in elements for every channel, as `chunk_bounds` gives them.

    Raises
    ------
    InvalidArgument
        As `channel_bounds` and `chunk_bounds`, or not one weight a channel.
    """
    if weights is None:
        weights = (1,) * nchannels
    if len(weights) != nchannels:
        raise InvalidArgument(f"weights={tuple(weights)}: give {nchannels} integers, one a channel")
    bounds = channel_bounds(count, weights, itemsize)
    return tuple(chunk_bounds(lo, hi, nchunks) for lo, hi in pairwise(bounds))


__all__ = ["ALIGNMENT_NBYTES", "MIN_GRANULES", "channel_bounds", "chunk_bounds", "layout"]
