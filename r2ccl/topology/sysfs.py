"""Reader of a machine's sysfs: NUMA nodes, the PCI tree above GPUs and NICs, and NIC ports.

The roots of sysfs and proc are parameters, so recorded trees can be read like live ones. Facts
about GPUs are parameters too, because sysfs does not have them.

Invariant: a missing or garbled attribute raises no error. If planning needs the value, a default is
assumed; `Machine.remarks` states every assumed value except NUMA distances. An unknown PCI class is
replaced by the class of a typical device. Any other unknown value is empty or 0. If `list_hcas`
cannot read or parse an attribute of an RDMA port, all RDMA ports are left out and a remark says so.

References
----------
Linux, Documentation/ABI/testing/sysfs-bus-pci and sysfs-class-net, stable/sysfs-devices-node. NCCL,
src/graph/xml.cc, shows which PCI functions on a path are the two ends of one link.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import msgspec

from r2ccl.topology.bandwidths import ASSUMED_PORT_MBPS, ASSUMED_SPEED_MTPS, ASSUMED_WIDTH
from r2ccl.topology.gpus import GpuFacts
from r2ccl.topology.hcas import Hca, list_hcas
from r2ccl.topology.machine import Machine, NicPort, NumaNode, PciDevice

SYSFS = Path("/sys")
PROC = Path("/proc")

_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NODE = re.compile(r"node([0-9]{1,5})")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_SPEED = re.compile(r"([0-9]{1,3})(?:\.([0-9]))? GT/s")
#: Valid numbers of lanes (PCIe Base Specification, Link Capabilities register); some devices show
#: other numbers.
_WIDTHS = frozenset((1, 2, 4, 8, 12, 16, 32))
#: Maximum number of bytes read from a file: one page holds any attribute, and the first processor's
#: entry in /proc/cpuinfo.
_READ_NBYTES = 4096

#: PCI class codes of devices whose own class is unknown.
_BRIDGE, _DISPLAY, _NETWORK = 0x060400, 0x030000, 0x020000
#: NCCL's names of architectures, by the kernel's names, where they differ.
_ARCHES = {"aarch64": "arm64", "ppc64le": "ppc64"}

#: The PCI functions from a root complex down to a device: bus id and sysfs directory of each.
_Chain = list[tuple[str, Path]]


def read_machine(
    gpus: GpuFacts | None = None, *, sysfs: Path = SYSFS, proc: Path = PROC, arch: str = ""
) -> Machine:
    """Read a machine from sysfs and proc.

    Parameters
    ----------
    gpus : GpuFacts, optional
        GPUs of the machine, as `r2ccl.topology.gpus.find_gpus` returns them. Default: no GPUs.
    sysfs, proc : Path
        Mount points of these file systems, or directories with recorded copies.
    arch : str
        Architecture of the processors as in uname(2). Default: the architecture of this machine.

    Returns
    -------
    Machine
        Its ``remarks`` are the remarks of `gpus`, a remark for each missing value that planning
        needs, except NUMA distances, and a remark for each PCIe link that uses fewer lanes than
        both its ends support.
    """
    facts = gpus or GpuFacts()
    there = {gpu.bus_id: gpu for gpu in facts.gpus}  # partitions of a GPU have the same bus id
    reader = _Reader(sysfs)
    nodes = _read_nodes(reader, _read_processor(reader, proc, arch or platform.machine()))
    tree = _Tree(reader, [node.id for node in nodes])
    for bus_id in there:
        link = f"bus/pci/devices/{bus_id}"
        tree.add(reader.chain(link) or [(bus_id, sysfs / link)], _DISPLAY)
    ports = _read_ports(reader, tree)
    return Machine.of(
        nodes,
        tree.devices.values(),
        there.values(),
        ports,
        dict.fromkeys(facts.nvlinks),
        (*reader.remarks, *facts.remarks),
    )


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs in a list in the kernel's format, such as ``0-3,8``; empty if garbled."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            return ()
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(cpus))


class _Reader:
    """Reader of attributes below a root directory, with defaults for missing or garbled attributes.

    ``remarks`` collects the remarks of `Machine.remarks`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.remarks: list[str] = []

    def text(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                return file.read(_READ_NBYTES).decode("utf-8", "replace").strip()
        except OSError:  # the attribute does not exist, or has no value, e.g. speed of a link down
            return ""

    def integer(self, path: Path, default: int = 0) -> int:
        text = self.text(path)
        try:
            return int(text, 16 if text.startswith("0x") else 10)
        except ValueError:
            return default

    def has(self, path: str) -> bool:
        try:
            return (self.root / path).exists()
        except OSError:  # no permission
            return False

    def names(self, path: str) -> list[str]:
        try:
            return sorted(each.name for each in (self.root / path).iterdir())
        except OSError:
            return []

    def chain(self, path: str) -> _Chain:
        """Return the PCI functions on the real path of a device, from the root complex down.

        The list is empty if there is no PCI function on the path, or the device does not exist.
        """
        try:
            real = (self.root / path).resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
            return []
        places = [*reversed(real.parents), real]
        return [(place.name, place) for place in places if _BUS_ID.fullmatch(place.name)]


class _Tree:
    """The PCI devices collected so far, with the switches above them."""

    def __init__(self, reader: _Reader, nodes: list[int]) -> None:
        self.devices: dict[str, PciDevice] = {}
        self._reader = reader
        self._nodes = nodes

    def add(self, chain: _Chain, device_class: int) -> None:
        """Add the last device of a chain, and the switches above it.

        The functions of a chain alternate between ports and devices, and end with the device. The
        function before a device or switch is the port at the upper end of its link. `device_class`
        is used if the class of the last device is unknown.
        """
        devices = chain[::-2]
        ports = chain[-2::-2]
        parents = [bus_id for bus_id, _ in devices[1:]]
        node = self.node(*devices[-1])
        for index, (bus_id, place) in enumerate(devices):
            if bus_id in self.devices:
                continue
            ends = [place, *(port for _, port in ports[index : index + 1])]
            speed, width = self._link(bus_id, ends)
            read = self._reader.integer
            self.devices[bus_id] = PciDevice(
                bus_id=bus_id,
                parent=parents[index] if index < len(parents) else "",
                numa_node=node,
                device_class=read(place / "class", _BRIDGE if index else device_class),
                speed_mtps=speed,
                width=width,
                vendor=read(place / "vendor"),
                device=read(place / "device"),
                subsystem_vendor=read(place / "subsystem_vendor"),
                subsystem_device=read(place / "subsystem_device"),
            )

    def node(self, name: str, place: Path) -> int:
        """Return the NUMA node of the device with the directory `place`.

        If the kernel does not know the node, or the node has no processors, return the first node
        and, if there are several, add a remark that names the device `name`.
        """
        node = self._reader.integer(place / "numa_node", -1)
        if node in self._nodes:
            return node
        if len(self._nodes) > 1:
            self._reader.remarks.append(f"{name}: NUMA node unknown, assuming {self._nodes[0]}")
        return self._nodes[0]

    def _link(self, bus_id: str, ends: list[Path]) -> tuple[int, int]:
        """Return the lane rate (in MT/s) and the number of lanes of a link.

        The rate is the highest that both ends support, because an idle device lowers the current
        rate. The number of lanes is the current number, because a link that was trained to fewer
        lanes than both ends support does not regain the missing lanes. If the current number is
        unknown, it is the highest that both ends support. If neither end shows a rate or a number,
        a default is assumed, and a remark says so.
        """
        remarks = self._reader.remarks
        speeds = [mtps for end in ends if (mtps := self._speed(end / "max_link_speed"))]
        most = [lanes for end in ends if (lanes := self._lanes(end / "max_link_width"))]
        used = [lanes for end in ends if (lanes := self._lanes(end / "current_link_width"))]
        if not speeds:
            remarks.append(f"{bus_id}: PCIe rate unknown, assuming PCIe 3")
        if not used and not most:
            remarks.append(f"{bus_id}: number of PCIe lanes unknown, assuming {ASSUMED_WIDTH}")
        elif used and most and min(used) < min(most):
            remarks.append(f"{bus_id}: uses {min(used)} of {min(most)} PCIe lanes; reseat the card")
        return min(speeds, default=ASSUMED_SPEED_MTPS), min(used or most, default=ASSUMED_WIDTH)

    def _speed(self, path: Path) -> int:
        found = _SPEED.match(self._reader.text(path))
        return int(found[1]) * 1000 + int(found[2] or 0) * 100 if found else 0

    def _lanes(self, path: Path) -> int:
        lanes = self._reader.integer(path)
        return lanes if lanes in _WIDTHS else 0


def _read_processor(reader: _Reader, proc: Path, arch: str) -> NumaNode:
    """Return a node that has only the processor's architecture, vendor, family and model."""
    first = reader.text(proc / "cpuinfo").partition("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    said = {key.strip(): value.strip() for key, _, value in lines}
    family, model = (
        int(said[key]) if re.fullmatch(r"[0-9]{1,5}", said.get(key, "")) else 0
        for key in ("cpu family", "model")
    )
    if arch == "x86_64" and not family:
        reader.remarks.append(f"{proc}/cpuinfo does not name the processor")
    vendor = said.get("vendor_id", "")
    return NumaNode(0, (), _ARCHES.get(arch, arch), vendor, family, model)


def _read_nodes(reader: _Reader, processor: NumaNode) -> list[NumaNode]:
    base = reader.root / "devices/system"
    matches = map(_NODE.fullmatch, reader.names("devices/system/node"))
    ids = sorted(int(match[1]) for match in matches if match)
    nodes = []
    for number in ids:
        place = base / f"node/node{number}"
        cpus = parse_cpus(reader.text(place / "cpulist"))
        distances = reader.text(place / "distance").split()
        is_whole = len(distances) == len(ids) and all(each.isdecimal() for each in distances)
        pairs = tuple(zip(ids, map(int, distances), strict=True)) if is_whole else ()
        if cpus:  # a node without CPUs has only memory
            nodes.append(msgspec.structs.replace(processor, id=number, cpus=cpus, distances=pairs))
    if nodes:
        return nodes
    reader.remarks.append("no NUMA node with processors, assuming a single node")
    return [msgspec.structs.replace(processor, cpus=parse_cpus(reader.text(base / "cpu/online")))]


def _read_ports(reader: _Reader, tree: _Tree) -> list[NicPort]:
    """Return all RDMA ports with their interfaces, and the other interfaces that have a device."""
    hcas = _list_hcas(reader)
    ports = [_rdma_port(reader, tree, hca) for hca in hcas]
    for name in reader.names("class/net"):
        place = f"class/net/{name}"
        if any(hca.netdev == name for hca in hcas) or not reader.has(f"{place}/device"):
            continue
        bus_id, node = _locate(reader, tree, name, f"{place}/device")
        number = reader.integer(reader.root / place / "dev_port") + 1
        twins = [port for port in ports if bus_id and (port.bus_id, port.port) == (bus_id, number)]
        if twins:  # IP over InfiniBand
            ports.remove(twins[0])
            ports.append(msgspec.structs.replace(twins[0], netdev=twins[0].netdev or name))
            continue
        mbps = _speed(reader, name, reader.integer(reader.root / place / "speed"))
        ports.append(NicPort(name=name, port=0, bus_id=bus_id, numa_node=node, speed_mbps=mbps))
    return ports


def _rdma_port(reader: _Reader, tree: _Tree, hca: Hca) -> NicPort:
    place = f"class/infiniband/{hca.name}"
    # Software RDMA has a `parent`, the interface it uses, or no device of its own.
    is_software = reader.text(reader.root / place / "parent") or not reader.has(f"{place}/device")
    device = f"class/net/{hca.netdev}/device" if is_software else f"{place}/device"
    bus_id, node = _locate(reader, tree, hca.name, device)
    return NicPort(
        name=hca.name,
        port=hca.port,
        bus_id=bus_id,
        numa_node=node,
        speed_mbps=_speed(reader, hca.label, hca.speed_mbps),
        guid=_guid(reader, place),
        netdev=hca.netdev,
        has_gdr=not is_software,
    )


def _list_hcas(reader: _Reader) -> tuple[Hca, ...]:
    try:
        return list_hcas(reader.root / "class/infiniband")
    except OSError as exc:
        reader.remarks.append(f"RDMA ports could not be read: {exc}")
        return ()


def _locate(reader: _Reader, tree: _Tree, name: str, device: str) -> tuple[str, int]:
    """Add a NIC to the tree; return its bus id (empty without a PCI device) and its NUMA node."""
    chain = reader.chain(device)
    if not chain:
        return "", tree.node(name, reader.root / device)
    tree.add(chain, _NETWORK)
    bus_id = chain[-1][0]
    return bus_id, tree.devices[bus_id].numa_node


def _speed(reader: _Reader, name: str, mbps: int) -> int:
    if mbps > 0:
        return mbps
    reader.remarks.append(f"{name}: rate unknown, assuming {ASSUMED_PORT_MBPS // 1000} Gbit/s")
    return ASSUMED_PORT_MBPS


def _guid(reader: _Reader, place: str) -> int:
    """Return the GUID of the whole adapter, or else of the RDMA device; 0 if neither is known."""
    for name in ("sys_image_guid", "node_guid"):
        text = reader.text(reader.root / place / name).replace(":", "")
        if re.fullmatch(r"[0-9a-f]{16}", text):
            return int(text, 16)
    return 0


__all__ = ["PROC", "SYSFS", "parse_cpus", "read_machine"]
