"""Allocates device memory that is registered with every NIC.

The memory consists of *slabs*, which are divided into landing places, and of at most one *area* for
each `AreaPurpose`. An area holds partial sums, the scratch memory of a schedule, or the staging
copy of an array that NICs cannot access. All calls share the areas. An area that is too small for a
call is replaced by a larger one. The caller frees the replaced areas with
`RegisteredDeviceMemory.free_replaced` when no call uses the replaced areas.

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

#: ``register(address, nbytes)`` registers device memory with every NIC, as
#: `Transport.register_device` does; call it in the data loop.
Register = Callable[[int, int], Registered]
#: Function that calls another function while the calling thread owns the data loop and the
#: transport, and returns the result of that function.
RunInDataLoop = Callable[[Callable[[], Any]], Any]

#: Alignment of landing places in bytes, so that kernels read whole memory lines.
_ALIGNMENT = 256


class AreaPurpose(enum.Enum):
    """Buffer of a call for which an area is used.

    The areas INPUT and OUTPUT replace an array of the caller that NICs cannot access. OUTPUT also
    holds the partial sums of a call whose output is missing or too small for them. SCRATCH is the
    scratch memory of the call's schedule.
    """

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


class _Area(NamedTuple):
    address: int
    nbytes: int
    registered: Registered


class RegisteredDeviceMemory:
    """Memory of one device, allocated by this library and registered with every NIC.

    The constructor allocates and registers the first slab. Call the constructor and the methods
    that register or release memory outside of the data loop, because they wait for the data
    loop; only `place` must be called in the data loop.

    Parameters
    ----------
    device : Device
    register : callable
        See `Register`.
    run_in_data_loop : callable
        See `RunInDataLoop`.
    slab_nbytes : int
        Size in bytes of a slab; a larger landing place gets a slab of its own.

    Raises
    ------
    TransportError
        If the first slab cannot be registered with a NIC, or the device's memory is full.
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
        """Register device memory of this library or of the user, until `release`.

        Parameters
        ----------
        address : int
        nbytes : int

        Raises
        ------
        InvalidArgument
            If the bytes are not part of one allocation.
        TransportError
            If a NIC cannot access the memory or has no resources left, or if
            R2CC_REGISTRATION_LIMIT_NBYTES would be exceeded.
        """
        made: Registered = self._run_in_data_loop(lambda: self._register(address, nbytes))
        return made

    def release(self, registered: Registered) -> None:
        """End a registration that `register` made."""
        self._run_in_data_loop(registered.close)

    def has(self, purpose: AreaPurpose, nbytes: int) -> bool:
        """Return whether the present area for `purpose` has at least `nbytes` bytes.

        If `nbytes` is 0, return True.
        """
        found = self._areas.get(purpose)
        return not nbytes or (found is not None and found.nbytes >= nbytes)

    def area(self, purpose: AreaPurpose, nbytes: int) -> int:
        """Return the address of the area for `purpose`, which has at least `nbytes` bytes.

        If `nbytes` is 0, return 0. If the present area is too small, allocate and register a larger
        one; the contents are not copied. The replaced area stays valid until `free_replaced`.

        Raises
        ------
        TransportError
            If the device's memory is full, or the area cannot be registered with a NIC.
        """
        if not self.has(purpose, nbytes):
            made = self._make(1 << (nbytes - 1).bit_length(), self.register)
            if purpose in self._areas:
                self._replaced.append(self._areas[purpose])
            self._areas[purpose] = made
        return self._areas[purpose].address if nbytes else 0

    def place(self, nbytes: int) -> memoryview:
        """Return a new landing place of `nbytes` bytes; call this method only in the data loop.

        The result is a view of device memory (`r2ccl.device.views`), aligned to 256 bytes, which is
        valid until `close`.

        Raises
        ------
        TransportError
            If the device's memory is full, or a new slab cannot be registered with a NIC.
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
        """Deregister and free all areas that were replaced; no call may still use them.

        Raises
        ------
        TransportError
            If the device failed.
        """
        while self._replaced:
            self._free(self._replaced.pop())

    def close(self) -> None:
        """Deregister and free all memory; neither the device nor a NIC may still use it.

        Raises
        ------
        TransportError
            If the device failed. All memory was deregistered, but not all of it was freed.
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
    """Return `nbytes` rounded up to a multiple of the alignment of landing places, 256 bytes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


__all__ = ["AreaPurpose", "Register", "RegisteredDeviceMemory", "RunInDataLoop", "aligned"]
