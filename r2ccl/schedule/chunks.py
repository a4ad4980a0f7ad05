"""Division of a buffer into chunks, and of chunks into the pieces of channels.

A buffer is divided into chunks first, then each chunk among the channels::

    chunk       |        0        |        1        |        2        |
    channel     |  0  |  1  |  2  |  0  |  1  |  2  |  0  |  1  |  2  |

If all channels have the same number of chunks, the chunk of an element does not depend on the
number of channels or on their weights. If all channels also have the same ops, the order in which
the contributions to an element are reduced does not depend on them either. A plan that moves work
from one rail to another then gives a bit-identical result. If the channels have different numbers
of chunks, the buffer is divided into g chunks, where g is the greatest common divisor of these
numbers, and each channel divides its piece of a chunk further.

The pieces cover the buffer without overlap. They are computed with integers from the arguments
only, so ranks with equal arguments get the same layout without communication.

A buffer may consist of parts (`Parts`), which can differ in size and lie anywhere in memory. The
division of a part depends neither on other parts nor on the address of the part, so the sender and
the receiver of a part divide it in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import msgspec

from r2ccl.errors import InvalidArgument

#: Range of elements: first, end (exclusive).
Range: TypeAlias = tuple[int, int]

#: Alignment of inner boundaries in large buffers: the cache line of x86 and most Arm cores, so that
#: kernels and DMA of two channels share no cache line if the buffer is aligned.
ALIGNMENT_NBYTES = 64

#: Minimum average size of a piece, in granules, at which boundaries are aligned. A granule is the
#: fewest elements whose bytes are a multiple of `ALIGNMENT_NBYTES`. Alignment moves a boundary by
#: less than one granule, which is less than 2 % of such a piece. Smaller buffers are divided at the
#: exact element.
MIN_GRANULES = 64


class Parts(msgspec.Struct, frozen=True):
    """Positions of the parts of a call in the input and output of one rank.

    Attributes
    ----------
    inputs, outputs : tuple of Range
        Range of elements of each part in the input, and in the output. The range is empty for a
        part that the rank's input or output does not have. Part k belongs to rank k, except in an
        alltoall: the input part k of rank r goes to rank ``r + k``, and the output part k of rank r
        comes from rank ``r - k``, both modulo the number of ranks.
    """

    inputs: tuple[Range, ...]
    outputs: tuple[Range, ...]


def consecutive(counts: Sequence[int]) -> tuple[Range, ...]:
    """Return the ranges of parts without gaps between them; part k has ``counts[k]`` elements."""
    return tuple(pairwise(accumulate(counts, initial=0)))


def cut(count: int, weights: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Divide `count` elements into pieces in proportion to `weights`.

    Parameters
    ----------
    count : int
        Number of elements, 0 or more.
    weights : sequence of int
        One weight per piece, 0 or more, not all 0. Weights are integers so that all ranks round
        alike.
    itemsize : int
        Bytes of an element. Inner boundaries of large buffers are multiples of 64 bytes.

    Returns
    -------
    tuple of int
        ``len(weights) + 1`` boundaries in elements: piece ``i`` is ``[b[i], b[i + 1])``.

    Raises
    ------
    InvalidArgument
        If `count` or a weight is negative, no weight is positive, or `itemsize` is below 1.
    """
    if count < 0 or itemsize < 1:
        raise InvalidArgument(
            f"count={count}, itemsize={itemsize}: give a count of 0 or more and an itemsize above 0"
        )
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise InvalidArgument(
            f"weights={tuple(weights)}: give one integer per piece, none below 0, not all 0"
        )
    granule = ALIGNMENT_NBYTES // math.gcd(ALIGNMENT_NBYTES, itemsize)
    if count < MIN_GRANULES * granule * len(weights):
        granule = 1
    bounds = [count * share // total // granule * granule for share in accumulate(weights)]
    # The end of the last piece with a positive weight is `count`, not rounded to a granule.
    return (0, *(count if bound >= bounds[-1] else bound for bound in bounds))


def layout(
    count: int,
    nchunks: Sequence[int],
    weights: Sequence[int],
    itemsize: int = 1,
    nparts: int = 1,
    *,
    parts: Sequence[Range] = (),
    whole: int = 0,
) -> tuple[tuple[Range, ...], ...]:
    """Divide a buffer into chunks, and each chunk among the channels.

    Parameters
    ----------
    count, itemsize : int
        Number of elements of the buffer (ignored if `parts` is given), and bytes of an element.
    nchunks, weights : sequence of int
        Number of chunks and share of each channel.
    nparts : int
        Number of parts of the buffer; no chunk straddles two parts.
    parts : sequence of Range, optional
        Elements of each part. Default: equal parts that follow one another.
    whole : int
        A part of at most this many elements is not divided among the channels: the first channel
        gets all of it.

    Returns
    -------
    tuple of tuple of Range
        ``layout[c][i]`` is the range of elements of chunk ``i`` of channel ``c``.

    Raises
    ------
    InvalidArgument
        As for `cut`. Also if the number of weights is not the number of channels, if `nparts` does
        not divide the number of chunks of every channel, if `parts` is given and does not have
        `nparts` ranges, or if `parts` is not given and `nparts` does not divide `count`.
    """
    if len(weights) != len(nchunks):
        raise InvalidArgument(
            f"weights={tuple(weights)}: give {len(nchunks)} integers, one per channel"
        )
    common = math.gcd(*nchunks)
    if nparts < 1 or common % nparts or (len(parts) != nparts if parts else count % nparts):
        fits = f"be {len(parts)}, the number of parts" if parts else f"divide {count} elements"
        raise InvalidArgument(
            f"nparts={nparts}: it must be 1 or more, divide the number of chunks of every channel "
            f"{tuple(nchunks)}, and {fits}"
        )
    parts = parts or consecutive([count // nparts] * nparts)
    alone = [1] + [0] * (len(nchunks) - 1)
    shares = [
        (at + lo, cut(hi - lo, alone if end - at <= whole else weights, itemsize))
        for at, end in parts
        for lo, hi in pairwise(cut(end - at, [1] * (common // nparts), itemsize))
    ]
    return tuple(
        tuple(
            piece
            for lo, bounds in shares
            for piece in _pieces(lo + bounds[channel], lo + bounds[channel + 1], of, itemsize)
        )
        for channel, of in enumerate(n // common for n in nchunks)
    )


def _pieces(lo: int, hi: int, number: int, itemsize: int) -> list[Range]:
    if number == 1:
        return [(lo, hi)]
    return [(lo + a, lo + b) for a, b in pairwise(cut(hi - lo, [1] * number, itemsize))]


__all__ = ["ALIGNMENT_NBYTES", "MIN_GRANULES", "Parts", "Range", "consecutive", "cut", "layout"]
