"""Element types and their numbers on the wire.

Types that NCCL has use NCCL's number (``ncclDataType_t`` in nccl.h); types that NCCL lacks start at
16. Numbers are part of the wire protocol: they are below 64, never change and are never reused for
another type. ``longdouble`` has no number, because its layout differs between machines.

Every type here has the byte order of the machine. bfloat16 and the 8-bit floats are available if
ml_dtypes is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r2ccl.errors import InvalidArgument

try:
    import ml_dtypes
except ImportError:  # then no array of this process can have these types
    ml_dtypes = None

#: Number of bfloat16; `DTYPES` has it only where ml_dtypes is installed.
BFLOAT16_CODE = 9
#: Numbers and names of the types of ml_dtypes; `DTYPES` has them only where it is installed.
EXTENSIONS = {BFLOAT16_CODE: "bfloat16", 10: "float8_e4m3fn", 11: "float8_e5m2"}


def _pair(value: type[np.generic]) -> np.dtype[Any]:
    return np.dtype([("value", value), ("index", np.int32)], align=True)


#: Pairs of a value and an index, by number, with the layout of the C structs of MPI's pair types:
#: MPI_FLOAT_INT, MPI_DOUBLE_INT, MPI_2INT and MPI_LONG_INT.
_PAIRS = {21: _pair(np.float32), 22: _pair(np.float64), 23: _pair(np.int32), 24: _pair(np.int64)}
_PAIRED = "allowed are float32, float64, int32 and int64"

#: Number to NumPy dtype.
DTYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype(np.int8),
    1: np.dtype(np.uint8),
    2: np.dtype(np.int32),
    3: np.dtype(np.uint32),
    4: np.dtype(np.int64),
    5: np.dtype(np.uint64),
    6: np.dtype(np.float16),
    7: np.dtype(np.float32),
    8: np.dtype(np.float64),
    **{code: np.dtype(getattr(ml_dtypes, name)) for code, name in EXTENSIONS.items() if ml_dtypes},
    16: np.dtype(np.int16),
    17: np.dtype(np.uint16),
    18: np.dtype(np.complex64),
    19: np.dtype(np.complex128),
    20: np.dtype(np.bool_),
    **_PAIRS,
}

#: NumPy dtype to number. Byte-swapped dtypes are different keys and are not found.
CODES: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPES.items()}


def pair_dtype(value: Any) -> np.dtype[Any]:
    """Return the structured dtype of a value and its index, for MINLOC and MAXLOC.

    Parameters
    ----------
    value : dtype_like
        Type of the values: float32, float64, int32 or int64.

    Returns
    -------
    dtype
        Fields ``"value"`` and ``"index"`` (int32), in the layout of the C struct of MPI's pair
        type, such as MPI_FLOAT_INT. An array of another structured dtype with this layout is
        converted by ``.view(pair_dtype(...))``.

    Raises
    ------
    InvalidArgument
        If `value` is not one of these types.
    """
    try:
        wanted = np.dtype("V" if value is None else value)  # NumPy takes None for float64
    except (TypeError, ValueError, SyntaxError) as exc:  # NumPy parses texts such as "(2,)f4"
        raise InvalidArgument(f"pair_dtype({value!r}): {_PAIRED}") from exc
    for dtype in _PAIRS.values():
        if dtype["value"] == wanted:
            return dtype
    raise InvalidArgument(f"pair_dtype({wanted}): {_PAIRED}; convert the values")


def raw_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return an opaque dtype (``np.void``) of the size of `dtype`.

    NumPy copies only the fields of a structured element, not the bytes between them. If the array
    is viewed with the raw dtype, NumPy copies all bytes.
    """
    return np.dtype((np.void, dtype.itemsize))


def dtype_of(code: int) -> np.dtype[Any]:
    """Return the NumPy dtype with number `code`.

    Raises
    ------
    InvalidArgument
        If no type has this number, or the type is one of ml_dtypes, which is not installed.
    """
    dtype = DTYPES.get(code)
    if dtype is not None:
        return dtype
    if code in EXTENSIONS:
        raise InvalidArgument(
            f"{EXTENSIONS[code]} needs the package ml_dtypes; install it and try again"
        )
    raise InvalidArgument(f"dtype number {code!r}: allowed are {sorted(DTYPES)} ({names()})")


def dtype_name(code: int) -> str:
    """Return the name of dtype `code` for messages, or ``number N`` if no type has it.

    A pair is named after its value, for example ``float32_index``.
    """
    if code in EXTENSIONS:
        return EXTENSIONS[code]
    dtype = DTYPES.get(code)
    if dtype is None:
        return f"number {code}"
    return dtype.name if dtype.names is None else f"{dtype['value'].name}_index"


def names() -> str:
    """Return the names of the types in `DTYPES`, sorted and comma separated, for messages."""
    return ", ".join(sorted(map(dtype_name, DTYPES)))


__all__ = [
    "BFLOAT16_CODE",
    "CODES",
    "DTYPES",
    "EXTENSIONS",
    "dtype_name",
    "dtype_of",
    "names",
    "pair_dtype",
    "raw_dtype",
]
