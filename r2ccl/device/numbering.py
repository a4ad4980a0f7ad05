"""Which GPU is which: a PCI bus id is the same in every process, a number is not.

CUDA_VISIBLE_DEVICES and MIG decide which GPUs a process numbers. Must not make contexts. Invariant:
bus ids are spelt as the kernel does, which is how `r2ccl.topology` has them.
"""

from __future__ import annotations

from typing import Any

from r2ccl.device.bindings import Cuda

#: More than a bus id takes: 13 characters, more where the domain has over four digits.
_ROOM = 32


def bus_id_of(cuda: Cuda, device: Any) -> str:
    """Return the PCI bus id of a ``CUdevice``: ``0000:1b:00.0``."""
    told = bytes(cuda.call("cuDeviceGetPCIBusId", _ROOM, device)).partition(b"\0")[0].decode()
    domain, _, rest = told.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def ordinal_of(bus_id: str) -> int | None:
    """Return the number that a GPU has in this process.

    Parameters
    ----------
    bus_id : str
        As the kernel spells it.

    Returns
    -------
    int or None
        None: the process does not see it. In MIG mode that of the instance which it sees.

    Raises
    ------
    TransportError
        Status ``NO_CUDA``: the bindings, the driver or a GPU are missing.

    Notes
    -----
    All are asked: what the driver's own search answers for a GPU that is not visible is not
    documented. *Cost*: some µs, once the driver is initialised.
    """
    cuda = Cuda()
    for ordinal in range(int(cuda.call("cuDeviceGetCount"))):
        if bus_id_of(cuda, cuda.call("cuDeviceGet", ordinal)) == bus_id:
            return ordinal
    return None


__all__ = ["bus_id_of", "ordinal_of"]
