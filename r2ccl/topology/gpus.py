"""GPUs of a machine and their NVLinks, read from the CUDA driver and NVML.

`read_gpus` reads the GPUs and NVLinks through two small interfaces. `BindingsSource` implements
`GpuSource` with the CUDA driver; `BindingsLinks` implements `LinkSource` with
``cuda.bindings.nvml``, which it imports when created.

Invariant: `find_gpus` raises no error on a machine without CUDA. It then returns no GPUs, and a
remark with the reason. If NVML is missing or fails, and there are several GPUs, a remark states
that the NVLinks were inferred.

References
----------
CUDA Driver API, cuDeviceGetAttribute and cuDeviceGetP2PAttribute. NVML API Reference, NvLink
methods; the NVML constants in this module are from nvml.h.
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

#: Number of NVLinks of one GPU by minimum compute capability: Hopper and Blackwell, GA10x, A100,
#: V100, P100, older. Used if NVML cannot count NVLinks.
_NVLINKS = ((90, 18), (86, 4), (80, 12), (70, 6), (60, 4), (0, 1))

_NVML_NVLINK_CAP_P2P_SUPPORTED = 0
_NVML_FEATURE_ENABLED = 1
_NVML_NVLINK_DEVICE_TYPE_GPU = 0
_NVML_NVLINK_DEVICE_TYPE_IBMNPU = 1
#: NVML errors of a query about a link that the GPU does not have.
_NO_LINK = frozenset(("NotSupportedError", "InvalidArgumentError"))

#: Buffer size; more than the 13 bytes of a bus id with its terminator.
_BUS_ID_NBYTES = 32


class GpuSource(Protocol):
    """Interface to the CUDA driver; a failed call raises `TransportError` with the CUDA status.

    ``ordinal`` is CUDA's number of a GPU, from 0.
    """

    def count(self) -> int:
        """Return the number of GPUs this process may use."""
        ...

    def bus_id(self, ordinal: int) -> str:
        """Return the PCI bus id of a GPU in the kernel's notation, such as ``0000:1b:00.0``."""
        ...

    def uuid(self, ordinal: int) -> str:
        """Return the UUID of a GPU in the format of nvidia-smi: ``GPU-`` and a hyphenated UUID."""
        ...

    def attribute(self, name: str, ordinal: int) -> int:
        """Return the attribute ``CU_DEVICE_ATTRIBUTE_<name>`` of a GPU."""
        ...

    def peer_attribute(self, name: str, source: int, target: int) -> int:
        """Return ``CU_DEVICE_P2P_ATTRIBUTE_<name>`` for access by `source` to `target`'s memory."""
        ...


class LinkSource(Protocol):
    """Interface to NVML; a failed call raises `TransportError`.

    The ``status`` of the error is the name of the exception in ``cuda.bindings.nvml``.
    """

    def nvlinks(self, bus_id: str) -> tuple[NvLink, ...]:
        """Return the NVLinks of a GPU that are up: one `NvLink` per neighbor."""
        ...

    def close(self) -> None:
        """Shut NVML down."""
        ...


class GpuFacts(msgspec.Struct, frozen=True):
    """GPUs that this process may use, and their NVLinks.

    ``gpus`` are in the order of CUDA's ordinals. ``nvlinks`` has one entry per GPU and neighbor.
    ``links_from`` is the source of ``nvlinks``: ``NVML``, or ``peer access`` if the NVLinks were
    inferred; empty if nothing was queried. ``remarks`` are texts for people about missing facts and
    assumptions.
    """

    gpus: tuple[Gpu, ...] = ()
    nvlinks: tuple[NvLink, ...] = ()
    remarks: tuple[str, ...] = ()
    links_from: str = ""


def read_gpus(source: GpuSource, open_links: Callable[[], LinkSource]) -> GpuFacts:
    """Read the GPUs and their NVLinks.

    If NVML is not available or a query of it fails, NVLinks are inferred: two GPUs that support
    native atomics on each other's memory are assumed to have NVLinks between them, because CUDA
    reports such atomics over NVLink, but not over PCIe. The NVLinks of a GPU are then assumed to be
    divided equally among these neighbors.

    Parameters
    ----------
    source : GpuSource
    open_links : callable
        Function that returns a `LinkSource`, which `read_gpus` closes, or raises `TransportError`
        if NVML is not available.

    Raises
    ------
    TransportError
        If a query of the driver failed.
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
    remark = (
        f"NVML cannot count NVLinks ({why}), so they are inferred from peer access; ordered pairs "
        f"of GPUs that have NVLinks: {len(inferred)}"
    )
    return GpuFacts(gpus, inferred, (remark,) if len(gpus) > 1 else (), "peer access")


def find_gpus() -> GpuFacts:
    """Read the GPUs that this process may use; if CUDA fails, return a remark and no GPUs.

    Notes
    -----
    The call initializes the CUDA driver, after which the process must not fork. It creates no CUDA
    context.
    """
    try:
        return read_gpus(BindingsSource(), BindingsLinks)
    except TransportError as exc:
        return GpuFacts(remarks=(f"no GPUs: {exc}",))


class BindingsSource:
    """`GpuSource` that queries the CUDA driver.

    Raises
    ------
    TransportError
        If the bindings or the driver are missing, the driver cannot be initialized, or there is no
        GPU; the message says which.
    """

    def __init__(self) -> None:
        self._cuda = Cuda()

    def count(self) -> int:
        """Implement `GpuSource.count`."""
        return int(self._cuda.call("cuDeviceGetCount"))

    def bus_id(self, ordinal: int) -> str:
        """Implement `GpuSource.bus_id`."""
        device = self._device(ordinal)
        raw: bytes = self._cuda.call("cuDeviceGetPCIBusId", _BUS_ID_NBYTES, device)
        return parse_bus_id(raw.partition(b"\0")[0].decode("ascii"))

    def uuid(self, ordinal: int) -> str:
        """Implement `GpuSource.uuid`."""
        return f"GPU-{uuid.UUID(bytes=self._cuda.uuid(self._device(ordinal)))}"

    def attribute(self, name: str, ordinal: int) -> int:
        """Implement `GpuSource.attribute`."""
        return self._cuda.device_attribute(name, self._device(ordinal))

    def peer_attribute(self, name: str, source: int, target: int) -> int:
        """Implement `GpuSource.peer_attribute`."""
        kinds = self._cuda.api.CUdevice_P2PAttribute
        which = getattr(kinds, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        ends = self._device(source), self._device(target)
        return int(self._cuda.call("cuDeviceGetP2PAttribute", which, *ends))

    def _device(self, ordinal: int) -> Any:
        return self._cuda.call("cuDeviceGet", ordinal)


class BindingsLinks:
    """`LinkSource` that queries ``cuda.bindings.nvml``.

    Raises
    ------
    TransportError
        If the bindings or NVML are missing, or NVML does not start; the message says which.
    """

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.nvml")
            self._call("init_v2")
        except ImportError as exc:
            raise TransportError(
                f"cuda.bindings.nvml cannot be imported ({exc}); install or upgrade cuda-bindings",
                status="NO_NVML",
            ) from exc
        except RuntimeError as exc:  # the library is not found
            raise TransportError(
                f"NVML cannot be loaded ({exc}); install NVIDIA's complete driver or, in a "
                "container, add utility to NVIDIA_DRIVER_CAPABILITIES",
                status="NO_NVML",
            ) from exc

    def nvlinks(self, bus_id: str) -> tuple[NvLink, ...]:
        """Implement `LinkSource.nvlinks`."""
        device = self._call("device_get_handle_by_pci_bus_id_v2", bus_id)
        ends = (self._end(device, link) for link in range(self._api.NVLINK_MAX_LINKS))
        counts = Counter(end for end in ends if end is not None)
        return tuple(NvLink(bus_id, *end, count) for end, count in sorted(counts.items()))

    def close(self) -> None:
        """Shut NVML down."""
        self._call("shutdown")

    def _end(self, device: int, link: int) -> tuple[str, LinkEnd] | None:
        """Return the far end of a link: ``target`` and ``end`` of its `NvLink`.

        Return None if the link is down, does not exist, or does not support peer access.
        """
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
    """Return the far end of an NVLink: ``target`` and ``end`` of its `NvLink`.

    `remote` is the bus id and `kind` the device type of the far end, as NVML reports them. If
    `remote` is not a bus id, the far end is a switch, and ``target`` is `remote` in lower case.
    """
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
