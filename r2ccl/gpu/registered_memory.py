"""Device memory of this library's run_in_data_loop that every NIC has registered.

It holds landing places, partial sums, and staging copies of arrays that NICs cannot reach. Areas
grow and are kept; a replaced one is freed when nothing uses it.

Invariant: memory that is handed out is registered with every NIC for as long as it is kept.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from r2ccl.device.base import Device
from r2ccl.device.views import view_of
from r2ccl.transport.base import Registered

#: Registers device memory with every NIC, or raises TransportError: `Transport.register_device`.
Register = Callable[[int, int], Registered]
#: Calls a function in the thread that owns the data loop, and thereby the transport.
RunInDataLoop = Callable[[Callable[[], Any]], Any]

#: CallAddresses begin at multiples of it, where kernels read whole lines of memory.
_ALIGNMENT = 256


class AreaPurpose(enum.Enum):
    """Use of an area."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


class _Area(NamedTuple):
    address: int
    nbytes: int
    registered: Registered


class RegisteredDeviceMemory:
    """Registered memory of one device.

    Parameters
    ----------
    device : Device
    register : callable
    run_in_data_loop : callable
    slab_nbytes : int
        Size of the allocations that landing places are cut from.

    Raises
    ------
    TransportError
        The NICs do not reach the device's memory, or it is full.
    """

    def __init__(
        self, device: Device, register: Register, run_in_data_loop: RunInDataLoop, slab_nbytes: int
    ) -> None:
        self._device = device
        self._register = register
        self._run_in_data_loop = run_in_data_loop
        self._slab_nbytes = slab_nbytes
        self._areas: dict[AreaPurpose, _Area] = {}
        #: Replaced areas, and slabs of landing places; the last slab is free from ``_cut``.
        self._replaced: list[_Area] = []
        self._slabs: list[_Area] = []
        self._cut = 0
        self._slabs.append(self._make(slab_nbytes, self.register))

    def register(self, address: int, nbytes: int) -> Registered:
        """Register memory, also the user's; in any thread but the data loop's."""
        made: Registered = self._run_in_data_loop(lambda: self._register(address, nbytes))
        return made

    def release(self, registered: Registered) -> None:
        """End a registration; in any thread but the data loop's."""
        self._run_in_data_loop(registered.close)

    def has(self, purpose: AreaPurpose, nbytes: int) -> bool:
        """Return whether `area` need not allocate."""
        found = self._areas.get(purpose)
        return not nbytes or (found is not None and found.nbytes >= nbytes)

    def area(self, purpose: AreaPurpose, nbytes: int) -> int:
        """Return the address of an area of `nbytes` bytes; growing loses its contents.

        Raises
        ------
        TransportError
            Memory is full, or a NIC failed.
        """
        if not self.has(purpose, nbytes):
            made = self._make(1 << (nbytes - 1).bit_length(), self.register)
            if purpose in self._areas:
                self._replaced.append(self._areas[purpose])
            self._areas[purpose] = made
        return self._areas[purpose].address if nbytes else 0

    def place(self, nbytes: int) -> memoryview:
        """Allocate a landing place, until `close`; in the data loop.

        Raises
        ------
        TransportError
            See `area`.
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
        """Free replaced areas; nothing uses them."""
        while self._replaced:
            self._free(self._replaced.pop())

    def close(self) -> None:
        """Free everything; nothing uses it."""
        self._replaced += [*self._areas.values(), *self._slabs]
        self._areas.clear()
        self._slabs.clear()
        self.free_replaced()

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
    """Return `nbytes` rounded up to the alignment of places."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


__all__ = ["AreaPurpose", "Register", "RegisteredDeviceMemory", "RunInDataLoop", "aligned"]
