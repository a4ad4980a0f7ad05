"""Numbering of GPUs: search for the ordinal of the GPU that has a given PCI bus ID.

The bus ID of a GPU is the same in all processes. Its ordinal can differ from process to process,
because CUDA_VISIBLE_DEVICES and MIG decide which GPUs have an ordinal. Functions of this module
create no CUDA context. Invariant: bus IDs are in the notation of the Linux kernel, which
`r2ccl.topology` uses too.
"""

from __future__ import annotations

from typing import Any

from r2ccl.device.bindings import Cuda

#: Buffer size for a bus ID: 12 characters and NUL, or more if the domain exceeds four digits.
_ROOM = 32


def bus_id_of(cuda: Cuda, device: Any) -> str:
    """Return the PCI bus ID of a ``CUdevice``, such as ``0000:1b:00.0``."""
    told = bytes(cuda.call("cuDeviceGetPCIBusId", _ROOM, device)).partition(b"\0")[0].decode()
    domain, _, rest = told.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def ordinal_of(bus_id: str) -> int | None:
    """Return the ordinal, in this process, of the GPU whose PCI bus ID is `bus_id`.

    Parameters
    ----------
    bus_id : str
        PCI bus ID in the Linux kernel's notation, such as ``0000:1b:00.0``.

    Returns
    -------
    int or None
        The ordinal; in MIG mode, the ordinal of the instance that this process sees. None if the
        GPU is not visible to this process.

    Raises
    ------
    TransportError
        If the bindings, the driver or a GPU are missing (status ``NO_CUDA``), or if the driver
        cannot be initialized (status: the driver's name of the error).

    Notes
    -----
    The function compares the bus IDs of all visible GPUs. ``cuDeviceGetByPCIBusId`` is not used,
    because its result for a GPU that is not visible is not documented. *Cost*: a few µs, once the
    driver is initialized.
    """
    cuda = Cuda()
    for ordinal in range(int(cuda.call("cuDeviceGetCount"))):
        if bus_id_of(cuda, cuda.call("cuDeviceGet", ordinal)) == bus_id:
            return ordinal
    return None


__all__ = ["bus_id_of", "ordinal_of"]
