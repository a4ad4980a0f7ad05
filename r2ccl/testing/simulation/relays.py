"""Simulated ranks whose slices pass through a PXN relay on some rails.

A PXN relay copies slices between the user's memory and slots in the memory of a GPU near the NIC.
Each rank relays on every second rail, so some paths are relayed at both ends, some at one end, and
some at no end. There are few slots, so some slices are not relayed. Free slots are poisoned to
detect writes into them. The copies run late, as work of the fake GPU.

To use these ranks, call ``simulate(..., network_type=GpuNetwork, rank_type=RelayRank)``. Equal
workloads, plans and seeds give equal runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r2ccl.gpu.pxn.relay import Relay, Slot
from r2ccl.gpu.pxn.transport import PxnTransport
from r2ccl.testing.fakedevice import FakeDevice
from r2ccl.testing.simulation.checks import Violation
from r2ccl.testing.simulation.gpus import GpuNetwork, GpuRank
from r2ccl.testing.simulation.transport import SimTransport
from r2ccl.transport.base import Transport

#: Byte that fills free slots.
_POISON = 0xB6


class SimPart(SimTransport):
    """`SimTransport` with the interface of a `TransportPart`; it never sleeps."""

    def fileno(self) -> int:
        """Return -1: the transport has no file descriptor."""
        return -1

    def arm(self) -> None:
        """Do nothing: the transport never sleeps."""

    def limit_s(self, timeout_s: float) -> float:
        """Return `timeout_s` unchanged."""
        return timeout_s


class CheckedRelay(Relay):
    """`Relay` on a fake GPU that detects writes into free slots.

    Only every `nth_look`-th call of `collect` returns slots whose copies are finished, as if the
    data loop were busy. The `nslots` slots, each of `slot_nbytes` bytes, are allocated on `device`.
    """

    def __init__(
        self, device: FakeDevice, slot_nbytes: int, nslots: int, nth_look: int = 1
    ) -> None:
        self._fake = device
        self._nth_look = nth_look
        self._nlooks = 0
        self._nbytes = slot_nbytes
        super().__init__(device, device.allocate(slot_nbytes * nslots), slot_nbytes, nslots)
        for slot in self._slots:
            self._poison(slot)

    def take(self, nbytes: int) -> Slot | None:
        """Return a free slot as `Relay.take` does; raise Violation if it was written while free."""
        slot = super().take(nbytes)
        if slot is not None and (self._fake.read(slot.address, self._nbytes) != _POISON).any():
            raise Violation("a free slot of a relay was written")
        return slot

    def collect(self) -> list[Slot]:
        """In every `nth_look`-th call, return finished slots as `Relay.collect` does; else none."""
        self._nlooks += 1
        return [] if self._nlooks % self._nth_look else super().collect()

    def give(self, slot: Slot) -> None:
        """Put a slot back; raise Violation if it was put back before."""
        if slot.is_given:
            raise Violation("a slot of a relay was given back twice")
        super().give(slot)

    def _set_free(self, slot: Slot) -> None:
        self._poison(slot)
        super()._set_free(slot)

    def _poison(self, slot: Slot) -> None:
        self._fake.write(slot.address, np.full(self._nbytes, _POISON, np.uint8))


class RelayRank(GpuRank):
    """`GpuRank` that relays on the even rails if its rank is even, else on the odd rails."""

    #: Size in bytes and number of the relay's slots, and `nth_look` of `CheckedRelay`.
    slot_nbytes = 16
    nslots = 2
    nth_look = 1

    def __init__(self, rank: int, network: GpuNetwork, *others: Any) -> None:
        super().__init__(rank, network, *others)
        self.relay = CheckedRelay(self.device, self.slot_nbytes, self.nslots, self.nth_look)
        for rail in range(rank % 2, network.nrails, 2):
            self.pxn.use(rail, self.relay)

    def make_transport(self) -> Transport:
        """Return a `PxnTransport` over the simulated transport."""
        self.pxn = PxnTransport(SimPart(self._network, self.rank, self._wake))
        return self.pxn

    @property
    def must_look(self) -> bool:
        """True if the data loop must poll, because GPU work or relay copies are in progress."""
        return super().must_look or self.pxn.is_busy


__all__ = ["CheckedRelay", "RelayRank", "SimPart"]
