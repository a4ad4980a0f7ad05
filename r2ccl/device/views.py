"""Views of device memory, by which transports name slices that NICs read and write.

A view has an address and a length and is sliced like any other, but the host cannot access its
bytes. Must not import the driver. Invariant: only NICs read or write through a view.
"""

from __future__ import annotations

import ctypes

import numpy as np

#: More than any GPU's memory, so that one type serves all views.
_EVERYTHING = 1 << 47


class _DeviceBytes(ctypes.Array[ctypes.c_uint8]):
    """Memory of a device, from some address on."""

    _type_ = ctypes.c_uint8
    _length_ = _EVERYTHING


def view_of(address: int, nbytes: int) -> memoryview:
    """Return a view of `nbytes` bytes of device memory at `address`."""
    return memoryview(_DeviceBytes.from_address(address)).cast("B")[:nbytes]


def address_of(view: memoryview) -> int:
    """Return the address of a non-empty view of device or host memory."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def is_device_view(view: memoryview) -> bool:
    """Return whether a view is of device memory."""
    return isinstance(view.obj, _DeviceBytes)


__all__ = ["address_of", "is_device_view", "view_of"]
