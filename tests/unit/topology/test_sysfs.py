"""Machines read from recorded sysfs trees, whole ones, garbled ones, and this one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from support import slow
from support.machines.recorded import NAMES, Recorded, put, record, write

from r2ccl.topology.gpus import GpuFacts
from r2ccl.topology.machine import Gpu, Machine, NicPort, NvLink, PciDevice
from r2ccl.topology.sysfs import parse_cpus, read_machine


@pytest.fixture
def dgx(tmp_path: Path) -> Recorded:
    return record(tmp_path, "dgx_h100")


def test_numa_nodes(dgx: Recorded) -> None:
    first, second = dgx.read().nodes
    assert first.cpus == (*range(56), *range(112, 168))
    assert (second.id, second.cpus[0], second.distances) == (1, 56, ((0, 21), (1, 10)))
    assert (first.arch, first.vendor, first.family, first.model) == (
        "x86_64",
        "GenuineIntel",
        6,
        143,
    )


def test_switches_are_devices_and_ports_are_ends_of_links(dgx: Recorded) -> None:
    machine = dgx.read()
    assert machine.device("0000:1b:00.0") == PciDevice(
        bus_id="0000:1b:00.0",
        parent="0000:19:00.0",
        numa_node=0,
        device_class=0x030200,
        speed_mtps=32_000,
        width=16,
        vendor=0x15B3,
        device=0x1021,
    )
    assert machine.device("0000:19:00.0").parent == "0000:16:00.0"
    assert machine.device("0000:16:00.0").parent == ""
    assert machine.device("0000:18:00.0").parent == "0000:16:00.0"
    ports = ("0000:15:01.0", "0000:17:00.0", "0000:17:02.0", "0000:1a:00.0")
    assert not set(ports) & {device.bus_id for device in machine.pci}


def test_ports_of_nics(dgx: Recorded) -> None:
    machine = dgx.read()
    assert machine.port("mlx5_6:1") == NicPort(
        name="mlx5_6",
        port=1,
        bus_id="0000:9a:00.0",
        numa_node=1,
        speed_mbps=400_000,
        guid=0x00009A000,
        netdev="ens154",
        has_gdr=True,
    )
    slow = machine.port("eno3")
    assert (slow.port, slow.bus_id, slow.speed_mbps) == (0, "0000:0c:00.0", 10_000)
    assert len(machine.ports) == 13
    assert machine.remarks == ()


def test_gpus_and_nvlinks_are_those_passed_in(dgx: Recorded) -> None:
    machine = dgx.read()
    assert machine.gpus == dgx.gpus.gpus
    assert len(machine.nvlinks) == 8 * 4
    without = read_machine(sysfs=dgx.sysfs, proc=dgx.proc, arch="x86_64")
    assert without.gpus == without.nvlinks == ()
    assert without.ports == machine.ports


def test_the_interface_of_an_infiniband_port_is_no_second_one(tmp_path: Path) -> None:
    machine = record(tmp_path, "hgx_a100").read()
    assert [(port.label, port.netdev) for port in machine.ports] == [
        (f"mlx5_{n}:1", f"ib{n}") for n in range(4)
    ]


def test_a_workstation_whose_firmware_knows_no_nodes(tmp_path: Path) -> None:
    machine = record(tmp_path, "workstation").read()
    assert {device.numa_node for device in machine.pci} == {0}
    assert machine.device("0000:17:00.0").parent == ""
    links = {device.bus_id: (device.speed_mtps, device.width) for device in machine.pci}
    assert links == {
        "0000:17:00.0": (8_000, 16),  # its slot's rate
        "0000:65:00.0": (8_000, 8),  # its slot's lanes
        "0000:b3:00.0": (8_000, 8),
    }
    assert machine.remarks == ()  # there is one node only: nothing was assumed


def test_a_virtual_machine_that_tells_little(tmp_path: Path) -> None:
    machine = record(tmp_path, "cloud_vm").read()
    assert [(port.label, port.bus_id) for port in machine.ports] == [
        ("eth0", "0000:00:03.0"),
        ("eth1", "0000:00:04.0"),
    ]
    assert {(device.speed_mtps, device.width) for device in machine.pci} == {(8_000, 16)}
    assert {port.speed_mbps for port in machine.ports} == {10_000}
    assert machine.remarks == (
        "0000:00:03.0: PCIe rate unknown, assuming PCIe 3",
        "0000:00:03.0: number of PCIe lanes unknown, assuming 16",
        "0000:00:04.0: PCIe rate unknown, assuming PCIe 3",
        "0000:00:04.0: number of PCIe lanes unknown, assuming 16",
        "eth0: rate unknown, assuming 10 Gbit/s",
        "eth1: rate unknown, assuming 10 Gbit/s",
    )


def test_functions_of_one_card(dgx: Recorded) -> None:
    machine = dgx.read()
    both = [machine.device(f"0000:29:00.{function}") for function in (0, 1)]
    assert {(each.parent, each.width) for each in both} == {("", 16)}


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.nodes[0].cpus
    with_device = {path.parent.name for path in Path("/sys/class/net").glob("*/device")}
    assert with_device == {port.netdev or port.name for port in machine.ports} & with_device


# Odd and missing facts


def test_a_card_that_lost_lanes_is_as_slow_as_they_are(dgx: Recorded) -> None:
    put(dgx.function("0000:18:00.0") / "current_link_width", "8")
    machine = dgx.read()
    assert machine.device("0000:18:00.0").width == 8
    assert machine.remarks == ("0000:18:00.0: uses 8 of 16 PCIe lanes; reseat the card",)


@pytest.mark.parametrize("text", ["Unknown speed", "Unknown", "", "fast", "-1 GT/s PCIe"])
def test_a_rate_that_is_not_known_is_assumed_from_the_other_end(dgx: Recorded, text: str) -> None:
    put(dgx.function("0000:18:00.0") / "max_link_speed", text)
    machine = dgx.read()
    assert machine.device("0000:18:00.0").speed_mtps == 32_000
    assert machine.remarks == ()
    put(dgx.function("0000:17:00.0") / "max_link_speed", text)
    machine = dgx.read()
    assert machine.device("0000:18:00.0").speed_mtps == 8_000
    assert machine.remarks == ("0000:18:00.0: PCIe rate unknown, assuming PCIe 3",)


@pytest.mark.parametrize("text", ["0", "255", "63", "", "x16", "-8"])
def test_lanes_that_cannot_be_are_not_believed(dgx: Recorded, text: str) -> None:
    for bus_id in ("0000:18:00.0", "0000:17:00.0"):
        put(dgx.function(bus_id) / "max_link_width", text)
        put(dgx.function(bus_id) / "current_link_width", text)
    machine = dgx.read()
    assert machine.device("0000:18:00.0").width == 16
    assert machine.remarks == ("0000:18:00.0: number of PCIe lanes unknown, assuming 16",)


def test_lanes_in_use_suffice_where_the_most_are_not_known(dgx: Recorded) -> None:
    for bus_id in ("0000:18:00.0", "0000:17:00.0"):
        (dgx.function(bus_id) / "max_link_width").unlink()
        put(dgx.function(bus_id) / "current_link_width", "8")
    machine = dgx.read()
    assert machine.device("0000:18:00.0").width == 8
    assert machine.remarks == ()


def test_missing_lanes_are_reported_beside_an_unknown_rate(dgx: Recorded) -> None:
    for bus_id in ("0000:18:00.0", "0000:17:00.0"):
        (dgx.function(bus_id) / "max_link_speed").unlink()
    put(dgx.function("0000:18:00.0") / "current_link_width", "8")
    assert dgx.read().remarks == (
        "0000:18:00.0: PCIe rate unknown, assuming PCIe 3",
        "0000:18:00.0: uses 8 of 16 PCIe lanes; reseat the card",
    )


@pytest.mark.parametrize("text", ["-1", "", "7", "one"])
def test_a_node_that_is_not_known_is_the_first(dgx: Recorded, text: str) -> None:
    put(dgx.function("0000:98:00.0") / "numa_node", text)
    machine = dgx.read()
    below = ("0000:98:00.0", "0000:9a:00.0", "0000:9b:00.0", "0000:9d:00.0")
    assert {machine.device(bus_id).numa_node for bus_id in below} == {0}
    assert machine.port("mlx5_6:1").numa_node == 0
    assert "0000:98:00.0: NUMA node unknown, assuming 0" in machine.remarks


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    recorded = record(tmp_path, "workstation")
    shutil.rmtree(recorded.sysfs / "devices/system/node")
    put(recorded.sysfs / "devices/system/cpu/online", "0-23")
    machine = recorded.read()
    assert [(node.id, node.cpus) for node in machine.nodes] == [(0, tuple(range(24)))]
    assert machine.nodes[0].vendor == "GenuineIntel"
    assert machine.remarks == ("no NUMA node with processors, assuming a single node",)


def test_memory_without_processors_is_no_node(dgx: Recorded) -> None:
    put(dgx.sysfs / "devices/system/node/node2/cpulist", "")
    for node, distances in enumerate(("10 21 14", "21 10 24")):
        put(dgx.sysfs / f"devices/system/node/node{node}/distance", distances)
    first, second = dgx.read().nodes
    assert (first.distance_to(1), second.distance_to(0)) == (21, 21)


def test_distances_that_do_not_fit_are_not_believed(dgx: Recorded) -> None:
    put(dgx.sysfs / "devices/system/node/node0/distance", "10")
    first, second = dgx.read().nodes
    assert (first.distances, second.distances) == ((), ((0, 21), (1, 10)))


def test_processors_that_cpuinfo_does_not_name(dgx: Recorded) -> None:
    put(dgx.proc / "cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00")
    assert dgx.read().remarks == (f"{dgx.proc}/cpuinfo does not name the processor",)
    node = read_machine(sysfs=dgx.sysfs, proc=dgx.proc, arch="aarch64").nodes[0]
    assert (node.arch, node.vendor) == ("arm64", "")


def test_a_gpu_that_sysfs_does_not_show(tmp_path: Path) -> None:
    machine = read_machine(
        GpuFacts((Gpu("0000:1b:00.0"),)), sysfs=tmp_path, proc=tmp_path, arch="x86_64"
    )
    assert machine.device("0000:1b:00.0") == PciDevice(
        "0000:1b:00.0", "", 0, 0x030000, speed_mtps=8_000, width=16
    )
    assert len(machine.remarks) == 4


def test_partitions_of_a_gpu_are_one_gpu(dgx: Recorded) -> None:
    twice = GpuFacts(2 * dgx.gpus.gpus, 2 * dgx.gpus.nvlinks)
    assert dgx._replace(gpus=twice).read() == dgx.read()


def test_remarks_on_gpus_are_kept(dgx: Recorded) -> None:
    facts = GpuFacts(remarks=("no GPUs: no driver",))
    assert dgx._replace(gpus=facts).read().remarks == facts.remarks


@pytest.mark.parametrize("has_device", [False, True])
def test_software_rdma_is_at_its_interface_and_reaches_no_gpu(
    tmp_path: Path, has_device: bool
) -> None:
    recorded = record(tmp_path, "cloud_vm")
    hca = recorded.sysfs / "class/infiniband/rxe0"
    put(hca / "ports/1/state", "4: ACTIVE")
    put(hca / "ports/1/link_layer", "Ethernet")
    put(hca / "ports/1/rate", "2.5 Gb/sec (1X)")
    put(hca / "parent", "eth0")
    put(hca / "node_guid", "0000:00ff:fe00:0001")
    if has_device:
        (hca / "device").symlink_to(recorded.function("0000:00:03.0"))
    machine = recorded.read()
    assert machine.port("rxe0:1") == NicPort(
        "rxe0", 1, "0000:00:03.0", 0, 2_500, guid=0x000000FFFE000001, netdev="eth0"
    )
    assert [port.label for port in machine.ports] == ["eth1", "rxe0:1"]


def test_ports_that_cannot_be_read_leave_interfaces(dgx: Recorded) -> None:
    put(dgx.function("0000:18:00.0") / "infiniband/mlx5_0/ports/one/state", "4: ACTIVE")
    machine = dgx.read()
    assert {port.port for port in machine.ports} == {0}
    assert {"ens18", "ens220", "eno3"} <= {port.label for port in machine.ports}
    assert machine.remarks[0].startswith("RDMA ports could not be read: ")


def test_links_in_circles_are_no_devices(dgx: Recorded) -> None:
    for name in ("bus/pci/devices/0000:1b:00.0", "class/net/eno3/device"):
        link = dgx.sysfs / name
        link.unlink()
        link.symlink_to(link.name)
    machine = dgx.read()
    assert machine.device("0000:1b:00.0").parent == ""
    assert "eno3" not in {port.label for port in machine.ports}


def test_an_empty_tree_is_a_machine_with_nothing(tmp_path: Path) -> None:
    machine = read_machine(sysfs=tmp_path / "none", proc=tmp_path / "none", arch="x86_64")
    assert (len(machine.nodes), machine.pci, machine.gpus, machine.ports) == (1, (), (), ())


#: Attributes, and what a broken kernel or a clumsy container might make of any of them.
GARBAGE = st.sampled_from(("", "-1", "\x00\xff", "0x", "9" * 400, "a b c", "../..", "²", None))


@slow.given(25, 100, st.data())
def test_no_garbage_is_an_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorded = record(Path(folder), "workstation")
        spoil(data, recorded)
        machine = recorded.read()
    assert isinstance(machine, Machine)
    assert len(machine.gpus) == 2


def spoil(data: st.DataObject, recorded: Recorded) -> None:
    """Write garbage into a few attributes."""
    attributes = sorted(
        Path(folder, name)
        for top in (recorded.sysfs / "devices", recorded.proc)
        for folder, _, names in os.walk(top)
        for name in names
    )
    for path in data.draw(st.lists(st.sampled_from(attributes), max_size=8, unique=True)):
        text = data.draw(GARBAGE)
        path.unlink()
        if text is None:
            path.mkdir()
        else:
            path.write_bytes(text.encode("latin-1", "replace"))


@pytest.mark.parametrize("name", NAMES)
def test_reading_twice_gives_equal_machines(tmp_path: Path, name: str) -> None:
    recorded = record(tmp_path, name)
    assert recorded.read() == recorded.read()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("0", (0,)),
        ("0-3,8, 10-11", (0, 1, 2, 3, 8, 10, 11)),
        ("3,1,1-2", (1, 2, 3)),
        ("0-", ()),
        ("0-3,x", ()),
        ("3-1", ()),
        ("999999", ()),
    ],
)
def test_lists_of_cpus(text: str, expected: tuple[int, ...]) -> None:
    assert parse_cpus(text) == expected


def test_a_tree_can_be_written_by_hand(tmp_path: Path) -> None:
    recorded = write(
        tmp_path,
        """
processor x86_64 AuthenticAMD 25 1
node 0 cpus=0 distances=10
nvlink 0000:01:00.0 0000:02:00.0 count=4
root 0000:00 node=0
  0000:00:01.0 port 16x16
    0000:01:00.0 gpu 16x16 cc=86 sms=84
  0000:00:02.0 port 16x16
    0000:02:00.0 gpu 16x16 cc=86 sms=84
""",
    )
    machine = recorded.read()
    assert [(link.gpu, link.target, link.count) for link in machine.nvlinks] == [
        ("0000:01:00.0", "0000:02:00.0", 4),
        ("0000:02:00.0", "0000:01:00.0", 4),
    ]
    assert isinstance(machine.nvlinks[0], NvLink)
