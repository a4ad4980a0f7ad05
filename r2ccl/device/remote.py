"""Orders NIC writes to a GPU's memory before GPU work that reads the written data.

On a GPU that keeps the order, work sees all NIC writes that completed before the work was enqueued.
On other GPUs, the host must flush the writes after polling the completion and before enqueuing the
work. On some platforms a stream can flush too (CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES), for the later
work on that stream; this library does not use such flushes. If NICs reach a GPU over two
interconnects (PCIe and a link to the processor), the driver guarantees the order only within one
interconnect, so all NICs must use the same one.

Invariant: if a flush is necessary and the driver does not support it, an error is raised.

References
----------
CUDA driver API 13, cuFlushGPUDirectRDMAWrites, CUGPUDirectRDMAWritesOrdering,
CUflushGPUDirectRDMAWritesOptions. The numbers below are from cuda.h.
"""

from __future__ import annotations

from typing import Any

from r2ccl.device.bindings import Cuda
from r2ccl.device.context import PrimaryContext
from r2ccl.errors import TransportError

#: Values of CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ and CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_: the GPUs
#: that see writes in order without a flush, or after one. A wider scope has a greater value.
_OWNER, _ALL_DEVICES = 100, 200
#: CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: cuFlushGPUDirectRDMAWrites is supported.
_BY_HOST = 1


class RemoteWrites:
    """Ordering and flush of NIC writes to the memory of one GPU.

    Parameters
    ----------
    cuda : Cuda
    device : CUdevice
    name : str
        Name of the GPU in messages.
    """

    def __init__(self, cuda: Cuda, device: Any, name: str) -> None:
        #: True if other GPUs of the process read the written memory too.
        self._are_for_all = False
        self._cuda = cuda
        self._name = name
        self._ordering = cuda.device_attribute("GPU_DIRECT_RDMA_WRITES_ORDERING", device)
        options = cuda.device_attribute("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", device)
        self._can_flush = bool(options & _BY_HOST)

    @property
    def are_reordered(self) -> bool:
        """True if GPU work may miss NIC writes without a flush."""
        return self._ordering < (_ALL_DEVICES if self._are_for_all else _OWNER)

    def share(self) -> None:
        """Make `are_reordered` and `flush` consider all GPUs of the process from now on.

        Call this method if other GPUs may read the memory too.

        Raises
        ------
        TransportError
            If other GPUs may miss writes and the driver does not support a flush (status
            ``NO_FLUSH``).
        """
        if self._ordering < _ALL_DEVICES and not self._can_flush:
            raise TransportError(
                f"other GPUs may miss NIC writes to the memory of {self._name}, and its driver "
                "supports no flush",
                status="NO_FLUSH",
            )
        self._are_for_all = True

    def flush(self, context: PrimaryContext) -> None:
        """Make completed NIC writes visible to GPU work that is enqueued later.

        Do nothing if the GPU keeps the order.

        Parameters
        ----------
        context : PrimaryContext
            Context of the GPU.

        Raises
        ------
        TransportError
            If a flush is needed and the driver does not support it (status ``NO_FLUSH``) or fails.
        """
        if not self.are_reordered:
            return
        if not self._can_flush:
            raise TransportError(
                f"{self._name} reorders NIC writes to its memory, and its driver supports no "
                "flush: copy the arrays to the host, or set R2CC_HCA=none, which sends all data "
                "over TCP",
                status="NO_FLUSH",
            )
        api = self._cuda.api
        scopes = api.CUflushGPUDirectRDMAWritesScope
        context.call(
            "cuFlushGPUDirectRDMAWrites",
            api.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
            scopes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
            if self._are_for_all
            else scopes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
        )


__all__ = ["RemoteWrites"]
