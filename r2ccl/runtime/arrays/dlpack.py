"""DLPack capsules, read with ctypes: where an array of any library is and what it looks like.

The array is borrowed, as `numpy.from_dlpack` and others borrow it, but the capsule is not consumed:
it keeps its name and is held as long as the array is used, so that when it is let go its own
destructor calls the producer's deleter. (A consumer that takes the array out of the capsule renames
it to ``used_dltensor`` and calls the deleter itself.)

Must not import the driver. Invariant: nothing is read from the array itself, and nothing from the
capsule after `view` has returned.

References
----------
DLPack, dlpack.h 1.1 and the Python specification; Python array API standard, ``array.__dlpack__``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec

from r2ccl.device.base import Stream
from r2ccl.runtime.arrays.buffers import cannot_view

#: kDLCUDAManaged (dlpack.h).
MANAGED = 13

#: The newest version whose layout is known. A consumer asks for one, and gets any.
_MAX_VERSION = (1, 1)
#: DLPACK_FLAG_BITMASK_READ_ONLY, DLPACK_FLAG_BITMASK_IS_COPIED.
_READ_ONLY = 1
_COPIED = 2

#: DLDataTypeCode of the types whose name has the number of bits: kDLInt, kDLUInt, kDLFloat,
#: kDLBfloat, kDLComplex.
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL = 6

_NAMES = (b"dltensor_versioned", b"dltensor")


class Tensor(msgspec.Struct, frozen=True):
    """What a capsule says.

    Parameters
    ----------
    address : int
        Of the first element, with the offset; 0 for no elements.
    device : tuple of int
        DLPack device type and number.
    dtype : str
        NumPy's name, also for types NumPy lacks.
    shape : tuple of int
    strides : tuple of int or None
        In bytes; None: C-contiguous.
    is_read_only : bool
    capsule : PyCapsule
        Hold it for as long as the address is used.
    """

    address: int
    device: tuple[int, int]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    is_read_only: bool
    capsule: Any


def view(x: Any, stream: Stream | None) -> Tensor:
    """Ask an array for its memory.

    Parameters
    ----------
    x : object
        Has ``__dlpack__``.
    stream : Stream or None
        Told to the producer, which has it wait for the work it has under way on the array; None
        for memory that no stream works on.

    Raises
    ------
    InvalidArgument
        The producer refused, made a copy (which would not get a result), or gave a capsule of a
        layout that is not known.
    """
    try:
        try:
            capsule = x.__dlpack__(stream=stream, max_version=_MAX_VERSION, copy=False)
        except TypeError:  # before the standard of 2023 there were no versions
            capsule = x.__dlpack__(stream=stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as exc:
        raise cannot_view(x, exc) from exc
    return _read(x, capsule)


def _read(x: Any, capsule: Any) -> Tensor:
    name = next((each for each in _NAMES if _is_valid(capsule, each)), None)
    if name is None:
        raise cannot_view(x, f"__dlpack__ gave {capsule!r}, no capsule of a tensor")
    address = _pointer(capsule, name)
    if name == b"dltensor":
        return _tensor(_Managed.from_address(address).tensor, 0, capsule)
    version = _Version.from_address(address)
    if version.major != _MAX_VERSION[0]:  # all but the version may lie elsewhere
        raise cannot_view(
            x, f"it speaks DLPack {version.major}.{version.minor}; allowed is version 1"
        )
    versioned = _ManagedVersioned.from_address(address)
    if versioned.flags & _COPIED:
        raise cannot_view(x, "its DLPack export is a copy, which would not get a result")
    return _tensor(versioned.tensor, versioned.flags, capsule)


def _tensor(tensor: _Tensor, flags: int, capsule: Any) -> Tensor:
    ndim, dtype = tensor.ndim, tensor.dtype
    strides = None
    if tensor.strides:
        # There in elements; of types narrower than a byte, which no buffer has, this is nonsense.
        itemsize = dtype.bits * dtype.lanes // 8
        strides = tuple(each * itemsize for each in tensor.strides[:ndim])
    return Tensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        device=(tensor.device.kind, tensor.device.number),
        dtype=_name(dtype),
        shape=tuple(tensor.shape[:ndim]) if ndim else (),
        strides=strides,
        is_read_only=bool(flags & _READ_ONLY),
        capsule=capsule,
    )


def _name(dtype: _DataType) -> str:
    if dtype.lanes == 1 and dtype.code in _KINDS:
        return f"{_KINDS[dtype.code]}{dtype.bits}"
    if dtype.lanes == 1 and dtype.code == _BOOL:
        return "bool"
    return f"DLPack {dtype.code} ({dtype.bits} bits, {dtype.lanes} lanes)"


class _Version(ctypes.Structure):
    """DLPackVersion."""

    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class _Device(ctypes.Structure):
    """DLDevice."""

    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _DataType(ctypes.Structure):
    """DLDataType."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor, of capsules named ``dltensor``."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned, of capsules named ``dltensor_versioned``."""

    _fields_ = (
        ("version", _Version),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Prototypes of our own: those at ctypes.pythonapi are shared with every other user in the process.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

__all__ = ["MANAGED", "Tensor", "view"]
