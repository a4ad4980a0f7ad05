"""Paths in recorded machines have NCCL's names, and no other path is wider or shorter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from support import slow
from support.machines.recorded import record

from r2ccl.errors import InvalidArgument
from r2ccl.topology.distance import Distance, PathFinder, TopologyPath
from r2ccl.topology.graph import Graph, Vertex, VertexKind
from r2ccl.topology.machine import Gpu, LinkEnd, Machine, NicPort, NumaNode, NvLink, PciDevice

Load = Callable[[str], Machine]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return lambda name: record(tmp_path, name).read()


def gpu(bus_id: str) -> Vertex:
    return Vertex(VertexKind.GPU, bus_id)


def port(label: str) -> Vertex:
    return Vertex(VertexKind.PORT, label)


def cpu(node: int) -> Vertex:
    return Vertex(VertexKind.CPU, str(node))


def gbps(way: TopologyPath | None) -> tuple[str, float]:
    assert way is not None
    return way.distance.name, way.bandwidth_mbps / 8000


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (gpu("0000:1b:00.0"), gpu("0000:1b:00.0"), ("LOC", 5000)),
        (gpu("0000:1b:00.0"), gpu("0000:df:00.0"), ("NVL", 18 * 20.6)),
        (gpu("0000:1b:00.0"), port("mlx5_0:1"), ("PXB", 48)),
        (gpu("0000:1b:00.0"), port("mlx5_3:1"), ("PHB", 48)),
        (gpu("0000:1b:00.0"), port("mlx5_1:1"), ("PHB", 25)),
        (gpu("0000:1b:00.0"), port("mlx5_6:1"), ("SYS", 22)),
        (gpu("0000:1b:00.0"), cpu(0), ("PHB", 48)),
        (gpu("0000:1b:00.0"), cpu(1), ("SYS", 22)),
        (port("mlx5_1:1"), port("mlx5_2:1"), ("LOC", 25)),
        (port("mlx5_0:1"), cpu(0), ("PHB", 48)),
        (cpu(0), cpu(1), ("SYS", 22)),
    ],
)
def test_ways_of_a_dgx_h100(
    load: Load, start: Vertex, end: Vertex, expected: tuple[str, float]
) -> None:
    ways = PathFinder(Graph(load("dgx_h100")))
    assert gbps(ways.between(start, end)) == expected
    assert gbps(ways.between(end, start)) == expected


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (gpu("0000:07:00.0"), gpu("0000:0f:00.0"), ("NVL", 240)),
        (gpu("0000:07:00.0"), port("mlx5_0:1"), ("PIX", 24)),
        (gpu("0000:07:00.0"), port("mlx5_1:1"), ("PHB", 24)),
        (gpu("0000:07:00.0"), port("mlx5_2:1"), ("SYS", 16)),
    ],
)
def test_ways_of_an_hgx_a100(
    load: Load, start: Vertex, end: Vertex, expected: tuple[str, float]
) -> None:
    assert gbps(PathFinder(Graph(load("hgx_a100"))).between(start, end)) == expected


def test_ways_of_a_workstation(load: Load) -> None:
    ways = PathFinder(Graph(load("workstation")))
    assert gbps(ways.between(gpu("0000:17:00.0"), gpu("0000:65:00.0"))) == ("PHB", 6)
    assert gbps(ways.between(gpu("0000:17:00.0"), port("rocep179s0:1"))) == ("PHB", 25 / 8)


def test_a_way_names_all_it_passes(load: Load) -> None:
    way = PathFinder(Graph(load("hgx_a100"))).between(gpu("0000:07:00.0"), port("mlx5_0:1"))
    assert way is not None
    assert way.vertices == (
        gpu("0000:07:00.0"),
        Vertex(VertexKind.PCI, "0000:01:00.0"),
        Vertex(VertexKind.NIC, "0000:0c:00"),
        port("mlx5_0:1"),
    )
    assert len(way.hops) == 3


def test_a_lost_port_is_not_reached_and_a_slow_one_slowly(load: Load) -> None:
    speeds = {"mlx5_0:1": 0, "mlx5_1:1": 8_000}
    ways = PathFinder(Graph(load("hgx_a100"), speeds))
    assert ways.between(gpu("0000:07:00.0"), port("mlx5_0:1")) is None
    assert gbps(ways.between(gpu("0000:07:00.0"), port("mlx5_1:1"))) == ("PHB", 1)


def test_a_gpu_that_nics_cannot_reach_goes_through_its_processor(load: Load) -> None:
    machine = load("hgx_a100")
    gpus = [msgspec.structs.replace(each, has_gdr=False) for each in machine.gpus]
    shut = msgspec.structs.replace(machine, gpus=tuple(gpus))
    ways = PathFinder(Graph(shut))
    way = ways.between(gpu("0000:07:00.0"), port("mlx5_0:1"))
    # Up to the processor and down again: the switch's uplink is used twice.
    assert gbps(way) == ("PHB", 12)
    assert way is not None
    assert cpu(0) in way.vertices
    assert gbps(ways.between(gpu("0000:07:00.0"), port("mlx5_1:1"))) == ("PHB", 24)
    assert gbps(ways.between(gpu("0000:07:00.0"), gpu("0000:0f:00.0"))) == ("NVL", 240)


def test_places_that_are_not_there_are_refused(load: Load) -> None:
    graph = Graph(load("cloud_vm"))
    with pytest.raises(InvalidArgument, match=r"no GPU '0000:1b:00\.0' in this machine"):
        PathFinder(graph).between(port("eth0"), gpu("0000:1b:00.0"))
    with pytest.raises(InvalidArgument, match="no NIC port 'eth7'"):
        Graph(graph.machine, {"eth7": 0})
    with pytest.raises(InvalidArgument, match="port eth0 has a rate of -1 Mbit/s"):
        Graph(graph.machine, {"eth0": -1})


# Machines made for one question each

A, B, C = (f"0000:0{n}:00.0" for n in range(1, 4))


def on_roots(*bus_ids: str) -> list[PciDevice]:
    return [PciDevice(bus_id, "", 0, 0x030200, 8_000, 16) for bus_id in bus_ids]


def chain(*counts: int, cc: int = 70) -> Machine:
    """Three GPUs on root ports; NVLinks from A to B, from B to C, and from A to C."""
    pairs = zip(((A, B), (B, C), (A, C)), counts, strict=True)
    links = [NvLink(one, other, LinkEnd.GPU, n) for (one, other), n in pairs if n]
    gpus = [Gpu(bus_id, compute_capability=cc) for bus_id in (A, B, C)]
    return Machine.of([NumaNode(0)], on_roots(A, B, C), gpus, nvlinks=links)


def test_gpus_reach_each_other_over_a_third() -> None:
    ways = PathFinder(Graph(chain(2, 1, 0)))
    assert gbps(ways.between(gpu(A), gpu(B))) == ("NVL", 40)
    way = ways.between(gpu(A), gpu(C))
    assert gbps(way) == ("NVB", 20)
    assert way is not None
    assert way.vertices == (gpu(A), gpu(B), gpu(C))


def test_nvlink_of_their_own_is_not_left_for_a_detour() -> None:
    assert gbps(PathFinder(Graph(chain(2, 2, 1))).between(gpu(A), gpu(C))) == ("NVL", 20)


def test_a_link_that_both_ends_report_counts_once() -> None:
    machine = chain(2, 0, 0)
    (link,) = machine.nvlinks
    back = msgspec.structs.replace(link, gpu=link.target, target=link.gpu)
    both = msgspec.structs.replace(machine, nvlinks=(link, back))
    assert gbps(PathFinder(Graph(both)).between(gpu(A), gpu(B))) == ("NVL", 40)


def test_links_that_lead_out_of_the_machine_lead_nowhere() -> None:
    machine = Machine.of(
        [NumaNode(0)], on_roots(A, B), [Gpu(A), Gpu(B)], nvlinks=[NvLink(A, C, LinkEnd.GPU, 4)]
    )
    assert gbps(PathFinder(Graph(machine)).between(gpu(A), gpu(B))) == ("PHB", 12)


def test_a_gpu_joined_to_its_processor() -> None:
    pci = on_roots(A, B)
    nic = NicPort("mlx5_0", 1, B, 0, 400_000, has_gdr=True)
    gpus = [Gpu(A, has_gdr=True, c2c_nlinks=10, c2c_mbps=8 * 45_000)]
    ways = PathFinder(Graph(Machine.of([NumaNode(0)], pci, gpus, [nic])))
    assert gbps(ways.between(gpu(A), cpu(0))) == ("C2C", 450)
    assert gbps(ways.between(gpu(A), port("mlx5_0:1"))) == ("P2C", 12)


def test_nvlink_to_a_processor() -> None:
    links = [NvLink(A, "0004:00:00.0", LinkEnd.CPU, 3)]
    machine = Machine.of([NumaNode(0)], on_roots(A), [Gpu(A, compute_capability=70)], nvlinks=links)
    assert gbps(PathFinder(Graph(machine)).between(gpu(A), cpu(0))) == ("NVL", 60)


def test_no_way_leads_through_the_memory_of_a_gpu() -> None:
    pci = [*on_roots(A, B), PciDevice(C, B, 0, 0x020000, 8_000, 16)]  # a NIC behind a GPU
    ports = [NicPort("eth0", 0, C, 0, 10_000), NicPort("eth1", 0, "", 0, 10_000)]
    ways = PathFinder(Graph(Machine.of([NumaNode(0)], pci, [Gpu(A), Gpu(B)], ports)))
    assert ways.between(cpu(0), port("eth0")) is None
    assert gbps(ways.between(cpu(0), port("eth1"))) == ("PHB", 1.25)


def test_functions_of_a_card_share_its_link() -> None:
    functions = [f"0000:01:00.{n}" for n in range(2)]
    ports = [NicPort(f"eth{n}", 0, bus_id, 0, 10_000) for n, bus_id in enumerate(functions)]
    graph = Graph(Machine.of([NumaNode(0)], on_roots(*functions), ports=ports))
    above = Vertex(VertexKind.NIC, "0000:01:00")
    assert set(graph.neighbours(above)) == {cpu(0), port("eth0"), port("eth1")}
    assert graph.neighbours(above)[cpu(0)].bandwidth_mbps == 96_000


@st.composite
def trees(draw: st.DrawFn) -> Machine:
    """PCI trees of switches, GPUs and NICs on up to three NUMA nodes."""
    nodes = [NumaNode(n, arch=draw(st.sampled_from(("arm64", "ppc64")))) for n in range(3)]
    pci: list[PciDevice] = []
    gpus, ports = [], []
    for number in range(draw(st.integers(2, 12))):
        switches = [each for each in pci if each.device_class == 0x060400]
        above = draw(st.sampled_from([None, *switches]))
        kind = draw(st.sampled_from((0x060400, 0x030200, 0x020700)))
        bus_id = f"0000:{number:02x}:00.0"
        node = above.numa_node if above else draw(st.integers(0, 2))
        width = draw(st.sampled_from((4, 8, 16)))
        pci.append(PciDevice(bus_id, above.bus_id if above else "", node, kind, 8_000, width))
        if kind == 0x030200:
            gpus.append(Gpu(bus_id, compute_capability=80, has_gdr=True))
        elif kind == 0x020700:
            ports.append(NicPort(f"mlx5_{number}", 1, bus_id, node, 100_000, has_gdr=True))
    links = [
        NvLink(one.bus_id, other.bus_id, LinkEnd.GPU, draw(st.integers(1, 4)))
        for one, other in pairwise(gpus)
        if draw(st.booleans())
    ]
    return Machine.of(nodes, pci, gpus, ports, links)


@slow.given(25, 100, trees())
def test_a_way_is_as_wide_as_its_links_and_the_same_both_ways(machine: Machine) -> None:
    graph = Graph(machine)
    ways = PathFinder(graph)
    vertices = [gpu(each.bus_id) for each in machine.gpus] + [port(p.label) for p in machine.ports]
    for start in vertices:
        for end in vertices:
            way = ways.between(start, end)
            assert way is not None
            assert (way.vertices[0], way.vertices[-1]) == (start, end)
            assert len(set(way.vertices)) == len(way.vertices)
            if start != end:
                capacities = graph.capacities()
                assert way.bandwidth_mbps == min(capacities[hop] for hop in way.hops)
            back = ways.between(end, start)
            assert back is not None
            assert (back.distance, back.bandwidth_mbps) == (way.distance, way.bandwidth_mbps)
            assert back.vertices == way.vertices[::-1]


@slow.given(25, 100, trees())
def test_no_way_is_wider_or_as_wide_and_shorter(machine: Machine) -> None:
    """Against a search over every simple path."""
    graph = Graph(machine)
    ways = PathFinder(graph)

    def every(path: tuple[Vertex, ...], end: Vertex, width: int) -> list[tuple[int, int]]:
        if path[-1] == end:
            return [(-width, len(path))]
        if len(path) > 1 and path[-1].kind in (VertexKind.GPU, VertexKind.PORT):
            return []
        return [
            found
            for place, link in graph.neighbours(path[-1]).items()
            if place not in path
            for found in every((*path, place), end, min(width, link.bandwidth_mbps))
        ]

    for one in machine.gpus:
        for other in machine.ports:
            start, end = gpu(one.bus_id), port(other.label)
            way = ways.between(start, end)
            assert way is not None
            assert (-way.bandwidth_mbps, len(way.vertices)) == min(every((start,), end, 1 << 40))


@slow.given(25, 100, trees())
def test_equal_machines_have_equal_ways(machine: Machine) -> None:
    again = Machine.of(
        machine.nodes[::-1],
        machine.pci[::-1],
        machine.gpus[::-1],
        machine.ports[::-1],
        machine.nvlinks[::-1],
    )
    one, other = PathFinder(Graph(machine)), PathFinder(Graph(again))
    for each in machine.gpus:
        for label in (p.label for p in machine.ports):
            pair = gpu(each.bus_id), port(label)
            assert one.between(*pair) == other.between(*pair)


def test_distances_are_in_nccls_order() -> None:
    names = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"]
    assert [distance.name for distance in sorted(Distance)] == names
