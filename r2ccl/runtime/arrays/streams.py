"""Streams as callers name them: what they pass as ``stream=``, what their arrays ask for.

Every spelling becomes a handle of the driver. The legacy default stream is always 1, never 0: which
stream 0 means depends on how the code that passes it on was built (CUDA driver API, stream
synchronization behavior), 1 means the legacy one and 2 the calling thread's everywhere.

Must not import the driver, nor the libraries of the streams: those are the ones the caller has
imported. Invariant: no stream is made, waited for or kept; whoever passes one keeps it until its
work is done.
"""

from __future__ import annotations

import sys
from typing import Any

from r2ccl.device.base import Stream
from r2ccl.errors import InvalidArgument
from r2ccl.runtime.arrays.buffers import cannot_view

#: CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (cuda.h).
LEGACY = Stream(1)
PER_THREAD = Stream(2)

#: Streams that lack ``__cuda_stream__`` in some version: module, class, its handle's attribute.
_CLASSES = (
    ("torch.cuda", "Stream", "cuda_stream"),
    ("cupy.cuda", "Stream", "ptr"),
    ("cupy.cuda", "ExternalStream", "ptr"),
    ("numba.cuda.cudadrv.driver", "Stream", "handle"),
)

_ALLOWED = (
    "allowed are None (the stream the array's library works on now), a handle (an integer, 0 and 1 "
    "the legacy default stream, 2 the per-thread one), a stream of CuPy, Numba or torch, and "
    "objects with __cuda_stream__"
)


def stream_of(given: Any, default: Stream) -> Stream:
    """Return the handle of what a caller passed as ``stream=``.

    Parameters
    ----------
    given : object
        None; a handle; an object with ``__cuda_stream__``; a stream of CuPy, Numba or torch.
        Borrowed.
    default : Stream
        What None stands for: `DeviceBuffer.stream`.

    Raises
    ------
    InvalidArgument
        It is something else, or its ``__cuda_stream__`` is of a version that is not known.

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
            # Numba's is a c_void_p, whose value is None for 0, or a CUstream, which has none.
            return _named(int(getattr(handle, "value", handle) or 0), given)
    raise _refusal(given)


def producer_stream(x: Any, entry: Any) -> Stream | None:
    """Return the stream that must be ordered with whoever uses `x`, or None if there is none.

    Parameters
    ----------
    x : object
        The array, for the message.
    entry : object
        The entry ``stream`` of its ``__cuda_array_interface__``, None without one. A stream in it
        may still have work on the array under way: what is done with the array goes to that
        stream, or is ordered after what that stream was given before and before what it is given
        later.

    Raises
    ------
    InvalidArgument
        It is 0, which the interface forbids because it may mean three things, or no handle.

    References
    ----------
    Numba, CUDA Array Interface, version 3: ``stream``, and Synchronization.
    """
    if entry is None:
        return None
    if isinstance(entry, int) and 0 < entry < _END:
        return Stream(entry)
    raise cannot_view(
        x,
        f"'stream' is {entry!r} in its __cuda_array_interface__; allowed are None, 1 (the legacy "
        "default stream), 2 (the per-thread one) and handles",
    )


def _handle_in(given: Any, protocol: Any) -> int:
    """Return the handle ``__cuda_stream__`` tells: a method's answer, in its drafts a property."""
    answer = protocol() if callable(protocol) else protocol
    if isinstance(answer, tuple) and len(answer) == 2 and answer[0] == 0:
        handle = answer[1]
        if isinstance(handle, int):
            return handle
    raise InvalidArgument(
        f"stream={given!r}: its __cuda_stream__ gave {answer!r}; allowed is (0, handle), which is "
        "version 0: pass the handle itself"
    )


def _named(handle: int, given: Any) -> Stream:
    if not 0 <= handle < _END:
        raise _refusal(given)
    return Stream(handle) if handle else LEGACY


def _refusal(given: Any) -> InvalidArgument:
    return InvalidArgument(f"stream={given!r}: {_ALLOWED}")


#: Handles are addresses.
_END = 1 << 64

__all__ = ["LEGACY", "PER_THREAD", "producer_stream", "stream_of"]
