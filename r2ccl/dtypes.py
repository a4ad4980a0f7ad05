"""Element types and their numbers on the wire.

Types that NCCL has use NCCL's number (``ncclDataType_t`` in nccl.h: 10 and 11 are its 8-bit
floats); types that NCCL lacks start at 16. Numbers are part of the wire protocol: they are below
64, never change and are never reused for another type. ``longdouble`` has none, because its layout
differs between machines; ``bool`` has none, because its sum is not a bool.

Every type here has the byte order of the machine. bfloat16 is available if ml_dtypes is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r2ccl.errors import InvalidArgument

try:
    import ml_dtypes
except ImportError:  # then no array of this process can be bfloat16
    _BFLOAT16: np.dtype[Any] | None = None
else:
    _BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: Number of bfloat16; `DTYPES` has it only where ml_dtypes is installed.
BFLOAT16_CODE = 9

_NUMBERED: dict[int, np.dtype[Any] | None] = {
    0: np.dtype(np.int8),
    1: np.dtype(np.uint8),
    2: np.dtype(np.int32),
    3: np.dtype(np.uint32),
    4: np.dtype(np.int64),
    5: np.dtype(np.uint64),
    6: np.dtype(np.float16),
    7: np.dtype(np.float32),
    8: np.dtype(np.float64),
    BFLOAT16_CODE: _BFLOAT16,
    16: np.dtype(np.int16),
    17: np.dtype(np.uint16),
    18: np.dtype(np.complex64),
    19: np.dtype(np.complex128),
}

#: Number to NumPy dtype.
DTYPES: dict[int, np.dtype[Any]] = {
    code: dtype for code, dtype in _NUMBERED.items() if dtype is not None
}

#: NumPy dtype to number. Byte-swapped dtypes are different keys and are not found.
CODES: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPES.items()}


def dtype_of(code: int) -> np.dtype[Any]:
    """Return the NumPy dtype with number `code`.

    Raises
    ------
    InvalidArgument
        If no type has this number, or the type is bfloat16 and ml_dtypes is not installed.
    """
    dtype = DTYPES.get(code)
    if dtype is not None:
        return dtype
    if code == BFLOAT16_CODE:
        raise InvalidArgument("bfloat16 needs the package ml_dtypes; install it and try again")
    raise InvalidArgument(f"dtype number {code!r}: allowed are {sorted(DTYPES)} ({names()})")


def dtype_name(code: int) -> str:
    """Return the name of dtype `code` for messages, or ``number N`` if this process lacks it."""
    if code == BFLOAT16_CODE:
        return "bfloat16"
    dtype = DTYPES.get(code)
    return f"number {code}" if dtype is None else dtype.name


def names() -> str:
    """Return the names of all element types, sorted and comma separated, for messages."""
    return ", ".join(sorted(dtype.name for dtype in CODES))


__all__ = ["BFLOAT16_CODE", "CODES", "DTYPES", "dtype_name", "dtype_of", "names"]
