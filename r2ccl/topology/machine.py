"""Description of the parts of a machine that move data: NUMA nodes, PCI tree, GPUs and NICs.

`sysfs` and `gpus` read these values from the machine, `distance` finds paths between the parts. A
GPU is named by its PCI bus id, because CUDA's ordinals depend on ``CUDA_VISIBLE_DEVICES`` and may
differ between the processes of a host.

Invariant: a `Machine` made by `Machine.of` is in canonical order and contains every part it refers
to, except far ends of NVLinks, which may be missing. Equal parts therefore make equal machines, and
the processes of a host that `merge` the same readings get equal machines.
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

#: Domain, bus (8 bits), device (5 bits) and function (3 bits).
_BUS_ID = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([01]?[0-9a-f])\.([0-7])")

#: NUMA distance of a node to itself, and default distance to another node; from the ACPI
#: specification, System Locality Distance Information Table.
LOCAL_DISTANCE = 10
REMOTE_DISTANCE = 20


class NumaNode(msgspec.Struct, frozen=True):
    """Processors that share a memory controller; NCCL's ``cpu``.

    ``cpus`` are the kernel's numbers of the processors. ``arch`` is NCCL's name of the architecture
    (``x86_64``, ``arm64``, ``ppc64``). ``vendor``, ``family`` and ``model`` are from /proc/cpuinfo;
    a value that is missing there is empty or 0. ``distances`` are pairs of a node's id and the
    distance to that node, empty if unknown.
    """

    id: int
    cpus: tuple[int, ...] = ()
    arch: str = ""
    vendor: str = ""
    family: int = 0
    model: int = 0
    distances: tuple[tuple[int, int], ...] = ()

    def distance_to(self, node: int) -> int:
        """Return the NUMA distance to the node with the id `node`.

        If the firmware reports no distance, it is 10 to the node itself and 20 to another node.
        """
        known = dict(self.distances).get(node, 0)
        return known or (LOCAL_DISTANCE if node == self.id else REMOTE_DISTANCE)


class PciDevice(msgspec.Struct, frozen=True):
    """An endpoint or a switch of the PCI tree, and the link above it.

    A PCIe link has two ends, which are PCI functions: a port above, and the device below. The port
    is not a `PciDevice`. ``parent`` is the bus id of the switch that the port belongs to; empty if
    the port belongs to a root complex. ``device_class`` is the PCI class code of 24 bits (0x060400
    for a bridge). ``speed_mtps`` is the signaling rate of a lane in megatransfers per second, and
    ``width`` the number of lanes. The identifiers of vendor and device are 0 if unknown.
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
    RDMA or dma-buf). ``c2c_nlinks`` is the number of NVLink-C2C links to the processor, each with
    a bandwidth of ``c2c_mbps`` Mbit/s in each direction.
    """

    bus_id: str
    uuid: str = ""
    compute_capability: int = 0
    nsm: int = 0
    has_gdr: bool = False
    c2c_nlinks: int = 0
    c2c_mbps: int = 0


class LinkEnd(enum.StrEnum):
    """Kind of an NVLink's far end.

    Every GPU reaches every NVSwitch, so all switches count as one.
    """

    GPU = "gpu"
    SWITCH = "switch"
    CPU = "cpu"


class NvLink(msgspec.Struct, frozen=True):
    """NVLinks from one GPU to one neighbor: ``count`` parallel links.

    ``gpu`` is the bus id of the GPU. ``target`` is the bus id of the neighbor, or for a switch
    without a bus id the text that NVML reports. ``end`` is the kind of the neighbor.
    """

    gpu: str
    target: str
    end: LinkEnd
    count: int


class NicPort(msgspec.Struct, frozen=True):
    """One port of a NIC.

    ``name`` is the name of the RDMA device, or of the interface if it has no RDMA. ``port`` is the
    number of the RDMA port, 0 for an interface without RDMA. ``bus_id`` is empty for a NIC without
    a PCI device. ``guid`` identifies the hardware that the port belongs to; 0: unknown. ``netdev``
    is the interface of an RDMA port (on InfiniBand the IPoIB interface), empty if there is none.
    ``has_gdr`` is true if the port can access GPU memory.
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
        """Unique name of the port in its machine: ``mlx5_0:1``, or ``eth0`` without RDMA."""
        return f"{self.name}:{self.port}" if self.port else self.name


class Machine(msgspec.Struct, frozen=True):
    """Parts of one host. Create a machine with `Machine.of`, which sorts and checks the parts.

    ``gpus`` are in the order of their bus ids, which is also NVML's order. ``pci`` are the PCI
    devices of the GPUs and the NICs, and the PCI switches above them. ``remarks`` are texts for
    people about missing facts, the values assumed instead, and links that use fewer lanes than they
    could.
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
        """Create a machine from parts in any order; the machine has them in canonical order.

        Raises
        ------
        InvalidArgument
            If a part occurs twice, a part refers to a part that is missing (except the far end of
            an NVLink), or there is no NUMA node.
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
        """Return the PCI device with the given bus id; raise InvalidArgument if there is none."""
        return _find(self.pci, "PCI device", "bus_id", bus_id)

    def gpu(self, bus_id: str) -> Gpu:
        """Return the GPU with the given bus id; raise InvalidArgument if there is none."""
        return _find(self.gpus, "GPU", "bus_id", bus_id)

    def port(self, label: str) -> NicPort:
        """Return the NIC port with the given label; raise InvalidArgument if there is none."""
        return _find(self.ports, "NIC port", "label", label)


def parse_bus_id(text: str) -> str:
    """Normalize a PCI bus id, such as ``00000000:1B:00.0``, to the kernel's ``0000:1b:00.0``.

    Raises
    ------
    InvalidArgument
        If `text` is not a PCI bus id.
    """
    found = _BUS_ID.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidArgument(
            f"{text!r} is not a PCI bus id; write domain:bus:device.function in hexadecimal, e.g. "
            "0000:1b:00.0"
        )
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def bus_order(bus_id: str) -> tuple[int, ...]:
    """Return the sort key of a bus id: its domain, bus, device and function as integers."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", bus_id))


def merge(machines: Sequence[Machine]) -> Machine:
    """Merge descriptions of one host, as its processes have read them, into one machine.

    This is necessary because a process sees only the GPUs in ``CUDA_VISIBLE_DEVICES`` and the
    interfaces of its network namespace. The result does not depend on the order of `machines`. If
    two processes read a part differently, one of the values is kept, the same in every process.

    Raises
    ------
    InvalidArgument
        If `machines` is empty.
    """
    if not machines:
        raise InvalidArgument(
            "merge() got no machines; pass one Machine per process of the host, as that process "
            "has read it"
        )
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
        raise InvalidArgument("a machine without a NUMA node was given; pass at least one node")
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
        raise InvalidArgument(
            f"{what} {', '.join(twice)} occurs twice in the machine; pass each part once"
        )
    return set(counts)


def _contained(what: str, there: set[Any], named: Iterable[Any]) -> None:
    missing = sorted({str(name) for name in named if name not in there})
    if missing:
        raise InvalidArgument(
            f"{what} {', '.join(missing)} is missing in the machine, but another part refers to "
            "it; add it"
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
