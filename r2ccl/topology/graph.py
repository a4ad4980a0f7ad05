"""A machine as places and the links between them.

Places are processors (NUMA nodes), PCI switches, NICs and their ports, GPUs, and one for all
NVSwitches. Must not search for ways (`distance` does). Invariant: neighbours come in the order of
places, so a search over equal machines finds equal ways on every host.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from r2ccl.errors import InvalidArgument
from r2ccl.topology.bandwidths import LOCAL_MBPS, nvlink_mbps, pcie_mbps, socket_mbps
from r2ccl.topology.machine import LinkEnd, Machine


class Kind(enum.IntEnum):
    """What a place is."""

    CPU = 0
    PCI = 1
    NVS = 2
    GPU = 3
    NIC = 4
    PORT = 5


class Place(NamedTuple):
    """A place in a machine.

    ``name`` is the bus id of a GPU or a switch, that of a NIC without its function (functions share
    a link), a NUMA node's id, a port's label.
    """

    kind: Kind
    name: str


class Medium(enum.IntEnum):
    """What a link between two places is."""

    PCI = 0
    NVLINK = 1
    C2C = 2
    SOCKET = 3
    PORT = 4


class Link(NamedTuple):
    """What joins two places, the same both ways."""

    bandwidth_mbps: int
    medium: Medium


#: Two neighbours, the lower first.
Hop = tuple[Place, Place]

_SWITCHES = Place(Kind.NVS, "")


class Graph:
    """The places of a machine, and their links.

    Parameters
    ----------
    machine : Machine
    speeds : mapping of str to int
        Labels of ports whose rate is another than the nominal one, Mbit/s; 0: nothing passes.

    Raises
    ------
    InvalidArgument
        A rate is negative, or of a port that is not there.
    """

    def __init__(self, machine: Machine, speeds: Mapping[str, int] | None = None) -> None:
        self.machine = machine
        self._links: dict[Place, dict[Place, Link]] = {}
        self._add_nodes()
        self._add_pci()
        self._add_ports(_checked(machine, speeds or {}))
        self._add_nvlinks()
        self._links = {place: dict(sorted(near.items())) for place, near in self._links.items()}

    def neighbours(self, place: Place) -> Mapping[Place, Link]:
        """Return the links of a place, in the order of the places they lead to.

        Raises
        ------
        InvalidArgument
            It is not in the machine.
        """
        if place not in self._links:
            raise InvalidArgument(
                f"no {place.kind.name} {place.name!r} in this machine: name a place that is there"
            )
        return self._links[place]

    def capacities(self) -> dict[Hop, int]:
        """Return every link and what it carries, Mbit/s."""
        return {
            (min(a, b), max(a, b)): link.bandwidth_mbps
            for a, near in self._links.items()
            for b, link in near.items()
        }

    def processor(self, bus_id: str) -> Place:
        """Return the place of the NUMA node a PCI device belongs to."""
        return _processor(self.machine.device(bus_id).numa_node)

    def _connect(self, a: Place, b: Place, medium: Medium, mbps: int) -> None:
        """Add a link; those of one medium between two places add up, of two the wider counts."""
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
        places = dict(self._pci_places())
        done: set[Place] = set()
        for device in self.machine.pci:
            place = places[device.bus_id]
            if place not in done:  # the functions of a NIC share its link
                done.add(place)
                up = places[device.parent] if device.parent else _processor(device.numa_node)
                self._connect(place, up, Medium.PCI, pcie_mbps(device.speed_mtps, device.width))

    def _pci_places(self) -> Iterator[tuple[str, Place]]:
        gpus = {gpu.bus_id for gpu in self.machine.gpus}
        nics = {port.bus_id for port in self.machine.ports}
        for device in self.machine.pci:
            bus_id = device.bus_id
            kind = Kind.GPU if bus_id in gpus else Kind.NIC if bus_id in nics else Kind.PCI
            yield bus_id, _nic(bus_id) if kind is Kind.NIC else Place(kind, bus_id)

    def _add_ports(self, speeds: Mapping[str, int]) -> None:
        for port in self.machine.ports:
            nic = _nic(port.bus_id) if port.bus_id else Place(Kind.NIC, port.name)
            if nic not in self._links:  # it has no PCI device
                self._connect(nic, _processor(port.numa_node), Medium.PCI, LOCAL_MBPS)
            mbps = speeds.get(port.label, port.speed_mbps)
            self._connect(nic, Place(Kind.PORT, port.label), Medium.PORT, mbps)

    def _add_nvlinks(self) -> None:
        between_gpus: dict[Hop, int] = {}
        for link in self.machine.nvlinks:
            gpu, target = Place(Kind.GPU, link.gpu), Place(Kind.GPU, link.target)
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
                place, mbps = Place(Kind.GPU, each.bus_id), each.c2c_nlinks * each.c2c_mbps
                self._connect(place, self.processor(each.bus_id), Medium.C2C, mbps)


def _checked(machine: Machine, speeds: Mapping[str, int]) -> Mapping[str, int]:
    for label, mbps in speeds.items():
        machine.port(label)
        if mbps < 0:
            raise InvalidArgument(f"port {label} at {mbps} Mbit/s: allowed are 0 and above")
    return speeds


def _processor(node: int) -> Place:
    return Place(Kind.CPU, str(node))


def _nic(bus_id: str) -> Place:
    return Place(Kind.NIC, bus_id.rpartition(".")[0])


__all__ = ["Graph", "Hop", "Kind", "Link", "Medium", "Place"]
