"""Where chunks and channels lie in a buffer: integers only, the same on every rank.

A buffer is cut into chunks first, and each chunk is shared out among the channels::

    chunk       |        0        |        1        |        2        |
    channel     |  0  |  1  |  2  |  0  |  1  |  2  |  0  |  1  |  2  |

So an element's chunk, and with it the order in which a schedule adds up its contributions, depends
neither on the number of channels nor on their weights: a plan that moves work from one rail to
another gives the same result, bit for bit. Where channels differ in their number of chunks, the
buffer is cut into as many as divide all of them, and each channel cuts its part further.

Imports `errors` alone. Invariant: pieces cover the buffer without overlap and depend on nothing but
the arguments, so ranks that agree on count, weights and item size agree on every byte's place
without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from r2ccl.errors import InvalidArgument

#: First element, and the one behind the last.
Range: TypeAlias = tuple[int, int]

#: Boundaries within large buffers fall on multiples of this: a cache line on x86 and on most
#: Arm cores, so that two channels' kernels and DMA never share one.
ALIGNMENT_NBYTES = 64

#: Alignment moves a boundary by less than one granule; a piece of this many granules on average
#: loses less than 2 % of its share by it. Smaller buffers are cut at the exact element.
MIN_GRANULES = 64


def cut(count: int, weights: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Cut `count` elements into pieces in proportion to `weights`.

    Parameters
    ----------
    count : int
        Elements of the buffer, 0 or more.
    weights : sequence of int
        One weight a piece, 0 or more, not all 0. Integers, because ranks must round alike.
    itemsize : int
        Bytes of an element; inner boundaries of large buffers are multiples of 64 bytes.

    Returns
    -------
    tuple of int
        ``len(weights) + 1`` boundaries in elements: piece ``i`` is ``[b[i], b[i + 1])``.

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
            f"weights={tuple(weights)}: give one integer of 0 or more a piece, one above 0"
        )
    granule = ALIGNMENT_NBYTES // math.gcd(ALIGNMENT_NBYTES, itemsize)
    if count < MIN_GRANULES * granule * len(weights):
        granule = 1
    bounds = [count * share // total // granule * granule for share in accumulate(weights)]
    # The boundary behind the last positive weight is the end, whatever the granule.
    return (0, *(count if bound >= bounds[-1] else bound for bound in bounds))


def layout(
    count: int,
    nchunks: Sequence[int],
    weights: Sequence[int],
    itemsize: int = 1,
    nparts: int = 1,
) -> tuple[tuple[Range, ...], ...]:
    """Cut a buffer into chunks, and each chunk into what every channel gets of it.

    Parameters
    ----------
    count, itemsize : int
        Elements of the buffer, bytes of an element.
    nchunks, weights : sequence of int
        Chunks and share of each channel.
    nparts : int
        The buffer is of as many equal parts, and each of them is cut by itself.

    Returns
    -------
    tuple of tuple of Range
        For every channel its chunks.

    Raises
    ------
    InvalidArgument
        As `cut`, or not one weight a channel, or parts that divide neither the buffer nor every
        channel's chunks.
    """
    if len(weights) != len(nchunks):
        raise InvalidArgument(
            f"weights={tuple(weights)}: give {len(nchunks)} integers, one a channel"
        )
    common = math.gcd(*nchunks)
    if nparts < 1 or count % nparts or common % nparts:
        raise InvalidArgument(
            f"nparts={nparts}: give a number that divides {count} elements and {tuple(nchunks)} "
            "chunks"
        )
    size = count // nparts
    within = pairwise(cut(size, [1] * (common // nparts), itemsize))
    chunks = [(part * size + lo, hi - lo) for lo, hi in within for part in range(nparts)]
    shares = [(lo, cut(n, weights, itemsize)) for lo, n in sorted(chunks)]
    return tuple(
        tuple(
            piece
            for lo, bounds in shares
            for piece in _pieces(lo + bounds[channel], lo + bounds[channel + 1], of, itemsize)
        )
        for channel, of in enumerate(n // common for n in nchunks)
    )


def _pieces(lo: int, hi: int, number: int, itemsize: int) -> list[Range]:
    """Cut a range into equal pieces."""
    if number == 1:
        return [(lo, hi)]
    return [(lo + a, lo + b) for a, b in pairwise(cut(hi - lo, [1] * number, itemsize))]


__all__ = ["ALIGNMENT_NBYTES", "MIN_GRANULES", "Range", "cut", "layout"]
