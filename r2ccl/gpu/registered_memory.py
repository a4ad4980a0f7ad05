"""Allocates device memory that is registered with every NIC.

The memory holds landing places, partial sums, and staging copies of arrays that NICs cannot access.
An area that becomes too small is replaced by a larger one; the caller frees replaced areas with
`RegisteredDeviceMemory.free_replaced` when nothing uses them.

Invariant: memory stays registered with every NIC until it is freed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from r2ccl.device.base import Device
from r2ccl.device.views import view_of
from r2ccl.transport.base import Registered

#: Function that registers device memory with every NIC, or raises TransportError:
#: `Transport.register_device`.
Register = Callable[[int, int], Registered]
#: Function that runs another function in the thread that owns the data loop and the transport, and
#: returns its result.
RunInDataLoop = Callable[[Callable[[], Any]], Any]

#: Alignment of landing places in bytes, so that kernels read whole memory lines.
_ALIGNMENT = 256


class AreaPurpose(enum.Enum):
    """Buffer of a call that an area replaces or provides."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


class _Area(NamedTuple):
    address: int
    nbytes: int
    registered: Registered


class RegisteredDeviceMemory:
    """Memory of one device, allocated by this library and registered with every NIC.

    Parameters
    ----------
    device : Device
    register : callable
        See `Register`.
    run_in_data_loop : callable
        See `RunInDataLoop`.
    slab_nbytes : int
        Size in bytes of the allocations that are divided into landing places.

    Raises
    ------
    TransportError
        If the NICs cannot access the device's memory, or if the memory is full.
    """

    def __init__(
        self, device: Device, register: Register, run_in_data_loop: RunInDataLoop, slab_nbytes: int
    ) -> None:
        self._device = device
        self._register = register
        self._run_in_data_loop = run_in_data_loop
        self._slab_nbytes = slab_nbytes
        self._areas: dict[AreaPurpose, _Area] = {}
        #: Replaced areas, and slabs of landing places. The last slab is free from offset ``_cut``.
        self._replaced: list[_Area] = []
        self._slabs: list[_Area] = []
        self._cut = 0
        self._slabs.append(self._make(slab_nbytes, self.register))

    def register(self, address: int, nbytes: int) -> Registered:
        """Register memory of this library or the user; not to be called in the data loop.

        Raises
        ------
        TransportError
            If a NIC cannot access the memory, or has no resources left.
        """
        made: Registered = self._run_in_data_loop(lambda: self._register(address, nbytes))
        return made

    def release(self, registered: Registered) -> None:
        """End a registration; not to be called in the data loop."""
        self._run_in_data_loop(registered.close)

    def has(self, purpose: AreaPurpose, nbytes: int) -> bool:
        """Return whether `area` need not allocate; always True if `nbytes` is 0."""
        found = self._areas.get(purpose)
        return not nbytes or (found is not None and found.nbytes >= nbytes)

    def area(self, purpose: AreaPurpose, nbytes: int) -> int:
        """Return the address of an area of at least `nbytes` bytes; allocate it if necessary.

        Return 0 if `nbytes` is 0. An area that is replaced by a larger one loses its contents.

        Raises
        ------
        TransportError
            If memory is full, or a NIC failed.
        """
        if not self.has(purpose, nbytes):
            made = self._make(1 << (nbytes - 1).bit_length(), self.register)
            if purpose in self._areas:
                self._replaced.append(self._areas[purpose])
            self._areas[purpose] = made
        return self._areas[purpose].address if nbytes else 0

    def place(self, nbytes: int) -> memoryview:
        """Allocate a landing place that is valid until `close`; call it only in the data loop.

        Raises
        ------
        TransportError
            If memory is full, or a NIC failed.
        """
        wanted = aligned(nbytes)
        if self._cut + wanted > self._slabs[-1].nbytes:
            size = max(wanted, self._slab_nbytes)
            self._slabs.append(self._make(size, self._register))
            self._cut = 0
        at = self._slabs[-1].address + self._cut
        self._cut += wanted
        return view_of(at, nbytes)

    def free_replaced(self) -> None:
        """Free all replaced areas; nothing may use them."""
        while self._replaced:
            self._free(self._replaced.pop())

    def close(self) -> None:
        """Free all memory; nothing may use it.

        Raises
        ------
        TransportError
            If the device failed; all memory was deregistered nevertheless.
        """
        with ExitStack() as steps:
            for area in (*self._replaced, *self._areas.values(), *self._slabs):
                steps.callback(self._free, area)
            self._replaced.clear()
            self._areas.clear()
            self._slabs.clear()

    def _make(self, nbytes: int, register: Register) -> _Area:
        address = self._device.allocate(nbytes)
        try:
            return _Area(address, nbytes, register(address, nbytes))
        except BaseException:
            self._device.free(address)
            raise

    def _free(self, area: _Area) -> None:
        self.release(area.registered)
        self._device.free(area.address)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of landing places."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


__all__ = ["AreaPurpose", "Register", "RegisteredDeviceMemory", "RunInDataLoop", "aligned"]
