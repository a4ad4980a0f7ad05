"""Reads NCCL's topology files: what ``NCCL_TOPO_DUMP_FILE`` writes, or somebody by hand.

Pure but for `load_xml`. Elements and attributes not known here are left out. Must not read the
machine. Invariant: a file is refused with `InvalidArgument`, or makes a machine; what was assumed
for want of an attribute is in its remarks.

References
----------
NCCL user guide, ``NCCL_TOPO_FILE``; NCCL, src/graph/xml.cc and topo.cc, for the elements, their
attributes and what is taken where one is missing.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from r2ccl.errors import InvalidArgument
from r2ccl.topology.bandwidths import ASSUMED_PORT_MBPS, ASSUMED_SPEED_MTPS, ASSUMED_WIDTH
from r2ccl.topology.bounded_xml import MAX_NBYTES, parse_bounded
from r2ccl.topology.machine import (
    Gpu,
    LinkEnd,
    Machine,
    NicPort,
    NumaNode,
    NvLink,
    PciDevice,
    parse_bus_id,
)

#: NCCL_TOPO_XML_VERSION.
VERSION = "1"

#: CONFIG_NR_CPUS is at most this.
_MAX_CPUS = 8192

#: Names of devices: `natural` orders them, and NCCL's reader knows no escapes.
_NAME = re.compile(r"[!-~]{1,255}")
_INTEGER = re.compile(r"-?[0-9]{1,18}|0x[0-9a-f]{1,16}")
#: What a number may be that NCCL writes as -1 where it knows none.
_UNKNOWN = -1
_MASK = re.compile(r"[0-9a-f,]*")
_SPEED = re.compile(r"([0-9]{1,3})(?:\.([0-9]))? GT/s(?: PCIe)?")
#: PCI classes of what an NVLink leads to, as NCCL tells them apart.
ENDS = {LinkEnd.GPU: "0x030200", LinkEnd.SWITCH: "0x068000", LinkEnd.CPU: "0x068001"}


def load_xml(path: Path) -> Machine:
    """Read a topology file.

    Raises
    ------
    InvalidArgument
        See `parse_xml`.
    OSError
        It cannot be read.
    """
    with path.open("rb") as file:
        return parse_xml(file.read(MAX_NBYTES + 1))


def parse_xml(data: bytes) -> Machine:
    """Return the machine that a topology file describes.

    Parameters
    ----------
    data : bytes
        The file, in UTF-8.

    Raises
    ------
    InvalidArgument
        It is no such file, has a document type, or is too large; says where.
    """
    root = parse_bounded(data)
    if root.tag != "system" or root.get("version") != VERSION:
        raise InvalidArgument(
            f"<{root.tag} version={root.get('version')!r}> is no NCCL topology: it begins with "
            f'<system version="{VERSION}">'
        )
    parts = _Parts()
    for cpu in root.findall("cpu"):
        parts.add_cpu(cpu)
    return Machine.of(parts.nodes, parts.pci, parts.gpus, parts.ports, parts.nvlinks, parts.remarks)


class _Parts:
    """Collects the parts of a machine, element by element."""

    def __init__(self) -> None:
        self.nodes: list[NumaNode] = []
        self.pci: list[PciDevice] = []
        self.gpus: list[Gpu] = []
        self.ports: list[NicPort] = []
        self.nvlinks: list[NvLink] = []
        self.remarks: list[str] = []

    def add_cpu(self, cpu: ET.Element) -> None:
        node = _integer(cpu, "numaid", least=_UNKNOWN)
        self.nodes.append(
            NumaNode(
                id=node,
                cpus=_cpus(cpu),
                arch=cpu.get("arch", ""),
                vendor=cpu.get("vendor", ""),
                family=_integer(cpu, "familyid", 0),
                model=_integer(cpu, "modelid", 0),
            )
        )
        for pci in cpu.findall("pci"):
            self._add_pci(pci, "", node)
        self._add_ports(cpu, "", node)

    def _add_pci(self, pci: ET.Element, parent: str, node: int) -> None:
        bus_id = parse_bus_id(pci.get("busid", ""))
        speed, width = self._link(pci, bus_id)
        self.pci.append(
            PciDevice(
                bus_id=bus_id,
                parent=parent,
                numa_node=node,
                device_class=_device_class(pci),
                speed_mtps=speed,
                width=width,
                vendor=_integer(pci, "vendor", 0),
                device=_integer(pci, "device", 0),
                subsystem_vendor=_integer(pci, "subsystem_vendor", 0),
                subsystem_device=_integer(pci, "subsystem_device", 0),
            )
        )
        gpu = pci.find("gpu")  # of several, ranks that share a GPU, each tells the same
        if gpu is not None:
            self._add_gpu(gpu, bus_id)
        self._add_ports(pci, bus_id, node)
        for below in pci.findall("pci"):
            self._add_pci(below, bus_id, node)

    def _link(self, pci: ET.Element, bus_id: str) -> tuple[int, int]:
        found = _SPEED.fullmatch(pci.get("link_speed", ""))
        width = _integer(pci, "link_width", 0, least=_UNKNOWN)
        if found is None or width <= 0:
            self.remarks.append(f"{bus_id}: PCIe link not described, taken for PCIe 3, 16 lanes")
        speed = int(found[1]) * 1000 + int(found[2] or 0) * 100 if found else ASSUMED_SPEED_MTPS
        return speed, width if width > 0 else ASSUMED_WIDTH

    def _add_gpu(self, gpu: ET.Element, bus_id: str) -> None:
        c2c = gpu.find("c2c")
        self.gpus.append(
            Gpu(
                bus_id=bus_id,
                compute_capability=_integer(gpu, "sm", 0),
                has_gdr=_integer(gpu, "gdr", 0, least=_UNKNOWN) > 0,
                c2c_nlinks=0 if c2c is None else _integer(c2c, "count", 0),
                c2c_mbps=0 if c2c is None else 8 * _integer(c2c, "bw", 0),
            )
        )
        for link in gpu.findall("nvlink"):
            target, end = _end(link)
            self.nvlinks.append(NvLink(bus_id, target, end, _integer(link, "count", 1)))

    def _add_ports(self, above: ET.Element, bus_id: str, node: int) -> None:
        for net in above.iterfind("nic/net"):
            if net.get("net") == "0":  # it is a part of another one
                continue
            name = net.get("name", "")
            if not _NAME.fullmatch(name):
                raise InvalidArgument(f"<net name={name!r}>: give the name of a device, as mlx5_0")
            mbps = _integer(net, "speed", 0, least=_UNKNOWN)
            if mbps <= 0:
                assumed = f"{ASSUMED_PORT_MBPS // 1000} Gbit/s"
                self.remarks.append(f"{name}: rate unknown, taken for {assumed}")
            self.ports.append(
                NicPort(
                    name=name,
                    port=_integer(net, "port", 0),
                    bus_id=bus_id,
                    numa_node=node,
                    speed_mbps=mbps if mbps > 0 else ASSUMED_PORT_MBPS,
                    guid=_integer(net, "guid", 0),
                    has_gdr=_integer(net, "gdr", 0, least=_UNKNOWN) > 0,
                )
            )


def _integer(element: ET.Element, name: str, default: int | None = None, *, least: int = 0) -> int:
    """Return an attribute as a number; one that is missing or empty has the default."""
    text = element.get(name, "").strip().lower()
    if not text and default is not None:
        return default
    number = int(text, 16 if text.startswith("0x") else 10) if _INTEGER.fullmatch(text) else None
    if number is None or number < least:
        raise InvalidArgument(f"<{element.tag} {name}={text!r}>: give a whole number from {least}")
    return number


def _device_class(pci: ET.Element) -> int:
    """Return the class; one of two digits, which NCCL writes too, is the first of three bytes."""
    text = pci.get("class", "")
    digits = text.removeprefix("0x").ljust(6, "0")
    if not re.fullmatch(r"[0-9a-fA-F]{6}", digits):
        raise InvalidArgument(f"<pci class={text!r}>: give a PCI class, as 0x020000")
    return int(digits, 16)


def _end(link: ET.Element) -> tuple[str, LinkEnd]:
    """Return what NVLinks lead to; NCCL takes what it cannot see for a switch."""
    target, kind = link.get("target", "").strip().lower(), link.get("tclass", "")
    end = LinkEnd.GPU if kind.startswith("0x03") else LinkEnd.SWITCH
    if kind == ENDS[LinkEnd.CPU]:
        end = LinkEnd.CPU
    try:
        return parse_bus_id(target), end
    except InvalidArgument:
        return target, LinkEnd.SWITCH if end is LinkEnd.GPU else end


def _cpus(cpu: ET.Element) -> tuple[int, ...]:
    text = cpu.get("affinity", "").strip().lower()
    digits = text.replace(",", "")
    if not _MASK.fullmatch(text) or len(digits) > _MAX_CPUS // 4:
        raise InvalidArgument(
            f"<cpu affinity={text[:80]!r}>: give a mask of at most {_MAX_CPUS} CPUs in hex"
        )
    mask = int(digits or "0", 16)
    return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


__all__ = ["ENDS", "VERSION", "load_xml", "parse_xml"]
