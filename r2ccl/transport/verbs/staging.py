"""Registered memory for each slice: the caller's own if it is registered, else a staging buffer.

Buffers have sizes that are powers of two, are registered with every NIC, and are reused. Device
memory has a separate registration cache and no buffers, because the CPU cannot copy its bytes:
callers must register it before they send or receive it.

Invariant: while a `Reach` is held, its memory stays registered with every NIC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.device.views import address_of, is_device_view
from r2ccl.errors import InternalError
from r2ccl.transport.verbs.cuda import CudaDriver
from r2ccl.transport.verbs.dmabuf import DeviceMemory
from r2ccl.transport.verbs.registration import Registration, RegistrationCache

Array = npt.NDArray[np.uint8]
_MIN_BUFFER_BITS = 12


class Reach(NamedTuple):
    """I/O address and keys with which one NIC accesses the pinned memory of a slice.

    The memory stays pinned until `Staging.release`.
    """

    address: int
    lkey: int
    rkey: int
    registration: Registration
    #: Staging buffer that the NIC accesses; None if it accesses the slice's own memory.
    buffer: Array | None


class Staging:
    """Registered memory and staging buffers of one transport.

    Parameters
    ----------
    registrations : RegistrationCache
        Registrations of host memory. Owned.
    open_cuda : callable
        Opens the CUDA driver; called when device memory is first registered.
    """

    def __init__(
        self, registrations: RegistrationCache, open_cuda: Callable[[], CudaDriver]
    ) -> None:
        self._registrations = registrations
        self._open_cuda = open_cuda
        self._on_device: RegistrationCache | None = None
        self._buffers: dict[int, list[Array]] = {}
        #: Size of all staging buffers, in use or not, in bytes.
        self.nbytes = 0

    @property
    def registered_nbytes(self) -> int:
        """Sum of the sizes of the registrations in both caches, host and device, in bytes."""
        device = 0 if self._on_device is None else self._on_device.stats.nbytes
        return self._registrations.stats.nbytes + device

    def allocate(self, nbytes: int) -> Array:
        """Return `nbytes` bytes of memory that is registered with every NIC until it is freed."""
        made = np.empty(max(1, nbytes), np.uint8)
        self.register(made)
        return made[:nbytes]

    def register(self, memory: Array) -> Registration:
        """Register host memory with every NIC; the caller must close the result."""
        return self._registrations.register(memory.ctypes.data, memory.nbytes, memory)

    def register_device(self, address: int, nbytes: int) -> Registration:
        """Register device memory with every NIC; the caller must close the result."""
        if self._on_device is None:
            self._on_device = self._registrations.beside(DeviceMemory(self._open_cuda()))
        found = self._on_device.find(address, nbytes)
        if found is not None:
            return found.share()
        return self._on_device.register(address, nbytes, None)

    def reach(self, view: memoryview, nic: int) -> Reach:
        """Return memory through which the NIC with index `nic` can send or receive slice `view`.

        This is the memory of `view` if it is registered, else a staging buffer. The caller copies
        the slice into the buffer before a send, or out of the buffer after a receive. The returned
        memory is pinned until `release`.

        Raises
        ------
        InternalError
            If `view` is device memory that is not registered.
        TransportError
            If a new buffer cannot be registered, or the CUDA driver cannot identify device memory.
        """
        if is_device_view(view):
            return self._reach_device(view, nic)
        address = np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0
        found = self._registrations.find(address, len(view)) if len(view) else None
        buffer = None
        if found is None:
            buffer = self._take(len(view))
            address = buffer.ctypes.data
            found = self._registrations.find(address, buffer.nbytes)
            assert found is not None, "buffers stay registered"
        found.pin()
        keys = found.keys(nic)
        return Reach(address + keys.iova_base, keys.lkey, keys.rkey, found, buffer)

    def _reach_device(self, view: memoryview, nic: int) -> Reach:
        address = address_of(view)
        cache = self._on_device
        found = None if cache is None else cache.find(address, len(view))
        if found is None:
            raise InternalError(
                f"{len(view)} bytes of device memory at {address:#x} are not registered: the array "
                "was perhaps freed while a collective used it; keep it alive until the call is done"
            )
        found.pin()
        keys = found.keys(nic)
        return Reach(address + keys.iova_base, keys.lkey, keys.rkey, found, None)

    def release(self, reach: Reach) -> None:
        """Unpin the memory of `reach`; afterwards no work request may use it.

        Its staging buffer, if any, may be used for another slice.
        """
        reach.registration.unpin()
        if reach.buffer is not None:
            self._buffers.setdefault(reach.buffer.nbytes, []).append(reach.buffer)

    def drain(self) -> None:
        """Deregister host memory that was freed. Later lookups detect freed device memory."""
        self._registrations.drain()

    def close(self) -> None:
        """Deregister all memory; the NICs must have stopped."""
        if self._on_device is not None:
            self._on_device.close()
        self._registrations.close()

    def _take(self, nbytes: int) -> Array:
        size = 1 << max(_MIN_BUFFER_BITS, (nbytes - 1).bit_length())
        free = self._buffers.get(size)
        if free:
            return free.pop()
        buffer = self.allocate(size)
        self.nbytes += size
        return buffer


__all__ = ["Reach", "Staging"]
