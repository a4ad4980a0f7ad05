"""What machines are made of: canonical order, and one machine out of what several ranks saw."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.topology.bandwidths import nvlink_mbps, pcie_mbps, socket_mbps
from r2ccl.topology.machine import (
    Gpu,
    LinkEnd,
    Machine,
    NicPort,
    NumaNode,
    NvLink,
    PciDevice,
    merge,
    parse_bus_id,
)


def device(bus_id: str, parent: str = "", node: int = 0) -> PciDevice:
    return PciDevice(bus_id, parent, node, 0x030200, 16_000, 16)


A, B, NIC = "0000:0f:00.0", "0000:10:00.0", "0000:11:00.0"
NODE = NumaNode(0, (0, 1))
PORT = NicPort("mlx5_0", 1, NIC, 0, 100_000, netdev="eth0", has_gdr=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00000000:1B:00.0", "0000:1b:00.0"),
        (" 10000:E2:1F.7 ", "10000:e2:1f.7"),
        ("0:b:0.0", "0000:0b:00.0"),
    ],
)
def test_a_bus_id_is_spelled_as_the_kernel_does(text: str, expected: str) -> None:
    assert parse_bus_id(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "1b:00.0", "0000:1b:00", "0000:1b:00.8", "0000:1b:20.0", "pci0000:1b", "g:0:0.0"],
)
def test_what_is_no_bus_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"write domain:bus:device\.function"):
        parse_bus_id(text)


def test_parts_are_in_one_order_whatever_order_they_come_in() -> None:
    ports = [NicPort(f"mlx5_{n}", 1, "", 0, 100_000) for n in (10, 2, 0)]
    nodes = [NumaNode(1), NODE]
    gpus = [Gpu(B), Gpu("10000:01:00.0"), Gpu(A)]
    pci = [device(gpu.bus_id) for gpu in gpus]
    links = [NvLink(B, A, LinkEnd.GPU, 4), NvLink(A, B, LinkEnd.GPU, 4)]
    machine = Machine.of(nodes, pci, gpus, ports, links, ["b", "a", "b"])
    turned = [each[::-1] for each in (nodes, pci, gpus, ports, links)]
    assert machine == Machine.of(*turned, ["a", "b"])  # type: ignore[arg-type]
    assert [gpu.bus_id for gpu in machine.gpus] == [A, B, "10000:01:00.0"]
    assert [port.label for port in machine.ports] == ["mlx5_0:1", "mlx5_2:1", "mlx5_10:1"]
    assert machine.remarks == ("a", "b")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"nodes": []}, "without a NUMA node"),
        ({"nodes": [NODE, NODE]}, "NUMA node 0 occurs twice"),
        ({"pci": [device(A), device(A)]}, f"PCI device {A} occurs twice"),
        ({"gpus": [Gpu(A), Gpu(A)], "pci": [device(A)]}, f"GPU {A} occurs twice"),
        ({"ports": [NicPort("eth0", 0, "", 0, 1)] * 2}, "NIC port eth0 occurs twice"),
        ({"pci": [device(A, node=3)]}, "NUMA node 3 is missing"),
        ({"pci": [device(A, B)]}, f"PCI device {B} is missing"),
        ({"gpus": [Gpu(A)]}, f"PCI device {A} is missing"),
        ({"ports": [PORT]}, f"PCI device {NIC} is missing"),
        ({"nvlinks": [NvLink(A, B, LinkEnd.GPU, 1)]}, f"GPU {A} is missing"),
    ],
)
def test_a_machine_without_sense_is_refused(parts: dict[str, list[object]], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Machine.of(**({"nodes": [NODE]} | parts))  # type: ignore[arg-type]


def test_asking_for_what_is_not_there_lists_what_is() -> None:
    machine = Machine.of([NODE], [device(A), device(NIC)], [Gpu(A)], [PORT])
    assert machine.gpu(A) == Gpu(A)
    assert machine.port("mlx5_0:1") == PORT
    with pytest.raises(InvalidArgument, match=rf"no GPU '{B}' in this machine; it has {A}"):
        machine.gpu(B)
    with pytest.raises(InvalidArgument, match=r"no NIC port 'mlx5_0'.*it has mlx5_0:1"):
        machine.port("mlx5_0")
    with pytest.raises(InvalidArgument, match=r"no GPU .*it has none"):
        Machine.of([NODE]).gpu(A)


def test_ranks_that_see_one_gpu_each_agree_on_the_whole_host() -> None:
    def seen_by(*bus_ids: str) -> Machine:
        links = [NvLink(bus_id, "0000:07:00.0", LinkEnd.SWITCH, 18) for bus_id in bus_ids]
        pci = [device(bus_id) for bus_id in (*bus_ids, NIC)]
        remarks = [f"saw {len(bus_ids)}"]
        return Machine.of([NODE], pci, map(Gpu, bus_ids), [PORT], links, remarks)

    ranks = [seen_by(A), seen_by(B), seen_by()]
    whole = merge(ranks)
    assert {whole} == {merge(list(order)) for order in itertools.permutations(ranks)}
    both = seen_by(A, B)
    assert whole == msgspec.structs.replace(both, remarks=("saw 0", "saw 1"))
    assert merge([both]) == both


def test_ranks_that_disagree_on_a_part_keep_the_same_one() -> None:
    def told(capability: int) -> Machine:
        return Machine.of([NODE], [device(A)], [Gpu(A, compute_capability=capability)])

    assert merge([told(80), told(90)]) == merge([told(90), told(80)])
    with pytest.raises(InvalidArgument, match="merge\\(\\) got no machines"):
        merge([])


def test_a_machine_travels_as_a_message() -> None:
    machine = Machine.of(
        [NumaNode(0, (0,), distances=((0, 10),))],
        [device(A), device(NIC)],
        [Gpu(A, "GPU-1", 90, 132, has_gdr=True)],
        [PORT],
        [NvLink(A, "0000:07:00.0", LinkEnd.SWITCH, 18)],
        ["x"],
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(machine), type=Machine) == machine


def test_numa_distances_are_the_firmwares_or_the_standards() -> None:
    told = NumaNode(0, distances=((0, 10), (1, 32)))
    assert [told.distance_to(node) for node in (0, 1, 2)] == [10, 32, 20]
    assert [NumaNode(1).distance_to(node) for node in (0, 1)] == [20, 10]


# Figures that NCCL states in GB/s; 1 GB/s is 8000 Mbit/s.


@pytest.mark.parametrize(
    ("speed", "width", "gbps"),
    [(2_500, 16, 3), (5_000, 16, 6), (8_000, 16, 12), (16_000, 16, 24), (16_000, 8, 12),
     (32_000, 16, 48), (64_000, 16, 96)],
)  # fmt: skip
def test_pcie_carries_what_nccl_says(speed: int, width: int, gbps: int) -> None:
    assert pcie_mbps(speed, width) == 8000 * gbps


@pytest.mark.parametrize(
    ("capability", "gbps"),
    [
        (60, 18),
        (70, 20),
        (80, 20),
        (86, 12),
        (87, 20),
        (90, 20.6),
        (100, 40.1),
        (120, 40.1),
        (0, 20),
    ],
)
def test_nvlink_carries_what_nccl_says(capability: int, gbps: float) -> None:
    assert nvlink_mbps(capability) == round(8000 * gbps)


@pytest.mark.parametrize(
    ("arch", "vendor", "family", "model", "gbps"),
    [
        ("x86_64", "GenuineIntel", 6, 0x4F, 6),  # Broadwell
        ("x86_64", "GenuineIntel", 6, 0x55, 10),  # Skylake
        ("x86_64", "GenuineIntel", 6, 0x8F, 22),  # Sapphire Rapids
        ("x86_64", "GenuineIntel", 6, 0xCF, 40),  # Emerald Rapids
        ("x86_64", "GenuineIntel", 6, 0xAD, 40),  # Granite Rapids
        ("x86_64", "AuthenticAMD", 23, 49, 16),
        ("x86_64", "AuthenticAMD", 25, 1, 24),
        ("x86_64", "AuthenticAMD", 175, 1, 24),  # as older releases of NCCL count
        ("x86_64", "AuthenticAMD", 26, 2, 32),
        ("arm64", "", 0, 0, 6),
        ("ppc64", "", 0, 0, 32),
        ("x86_64", "", 0, 0, 6),
        ("riscv64", "", 0, 0, 6),
    ],
)
def test_sockets_carry_what_nccl_says(
    arch: str, vendor: str, family: int, model: int, gbps: int
) -> None:
    node = NumaNode(0, arch=arch, vendor=vendor, family=family, model=model)
    assert socket_mbps(node) == 8000 * gbps
