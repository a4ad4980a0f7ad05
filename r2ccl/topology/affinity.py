"""Which NIC carries a GPU's traffic, and which one does when that is lost or slow.

Traffic is flows, one for each channel of a GPU. They are placed one after another, first the one
that can have the widest part of some NIC. Flows that share a link get equal parts of it, be it a
port or a link on the way there. Among equal parts the nearer NIC wins, then the one less in use,
then the order of names. So a NIC that is free is used before one is shared.

A flow may go through the memory of another GPU (NCCL's PXN): over NVLink to the GPU beside a NIC,
and from there over PCI switches alone. It does where that part is wider than the direct one, or as
wide and the direct way passes a processor.

Must not read the machine, nor know of ranks and rails. Invariant: all processes of a host that
give the same machine, GPUs and ports get the same answers, for whole numbers and a fixed order
decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from r2ccl.topology.distance import Way, Ways
from r2ccl.topology.flows import Load, Options, Route, gbps
from r2ccl.topology.graph import Graph, Kind, Place
from r2ccl.topology.machine import Machine, NicPort, NumaNode, bus_order


class Affinity:
    """Chooses NICs for the GPUs of one machine.

    Parameters
    ----------
    machine : Machine
        As all processes of the host know it, see `r2ccl.topology.machine.merge`.
    gpus : collection of str, optional
        Bus ids of those in use; default: all. Only these carry traffic for others.
    ports : collection of str, optional
        Labels of those in use; default: all.

    Raises
    ------
    InvalidArgument
        One of them is not in the machine.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        gpus: Collection[str] | None = None,
        ports: Collection[str] | None = None,
    ) -> None:
        self._machine = machine
        self._gpus = _chosen(gpus, [gpu.bus_id for gpu in machine.gpus], machine.gpu)
        self._ports = _chosen(ports, [port.label for port in machine.ports], machine.port)

    def assign(self, nchannels: int = 1) -> tuple[Route, ...]:
        """Place `nchannels` flows of every GPU while all NICs work.

        Returns
        -------
        tuple of Route
            By GPU, in the order of bus ids, then by channel; empty where there is no port.
        """
        load = Load(Options(self._machine, self._gpus, self._ports, {}))
        placed = [
            route
            for channel in range(nchannels)
            for route in load.place([(gpu, channel) for gpu in self._gpus], {})
        ]
        return tuple(sorted(load.settle(placed), key=_flow_order))

    def preferences(self) -> dict[str, tuple[Route, ...]]:
        """Return every port for every GPU: the one it uses, then what it would use instead.

        A backup's share is what the GPU would get there with all others on their first choice.
        Backups that are equally good come in another order for each GPU, so that those who lose
        a NIC together do not all turn to the same one.
        """
        options = Options(self._machine, self._gpus, self._ports, {})
        homes = self.assign()
        neighbours: Counter[str] = Counter()
        result = {}
        for home in homes:
            others = Load(options)
            for route in homes:
                if route is not home:
                    others.add(route)
            turn = self._ports.index(home.port) + 1 + neighbours[home.port]
            neighbours[home.port] += 1
            result[home.gpu] = (home, *others.ranked(home, turn))
        return result

    def reroute(self, routes: Sequence[Route], speeds: Mapping[str, int]) -> tuple[Route, ...]:
        """Find other NICs for the flows of lost and slow ones; the other flows stay.

        Parameters
        ----------
        routes : sequence of Route
            Where all flows went while every NIC worked, as of `assign`.
        speeds : mapping of str to int
            Labels of the ports that are not what they were, and what they carry now, Mbit/s; 0:
            lost. A flow stays on a slow port where no other gives it more.

        Returns
        -------
        tuple of Route
            By GPU, then by channel. A flow that no port is left for is not in it.

        Raises
        ------
        InvalidArgument
            A port is not in the machine, a rate is negative, or a route is not of this machine.
        """
        load = Load(Options(self._machine, self._gpus, self._ports, speeds))
        kept = [route for route in routes if route.port not in speeds]
        moved = [route for route in routes if route.port in speeds]
        for route in kept:
            load.add(route)
        causes = {(each.gpu, each.channel): _cause(each.port, speeds[each.port]) for each in moved}
        placed = load.place(list(causes), causes)
        return tuple(sorted(load.settle((*kept, *placed)), key=_flow_order))


def host_routes(
    machine: Machine, cpus: Collection[int], *, ports: Collection[str] | None = None
) -> tuple[Route, ...]:
    """Order the NICs for a process that uses host memory: the widest first, then the nearest.

    Parameters
    ----------
    machine : Machine
    cpus : collection of int
        Those the process may run on, as of ``os.sched_getaffinity``. Its memory is taken to lie
        with most of them. Among NICs as wide from there, nearness to all of them decides. CPUs
        that no NUMA node has do not count.
    ports : collection of str, optional
        Labels of those in use; default: all.

    Returns
    -------
    tuple of Route
        One a port; what is equally good is in the order of the ports.

    Raises
    ------
    InvalidArgument
        A port is not in the machine.
    """
    ways = Ways(Graph(machine))
    counts = {node.id: len(set(node.cpus).intersection(cpus)) for node in machine.nodes}
    home = min(machine.nodes, key=lambda node: (-counts[node.id], node.id))
    found = []
    for label in _chosen(ports, [port.label for port in machine.ports], machine.port):
        way = ways.between(Place(Kind.CPU, str(home.id)), Place(Kind.PORT, label))
        if way is not None:
            port = machine.port(label)
            far = sum(node.distance_to(port.numa_node) * counts[node.id] for node in machine.nodes)
            found.append(((-way.bandwidth_mbps, far), _host_route(home, port, way)))
    return tuple(route for _, route in sorted(found, key=lambda each: each[0]))


def _host_route(home: NumaNode, port: NicPort, way: Way) -> Route:
    return Route(
        gpu="",
        channel=0,
        port=port.label,
        via=None,
        distance=way.distance,
        bandwidth_mbps=way.bandwidth_mbps,
        share_mbps=way.bandwidth_mbps,
        why=f"from NUMA node {home.id} to node {port.numa_node}",
    )


def _chosen(
    asked: Collection[str] | None, there: Sequence[str], find: Callable[[str], object]
) -> tuple[str, ...]:
    """Return the names asked for in the machine's order; `find` raises for one it has not."""
    for name in asked or ():
        find(name)
    return tuple(name for name in there if asked is None or name in asked)


def _flow_order(route: Route) -> tuple[tuple[int, ...], int]:
    return bus_order(route.gpu), route.channel


def _cause(port: str, mbps: int) -> str:
    return f"{port} carries {gbps(mbps)} GB/s now" if mbps else f"{port} is lost"


__all__ = ["Affinity", "Route", "host_routes"]
