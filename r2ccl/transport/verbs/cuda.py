"""The few calls of the CUDA driver that registering device memory takes.

`CudaDriver` is what `r2ccl.transport.verbs.dmabuf` sees, `BindingsDriver` makes it of the driver's
calls. Sees no NIC and no cache; memory and streams to run collectives on are `r2ccl.device`'s.

Invariant: a failed call raises `TransportError` whose ``status`` is the driver's own name for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from r2ccl.device.bindings import Cuda


class CudaDriver(Protocol):
    """What is asked of the CUDA driver; a failed call raises `TransportError` with its status."""

    def current(self, address: int) -> AbstractContextManager[None]:
        """Make the context of the allocation at `address` current on this thread, for a while."""
        ...

    def is_pooled(self, address: int) -> bool:
        """Whether the memory comes from the stream-ordered pool (``cudaMallocAsync``)."""
        ...

    def is_managed(self, address: int) -> bool:
        """Whether the memory migrates (``cudaMallocManaged``)."""
        ...

    def is_rdma_capable(self, address: int) -> bool:
        """Pointer attribute IS_GPU_DIRECT_RDMA_CAPABLE."""
        ...

    def is_dmabuf_supported(self, address: int) -> bool:
        """Attribute DMA_BUF_SUPPORTED of the device the memory is on."""
        ...

    def address_range(self, address: int) -> tuple[int, int]:
        """Return (base, bytes) of the allocation at `address`."""
        ...

    def buffer_id(self, address: int) -> int:
        """Pointer attribute BUFFER_ID: unique in the process, never used again."""
        ...

    def set_sync_memops(self, address: int) -> None:
        """Have synchronous memory operations on the allocation be synchronous."""
        ...

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        """Return a new dma-buf descriptor of a page-aligned range."""
        ...


class BindingsDriver:
    """`CudaDriver` over `r2ccl.device.bindings`.

    Raises
    ------
    TransportError
        The bindings or the driver are missing, or there is no GPU: says which.
    """

    def __init__(self) -> None:
        self._cuda = Cuda()
        self._call = self._cuda.call
        self._pointer = self._cuda.pointer_attribute

    @contextmanager
    def current(self, address: int) -> Iterator[None]:
        """See `CudaDriver`; memory without a context of its own gets its device's primary one."""
        context = self._pointer("CONTEXT", address)
        device = None
        if not int(context):
            device = self._call("cuDeviceGet", self._pointer("DEVICE_ORDINAL", address))
            context = self._call("cuDevicePrimaryCtxRetain", device)
        try:
            self._call("cuCtxPushCurrent", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent")
        finally:
            if device is not None:
                self._call("cuDevicePrimaryCtxRelease", device)

    def is_pooled(self, address: int) -> bool:
        """See `CudaDriver`."""
        return bool(int(self._pointer("MEMPOOL_HANDLE", address)))

    def is_managed(self, address: int) -> bool:
        """See `CudaDriver`."""
        return bool(self._pointer("IS_MANAGED", address))

    def is_rdma_capable(self, address: int) -> bool:
        """See `CudaDriver`."""
        return bool(self._pointer("IS_GPU_DIRECT_RDMA_CAPABLE", address))

    def is_dmabuf_supported(self, address: int) -> bool:
        """See `CudaDriver`."""
        device = self._call("cuDeviceGet", self._pointer("DEVICE_ORDINAL", address))
        return bool(self._cuda.device_attribute("DMA_BUF_SUPPORTED", device))

    def address_range(self, address: int) -> tuple[int, int]:
        """See `CudaDriver`."""
        base, nbytes = self._call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def buffer_id(self, address: int) -> int:
        """See `CudaDriver`."""
        return int(self._pointer("BUFFER_ID", address))

    def set_sync_memops(self, address: int) -> None:
        """See `CudaDriver`."""
        which = self._cuda.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        self._call("cuPointerSetAttribute", True, which, address)

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        """See `CudaDriver`."""
        kind = self._cuda.api.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        return int(self._call("cuMemGetHandleForAddressRange", address, nbytes, kind, 0))


__all__ = ["BindingsDriver", "CudaDriver"]
