"""Form of a pair of arrays, which compiled code checks before it runs or repeats a call."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.kernels.arrays import data_of

Array: TypeAlias = npt.NDArray[Any]

#: Flags of a NumPy array that a call checks: C-contiguous, aligned, writeable.
CHECKED_FLAGS = 0x1 | 0x100 | 0x400

#: Form of a pair of arrays, see `form_of`: number of words of each array, and indices of the two
#: words that follow.
ARRAY_NWORDS = 4
DISTANCE, IS_APART = 2 * ARRAY_NWORDS, 2 * ARRAY_NWORDS + 1


def form_of(source: Array, output: Array) -> npt.NDArray[np.int64]:
    """Return the *form* of two arrays: the properties that `r2ccl.shm.rounds.fits` compares.

    For each array, the form has the address of the dtype, the `CHECKED_FLAGS`, and the size in
    bytes of one element and of all elements. Two words follow: the distance in bytes from input to
    output, and 1 if the arrays do not overlap, else 0. The caller must keep the dtypes alive while
    it uses the form.
    """
    distance = data_of(output) - data_of(source)
    is_apart = distance >= source.nbytes or -distance >= output.nbytes
    words = [
        word
        for each in (source, output)
        for word in (id(each.dtype), each.flags.num & CHECKED_FLAGS, each.itemsize, each.nbytes)
    ]
    return np.array([*words, distance, is_apart], np.int64)


__all__ = ["ARRAY_NWORDS", "CHECKED_FLAGS", "DISTANCE", "IS_APART", "form_of"]
