"""Conversion of CUDA streams, as callers and arrays specify them, to handles of the driver.

Callers pass streams as ``stream=``; arrays name the stream of their producer. The legacy default
stream is always returned as 1, never as 0, because the meaning of handle 0 depends on how the code
that receives it was built. Handle 1 always means the legacy default stream, and 2 the per-thread
default stream of the calling thread (CUDA driver API, stream synchronization behavior).

Invariant: this module does not create, wait for or keep a stream. The caller keeps a stream alive
until the work on it is done.
"""

from __future__ import annotations

import sys
from typing import Any

from r2ccl.device.base import Stream
from r2ccl.errors import InvalidArgument
from r2ccl.runtime.advice import cannot_view

#: CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (cuda.h).
LEGACY = Stream(1)
PER_THREAD = Stream(2)

#: Stream classes that lack ``__cuda_stream__`` in some version of their library: module, class, and
#: attribute that holds the handle.
_CLASSES = (
    ("torch.cuda", "Stream", "cuda_stream"),
    ("cupy.cuda", "Stream", "ptr"),
    ("cupy.cuda", "ExternalStream", "ptr"),
    ("numba.cuda.cudadrv.driver", "Stream", "handle"),
)

_ALLOWED = (
    "allowed are None (the current stream of the array's library), a handle (an integer; 0 and 1 "
    "are the legacy default stream, 2 is the per-thread default stream), a stream of CuPy, Numba "
    "or torch, and objects with __cuda_stream__"
)


def stream_of(given: Any, default: Stream) -> Stream:
    """Return the handle of the stream that a caller passed as ``stream=``.

    Parameters
    ----------
    given : object
        None, a handle, an object with ``__cuda_stream__``, or a stream of CuPy, Numba or torch.
        Borrowed.
    default : Stream
        Stream to return if `given` is None, such as `DeviceBuffer.stream`.

    Raises
    ------
    InvalidArgument
        If `given` is another object or not a valid handle, or its ``__cuda_stream__`` returns
        anything but a handle in version 0 of the protocol.

    References
    ----------
    NVIDIA, cuda.core, Interoperability: the ``__cuda_stream__`` protocol, version 0.
    """
    if given is None:
        return default
    if isinstance(given, int) and not isinstance(given, bool):
        return _named(given, given)
    protocol = getattr(given, "__cuda_stream__", None)
    if protocol is not None:
        return _named(_handle_in(given, protocol), given)
    for module, name, attribute in _CLASSES:
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and isinstance(given, known):
            handle = getattr(given, attribute)
            # Numba's handle is either a c_void_p, whose value is None for handle 0, or a CUstream,
            # which has no attribute `value`.
            return _named(int(getattr(handle, "value", handle) or 0), given)
    raise _refusal(given)


def producer_stream(x: Any, entry: Any) -> Stream | None:
    """Return the stream that every use of the array `x` must be ordered with, or None.

    Parameters
    ----------
    x : object
        The array; used in the error message only.
    entry : object
        Entry ``stream`` of the array's ``__cuda_array_interface__``, or None without one. The
        producer may still have work on the array in flight on that stream. A consumer must use the
        array on that stream, or order its work after the work already enqueued on that stream and
        before the work enqueued there later.

    Raises
    ------
    InvalidArgument
        If `entry` is not a handle, or is 0, which the interface forbids as ambiguous.

    References
    ----------
    Numba, CUDA Array Interface, version 3: ``stream``, and Synchronization.
    """
    if entry is None:
        return None
    if isinstance(entry, int) and not isinstance(entry, bool) and 0 < entry < _END:
        return Stream(entry)
    raise cannot_view(
        x,
        f"'stream' is {entry!r} in its __cuda_array_interface__; allowed are None, 1 (the legacy "
        "default stream), 2 (the per-thread default stream) and handles",
    )


def _handle_in(given: Any, protocol: Any) -> int:
    """Return the handle from `protocol`, the ``__cuda_stream__`` of `given`.

    ``__cuda_stream__`` is a method; in drafts of the protocol, it is a property.
    """
    answer = protocol() if callable(protocol) else protocol
    if isinstance(answer, tuple) and len(answer) == 2 and answer[0] == 0:
        handle = answer[1]
        if isinstance(handle, int):
            return handle
    raise InvalidArgument(
        f"stream={given!r}: its __cuda_stream__ returned {answer!r}, but only (0, handle), which "
        "is version 0, is supported: pass the handle itself"
    )


def _named(handle: int, given: Any) -> Stream:
    if not 0 <= handle < _END:
        raise _refusal(given)
    return Stream(handle) if handle else LEGACY


def _refusal(given: Any) -> InvalidArgument:
    return InvalidArgument(f"stream={given!r}: {_ALLOWED}")


#: Upper bound of handles, which are 64-bit addresses.
_END = 1 << 64

__all__ = ["LEGACY", "PER_THREAD", "producer_stream", "stream_of"]
