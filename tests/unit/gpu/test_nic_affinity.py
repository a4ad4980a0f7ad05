"""Ranks find out which rails are near to whose GPU: on recorded machines, and whatever one says."""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import strategies as st
from support.machines.recorded import Recorded, record
from support.ranks import Gathering, together
from support.slow import given, slow_but

from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.gpu.nic_affinity import NicAffinity, PxnRoute, common_homes, find_nic_affinity
from r2ccl.topology.affinity import Affinity
from r2ccl.topology.gpus import GpuFacts
from r2ccl.topology.machine import (
    Gpu,
    LinkEnd,
    Machine,
    NicPort,
    NumaNode,
    NvLink,
    PciDevice,
)

COMPUTE = [f"mlx5_{n}:1" for n in (0, 3, 4, 5, 6, 9, 10, 11)]
H100 = [f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")]
A100 = [f"0000:{bus}:00.0" for bus in ("07", "0f", "47", "4e", "87", "90", "b7", "bd")]
NICS = [f"mlx5_{n}:1" for n in range(4)]
EIGHT = tuple(range(8))

#: Of what a rank says, in which turn: what all hear.
Spoil = Callable[[int, int, bytes], bytes]


class Seat(NamedTuple):
    """What a rank brings."""

    bus_id: str
    labels: Sequence[str]
    read: Callable[[], Machine]


def two_hosts(nlocal: int) -> list[range]:
    return [range(nlocal), range(nlocal, 2 * nlocal)]


def unspoiled(turn: int, rank: int, said: bytes) -> bytes:
    return said


def outcomes(
    nodes: Sequence[Sequence[int]], seats: Sequence[Seat], spoil: Spoil = unspoiled
) -> list[NicAffinity | str]:
    """Return what every rank finds out, or with what words it refuses."""
    gathering = Gathering(len(seats))

    def body(rank: int) -> NicAffinity | str:
        turns = iter(range(3))

        def gather(mine: bytes) -> Sequence[bytes]:
            return gathering(rank, spoil(next(turns), rank, mine))

        try:
            return find_nic_affinity(rank, nodes, **seats[rank]._asdict(), allgather=gather)
        except InvalidArgument as exc:
            return str(exc)

    return together(len(seats), body)


def explored(
    nodes: Sequence[Sequence[int]], seats: Sequence[Seat], spoil: Spoil = unspoiled
) -> list[NicAffinity]:
    """Return what every rank finds out; all have found the same homes, and each has one."""
    found = [each for each in outcomes(nodes, seats, spoil) if isinstance(each, NicAffinity)]
    assert len(found) == len(seats)
    assert len({each.homes for each in found}) == 1
    nrails = len(seats[0].labels)
    for rails in found[0].homes:
        assert rails
        assert list(rails) == sorted(set(rails) & set(range(nrails)))
    return found


def failing(error: Exception) -> Callable[[], Machine]:
    def read() -> Machine:
        raise error

    return read


Trees = Callable[[str], Recorded]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    @functools.cache
    def tree(name: str) -> Recorded:
        return record(tmp_path_factory.mktemp(name), name)

    return tree


@pytest.fixture(scope="module")
def readers(trees: Trees) -> Callable[[str], Callable[[], Machine]]:
    """Return the function that returns a recorded machine, which is read once for all ranks."""

    @functools.cache
    def reader(name: str) -> Callable[[], Machine]:
        return functools.cache(trees(name).read)

    return reader


Readers = Callable[[str], Callable[[], Machine]]


# Recorded machines


def test_every_gpu_of_a_dgx_is_at_home_on_its_own_nic(readers: Readers) -> None:
    seats = [Seat(gpu, COMPUTE, readers("dgx_h100")) for gpu in H100] * 2
    found = explored(two_hosts(8), seats)
    assert found[0].homes == tuple((rail,) for rail in range(8)) * 2
    for rank, each in enumerate(found):
        beside = [PxnRoute(rail, H100[rail]) for rail in range(8) if rail != rank % 8]
        assert list(each.pxn_routes) == beside
    groups = [[found[0].homes[i], found[0].homes[8 + i]] for i in range(8)]
    assert [common_homes(group) for group in groups] == [(rail,) for rail in range(8)]


def test_two_gpus_of_an_a100_board_share_the_nic_on_their_switch(readers: Readers) -> None:
    seats = [Seat(gpu, NICS, readers("hgx_a100")) for gpu in A100] * 2
    found = explored(two_hosts(8), seats)
    assert found[0].homes == ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)) * 2
    for rank, each in enumerate(found):
        assert [pxn_route.rail for pxn_route in each.pxn_routes] == [
            rail for rail in range(4) if rail != rank % 8 // 2
        ]
        for rail, via in ((pxn_route.rail, pxn_route.via) for pxn_route in each.pxn_routes):
            assert via in A100[2 * rail : 2 * rail + 2]


def test_a_workstation_has_one_nic_and_no_pxn_route(readers: Readers) -> None:
    seats = [Seat(f"0000:{bus}:00.0", ["rocep179s0:1"], readers("workstation"))
             for bus in ("17", "65")] * 2  # fmt: skip
    assert explored(two_hosts(2), seats) == [NicAffinity(((0,),) * 4, ())] * 4


def test_a_machine_that_shows_no_gpu_has_all_rails_for_homes(readers: Readers) -> None:
    seats = [Seat("0000:00:05.0", NICS, readers("cloud_vm"))] * 4
    assert explored(two_hosts(2), seats) == [NicAffinity((tuple(range(4)),) * 4, ())] * 4


def test_hosts_may_number_their_gpus_and_nics_differently(readers: Readers) -> None:
    read = readers("dgx_h100")
    seats = [Seat(gpu, COMPUTE, read) for gpu in H100]
    seats += [
        Seat(gpu, [*COMPUTE[4:], *COMPUTE[:4]], read) for gpu in [H100[1], H100[0], *H100[2:]]
    ]
    found = explored(two_hosts(8), seats)
    assert found[0].homes[8:] == ((5,), (4,), (6,), (7,), (0,), (1,), (2,), (3,))
    assert common_homes([found[0].homes[0], found[0].homes[8]]) == (0, 5)
    assert found[8].pxn_routes[0] == PxnRoute(0, H100[4])


def test_ranks_of_a_host_need_not_follow_each_other(readers: Readers) -> None:
    seats = [Seat(gpu, NICS, readers("hgx_a100")) for gpu in A100[::2] for _ in range(2)]
    found = explored([(0, 2, 4, 6), (1, 3, 5, 7)], seats)
    assert found[0].homes == ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))


def test_a_process_that_sees_its_own_gpu_alone_finds_the_same(
    trees: Trees, readers: Readers
) -> None:
    whole = trees("dgx_h100")

    def alone(gpu: Gpu) -> Callable[[], Machine]:
        links = tuple(link for link in whole.gpus.nvlinks if link.gpu == gpu.bus_id)
        return whole._replace(gpus=GpuFacts((gpu,), links)).read

    seats = [Seat(gpu.bus_id, COMPUTE, alone(gpu)) for gpu in whole.gpus.gpus]
    assert explored([EIGHT], seats) == explored(
        [EIGHT], [seat._replace(read=readers("dgx_h100")) for seat in seats]
    )


@pytest.mark.parametrize(
    "chosen", slow_but([[0, 5], [1, 2, 6]], [[*EIGHT], [0], [0, 5], [1, 2, 6], [4, 5, 6, 7]])
)
@pytest.mark.parametrize(("name", "gpus"), [("dgx_h100", H100), ("hgx_a100", A100)])
def test_what_ranks_tell_is_as_good_as_the_whole_machine(
    readers: Readers, name: str, gpus: list[str], chosen: list[int]
) -> None:
    machine = readers(name)()
    labels = [port.label for port in machine.ports if port.port]
    used = [gpus[each] for each in chosen]
    affinity = Affinity(machine, gpus=used, ports=labels)
    found = explored([range(len(used))], [Seat(gpu, labels, lambda: machine) for gpu in used])
    for gpu, each in zip(used, found, strict=True):
        routes = affinity.preferences()[gpu]
        pxn_routes = sorted((labels.index(route.port), route.via) for route in routes if route.via)
        assert [(pxn_route.rail, pxn_route.via) for pxn_route in each.pxn_routes] == pxn_routes
    for route, rails in zip(affinity.assign(), found[0].homes, strict=True):
        assert labels.index(route.port) in rails


def test_ranks_that_share_a_gpu_share_its_homes(readers: Readers) -> None:
    shared = [gpu for gpu in A100[::2] for _ in range(2)]
    found = explored([EIGHT], [Seat(gpu, NICS, readers("hgx_a100")) for gpu in shared])
    assert found[0].homes == ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))
    assert (
        found[0].pxn_routes
        == found[1].pxn_routes
        == tuple(PxnRoute(i, A100[2 * i]) for i in (1, 2, 3))
    )


def test_a_bus_id_may_be_written_as_cuda_does(readers: Readers) -> None:
    seats = [Seat(f"0000{gpu.upper()}", NICS, readers("hgx_a100")) for gpu in A100]
    assert explored([EIGHT], seats)[7].homes[7] == (3,)


# More NICs than GPUs


def board(ngpus: int, nnics: int, nic_mbps: int = 100_000) -> Machine:
    """GPUs and NICs on one PCI switch, PCIe 5; the GPUs are joined."""
    top = PciDevice("0000:00:00.0", "", 0, 0x060400, 32_000, 16)
    gpus = [f"0001:{n:02x}:00.0" for n in range(ngpus)]
    nics = [f"0002:{n:02x}:00.0" for n in range(nnics)]
    pci = [PciDevice(each, top.bus_id, 0, 0x030200, 32_000, 16) for each in (*gpus, *nics)]
    ports = [NicPort(f"mlx5_{n}", 1, each, 0, nic_mbps, has_gdr=True)
             for n, each in enumerate(nics)]  # fmt: skip
    links = [NvLink(each, "0000:ff:00.0", LinkEnd.SWITCH, 18) for each in gpus]
    made = [Gpu(each, compute_capability=90, has_gdr=True) for each in gpus]
    return Machine.of([NumaNode(0)], [top, *pci], made, ports, links)


def on_board(machine: Machine) -> list[Seat]:
    labels = [port.label for port in machine.ports]
    return [Seat(gpu.bus_id, labels, lambda: machine) for gpu in machine.gpus]


@given(10, 20, st.integers(1, 4), st.integers(1, 9))
def test_no_nic_is_idle_that_gpus_could_fill(ngpus: int, nnics: int) -> None:
    """A GPU's link carries what 3 of these NICs do, and more; all are as near to all."""
    homes = explored([range(ngpus)], on_board(board(ngpus, nnics)))[0].homes
    sizes = [len(rails) for rails in homes]
    if nnics <= 3 * ngpus:
        assert common_homes(homes) == tuple(range(nnics))
    if nnics >= ngpus:
        assert sum(sizes) == len(common_homes(homes)), "a NIC that some share holds up all"
        assert max(sizes) - min(sizes) <= 1


def test_a_nic_that_is_left_over_far_away_is_nobodys_home(readers: Readers) -> None:
    """Two of four GPUs on one socket share a NIC; the other one's way to the far one is taken."""
    found = explored([range(4)], [Seat(gpu, NICS, readers("hgx_a100")) for gpu in A100[4:]])
    assert found[0].homes == ((2,), (0,), (3,), (3,))


def test_a_gpu_that_its_nic_fills_has_no_use_for_a_far_one(readers: Readers) -> None:
    seats = [Seat(gpu, COMPUTE, readers("dgx_h100")) for gpu in H100[:3]]
    assert explored([range(3)], seats)[0].homes == ((0,), (1,), (2,))


# Ranks that know nothing, or something else


@pytest.mark.parametrize(
    "error",
    [
        OSError("no /sys"),
        InvalidArgument("twice"),
        TransportError("no driver"),
        RuntimeError("the bindings are of another driver"),
    ],
)
def test_an_unreadable_machine_keeps_only_its_host_from_knowing(
    readers: Readers, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    seats = [Seat(gpu, NICS, readers("hgx_a100")) for gpu in A100] * 2
    seats[3] = seats[3]._replace(read=failing(error))
    found = explored(two_hosts(8), seats)
    assert found[0].homes == (tuple(range(4)),) * 8 + tuple((n // 2,) for n in range(8))
    assert all(not each.pxn_routes for each in found[:8])
    assert all(len(each.pxn_routes) == 3 for each in found[8:])
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert str(error) in warning.getMessage()
    assert warning.getMessage().startswith(
        f"rank 3: cannot determine which NICs are near GPU {A100[3]}"
    )


@pytest.mark.parametrize(
    "labels",
    [
        [NICS[1], NICS[0], *NICS[2:]],
        [*NICS[:3], "mlx5_9:1"],
        [*NICS[:3], NICS[0]],
        [*NICS[:3], "ib3"],
    ],
)
def test_ranks_of_a_host_with_other_nics_for_a_rail_know_nothing(
    readers: Readers, labels: list[str]
) -> None:
    seats = [Seat(gpu, NICS, readers("hgx_a100")) for gpu in A100[::2]] * 2
    seats[5] = seats[5]._replace(labels=labels)
    found = explored(two_hosts(4), seats)
    assert found[0].homes == ((0,), (1,), (2,), (3,)) + (tuple(range(4)),) * 4
    assert all(not each.pxn_routes for each in found[4:])


@pytest.mark.parametrize("counts", [(2, 3, 3, 3), (0, 0, 0, 0), (65, 65, 65, 65), (1, 1, 0, 1)])
def test_all_ranks_refuse_rails_that_they_do_not_all_have(counts: tuple[int, ...]) -> None:
    (first, *_) = on_board(board(1, 3))
    seats = [first._replace(labels=[f"mlx5_{n}:1" for n in range(count)]) for count in counts]
    told = f"ranks have {min(counts)} to {max(counts)} RDMA rails"
    for rank, said in enumerate(outcomes(two_hosts(2), seats)):
        assert isinstance(said, str)
        assert said.startswith(f"rank {rank}: {told}: give all ranks the same number, 1 to")


def test_64_rails_are_told_of(trees: Trees) -> None:
    machine = board(1, 64, nic_mbps=1_000)
    (first,) = on_board(machine)
    found = explored([(0,), (1,)], [first, first._replace(read=failing(OSError("no /sys")))])
    assert found[0].homes[1] == tuple(range(64))
    assert found[0].homes[0]


def test_parts_that_do_not_matter_are_not_told(trees: Trees) -> None:
    """A host may have a thousand virtual NICs; every rank hears of every host's."""
    machine = board(2, 2)
    virtual = [PciDevice(f"0003:{n // 32:02x}:{n % 32:02x}.0", "", 0, 0x020000, 8_000, 16)
               for n in range(1000)]  # fmt: skip
    ports = [NicPort(f"mlx5_{100 + n}", 1, each.bus_id, 0, 1_000) for n, each in enumerate(virtual)]
    more = Machine.of(machine.nodes, [*machine.pci, *virtual], machine.gpus,
                      [*machine.ports, *ports], machine.nvlinks)  # fmt: skip
    lengths = set()

    def listen(turn: int, rank: int, said: bytes) -> bytes:
        lengths.add((turn, len(said)))
        return said

    seats = [seat._replace(read=lambda: more) for seat in on_board(machine)]
    found = explored([(0, 1)], seats, listen)
    assert found == explored([(0, 1)], on_board(machine))
    assert len(lengths) == 3, "all say as many bytes"
    assert max(nbytes for _, nbytes in lengths) < 2000


def test_a_machine_too_long_to_tell_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    machine = board(2, 2)
    node = NumaNode(0, tuple(range(30_000)))
    more = msgspec.structs.replace(machine, nodes=(node,))
    seats = on_board(machine)
    seats[0] = seats[0]._replace(read=lambda: more)
    assert explored([(0, 1)], seats) == [NicAffinity(((0, 1), (0, 1)), ())] * 2
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "has 90645 bytes, more than 65536" in warning.getMessage()


def test_what_was_found_out_is_logged_once(
    readers: Readers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "r2ccl")
    seats = [Seat(gpu, NICS, readers("hgx_a100")) for gpu in A100[::2]]
    explored([range(4)], seats)
    told = sorted(each.getMessage() for each in caplog.records)
    assert len(told) == 4
    assert told[1] == (
        f"rank 1: home rails of GPU {A100[2]}: mlx5_1:1; mlx5_0:1 through GPU {A100[0]}; "
        f"mlx5_2:1 through GPU {A100[4]}; mlx5_3:1 through GPU {A100[6]}"
    )
    caplog.clear()
    seats[2] = seats[2]._replace(read=failing(OSError("no /sys")))
    explored([range(4)], seats)
    told = sorted(each.getMessage() for each in caplog.records if each.levelno == logging.INFO)
    assert told[0] == (
        f"rank 0: home rails of GPU {A100[0]}: every NIC: "
        "rank 2 sent no usable report of its topology"
    )


# Garbage

INTEL = {"arch": "x86_64", "vendor": "GenuineIntel", "family": 6, "model": 143}
DEEP = "deep"


def encoded(report: Any) -> bytes:
    """Encode, with lists in lists in place of a word: more than any version of Python decodes."""
    return msgspec.msgpack.encode(report).replace(b"\xa4deep", b"\x91" * 20_000 + b"\xc0")


@functools.cache
def good_card() -> Any:
    """Return what rank 1 tells of a machine where all is well."""
    heard: dict[tuple[int, int], bytes] = {}

    def listen(turn: int, rank: int, said: bytes) -> bytes:
        return heard.setdefault((turn, rank), said)

    explored([(0, 1)], on_board(board(2, 2)), listen)
    return msgspec.msgpack.decode(heard[1, 1])


def replaced(value: Any, path: tuple[Any, ...], part: Any) -> Any:
    copy = value.copy() if path else part
    if path:
        copy[path[0]] = replaced(value[path[0]], path[1:], part) if path[1:] else part
    return copy


def says(rank: int, turn: int, garbage: bytes) -> Spoil:
    def spoil(at: int, who: int, said: bytes) -> bytes:
        return garbage if (at, who) == (turn, rank) else said

    return spoil


def tells(rank: int, report: Any) -> Spoil:
    """Make a rank tell this report, with its length before it."""
    told = encoded(report)
    turns = {0: struct.pack("<II", len(told), 2), 1: told}
    return lambda at, who, said: turns.get(at, said) if who == rank else said


@pytest.mark.parametrize("nbytes", [0, 1, 64 << 10, (64 << 10) + 1, (1 << 32) - 1])
def test_a_length_that_is_not_the_reports_spoils_its_host_alone(nbytes: int) -> None:
    lengths = []

    def spoil(turn: int, rank: int, said: bytes) -> bytes:
        lengths.append(len(said))
        return struct.pack("<II", nbytes, 2) if (turn, rank) == (0, 1) else said

    found = explored(two_hosts(2), on_board(board(2, 2)) * 2, spoil)
    assert found[0].homes == ((0, 1), (0, 1), (0,), (1,))
    assert max(lengths) <= 64 << 10, "nobody makes others say more"


@pytest.mark.parametrize(
    "garbage", [b"", b"\0", b"\xff" * 7, b"\x83\xa6bus_id\xa2\xff\xfe", b"\xc1" * 3000]
)
@pytest.mark.parametrize("turn", [0, 1])
def test_garbage_spoils_its_host_alone(turn: int, garbage: bytes) -> None:
    found = explored(two_hosts(2), on_board(board(2, 2)) * 2, says(1, turn, garbage))
    assert found[0].homes == ((0, 1), (0, 1), (0,), (1,))


@pytest.mark.parametrize(
    "garbage", [b"", bytes(8), b"\x01", b"\4" + bytes(7), bytes(7) + b"\x80", b"\x01" * 9]
)
def test_homes_that_are_none_are_all(garbage: bytes) -> None:
    found = explored(two_hosts(2), on_board(board(2, 2)) * 2, says(1, 2, garbage))
    assert found[0].homes == ((0,), (0, 1), (0,), (1,))


@pytest.mark.parametrize(
    "edits",
    [
        {("machine", "gpus", 0, "compute_capability"): -1},
        {("machine", "nodes"): [{"id": 0, **INTEL, "model": -1}, {"id": 1, **INTEL}],
         ("machine", "ports", 0, "numa_node"): 1},
        {("machine", "pci", 0, "bus_id"): "what"},
        {("machine", "pci"): []},
        {("machine", "nvlinks", 0, "end"): "moon"},
        {("bus_id",): "GPU"},
        {("labels", 0): "mlx5_7:1"},
        {("labels",): ["mlx5_0:1"]},
        {("machine",): None},
        {("more",): 1},
        {("machine", "more"): DEEP},
    ],
)  # fmt: skip
def test_a_report_that_makes_no_sense_spoils_its_host_alone(edits: dict[Any, Any]) -> None:
    report = good_card()
    for path, part in edits.items():
        report = replaced(report, path, part)
    found = explored(two_hosts(2), on_board(board(2, 2)) * 2, tells(1, report))
    assert found[0].homes == ((0, 1), (0, 1), (0,), (1,))


def test_a_report_as_it_should_be_spoils_nothing() -> None:
    """So the edits of the test above do."""
    found = explored(two_hosts(2), on_board(board(2, 2)) * 2, tells(1, good_card()))
    assert found[0].homes == ((0,), (1,), (0,), (1,))


def test_parts_that_refer_to_each_other_hold_no_one_up() -> None:
    machine = board(2, 2)
    pci = [msgspec.structs.replace(each, parent="0001:00:00.0") for each in machine.pci]
    seats = [seat._replace(read=lambda: msgspec.structs.replace(machine, pci=tuple(pci)))
             for seat in on_board(machine)]  # fmt: skip
    explored([(0, 1)], seats)


# Machines that would take long to judge


def bridge(number: int, parent: int | None, speed: int = 32_000, node: int = 0) -> PciDevice:
    """Return a PCI switch; `parent` is the number of the one above."""
    above = "" if parent is None else f"0009:{parent // 32:02x}:{parent % 32:02x}.0"
    bus_id = f"0009:{number // 32:02x}:{number % 32:02x}.0"
    return PciDevice(bus_id, above, node, 0x060400, speed, 16)


def beneath(machine: Machine, *bridges: PciDevice, nodes: int = 1) -> Machine:
    """Have the switch that all hangs on hang below the last of some, and of its NICs one each."""
    above = dict(zip([port.bus_id for port in machine.ports[::-1]], bridges[::-1], strict=False))
    pci = [
        msgspec.structs.replace(each, parent=above.get(each.bus_id, bridges[-1]).bus_id)
        if each.bus_id in above or not each.parent
        else each
        for each in machine.pci
    ]
    return Machine.of([NumaNode(n) for n in range(nodes)], [*bridges, *pci], machine.gpus,
                      machine.ports, machine.nvlinks)  # fmt: skip


def deep(depth: int, offset: int = 0) -> tuple[PciDevice, ...]:
    """Return a chain, the last of which is farthest down."""
    numbers = range(offset, offset + depth)
    return tuple(bridge(n, n - 1 if n > offset else None) for n in numbers)


@pytest.mark.parametrize(
    ("bridges", "nnics", "nodes", "what"),
    [
        (deep(14), 2, 1, ""),
        (deep(15), 2, 1, "16 PCI devices on one path"),
        (deep(200), 2, 1, "16 PCI devices on one path"),
        (tuple(bridge(n, n - 63 if n >= 63 else None) for n in range(189)), 63, 1, ""),
        (tuple(bridge(n, n - 63 if n >= 63 else None) for n in range(192)), 63, 1,
         "256 PCI devices"),
        (tuple(bridge(n, None, node=n) for n in range(32)), 32, 32, ""),
        (tuple(bridge(n, None, node=n) for n in range(33)), 33, 33, "32 NUMA nodes"),
        (tuple(bridge(n, None, 8_000 + n) for n in range(14)), 14, 1, ""),
        (tuple(bridge(n, None, 8_000 + n) for n in range(15)), 15, 1, "16 rates of links"),
    ],
)  # fmt: skip
def test_a_host_larger_than_any_is_not_judged(
    bridges: tuple[PciDevice, ...], nnics: int, nodes: int, what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "r2ccl")
    small = board(2, nnics)
    large = beneath(small, *bridges, nodes=nodes)
    seats = [seat._replace(read=lambda: small) for seat in on_board(small)]
    seats[1] = seats[1]._replace(read=lambda: large)
    found = explored([(0, 1)], seats)
    told = [each.getMessage() for each in caplog.records]
    reason = f"every NIC: the ranks of this host report more than {what}"
    assert [told[0].endswith(reason), told[1].endswith(reason)] == [bool(what)] * 2, told
    if what:
        assert found == [NicAffinity((tuple(range(nnics)),) * 2, ())] * 2


def test_paths_that_are_long_only_together_are_not_judged() -> None:
    """Of a device that several ranks tell of differently, one version is kept."""
    small = board(2, 2)
    upper, lower = deep(10), deep(10, offset=10)
    joint = bridge(10, 9, 64_000)
    machines = [beneath(small, *upper, joint), beneath(small, *lower)]
    seats = [seat._replace(read=lambda each=each: each)
             for seat, each in zip(on_board(small), machines, strict=True)]  # fmt: skip
    assert explored([(0, 1)], seats) == [NicAffinity(((0, 1), (0, 1)), ())] * 2


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.integers(-3, 3),
    st.floats(),
    st.text("a0. \u00e9\u4e00", max_size=5),
    st.sampled_from(["0000:00:00.0", "0001:00:00.0", "0002:01:00.0", "mlx5_0:1", "gpu"]),
    st.just("9" * 5000),
    st.binary(max_size=5),
    st.just([]),
    st.just({}),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path to a part of a value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


@given(10, 150, st.data())
def test_whatever_a_rank_tells_all_ranks_agree(data: st.DataObject) -> None:
    """One part of a good description, or several, become something else."""
    report = good_card()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(report))))
        report = replaced(report, path, data.draw(ODD))
    explored([(0, 1)], on_board(board(2, 2)), tells(1, report))


@given(25, 50, st.binary(max_size=100), st.integers(0, 2))
def test_whatever_bytes_come_ranks_agree_or_all_refuse(garbage: bytes, turn: int) -> None:
    found = outcomes([(0, 1)], on_board(board(2, 2)), says(0, turn, garbage))
    told = [each.homes for each in found if isinstance(each, NicAffinity)]
    if told:
        assert told == [told[0]] * 2
    else:
        assert [type(each) for each in found] == [str] * 2


FAILURES: list[Callable[[Seat], Seat]] = [
    lambda seat: seat,
    lambda seat: seat._replace(read=failing(OSError("no /sys"))),
    lambda seat: seat._replace(labels=seat.labels[::-1]),
    lambda seat: seat._replace(bus_id="0000:fe:00.0"),
    lambda seat: seat._replace(bus_id="GPU 0"),
]


@given(20, 40, st.lists(st.sampled_from(FAILURES), min_size=6, max_size=6))
def test_whichever_ranks_fail_all_agree_and_healthy_hosts_know(
    failures: list[Callable[[Seat], Seat]],
) -> None:
    seats = [fail(seat) for fail, seat in zip(failures, on_board(board(2, 2)) * 3, strict=True)]
    found = explored([(0, 1), (2, 3), (4, 5)], seats)
    for first in (0, 2, 4):
        if all(fail is FAILURES[0] for fail in failures[first : first + 2]):
            assert found[0].homes[first : first + 2] == ((0,), (1,))


# Groups


def test_a_group_plans_with_the_rails_of_all_its_members() -> None:
    assert common_homes([(3,), (1, 3), (0,)]) == (0, 1, 3)
    assert common_homes([(2, 5)]) == (2, 5)
