"""Simulated ranks whose collectives use the memory of fake GPUs, reached directly by NICs.

A `GpuNetwork` moves slices between the `FakeDevice`s of the ranks. The fake device checks the
accesses of NICs as it checks those of the host, and raises an error for unordered accesses: for
example if a slice is sent while the kernel that computes it may still run, or a slice lands while a
kernel may still read its landing place. Kernels run late, in any order that streams and events
allow.

To use these ranks, call ``simulate(..., network_type=GpuNetwork, rank_type=GpuRank)``. Equal
workloads, plans and seeds give equal runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r2ccl.device.views import address_of, is_device_view, view_of
from r2ccl.gpu.device_reduction import ReductionStream
from r2ccl.gpu.operands import DeviceOperands
from r2ccl.planning.lowering import cleared
from r2ccl.runtime.executor import LandingPool, Operands, Place
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.testing.fakedevice.forms import FakeLauncher
from r2ccl.testing.simulation.checks import Violation
from r2ccl.testing.simulation.data import Array
from r2ccl.testing.simulation.network import SimMessage, SimNetwork
from r2ccl.testing.simulation.rank import SimRank
from r2ccl.testing.simulation.work import SimTask

#: Byte that fills free landing places.
_POISON = 0xA5
_PATIENCE_S = 1.0


class GpuNetwork(SimNetwork):
    """`SimNetwork` whose NICs also read and write device memory."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.reaches_devices = True
        #: Device of each rank.
        self.devices: dict[int, FakeDevice] = {}

    def bytes_of(self, rank: int, view: memoryview | bytes) -> bytes:
        """Return the bytes of a view of a rank's host or device memory."""
        if not view or isinstance(view, bytes) or not is_device_view(view):
            return bytes(view)
        return self.devices[rank].read(address_of(view), len(view)).tobytes()

    def move(self, message: SimMessage, start: int, end: int) -> None:
        """Move bytes `start` up to `end` (exclusive) of a cleared slice, as `SimNetwork.move` does.

        Source and target may each be in host or device memory.
        """
        assert message.region is not None
        assert message.view is not None
        data = self.bytes_of(message.end.rank, message.view[start:end])
        target = message.region[start:end]
        if data and is_device_view(target):
            device = self.devices[message.end.other.rank]
            device.nic_write(address_of(target), np.frombuffer(data, np.uint8))
        else:
            target[:] = data

    def copy_of(self, message: SimMessage) -> memoryview:
        """Return a host copy of a slice in flight, from host or device memory."""
        assert message.view is not None
        return memoryview(self.bytes_of(message.end.rank, message.view))


class GpuPool(LandingPool):
    """Pool of landing places in device memory that detects writes into free places."""

    def __init__(self, device: FakeDevice, depth: int) -> None:
        super().__init__(self._make, depth)
        self._device = device

    def _make(self, nbytes: int) -> Place:
        place = view_of(self._device.allocate(nbytes), nbytes)
        self._poison(place)
        return place

    def _poison(self, place: Place) -> None:
        self._device.write(_address_of(place), np.full(place.nbytes, _POISON, np.uint8))

    def take(self, nbytes: int) -> Place:
        """Return a free landing place.

        Raise Violation if the first `nbytes` bytes of the place were written while it was free.
        """
        place = super().take(nbytes)
        if (self._device.read(_address_of(place), nbytes) != _POISON).any():
            raise Violation("a free landing place in device memory was written")
        return place

    def give(self, place: Place) -> None:
        """Poison a place and put it back; the device raises Race if a kernel may still use it."""
        self._poison(place)
        super().give(place)


class GpuRank(SimRank):
    """`SimRank` with a fake GPU; the GPUs of odd ranks reorder writes of NICs."""

    def __init__(self, rank: int, network: GpuNetwork, *others: Any) -> None:
        super().__init__(rank, network, *others)
        seed = network.timeline.random.getrandbits(32)
        gpu = FakeGpu(seed, reorders_remote_writes=rank % 2 == 1)
        self.device = network.devices[rank] = FakeDevice(gpu, f"rank {rank}")
        self.pool = GpuPool(self.device, self.pool.depth)
        self.reductions = self.computer = ReductionStream(self.device, FakeLauncher(self.device))
        self._checker.bytes_of = network.bytes_of
        #: Addresses of the call's input, output and scratch memory.
        self._spaces: tuple[int, ...] = ()
        #: Array of the shape and dtype of the output.
        self._like = np.empty(0)

    def operands(self, task: SimTask) -> Operands:
        """Allocate and fill the GPU memory of the next call; return it with the call's plan.

        `retire` frees the memory.
        """
        source, output = self._work.memory(self.ncalls, self.rank, task.schedule)
        self._like = output
        first = self._put(source)
        second = first if output is source else self._put(np.zeros_like(output))
        layout = cleared(task.layout)
        scratch = self._put(np.zeros_like(output)) if layout.uses_scratch else second
        self._spaces = (first, second, scratch)
        return DeviceOperands(
            layout,
            task.signature,
            self._spaces,
            nranks=self._work.workload.nranks,
            reductions=self.reductions,
            is_bandwidth_sample=True,
        )

    def output(self) -> Array:
        """Return a copy of the call's output memory."""
        if not self._like.nbytes:
            return self._like
        return self.device.read(self._spaces[1], self._like.nbytes).view(self._like.dtype)

    def retire(self, what: str) -> None:
        """Free the call's memory; the device raises StillInUse if work on it may be in progress.

        After an error, first wait for the kernels that are in progress.
        """
        if self.revocation.error is not None:
            # As in `GpuDirectBackend`. The wait ends, because no kernel waits for another rank.
            self.reductions.drain(_PATIENCE_S)
        for address in dict.fromkeys(self._spaces):
            self.device.free_caller_memory(address)
        self._spaces = ()

    def _put(self, data: Array) -> int:
        address = self.device.caller_memory(max(1, data.nbytes))
        if data.nbytes:
            self.device.write(address, data)
        return address


def _address_of(place: Place) -> int:
    assert isinstance(place, memoryview)
    return address_of(place)


__all__ = ["GpuNetwork", "GpuPool", "GpuRank"]
