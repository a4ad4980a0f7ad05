"""Opens the GPUs of this process and reads the topology of this machine, on demand.

Tests replace `CudaHardware`. Importing this module loads no driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from r2ccl.device.base import Device
from r2ccl.device.driver import CudaDevice
from r2ccl.device.numbering import ordinal_of

if TYPE_CHECKING:
    from r2ccl.topology.machine import Machine


class Hardware(Protocol):
    """Interface through which a communicator opens GPUs and reads the machine's topology."""

    def open(self, ordinal: int) -> tuple[Device, Any]:
        """Open the GPU with number `ordinal` in this process; return it and its `GpuKernels`.

        The caller closes the GPU.

        Raises
        ------
        TransportError
            If the driver or the GPU is missing, or the driver failed.
        """
        ...

    def open_peer(self, bus_id: str) -> Device | None:
        """Open and return the GPU at PCI bus ID `bus_id`; the caller closes it.

        Return None if this process does not see the GPU. Raise the same errors as `open`.
        """
        ...

    def read_machine(self) -> Machine:
        """Return the topology of the machine as this process sees it."""
        ...


class CudaHardware:
    """`Hardware` that uses the CUDA driver and the Linux kernel's sysfs."""

    def open(self, ordinal: int) -> tuple[Device, Any]:
        """Open the GPU with number `ordinal` in this process; return it and its `GpuKernels`.

        The caller closes the GPU.

        Raises
        ------
        TransportError
            If the driver or the GPU is missing, or the driver failed.
        """
        from r2ccl.kernels.cuda.launch import Launcher  # takes 18 ms

        device = CudaDevice(ordinal)
        return device, Launcher(device)

    def open_peer(self, bus_id: str) -> Device | None:
        """Open and return the GPU at PCI bus ID `bus_id`; the caller closes it.

        Return None if this process does not see the GPU. Raise the same errors as `open`.
        """
        ordinal = ordinal_of(bus_id)
        return None if ordinal is None else CudaDevice(ordinal)

    def read_machine(self) -> Machine:
        """Return the topology of the machine as this process sees it."""
        # These imports take 8 ms, and not every communicator needs them.
        from r2ccl.topology.gpus import find_gpus
        from r2ccl.topology.sysfs import read_machine

        return read_machine(find_gpus())


__all__ = ["CudaHardware", "Hardware"]
