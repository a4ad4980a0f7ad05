"""Tests of NIC access to GPU memory: dma-buf export and registration with RDMA ports.

The tests use the code of the transport (`r2ccl.transport.verbs.dmabuf`). They run in the process of
`r2ccl.cli.gpuprobe`; this module must not be imported elsewhere. Invariant: no dma-buf descriptor
and no registration outlives the call that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from r2ccl.errors import InvalidArgument, TransportError, describe_os_error
from r2ccl.topology.hcas import GidFinder
from r2ccl.transport.verbs.cuda import CudaDriver
from r2ccl.transport.verbs.dmabuf import DeviceMemory, DeviceMemoryRoute, DeviceRegion
from r2ccl.transport.verbs.regions import MemoryRegion, Registrar, close_all


def way_of(driver: CudaDriver, registrars: Sequence[Registrar], address: int) -> DeviceMemoryRoute:
    """Register the allocation at `address` with all NICs, deregister it, and return the method.

    Returns
    -------
    DeviceMemoryRoute
        Method by which the NICs registered the memory; ``staging``, with the reason, if one of the
        NICs could not.
    """
    memory = DeviceMemory(driver)
    try:
        regions = memory.register(registrars, memory.locate(address, 1, None))
    except TransportError as exc:
        return DeviceMemoryRoute("staging", (str(exc),))
    close_all(registrars, regions)
    first = regions[0]
    assert isinstance(first, DeviceRegion)
    return first.route


def export_error(driver: CudaDriver, address: int) -> str:
    """Return the error of exporting the allocation at `address` as a dma-buf; empty if none.

    The export is tried even if the driver reports that it is not supported.
    """
    insistent: Any = _Insistent(driver)
    route = way_of(insistent, [_Willing()], address)
    return "" if route.method == "dmabuf" else route.reasons[0].removeprefix("dmabuf: ")


def is_rdma_capable(driver: CudaDriver, address: int) -> bool:
    """Return True if the driver reports the allocation at `address` as GPUDirect RDMA capable."""
    with driver.current(address):
        return driver.is_rdma_capable(address)


def open_nics(stack: ExitStack, labels: Sequence[str]) -> dict[str, Registrar | str]:
    """Open the RDMA ports in `labels`, such as ``mlx5_0:1``; `stack` closes them.

    Returns
    -------
    dict of str to Registrar or str
        Registrar of each port by label, or the reason why the port could not be opened.
    """
    from r2ccl.transport.verbs.device import RdmaDevice  # imports pyverbs

    found: dict[str, Registrar | str] = {}
    for label in labels:
        name, _, port = label.rpartition(":")
        try:
            device = RdmaDevice(name, int(port), GidFinder(name, int(port)), fastpath="0")
        except (InvalidArgument, TransportError) as exc:
            found[label] = str(exc)
            continue
        except OSError as exc:
            found[label] = describe_os_error(exc)
            continue
        stack.callback(device.close)
        found[label] = device.registrar
    return found


class _Insistent:
    """`CudaDriver` that reports every GPU and allocation as exportable."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def is_rdma_capable(self, address: int) -> bool:
        return True

    def is_dmabuf_supported(self, address: int) -> bool:
        return True


class _Taken(msgspec.Struct):
    """Fake memory region, which `_Willing` returns."""

    lkey: int = 0
    rkey: int = 0
    iova_base: int = 0

    def close(self) -> None:
        """Do nothing, since nothing was registered."""


class _Willing:
    """Fake NIC that registers any memory, so that no failure comes from a NIC."""

    name = "a NIC that accepts any memory"

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        return _Taken()

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> MemoryRegion:
        return _Taken()


__all__ = ["export_error", "is_rdma_capable", "open_nics", "way_of"]
