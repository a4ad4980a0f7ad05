"""Views of arrays in CUDA memory, without copying them or waiting for the GPU.

torch tensors are read directly, others through ``__cuda_array_interface__``, else through DLPack
(`cuda.core`). The result is a `DeviceBuffer`, or an error that says what was given and what is
allowed.

Imports no array library, and asks the driver only which GPU an address is on, where nothing else
tells. Invariant: a `DeviceBuffer` is C-contiguous, aligned, in native byte order, in memory a GPU
addresses, of an element type with a number, and keeps that memory alive.

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
from r2ccl.dtypes import BFLOAT16_CODE, DTYPES, dtype_name, dtype_of, names
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.runtime.arrays.buffers import cannot_view, type_name
from r2ccl.runtime.arrays.libraries import Library, Torch, is_device_array, library_of, torch_of
from r2ccl.runtime.arrays.streams import LEGACY, producer_stream, stream_of

#: NumPy's names, which torch and DLPack share, to numbers; bfloat16 also without ml_dtypes.
_CODES = {dtype_name(code): code for code in (*DTYPES, BFLOAT16_CODE)}
#: Versions of ``__cuda_array_interface__``: before 2 strides meant something else.
_VERSIONS = (2, 3)
#: DLPack's kDLCUDAManaged.
_MANAGED = 13


class DeviceBuffer(msgspec.Struct, frozen=True, eq=False):
    """A caller's memory on a GPU as one flat array.

    Parameters
    ----------
    address : int
        Of its first element; any number where there is none.
    dtype_code : int
        Number from `r2ccl.dtypes`.
    count : int
        Number of elements.
    itemsize, nbytes : int
        Bytes of one element, and of all.
    ordinal : int
        Number of the GPU in this process.
    stream : Stream
        What its library worked on at the time, in that thread: where a call goes that names none.
    owner : object
        What the caller passed; the buffer keeps it alive.
    after : Stream or None
        A stream to order a call with wherever it goes (see `streams_of`). Arrays of CuPy, Numba
        and torch have none: whoever names another stream than theirs orders the two, as with NCCL.
    view : object
        What keeps memory alive that came through DLPack.
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
        """See `r2ccl.runtime.arrays.buffers.Extent`."""
        return msgspec.structs.replace(
            self,
            address=self.address + first * self.itemsize,
            count=count,
            nbytes=count * self.itemsize,
        )

    def overlaps(self, other: DeviceBuffer) -> bool:
        """See `r2ccl.runtime.arrays.buffers.Extent`."""
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
        Array of torch, CuPy or Numba, or an object with ``__cuda_array_interface__`` or DLPack, of
        any number of dimensions (also none, also no elements). Borrowed for as long as the buffer
        lives.
    writable : bool
        Whether a result will be written to it.

    Raises
    ------
    InvalidArgument
        Not such an object, or one that does not give its memory (it requires grad, is masked,
        sparse, a conjugate not worked out), or memory that is not C-contiguous, not aligned,
        byte-swapped, of a dtype without a number, or read-only when `writable`.
    TransportError
        Only the driver knows on which GPU it is, and cannot be asked.

    Notes
    -----
    An array that only speaks DLPack has the legacy default stream wait for the work on it under
    way: ``stream`` and ``after`` are that one. *Cost*: a few µs, 13 through DLPack.
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
    """Return the stream a call goes to, and the other streams it must be ordered with.

    Parameters
    ----------
    given : object
        As callers pass it; None stands for the stream of the first buffer.
    *buffers : DeviceBuffer
        All the call reads and writes.

    Returns
    -------
    stream : Stream
    others : tuple of Stream
        The call comes after what these were given before it, and before what they are given later.
        Without a stream in the call, those the other buffers' libraries work on; with one, only
        those of producers that ask it of every consumer.

    Raises
    ------
    InvalidArgument
        As `stream_of`.
    """
    stream = stream_of(given, buffers[0].stream)
    asked = [each.stream if given is None else each.after for each in buffers]
    others = dict.fromkeys(each for each in asked if each is not None and each != stream)
    return stream, tuple(others)


class _Given(msgspec.Struct, frozen=True):
    """Description of an array by its owner; strides in bytes, None: C-contiguous."""

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
            f"{type_name(x)} is not an array in CUDA memory: pass input and output both there, or "
            "both in host memory"
        )
    library = library_of(x)
    if isinstance(library, Torch):
        return _ask_torch(x, torch_of(x), library)
    try:
        interface = getattr(x, "__cuda_array_interface__", None)
    except (RuntimeError, ValueError) as exc:  # freed, on several GPUs ...
        raise cannot_view(x, exc) from exc
    if interface is not None:
        return _read_interface(x, interface, library)
    return _ask_dlpack(x)


def _ask_torch(x: Any, torch: Any, library: Library) -> _Given:
    if x.layout is not torch.strided:
        raise cannot_view(x, f"its layout is {x.layout}; pass x.to_dense()")
    if x.requires_grad:
        raise cannot_view(x, "it requires grad; pass x.detach()")
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
        dtype = np.dtype(interface["typestr"])
        version = interface["version"]
    except (KeyError, TypeError, ValueError) as exc:
        raise cannot_view(x, f"its __cuda_array_interface__ is broken ({exc!r})") from exc
    if version not in _VERSIONS:
        raise cannot_view(
            x, f"its __cuda_array_interface__ is of version {version}; allowed are 2 and 3"
        )
    if interface.get("mask") is not None:
        raise InvalidArgument(
            "a masked array was given and its mask would be ignored: pass its data without it"
        )
    if dtype.kind == "V":  # so the interface spells types NumPy lacks
        own = getattr(x, "dtype", None)
        dtype = own if isinstance(own, np.dtype) and own.itemsize == dtype.itemsize else dtype
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


def _ask_dlpack(x: Any) -> _Given:
    """Read a DLPack array; its producer makes the legacy stream wait for its work on the array."""
    try:
        from cuda.core.utils import StridedMemoryView  # 0.5 s, and few arrays come this way
    except ImportError as exc:
        raise TransportError(
            f"cuda.core cannot be imported ({exc}): `pip install r2ccl[gpu]`", status="NO_CUDA"
        ) from exc
    try:
        view = StridedMemoryView.from_dlpack(_NoCopy(x), LEGACY)
    except AssertionError as exc:
        raise cannot_view(x, "its __dlpack__ did not return an unused DLPack capsule") from exc
    except (BufferError, RuntimeError, TypeError, ValueError) as exc:
        raise cannot_view(x, exc) from exc
    try:
        dtype = view.dtype
    except (NotImplementedError, TypeError) as exc:
        raise cannot_view(x, f"{exc}; allowed are dtypes {names()}") from exc
    strides = view.strides
    return _Given(
        address=view.ptr,
        dtype=dtype.name,
        shape=view.shape,
        strides=strides and tuple(each * dtype.itemsize for each in strides),
        is_read_only=view.readonly,
        # DLPack gives device 0 for managed memory, whatever GPU it was allocated on.
        ordinal=_ordinal(view.ptr) if x.__dlpack_device__()[0] == _MANAGED else view.device_id,
        stream=LEGACY,
        after=LEGACY,
        view=view,
    )


class _NoCopy:
    """A DLPack producer that is asked not to copy: a copy would not receive the result."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._producer.__dlpack_device__()
        return device

    def __dlpack__(self, **asked: Any) -> Any:
        # The parameter is as old as max_version (array API standard 2023.12).
        copy = {"copy": False} if "max_version" in asked else {}
        return self._producer.__dlpack__(**asked, **copy)


def _ordinal(address: int) -> int:
    """Ask the driver which GPU an address is on; where there is no memory, say the first."""
    return int(Cuda().pointer_attribute("DEVICE_ORDINAL", address)) if address else 0


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
    if given.dtype == "bool":
        return InvalidArgument(f"{what}: pass its bytes as uint8 with op=MAX (any) or MIN (all)")
    return InvalidArgument(
        f"{what} was given: allowed are arrays in CUDA memory, C-contiguous, of dtype {names()}"
    )


def _memory_refusal(x: Any, given: _Given, dtype: np.dtype[Any]) -> InvalidArgument:
    what = f"{type_name(x)} of dtype {given.dtype} and shape {given.shape}"
    if not _is_contiguous(given, dtype.itemsize):
        return InvalidArgument(
            f"{what} and strides {given.strides} is not C-contiguous: "
            "pass a contiguous copy, or a view of whole leading rows"
        )
    if given.address % dtype.alignment:
        return InvalidArgument(
            f"{what} is not aligned to {dtype.alignment} bytes: pass a copy of it"
        )
    return InvalidArgument(f"{what} is read-only, but the result is written to it: pass a copy")


__all__ = ["DeviceBuffer", "as_device_buffer", "is_device_array", "streams_of"]
