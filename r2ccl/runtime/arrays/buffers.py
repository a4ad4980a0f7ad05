"""Flat views of the caller's arrays in host memory.

NumPy arrays, objects with the buffer protocol, and host tensors with DLPack become a `Buffer`. For
any other object, the error says what is allowed or what to pass instead. The functions for parts,
overlaps and outputs also serve GPU memory, which `r2ccl.runtime.arrays.cuda` views.

Invariant: a `Buffer` is C-contiguous, aligned, in native byte order, in host memory and of a
supported element type. It shares memory with its owner, unless the owner is an input that is not
C-contiguous; then the buffer holds a copy.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Protocol, Self, TypeVar

import msgspec
import numpy as np

from r2ccl.dtypes import CODES, EXTENSIONS, dtype_name, dtype_of, names
from r2ccl.errors import InvalidArgument
from r2ccl.runtime import advice
from r2ccl.runtime.advice import cannot_view, type_name
from r2ccl.runtime.arrays.libraries import (
    dlpack_device_type,
    is_device_array,
    is_jax,
    jax_memory,
    library_of,
    torch_of,
)

Array = np.ndarray[Any, np.dtype[Any]]

#: DLPack device types whose memory the processor can address: kDLCPU, kDLCUDAHost, kDLROCMHost
#: (dlpack.h).
_HOST_DEVICES = (1, 3, 11)

#: Numbers of the types of ml_dtypes, by the names of torch's dtypes.
_TORCH_EXTENSIONS = {f"torch.{name}": code for code, name in EXTENSIONS.items()}

#: Maximum number of elements of an array; the largest elements have 16 bytes.
_MOST_ELEMENTS = (1 << 59) - 1

_ALLOWED = (
    "allowed are NumPy arrays, objects with the buffer protocol and host tensors with DLPack "
    "(C-contiguous if a result is written to them), of dtype "
)


class Extent(Protocol):
    """Common interface of buffers in host memory and in device memory."""

    @property
    def dtype_code(self) -> int:
        """Number of the element type in `r2ccl.dtypes`."""
        ...

    @property
    def count(self) -> int:
        """Number of elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of all elements, in bytes."""
        ...

    @property
    def address(self) -> int:
        """Address of the first element; undefined if the buffer is empty."""
        ...

    def part(self, first: int, count: int) -> Self:
        """Return a view of `count` elements, starting at element `first`."""
        ...

    def overlaps(self, other: Any) -> bool:
        """Return whether this buffer and `other`, of the same class, share a byte."""
        ...


AnyBuffer = TypeVar("AnyBuffer", bound=Extent)


class Buffer(msgspec.Struct, frozen=True, eq=False):
    """Flat view of one of the caller's arrays in host memory.

    Parameters
    ----------
    array : ndarray, shape (count,)
        View of the caller's memory, or a C-contiguous copy of an input. The dtype is the caller's
        or, for pairs, its `raw_dtype`. Read-only if the memory is read-only.
    dtype_code : int
        Number of the element type in `r2ccl.dtypes`.
    count : int
        Number of elements.
    itemsize, nbytes : int
        Size of one element and of all elements, in bytes.
    owner : object
        Object that the caller passed; the buffer keeps it alive.
    """

    array: Array
    dtype_code: int
    count: int
    itemsize: int
    nbytes: int
    owner: Any

    @property
    def address(self) -> int:
        """Address of the first element; undefined if the buffer is empty."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def data(self) -> memoryview:
        """Memory of the elements as bytes."""
        return memoryview(self.array.view(np.uint8))  # type: ignore[arg-type]

    def part(self, first: int, count: int) -> Buffer:
        """Implement `Extent.part`."""
        view = self.array[first : first + count]
        return Buffer(view, self.dtype_code, count, self.itemsize, view.nbytes, self.owner)

    def overlaps(self, other: Buffer) -> bool:
        """Implement `Extent.overlaps`."""
        # Comparing the bounds is exact, because both arrays are contiguous.
        return np.may_share_memory(self.array, other.array)


class JaxBuffer(Buffer, frozen=True, eq=False):
    """Flat view of an input that is a JAX array; a call without ``out`` returns a JAX array."""


def like(x: Any, times: int = 0) -> Any:
    """Allocate an output with the shape and dtype of `x`, C-contiguous and uninitialized.

    For a torch, CuPy or Numba array, the output is an array of the same library on the same device.
    For any other object in host memory, it is a NumPy array; if `x` is a JAX array, JAX can share
    the memory of this NumPy array. If `times` is not 0, the output has an additional first
    dimension of that size.

    Raises
    ------
    InvalidArgument
        If `x` is not a torch, CuPy or Numba array, and is in device memory or cannot be viewed.
    """
    shape = _shape(x)
    return _empty_like(x, (times, *shape) if times else shape)


def like_part(x: Any, nparts: int) -> Any:
    """Allocate an output for one of `nparts` equal parts of `x`; see `like` for its type.

    If `nparts` divides the number of rows of `x`, the output has ``1 / nparts`` of these rows.
    Otherwise the output is flat. `nparts` must divide the number of elements.

    Raises
    ------
    InvalidArgument
        As for `like`.
    """
    shape = _shape(x)
    if shape and shape[0] % nparts == 0:
        return _empty_like(x, (shape[0] // nparts, *shape[1:]))
    return _empty_like(x, (math.prod(shape) // nparts,))


def like_flat(x: Any, count: int) -> Any:
    """Allocate a flat output of `count` elements with the dtype of `x`; see `like` for its type.

    Raises
    ------
    InvalidArgument
        As for `like` and `require_possible`.
    """
    _shape(x)
    require_possible(count)
    return _empty_like(x, (count,))


def require_possible(count: int) -> None:
    """Check that an array of `count` elements, of any dtype, has less than 2^63 bytes.

    Raises
    ------
    InvalidArgument
        If it could have 2^63 bytes or more.
    """
    if count > _MOST_ELEMENTS:
        raise InvalidArgument(
            f"no array can have {count} elements: pass other counts and displacements, or another "
            "shape"
        )


def part_of(whole: AnyBuffer, part: int, nparts: int) -> AnyBuffer:
    """Return a view of part `part` (from 0) of a buffer that is cut into `nparts` equal parts.

    Raises
    ------
    InvalidArgument
        If `nparts` does not divide the number of elements.
    """
    if whole.count % nparts:
        raise InvalidArgument(
            f"{_what(whole)} cannot be divided equally among {nparts} ranks: pass a number of "
            "elements that is a multiple of the number of ranks"
        )
    count = whole.count // nparts
    return whole.part(part * count, count)


def is_in_place(
    source: AnyBuffer,
    output: AnyBuffer,
    *,
    whole_source: AnyBuffer | None = None,
    whole_output: AnyBuffer | None = None,
) -> bool:
    """Return whether a collective from `source` to `output` is in place.

    Parameters
    ----------
    source, output : Buffer or DeviceBuffer
    whole_source, whole_output : Buffer or DeviceBuffer, optional
        Buffers that contain `source` and `output` as parts. Default: `source` and `output`.

    Returns
    -------
    bool
        True if `source` and `output` are the same memory, False if the whole buffers are disjoint.

    Raises
    ------
    InvalidArgument
        If the dtypes or the numbers of elements differ, or the whole buffers overlap although
        `source` and `output` are not the same memory.
    """
    given = "the input" if whole_source is None else "this rank's part of the input"
    written = "the output" if whole_output is None else "this rank's part of the output"
    if source.dtype_code != output.dtype_code or source.count != output.count:
        raise InvalidArgument(
            f"{given} has {_what(source)}, {written} has {_what(output)}: both must have the same "
            "dtype and number of elements"
        )
    if source is output:
        return True
    if not (whole_source or source).overlaps(whole_output or output):
        return False
    distance = output.address - source.address
    if distance == 0:
        return True
    side = "after" if distance > 0 else "before"
    raise InvalidArgument(
        f"input and output overlap in part ({written} starts {abs(distance)} bytes {side} the "
        f"start of {given}, each has {source.nbytes} bytes): let these two be the same memory, to "
        "work in place, or pass disjoint arrays"
    )


def host_array(x: Any) -> Array:
    """Return an ndarray view of an object in host memory, without a copy.

    Raises
    ------
    InvalidArgument
        If `x` is a masked array, is in device memory, or does not export its memory.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise InvalidArgument(
            "a masked array was given and its mask would be ignored: pass x.filled(...) or x.data"
        )
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    if is_jax(x):  # its buffer protocol lacks the types of ml_dtypes
        return _tensor_array(x)
    with contextlib.suppress(TypeError):  # no buffer protocol
        return _exported_array(x)
    return _tensor_array(x)


def _exported_array(x: Any) -> Array:
    try:
        return np.asarray(memoryview(x))
    except (ValueError, BufferError) as exc:  # the format has no dtype, or the memory is released
        raise InvalidArgument(f"{type_name(x)} was given ({exc}): {_ALLOWED}{names()}") from exc


def _shape(x: Any) -> tuple[int, ...]:
    if library_of(x) is not None:
        return tuple(x.shape)
    if is_device_array(x):
        raise InvalidArgument(
            f"{type_name(x)} in CUDA memory was given without an output, which r2ccl allocates "
            "only for arrays of torch, CuPy and Numba: pass out=, a writable array in CUDA memory"
        )
    shape: tuple[int, ...] = host_array(x).shape
    return shape


def _empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    if type(x) is np.ndarray:
        return np.empty(shape, x.dtype)
    library = library_of(x)
    if library is not None:
        return library.empty(x, shape)
    dtype = host_array(x).dtype
    return jax_memory(shape, dtype) if is_jax(x) else np.empty(shape, dtype)


def _tensor_array(x: Any) -> Array:
    if not hasattr(x, "__dlpack__"):
        if hasattr(x, "__cuda_array_interface__"):
            raise _on_device(x, "CUDA")
        fix = advice.as_array(x)
        raise InvalidArgument(f"{type_name(x)} was given: {fix}{_ALLOWED}{names()}")
    device = dlpack_device_type(x)
    if device not in _HOST_DEVICES:
        raise _on_device(x, f"DLPack device type {device}")
    torch = torch_of(x)
    code = None if torch is None else _TORCH_EXTENSIONS.get(str(x.dtype))
    try:
        if is_jax(x):  # it shares the memory; NumPy's DLPack reader lacks types of ml_dtypes
            return np.asarray(x)
        if code is None:
            return np.from_dlpack(x, copy=False)
        # NumPy's DLPack reader lacks these types, so the tensor is viewed as integers.
        bits = torch.int16 if x.element_size() == 2 else torch.uint8
        return np.from_dlpack(x.view(bits), copy=False).view(dtype_of(code))
    except Exception as exc:  # any, of another library: it requires grad, is sparse, ...
        raise cannot_view(x, exc) from exc


def _on_device(x: Any, where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{type_name(x)} in device memory ({where}) was given: host memory is needed here; "
        f"copy it to the host with {advice.on_host(x)}, or, in a collective, pass input and output "
        "both in CUDA memory"
    )


def refusal(x: Any, array: Array) -> InvalidArgument:
    """Return the error that explains why `array`, the view of `x`, cannot be a buffer."""
    given = f"{type_name(x)} of dtype {array.dtype} and shape {array.shape}"
    if not array.dtype.isnative:
        return InvalidArgument(f"{given} is byte-swapped: pass x.astype(x.dtype.newbyteorder('='))")
    if array.dtype not in CODES:
        return InvalidArgument(f"{given}: {_ALLOWED}{names()}")
    if not array.flags.c_contiguous:
        return InvalidArgument(
            f"{given} and strides {array.strides} is not C-contiguous: the result is written to "
            f"it, so pass {advice.contiguous(x)} and read the result from there, or a view of "
            "whole leading rows"
        )
    if not array.flags.aligned:
        return InvalidArgument(
            f"{given} is not aligned to {array.dtype.alignment} bytes: pass a copy of it, such as "
            f"{advice.copy(x)}"
        )
    if is_jax(x):
        return InvalidArgument(
            f"{given} is immutable, as are all arrays of JAX, but the result is written to it: "
            "leave out `out`, and a collective returns a new array of JAX; or pass a NumPy array "
            "that receives the result, such as np.array(x)"
        )
    return InvalidArgument(
        f"{given} is read-only, but the result is written to it: pass a copy, such as "
        f"{advice.copy(x)}"
    )


def _what(extent: Extent) -> str:
    return f"{extent.count} elements of {dtype_name(extent.dtype_code)}"


__all__ = [
    "Array",
    "Buffer",
    "Extent",
    "JaxBuffer",
    "host_array",
    "is_in_place",
    "like",
    "like_flat",
    "like_part",
    "part_of",
    "refusal",
    "require_possible",
]
