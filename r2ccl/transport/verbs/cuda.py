"""CUDA driver calls that are needed to register device memory with NICs.

`r2ccl.transport.verbs.dmabuf` uses the interface `CudaDriver`; `BindingsDriver` implements it with
the driver's Python bindings. Memory and streams for collectives are in `r2ccl.device`.

Invariant: a failed call raises `TransportError`. Its ``status`` is CUDA's name of the error, or
``NO_CUDA`` if the driver lacks the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from r2ccl.device.bindings import Cuda


class CudaDriver(Protocol):
    """Interface of the CUDA driver; a failed call raises `TransportError`."""

    def current(self, address: int) -> AbstractContextManager[None]:
        """Return a context manager that makes a CUDA context current on the calling thread.

        The context is that of the allocation at `address`, or the primary context of its GPU if the
        allocation belongs to no context.
        """
        ...

    def is_pooled(self, address: int) -> bool:
        """Return True if the memory is from the stream-ordered pool (``cudaMallocAsync``)."""
        ...

    def is_managed(self, address: int) -> bool:
        """Return True if the memory is managed (``cudaMallocManaged``) and so can migrate."""
        ...

    def is_rdma_capable(self, address: int) -> bool:
        """Return True if NICs can access the memory (attribute IS_GPU_DIRECT_RDMA_CAPABLE)."""
        ...

    def is_dmabuf_supported(self, address: int) -> bool:
        """Return True if the GPU that has the memory at `address` can export it as a dma-buf.

        This is the attribute DMA_BUF_SUPPORTED of the GPU.
        """
        ...

    def address_range(self, address: int) -> tuple[int, int]:
        """Return the base address and the size in bytes of the allocation at `address`."""
        ...

    def buffer_id(self, address: int) -> int:
        """Return the ID of the allocation at `address`, never reused (attribute BUFFER_ID)."""
        ...

    def set_sync_memops(self, address: int) -> None:
        """Set SYNC_MEMOPS: synchronous copies of the memory then finish before the call returns."""
        ...

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        """Export a page-aligned range as a dma-buf; return a descriptor, which the caller owns."""
        ...


class BindingsDriver:
    """`CudaDriver` over `r2ccl.device.bindings`.

    Raises
    ------
    TransportError
        If the bindings, the driver or a GPU are missing, or the driver cannot be initialized; the
        message gives the reason.
    """

    def __init__(self) -> None:
        self._cuda = Cuda()
        self._call = self._cuda.call
        self._pointer = self._cuda.pointer_attribute

    @contextmanager
    def current(self, address: int) -> Iterator[None]:
        """Implement `CudaDriver.current`."""
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
        """Implement `CudaDriver.is_pooled`."""
        return bool(int(self._pointer("MEMPOOL_HANDLE", address)))

    def is_managed(self, address: int) -> bool:
        """Implement `CudaDriver.is_managed`."""
        return bool(self._pointer("IS_MANAGED", address))

    def is_rdma_capable(self, address: int) -> bool:
        """Implement `CudaDriver.is_rdma_capable`."""
        return bool(self._pointer("IS_GPU_DIRECT_RDMA_CAPABLE", address))

    def is_dmabuf_supported(self, address: int) -> bool:
        """Implement `CudaDriver.is_dmabuf_supported`."""
        device = self._call("cuDeviceGet", self._pointer("DEVICE_ORDINAL", address))
        return bool(self._cuda.device_attribute("DMA_BUF_SUPPORTED", device))

    def address_range(self, address: int) -> tuple[int, int]:
        """Implement `CudaDriver.address_range`."""
        base, nbytes = self._call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def buffer_id(self, address: int) -> int:
        """Implement `CudaDriver.buffer_id`."""
        return int(self._pointer("BUFFER_ID", address))

    def set_sync_memops(self, address: int) -> None:
        """Implement `CudaDriver.set_sync_memops`."""
        which = self._cuda.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        self._call("cuPointerSetAttribute", True, which, address)

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        """Implement `CudaDriver.export_dmabuf`."""
        kind = self._cuda.api.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        return int(self._call("cuMemGetHandleForAddressRange", address, nbytes, kind, 0))


__all__ = ["BindingsDriver", "CudaDriver"]
