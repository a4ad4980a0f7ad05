"""Writer of NCCL topology files, which describe a `Machine` to NCCL (``NCCL_TOPO_FILE``).

The format has no remarks, UUIDs, multiprocessor counts, NUMA distances or network interfaces of
RDMA ports; all other facts about the machine are written.

References
----------
NCCL user guide, ``NCCL_TOPO_FILE``; NCCL, src/graph/xml.cc, for elements and attributes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping

from r2ccl.topology.machine import LinkEnd, Machine, NumaNode, PciDevice

#: Format version: NCCL_TOPO_XML_VERSION.
_VERSION = "1"
#: PCI class of the device at the far end of an NVLink.
_END_CLASSES = {LinkEnd.GPU: "0x030200", LinkEnd.SWITCH: "0x068000", LinkEnd.CPU: "0x068001"}


def format_xml(machine: Machine, ranks: Mapping[str, int] | None = None) -> str:
    """Return the text of a topology file that describes `machine`.

    Parameters
    ----------
    machine : Machine
    ranks : mapping of str to int, optional
        Rank of each GPU, by bus id of the GPU. If NCCL uses only the file, it ignores a GPU without
        a rank; if it merges the file with the hardware that it detects, it adds the rank itself.
        Default: no ranks.
    """
    root = ET.Element("system", version=_VERSION)
    _Writer(machine, ranks or {}).write(root)
    ET.indent(root)
    # NCCL's parser mistakes the space before "/>" for the start of an attribute.
    return ET.tostring(root, encoding="unicode").replace(" />", "/>") + "\n"


def _mask(cpus: tuple[int, ...]) -> str:
    mask = sum(1 << cpu for cpu in cpus)
    words = [mask >> shift & 0xFFFFFFFF for shift in range(0, max(mask.bit_length(), 1), 32)]
    return ",".join(f"{word:08x}" for word in reversed(words))


def _node_attributes(node: NumaNode) -> dict[str, str]:
    return {
        "numaid": str(node.id),
        "affinity": _mask(node.cpus),
        "arch": node.arch,
        "vendor": node.vendor,
        "familyid": str(node.family),
        "modelid": str(node.model),
    }


def _device_attributes(device: PciDevice) -> dict[str, str]:
    return {
        "busid": device.bus_id,
        "class": f"0x{device.device_class:06x}",
        "vendor": f"0x{device.vendor:04x}",
        "device": f"0x{device.device:04x}",
        "subsystem_vendor": f"0x{device.subsystem_vendor:04x}",
        "subsystem_device": f"0x{device.subsystem_device:04x}",
        "link_speed": f"{device.speed_mtps // 1000}.{device.speed_mtps // 100 % 10} GT/s PCIe",
        "link_width": str(device.width),
    }


class _Writer:
    def __init__(self, machine: Machine, ranks: Mapping[str, int]) -> None:
        self._machine = machine
        self._ranks = ranks
        self._gpus = {gpu.bus_id: number for number, gpu in enumerate(machine.gpus)}

    def write(self, root: ET.Element) -> None:
        for node in self._machine.nodes:
            cpu = ET.SubElement(root, "cpu", _node_attributes(node))
            self._write_pci(cpu, "", node.id)
            self._write_ports(cpu, "", node.id)

    def _write_pci(self, above: ET.Element, parent: str, node: int) -> None:
        for device in self._machine.pci:
            if (device.parent, device.numa_node) == (parent, node):
                pci = ET.SubElement(above, "pci", _device_attributes(device))
                self._write_gpu(pci, device.bus_id)
                self._write_ports(pci, device.bus_id, node)
                self._write_pci(pci, device.bus_id, node)

    def _write_gpu(self, pci: ET.Element, bus_id: str) -> None:
        if bus_id not in self._gpus:
            return
        gpu = self._machine.gpu(bus_id)
        rank = {"rank": str(self._ranks[bus_id])} if bus_id in self._ranks else {}
        attributes = {"dev": str(self._gpus[bus_id]), "sm": str(gpu.compute_capability)}
        element = ET.SubElement(pci, "gpu", attributes | rank, gdr=str(int(gpu.has_gdr)))
        for link in self._machine.nvlinks:
            if link.gpu == bus_id:
                kind, count = _END_CLASSES[link.end], str(link.count)
                ET.SubElement(element, "nvlink", target=link.target, count=count, tclass=kind)
        if gpu.c2c_nlinks:
            bandwidth, count = str(gpu.c2c_mbps // 8), str(gpu.c2c_nlinks)
            ET.SubElement(element, "c2c", bw=bandwidth, count=count)

    def _write_ports(self, above: ET.Element, bus_id: str, node: int) -> None:
        ports = [
            (number, port)
            for number, port in enumerate(self._machine.ports)
            if (port.bus_id, port.numa_node) == (bus_id, node)
        ]
        nic = ET.SubElement(above, "nic") if ports else above
        for number, port in ports:
            attributes = {
                "name": port.name,
                "dev": str(number),
                "speed": str(port.speed_mbps),
                "port": str(port.port),
                "guid": f"0x{port.guid:x}",
                "gdr": str(int(port.has_gdr)),
            }
            ET.SubElement(nic, "net", attributes)


__all__ = ["format_xml"]
