"""How a NIC reaches a slice: in its own memory if that is registered, else in a buffer instead.

Buffers come in powers of two, are registered like everything `Staging.allocate` returns, and are
kept for the next slice.

Sees no pyverbs. Invariant: while a `Reach` is held its memory stays registered on every NIC.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.transport.registration import Registration, RegistrationCache

Array = npt.NDArray[np.uint8]
_MIN_BUFFER_BITS = 12


class Reach(NamedTuple):
    """What a work request says of a slice's memory, pinned until `Staging.release`."""

    address: int
    lkey: int
    rkey: int
    registration: Registration
    #: Where the slice's bytes really are, or must be copied from: None if in its own memory.
    buffer: Array | None


class Staging:
    """The memory of one transport.

    Parameters
    ----------
    registrations : RegistrationCache
        Owned.
    """

    def __init__(self, registrations: RegistrationCache) -> None:
        self._registrations = registrations
        self._buffers: dict[int, list[Array]] = {}

    def allocate(self, nbytes: int) -> Array:
        """Return memory registered with every NIC, for as long as it lives."""
        made = np.empty(max(1, nbytes), np.uint8)
        self.register(made)
        return made[:nbytes]

    def register(self, memory: Array) -> Registration:
        """See `Transport.register`."""
        return self._registrations.register(memory.ctypes.data, memory.nbytes, memory)

    def reach(self, view: memoryview, nic: int) -> Reach:
        """Pin the memory of `view`, or a buffer for it, for NIC number `nic`."""
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

    def release(self, reach: Reach) -> None:
        """No work request names it any more."""
        reach.registration.unpin()
        if reach.buffer is not None:
            self._buffers.setdefault(reach.buffer.nbytes, []).append(reach.buffer)

    def drain(self) -> None:
        """Have the NICs forget memory that was freed."""
        self._registrations.drain()

    def close(self) -> None:
        """Deregister everything."""
        self._registrations.close()

    def _take(self, nbytes: int) -> Array:
        size = 1 << max(_MIN_BUFFER_BITS, (nbytes - 1).bit_length())
        free = self._buffers.get(size)
        return free.pop() if free else self.allocate(size)


__all__ = ["Reach", "Staging"]
