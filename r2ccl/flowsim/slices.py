"""How a buffer is cut in chunks and slices: as the executor cuts it.

Imports `schedule` and NumPy. Invariant: a chunk has at least one slice; an empty one travels too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from r2ccl.errors import InvalidArgument
from r2ccl.flowsim.loops.state import CHUNK_DTYPE, Records
from r2ccl.flowsim.program import Program
from r2ccl.schedule.chunks import layout


class Sizes(NamedTuple):
    """How much there is to move.

    Parameters
    ----------
    nelements, itemsize : int
        Elements of the buffer, bytes of an element.
    slice_nbytes, nslices : int
        Bytes of a slice, as `r2ccl.planning.lowering.lower` cuts them, or slices of a chunk; the
        other is 0.
    """

    nelements: int
    itemsize: int
    slice_nbytes: int
    nslices: int


def cut_chunks(program: Program, sizes: Sizes, weights: Sequence[int]) -> Records:
    """Cut the buffer, a record of CHUNK_DTYPE a chunk, one channel behind the other.

    Raises
    ------
    InvalidArgument
        Weights that are not one a channel, parts that do not divide the buffer, or more slices
        than can be counted.
    """
    pieces = layout(sizes.nelements, program.nchunks, weights, sizes.itemsize, program.nparts)
    counts = np.array([hi - lo for channel in pieces for lo, hi in channel], np.int64)
    if sizes.nslices:
        lengths = np.maximum(1, -(-counts // sizes.nslices))
    else:
        lengths = np.full_like(counts, max(1, sizes.slice_nbytes // sizes.itemsize))
    nslices = np.maximum(1, -(-counts // lengths))
    if nslices.max() > np.iinfo(np.int32).max:
        raise InvalidArgument(
            f"{nslices.max()} slices a chunk; give a larger slice_nbytes, or a smaller nslices"
        )
    chunks = np.empty(counts.size, CHUNK_DTYPE)
    chunks["nbytes"] = counts * sizes.itemsize
    chunks["slice_nbytes"] = lengths * sizes.itemsize
    chunks["nslices"] = nslices
    return chunks


__all__ = ["Sizes", "cut_chunks"]
