"""Wired memory: device memory of this library's own that every NIC reaches, by purpose.

Landing places, partial sums, and what stands in for arrays that the NICs do not reach. Areas grow
and are kept; one that was outgrown is freed when nothing works on it. Must not import links.

Invariant: what is handed out is registered on every NIC for as long as it is kept.
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
#: Runs something as the owner of the data loop, who alone may touch the transport.
Own = Callable[[Callable[[], Any]], Any]

#: CallAddresses begin at multiples of it, where kernels read whole lines of memory.
_ALIGNMENT = 256


class AreaPurpose(enum.Enum):
    """What an area is for."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


class _Area(NamedTuple):
    address: int
    nbytes: int
    registered: Registered


class RegisteredDeviceMemory:
    """Areas of one device.

    Parameters
    ----------
    device : Device
    register : callable
    own : callable
    slab_nbytes : int
        Landing places are cut from so much at a time, at least.

    Raises
    ------
    TransportError
        The NICs do not reach the device's memory, or there is no more of it.
    """

    def __init__(self, device: Device, register: Register, own: Own, slab_nbytes: int) -> None:
        self._device = device
        self._register = register
        self._own = own
        self._slab_nbytes = slab_nbytes
        self._areas: dict[AreaPurpose, _Area] = {}
        #: Outgrown areas, and slabs of landing places; the last slab has room from ``_cut``.
        self._outgrown: list[_Area] = []
        self._slabs: list[_Area] = []
        self._cut = 0
        self._slabs.append(self._make(slab_nbytes, self.register))

    def register(self, address: int, nbytes: int) -> Registered:
        """Register memory, the caller's too; for who does not own the data loop."""
        made: Registered = self._own(lambda: self._register(address, nbytes))
        return made

    def release(self, registered: Registered) -> None:
        """End a registration; for who does not own the data loop."""
        self._own(registered.close)

    def has(self, purpose: AreaPurpose, nbytes: int) -> bool:
        """Whether `area` need not allocate."""
        found = self._areas.get(purpose)
        return not nbytes or (found is not None and found.nbytes >= nbytes)

    def area(self, purpose: AreaPurpose, nbytes: int) -> int:
        """Return the address of `nbytes` bytes; what they held for a smaller size is lost.

        Raises
        ------
        TransportError
            There is no more memory, or the NICs refused.
        """
        if not self.has(purpose, nbytes):
            made = self._make(1 << (nbytes - 1).bit_length(), self.register)
            if purpose in self._areas:
                self._outgrown.append(self._areas[purpose])
            self._areas[purpose] = made
        return self._areas[purpose].address if nbytes else 0

    def place(self, nbytes: int) -> memoryview:
        """Cut a landing place, for ever; for the owner of the data loop.

        Raises
        ------
        TransportError
            As `area`.
        """
        wanted = aligned(nbytes)
        if self._cut + wanted > self._slabs[-1].nbytes:
            size = max(wanted, self._slab_nbytes)
            self._slabs.append(self._make(size, self._register))
            self._cut = 0
        at = self._slabs[-1].address + self._cut
        self._cut += wanted
        return view_of(at, nbytes)

    def tidy(self) -> None:
        """Free what was outgrown; nothing works on it."""
        while self._outgrown:
            self._free(self._outgrown.pop())

    def close(self) -> None:
        """Free everything; nothing works on it."""
        self._outgrown += [*self._areas.values(), *self._slabs]
        self._areas.clear()
        self._slabs.clear()
        self.tidy()

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
    """Return how far apart places of `nbytes` bytes begin, in bytes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


__all__ = ["Own", "AreaPurpose", "Register", "RegisteredDeviceMemory", "aligned"]
