"""Maps PCI bus ids, the same in every process, to ordinals, which are not.

CUDA_VISIBLE_DEVICES and MIG decide which GPUs have an ordinal. Makes no contexts. Invariant: bus
ids are written as the kernel and `r2ccl.topology` write them.
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
    """Return the ordinal of a GPU in this process.

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
