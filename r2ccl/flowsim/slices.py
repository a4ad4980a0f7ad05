"""Division of a buffer into chunks, and of the chunks into slices.

The chunks are the same as in the executor, and so are the slices if `Sizes.slice_nbytes` is given.
Every chunk has at least one slice; an empty chunk has one empty slice, which is sent too. One rule
of the executor is not modeled: in a direct exchange, the executor does not divide small parts
among the channels (``whole_nbytes`` of `r2ccl.planning.lowering.lower`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from r2ccl.errors import InvalidArgument
from r2ccl.flowsim.loops.state import CHUNK_DTYPE, Records
from r2ccl.flowsim.program import Program
from r2ccl.schedule.chunks import consecutive, layout


class Sizes(NamedTuple):
    """Size of the buffer and of its slices.

    Parameters
    ----------
    nelements : int
        Number of elements of the buffer.
    itemsize : int
        Bytes of an element.
    slice_nbytes : int
        Maximum bytes of a slice, as in `r2ccl.planning.lowering.lower`; a slice has at least one
        element. 0 if `nslices` is given.
    nslices : int
        Maximum number of slices per chunk; 0 if `slice_nbytes` is given.
    counts : sequence of int
        Elements of each of the ``program.nparts`` parts of the buffer. Empty: equal parts.
    """

    nelements: int
    itemsize: int
    slice_nbytes: int
    nslices: int
    counts: Sequence[int] = ()


def cut_chunks(program: Program, sizes: Sizes, weights: Sequence[int]) -> Records:
    """Divide the buffer into chunks and slices.

    Parameters
    ----------
    program : Program
        Provides the number of parts and the number of chunks of each channel.
    sizes : Sizes
    weights : sequence of int
        Share of each channel in the buffer.

    Returns
    -------
    ndarray of CHUNK_DTYPE
        One record per chunk, channel by channel.

    Raises
    ------
    InvalidArgument
        If the number of weights is not the number of channels, a weight is negative or all are 0;
        if the number of parts does not divide the number of chunks of a channel or, without
        ``sizes.counts``, the number of elements; or if a chunk has more than 2**31 - 1 slices.
    """
    pieces = layout(
        sizes.nelements,
        program.nchunks,
        weights,
        sizes.itemsize,
        program.nparts,
        parts=consecutive(sizes.counts),
    )
    counts = np.array([hi - lo for channel in pieces for lo, hi in channel], np.int64)
    if sizes.nslices:
        lengths = np.maximum(1, -(-counts // sizes.nslices))
    else:
        lengths = np.full_like(counts, max(1, sizes.slice_nbytes // sizes.itemsize))
    nslices = np.maximum(1, -(-counts // lengths))
    if nslices.max() > np.iinfo(np.int32).max:
        raise InvalidArgument(
            f"{nslices.max()} slices per chunk; allowed are at most 2^31 - 1: give a larger "
            "slice_nbytes, or a smaller nslices"
        )
    chunks = np.empty(counts.size, CHUNK_DTYPE)
    chunks["nbytes"] = counts * sizes.itemsize
    chunks["slice_nbytes"] = lengths * sizes.itemsize
    chunks["nslices"] = nslices
    return chunks


__all__ = ["Sizes", "cut_chunks"]
