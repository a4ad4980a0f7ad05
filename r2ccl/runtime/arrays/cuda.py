"""Flat views of arrays in CUDA memory, without copying them or waiting for the GPU.

The properties of a torch tensor are read from the tensor; the properties of other arrays are read
from ``__cuda_array_interface__`` or, if an array lacks it, from DLPack (by `cuda.core`). The result
is a `DeviceBuffer`, or an error that says why there is none. The CUDA driver is queried only for
the GPU of an address, if neither the array nor its library reports the GPU reliably.

Invariant: a `DeviceBuffer` is C-contiguous, aligned, in native byte order, in memory that a GPU can
address and of a supported element type, and keeps that memory alive.

References
----------
Numba, CUDA Array Interface, version 3; DLPack, dlpack.h 1.1 and the Python specification.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from r2ccl.device.base import Stream
from r2ccl.device.bindings import Cuda
from r2ccl.dtypes import DTYPES, EXTENSIONS, dtype_name, dtype_of
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.runtime import advice
from r2ccl.runtime.advice import cannot_view, type_name
from r2ccl.runtime.arrays.libraries import (
    Library,
    Torch,
    dlpack_device_type,
    is_device_array,
    library_of,
    torch_of,
)
from r2ccl.runtime.arrays.streams import LEGACY, producer_stream, stream_of

#: Element type numbers by NumPy's dtype name. torch and DLPack use the same names. The types of
#: ml_dtypes are included even if it is not installed. Pairs are supported in host memory only.
_CODES = {
    dtype_name(code): code
    for code in (*DTYPES, *EXTENSIONS)
    if code not in DTYPES or DTYPES[code].names is None
}
_NAMES = ", ".join(sorted(_CODES))
#: Supported versions of ``__cuda_array_interface__``; strides have another meaning in version 1.
_VERSIONS = (2, 3)
#: `DeviceBuffer.ordinal` of an array without memory whose library does not report its GPU.
ANY_GPU = -1
#: DLPack device type kDLCUDAManaged (dlpack.h).
_MANAGED = 13


class DeviceBuffer(msgspec.Struct, frozen=True, eq=False):
    """Flat view of one of the caller's arrays in GPU memory.

    Parameters
    ----------
    address : int
        Address of the first element; undefined if the buffer is empty.
    dtype_code : int
        Number of the element type in `r2ccl.dtypes`.
    count : int
        Number of elements.
    itemsize, nbytes : int
        Size of one element and of all elements, in bytes.
    ordinal : int
        Number of the GPU in this process, or `ANY_GPU`.
    stream : Stream
        Stream of this array for calls without a ``stream`` argument (see `streams_of`):
        `Library.stream` of the array when the view was made. For an array that has no `Library`:
        ``after``, or the legacy default stream if ``after`` is None.
    owner : object
        Object that the caller passed; the buffer keeps it alive.
    after : Stream or None
        Stream that every call on this array must be ordered with, whichever stream the call uses
        (see `streams_of`). None if there is no such stream. It is None for all CuPy, Numba and
        torch arrays: a caller that passes another stream than the library's current one must
        order the two streams, as with NCCL.
    view : object
        For an array read through DLPack, the object that keeps its memory alive.
    """

    address: int
    dtype_code: int
    count: int
    itemsize: int
    nbytes: int
    ordinal: int
    stream: Stream
    owner: Any
    after: Stream | None = None
    view: Any = None

    def part(self, first: int, count: int) -> DeviceBuffer:
        """Implement `r2ccl.runtime.arrays.buffers.Extent.part`."""
        return msgspec.structs.replace(
            self,
            address=self.address + first * self.itemsize,
            count=count,
            nbytes=count * self.itemsize,
        )

    def overlaps(self, other: DeviceBuffer) -> bool:
        """Implement `r2ccl.runtime.arrays.buffers.Extent.overlaps`."""
        return (
            min(self.nbytes, other.nbytes) > 0
            and self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )


def as_device_buffer(x: Any, *, writable: bool) -> DeviceBuffer:
    """View `x` as a `DeviceBuffer`, sharing its memory.

    Parameters
    ----------
    x : array_like in CUDA memory
        A torch, CuPy or Numba array, or an object with ``__cuda_array_interface__`` or DLPack, of
        any shape (0 dimensions and 0 elements are allowed). Borrowed for the lifetime of the
        returned buffer.
    writable : bool
        True if a result will be written to `x`.

    Raises
    ------
    InvalidArgument
        If `x` is not such an object, has an invalid ``__cuda_array_interface__``, or does not
        export its memory (it requires grad, is masked or sparse, or has a pending conjugation); if
        this memory is not C-contiguous, not aligned, byte-swapped or of an unsupported dtype; or,
        with `writable`, if it is read-only.
    TransportError
        If `x` supports DLPack only and `cuda.core` is not installed, or if only the CUDA driver
        can report the GPU of `x` and the query fails.

    Notes
    -----
    For an array that supports DLPack only, the legacy default stream waits for the work on the
    array that is in flight; ``stream`` and ``after`` are that stream. *Cost*: a few µs; 13 µs
    through DLPack.
    """
    given = _ask(x)
    code = _CODES.get(given.dtype)
    if code is None:
        raise _dtype_refusal(x, given)
    dtype = dtype_of(code)
    if (
        not _is_contiguous(given, dtype.itemsize)
        or given.address % dtype.alignment
        or (writable and given.is_read_only)
    ):
        raise _memory_refusal(x, given, dtype)
    count = math.prod(given.shape)
    return DeviceBuffer(
        address=given.address,
        dtype_code=code,
        count=count,
        itemsize=dtype.itemsize,
        nbytes=count * dtype.itemsize,
        ordinal=given.ordinal,
        stream=given.stream,
        owner=x,
        after=given.after,
        view=given.view,
    )


def streams_of(given: Any, *buffers: DeviceBuffer) -> tuple[Stream, tuple[Stream, ...]]:
    """Return the stream that a call runs on, and the other streams to order the call with.

    Parameters
    ----------
    given : object
        The caller's ``stream`` argument. None selects the stream of the first buffer.
    *buffers : DeviceBuffer
        All buffers that the call reads or writes.

    Returns
    -------
    stream : Stream
    others : tuple of Stream
        The call must run after the work enqueued on these streams before the call, and before the
        work enqueued on them later. If `given` is None, they are `DeviceBuffer.stream` of the other
        buffers. Otherwise they are only the streams that producers require every consumer to be
        ordered with: `DeviceBuffer.after` of all buffers.

    Raises
    ------
    InvalidArgument
        If `stream_of` refuses `given`.
    """
    stream = stream_of(given, buffers[0].stream)
    asked = [each.stream if given is None else each.after for each in buffers]
    others = dict.fromkeys(each for each in asked if each is not None and each != stream)
    return stream, tuple(others)


class _Given(msgspec.Struct, frozen=True):
    """Properties of an array as its library reports them.

    ``strides`` are in bytes; None means C-contiguous.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    is_read_only: bool
    ordinal: int
    stream: Stream
    after: Stream | None = None
    view: Any = None


def _ask(x: Any) -> _Given:
    if not is_device_array(x):
        raise InvalidArgument(
            f"{type_name(x)} is not an array in CUDA memory: pass input and output both in CUDA "
            "memory, or both in host memory"
        )
    library = library_of(x)
    if isinstance(library, Torch):
        return _ask_torch(x, torch_of(x), library)
    try:
        interface = getattr(x, "__cuda_array_interface__", None)
    except (RuntimeError, ValueError) as exc:  # the array is freed, or is on several GPUs, ...
        raise cannot_view(x, exc) from exc
    if interface is not None:
        return _read_interface(x, interface, library)
    return _ask_dlpack(x)


def _ask_torch(x: Any, torch: Any, library: Library) -> _Given:
    if x.layout is not torch.strided:
        raise cannot_view(x, f"its layout is {x.layout}; pass x.to_dense()")
    if x.requires_grad:
        raise cannot_view(x, "it requires grad")
    if x.is_conj() or x.is_neg():
        raise cannot_view(
            x, "its memory holds the conjugate or negative; pass x.resolve_conj().resolve_neg()"
        )
    strides = None
    if not x.is_contiguous():
        strides = tuple(each * x.element_size() for each in x.stride())
    return _Given(
        address=x.data_ptr(),
        dtype=str(x.dtype).removeprefix("torch."),
        shape=tuple(x.shape),
        strides=strides,
        is_read_only=False,
        ordinal=library.ordinal(x),
        stream=stream_of(library.stream(x), LEGACY),
    )


def _read_interface(x: Any, interface: Any, library: Library | None) -> _Given:
    try:
        address, is_read_only = interface["data"]
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        strides = None if strides is None else tuple(strides)
        dtype = _dtype_of_interface(x, interface["typestr"])
        version = interface["version"]
    except (KeyError, TypeError, ValueError) as exc:
        raise cannot_view(x, f"its __cuda_array_interface__ is broken ({exc!r})") from exc
    if version not in _VERSIONS:
        raise cannot_view(
            x, f"its __cuda_array_interface__ has version {version}; allowed are 2 and 3"
        )
    if interface.get("mask") is not None:
        raise InvalidArgument(
            "a masked array was given and its mask would be ignored: pass its data without the mask"
        )
    if not dtype.isnative:
        raise InvalidArgument(
            f"{type_name(x)} of dtype {dtype} is byte-swapped: pass it in the machine's byte order"
        )
    after = None if library else producer_stream(x, interface.get("stream"))
    return _Given(
        address=address,
        dtype=dtype.name,
        shape=shape,
        strides=strides,
        is_read_only=bool(is_read_only),
        ordinal=library.ordinal(x) if library else _ordinal(address),
        stream=stream_of(library.stream(x) if library else after, LEGACY),
        after=after,
    )


def _dtype_of_interface(x: Any, typestr: str) -> np.dtype[Any]:
    """Return ``x.dtype`` if its type string is `typestr`; otherwise NumPy's dtype of `typestr`."""
    own = getattr(x, "dtype", None)
    return own if isinstance(own, np.dtype) and own.str == typestr else np.dtype(typestr)


def _ask_dlpack(x: Any) -> _Given:
    """Read an array through DLPack.

    The producer makes the legacy default stream wait for the producer's work on the array.
    """
    try:
        from cuda.core.utils import StridedMemoryView  # the import takes 0.5 s; few arrays need it
    except ImportError as exc:
        raise TransportError(
            f"cuda.core cannot be imported ({exc}): pip install 'r2ccl[gpu]', or, with CUDA 12, "
            "'r2ccl[gpu12]'",
            status="NO_CUDA",
        ) from exc
    try:
        view = StridedMemoryView.from_dlpack(_NoCopy(x), LEGACY)
    except AssertionError as exc:
        raise cannot_view(x, "its __dlpack__ did not return an unused DLPack capsule") from exc
    except Exception as exc:  # any, of the library of the array
        raise cannot_view(x, exc) from exc
    try:
        dtype = view.dtype
    except (NotImplementedError, TypeError) as exc:
        raise cannot_view(x, f"{exc}; allowed are dtypes {_NAMES}") from exc
    strides = view.strides
    return _Given(
        address=view.ptr,
        dtype=dtype.name,
        shape=view.shape,
        strides=strides and tuple(each * dtype.itemsize for each in strides),
        is_read_only=view.readonly,
        # DLPack reports device 0 for managed memory, even if another GPU allocated it.
        ordinal=_ordinal(view.ptr) if dlpack_device_type(x) == _MANAGED else view.device_id,
        stream=LEGACY,
        after=LEGACY,
        view=view,
    )


class _NoCopy:
    """Wrapper of a DLPack producer that forbids a copy: a copy would not receive the result."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._producer.__dlpack_device__()
        return device

    def __dlpack__(self, **asked: Any) -> Any:
        # A producer that accepts max_version accepts copy too: both were added to the array API
        # standard in version 2023.12.
        copy = {"copy": False} if "max_version" in asked else {}
        return self._producer.__dlpack__(**asked, **copy)


def _ordinal(address: int) -> int:
    """Return the GPU of `address` as the driver reports it; `ANY_GPU` for a null address."""
    return int(Cuda().pointer_attribute("DEVICE_ORDINAL", address)) if address else ANY_GPU


def _is_contiguous(given: _Given, itemsize: int) -> bool:
    if given.strides is None or 0 in given.shape:
        return True
    if len(given.strides) != len(given.shape):
        return False
    expected = itemsize
    for extent, stride in zip(reversed(given.shape), reversed(given.strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _dtype_refusal(x: Any, given: _Given) -> InvalidArgument:
    what = f"{type_name(x)} of dtype {given.dtype}"
    return InvalidArgument(
        f"{what} was given: allowed are arrays in CUDA memory, C-contiguous, of dtype {_NAMES}"
    )


def _memory_refusal(x: Any, given: _Given, dtype: np.dtype[Any]) -> InvalidArgument:
    what = f"{type_name(x)} of dtype {given.dtype} and shape {given.shape}"
    if not _is_contiguous(given, dtype.itemsize):
        return InvalidArgument(
            f"{what} and strides {given.strides} is not C-contiguous: "
            f"pass {advice.contiguous(x)} (an output: read the result from there), or a view of "
            "whole leading rows"
        )
    if given.address % dtype.alignment:
        return InvalidArgument(
            f"{what} is not aligned to {dtype.alignment} bytes: pass a copy of it (an output: read "
            "the result from there)"
        )
    return InvalidArgument(
        f"{what} is read-only, but the result is written to it: pass a copy, and read the result "
        "from there"
    )


__all__ = ["ANY_GPU", "DeviceBuffer", "as_device_buffer", "is_device_array", "streams_of"]
