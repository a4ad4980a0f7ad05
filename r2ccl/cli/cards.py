"""Facts about the GPUs of a machine, passed between processes as JSON.

`r2ccl.cli.gpufacts` collects the facts, `r2ccl.cli.gpus` interprets them. Invariant: a test that
failed and a test that was not run have different values.
"""

from __future__ import annotations

import msgspec

from r2ccl.topology.gpus import GpuFacts
from r2ccl.transport.verbs.dmabuf import DeviceMemoryRoute


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a GPU that CUDA lists, and the results of the tests run on it.

    ``memory_nbytes`` is the total memory. ``waits_on_memory`` is the attribute of
    `r2ccl.device.Device`, ``has_dmabuf`` is DMA_BUF_SUPPORTED, and ``is_rdma_capable`` is
    IS_GPU_DIRECT_RDMA_CAPABLE of an allocation.

    Each ``_error`` is empty if the test succeeded and None if it was not run: ``open_error`` of
    making a context, ``kernel_error`` of compiling and loading a kernel, ``ipc_error`` of mapping
    an allocation in another process, ``dmabuf_error`` of exporting an allocation. ``nics`` has, for
    each RDMA port, the method by which it registered an allocation; ``route`` is the method by
    which all ports together registered it.
    """

    ordinal: int
    name: str
    bus_id: str
    capability: tuple[int, int]
    nsms: int
    memory_nbytes: int
    has_dmabuf: bool = False
    open_error: str | None = None
    waits_on_memory: bool = False
    kernel_error: str | None = None
    ipc_error: str | None = None
    is_rdma_capable: bool = False
    dmabuf_error: str | None = None
    nics: tuple[tuple[str, DeviceMemoryRoute], ...] = ()
    route: DeviceMemoryRoute | None = None


class CudaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about CUDA and all GPUs of a machine.

    ``pci`` has the bus ids of NVIDIA's display controllers in sysfs. ``module`` describes the
    driver's kernel module; empty if it is not loaded. ``has_peermem`` is true if nvidia_peermem is
    loaded. ``bindings`` is the version of the package cuda-bindings; empty if it is not installed.
    ``driver`` is the CUDA version of libcuda, 12040 for 12.4; 0 without libcuda. ``error`` is the
    message of a failed initialisation and ``status`` its status. ``visible`` is
    CUDA_VISIBLE_DEVICES, None if it is not set.

    ``compile_s`` is the time in seconds to compile a kernel. ``cache`` is the directory of compiled
    kernels, ``cache_error`` the reason why it cannot be written, empty if it can. ``topology`` is
    an argument of `r2ccl.topology.sysfs.read_machine`. ``doing`` names the step in progress when
    the facts were last printed, empty after the last step; ``died`` tells how the process that
    collects the facts failed, empty if it did not.
    """

    pci: tuple[str, ...] = ()
    module: str = ""
    has_peermem: bool = False
    bindings: str = ""
    driver: int = 0
    error: str = ""
    status: str = ""
    visible: str | None = None
    gpus: tuple[Card, ...] = ()
    compile_s: float = 0.0
    cache: str = ""
    cache_error: str = ""
    topology: GpuFacts = GpuFacts()
    doing: str = ""
    died: str = ""


__all__ = ["Card", "CudaFacts"]
