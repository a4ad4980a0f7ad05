"""Device memory: how a NIC reaches a GPU's memory, and what is done where it cannot.

Theory of operation
-------------------
Three ways, best first; the first that works on *every* NIC is taken, because a slice must be able
to change its rail without changing its place:

=========  =====================================================================================
dmabuf     the allocation is exported as a dma-buf, whose descriptor every NIC registers
peermem    the device pointer is registered like host memory; the module nvidia_peermem resolves it
staging    windows pass through pinned host memory instead (`r2ccl.gpu.staged`)
=========  =====================================================================================

`DeviceMemoryRoute` says which was taken and why those before it were not.

*Whole allocations.* Memory pools hand out pieces of 512 bytes, and BAR space is scarce, so the
allocation around a pointer is registered and found again by its base. Memory of the stream-ordered
pool and managed memory move underneath a registration: they are staged.

*Alignment and addresses.* A descriptor is exported for whole host pages around the allocation (CUDA
demands it); the region begins where the allocation does. pyverbs registers a dma-buf with an I/O
virtual address equal to its offset, so the NIC addresses byte ``p`` as ``p - first page``:
``iova_base`` is minus the first page. The descriptor is closed as soon as the NICs have it.

*Reallocation.* No Python object stands for an allocation of a pool. CUDA's buffer id does: it is
compared at each lookup (`RegistrationCache.find`). The caller keeps the memory while work is under
way. *Ordering.* SYNC_MEMOPS is set first: CUDA then finishes a copy before the call that made it
returns, and a NIC never reads what has not arrived yet.

pyverbs is imported where it is first used, so that this module can be imported without it; CUDA is
behind `r2ccl.transport.verbs.cuda`. Invariants: no descriptor outlives `DeviceMemory.register`;
whatever changes or exports an allocation runs with its context current on the calling thread.
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

#: Statuses that say "no room": ending registrations helps, another way would not.
_NO_ROOM = ("ENOMEM", "ENOSPC", "CUDA_ERROR_OUT_OF_MEMORY")
#: Status of a refusal that stands for as long as the allocation does.
_NO_DIRECT_WAY = "NO_DIRECT_WAY"


@runtime_checkable
class DmabufRegistrar(Protocol):
    """A `Registrar` whose NIC takes dma-buf descriptors as well."""

    @property
    def name(self) -> str:
        """The NIC."""
        ...

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """See `Registrar.register`."""
        ...

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> MemoryRegion:
        """Register `nbytes` bytes of a dma-buf from `offset`; the NIC addresses them from there."""
        ...


class DeviceMemoryRoute(msgspec.Struct, frozen=True):
    """Which way to a device allocation was taken.

    Parameters
    ----------
    method : str
        ``"dmabuf"``, ``"peermem"`` or ``"staging"``.
    reasons : tuple of str
        Why each way before it was not.
    """

    method: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.method + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


class DeviceRegion(msgspec.Struct):
    """A `MemoryRegion` of device memory and the way it was made."""

    lkey: int
    rkey: int
    iova_base: int
    route: DeviceMemoryRoute
    region: MemoryRegion

    def close(self) -> None:
        """Deregister."""
        self.region.close()


class VerbsRegion(msgspec.Struct):
    """A `MemoryRegion` of pyverbs."""

    lkey: int
    rkey: int
    iova_base: int
    mr: Any

    def close(self) -> None:
        """Deregister."""
        self.mr.close()


class PdRegistrar:
    """`DmabufRegistrar` over a protection domain of pyverbs.

    Parameters
    ----------
    name : str
        The NIC, for messages.
    pd : pyverbs.pd.PD
        Borrowed: regions must be closed before it.
    access : int
        ``ibv_access_flags`` of every region.
    """

    def __init__(self, name: str, pd: Any, access: int) -> None:
        self._name = name
        self._pd = pd
        self._access = access

    @property
    def name(self) -> str:
        """The NIC."""
        return self._name

    def register(self, address: int, nbytes: int) -> VerbsRegion:
        """Register host memory, or a device pointer that nvidia_peermem resolves."""
        mr = _pyverbs_mr().MR(self._pd, nbytes, self._access, address=address)
        return VerbsRegion(mr.lkey, mr.rkey, 0, mr)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> VerbsRegion:
        """Register `nbytes` bytes of a dma-buf from `offset`, which is their I/O address too."""
        mr = _pyverbs_mr().DmaBufMR(self._pd, nbytes, self._access, dmabuf=fd, offset=offset)
        return VerbsRegion(mr.lkey, mr.rkey, 0, mr)


class DeviceMemory:
    """`Memory` on CUDA devices, for a `RegistrationCache` of its own.

    Parameters
    ----------
    driver : CudaDriver
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._page_nbytes = os.sysconf("SC_PAGE_SIZE")
        #: Base to (buffer id, refusal) of allocations no way leads to.
        self._refused: dict[int, tuple[int, str]] = {}

    def locate(self, address: int, nbytes: int, owner: Any) -> Allocation:
        """Find the CUDA allocation around `address`; `owner` is not asked, its buffer id is.

        Raises
        ------
        InvalidArgument
            The bytes asked for do not lie in one allocation.
        TransportError
            The memory moves, or the driver does not know it.
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
        """Return the buffer id of what is allocated at `address` now; -1: nothing."""
        try:
            return self._driver.buffer_id(address)
        except TransportError as exc:
            if exc.status == "CUDA_ERROR_INVALID_VALUE":  # not, or no longer, an allocation
                return -1
            raise

    def register(
        self, registrars: Sequence[Registrar], allocation: Allocation
    ) -> tuple[MemoryRegion, ...]:
        """Register on every NIC the best way that works on all of them.

        Raises
        ------
        TransportError
            No way works: the message has every reason. Status ENOMEM: there is no room (BAR space,
            locked memory), and ending other registrations may help.
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
        """Return the regions and what is added to an address on the wire."""
        able = [each for each in registrars if isinstance(each, DmabufRegistrar)]
        if len(able) < len(registrars):
            names = ", ".join(each.name for each in registrars if each not in able)
            raise TransportError(f"{names} takes no dma-buf", status="EOPNOTSUPP")
        if not self._driver.is_dmabuf_supported(allocation.base):
            raise TransportError(
                "the GPU's driver exports none; the open kernel modules do", status="EOPNOTSUPP"
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
    """A `Registrar` that registers a dma-buf in place of the address it is given."""

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
    """Register the device pointer; without nvidia_peermem the kernel answers EFAULT."""
    try:
        return register_everywhere(registrars, allocation.base, allocation.nbytes), 0
    except TransportError as exc:
        if exc.status != "EFAULT":
            raise
        raise TransportError(
            "the kernel does not know device pointers: `modprobe nvidia_peermem`", status="EFAULT"
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
