"""Collection of facts about GPUs, and tests of the GPU operations that collectives need.

Every call of the CUDA driver may crash or never return. The facts known so far are therefore
printed before each step: one `CudaFacts` per line, as JSON. Import this module only in a process
that was started for it.

Invariant: at the end, everything that was opened is closed, and no file remains.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import numpy as np

from r2ccl.cli.apart import run
from r2ccl.cli.cards import Card, CudaFacts
from r2ccl.cli.gpufacts import last_line
from r2ccl.cli.gpunics import export_error, is_rdma_capable, open_nics, way_of
from r2ccl.device.base import Device
from r2ccl.device.bindings import Cuda
from r2ccl.device.driver import CudaDevice
from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.kernels.cuda.form import Form
from r2ccl.kernels.cuda.ptx import ptx_of
from r2ccl.topology.gpus import BindingsSource, GpuSource, find_gpus
from r2ccl.transport.verbs.cuda import BindingsDriver, CudaDriver
from r2ccl.transport.verbs.dmabuf import DeviceMemoryRoute
from r2ccl.transport.verbs.regions import Registrar
from r2ccl.types import ReduceOp

#: Size of the test allocation: one GPU page, which begins and ends at boundaries of host pages.
_NBYTES = 2 << 20
_NAME_NBYTES = 256
#: Longest time to map the memory of all GPUs in another process, one after another.
_MAP_TIMEOUT_S = 40.0
_FORM = Form(dtype_code=CODES[np.dtype(np.float32)], op=ReduceOp.SUM)
_errors_decoder = msgspec.json.Decoder(list[str])

#: Function that has another process map allocations of this process, given as (GPU ordinal, IPC
#: handle). It returns one error message per allocation, empty if the allocation could be mapped.
Mapper = Callable[[Sequence[tuple[int, bytes]]], list[str]]


class Journal:
    """Record of the facts known so far; `begin` prints them before each step."""

    def __init__(self, facts: CudaFacts) -> None:
        self.facts = facts

    def begin(self, doing: str) -> None:
        """Print the facts known so far, and the next step `doing` (empty after the last step)."""
        self.learn(doing=doing)
        print(msgspec.json.encode(self.facts).decode(), flush=True)

    def learn(self, **known: Any) -> None:
        """Set fields of `CudaFacts`, without printing them."""
        self.facts = msgspec.structs.replace(self.facts, **known)

    def learn_of(self, place: int, **known: Any) -> None:
        """Set fields of the `Card` at index `place` of the facts, without printing them."""
        cards = list(self.facts.gpus)
        cards[place] = msgspec.structs.replace(cards[place], **known)
        self.learn(gpus=tuple(cards))


class Opened(NamedTuple):
    """GPU with a context and an allocation of `_NBYTES`; `place` is its index in the facts."""

    place: int
    device: Device
    address: int


def survey(nics: Sequence[str], *, is_tried: bool) -> None:
    """Collect the facts and print them; see `r2ccl.cli.gpufacts.read_cuda` for the arguments."""
    journal = Journal(CudaFacts(visible=os.environ.get("CUDA_VISIBLE_DEVICES")))
    journal.begin("loading the CUDA driver")
    journal.learn(bindings=_bindings_version(), driver=_driver_version())
    journal.begin("initialising the CUDA driver")
    try:
        cuda = Cuda()
    except TransportError as exc:
        journal.learn(error=str(exc), status=exc.status or "")
    else:
        journal.begin("reading GPUs and NVLinks")
        journal.learn(topology=find_gpus())
        source = BindingsSource()
        cards = tuple(describe(cuda, source, ordinal) for ordinal in range(source.count()))
        journal.learn(gpus=cards)
        if is_tried:
            try_all(journal, nics)
    journal.begin("")


def describe(cuda: Cuda, source: GpuSource, ordinal: int) -> Card:
    """Return the properties of the GPU number `ordinal`, without test results."""
    device = cuda.call("cuDeviceGet", ordinal)
    name: bytes = cuda.call("cuDeviceGetName", _NAME_NBYTES, device)
    return Card(
        ordinal=ordinal,
        name=name.partition(b"\0")[0].decode(errors="replace"),
        bus_id=source.bus_id(ordinal),
        capability=(
            source.attribute("COMPUTE_CAPABILITY_MAJOR", ordinal),
            source.attribute("COMPUTE_CAPABILITY_MINOR", ordinal),
        ),
        nsms=source.attribute("MULTIPROCESSOR_COUNT", ordinal),
        memory_nbytes=int(cuda.call("cuDeviceTotalMem", device)),
        has_dmabuf=bool(source.attribute("DMA_BUF_SUPPORTED", ordinal)),
    )


def try_all(journal: Journal, nics: Sequence[str]) -> None:
    """Open all GPUs, run the other tests on those that could be opened, and record the results.

    Without `nics`, the registration with NICs is not tested.
    """
    with ExitStack() as stack:
        opened = open_gpus(journal, stack, CudaDevice)
        try_kernels(journal, opened)
        try_mapping(journal, opened, map_apart)
        try_exports(journal, opened, BindingsDriver())
        if nics:
            journal.begin("opening NICs")
            try_registering(journal, opened, BindingsDriver(), open_nics(stack, nics))
        journal.begin("closing the GPUs")


def open_gpus(
    journal: Journal, stack: ExitStack, make: Callable[[int], Device]
) -> tuple[Opened, ...]:
    """Make a context and an allocation on every GPU; return the GPUs where this succeeded.

    `stack` closes the contexts, which frees the allocations.
    """
    opened = []
    for place, card in enumerate(journal.facts.gpus):
        journal.begin(f"opening GPU {card.ordinal}")
        try:
            device = make(card.ordinal)
            stack.callback(device.close)
            opened.append(Opened(place, device, device.allocate(_NBYTES)))
            journal.learn_of(place, open_error="", waits_on_memory=device.waits_on_memory)
        except TransportError as exc:
            journal.learn_of(place, open_error=str(exc))
    return tuple(opened)


def try_kernels(journal: Journal, opened: Sequence[Opened]) -> None:
    """Test on each opened GPU whether a kernel can be loaded, without the disk cache of kernels."""
    for place, device, _ in opened:
        journal.begin(f"loading a kernel for GPU {device.ordinal}")
        try:
            kernel = ptx_of(_FORM, device.capability, None)
            device.load(kernel.text, kernel.entry)
            journal.learn(kernel_origin=kernel.origin)
            journal.learn_of(place, kernel_error="")
        except (InvalidArgument, TransportError) as exc:
            journal.learn_of(place, kernel_error=str(exc))


def try_mapping(journal: Journal, opened: Sequence[Opened], mapper: Mapper) -> None:
    """Test with `mapper`, for each opened GPU, whether another process can map its allocation."""
    exported = []
    for place, device, address in opened:
        journal.begin(f"exporting memory of GPU {device.ordinal} to another process")
        try:
            exported.append((place, device.ordinal, device.export(address)[0]))
        except TransportError as exc:
            journal.learn_of(place, ipc_error=str(exc))
    if not exported:
        return
    journal.begin("mapping memory of the GPUs in another process")
    errors = mapper([(ordinal, handle) for _, ordinal, handle in exported])
    for (place, _, _), error in zip(exported, errors, strict=True):
        journal.learn_of(place, ipc_error=error)


def map_apart(handles: Sequence[tuple[int, bytes]]) -> list[str]:
    """Map allocations of this process in another process: the `Mapper` for real GPUs."""
    code = f"from r2ccl.cli.gpuprobe import map_all\nmap_all({list(handles)!r})"
    ended = run(code, timeout_s=_MAP_TIMEOUT_S, is_inner=True)
    errors = last_line(ended.said, _errors_decoder, [])
    if not ended.error and len(errors) == len(handles):
        return errors
    why = ended.error or "no result"
    return [f"the process that mapped the memory failed: {why}"] * len(handles)


def map_all(handles: Sequence[tuple[int, bytes]]) -> None:
    """Map and unmap allocations of another process; print a JSON list of errors, one per handle."""
    print(msgspec.json.encode([why_not_mapped(*each, CudaDevice) for each in handles]).decode())


def why_not_mapped(ordinal: int, handle: bytes, make: Callable[[int], Device]) -> str:
    """Map and unmap an allocation of another process; return the error, empty if there is none."""
    try:
        with ExitStack() as stack:
            device = make(ordinal)
            stack.callback(device.close)
            device.unmap(device.map(handle))
    except TransportError as exc:
        return str(exc)
    return ""


def try_exports(journal: Journal, opened: Sequence[Opened], driver: CudaDriver) -> None:
    """Test for each opened GPU whether its allocation can be exported as a dma-buf.

    Also record whether the driver reports the allocation as GPUDirect RDMA capable.
    """
    for place, device, address in opened:
        journal.begin(f"exporting a dma-buf of GPU {device.ordinal}")
        try:
            journal.learn_of(place, is_rdma_capable=is_rdma_capable(driver, address))
            journal.learn_of(place, dmabuf_error=export_error(driver, address))
        except TransportError as exc:
            journal.learn_of(place, dmabuf_error=str(exc))


def try_registering(
    journal: Journal,
    opened: Sequence[Opened],
    driver: CudaDriver,
    nics: dict[str, Registrar | str],
) -> None:
    """Register the allocation of each opened GPU with each NIC, then with all NICs together.

    `nics` has the registrar of each RDMA port by label, or the reason why it could not be opened.
    If a port could not be opened, no registration is tried with this port or with all NICs
    together; the method of both is then ``staging``.
    """
    able = {label: nic for label, nic in nics.items() if not isinstance(nic, str)}
    refusals = {label: nic for label, nic in nics.items() if isinstance(nic, str)}
    for place, device, address in opened:
        journal.begin(f"registering memory of GPU {device.ordinal} with NICs")
        routes = [(label, DeviceMemoryRoute("staging", (why,))) for label, why in refusals.items()]
        routes += [(label, way_of(driver, [nic], address)) for label, nic in able.items()]
        together = routes[0][1] if refusals else way_of(driver, [*able.values()], address)
        journal.learn_of(place, nics=tuple(routes), route=together)


def _bindings_version() -> str:
    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver_version() -> int:
    """Return the driver's CUDA version, without initializing the driver; 0 if there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value


__all__ = ["map_all", "survey"]
