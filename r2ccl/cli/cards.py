"""What the doctor knows of a machine's GPUs: values, which travel between processes as JSON.

`r2ccl.cli.gpufacts` fills them in, `r2ccl.cli.gpus` says what they mean. Invariant: what failed can
be told from what was not tried.
"""

from __future__ import annotations

import msgspec

from r2ccl.topology.gpus import GpuFacts
from r2ccl.transport.verbs.dmabuf import DeviceMemoryRoute


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that CUDA shows, and what came of trying things on it.

    ``memory_nbytes`` is all the memory it has. ``waits_on_memory`` is the attribute of
    `r2ccl.device.Device`, ``has_dmabuf`` DMA_BUF_SUPPORTED, ``is_rdma_capable`` what the driver
    says of an allocation, IS_GPU_DIRECT_RDMA_CAPABLE.

    What ends in ``_error`` is empty where something worked, None where it was not tried:
    ``open_error`` of making a context, ``kernel_error`` of compiling and loading a kernel,
    ``ipc_error`` of having another process map an allocation, ``dmabuf_error`` of exporting one.
    ``nics`` are RDMA ports, and the way each of them registered an allocation; ``route`` is the way
    that all of them did.
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
    """What the doctor looks at of GPUs.

    ``pci`` are the bus ids of NVIDIA's display controllers, as sysfs shows them; ``module`` is what
    the driver's kernel module says of itself, empty where it is not loaded. ``bindings`` is the
    version of the package cuda-bindings, empty without it; ``driver`` that of CUDA which libcuda
    has, 12040 for 12.4, 0 without it. ``error`` is what initialising it said, and ``status`` its
    status. ``visible`` is CUDA_VISIBLE_DEVICES, None where it is not set.

    ``compile_s`` is how long a kernel took to compile. ``cache`` is the directory that keeps
    kernels, ``cache_error`` why it cannot, empty where it can. ``topology`` is for
    `r2ccl.topology.sysfs.read_machine`. ``doing`` is what was under way when these facts were told
    last, empty where nothing was left to do, and ``died`` how the process that found them ended,
    empty where it ended well.
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
