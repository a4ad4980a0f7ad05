"""Buffers: one flat view of whatever memory the caller hands over, without copying it.

NumPy arrays, objects with the buffer protocol, and host tensors with DLPack become a `Buffer`;
everything else is refused with what was given and what is allowed. Imports `dtypes` and `errors`
of the library; torch is used only where the caller has imported it.

Invariant: a `Buffer` is C-contiguous, aligned, in native byte order, in host memory, of an element
type with a number, and shares its memory with its owner.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec
import numpy as np

from r2ccl.dtypes import BFLOAT16_CODE, CODES, dtype_of, names
from r2ccl.errors import InvalidArgument

Array = np.ndarray[Any, np.dtype[Any]]

#: DLPack device types whose memory the processor can address: kDLCPU, kDLCUDAHost, kDLROCMHost
#: (dlpack.h).
_HOST_DEVICES = (1, 3, 11)

_ALLOWED = (
    "allowed are NumPy arrays, objects with the buffer protocol and host tensors with DLPack, "
    "C-contiguous, of dtype "
)


class Buffer(msgspec.Struct, frozen=True, eq=False):
    """A caller's memory as one flat array.

    Parameters
    ----------
    array : ndarray, shape (count,)
        View of the caller's memory in its own dtype; read-only if the caller's is.
    dtype_code : int
        Number from `r2ccl.dtypes`.
    count : int
        Number of elements.
    itemsize, nbytes : int
        Bytes of one element, and of all.
    owner : object
        What the caller passed; the buffer keeps it alive.
    """

    array: Array
    dtype_code: int
    count: int
    itemsize: int
    nbytes: int
    owner: Any


def as_buffer(x: Any, *, writable: bool) -> Buffer:
    """View `x` as a `Buffer`, sharing its memory.

    Parameters
    ----------
    x : array_like in host memory
        NumPy array of any number of dimensions (also none, also no elements); an object with the
        buffer protocol (``bytearray``, ``array.array``, ctypes arrays); a tensor with DLPack such
        as torch's. Borrowed for as long as the buffer lives.
    writable : bool
        Whether a result will be written to it.

    Raises
    ------
    InvalidArgument
        Not such an object, or its memory is on a device, not C-contiguous, not aligned,
        byte-swapped, of a dtype without a number, or read-only when `writable`.

    Notes
    -----
    *Cost*: under 1 µs for a NumPy array.
    """
    array = x if type(x) is np.ndarray else _host_array(x)
    dtype = array.dtype
    code = CODES.get(dtype)
    flags = array.flags
    if (
        code is None
        or not flags.c_contiguous
        or not flags.aligned
        or (writable and not flags.writeable)
    ):
        raise _refusal(x, array, writable)
    if array.ndim != 1:
        array = array.reshape(-1)
    return Buffer(array, code, array.size, dtype.itemsize, array.nbytes, x)


def as_buffers(x: Any, out: Any = None) -> tuple[Buffer, Buffer]:
    """View the input and the output of a collective; without `out`, `x` is both.

    Raises
    ------
    InvalidArgument
        As `as_buffer` and `is_in_place`.
    """
    source = as_buffer(x, writable=out is None)
    if out is None:
        return source, source
    output = as_buffer(out, writable=True)
    is_in_place(source, output)
    return source, output


def like(x: Any, times: int = 0) -> Any:
    """Allocate an output with the shape and dtype of `x`, C-contiguous and uninitialised.

    A torch tensor gives a torch tensor, everything else a NumPy array. With ``times`` it has that
    many of them: a dimension more, in front.

    Raises
    ------
    InvalidArgument
        `x` is nothing `as_buffer` could view.
    """
    shape = _shape(x)
    return _empty_like(x, (times, *shape) if times else shape)


def like_part(x: Any, nparts: int) -> Any:
    """Allocate an output for one of `nparts` equal parts of `x`; else as `like`.

    It has fewer rows than `x` if they can be shared out, and is flat if not.
    """
    shape = _shape(x)
    if shape and shape[0] % nparts == 0:
        return _empty_like(x, (shape[0] // nparts, *shape[1:]))
    return _empty_like(x, (math.prod(shape) // nparts,))


def part_of(whole: Buffer, part: int, nparts: int) -> Buffer:
    """View one of `nparts` equal parts of a buffer.

    Raises
    ------
    InvalidArgument
        It cannot be cut into equal parts.
    """
    if whole.count % nparts:
        raise InvalidArgument(
            f"{_what(whole)} cannot be shared out equally among {nparts} ranks: give a multiple"
        )
    count = whole.count // nparts
    view = whole.array[part * count : (part + 1) * count]
    return Buffer(view, whole.dtype_code, count, whole.itemsize, view.nbytes, whole.owner)


def is_in_place(source: Buffer, output: Buffer, whole: Buffer | None = None) -> bool:
    """Whether a collective from `source` to `output` works in place.

    ``whole`` is the buffer `output` is a part of; by default it is all of it.

    Returns
    -------
    bool
        True for the same memory, False for disjoint memory.

    Raises
    ------
    InvalidArgument
        Different dtype or count, or memory that overlaps in part.
    """
    if source.dtype_code != output.dtype_code or source.count != output.count:
        raise InvalidArgument(
            f"input has {_what(source)}, output {_what(output)}: both must be equal"
        )
    if source.array is output.array:
        return True
    # For contiguous memory the comparison of bounds is exact.
    if not np.may_share_memory(source.array, (whole or output).array):
        return False
    distance = _address(output.array) - _address(source.array)
    if distance == 0:
        return True
    raise InvalidArgument(
        f"input and output overlap in part (output starts {distance} bytes from input, both have "
        f"{source.nbytes} bytes): pass the same memory to work in place, or disjoint memory"
    )


def _host_array(x: Any) -> Array:
    """View anything that is not exactly an ndarray as one; refuse what cannot be viewed."""
    if isinstance(x, np.ma.MaskedArray):
        raise InvalidArgument(
            "a masked array was given and its mask would be ignored: pass x.filled(...) or x.data"
        )
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    try:
        return np.asarray(memoryview(x))
    except TypeError:  # no buffer protocol
        return _tensor_array(x)
    except (ValueError, BufferError) as exc:  # a format without a dtype, released memory
        raise InvalidArgument(f"{_type(x)} was given ({exc}): {_ALLOWED}{names()}") from exc


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if _torch_of(x) is not None else _host_array(x).shape


def _empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    torch = _torch_of(x)
    if torch is not None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    return np.empty(shape, _host_array(x).dtype)


def _tensor_array(x: Any) -> Array:
    """View a host tensor through DLPack."""
    if not hasattr(x, "__dlpack__"):
        if hasattr(x, "__cuda_array_interface__"):
            raise _on_device(x, "CUDA")
        raise InvalidArgument(f"{_type(x)} was given: {_ALLOWED}{names()}")
    device = int(x.__dlpack_device__()[0])
    if device not in _HOST_DEVICES:
        raise _on_device(x, f"DLPack device type {device}")
    torch = _torch_of(x)
    is_bfloat16 = torch is not None and x.dtype is torch.bfloat16
    try:
        # NumPy's DLPack reader has no bfloat16; the same bits as int16 pass.
        array = np.from_dlpack(x.view(torch.int16) if is_bfloat16 else x, copy=False)
    except (BufferError, RuntimeError) as exc:  # requires grad, sparse, conjugated, float8 ...
        raise InvalidArgument(f"{_type(x)} was given and cannot be viewed: {exc}") from exc
    return array.view(dtype_of(BFLOAT16_CODE)) if is_bfloat16 else array


def _torch_of(x: Any) -> Any:
    """Return the module torch if `x` is one of its tensors, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def _on_device(x: Any, where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{_type(x)} in device memory ({where}) was given: only host memory is supported; "
        "copy it to the host first"
    )


def _refusal(x: Any, array: Array, writable: bool) -> InvalidArgument:
    """Say why `array`, the view of `x`, cannot be a buffer."""
    given = f"{_type(x)} of dtype {array.dtype} and shape {array.shape}"
    if array.dtype.kind == "b":
        return InvalidArgument(f"{given}: pass x.view(np.uint8) with op=MAX (any) or MIN (all)")
    if not array.dtype.isnative:
        return InvalidArgument(f"{given} is byte-swapped: pass x.astype(x.dtype.newbyteorder('='))")
    if array.dtype not in CODES:
        return InvalidArgument(f"{given}: {_ALLOWED}{names()}")
    if not array.flags.c_contiguous:
        return InvalidArgument(
            f"{given} and strides {array.strides} is not C-contiguous: "
            "pass np.ascontiguousarray(x), or a view of whole leading rows"
        )
    if not array.flags.aligned:
        return InvalidArgument(
            f"{given} is not aligned to {array.dtype.alignment} bytes: pass a copy of it"
        )
    return InvalidArgument(f"{given} is read-only, but the result is written to it: pass a copy")


def _type(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _what(buffer: Buffer) -> str:
    return f"{buffer.count} elements of {buffer.array.dtype}"


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


__all__ = [
    "Array",
    "Buffer",
    "as_buffer",
    "as_buffers",
    "is_in_place",
    "like",
    "like_part",
    "part_of",
]
