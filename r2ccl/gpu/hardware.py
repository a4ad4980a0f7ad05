"""Hardware: the GPUs of this process and the machine around them, opened when somebody asks.

What communicators know of CUDA, and what a test puts in its place. Must not import ranks or links;
importing it loads no driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from r2ccl.device.base import Device
from r2ccl.device.driver import CudaDevice
from r2ccl.device.numbering import ordinal_of

if TYPE_CHECKING:
    from r2ccl.topology.machine import Machine


class Hardware(Protocol):
    """What a communicator asks of the machine it is on."""

    def open(self, ordinal: int) -> tuple[Device, Any]:
        """Return a GPU and what gives it its kernels; `r2ccl.gpu.backends.GpuKernels`."""
        ...

    def open_peer(self, bus_id: str) -> Device | None:
        """Return another GPU, by its bus id; None: this process does not see it."""
        ...

    def read_machine(self) -> Machine:
        """Return the machine as this process sees it."""
        ...


class CudaHardware:
    """`Hardware` as the CUDA driver and the kernel have it."""

    def open(self, ordinal: int) -> tuple[Device, Any]:
        """See `Hardware`.

        Raises
        ------
        TransportError
            There is no driver, or it refused.
        """
        from r2ccl.kernels.cuda.launch import Launcher  # takes 18 ms

        device = CudaDevice(ordinal)
        return device, Launcher(device)

    def open_peer(self, bus_id: str) -> Device | None:
        """See `Hardware`; as `open`."""
        ordinal = ordinal_of(bus_id)
        return None if ordinal is None else CudaDevice(ordinal)

    def read_machine(self) -> Machine:
        """See `Hardware`."""
        from r2ccl.topology.gpus import find_gpus  # take 8 ms, and only some ask
        from r2ccl.topology.sysfs import read_machine

        return read_machine(find_gpus())


__all__ = ["CudaHardware", "Hardware"]
