"""Values that describe the parts of a machine that move data: NUMA nodes, PCI tree, GPUs, NICs.

`sysfs` and `gpus` read these values from the machine, `distance` finds paths between the parts. A
GPU is named by its PCI bus id, because CUDA's ordinals depend on ``CUDA_VISIBLE_DEVICES`` and
differ between the processes of a host.

Invariant: a `Machine` made by `Machine.of` is in canonical order and contains every part it refers
to, except far ends of NVLinks, which may be missing. Equal parts therefore make equal machines, and
processes of a host that `merge` the readings of all of them get the same value.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.topology.names import natural

_BUS_ID = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])")

#: NUMA distance of a node to itself, and default distance to another node; from the ACPI
#: specification, System Locality Distance Information Table.
LOCAL_DISTANCE = 10
REMOTE_DISTANCE = 20


class NumaNode(msgspec.Struct, frozen=True):
    """Processors that share a memory controller; NCCL's ``cpu``.

    ``arch`` is NCCL's name (``x86_64``, ``arm64``, ``ppc64``). ``vendor``, ``family`` and ``model``
    are those in /proc/cpuinfo, empty and 0 if it has none. ``distances`` are pairs of a node's id
    and the distance to that node, empty if unknown.
    """

    id: int
    cpus: tuple[int, ...] = ()
    arch: str = ""
    vendor: str = ""
    family: int = 0
    model: int = 0
    distances: tuple[tuple[int, int], ...] = ()

    def distance_to(self, node: int) -> int:
        """Return the NUMA distance to `node`: the firmware's value, else a default."""
        known = dict(self.distances).get(node, 0)
        return known or (LOCAL_DISTANCE if node == self.id else REMOTE_DISTANCE)


class PciDevice(msgspec.Struct, frozen=True):
    """An endpoint or a switch of the PCI tree, and the link above it.

    A PCIe link has two ends, each a PCI function: a port above, and the device below. The port is
    no `PciDevice`. ``parent`` is the switch that the port belongs to, empty if the port belongs to
    a root complex. ``device_class`` has 24 bits (0x060400: bridge). ``speed_mtps`` is the
    signalling rate of a lane in megatransfers per second, ``width`` the number of lanes. The
    numeric identifiers are 0 if unknown.
    """

    bus_id: str
    parent: str
    numa_node: int
    device_class: int
    speed_mtps: int
    width: int
    vendor: int = 0
    device: int = 0
    subsystem_vendor: int = 0
    subsystem_device: int = 0


class Gpu(msgspec.Struct, frozen=True):
    """Identity and capabilities of a GPU.

    ``compute_capability`` is 90 for 9.0; ``nsm`` is the number of multiprocessors. If unknown, both
    are 0 and ``uuid`` is empty. ``has_gdr`` is true if NICs can access the GPU's memory (GPUDirect
    RDMA or dma-buf). ``c2c_nlinks`` is the number of NVLink-C2C links to the processor, each of
    ``c2c_mbps``.
    """

    bus_id: str
    uuid: str = ""
    compute_capability: int = 0
    nsm: int = 0
    has_gdr: bool = False
    c2c_nlinks: int = 0
    c2c_mbps: int = 0


class LinkEnd(enum.StrEnum):
    """Kind of an NVLink's far end; all GPUs reach all switches, so all switches count as one."""

    GPU = "gpu"
    SWITCH = "switch"
    CPU = "cpu"


class NvLink(msgspec.Struct, frozen=True):
    """The NVLinks from one GPU to one neighbour, whose bus id is ``target``."""

    gpu: str
    target: str
    end: LinkEnd
    count: int


class NicPort(msgspec.Struct, frozen=True):
    """One port of a NIC.

    ``name`` is the RDMA device or the interface. ``port`` is the number of the RDMA port, 0 for an
    interface without RDMA. ``bus_id`` is empty for a NIC without a PCI device. ``guid`` identifies
    the hardware that the port belongs to; 0: unknown. ``netdev`` is the interface of an RDMA port,
    on InfiniBand the IPoIB interface. ``has_gdr`` is true if the port can access GPU memory.
    """

    name: str
    port: int
    bus_id: str
    numa_node: int
    speed_mbps: int
    guid: int = 0
    netdev: str = ""
    has_gdr: bool = False

    @property
    def label(self) -> str:
        """Name of the port for people: ``mlx5_0:1``, or ``eth0`` without RDMA."""
        return f"{self.name}:{self.port}" if self.port else self.name


class Machine(msgspec.Struct, frozen=True):
    """The parts of one host; create it with `of`.

    ``gpus`` are in the order of their bus ids, which is also NVML's order. ``pci`` are the GPUs,
    the NICs and the PCI devices above these. ``remarks`` tell people what was assumed because a
    fact was missing.
    """

    nodes: tuple[NumaNode, ...]
    pci: tuple[PciDevice, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    ports: tuple[NicPort, ...] = ()
    nvlinks: tuple[NvLink, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        nodes: Iterable[NumaNode],
        pci: Iterable[PciDevice] = (),
        gpus: Iterable[Gpu] = (),
        ports: Iterable[NicPort] = (),
        nvlinks: Iterable[NvLink] = (),
        remarks: Iterable[str] = (),
    ) -> Self:
        """Create a machine with its parts in canonical order.

        Raises
        ------
        InvalidArgument
            If a part occurs twice or refers to a part that is missing, or if there is no NUMA node.
        """
        machine = cls(
            nodes=tuple(sorted(nodes, key=lambda node: node.id)),
            pci=tuple(sorted(pci, key=lambda device: bus_order(device.bus_id))),
            gpus=tuple(sorted(gpus, key=lambda gpu: bus_order(gpu.bus_id))),
            ports=tuple(sorted(ports, key=lambda port: (natural(port.name), port.port))),
            nvlinks=tuple(sorted(nvlinks, key=lambda link: (bus_order(link.gpu), link.target))),
            remarks=tuple(sorted(set(remarks))),
        )
        _check(machine)
        return machine

    def device(self, bus_id: str) -> PciDevice:
        """Return the PCI device with a bus id; raise InvalidArgument if there is none."""
        return _find(self.pci, "PCI device", "bus_id", bus_id)

    def gpu(self, bus_id: str) -> Gpu:
        """Return the GPU with a bus id; raise InvalidArgument if there is none."""
        return _find(self.gpus, "GPU", "bus_id", bus_id)

    def port(self, label: str) -> NicPort:
        """Return the NIC port with a label; raise InvalidArgument if there is none."""
        return _find(self.ports, "NIC port", "label", label)


def parse_bus_id(text: str) -> str:
    """Normalise a PCI bus id, such as ``00000000:1B:00.0``, to the kernel's ``0000:1b:00.0``.

    Raises
    ------
    InvalidArgument
        If `text` is no PCI bus id.
    """
    found = _BUS_ID.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidArgument(f"PCI bus id {text!r}; write domain:bus:device.function in hex")
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def bus_order(bus_id: str) -> tuple[int, ...]:
    """Return the sort key of a bus id: its domain, bus, device and function as integers."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", bus_id))


def merge(machines: Sequence[Machine]) -> Machine:
    """Merge the readings of several processes of one host into one machine.

    A process sees only the GPUs in ``CUDA_VISIBLE_DEVICES`` and the interfaces of its network
    namespace. The result does not depend on the order of `machines`. If two readings of a part
    differ, one of them is kept, the same one in every process.

    Raises
    ------
    InvalidArgument
        If `machines` is empty.
    """
    if not machines:
        raise InvalidArgument("merge() of no machines; pass the reading of each process of a host")
    return Machine.of(
        nodes=_union((node.id, node) for each in machines for node in each.nodes),
        pci=_union((device.bus_id, device) for each in machines for device in each.pci),
        gpus=_union((gpu.bus_id, gpu) for each in machines for gpu in each.gpus),
        ports=_union((port.label, port) for each in machines for port in each.ports),
        nvlinks=_union(
            ((link.gpu, link.target), link) for each in machines for link in each.nvlinks
        ),
        remarks=(remark for each in machines for remark in each.remarks),
    )


_Part = TypeVar("_Part", bound=msgspec.Struct)


def _union(parts: Iterable[tuple[object, _Part]]) -> list[_Part]:
    kept: dict[object, _Part] = {}
    for key, part in parts:
        other = kept.get(key)
        if other is None or msgspec.json.encode(part) > msgspec.json.encode(other):
            kept[key] = part
    return list(kept.values())


def _check(machine: Machine) -> None:
    if not machine.nodes:
        raise InvalidArgument("machine without a NUMA node; pass at least one")
    nodes = _unique("NUMA node", [node.id for node in machine.nodes])
    devices = _unique("PCI device", [device.bus_id for device in machine.pci])
    gpus = _unique("GPU", [gpu.bus_id for gpu in machine.gpus])
    _unique("NIC port", [port.label for port in machine.ports])
    _unique("NVLink", [(link.gpu, link.target) for link in machine.nvlinks])
    _contained("NUMA node", nodes, (each.numa_node for each in machine.pci))
    _contained("NUMA node", nodes, (each.numa_node for each in machine.ports))
    _contained("PCI device", devices, (each.parent for each in machine.pci if each.parent))
    _contained("PCI device", devices, (each.bus_id for each in machine.gpus))
    _contained("PCI device", devices, (each.bus_id for each in machine.ports if each.bus_id))
    _contained("GPU", gpus, (each.gpu for each in machine.nvlinks))


def _unique(what: str, names: Sequence[Any]) -> set[Any]:
    counts = Counter(names)
    twice = sorted(str(name) for name, count in counts.items() if count > 1)
    if twice:
        raise InvalidArgument(f"{what} {', '.join(twice)} occurs twice; pass each part once")
    return set(counts)


def _contained(what: str, there: set[Any], named: Iterable[Any]) -> None:
    missing = sorted({str(name) for name in named if name not in there})
    if missing:
        raise InvalidArgument(
            f"{what} {', '.join(missing)} is missing, but another part refers to it; add it"
        )


def _find(parts: Sequence[_Part], what: str, attribute: str, name: str) -> _Part:
    for part in parts:
        if getattr(part, attribute) == name:
            return part
    there = ", ".join(str(getattr(part, attribute)) for part in parts)
    raise InvalidArgument(f"no {what} {name!r} in this machine; it has {there or 'none'}")


__all__ = [
    "LOCAL_DISTANCE",
    "REMOTE_DISTANCE",
    "Gpu",
    "LinkEnd",
    "Machine",
    "NicPort",
    "NumaNode",
    "NvLink",
    "PciDevice",
    "bus_order",
    "merge",
    "parse_bus_id",
]
