"""The GPUs of a machine and the NVLinks between them, as CUDA's driver and NVML tell.

`read_gpus` makes facts of what two small interfaces answer. `BindingsSource` implements one with
the CUDA driver, `BindingsLinks` the other with ``cuda.bindings.nvml``, imported when one is made.
Must not read sysfs.

Invariant: a machine without CUDA has no GPUs and a remark that says why, and is no error. Whatever
was assumed for want of NVML is in a remark.

References
----------
CUDA Driver API, cuDeviceGetAttribute and cuDeviceGetP2PAttribute. NVML API Reference, NvLink
methods; the numbers here are nvml.h's.
"""

from __future__ import annotations

import importlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any, Protocol

import msgspec

from r2ccl.device.bindings import Cuda
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.topology.machine import Gpu, LinkEnd, NvLink, parse_bus_id

#: NVLinks of one GPU, from which compute capability on: Hopper and Blackwell, GA10x, A100, V100,
#: P100. Used where NVML does not count them.
_NVLINKS = ((90, 18), (86, 4), (80, 12), (70, 6), (60, 4), (0, 1))

_NVML_NVLINK_CAP_P2P_SUPPORTED = 0
_NVML_FEATURE_ENABLED = 1
_NVML_NVLINK_DEVICE_TYPE_GPU = 0
_NVML_NVLINK_DEVICE_TYPE_IBMNPU = 1
#: What NVML refuses a question about a link with that the GPU has not.
_NO_LINK = frozenset(("NotSupportedError", "InvalidArgumentError"))

#: More than the 13 characters of a bus id and its end.
_BUS_ID_NBYTES = 32


class GpuSource(Protocol):
    """Queries of the CUDA driver; a failed call raises `TransportError` with its status."""

    def count(self) -> int:
        """Return how many GPUs this process may use."""
        ...

    def bus_id(self, ordinal: int) -> str:
        """Return the PCI bus id of a GPU."""
        ...

    def uuid(self, ordinal: int) -> str:
        """Return its UUID, as nvidia-smi spells it."""
        ...

    def attribute(self, name: str, ordinal: int) -> int:
        """Return CU_DEVICE_ATTRIBUTE_`name` of it."""
        ...

    def peer_attribute(self, name: str, source: int, target: int) -> int:
        """Return CU_DEVICE_P2P_ATTRIBUTE_`name` of two GPUs."""
        ...


class LinkSource(Protocol):
    """Queries of NVML; a failed call raises `TransportError` with its status."""

    def nvlinks(self, bus_id: str) -> tuple[NvLink, ...]:
        """Return the NVLinks of a GPU that are up."""
        ...

    def close(self) -> None:
        """Let go of NVML."""
        ...


class GpuFacts(msgspec.Struct, frozen=True):
    """Facts about the GPUs that this process may use.

    ``gpus`` are in the order of CUDA's ordinals. ``links_from`` says who knew of NVLinks: ``NVML``,
    or ``peer access`` from which they were inferred; empty where nobody was asked.
    """

    gpus: tuple[Gpu, ...] = ()
    nvlinks: tuple[NvLink, ...] = ()
    remarks: tuple[str, ...] = ()
    links_from: str = ""


def read_gpus(source: GpuSource, open_links: Callable[[], LinkSource]) -> GpuFacts:
    """Ask what there is to know of GPUs.

    Where NVML does not count NVLinks, two GPUs that can do atomics on each other's memory are taken
    to be joined by some, for PCIe has no such atomics, and the links of each GPU to be shared out
    equally among such neighbours.

    Parameters
    ----------
    source : GpuSource
    open_links : callable
        Returns what counts NVLinks, to be closed here; `TransportError`: nothing does.

    Raises
    ------
    TransportError
        The driver refused an answer.
    """
    gpus = tuple(_read_gpu(source, ordinal) for ordinal in range(source.count()))
    try:
        links = open_links()
        try:
            counted = tuple(link for gpu in gpus for link in links.nvlinks(gpu.bus_id))
            return GpuFacts(gpus, counted, (), "NVML")
        finally:
            links.close()
    except TransportError as exc:
        why = str(exc)
    inferred = tuple(_infer_nvlinks(source, gpus))
    remark = f"NVLinks are not counted ({why}), but inferred from peer access: {len(inferred)}"
    return GpuFacts(gpus, inferred, (remark,) if len(gpus) > 1 else (), "peer access")


def find_gpus() -> GpuFacts:
    """Read the GPUs of this machine; none, and a remark, where CUDA does not work.

    Notes
    -----
    Initialises the CUDA driver, after which a process must not fork; makes no context.
    """
    try:
        return read_gpus(BindingsSource(), BindingsLinks)
    except TransportError as exc:
        return GpuFacts(remarks=(f"no GPUs: {exc}",))


class BindingsSource:
    """`GpuSource` over the CUDA driver.

    Raises
    ------
    TransportError
        The bindings or the driver are missing, or there is no GPU: says which.
    """

    def __init__(self) -> None:
        self._cuda = Cuda()

    def count(self) -> int:
        """See `GpuSource`."""
        return int(self._cuda.call("cuDeviceGetCount"))

    def bus_id(self, ordinal: int) -> str:
        """See `GpuSource`."""
        device = self._device(ordinal)
        raw: bytes = self._cuda.call("cuDeviceGetPCIBusId", _BUS_ID_NBYTES, device)
        return parse_bus_id(raw.partition(b"\0")[0].decode("ascii"))

    def uuid(self, ordinal: int) -> str:
        """See `GpuSource`."""
        raw = self._cuda.call("cuDeviceGetUuid", self._device(ordinal))
        return f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"

    def attribute(self, name: str, ordinal: int) -> int:
        """See `GpuSource`."""
        return self._cuda.device_attribute(name, self._device(ordinal))

    def peer_attribute(self, name: str, source: int, target: int) -> int:
        """See `GpuSource`."""
        kinds = self._cuda.api.CUdevice_P2PAttribute
        which = getattr(kinds, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        ends = self._device(source), self._device(target)
        return int(self._cuda.call("cuDeviceGetP2PAttribute", which, *ends))

    def _device(self, ordinal: int) -> Any:
        return self._cuda.call("cuDeviceGet", ordinal)


class BindingsLinks:
    """`LinkSource` over ``cuda.bindings.nvml``.

    Raises
    ------
    TransportError
        The bindings or NVML are missing, or NVML does not start: says which.
    """

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.nvml")
            self._call("init_v2")
        except (ImportError, RuntimeError) as exc:  # RuntimeError: the library is not found
            raise TransportError(
                f"NVML cannot be loaded ({exc}): it comes with NVIDIA's driver", status="NO_NVML"
            ) from exc

    def nvlinks(self, bus_id: str) -> tuple[NvLink, ...]:
        """See `LinkSource`."""
        device = self._call("device_get_handle_by_pci_bus_id_v2", bus_id)
        ends = (self._end(device, link) for link in range(self._api.NVLINK_MAX_LINKS))
        counts = Counter(end for end in ends if end is not None)
        return tuple(NvLink(bus_id, *end, count) for end, count in sorted(counts.items()))

    def close(self) -> None:
        """Let go of NVML."""
        self._call("shutdown")

    def _end(self, device: int, link: int) -> tuple[str, LinkEnd] | None:
        """Return what a link leads to; None for one that is down, or not there."""
        try:
            can_peer = self._call(
                "device_get_nvlink_capability", device, link, _NVML_NVLINK_CAP_P2P_SUPPORTED
            )
            if not can_peer:
                return None
            if self._call("device_get_nvlink_state", device, link) != _NVML_FEATURE_ENABLED:
                return None
            remote = self._call("device_get_nvlink_remote_pci_info_v2", device, link).bus_id
            kind = self._call("device_get_nvlink_remote_device_type", device, link)
        except TransportError as exc:
            if exc.status in _NO_LINK:
                return None
            raise
        return _named(str(remote), int(kind))

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._api, name)(*arguments)
        except self._api.NvmlError as exc:
            status = type(exc).__name__
            raise TransportError(f"{name} failed: {exc}", status=status) from exc


def _named(remote: str, kind: int) -> tuple[str, LinkEnd]:
    """Return the bus id and the kind of a link's far end; one that shows no bus id is a switch."""
    try:
        target = parse_bus_id(remote)
    except InvalidArgument:
        return remote.strip().lower(), LinkEnd.SWITCH
    if kind == _NVML_NVLINK_DEVICE_TYPE_GPU:
        return target, LinkEnd.GPU
    return target, LinkEnd.CPU if kind == _NVML_NVLINK_DEVICE_TYPE_IBMNPU else LinkEnd.SWITCH


def _read_gpu(source: GpuSource, ordinal: int) -> Gpu:
    major = source.attribute("COMPUTE_CAPABILITY_MAJOR", ordinal)
    minor = source.attribute("COMPUTE_CAPABILITY_MINOR", ordinal)
    ways = ("GPU_DIRECT_RDMA_SUPPORTED", "DMA_BUF_SUPPORTED")
    return Gpu(
        bus_id=source.bus_id(ordinal),
        uuid=source.uuid(ordinal),
        compute_capability=10 * major + minor,
        nsm=source.attribute("MULTIPROCESSOR_COUNT", ordinal),
        has_gdr=any(source.attribute(way, ordinal) for way in ways),
    )


def _infer_nvlinks(source: GpuSource, gpus: Sequence[Gpu]) -> Iterator[NvLink]:
    joined = [
        pair
        for pair in permutations(range(len(gpus)), 2)
        if source.peer_attribute("ACCESS_SUPPORTED", *pair)
        and source.peer_attribute("NATIVE_ATOMIC_SUPPORTED", *pair)
    ]
    neighbours = Counter(one for one, _ in joined)
    for one, other in joined:
        capability = gpus[one].compute_capability
        total = next(count for least, count in _NVLINKS if capability >= least)
        count = max(1, total // neighbours[one])
        yield NvLink(gpus[one].bus_id, gpus[other].bus_id, LinkEnd.GPU, count)


__all__ = [
    "BindingsLinks",
    "BindingsSource",
    "GpuFacts",
    "GpuSource",
    "LinkSource",
    "find_gpus",
    "read_gpus",
]
