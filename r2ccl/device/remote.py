"""Ordering of NIC writes to a GPU's memory with the GPU's work.

On a GPU that keeps the order, work sees the NIC writes from before it was enqueued. On others it
does so after a flush, which the host requests between the completion and the work. Streams of
some platforms flush too (CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES), each for what comes after it there;
that is not used. Where NICs reach one GPU on two paths (PCIe beside a link to the processor), the
driver speaks of each alone: all must take the same.

Invariant: a flush that the driver cannot do raises; it is never skipped silently.

References
----------
CUDA driver API 13, cuFlushGPUDirectRDMAWrites, CUGPUDirectRDMAWritesOrdering,
CUflushGPUDirectRDMAWritesOptions. The numbers below are cuda.h's.
"""

from __future__ import annotations

from typing import Any

from r2ccl.device.bindings import Cuda
from r2ccl.device.context import PrimaryContext
from r2ccl.errors import TransportError

#: CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ and CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_: who sees writes in
#: order by itself, or after a flush. A wider scope has a greater number.
_OWNER, _ALL_DEVICES = 100, 200
#: CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: cuFlushGPUDirectRDMAWrites can be called.
_BY_HOST = 1


class RemoteWrites:
    """Writes of NICs to the memory of one GPU.

    Parameters
    ----------
    cuda : Cuda
    device : CUdevice
    name : str
        The GPU, for messages.
    """

    def __init__(self, cuda: Cuda, device: Any, name: str) -> None:
        #: Whether other GPUs of the process read what is written.
        self._are_for_all = False
        self._cuda = cuda
        self._name = name
        self._ordering = cuda.device_attribute("GPU_DIRECT_RDMA_WRITES_ORDERING", device)
        options = cuda.device_attribute("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", device)
        self._can_flush = bool(options & _BY_HOST)

    @property
    def are_reordered(self) -> bool:
        """True if readers may miss writes without a flush."""
        return self._ordering < (_ALL_DEVICES if self._are_for_all else _OWNER)

    def share(self) -> None:
        """Have other GPUs of the process see them too.

        Raises
        ------
        TransportError
            Status ``NO_FLUSH``: they would miss some, and the host cannot flush them.
        """
        if self._ordering < _ALL_DEVICES and not self._can_flush:
            raise TransportError(
                f"other GPUs see what NICs write to the memory of {self._name} out of order, and "
                "its driver has no flush of that: have NICs write elsewhere",
                status="NO_FLUSH",
            )
        self._are_for_all = True

    def flush(self, context: PrimaryContext) -> None:
        """Wait until who reads them sees them; nothing where they are in order.

        Parameters
        ----------
        context : PrimaryContext
            Of the GPU.

        Raises
        ------
        TransportError
            Status ``NO_FLUSH``: they are not, and the host cannot flush them.
        """
        if not self.are_reordered:
            return
        if not self._can_flush:
            raise TransportError(
                f"{self._name} reorders what NICs write to its memory, and its driver has no flush "
                "of them: have data pass through host memory, as with R2CC_HCA=none",
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
