"""Views of device memory: what names a slice to a transport whose NICs read and write it.

A view has an address and a length, and is cut like any other; the bytes are not this process's to
touch. Must not import the driver. Invariant: nobody reads, writes, copies or compares what a view
names but a NIC.
"""

from __future__ import annotations

import ctypes

import numpy as np

#: More than any GPU's memory, so that one type serves all views: none of it is touched.
_EVERYTHING = 1 << 47


class _DeviceBytes(ctypes.Array[ctypes.c_uint8]):
    """Memory of a device, from some address on."""

    _type_ = ctypes.c_uint8
    _length_ = _EVERYTHING


def view_of(address: int, nbytes: int) -> memoryview:
    """Return a view of `nbytes` bytes of device memory at `address`."""
    return memoryview(_DeviceBytes.from_address(address)).cast("B")[:nbytes]


def address_of(view: memoryview) -> int:
    """Return where a view begins, of device or host memory; it is not empty."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def is_device_view(view: memoryview) -> bool:
    """Whether a view is of device memory."""
    return isinstance(view.obj, _DeviceBytes)


__all__ = ["address_of", "is_device_view", "view_of"]
