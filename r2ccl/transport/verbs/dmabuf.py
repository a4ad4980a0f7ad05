"""Registration of GPU memory with RDMA NICs, by dma-buf or nvidia_peermem.

Theory of operation
-------------------
The first of these methods that works on *every* NIC is used, because a slice must be able to
migrate to another rail without moving in memory:

=========  =====================================================================================
dmabuf     the allocation is exported as a dma-buf, whose descriptor every NIC registers
peermem    the device pointer is registered like host memory; the module nvidia_peermem resolves it
staging    data passes through pinned host memory instead (`r2ccl.gpu.staged`)
=========  =====================================================================================

`DeviceMemoryRoute` holds the method used and why the methods above it in the table failed.

*Whole allocations.* A framework's memory pool cuts an allocation into many pieces, and BAR space is
scarce. So the whole allocation around a pointer is registered, once for all its pieces. Managed
memory migrates, and memory of the stream-ordered pool cannot be registered, so both are staged.

*Alignment and addresses.* CUDA exports only whole host pages, so the dma-buf covers the pages that
the allocation touches; the region begins at the allocation's base. pyverbs registers a dma-buf with
an I/O virtual address equal to the region's offset in the dma-buf. So the NIC's address of the byte
at ``p`` is ``p`` minus the address of the first page, and ``iova_base`` is the negative of that
address. The descriptor is closed as soon as the NICs have registered it.

*Reallocation.* No Python object owns an allocation, so nothing reports that it was freed. Each
lookup therefore compares CUDA's buffer id, which is never reused (`RegistrationCache.find`). The
caller must not free the memory while work is in flight.

*Ordering.* SYNC_MEMOPS is set before registration: CUDA then completes a synchronous copy before
its call returns, so a NIC never reads data that the copy has not written yet.

pyverbs is imported at first use, so this module can be imported without it. Invariants: no
descriptor outlives `DeviceMemory.register`; calls that change or export an allocation run with the
allocation's context current on the calling thread.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.transport.verbs.cuda import CudaDriver
from r2ccl.transport.verbs.lifetime import Allocation
from r2ccl.transport.verbs.regions import MemoryRegion, Registrar, register_everywhere

#: Statuses of a lack of space: ending other registrations may help, another method would not.
_NO_ROOM = ("ENOMEM", "ENOSPC", "CUDA_ERROR_OUT_OF_MEMORY")
#: Status of a refusal that holds for the life of the allocation.
_NO_DIRECT_WAY = "NO_DIRECT_WAY"


@runtime_checkable
class DmabufRegistrar(Protocol):
    """NIC that can register host memory, like a `Registrar`, and dma-bufs."""

    @property
    def name(self) -> str:
        """Name of the NIC, for messages."""
        ...

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Register `nbytes` bytes at `address`, as `Registrar.register` does."""
        ...

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> MemoryRegion:
        """Register `nbytes` bytes of dma-buf `fd` from `offset` on.

        The NIC's I/O address of the first byte is `offset`. Raise the same errors as `register`.
        """
        ...


class DeviceMemoryRoute(msgspec.Struct, frozen=True):
    """Method by which NICs access a device allocation.

    Parameters
    ----------
    method : str
        ``"dmabuf"`` or ``"peermem"``; ``"staging"`` if the NICs cannot access the allocation.
    reasons : tuple of str
        Why the methods that are tried before this one failed.
    """

    method: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.method + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


class DeviceRegion(msgspec.Struct):
    """Registered device memory, with the method of its registration (implements `MemoryRegion`)."""

    lkey: int
    rkey: int
    iova_base: int
    route: DeviceMemoryRoute
    region: MemoryRegion

    def close(self) -> None:
        """Deregister the memory."""
        self.region.close()


class VerbsRegion(msgspec.Struct):
    """Registered memory, as a memory region ``mr`` of pyverbs (implements `MemoryRegion`)."""

    lkey: int
    rkey: int
    iova_base: int
    mr: Any

    def close(self) -> None:
        """Deregister the memory."""
        self.mr.close()


class PdRegistrar:
    """NIC that registers memory in a protection domain of pyverbs.

    Implements `DmabufRegistrar`.

    Parameters
    ----------
    name : str
        Name of the NIC, for messages.
    pd : pyverbs.pd.PD
        Borrowed: its regions must be closed before it.
    access : int
        ``ibv_access_flags`` of every region.
    """

    def __init__(self, name: str, pd: Any, access: int) -> None:
        self._name = name
        self._pd = pd
        self._access = access

    @property
    def name(self) -> str:
        """Name of the NIC, for messages."""
        return self._name

    def register(self, address: int, nbytes: int) -> VerbsRegion:
        """Register host memory, or a device pointer that nvidia_peermem resolves."""
        mr = _pyverbs_mr().MR(self._pd, nbytes, self._access, address=address)
        return VerbsRegion(mr.lkey, mr.rkey, 0, mr)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> VerbsRegion:
        """Implement `DmabufRegistrar.register_dmabuf`."""
        mr = _pyverbs_mr().DmaBufMR(self._pd, nbytes, self._access, dmabuf=fd, offset=offset)
        return VerbsRegion(mr.lkey, mr.rkey, 0, mr)


class DeviceMemory:
    """Memory of CUDA devices (implements `Memory`).

    It needs a `RegistrationCache` of its own, separate from that of host memory.

    Parameters
    ----------
    driver : CudaDriver
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._page_nbytes = os.sysconf("SC_PAGE_SIZE")
        #: Base address to (buffer id, reason) of allocations that no method can register.
        self._refused: dict[int, tuple[int, str]] = {}

    def locate(self, address: int, nbytes: int, owner: Any) -> Allocation:
        """Return the CUDA allocation that contains `nbytes` bytes at `address`.

        Its identity is CUDA's buffer id; `owner` is not used.

        Raises
        ------
        InvalidArgument
            If the `nbytes` bytes do not lie in one allocation.
        TransportError
            If the memory is managed or from the stream-ordered pool, or if the driver does not know
            it.
        """
        with self._driver.current(address):
            if self._driver.is_managed(address):
                raise _no_direct_way("managed memory migrates")
            if self._driver.is_pooled(address):
                raise _no_direct_way("memory of the stream-ordered pool cannot be registered")
            base, size = self._driver.address_range(address)
            identity = self._driver.buffer_id(base)
        allocation = Allocation(base, size, None, identity)
        if not allocation.covers(address, nbytes):
            raise InvalidArgument(
                f"{nbytes} bytes at {address:#x} reach beyond their allocation of {size} bytes at "
                f"{base:#x}: pass memory of one allocation"
            )
        return allocation

    def identity(self, address: int) -> int:
        """Return the buffer id of the current allocation at `address`; -1 if there is none.

        Raises
        ------
        TransportError
            If the driver fails for another reason.
        """
        try:
            return self._driver.buffer_id(address)
        except TransportError as exc:
            if exc.status == "CUDA_ERROR_INVALID_VALUE":  # no allocation, or freed
                return -1
            raise

    def register(
        self, registrars: Sequence[Registrar], allocation: Allocation
    ) -> tuple[MemoryRegion, ...]:
        """Register `allocation` with every NIC, by the first method that works on all of them.

        The methods are dma-buf and nvidia_peermem, in this order.

        Raises
        ------
        TransportError
            If no method works (the message gives the reason for each), the allocation is not
            GPUDirect RDMA capable, or SYNC_MEMOPS cannot be set; later calls for the allocation
            raise the same error. Status ENOMEM if BAR space or locked memory is used up: ending
            other registrations may help.
        """
        known = self._refused.get(allocation.base)
        if known is not None and known[0] == allocation.identity:
            raise _no_direct_way(known[1])
        with self._driver.current(allocation.base):
            try:
                return self._register(registrars, allocation)
            except TransportError as exc:
                if exc.status == _NO_DIRECT_WAY:
                    self._refused[allocation.base] = (allocation.identity, str(exc))
                raise

    def _register(
        self, registrars: Sequence[Registrar], allocation: Allocation
    ) -> tuple[MemoryRegion, ...]:
        if not self._driver.is_rdma_capable(allocation.base):
            raise _no_direct_way("the allocation is not GPUDirect RDMA capable")
        try:
            self._driver.set_sync_memops(allocation.base)
        except TransportError as exc:
            raise _no_direct_way(f"SYNC_MEMOPS cannot be set: {exc}") from exc
        reasons: list[str] = []
        for method, attempt in (("dmabuf", self._by_dmabuf), ("peermem", _by_pointer)):
            try:
                regions, iova_base = attempt(registrars, allocation)
            except TransportError as exc:
                if exc.status in _NO_ROOM:
                    raise TransportError(f"{method}: {exc}", status="ENOMEM") from exc
                reasons.append(f"{method}: {exc}")
                continue
            route = DeviceMemoryRoute(method, tuple(reasons))
            return tuple(
                DeviceRegion(each.lkey, each.rkey, iova_base, route, each) for each in regions
            )
        raise _no_direct_way("; ".join(reasons))

    def _by_dmabuf(
        self, registrars: Sequence[Registrar], allocation: Allocation
    ) -> tuple[tuple[MemoryRegion, ...], int]:
        """Register `allocation` as a dma-buf; return the regions and their ``iova_base``."""
        able = [each for each in registrars if isinstance(each, DmabufRegistrar)]
        if len(able) < len(registrars):
            names = ", ".join(each.name for each in registrars if each not in able)
            raise TransportError(f"{names} cannot register a dma-buf", status="EOPNOTSUPP")
        if not self._driver.is_dmabuf_supported(allocation.base):
            raise TransportError(
                "the GPU's driver cannot export a dma-buf: install NVIDIA's open kernel modules",
                status="EOPNOTSUPP",
            )
        page = self._page_nbytes
        first = allocation.base // page * page
        end = -(-(allocation.base + allocation.nbytes) // page) * page
        fd = self._driver.export_dmabuf(first, end - first)
        try:
            takers = [_DescriptorTaker(each, fd, allocation.base - first) for each in able]
            return register_everywhere(takers, allocation.base, allocation.nbytes), -first
        finally:
            os.close(fd)


class _DescriptorTaker:
    """Registrar that registers a part of a dma-buf, and ignores the address given to `register`."""

    def __init__(self, nic: DmabufRegistrar, fd: int, offset: int) -> None:
        self.name = nic.name
        self._nic = nic
        self._fd = fd
        self._offset = offset

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        return self._nic.register_dmabuf(self._fd, self._offset, nbytes)


def _by_pointer(
    registrars: Sequence[Registrar], allocation: Allocation
) -> tuple[tuple[MemoryRegion, ...], int]:
    """Register `allocation` by its device pointer; return the regions and their ``iova_base``, 0.

    If nvidia_peermem is not loaded, the kernel returns EFAULT.
    """
    try:
        return register_everywhere(registrars, allocation.base, allocation.nbytes), 0
    except TransportError as exc:
        if exc.status != "EFAULT":
            raise
        raise TransportError(
            "the kernel cannot resolve device pointers: run `modprobe nvidia_peermem`",
            status="EFAULT",
        ) from exc


def _no_direct_way(reason: str) -> TransportError:
    return TransportError(reason, status=_NO_DIRECT_WAY)


def _pyverbs_mr() -> Any:
    return importlib.import_module("pyverbs.mr")


__all__ = [
    "DeviceMemory",
    "DeviceMemoryRoute",
    "DeviceRegion",
    "DmabufRegistrar",
    "PdRegistrar",
    "VerbsRegion",
]
