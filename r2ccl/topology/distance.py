"""Ways through a machine: the best one between any two of its GPUs, NIC ports and processors.

The best way is the widest, then the shortest. Data passes through processors and switches, never
through the memory of a third GPU, except between two GPUs and over NVLink alone. Must not weigh one
traffic against another (`affinity` does).

Invariant: whole numbers and the order of places decide, so equal machines have equal ways on every
host.

References
----------
NCCL, src/graph/topo.h and src/graph/paths.cc: the names of distances and what they mean.
"""

from __future__ import annotations

import enum
from collections import Counter
from itertools import pairwise

import msgspec

from r2ccl.topology.bandwidths import LOCAL_MBPS
from r2ccl.topology.graph import Graph, Hop, Kind, Medium, Place


class Distance(enum.IntEnum):
    """NCCL's names for what a way leads through, nearest first."""

    LOC = 0  #: nothing: it is the same device
    NVL = 1  #: NVLink, with or without an NVSwitch
    NVB = 2  #: NVLink, with the memory of a third GPU between
    C2C = 3  #: NVLink-C2C, between a GPU and its processor
    PIX = 4  #: one PCI switch at most
    PXB = 5  #: several PCI switches
    P2C = 6  #: NVLink-C2C, and PCI from the processor on
    PXN = 7  #: NVLink to another GPU, and PCI switches from there
    PHB = 8  #: a processor
    SYS = 9  #: processors of several NUMA nodes


class Way(msgspec.Struct, frozen=True):
    """The best way between two places; ``places`` are those it passes, both ends included."""

    distance: Distance
    bandwidth_mbps: int
    places: tuple[Place, ...]

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The links it takes, in order; to a processor and back is one link twice."""
        return _hops(self.places)


#: What data passes on its way; a NIC only towards a port of its own.
_TRANSIT = frozenset((Kind.CPU, Kind.PCI, Kind.NVS, Kind.NIC))


class Ways:
    """The best ways of a graph, each searched for once.

    Parameters
    ----------
    graph : Graph
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._widths = sorted(set(graph.capacities().values()) - {0}, reverse=True)
        self._found: dict[tuple[Place, Place], Way | None] = {}

    def between(self, start: Place, end: Place) -> Way | None:
        """Return the best way; None where nothing passes.

        Between a GPU and a port that cannot reach its memory, the way leads through the GPU's
        processor, where the data is copied.

        Raises
        ------
        InvalidArgument
            A place is not in the machine.
        """
        for place in (start, end):
            self._graph.neighbours(place)
        if (start, end) not in self._found:
            self._found[start, end] = self._best(start, end)
        return self._found[start, end]

    def _best(self, start: Place, end: Place) -> Way | None:
        if start == end:
            return Way(Distance.LOC, LOCAL_MBPS, (start,))
        if start > end:  # links are the same both ways
            back = self.between(end, start)
            return back and Way(back.distance, back.bandwidth_mbps, back.places[::-1])
        if start.kind is Kind.GPU and end.kind is Kind.PORT and not self._reaches(end, start):
            return self._over(start, self._graph.processor(start.name), end)
        direct = self._search(start, end)
        if start.kind is end.kind is Kind.GPU and (
            direct is None or direct.distance > Distance.NVL
        ):
            return self._over_a_gpu(start, end, direct)
        return direct

    def _reaches(self, port: Place, gpu: Place) -> bool:
        machine = self._graph.machine
        return machine.port(port.name).has_gdr and machine.gpu(gpu.name).has_gdr

    def _over_a_gpu(self, start: Place, end: Place, direct: Way | None) -> Way | None:
        """Return the widest way over NVLinks of a third GPU, if it is wider than the direct one."""
        best = direct
        for gpu in self._graph.machine.gpus:
            middle = Place(Kind.GPU, gpu.bus_id)
            if middle in (start, end):
                continue
            first, second = self._search(start, middle), self._search(middle, end)
            if first is None or second is None:
                continue
            if first.distance is second.distance is Distance.NVL:
                mbps = min(first.bandwidth_mbps, second.bandwidth_mbps)
                if best is None or mbps > best.bandwidth_mbps:
                    best = Way(Distance.NVB, mbps, (*first.places, *second.places[1:]))
        return best

    def _over(self, start: Place, middle: Place, end: Place) -> Way | None:
        first, second = self._search(start, middle), self._search(middle, end)
        if first is None or second is None:
            return None
        return self._way((*first.places, *second.places[1:]))

    def _search(self, start: Place, end: Place) -> Way | None:
        """Find the widest way by trying ever narrower links, and the shortest of those."""
        for least in self._widths:
            places = self._shortest(start, end, least)
            if places is not None:
                return self._way(places)
        return None

    def _shortest(self, start: Place, end: Place, least: int) -> tuple[Place, ...] | None:
        """Search breadth first over links that carry `least`."""
        came_from = {start: start}
        front = [start]
        while front and end not in came_from:
            passed = [place for place in front if place == start or place.kind in _TRANSIT]
            front = []
            for place in passed:
                for near, link in self._graph.neighbours(place).items():
                    if near not in came_from and link.bandwidth_mbps >= least:
                        came_from[near] = place
                        front.append(near)
        if end not in came_from:
            return None
        back = [end]
        while back[-1] != start:
            back.append(came_from[back[-1]])
        return tuple(back[::-1])

    def _way(self, places: tuple[Place, ...]) -> Way:
        hops = _hops(places)
        links = [self._graph.neighbours(low)[high] for low, high in hops]
        distances = [_distance(*hop, link.medium) for hop, link in zip(hops, links, strict=True)]
        farthest = max(distances)
        if farthest is Distance.PHB and Distance.C2C in distances:
            farthest = Distance.P2C
        times = Counter(hops)
        mbps = min(link.bandwidth_mbps // times[hop] for hop, link in zip(hops, links, strict=True))
        return Way(farthest, mbps, places)


def _hops(places: tuple[Place, ...]) -> tuple[Hop, ...]:
    return tuple((min(pair), max(pair)) for pair in pairwise(places))


def _distance(a: Place, b: Place, medium: Medium) -> Distance:
    """Return how far a single link leads."""
    if medium is not Medium.PCI:
        return _MEDIA[medium]
    if Kind.CPU in (a.kind, b.kind):
        return Distance.PHB
    return Distance.PXB if a.kind is b.kind is Kind.PCI else Distance.PIX


_MEDIA = {
    Medium.NVLINK: Distance.NVL,
    Medium.C2C: Distance.C2C,
    Medium.SOCKET: Distance.SYS,
    Medium.PORT: Distance.LOC,
}


__all__ = ["Distance", "Way", "Ways"]
