"""Memoryviews of device memory, which transports pass to NICs.

A view has an address and a length and can be sliced, but the host cannot access its bytes.
Invariant: only NICs read or write through a view.
"""

from __future__ import annotations

import ctypes

import numpy as np

#: Length of the array type in bytes: more than any GPU's memory, so one type serves all views.
_EVERYTHING = 1 << 47


class _DeviceBytes(ctypes.Array[ctypes.c_uint8]):
    """Array type for device memory: an instance stands for the memory at its address."""

    _type_ = ctypes.c_uint8
    _length_ = _EVERYTHING


def view_of(address: int, nbytes: int) -> memoryview:
    """Return a view of `nbytes` bytes of device memory at `address`.

    The view does not keep the memory allocated.
    """
    return memoryview(_DeviceBytes.from_address(address)).cast("B")[:nbytes]


def address_of(view: memoryview) -> int:
    """Return the address of a non-empty view of device or host memory."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def is_device_view(view: memoryview) -> bool:
    """Return whether `view` is from `view_of`, or a part of such a view."""
    return isinstance(view.obj, _DeviceBytes)


__all__ = ["address_of", "is_device_view", "view_of"]
