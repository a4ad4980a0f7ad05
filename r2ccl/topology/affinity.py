"""Assignment of NICs to GPUs, and of backups for NICs that are lost or slow.

A flow is the traffic of one channel of one GPU. `Affinity.assign` first places channel 0 of every
GPU, then channel 1 of every GPU, and so on. The flows of a channel are placed one at a time; the
next is always the flow that can get the most bandwidth. Flows that share a port or a link get equal
parts of its bandwidth. A flow gets the NIC that gives it the most bandwidth. Among equal NICs it
gets the nearest, then the one with the fewest flows, then the first in the order of names. Flows
therefore share a NIC only if no free NIC gives more bandwidth.

A flow may pass through the memory of another GPU (NCCL's PXN): over NVLink to a GPU near the NIC,
and from there over PCI switches, or over NVLink-C2C and PCI. A flow takes this route if it gets
more bandwidth there than on the direct route, or if it gets equal bandwidth and the direct route
passes processors (`Distance.PHB` or `Distance.SYS`).

Invariant: processes of a host that pass the same machine, GPUs and ports get the same results,
because every choice depends only on integers and a fixed order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from r2ccl.topology.distance import PathFinder, TopologyPath
from r2ccl.topology.flows import Load, NicRoute, Options, gbps, no_such_route
from r2ccl.topology.graph import Graph, Vertex, VertexKind
from r2ccl.topology.machine import Machine, NicPort, NumaNode, bus_order


class Affinity:
    """Assignment of NICs to the GPUs of one machine, with backups for lost and slow NICs.

    Parameters
    ----------
    machine : Machine
        The machine, equal in all processes of the host; see `r2ccl.topology.machine.merge`.
    gpus : collection of str, optional
        Bus ids of the GPUs in use; default: all. Only these GPUs relay the traffic of other GPUs.
    ports : collection of str, optional
        Labels (`NicPort.label`) of the ports in use; default: all.

    Raises
    ------
    InvalidArgument
        If a GPU or a port is not in the machine.
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

    def assign(self, nchannels: int = 1) -> tuple[NicRoute, ...]:
        """Place the flows of every GPU, assuming that all NICs work.

        Parameters
        ----------
        nchannels : int
            Number of flows per GPU.

        Returns
        -------
        tuple of NicRoute
            Ordered by bus id, then by channel. Flows of a GPU that reaches no port are left out.
        """
        load = Load(Options(self._machine, self._gpus, self._ports, {}))
        placed = [
            route
            for channel in range(nchannels)
            for route in load.place([(gpu, channel) for gpu in self._gpus], {})
        ]
        return tuple(sorted(load.settle(placed), key=_flow_order))

    def preferences(self) -> dict[str, tuple[NicRoute, ...]]:
        """Return each GPU's routes: to its home port first, then to the backup ports, best first.

        The home port of a GPU is the port that `assign` chooses for its channel 0. ``share_mbps``
        of a backup assumes that all other GPUs use their home ports. For GPUs with the same home
        port, the order of equally good backups is rotated, so that the GPUs spread over the backups
        if the port is lost.

        Returns
        -------
        dict of str to tuple of NicRoute
            Routes by bus id of the GPU, one per port that the GPU reaches; a GPU that reaches no
            port is left out.
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

    def reroute(
        self, routes: Sequence[NicRoute], speeds: Mapping[str, int]
    ) -> tuple[NicRoute, ...]:
        """Place the flows of lost and slow ports again; all other flows keep their routes.

        Parameters
        ----------
        routes : sequence of NicRoute
            Routes of all flows, as `assign` returned them.
        speeds : mapping of str to int
            Current rates of the lost and slow ports by label, in Mbit/s; 0: lost. A flow stays on a
            slow port if that port is still its best choice.

        Returns
        -------
        tuple of NicRoute
            Routes of all flows with a usable port, ordered by GPU, then by channel. Each has a new
            ``share_mbps``.

        Raises
        ------
        InvalidArgument
            If a port in `speeds` is not in the machine, a rate is negative, a route has a GPU or a
            port that is not in use, or a route that is kept does not exist in the machine.
        """
        load = Load(Options(self._machine, self._gpus, self._ports, speeds))
        kept = [route for route in routes if route.port not in speeds]
        moved = [route for route in routes if route.port in speeds]
        for route in kept:
            load.add(route)
        for route in moved:
            if route.gpu not in self._gpus or route.port not in self._ports:
                raise no_such_route(route)
        causes = {(each.gpu, each.channel): _cause(each.port, speeds[each.port]) for each in moved}
        placed = load.place(list(causes), causes)
        return tuple(sorted(load.settle((*kept, *placed)), key=_flow_order))


def host_routes(
    machine: Machine, cpus: Collection[int], *, ports: Collection[str] | None = None
) -> tuple[NicRoute, ...]:
    """Return the routes from a process's host memory to all ports: fastest first, then nearest.

    Parameters
    ----------
    machine : Machine
    cpus : collection of int
        CPUs on which the process may run, as from ``os.sched_getaffinity``. The memory of the
        process is assumed to be on the NUMA node with most of these CPUs. Among equally fast NICs,
        the NIC with the least sum of NUMA distances to these CPUs comes first. CPUs outside all
        NUMA nodes are ignored.
    ports : collection of str, optional
        Labels of the ports in use; default: all.

    Returns
    -------
    tuple of NicRoute
        One route per reachable port; equally good routes are in the order of `Machine.ports`.

    Raises
    ------
    InvalidArgument
        If a port is not in the machine.
    """
    paths = PathFinder(Graph(machine))
    counts = {node.id: len(set(node.cpus).intersection(cpus)) for node in machine.nodes}
    home = min(machine.nodes, key=lambda node: (-counts[node.id], node.id))
    found = []
    for label in _chosen(ports, [port.label for port in machine.ports], machine.port):
        path = paths.between(Vertex(VertexKind.CPU, str(home.id)), Vertex(VertexKind.PORT, label))
        if path is not None:
            port = machine.port(label)
            far = sum(node.distance_to(port.numa_node) * counts[node.id] for node in machine.nodes)
            found.append(((-path.bandwidth_mbps, far), _host_route(home, port, path)))
    return tuple(route for _, route in sorted(found, key=lambda each: each[0]))


def _host_route(home: NumaNode, port: NicPort, path: TopologyPath) -> NicRoute:
    return NicRoute(
        gpu="",
        channel=0,
        port=port.label,
        via=None,
        distance=path.distance,
        bandwidth_mbps=path.bandwidth_mbps,
        share_mbps=path.bandwidth_mbps,
        why=f"from NUMA node {home.id} to node {port.numa_node}",
    )


def _chosen(
    asked: Collection[str] | None, there: Sequence[str], find: Callable[[str], object]
) -> tuple[str, ...]:
    """Return the names in `asked`, in the order of `there`; if `asked` is None, all in `there`.

    `find` is called with each name in `asked`, and raises if the machine has no such part.
    """
    for name in asked or ():
        find(name)
    return tuple(name for name in there if asked is None or name in asked)


def _flow_order(route: NicRoute) -> tuple[tuple[int, ...], int]:
    return bus_order(route.gpu), route.channel


def _cause(port: str, mbps: int) -> str:
    return f"{port} carries {gbps(mbps)} GB/s now" if mbps else f"{port} is lost"


__all__ = ["Affinity", "NicRoute", "host_routes"]
