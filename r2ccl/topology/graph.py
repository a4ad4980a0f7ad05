"""Graph of a machine: its vertices are the machine's parts, its edges the links between them.

Vertices are processors (NUMA nodes), PCI switches, NICs, NIC ports, GPUs, and one vertex for all
NVSwitches. `distance` searches the graph. Invariant: neighbors are in the order of vertices, so
equal machines give equal search results on every host.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from r2ccl.errors import InvalidArgument
from r2ccl.topology.bandwidths import LOCAL_MBPS, nvlink_mbps, pcie_mbps, socket_mbps
from r2ccl.topology.machine import LinkEnd, Machine


class VertexKind(enum.IntEnum):
    """Kind of a vertex; the abbreviations are NCCL's."""

    CPU = 0  #: processors of a NUMA node
    PCI = 1  #: PCI switch
    NVS = 2  #: all NVSwitches of the machine
    GPU = 3
    NIC = 4
    PORT = 5  #: port of a NIC


class Vertex(NamedTuple):
    """Vertex of the graph: a part of a machine, identified by its kind and name.

    ``name`` is the bus id of a GPU or a PCI switch, the id of a NUMA node, and the label of a port.
    For a NIC, it is the bus id without the function (functions share a link), or the NIC's name if
    there is no bus id. It is empty for the NVSwitches.
    """

    kind: VertexKind
    name: str


class Medium(enum.IntEnum):
    """Kind of a link."""

    PCI = 0
    NVLINK = 1
    C2C = 2  #: NVLink-C2C, between a GPU and its processor
    SOCKET = 3  #: between NUMA nodes
    PORT = 4  #: between a NIC and its port


class Link(NamedTuple):
    """Bandwidth (in each direction, in Mbit/s) and medium of a link between two vertices."""

    bandwidth_mbps: int
    medium: Medium


#: A link, as its two vertices, the lower one first.
Hop = tuple[Vertex, Vertex]

_SWITCHES = Vertex(VertexKind.NVS, "")


class Graph:
    """Vertices and links of a machine.

    Parameters
    ----------
    machine : Machine
    speeds : mapping of str to int, optional
        Rates in Mbit/s that replace the nominal rates of ports, by label; 0: the port is lost.

    Raises
    ------
    InvalidArgument
        If a rate in `speeds` is negative, or a port in `speeds` is not in the machine.
    """

    def __init__(self, machine: Machine, speeds: Mapping[str, int] | None = None) -> None:
        self.machine = machine
        self._links: dict[Vertex, dict[Vertex, Link]] = {}
        self._add_nodes()
        self._add_pci()
        self._add_ports(_checked(machine, speeds or {}))
        self._add_nvlinks()
        self._links = {vertex: dict(sorted(near.items())) for vertex, near in self._links.items()}

    def neighbours(self, vertex: Vertex) -> Mapping[Vertex, Link]:
        """Return the links of `vertex`, each with the vertex at its other end as the key.

        The keys are in the order of vertices.

        Raises
        ------
        InvalidArgument
            If the vertex is not in the machine.
        """
        if vertex not in self._links:
            raise InvalidArgument(
                f"no {vertex.kind.name} {vertex.name!r} in this machine; name a part that it has"
            )
        return self._links[vertex]

    def capacities(self) -> dict[Hop, int]:
        """Return the bandwidth of every link, in Mbit/s, in each direction."""
        return {
            (min(a, b), max(a, b)): link.bandwidth_mbps
            for a, near in self._links.items()
            for b, link in near.items()
        }

    def processor(self, bus_id: str) -> Vertex:
        """Return the vertex of the NUMA node that the PCI device `bus_id` belongs to.

        Raises
        ------
        InvalidArgument
            If the machine has no such device.
        """
        return _processor(self.machine.device(bus_id).numa_node)

    def _connect(self, a: Vertex, b: Vertex, medium: Medium, mbps: int) -> None:
        # Parallel links of one medium add up. If the media differ, only the fastest link counts.
        link = Link(mbps, medium)
        there = self._links.setdefault(a, {}).get(b)
        if there is not None and there.medium is medium:
            link = Link(there.bandwidth_mbps + mbps, medium)
        elif there is not None:
            link = max(there, link)
        self._links[a][b] = self._links.setdefault(b, {})[a] = link

    def _add_nodes(self) -> None:
        for node in self.machine.nodes:
            self._links[_processor(node.id)] = {}
        for one, other in combinations(self.machine.nodes, 2):
            mbps = min(socket_mbps(one), socket_mbps(other))
            self._connect(_processor(one.id), _processor(other.id), Medium.SOCKET, mbps)

    def _add_pci(self) -> None:
        vertices = dict(self._pci_vertices())
        done: set[Vertex] = set()
        for device in self.machine.pci:
            vertex = vertices[device.bus_id]
            if vertex not in done:  # the functions of a NIC share its link
                done.add(vertex)
                up = vertices[device.parent] if device.parent else _processor(device.numa_node)
                self._connect(vertex, up, Medium.PCI, pcie_mbps(device.speed_mtps, device.width))

    def _pci_vertices(self) -> Iterator[tuple[str, Vertex]]:
        gpus = {gpu.bus_id for gpu in self.machine.gpus}
        nics = {port.bus_id for port in self.machine.ports}
        for device in self.machine.pci:
            bus_id = device.bus_id
            if bus_id in nics and bus_id not in gpus:
                yield bus_id, _nic(bus_id)
            else:
                yield bus_id, Vertex(VertexKind.GPU if bus_id in gpus else VertexKind.PCI, bus_id)

    def _add_ports(self, speeds: Mapping[str, int]) -> None:
        for port in self.machine.ports:
            nic = _nic(port.bus_id) if port.bus_id else Vertex(VertexKind.NIC, port.name)
            if nic not in self._links:  # it has no PCI device
                self._connect(nic, _processor(port.numa_node), Medium.PCI, LOCAL_MBPS)
            mbps = speeds.get(port.label, port.speed_mbps)
            self._connect(nic, Vertex(VertexKind.PORT, port.label), Medium.PORT, mbps)

    def _add_nvlinks(self) -> None:
        between_gpus: dict[Hop, int] = {}
        for link in self.machine.nvlinks:
            gpu, target = Vertex(VertexKind.GPU, link.gpu), Vertex(VertexKind.GPU, link.target)
            mbps = link.count * nvlink_mbps(self.machine.gpu(link.gpu).compute_capability)
            if link.end is LinkEnd.SWITCH:
                self._connect(gpu, _SWITCHES, Medium.NVLINK, mbps)
            elif link.end is LinkEnd.CPU:
                self._connect(gpu, self.processor(link.gpu), Medium.NVLINK, mbps)
            elif target in self._links:  # each end reports the links between two GPUs
                hop = min(gpu, target), max(gpu, target)
                between_gpus[hop] = max(mbps, between_gpus.get(hop, 0))
        for (one, other), mbps in between_gpus.items():
            self._connect(one, other, Medium.NVLINK, mbps)
        for each in self.machine.gpus:
            if each.c2c_nlinks:
                vertex, mbps = Vertex(VertexKind.GPU, each.bus_id), each.c2c_nlinks * each.c2c_mbps
                self._connect(vertex, self.processor(each.bus_id), Medium.C2C, mbps)


def _checked(machine: Machine, speeds: Mapping[str, int]) -> Mapping[str, int]:
    for label, mbps in speeds.items():
        machine.port(label)
        if mbps < 0:
            raise InvalidArgument(
                f"port {label} has a rate of {mbps} Mbit/s; give 0 (lost) or more"
            )
    return speeds


def _processor(node: int) -> Vertex:
    return Vertex(VertexKind.CPU, str(node))


def _nic(bus_id: str) -> Vertex:
    return Vertex(VertexKind.NIC, bus_id.rpartition(".")[0])


__all__ = ["Graph", "Hop", "Link", "Medium", "Vertex", "VertexKind"]
