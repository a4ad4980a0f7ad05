"""Facts about the GPUs of a machine, passed between processes as JSON.

`r2ccl.cli.gpufacts` collects the facts, `r2ccl.cli.gpus` interprets them. Invariant: a field that
ends with ``_error`` distinguishes a test that failed from a test that was not run.
"""

from __future__ import annotations

import msgspec

from r2ccl.topology.gpus import GpuFacts
from r2ccl.transport.verbs.dmabuf import DeviceMemoryRoute


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a GPU that CUDA lists, and the results of the tests run on it.

    ``ordinal`` is CUDA's number of the GPU among those that CUDA_VISIBLE_DEVICES leaves visible,
    ``capability`` its compute capability, ``nsms`` its number of streaming multiprocessors, and
    ``memory_nbytes`` its total memory. ``waits_on_memory`` is True if streams of the GPU can wait
    on memory values. ``has_dmabuf`` is the driver's attribute DMA_BUF_SUPPORTED of the GPU, and
    ``is_rdma_capable`` is the attribute IS_GPU_DIRECT_RDMA_CAPABLE of an allocation.

    Each field that ends with ``_error`` is the error message of a test: empty if the test
    succeeded, None if it was not run. The test of ``open_error`` makes a context and an allocation,
    that of ``kernel_error`` loads a kernel, that of ``ipc_error`` maps the allocation in another
    process, and that of ``dmabuf_error`` exports the allocation as a dma-buf. ``nics`` has, for
    each RDMA port tried, its label and the method by which the port registered the allocation.
    ``route`` is the method by which all ports together registered the allocation; None if no port
    was tried. A method is ``staging`` if the allocation could not be registered.
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
    driver's kernel module; empty if it is not loaded. ``has_peermem`` is True if nvidia_peermem, or
    its predecessor nv_peer_mem, is loaded. ``bindings`` is the version of the package
    cuda-bindings; empty if it is not installed. ``driver`` is the CUDA version of libcuda, such as
    12040 for 12.4; 0 if there is no libcuda. If CUDA could not be initialized, ``error`` is the
    message, and ``status`` the driver's name of the error, or NO_CUDA if cuda.bindings, the driver
    or a GPU is missing; otherwise both are empty. ``visible`` is CUDA_VISIBLE_DEVICES, None if it
    is not set. ``rails`` has the labels of the RDMA ports that are rails.

    ``gpus`` are the GPUs that CUDA lists. ``kernel_origin`` is the ``origin`` of the last kernel
    that was loaded (`r2ccl.kernels.cuda.Ptx`), empty if none was. ``topology`` has the facts that
    `r2ccl.topology.sysfs.read_machine` needs. ``doing`` names the step of the collection that was
    in progress when the facts were printed; empty after the last step. ``died`` says how the
    process that collected the facts failed; empty if it did not.
    """

    pci: tuple[str, ...] = ()
    module: str = ""
    has_peermem: bool = False
    bindings: str = ""
    driver: int = 0
    error: str = ""
    status: str = ""
    visible: str | None = None
    rails: tuple[str, ...] = ()
    gpus: tuple[Card, ...] = ()
    kernel_origin: str = ""
    topology: GpuFacts = GpuFacts()
    doing: str = ""
    died: str = ""


__all__ = ["Card", "CudaFacts"]
