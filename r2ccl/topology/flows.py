"""Routes of flows from GPUs to NIC ports, and the bandwidth that each flow gets on its route.

A flow is the traffic of one channel of one GPU. Flows that share a link are assumed to get equal
parts of its bandwidth. `affinity` decides which flows exist. Invariant: every choice depends only
on integers and a fixed order, so equal machines and flows give equal routes in every process of a
host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.topology.distance import Distance, PathFinder, TopologyPath
from r2ccl.topology.graph import Graph, Hop, Vertex, VertexKind
from r2ccl.topology.machine import Machine


class NicRoute(msgspec.Struct, frozen=True):
    """Route of one flow to a NIC port.

    ``gpu`` is the bus id of the GPU where the flow starts, empty for host memory; ``channel`` is
    the number of the flow among the flows of the GPU, from 0; ``port`` is the label of the NIC
    port. ``via`` is the bus id of the GPU through whose memory the route passes, None for a direct
    route. ``bandwidth_mbps`` is the bandwidth of the route without other flows, and ``share_mbps``
    is the part that this flow gets if other flows use the same links, both in Mbit/s. ``why`` is
    the reason for the choice of the route, as text for people.
    """

    gpu: str
    channel: int
    port: str
    via: str | None
    distance: Distance
    bandwidth_mbps: int
    share_mbps: int
    why: str

    def __str__(self) -> str:
        start = f"GPU {self.gpu}" if self.gpu else "host memory"
        through = f" through GPU {self.via}" if self.via else ""
        share, alone = gbps(self.share_mbps), gbps(self.bandwidth_mbps)
        rate = f"{alone} GB/s" if share == alone else f"{share} of {alone} GB/s"
        return f"{start} to {self.port}{through} ({self.distance.name}, {rate}): {self.why}"


class Option(NamedTuple):
    """Possible route from a GPU to a port.

    ``hops`` counts how often the route passes each link. The other fields are as in `NicRoute`.
    """

    gpu: str
    port: str
    via: str | None
    distance: Distance
    bandwidth_mbps: int
    hops: Counter[Hop]


class Options:
    """Possible routes from every GPU to every port: directly, or through a GPU near the port.

    Parameters
    ----------
    machine : Machine
    gpus, ports : sequence of str
        Bus ids of the GPUs in use, and labels of the ports in use.
    speeds : mapping of str to int
        Rates in Mbit/s that replace the nominal rates of ports, by label; 0: the port is lost.

    Attributes
    ----------
    ports : sequence of str
        Labels of the ports in use.
    capacity : dict of Hop to int
        Bandwidth of each link in Mbit/s.

    Raises
    ------
    InvalidArgument
        If a GPU or a port is not in the machine, or a rate is negative.
    """

    def __init__(
        self,
        machine: Machine,
        gpus: Sequence[str],
        ports: Sequence[str],
        speeds: Mapping[str, int],
    ) -> None:
        graph = Graph(machine, speeds)
        self._paths = PathFinder(graph)
        self.ports = ports
        self.capacity = graph.capacities()
        nearest = {port: list(self._nearest(gpus, port)) for port in ports}
        self._found = {
            (gpu, port): list(self._options(gpu, port, nearest[port]))
            for gpu in gpus
            for port in ports
        }

    def of(self, gpu: str, port: str) -> list[Option]:
        """Return the possible routes from a GPU to a port; a direct route comes first.

        The list is empty if there is no route, or if the GPU or the port is not in use.
        """
        return self._found.get((gpu, port), [])

    def _path(self, gpu: str, port: str) -> TopologyPath | None:
        return self._paths.between(Vertex(VertexKind.GPU, gpu), Vertex(VertexKind.PORT, port))

    def _nearest(self, gpus: Sequence[str], port: str) -> Iterator[tuple[str, TopologyPath]]:
        """Yield each GPU that may relay traffic of other GPUs to `port`, and its path to `port`.

        These are the GPUs with the best path to the port, if the class of that path is not farther
        than `Distance.P2C`.
        """
        paths = [(gpu, path) for gpu in gpus if (path := self._path(gpu, port)) is not None]
        if paths:
            best = min((-path.bandwidth_mbps, path.distance) for _, path in paths)
            for gpu, path in paths:
                is_best = (-path.bandwidth_mbps, path.distance) == best
                if is_best and path.distance <= Distance.P2C:
                    yield gpu, path

    def _options(
        self, gpu: str, port: str, nearest: Iterable[tuple[str, TopologyPath]]
    ) -> Iterator[Option]:
        direct = self._path(gpu, port)
        if direct is not None:
            mbps = direct.bandwidth_mbps
            yield Option(gpu, port, None, direct.distance, mbps, Counter(direct.hops))
        for via, onward in nearest:
            over = self._paths.between(Vertex(VertexKind.GPU, gpu), Vertex(VertexKind.GPU, via))
            if over is not None and over.distance is Distance.NVL:
                mbps = min(over.bandwidth_mbps, onward.bandwidth_mbps)
                hops = Counter((*over.hops, *onward.hops))
                yield Option(gpu, port, via, Distance.PXN, mbps, hops)


class Load:
    """Number of flows on each link of a machine, and placement of further flows.

    Parameters
    ----------
    options : Options
        Routes to choose from. Initially there is no flow.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._flows: Counter[Hop] = Counter()
        self._in_use: Counter[str] = Counter()

    def add(self, route: NicRoute) -> None:
        """Add a flow that already has a route.

        Raises
        ------
        InvalidArgument
            If `route` is not one of the possible routes.
        """
        self._count(self._option_of(route))

    def settle(self, routes: Iterable[NicRoute]) -> list[NicRoute]:
        """Return `routes` with ``share_mbps`` recomputed from all flows added so far.

        The flows of `routes` must have been added before.

        Raises
        ------
        InvalidArgument
            If one of `routes` is not one of the possible routes.
        """
        return [
            msgspec.structs.replace(
                route,
                share_mbps=min(
                    self._options.capacity[hop] // self._flows[hop]
                    for hop in self._option_of(route).hops
                ),
            )
            for route in routes
        ]

    def place(
        self, flows: Sequence[tuple[str, int]], causes: Mapping[tuple[str, int], str]
    ) -> list[NicRoute]:
        """Add flows, each on the route that gives it the most bandwidth.

        The next flow to add is always the one that can get the most bandwidth.

        Parameters
        ----------
        flows : sequence of (str, int)
            Bus id of the GPU, and channel, of each flow.
        causes : mapping of (str, int) to str
            Reason for moving each moved flow; `NicRoute.why` begins with this text. Flows that are
            placed for the first time are not in this mapping.

        Returns
        -------
        list of NicRoute
            Routes in the order of placement, each with the ``share_mbps`` at the moment of its
            placement. Flows without a possible route are left out.
        """
        waiting = list(flows)
        placed: list[NicRoute] = []
        while True:
            gpus = dict.fromkeys(gpu for gpu, _ in waiting)
            best = {gpu: path for gpu in gpus if (path := self._best(gpu))}
            if not best:
                return placed
            gpu = min(best, key=lambda each: self._rank(best[each]))
            flow = next(each for each in waiting if each[0] == gpu)
            placed.append(self._route(best[gpu], flow[1], causes.get(flow, "first choice")))
            self._count(best[gpu])
            waiting.remove(flow)

    def ranked(self, home: NicRoute, turn: int) -> list[NicRoute]:
        """Return the best route of GPU ``home.gpu`` to each port except ``home.port``, best first.

        Ports that the GPU cannot reach are left out. Equally good routes are in the order of the
        ports, beginning with port number `turn` modulo the number of ports. No flow is added.
        """
        ports = self._options.ports
        ahead = [*ports[turn % len(ports) :], *ports[: turn % len(ports)]]
        paths = (self._options.of(home.gpu, port) for port in ahead if port != home.port)
        best = [min(found, key=self._rank) for found in paths if found]
        return [self._route(option, 0, "backup") for option in sorted(best, key=self._rank)]

    def _count(self, option: Option) -> None:
        self._flows.update(option.hops)
        self._in_use[option.port] += 1

    def _option_of(self, route: NicRoute) -> Option:
        for option in self._options.of(route.gpu, route.port):
            if option.via == route.via:
                return option
        raise no_such_route(route)

    def _best(self, gpu: str) -> Option | None:
        """Return the best route for one more flow of a GPU, or None if there is none."""
        paths = (option for port in self._options.ports for option in self._options.of(gpu, port))
        return min(paths, key=self._rank, default=None)

    def _rank(self, option: Option) -> tuple[int, Distance, int]:
        """Return a sort key: most bandwidth, then nearest port, then port with fewest flows."""
        return -self._share(option), option.distance, self._in_use[option.port]

    def _share(self, option: Option) -> int:
        """Return the bandwidth that one more flow on a route would get, in Mbit/s."""
        return min(
            self._options.capacity[hop] // (self._flows[hop] + times)
            for hop, times in option.hops.items()
        )

    def _route(self, option: Option, channel: int, cause: str) -> NicRoute:
        return NicRoute(
            gpu=option.gpu,
            channel=channel,
            port=option.port,
            via=option.via,
            distance=option.distance,
            bandwidth_mbps=option.bandwidth_mbps,
            share_mbps=self._share(option),
            why=cause + self._instead(option),
        )

    def _instead(self, option: Option) -> str:
        """Describe why `option`, a route through another GPU, is better than the direct route.

        Return an empty string if `option` is direct, or if there is no direct route.
        """
        direct = [each for each in self._options.of(option.gpu, option.port) if not each.via]
        if option.via is None or not direct:
            return ""
        share, name = self._share(direct[0]), direct[0].distance.name
        if share < self._share(option):
            return f"; a direct route gives {gbps(share)} GB/s ({name})"
        return f"; a direct route gives no more and passes a processor ({name})"


def no_such_route(route: NicRoute) -> InvalidArgument:
    """Return the error for a route of another machine, or of GPUs or ports that are not in use."""
    return InvalidArgument(
        f"the GPUs and ports in use have no such route: {route}; pass routes that assign() of this "
        "Affinity returned"
    )


def gbps(mbps: int) -> str:
    """Convert `mbps` from Mbit/s to GB/s, and return it as text with one decimal."""
    return f"{mbps / 8000:.1f}"


__all__ = ["Load", "NicRoute", "Options", "gbps", "no_such_route"]
