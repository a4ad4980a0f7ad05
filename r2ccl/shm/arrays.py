"""Layout of NumPy's array objects, for compiled code that reads them.

Compiled code reads a property of an array in 1 ns; Python takes 50 to 800 ns. ``PyArrayObject``
begins with the object header; the fields below follow it (ndarraytypes.h). The layout is part of
NumPy's ABI.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InternalError

Array: TypeAlias = npt.NDArray[Any]

#: Offset of the pointer to the data in an array object.
DATA = object.__basicsize__
#: Offsets from there to the number of dimensions (int), the pointer to their sizes, the pointer to
#: the dtype, and the flags (int).
NDIM, SIZES, DTYPE, FLAGS = 8, 16, 40, 48

#: Flags that a call checks: C-contiguous, aligned, writeable.
CHECKED_FLAGS = 0x1 | 0x100 | 0x400

#: Form of a pair of arrays: words of each array, and of both; see `form_of`.
ARRAY_NWORDS = 4
DISTANCE, IS_APART = 2 * ARRAY_NWORDS, 2 * ARRAY_NWORDS + 1

_word_at = ctypes.c_int64.from_address
_int_at = ctypes.c_int32.from_address


def form_of(source: Array, output: Array) -> npt.NDArray[np.int64]:
    """Return the *form* of two arrays: the properties that `r2ccl.shm.rounds.fits` compares.

    For each array these are the address of the dtype, the flags, the size in bytes of one element
    and of all elements. Two words follow: the distance in bytes from input to output, and 1 if the
    arrays do not overlap, else 0. The caller must keep the dtypes alive while it uses the form.
    """
    distance = _data_of(output) - _data_of(source)
    is_apart = distance >= source.nbytes or -distance >= output.nbytes
    words = [
        word
        for each in (source, output)
        for word in (id(each.dtype), each.flags.num & CHECKED_FLAGS, each.itemsize, each.nbytes)
    ]
    return np.array([*words, distance, is_apart], np.int64)


def _data_of(array: Array) -> int:
    return _word_at(id(array) + DATA).value


def _check_layout() -> None:
    probe = np.empty((2, 3), np.int16)
    at = id(probe) + DATA
    sizes = _word_at(at + SIZES).value
    found = (
        _word_at(at).value, _int_at(at + NDIM).value, _word_at(sizes).value,
        _word_at(sizes + 8).value, _word_at(at + DTYPE).value, _int_at(at + FLAGS).value,
    )  # fmt: skip
    if found != (probe.ctypes.data, 2, 2, 3, id(probe.dtype), probe.flags.num):
        raise InternalError(
            "NumPy's arrays do not have the layout that its ABI specifies; report it with the "
            "versions of NumPy and Python"
        )


_check_layout()

__all__ = [
    "ARRAY_NWORDS",
    "CHECKED_FLAGS",
    "DATA",
    "DISTANCE",
    "DTYPE",
    "FLAGS",
    "IS_APART",
    "NDIM",
    "SIZES",
    "form_of",
]
