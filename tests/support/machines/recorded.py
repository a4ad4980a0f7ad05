"""Recorded machines: text that describes one, turned into the sysfs tree its kernel would show.

A line is a function of the PCI tree, indented below the port or switch it hangs on::

    0000:17:00.0 gpu 16x16 cc=80

Bus id, kind (and for a NIC its name), link (GT/s x lanes, ``-``: not shown), more by name. ``root``
begins a root complex. `Recorded.read` has `read_machine` read what was written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from r2ccl.topology.gpus import GpuFacts
from r2ccl.topology.machine import Gpu, LinkEnd, Machine, NvLink
from r2ccl.topology.sysfs import read_machine

HERE = Path(__file__).parent
NAMES = ("dgx_h100", "hgx_a100", "workstation", "cloud_vm")
CLASSES = {"port": 0x060400, "switch": 0x060400, "gpu": 0x030200, "rdma": 0x020700}
SPEEDS = {
    "5": "5.0 GT/s PCIe",
    "8": "8.0 GT/s PCIe",
    "16": "16.0 GT/s PCIe",
    "32": "32.0 GT/s PCIe",
}


class Recorded(NamedTuple):
    """A machine written below a directory."""

    sysfs: Path
    proc: Path
    arch: str
    gpus: GpuFacts

    def read(self) -> Machine:
        return read_machine(self.gpus, sysfs=self.sysfs, proc=self.proc, arch=self.arch)

    def function(self, bus_id: str) -> Path:
        """Where a PCI function is."""
        return (self.sysfs / "bus/pci/devices" / bus_id).resolve(strict=True)


def record(path: Path, name: str) -> Recorded:
    """Write the machine of a file of this directory."""
    return write(path, (HERE / f"{name}.txt").read_text(encoding="utf-8"))


def write(path: Path, text: str) -> Recorded:
    """Write the machine that `text` describes."""
    writer = _Writer(path)
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            writer.write(len(line) - len(line.lstrip()), line.split())
    return Recorded(writer.sysfs, writer.proc, writer.arch, writer.facts())


class _Writer:
    def __init__(self, path: Path) -> None:
        self.sysfs = path / "sys"
        self.proc = path / "proc"
        self.arch = ""
        self.gpus: list[Gpu] = []
        self.switches: list[tuple[str, int]] = []
        self.links: list[NvLink] = []
        self.node = "-1"
        self.above: list[tuple[int, Path]] = []

    def facts(self) -> GpuFacts:
        switched = (
            NvLink(gpu.bus_id, switch, LinkEnd.SWITCH, count)
            for gpu in self.gpus
            for switch, count in self.switches
        )
        return GpuFacts(tuple(self.gpus), (*switched, *self.links))

    def write(self, indent: int, words: list[str]) -> None:
        more = dict(word.split("=", 1) for word in words if "=" in word)
        if words[0] == "processor":
            _, self.arch, vendor, family, model = words
            lines = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
            put(self.proc / "cpuinfo", f"processor\t: 0\n{lines}\nprocessor\t: 1\n{lines}")
        elif words[0] == "node":
            node = self.sysfs / "devices/system/node" / f"node{words[1]}"
            put(node / "cpulist", more["cpus"])
            put(node / "distance", more["distances"].replace(",", " "))
        elif words[0] == "nvswitch":
            self.switches.append((words[1], int(more["count"])))
        elif words[0] == "nvlink":
            for one, other in (words[1:3], words[2:0:-1]):
                self.links.append(NvLink(one, other, LinkEnd.GPU, int(more["count"])))
        elif words[0] == "root":
            self.node = more["node"]
            self.above = [(-1, self.sysfs / "devices" / f"pci{words[1]}")]
        else:
            self._write_function(indent, words, more)

    def _write_function(self, indent: int, words: list[str], more: dict[str, str]) -> None:
        while self.above[-1][0] >= indent:
            self.above.pop()
        bus_id, kind = words[:2]
        place = self.above[-1][1] / bus_id
        self.above.append((indent, place))
        link(self.sysfs / "bus/pci/devices" / bus_id, place)
        put(place / "class", f"0x{CLASSES.get(kind, 0x020000):06x}")
        put(place / "vendor", "0x15b3")
        put(place / "device", "0x1021")
        put(place / "numa_node", self.node)
        if kind == "gpu":
            capability, count = int(more["cc"]), int(more["sms"])
            self.gpus.append(Gpu(bus_id, f"GPU-{bus_id}", capability, count, has_gdr=True))
            self._write_link(place, words[2])
        elif kind in ("port", "switch"):
            self._write_link(place, words[2])
        else:
            self._write_link(place, words[3])
            self._write_nic(place, kind, words[2], more)

    def _write_link(self, place: Path, text: str) -> None:
        if text == "-":
            return
        speed, width = text.split("x")
        put(place / "max_link_speed", SPEEDS[speed])
        put(place / "max_link_width", width)
        put(place / "current_link_speed", "2.5 GT/s PCIe")  # it is idle

    def _write_nic(self, place: Path, kind: str, name: str, more: dict[str, str]) -> None:
        if kind == "rdma":
            hca = place / "infiniband" / name
            layer = more.get("layer", "Ethernet")
            put(hca / "ports/1/state", "4: ACTIVE")
            put(hca / "ports/1/link_layer", layer)
            put(hca / "ports/1/rate", f"{more['rate']} Gb/sec (4X)")
            serial = place.name.replace(":", "").replace(".", "")[:9].rjust(16, "0")
            put(hca / "sys_image_guid", ":".join(serial[i : i + 4] for i in range(0, 16, 4)))
            link(self.sysfs / "class/infiniband" / name, hca)
            link(hca / "device", place)
            name, more = more["netdev"], {"speed": str(1000 * int(more["rate"]))}
        device = place / "virtio0" if kind == "virtio" else place
        interface = device / "net" / name
        put(interface / "dev_port", "0")
        put(interface / "speed", more.get("speed", "-1"))
        link(self.sysfs / "class/net" / name, interface)
        link(interface / "device", device)


def put(path: Path, text: str) -> None:
    """Write an attribute."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def link(path: Path, target: Path) -> None:
    """Make a relative link, as sysfs has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))
