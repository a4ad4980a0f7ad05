"""Simulated ranks whose slices go through a relay on some rails, and not on others.

Every rank relays on every other rail, so that there are paths relayed at both ends, at one, and at
none; slots are few, so that some slices go directly. What is free is poisoned and looked at, and
the copies are the fake GPU's: they run late.

``simulate(..., network_type=GpuNetwork, rank_type=RelayRank)``. Invariant: as in `simulate`, equal
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

#: In slots that are free.
_POISON = 0xB6


class SimPart(SimTransport):
    """`SimTransport` in the shape of a `Part`: nobody sleeps, so there is nothing to wait for."""

    def fileno(self) -> int:
        """Return no descriptor."""
        return -1

    def arm(self) -> None:
        """Nothing to arm."""

    def limit_s(self, timeout_s: float) -> float:
        """Return what was given."""
        return timeout_s


class CheckedRelay(Relay):
    """`Relay` on a fake GPU: free slots are poisoned, and looked at when they are taken.

    Ends of copies are seen at every `nth_look` alone, as by a loop that has much else to do.
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
        """Return a slot nobody wrote to since it was given back."""
        slot = super().take(nbytes)
        if slot is not None and (self._fake.read(slot.address, self._nbytes) != _POISON).any():
            raise Violation("a free slot of a relay was written")
        return slot

    def collect(self) -> list[Slot]:
        """See which copies are over, if it is time."""
        self._nlooks += 1
        return [] if self._nlooks % self._nth_look else super().collect()

    def give(self, slot: Slot) -> None:
        """Take a slot back that nobody has given yet."""
        if slot.is_given:
            raise Violation("a slot of a relay was given back twice")
        super().give(slot)

    def _set_free(self, slot: Slot) -> None:
        self._poison(slot)
        super()._set_free(slot)

    def _poison(self, slot: Slot) -> None:
        self._fake.write(slot.address, np.full(self._nbytes, _POISON, np.uint8))


class RelayRank(GpuRank):
    """`GpuRank` that relays on every other rail, the even ranks on the even ones."""

    slot_nbytes = 16
    nslots = 2
    nth_look = 1

    def __init__(self, rank: int, network: GpuNetwork, *others: Any) -> None:
        super().__init__(rank, network, *others)
        self.relay = CheckedRelay(self.device, self.slot_nbytes, self.nslots, self.nth_look)
        for rail in range(rank % 2, network.nrails, 2):
            self.pxn.use(rail, self.relay)

    def make_transport(self) -> Transport:
        """Make a transport that can relay."""
        self.pxn = PxnTransport(SimPart(self._network, self.rank, self._wake))
        return self.pxn

    @property
    def must_look(self) -> bool:
        """Whether work or copies are under way, of whose end no event tells."""
        return super().must_look or self.pxn.is_busy


__all__ = ["CheckedRelay", "RelayRank", "SimPart"]
