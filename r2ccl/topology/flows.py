"""Flows: the traffic of GPUs to NIC ports, and what each link of a machine has left beside it.

A flow is one channel of one GPU. Flows that share a link are taken to get equal parts of it. Must
not decide which flows there are (`affinity` does). Invariant: whole numbers and a fixed order
decide, so equal machines and equal flows give equal routes in every process of a host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.topology.distance import Distance, Way, Ways
from r2ccl.topology.graph import Graph, Hop, Kind, Place
from r2ccl.topology.machine import Machine


class Route(msgspec.Struct, frozen=True):
    """How one flow reaches a NIC.

    ``gpu`` is a bus id, empty for host memory; ``channel`` numbers the flows of a GPU; ``port`` is
    a label. ``via`` is the bus id of the GPU whose memory it goes through, None: directly.
    ``bandwidth_mbps`` is what the way carries alone, ``share_mbps`` what this flow gets of it
    beside the others. ``why`` is for people, as is ``str()``.
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
    """One way of a GPU to a port."""

    gpu: str
    port: str
    via: str | None
    distance: Distance
    bandwidth_mbps: int
    hops: Counter[Hop]


class Options:
    """Every way of every GPU to every port that something passes on.

    Parameters
    ----------
    machine : Machine
    gpus, ports : sequence of str
        Bus ids and labels of those in use.
    speeds : mapping of str to int
        Labels of ports whose rate is another than the nominal one, Mbit/s.

    Attributes
    ----------
    ports : sequence of str
        As given.
    capacity : dict of Hop to int
        What each link of the machine carries, Mbit/s.

    Raises
    ------
    InvalidArgument
        A GPU or a port is not in the machine, or a rate is negative.
    """

    def __init__(
        self,
        machine: Machine,
        gpus: Sequence[str],
        ports: Sequence[str],
        speeds: Mapping[str, int],
    ) -> None:
        graph = Graph(machine, speeds)
        self._ways = Ways(graph)
        self.ports = ports
        self.capacity = graph.capacities()
        nearest = {port: list(self._nearest(gpus, port)) for port in ports}
        self._found = {
            (gpu, port): list(self._options(gpu, port, nearest[port]))
            for gpu in gpus
            for port in ports
        }

    def of(self, gpu: str, port: str) -> list[Option]:
        """Return the ways of a GPU to a port, the direct one first; none where nothing passes."""
        return self._found.get((gpu, port), [])

    def _way(self, gpu: str, port: str) -> Way | None:
        return self._ways.between(Place(Kind.GPU, gpu), Place(Kind.PORT, port))

    def _nearest(self, gpus: Sequence[str], port: str) -> Iterator[tuple[str, Way]]:
        """Return the GPUs beside a port: those that may carry the traffic of others to it."""
        ways = [(gpu, way) for gpu in gpus if (way := self._way(gpu, port)) is not None]
        if ways:
            best = min((-way.bandwidth_mbps, way.distance) for _, way in ways)
            for gpu, way in ways:
                is_best = (-way.bandwidth_mbps, way.distance) == best
                if is_best and way.distance <= Distance.P2C:
                    yield gpu, way

    def _options(self, gpu: str, port: str, nearest: Iterable[tuple[str, Way]]) -> Iterator[Option]:
        direct = self._way(gpu, port)
        if direct is not None:
            mbps = direct.bandwidth_mbps
            yield Option(gpu, port, None, direct.distance, mbps, Counter(direct.hops))
        for via, onward in nearest:
            over = self._ways.between(Place(Kind.GPU, gpu), Place(Kind.GPU, via))
            if over is not None and over.distance is Distance.NVL:
                mbps = min(over.bandwidth_mbps, onward.bandwidth_mbps)
                hops = Counter((*over.hops, *onward.hops))
                yield Option(gpu, port, via, Distance.PXN, mbps, hops)


class Load:
    """How many flows each link of the machine carries, none at first.

    Parameters
    ----------
    options : Options
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._flows: Counter[Hop] = Counter()
        self._in_use: Counter[str] = Counter()

    def add(self, route: Route) -> None:
        """Count a flow that is there.

        Raises
        ------
        InvalidArgument
            There is no such way.
        """
        self._count(self._way_of(route))

    def settle(self, routes: Iterable[Route]) -> list[Route]:
        """Return routes, all of which are counted, with what each of them gets now."""
        return [
            msgspec.structs.replace(
                route,
                share_mbps=min(
                    self._options.capacity[hop] // self._flows[hop]
                    for hop in self._way_of(route).hops
                ),
            )
            for route in routes
        ]

    def place(
        self, flows: Sequence[tuple[str, int]], causes: Mapping[tuple[str, int], str]
    ) -> list[Route]:
        """Place flows, given as (GPU, channel), where they get most, and count them.

        The one that can have most comes first. The routes are in this order, each with its share
        at that time. `causes` say for people why a flow is placed, where something is amiss.
        """
        waiting = list(flows)
        placed: list[Route] = []
        while True:
            gpus = dict.fromkeys(gpu for gpu, _ in waiting)
            best = {gpu: way for gpu in gpus if (way := self._best(gpu))}
            if not best:
                return placed
            gpu = min(best, key=lambda each: self._rank(best[each]))
            flow = next(each for each in waiting if each[0] == gpu)
            placed.append(self._route(best[gpu], flow[1], causes.get(flow, "first choice")))
            self._count(best[gpu])
            waiting.remove(flow)

    def ranked(self, home: Route, turn: int) -> list[Route]:
        """Return a GPU's way to every port but its home, best first; `turn` breaks ties."""
        ports = self._options.ports
        ahead = [*ports[turn % len(ports) :], *ports[: turn % len(ports)]]
        ways = (self._options.of(home.gpu, port) for port in ahead if port != home.port)
        best = [min(found, key=self._rank) for found in ways if found]
        return [self._route(option, 0, "backup") for option in sorted(best, key=self._rank)]

    def _count(self, option: Option) -> None:
        self._flows.update(option.hops)
        self._in_use[option.port] += 1

    def _way_of(self, route: Route) -> Option:
        for option in self._options.of(route.gpu, route.port):
            if option.via == route.via:
                return option
        raise InvalidArgument(f"there is no such way: {route}; pass what assign() returned")

    def _best(self, gpu: str) -> Option | None:
        """Return what a flow of a GPU would take now; None where nothing is left."""
        ways = (option for port in self._options.ports for option in self._options.of(gpu, port))
        return min(ways, key=self._rank, default=None)

    def _rank(self, option: Option) -> tuple[int, Distance, int]:
        """Order ways: the widest part first, then the nearest port, then the one least in use."""
        return -self._share(option), option.distance, self._in_use[option.port]

    def _share(self, option: Option) -> int:
        """Return what is left on a way for one more flow."""
        return min(
            self._options.capacity[hop] // (self._flows[hop] + times)
            for hop, times in option.hops.items()
        )

    def _route(self, option: Option, channel: int, cause: str) -> Route:
        return Route(
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
        """Say what speaks for going through another GPU."""
        direct = [each for each in self._options.of(option.gpu, option.port) if not each.via]
        if option.via is None or not direct:
            return ""
        share, name = self._share(direct[0]), direct[0].distance.name
        if share < self._share(option):
            return f"; directly it would get {gbps(share)} GB/s ({name})"
        return f"; directly it would get no more, and pass a processor ({name})"


def gbps(mbps: int) -> str:
    """Return Mbit/s as GB/s, for people."""
    return f"{mbps / 8000:.1f}"


__all__ = ["Load", "Options", "Route", "gbps"]
