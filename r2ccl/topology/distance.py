"""Search for the best path between two GPUs, NIC ports or processors of a machine.

The best path is the shortest of the paths with the highest bandwidth. A path may pass through
processors, switches and NICs. Two exceptions:

- Between two GPUs, if the best path does not consist of NVLinks alone or there is none, a path of
  NVLinks through a third GPU is used if it is faster.
- Between a GPU and a port that cannot access the memory of the GPU, the path leads through the
  processor of the GPU.

Bandwidths in this module assume an idle machine; `flows` takes traffic into account.

Invariant: every choice depends only on integers and the order of vertices, so equal machines have
equal paths on every host.

References
----------
NCCL, src/graph/topo.h and src/graph/paths.cc: names and meaning of distances.
"""

from __future__ import annotations

import enum
from collections import Counter
from itertools import pairwise

import msgspec

from r2ccl.topology.bandwidths import LOCAL_MBPS
from r2ccl.topology.graph import Graph, Hop, Medium, Vertex, VertexKind


class Distance(enum.IntEnum):
    """Class of a path in NCCL's terms, by the links and devices it passes; nearest first."""

    LOC = 0  #: within one device
    NVL = 1  #: over NVLink, with or without an NVSwitch
    NVB = 2  #: over NVLink, through a third GPU
    C2C = 3  #: over NVLink-C2C, between a GPU and its processor
    PIX = 4  #: through at most one PCI switch
    PXB = 5  #: through several PCI switches
    P2C = 6  #: over NVLink-C2C to the processor, then over PCI
    PXN = 7  #: over NVLink to another GPU, then through PCI switches, or over NVLink-C2C and PCI
    PHB = 8  #: through the processor of one NUMA node
    SYS = 9  #: through the processors of several NUMA nodes


class TopologyPath(msgspec.Struct, frozen=True):
    """Best path between two vertices of a machine's graph.

    ``vertices`` are the vertices in order, including both ends. ``bandwidth_mbps`` is the
    bandwidth without other traffic, in Mbit/s; a link that the path passes twice counts with half
    its bandwidth.
    """

    distance: Distance
    bandwidth_mbps: int
    vertices: tuple[Vertex, ...]

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Links of the path in order; a link that the path passes twice occurs twice."""
        return _hops(self.vertices)


#: Kinds of vertices that the paths of `PathFinder._shortest` pass through. GPUs and ports can only
#: be their ends.
_TRANSIT = frozenset((VertexKind.CPU, VertexKind.PCI, VertexKind.NVS, VertexKind.NIC))


class PathFinder:
    """Search for best paths in a graph, with a cache of the paths found.

    Parameters
    ----------
    graph : Graph
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._widths = sorted(set(graph.capacities().values()) - {0}, reverse=True)
        self._found: dict[tuple[Vertex, Vertex], TopologyPath | None] = {}

    def between(self, start: Vertex, end: Vertex) -> TopologyPath | None:
        """Return the best path from `start` to `end`, or None if they are not connected.

        If a port cannot access the memory of a GPU (`has_gdr` is false for the port or for the
        GPU), the path between the two passes through the CPU to which the GPU is attached, and the
        data is copied there.

        Raises
        ------
        InvalidArgument
            If `start` or `end` is not in the machine.
        """
        for vertex in (start, end):
            self._graph.neighbours(vertex)
        if (start, end) not in self._found:
            self._found[start, end] = self._best(start, end)
        return self._found[start, end]

    def _best(self, start: Vertex, end: Vertex) -> TopologyPath | None:
        if start == end:
            return TopologyPath(Distance.LOC, LOCAL_MBPS, (start,))
        if start > end:  # links are symmetric
            back = self.between(end, start)
            return back and TopologyPath(back.distance, back.bandwidth_mbps, back.vertices[::-1])
        if (
            start.kind is VertexKind.GPU
            and end.kind is VertexKind.PORT
            and not self._reaches(end, start)
        ):
            return self._over(start, self._graph.processor(start.name), end)
        direct = self._search(start, end)
        if start.kind is end.kind is VertexKind.GPU and (
            direct is None or direct.distance > Distance.NVL
        ):
            return self._over_a_gpu(start, end, direct)
        return direct

    def _reaches(self, port: Vertex, gpu: Vertex) -> bool:
        machine = self._graph.machine
        return machine.port(port.name).has_gdr and machine.gpu(gpu.name).has_gdr

    def _over_a_gpu(
        self, start: Vertex, end: Vertex, direct: TopologyPath | None
    ) -> TopologyPath | None:
        """Return the fastest NVLink path through a third GPU, or `direct` if none is faster."""
        best = direct
        for gpu in self._graph.machine.gpus:
            middle = Vertex(VertexKind.GPU, gpu.bus_id)
            if middle in (start, end):
                continue
            first, second = self._search(start, middle), self._search(middle, end)
            if first is None or second is None:
                continue
            if first.distance is second.distance is Distance.NVL:
                mbps = min(first.bandwidth_mbps, second.bandwidth_mbps)
                if best is None or mbps > best.bandwidth_mbps:
                    best = TopologyPath(Distance.NVB, mbps, (*first.vertices, *second.vertices[1:]))
        return best

    def _over(self, start: Vertex, middle: Vertex, end: Vertex) -> TopologyPath | None:
        first, second = self._search(start, middle), self._search(middle, end)
        if first is None or second is None:
            return None
        return self._path((*first.vertices, *second.vertices[1:]))

    def _search(self, start: Vertex, end: Vertex) -> TopologyPath | None:
        """Return the shortest of the fastest paths, or None if there is no path.

        The search starts with the fastest links only, and admits slower ones until a path exists.
        """
        for least in self._widths:
            vertices = self._shortest(start, end, least)
            if vertices is not None:
                return self._path(vertices)
        return None

    def _shortest(self, start: Vertex, end: Vertex, least: int) -> tuple[Vertex, ...] | None:
        """Return the vertices of a shortest path over links of at least `least` Mbit/s.

        Return None if there is no such path.
        """
        came_from = {start: start}
        front = [start]
        while front and end not in came_from:
            passed = [vertex for vertex in front if vertex == start or vertex.kind in _TRANSIT]
            front = []
            for vertex in passed:
                for near, link in self._graph.neighbours(vertex).items():
                    if near not in came_from and link.bandwidth_mbps >= least:
                        came_from[near] = vertex
                        front.append(near)
        if end not in came_from:
            return None
        back = [end]
        while back[-1] != start:
            back.append(came_from[back[-1]])
        return tuple(back[::-1])

    def _path(self, vertices: tuple[Vertex, ...]) -> TopologyPath:
        hops = _hops(vertices)
        links = [self._graph.neighbours(low)[high] for low, high in hops]
        distances = [_distance(*hop, link.medium) for hop, link in zip(hops, links, strict=True)]
        farthest = max(distances)
        if farthest is Distance.PHB and Distance.C2C in distances:
            farthest = Distance.P2C
        times = Counter(hops)
        mbps = min(link.bandwidth_mbps // times[hop] for hop, link in zip(hops, links, strict=True))
        return TopologyPath(farthest, mbps, vertices)


def _hops(vertices: tuple[Vertex, ...]) -> tuple[Hop, ...]:
    return tuple((min(pair), max(pair)) for pair in pairwise(vertices))


def _distance(a: Vertex, b: Vertex, medium: Medium) -> Distance:
    """Return the distance class of a single link."""
    if medium is not Medium.PCI:
        return _MEDIA[medium]
    if VertexKind.CPU in (a.kind, b.kind):
        return Distance.PHB
    return Distance.PXB if a.kind is b.kind is VertexKind.PCI else Distance.PIX


_MEDIA = {
    Medium.NVLINK: Distance.NVL,
    Medium.C2C: Distance.C2C,
    Medium.SOCKET: Distance.SYS,
    Medium.PORT: Distance.LOC,
}


__all__ = ["Distance", "PathFinder", "TopologyPath"]
