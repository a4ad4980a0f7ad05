"""NICs of GPUs on recorded machines: at home, as backups, and when one is lost or slow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from support import slow
from support.machines.recorded import record, write

from r2ccl.errors import InvalidArgument
from r2ccl.topology.affinity import Affinity, NicRoute, host_routes
from r2ccl.topology.distance import Distance
from r2ccl.topology.machine import (
    Gpu,
    LinkEnd,
    Machine,
    NicPort,
    NumaNode,
    NvLink,
    PciDevice,
    merge,
)

Load = Callable[[str], Machine]

#: A DGX H100's NICs for GPUs, in the order of these.
COMPUTE = [f"mlx5_{n}:1" for n in (0, 3, 4, 5, 6, 9, 10, 11)]
H100 = [f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")]
A100 = [f"0000:{bus}:00.0" for bus in ("07", "0f", "47", "4e", "87", "90", "b7", "bd")]
NICS = [f"mlx5_{n}:1" for n in range(4)]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return lambda name: record(tmp_path, name).read()


def homes(routes: Sequence[NicRoute]) -> list[tuple[str, str]]:
    return [(route.gpu, route.port) for route in routes]


# DGX H100


def test_every_gpu_of_a_dgx_uses_the_nic_beside_it(load: Load) -> None:
    routes = Affinity(load("dgx_h100"), ports=COMPUTE).assign()
    assert homes(routes) == list(zip(H100, COMPUTE, strict=True))
    assert {(route.distance, route.via) for route in routes} == {(Distance.PXB, None)}
    assert {(route.bandwidth_mbps, route.share_mbps) for route in routes} == {(384_000, 384_000)}


def test_a_dgx_with_all_its_nics_in_use_still_does(load: Load) -> None:
    assert homes(Affinity(load("dgx_h100")).assign()) == list(zip(H100, COMPUTE, strict=True))


def test_a_lost_nics_load_goes_over_nvlink_to_another_gpus_nic(load: Load) -> None:
    affinity = Affinity(load("dgx_h100"), ports=COMPUTE)
    routes = affinity.assign()
    after = affinity.reroute(routes, {"mlx5_0:1": 0})
    assert after[0] == NicRoute(
        gpu=H100[0],
        channel=0,
        port="mlx5_3:1",
        via=H100[1],
        distance=Distance.PXN,
        bandwidth_mbps=384_000,
        share_mbps=192_000,
        why="mlx5_0:1 is lost; a direct route gives no more and passes a processor (PHB)",
    )
    assert homes(after[1:]) == homes(routes[1:])
    assert [route.share_mbps // 8000 for route in after] == [24, 24, 48, 48, 48, 48, 48, 48]


def test_nvlink_beats_crossing_sockets(load: Load) -> None:
    """The NICs of a whole socket are lost: those of the other one serve both."""
    affinity = Affinity(load("dgx_h100"), ports=COMPUTE)
    after = affinity.reroute(affinity.assign(), dict.fromkeys(COMPUTE[:4], 0))
    moved = after[:4]
    assert [route.via for route in moved] == H100[4:]
    assert [route.port for route in moved] == COMPUTE[4:]
    assert {route.distance for route in moved} == {Distance.PXN}
    # Four flows over the one link between the sockets would get a quarter of 22 GB/s each.
    assert {route.share_mbps // 8000 for route in after} == {24}
    assert "a direct route gives 22.0 GB/s (SYS)" in moved[0].why


def test_without_nvlink_the_machine_uses_the_near_socket_first(load: Load) -> None:
    machine = msgspec.structs.replace(load("dgx_h100"), nvlinks=())
    affinity = Affinity(machine, ports=COMPUTE)
    after = affinity.reroute(affinity.assign(), {"mlx5_0:1": 0})
    assert (after[0].port, after[0].via, after[0].distance) == ("mlx5_3:1", None, Distance.PHB)


def test_a_nic_whose_gpu_is_not_in_use_is_reached_directly(load: Load) -> None:
    """Nobody is there to pass on what is put into that GPU's memory."""
    affinity = Affinity(load("dgx_h100"), gpus=H100[:1], ports=COMPUTE)
    (after,) = affinity.reroute(affinity.assign(), {"mlx5_0:1": 0})
    assert (after.port, after.via, after.distance) == ("mlx5_3:1", None, Distance.PHB)


def test_storage_nics_take_over_where_they_are_in_use(load: Load) -> None:
    affinity = Affinity(load("dgx_h100"))
    after = affinity.reroute(affinity.assign(), {"mlx5_0:1": 0})
    assert (after[0].port, after[0].share_mbps) == ("mlx5_1:1", 200_000)


def test_lost_nics_are_spread_over_those_that_are_left(load: Load) -> None:
    affinity = Affinity(load("dgx_h100"), ports=COMPUTE)
    after = affinity.reroute(affinity.assign(), dict.fromkeys(COMPUTE[::2], 0))
    assert sorted(Counter(route.port for route in after).values()) == [2, 2, 2, 2]


def test_channels_of_a_lost_nic_are_spread_too(load: Load) -> None:
    affinity = Affinity(load("dgx_h100"), ports=COMPUTE)
    routes = affinity.assign(7)
    assert Counter(route.port for route in routes) == dict.fromkeys(COMPUTE, 7)
    after = affinity.reroute(routes, {"mlx5_4:1": 0})
    assert Counter(route.port for route in after) == {
        port: 8 for port in COMPUTE if port != "mlx5_4:1"
    }
    assert [route.channel for route in after if route.gpu == H100[2]] == list(range(7))


def test_a_slow_nic_keeps_what_it_can_carry_best(load: Load) -> None:
    affinity = Affinity(load("dgx_h100"), ports=COMPUTE)
    routes = affinity.assign()
    kept = affinity.reroute(routes, {"mlx5_0:1": 200_000})[0]
    assert (kept.port, kept.share_mbps) == ("mlx5_0:1", 200_000)
    assert kept.why == "mlx5_0:1 carries 25.0 GB/s now"
    moved = affinity.reroute(routes, {"mlx5_0:1": 100_000})[0]
    assert (moved.port, moved.share_mbps) == ("mlx5_3:1", 192_000)


def test_part_of_the_channels_of_a_slow_nic_stay(load: Load) -> None:
    affinity = Affinity(load("dgx_h100"), ports=COMPUTE)
    after = affinity.reroute(affinity.assign(4), {"mlx5_0:1": 100_000})
    first = Counter(route.port for route in after if route.gpu == H100[0])
    assert first["mlx5_0:1"] == 1
    assert max(count for port, count in first.items() if port != "mlx5_0:1") == 1


def test_backups_come_in_another_order_for_each_gpu(load: Load) -> None:
    preferences = Affinity(load("dgx_h100"), ports=COMPUTE).preferences()
    assert list(preferences) == H100
    for number, routes in enumerate(preferences.values()):
        assert [route.port for route in routes] == COMPUTE[number:] + COMPUTE[:number]
        assert {route.distance for route in routes[1:]} == {Distance.PXN}


def test_idle_nics_nearby_come_first_and_slow_ones_last(load: Load) -> None:
    storage = [["mlx5_1:1", "mlx5_2:1"], ["mlx5_7:1", "mlx5_8:1"]]
    preferences = Affinity(load("dgx_h100")).preferences()
    for number, routes in enumerate(preferences.values()):
        ports = [route.port for route in routes]
        near, far = storage[:: 1 if number < 4 else -1]
        # 25 GB/s; then half a NIC over NVLink; then 22 GB/s between the sockets.
        assert (sorted(ports[1:3]), sorted(ports[-3:-1]), ports[-1]) == (near, far, "eno3")


# HGX A100: two GPUs share a NIC


def test_two_gpus_share_the_nic_on_their_switch(load: Load) -> None:
    routes = Affinity(load("hgx_a100")).assign()
    expected = [port for port in NICS for _ in range(2)]
    assert homes(routes) == list(zip(A100, expected, strict=True))
    assert {route.distance for route in routes} == {Distance.PIX}
    assert {(route.bandwidth_mbps, route.share_mbps) for route in routes} == {(192_000, 96_000)}


def test_those_that_lose_a_nic_together_turn_to_different_ones(load: Load) -> None:
    affinity = Affinity(load("hgx_a100"))
    routes = affinity.assign()
    after = affinity.reroute(routes, {"mlx5_0:1": 0})
    assert homes(after[:2]) == [(A100[0], "mlx5_1:1"), (A100[1], "mlx5_2:1")]
    assert [route.via for route in after[:2]] == [A100[2], A100[4]]
    assert homes(after[2:]) == homes(routes[2:])
    backups = [routes[1].port for routes in affinity.preferences().values()]
    assert backups == ["mlx5_1:1", "mlx5_2:1", "mlx5_2:1", "mlx5_3:1", "mlx5_3:1", "mlx5_0:1",
                       "mlx5_0:1", "mlx5_1:1"]  # fmt: skip


# A workstation, and shapes of one question each


def test_a_workstation_shares_its_nic(load: Load) -> None:
    affinity = Affinity(load("workstation"))
    routes = affinity.assign()
    assert [(route.port, route.via, route.share_mbps) for route in routes] == [
        ("rocep179s0:1", None, 12_500),
        ("rocep179s0:1", None, 12_500),
    ]
    assert affinity.reroute(routes, {"rocep179s0:1": 0}) == ()


def test_a_workstation_with_a_second_nic_goes_directly(load: Load, tmp_path: Path) -> None:
    """Also where its GPUs are joined: the NIC is not beside the other one either."""
    machine = load("workstation")
    spare = PciDevice("0000:b4:00.0", "", 0, 0x020700, 8_000, 8)
    port = NicPort("rocep180s0", 1, spare.bus_id, 0, 25_000, has_gdr=True)
    one, other = (gpu.bus_id for gpu in machine.gpus)
    joined = [NvLink(one, other, LinkEnd.GPU, 4), NvLink(other, one, LinkEnd.GPU, 4)]
    for links in ((), joined):
        more = Machine.of(
            machine.nodes, [*machine.pci, spare], machine.gpus, [*machine.ports, port], links
        )
        affinity = Affinity(more)
        routes = affinity.assign()
        assert [route.port for route in routes] == ["rocep179s0:1", "rocep180s0:1"]
        after = affinity.reroute(routes, {"rocep179s0:1": 0})
        assert [(route.port, route.via) for route in after] == [("rocep180s0:1", None)] * 2


PAIRS = """
processor x86_64 AuthenticAMD 23 49
node 0 cpus=0-63 distances=10
root 0000:00 node=0
  0000:00:01.1 port 16x16
    0000:01:00.0 switch 16x16
      0000:02:00.0 port 16x16
        0000:07:00.0 gpu 16x16 cc=80 sms=108
      0000:02:04.0 port 16x16
        0000:0c:00.0 rdma mlx5_0 16x16 rate=200 netdev=eth0
      0000:02:08.0 port 16x16
        0000:0f:00.0 gpu 16x16 cc=80 sms=108
      0000:02:0c.0 port 16x16
        0000:12:00.0 rdma mlx5_1 16x16 rate=200 netdev=eth1
"""


def test_gpus_as_near_to_two_nics_take_one_each(tmp_path: Path) -> None:
    affinity = Affinity(write(tmp_path, PAIRS).read())
    routes = affinity.assign()
    assert [route.port for route in routes] == ["mlx5_0:1", "mlx5_1:1"]
    assert {route.share_mbps for route in routes} == {192_000}
    assert Counter(route.port for route in affinity.assign(4)) == {"mlx5_0:1": 4, "mlx5_1:1": 4}


def test_one_gpu_uses_every_nic_beside_it_with_enough_channels(tmp_path: Path) -> None:
    affinity = Affinity(write(tmp_path, PAIRS).read(), gpus=["0000:0f:00.0"])
    assert [route.port for route in affinity.assign(2)] == ["mlx5_0:1", "mlx5_1:1"]


def test_a_nic_is_left_to_the_gpu_beside_it(tmp_path: Path) -> None:
    """The first GPU is as near to both NICs, each below a switch; the second one is beside one."""
    machine = write(tmp_path, PAIRS).read()
    top = "0000:01:00.0"
    below = {"0000:0f:00.0": "0000:03:00.0", "0000:0c:00.0": "0000:03:00.0",
             "0000:12:00.0": "0000:04:00.0"}  # fmt: skip
    pci = [PciDevice(each, top, 0, 0x060400, 16_000, 16) for each in sorted(set(below.values()))]
    for each in machine.pci:
        parent = below.get(each.bus_id, each.parent)
        pci.append(msgspec.structs.replace(each, parent=parent))
    machine = Machine.of(machine.nodes, pci, machine.gpus, machine.ports)
    routes = Affinity(machine).assign()
    assert homes(routes) == [("0000:07:00.0", "mlx5_1:1"), ("0000:0f:00.0", "mlx5_0:1")]
    assert [route.distance for route in routes] == [Distance.PXB, Distance.PIX]


def test_an_idle_far_nic_is_better_than_a_busy_near_one(tmp_path: Path) -> None:
    machine = write(tmp_path, PAIRS).read()
    moved = [
        msgspec.structs.replace(device, parent="") if device.bus_id == "0000:12:00.0" else device
        for device in machine.pci
    ]
    machine = Machine.of(machine.nodes, moved, machine.gpus, machine.ports)
    routes = Affinity(machine).assign()
    assert [(route.port, route.distance) for route in routes] == [
        ("mlx5_0:1", Distance.PIX),
        ("mlx5_1:1", Distance.PHB),
    ]


def test_a_link_that_several_share_is_counted(tmp_path: Path) -> None:
    """Both NICs are above the switch: its uplink gives each GPU half, whichever it uses."""
    machine = write(tmp_path, PAIRS).read()
    moved = [
        msgspec.structs.replace(device, parent="") if device.device_class == 0x020700 else device
        for device in machine.pci
    ]
    machine = Machine.of(machine.nodes, moved, machine.gpus, machine.ports)
    routes = Affinity(machine).assign()
    assert [(route.port, route.share_mbps) for route in routes] == [
        ("mlx5_0:1", 96_000),
        ("mlx5_1:1", 96_000),
    ]


def test_a_gpu_with_few_lanes_sends_over_its_neighbours(tmp_path: Path) -> None:
    """Also while all NICs work: NVLink and the other GPU's link are wider than its own."""
    machine = write(tmp_path, PAIRS).read()
    pci = [
        msgspec.structs.replace(each, width=2) if each.bus_id == "0000:0f:00.0" else each
        for each in machine.pci
    ]
    one, other = (gpu.bus_id for gpu in machine.gpus)
    links = [NvLink(one, other, LinkEnd.GPU, 12)]
    machine = Machine.of(machine.nodes, pci, machine.gpus, machine.ports, links)
    first, second = Affinity(machine).assign()
    assert (first.via, second.via, second.port) == (None, one, "mlx5_1:1")
    assert second.share_mbps == 96_000
    assert second.why == "first choice; a direct route gives 3.0 GB/s (PIX)"


# Without GPUs


def test_a_virtual_machine_uses_its_nics_in_their_order(load: Load) -> None:
    machine = load("cloud_vm")
    assert Affinity(machine).assign() == ()
    assert Affinity(machine).preferences() == {}
    routes = host_routes(machine, range(8))
    assert [route.port for route in routes] == ["eth0", "eth1"]
    assert str(routes[0]) == ("host memory to eth0 (PHB, 1.2 GB/s): from NUMA node 0 to node 0")


@pytest.mark.parametrize(("cpus", "node"), [(range(56), 0), (range(56, 112), 1), ([0, 56, 57], 1)])
def test_a_process_uses_the_nics_of_its_own_node_first(
    load: Load, cpus: Sequence[int], node: int
) -> None:
    machine = load("dgx_h100")
    routes = host_routes(machine, cpus, ports=COMPUTE)
    nodes = [machine.port(route.port).numa_node for route in routes]
    assert nodes == [node] * 4 + [1 - node] * 4
    assert [route.distance for route in routes] == [Distance.PHB] * 4 + [Distance.SYS] * 4


def test_a_narrow_nic_nearby_comes_after_wide_ones_far_away(load: Load) -> None:
    routes = host_routes(load("dgx_h100"), range(56))
    assert routes[-1].port == "eno3"


def test_of_nics_as_wide_the_nearest_to_all_cpus_comes_first() -> None:
    nodes = [
        NumaNode(0, (0,), "ppc64", distances=((0, 10), (1, 20), (2, 40))),
        NumaNode(1, (1,), "ppc64", distances=((0, 20), (1, 10), (2, 40))),
        NumaNode(2, (2,), "ppc64", distances=((0, 40), (1, 40), (2, 10))),
    ]
    ports = [NicPort(f"eth{node}", 0, "", node, 10_000) for node in (2, 1, 0)]
    machine = Machine.of(nodes, ports=ports)
    orders = {
        cpus: [route.port for route in host_routes(machine, cpus)]
        for cpus in ((0,), (1,), (2,), (0, 2), (9,))
    }
    assert orders == {
        (0,): ["eth0", "eth1", "eth2"],
        (1,): ["eth1", "eth0", "eth2"],
        (2,): ["eth2", "eth0", "eth1"],
        (0, 2): ["eth0", "eth2", "eth1"],
        (9,): ["eth0", "eth1", "eth2"],
    }


# For people, and for callers that err


def test_a_route_tells_people_what_it_is(load: Load) -> None:
    affinity = Affinity(load("dgx_h100"), ports=COMPUTE)
    routes = affinity.assign()
    assert str(routes[0]) == f"GPU {H100[0]} to mlx5_0:1 (PXB, 48.0 GB/s): first choice"
    after = affinity.reroute(routes, dict.fromkeys(COMPUTE[:4], 0))
    assert str(after[0]) == (
        f"GPU {H100[0]} to mlx5_6:1 through GPU {H100[4]} (PXN, 24.0 of 48.0 GB/s): mlx5_0:1 is "
        "lost; a direct route gives 22.0 GB/s (SYS)"
    )


def test_what_is_not_there_is_refused(load: Load) -> None:
    machine = load("hgx_a100")
    with pytest.raises(InvalidArgument, match=r"no GPU '0000:1b:00\.0'"):
        Affinity(machine, gpus=["0000:1b:00.0"])
    with pytest.raises(InvalidArgument, match="no NIC port 'mlx5_9:1'"):
        Affinity(machine, ports=["mlx5_9:1"])
    with pytest.raises(InvalidArgument, match="no NIC port 'eth7'"):
        host_routes(machine, [0], ports=["eth7"])
    affinity = Affinity(machine, ports=NICS[:2])
    with pytest.raises(InvalidArgument, match="no NIC port 'eth7'"):
        affinity.reroute((), {"eth7": 0})
    with pytest.raises(InvalidArgument, match=r"no such route: GPU 0000:87:00\.0 to mlx5_2:1"):
        affinity.reroute(Affinity(machine).assign(), {"mlx5_0:1": 0})
    (route, *_) = affinity.assign()
    for wrong in ({"gpu": "0000:1b:00.0"}, {"port": NICS[2]}):
        moved = msgspec.structs.replace(route, **wrong)
        with pytest.raises(
            InvalidArgument, match=f"no such route: GPU {moved.gpu} to {moved.port}"
        ):
            affinity.reroute([moved], {moved.port: 0})


# Machines of any shape


@st.composite
def hosts(draw: st.DrawFn) -> Machine:
    """Switches on two sockets, with GPUs and NICs on each, with or without an NVSwitch."""
    nodes = [NumaNode(n, (n,), "x86_64", "GenuineIntel", 6, 143) for n in range(2)]
    pci, gpus, ports = [], [], []
    is_switched = draw(st.booleans())
    for number in range(draw(st.integers(1, 5))):
        switch = PciDevice(f"0000:{number:02x}:00.0", "", number % 2, 0x060400, 32_000, 16)
        pci.append(switch)
        for each in range(draw(st.integers(0, 2))):
            bus_id = f"0001:{number:02x}:{each:02x}.0"
            pci.append(PciDevice(bus_id, switch.bus_id, number % 2, 0x030200, 32_000, 16))
            gpus.append(Gpu(bus_id, compute_capability=90, has_gdr=True))
        for each in range(draw(st.integers(0, 2))):
            bus_id = f"0002:{number:02x}:{each:02x}.0"
            pci.append(PciDevice(bus_id, switch.bus_id, number % 2, 0x020700, 32_000, 16))
            speed = draw(st.sampled_from((100_000, 400_000)))
            name = f"mlx5_{len(ports)}"
            ports.append(NicPort(name, 1, bus_id, number % 2, speed, has_gdr=True))
    links = [NvLink(gpu.bus_id, "0003:00:00.0", LinkEnd.SWITCH, 18) for gpu in gpus]
    return Machine.of(nodes, pci, gpus, ports, links if is_switched else ())


def shares_fit(machine: Machine, routes: Sequence[NicRoute]) -> bool:
    """What all flows get together is no more than each port carries."""
    used: Counter[str] = Counter()
    for route in routes:
        used[route.port] += route.share_mbps
    return all(used[port.label] <= port.speed_mbps for port in machine.ports)


@slow.given(25, 100, hosts(), st.integers(1, 3), st.data())
def test_every_flow_has_a_nic_while_one_is_left(
    machine: Machine, nchannels: int, data: st.DataObject
) -> None:
    affinity = Affinity(machine)
    routes = affinity.assign(nchannels)
    flows = [(gpu.bus_id, channel) for gpu in machine.gpus for channel in range(nchannels)]
    labels = [port.label for port in machine.ports]
    assert [(each.gpu, each.channel) for each in routes] == (flows if labels else [])
    assert shares_fit(machine, routes)
    lost = data.draw(st.sets(st.sampled_from(labels))) if labels else set()
    after = affinity.reroute(routes, dict.fromkeys(lost, 0))
    assert [(each.gpu, each.channel) for each in after] == (flows if set(labels) - lost else [])
    assert not {route.port for route in after} & lost
    assert shares_fit(machine, after)
    assert all(0 < each.share_mbps <= each.bandwidth_mbps for each in (*routes, *after))
    places = {each[:2]: each[2:] for each in (key(route) for route in after)}
    assert all(places[key(each)[:2]] == key(each)[2:] for each in routes if each.port not in lost)


def key(route: NicRoute) -> tuple[str, int, str, str | None]:
    return route.gpu, route.channel, route.port, route.via


@slow.given(25, 100, hosts(), st.randoms(use_true_random=False))
def test_every_process_of_a_host_gets_the_same_answer(
    machine: Machine, chance: random.Random
) -> None:
    """Each sees one GPU and its links; they merge what they saw in any order."""
    seen = [
        Machine.of(
            machine.nodes,
            machine.pci,
            [gpu],
            machine.ports,
            [link for link in machine.nvlinks if link.gpu == gpu.bus_id],
        )
        for gpu in machine.gpus
    ]
    if not seen:
        return
    chance.shuffle(seen)
    labels = [port.label for port in machine.ports]
    chance.shuffle(labels)
    here, there = Affinity(merge(seen), ports=labels), Affinity(machine)
    assert here.assign(2) == there.assign(2)
    assert here.preferences() == there.preferences()
    lost = dict.fromkeys(labels[:1], 0)
    assert here.reroute(here.assign(), lost) == there.reroute(there.assign(), lost)


@slow.given(25, 100, hosts())
def test_preferences_hold_every_port_once_and_begin_at_home(machine: Machine) -> None:
    affinity = Affinity(machine)
    preferences = affinity.preferences()
    labels = {port.label for port in machine.ports}
    assert set(preferences) == ({gpu.bus_id for gpu in machine.gpus} if labels else set())
    assert [routes[0] for routes in preferences.values()] == list(affinity.assign())
    for routes in preferences.values():
        assert sorted(route.port for route in routes) == sorted(labels)


@slow.given(25, 100, st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_nics_that_are_equally_near_are_used_equally(ngpus: int, nnics: int, nflows: int) -> None:
    above = PciDevice("0000:00:00.0", "", 0, 0x060400, 32_000, 16)
    pci = [above]
    for domain, count, kind in ((1, ngpus, 0x030200), (2, nnics, 0x020700)):
        pci += [
            PciDevice(f"{domain:04x}:{n:02x}:00.0", above.bus_id, 0, kind, 32_000, 16)
            for n in range(count)
        ]
    gpus = [Gpu(f"0001:{n:02x}:00.0", compute_capability=90, has_gdr=True) for n in range(ngpus)]
    ports = [
        NicPort(f"mlx5_{n}", 1, f"0002:{n:02x}:00.0", 0, 400_000, has_gdr=True)
        for n in range(nnics)
    ]
    machine = Machine.of([NumaNode(0)], pci, gpus, ports)
    used = Counter(route.port for route in Affinity(machine).assign(nflows))
    assert max(used.values()) - min(used[port.label] for port in ports) <= 1


def test_the_page_shows_what_is_printed(load: Load) -> None:
    page = (Path(__file__).parents[3] / "docs/topology.md").read_text(encoding="utf-8")
    machine = load("dgx_h100")
    affinity = Affinity(machine, ports=COMPUTE)
    printed = affinity.reroute(affinity.assign(), {"mlx5_0:1": 0})
    shown = [line for line in page.splitlines() if line.startswith("GPU 0000:")]
    assert shown == [str(route) for route in printed[:3]]
    lost = dict.fromkeys(COMPUTE[:4], 0)
    without = Affinity(msgspec.structs.replace(machine, nvlinks=()), ports=COMPUTE)
    halves = affinity.reroute(affinity.assign(), lost)[0].share_mbps / 8000
    quarters = without.reroute(without.assign(), lost)[0].share_mbps / 8000
    assert f"({halves:g} GB/s) of the other socket" in page.replace("\n", " ")
    assert f"the sockets would give each GPU {quarters:g} GB/s." in page.replace("\n", " ")
