"""RDMA ports read from recorded sysfs trees; which are chosen, and from which GID they send."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.topology.hcas import SYSFS, Gid, GidFinder, Hca, choose_gid, list_hcas, select_hcas
from r2ccl.topology.names import NameFilter, natural

V1, V2 = "IB/RoCE v1", "RoCE v2"
ZERO = ":".join(["0000"] * 8)
LOCAL = "fe80:0000:0000:0000:0e42:a1ff:fe70:1c{:02x}"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:{:04x}"  # 10.0.x.x

#: A file of the running kernel that fails to be read the way an empty slot does.
EINVAL_FILE = Path("/sys/class/net/lo/speed")


def attribute(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


class Tree:
    """Writes what the kernel shows below /sys/class."""

    def __init__(self, path: Path) -> None:
        self.root = path / "infiniband"
        self.net = path / "net"
        self.root.mkdir()

    def port(
        self,
        device: str,
        port: int = 1,
        *,
        link_layer: str = "Ethernet",
        state: str = "4: ACTIVE",
        rate: str = "100 Gb/sec (4X EDR)",
    ) -> Path:
        base = self.root / device / "ports" / str(port)
        attribute(base / "state", state)
        attribute(base / "link_layer", link_layer)
        attribute(base / "rate", rate)
        return base

    def gid(self, port: Path, index: int, address: str, kind: str, netdev: str) -> None:
        """Write a slot; an empty `kind` or `netdev` reads with EINVAL, as the kernel has it."""
        attribute(port / "gids" / str(index), address)
        for name, text in (("types", kind), ("ndevs", netdev)):
            path = port / "gid_attrs" / name / str(index)
            if text:
                attribute(path, text)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(EINVAL_FILE)

    def netdev(self, name: str, index: int) -> None:
        attribute(self.net / name / "ifindex", str(index))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    with pytest.raises(OSError, match="Invalid argument") as error:
        EINVAL_FILE.read_text()
    assert error.value.errno == errno.EINVAL
    return Tree(tmp_path)


def roce_port(tree: Tree, device: str, netdev: str, host: int, port: int = 1) -> Path:
    """One Ethernet port of a mlx5 or mlx4 card: each address twice, and a VLAN's behind them."""
    base = tree.port(device, port)
    attribute(tree.root / device / "device" / "numa_node", "1")
    tree.gid(base, 0, LOCAL.format(host), V1, netdev)
    tree.gid(base, 1, LOCAL.format(host), V2, netdev)
    tree.gid(base, 2, MAPPED.format(host), V1, netdev)
    tree.gid(base, 3, MAPPED.format(host), V2, netdev)
    tree.gid(base, 4, MAPPED.format(0x6400 + host), V1, f"{netdev}.100")
    tree.gid(base, 5, MAPPED.format(0x6400 + host), V2, f"{netdev}.100")
    tree.gid(base, 6, ZERO, "", "")
    tree.netdev(netdev, 4 + host)
    return base


def infiniband_port(tree: Tree, device: str = "mlx5_0") -> Path:
    base = tree.port(device, link_layer="InfiniBand", rate="200 Gb/sec (4X HDR)")
    attribute(base / "lid", "0x2a")
    attribute(tree.root / device / "device" / "numa_node", "0")
    attribute(tree.root / device / "device" / "net" / "ib0" / "dev_port", "0")
    tree.gid(base, 0, "fe80:0000:0000:0000:0e42:a103:0070:1c54", V1, "")
    tree.gid(base, 1, ZERO, "", "")
    return base


def soft_roce_port(tree: Tree, device: str = "rxe0", netdev: str = "eth_a") -> Path:
    base = tree.port(device, rate="2.5 Gb/sec (1X)")
    attribute(tree.root / device / "parent", netdev)
    tree.gid(base, 0, LOCAL.format(7), V2, netdev)
    tree.gid(base, 1, MAPPED.format(7), V2, netdev)
    tree.netdev(netdev, 12)
    return base


def hca(*gids: Gid, name: str = "mlx5_0", link_layer: str = "Ethernet", **changed: object) -> Hca:
    values = {"port": 1, "netdev": "eth0", "state": "ACTIVE", "speed_mbps": 0, "numa_node": -1}
    return Hca(name=name, link_layer=link_layer, gids=gids, **{**values, **changed})  # type: ignore[arg-type]


# Reading


def test_a_machine_without_rdma_has_no_ports(tmp_path: Path) -> None:
    assert list_hcas(tmp_path / "infiniband") == ()


def test_this_machine_can_be_read() -> None:
    there = set(os.listdir(SYSFS)) if SYSFS.is_dir() else set()
    assert {each.name for each in list_hcas()} == there


def test_a_two_port_roce_card(tree: Tree) -> None:
    roce_port(tree, "mlx5_1", "eth1", host=2)
    roce_port(tree, "mlx5_0", "eth0", host=1)
    first, second = list_hcas(tree.root)
    assert first == Hca(
        name="mlx5_0",
        port=1,
        netdev="eth0",
        link_layer="Ethernet",
        state="ACTIVE",
        speed_mbps=100_000,
        numa_node=1,
        gids=(
            Gid(0, V1, "fe80::e42:a1ff:fe70:1c01", "eth0"),
            Gid(1, V2, "fe80::e42:a1ff:fe70:1c01", "eth0"),
            Gid(2, V1, "::ffff:10.0.0.1", "eth0"),
            Gid(3, V2, "::ffff:10.0.0.1", "eth0"),
            Gid(4, V1, "::ffff:10.0.100.1", "eth0.100"),
            Gid(5, V2, "::ffff:10.0.100.1", "eth0.100"),
        ),
        index=5,
    )
    assert (second.name, second.netdev, second.index) == ("mlx5_1", "eth1", 6)


def test_ports_of_one_device_stay_apart(tree: Tree) -> None:
    roce_port(tree, "mlx4_0", "eth0", host=1, port=1)
    roce_port(tree, "mlx4_0", "eth1", host=2, port=2)
    found = [(each.name, each.port, each.netdev) for each in list_hcas(tree.root)]
    assert found == [("mlx4_0", 1, "eth0"), ("mlx4_0", 2, "eth1")]


def test_an_infiniband_port_has_no_interface(tree: Tree) -> None:
    infiniband_port(tree)
    (found,) = list_hcas(tree.root)
    assert found == Hca(
        name="mlx5_0",
        port=1,
        netdev="",
        link_layer="InfiniBand",
        state="ACTIVE",
        speed_mbps=200_000,
        numa_node=0,
        gids=(Gid(0, V1, "fe80::e42:a103:70:1c54", ""),),
    )


def test_soft_roce_has_no_numa_node(tree: Tree) -> None:
    soft_roce_port(tree)
    (found,) = list_hcas(tree.root)
    assert (found.netdev, found.index, found.speed_mbps, found.numa_node) == ("eth_a", 12, 2500, -1)
    assert [gid.index for gid in found.gids] == [0, 1]


def test_the_interface_is_known_while_the_table_is_empty(tree: Tree) -> None:
    tree.port("rxe0")
    attribute(tree.root / "rxe0" / "parent", "eth_a")
    tree.port("mlx4_0", 2)
    for port, netdev in enumerate(("eth0", "eth1")):
        attribute(tree.root / "mlx4_0" / "device" / "net" / netdev / "dev_port", str(port))
    assert [each.netdev for each in list_hcas(tree.root)] == ["eth1", "eth_a"]


def test_a_port_that_is_down(tree: Tree) -> None:
    tree.port("mlx5_0", state="1: DOWN", rate="40 Gb/sec (4X QDR)")
    (found,) = list_hcas(tree.root)
    assert (found.state, found.netdev, found.index, found.gids) == ("DOWN", "", 0, ())


def test_a_slot_that_cannot_be_read_is_empty(tree: Tree) -> None:
    port = tree.port("mlx5_0")
    tree.gid(port, 0, LOCAL.format(1), "", "")  # another network namespace's
    tree.gid(port, 1, LOCAL.format(1), V2, "")
    (port / "gids" / "2").symlink_to(EINVAL_FILE)
    (found,) = list_hcas(tree.root)
    assert found.gids == (Gid(1, V2, "fe80::e42:a1ff:fe70:1c01", ""),)


def test_a_kernel_that_does_not_know_the_rate(tree: Tree) -> None:
    port = tree.port("mlx5_0")
    (port / "rate").unlink()
    (port / "rate").symlink_to(EINVAL_FILE)
    assert list_hcas(tree.root)[0].speed_mbps == 0


def test_a_port_that_went_away_while_it_was_read_is_left_out(tree: Tree) -> None:
    soft_roce_port(tree)
    shutil.rmtree(soft_roce_port(tree, "rxe1"))
    (tree.root / "rxe1" / "ports" / "1").mkdir()
    assert [each.name for each in list_hcas(tree.root)] == ["rxe0"]


def test_a_gid_is_found_again_wherever_it_went(tree: Tree) -> None:
    port = soft_roce_port(tree)
    find = GidFinder("rxe0", 1, root=tree.root)
    assert find() == find() == (1, "::ffff:10.0.0.7")
    for folder in (port / "gids", port / "gid_attrs" / "types", port / "gid_attrs" / "ndevs"):
        (folder / "1").rename(folder / "4")  # what a flap of the interface can do
    assert find() == find() == (4, "::ffff:10.0.0.7")
    shutil.rmtree(port)
    with pytest.raises(InvalidArgument, match="port 1 of RDMA NIC rxe0 no longer exists"):
        find()


def test_the_interface_of_a_gid_may_be_a_vlan(tree: Tree) -> None:
    """Peers of a VLAN's GID are found behind the VLAN, not behind the port's interface."""
    roce_port(tree, "mlx5_0", "eth0", host=1)
    tree.netdev("eth0.100", 9)
    for slot, index in ((-1, 5), (5, 9)):
        find = GidFinder("mlx5_0", 1, slot, root=tree.root)
        find()
        assert find.interface() == index


def test_a_garbled_interface_number_is_an_error(tree: Tree) -> None:
    roce_port(tree, "mlx5_0", "eth0", host=1)
    find = GidFinder("mlx5_0", 1, root=tree.root)
    find()
    attribute(tree.net / "eth0" / "ifindex", "two")
    with pytest.raises(OSError, match=r"cannot parse the attributes of .*eth0.*'two'"):
        find.interface()


def test_a_gid_that_stays_costs_one_slot(tree: Tree) -> None:
    port = soft_roce_port(tree)
    find = GidFinder("rxe0", 1, root=tree.root)
    expected = find()
    (port / "gids" / "0").unlink()
    (port / "gids" / "0").mkdir()  # reading it now would raise
    assert find() == expected


def test_an_unreadable_tree_is_an_error(tree: Tree) -> None:
    port = soft_roce_port(tree)
    (port / "state").unlink()
    (port / "state").mkdir()
    with pytest.raises(IsADirectoryError):
        list_hcas(tree.root)


@pytest.mark.parametrize(
    ("attribute_of_port", "value"),
    [("gids/0", "fe80::x"), ("rate", "1.2.3 Gb/sec"), ("../../device/numa_node", "near")],
)
def test_an_attribute_that_cannot_be_parsed_is_an_oserror(
    tree: Tree, attribute_of_port: str, value: str
) -> None:
    port = roce_port(tree, "mlx5_0", "eth0", host=1)
    find = GidFinder("mlx5_0", 1, root=tree.root)
    attribute(port / attribute_of_port, value)
    for read in (find, lambda: list_hcas(tree.root)):
        with pytest.raises(OSError, match=r"mlx5_0/ports/1: .*"):
            read()


def test_devices_are_in_natural_order(tree: Tree) -> None:
    for name in ("mlx5_10", "mlx5_2", "mlx5_0"):
        tree.port(name)
    assert [each.name for each in list_hcas(tree.root)] == ["mlx5_0", "mlx5_2", "mlx5_10"]


# Selecting

USABLE = Gid(3, V2, "::ffff:10.0.0.1", "eth0")
HOST = (
    hca(USABLE, name="mlx4_0"),
    hca(USABLE, name="mlx4_0", port=2),
    hca(USABLE, name="mlx5_1"),
    hca(USABLE, name="mlx5_10"),
    hca(USABLE, name="mlx5_2", state="DOWN"),
    hca(Gid(0, V1, "fe80::1", "eth7"), name="roce1_0"),
    hca(Gid(0, V1, "fe80::2"), name="mlx5_11", link_layer="InfiniBand", netdev=""),
)


def selected(pattern: str) -> list[str]:
    return [each.label for each in select_hcas(HOST, pattern)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ["mlx4_0:1", "mlx4_0:2", "mlx5_1:1", "mlx5_10:1", "mlx5_11:1"]),
        ("mlx5_1", ["mlx5_1:1", "mlx5_10:1", "mlx5_11:1"]),
        ("=mlx5_1", ["mlx5_1:1"]),
        ("mlx4,=mlx5_1", ["mlx4_0:1", "mlx4_0:2", "mlx5_1:1"]),
        ("mlx4_0:2", ["mlx4_0:2"]),
        ("=mlx4_0:2, mlx5_10:1", ["mlx4_0:2", "mlx5_10:1"]),
        ("^mlx5", ["mlx4_0:1", "mlx4_0:2"]),
        ("^mlx4_0:1", ["mlx4_0:2", "mlx5_1:1", "mlx5_10:1", "mlx5_11:1"]),
        ("^=mlx5_1,mlx5_11", ["mlx4_0:1", "mlx4_0:2", "mlx5_10:1"]),
        ("^mlx", []),
        ("none", []),
        ("roce1", ["roce1_0:1"]),
    ],
)
def test_hca_syntax(pattern: str, expected: list[str]) -> None:
    assert selected(pattern) == expected


@pytest.mark.parametrize("pattern", ["mlx5_2", "=mlx5", "mlx4_0:3", "nothing"])
def test_asking_for_what_is_not_there_lists_what_is(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=r"R2CC_HCA=.*mlx5_2:1 \(DOWN, Ethernet, eth0\)"):
        selected(pattern)


@pytest.mark.parametrize("pattern", ["=", "^", "^=", "mlx5_0,=", ":1"])
def test_a_pattern_without_a_name_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=r"R2CC_HCA=.*name is missing"):
        selected(pattern)


@pytest.mark.parametrize("pattern", ["mlx5_0:", "mlx5_0:x", "mlx5_0:-1", "mlx5_0:1:2"])
def test_a_port_is_a_number(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=r"port of 'mlx5_0' must be a number"):
        selected(pattern)


def test_an_empty_list_names_nothing() -> None:
    names = NameFilter(" ", variable="X")
    assert (names.is_selection, names.lists("eth0")) == (False, False)


def test_natural_order_counts() -> None:
    assert sorted(["mlx5_10", "mlx5_9", "mlx4_0", "7", "a"], key=natural) == [
        "7",
        "a",
        "mlx4_0",
        "mlx5_9",
        "mlx5_10",
    ]


# Choosing a GID


LINK_LOCAL = Gid(0, V2, "fe80::1", "eth0")
WORLD_V1 = Gid(1, V1, "::ffff:10.0.0.1", "eth0")
GLOBAL = Gid(2, V2, "2001:db8::1", "eth0")
VLAN = Gid(3, V2, "::ffff:10.0.9.1", "eth0.9")
IPV4 = Gid(4, V2, "::ffff:10.0.0.1", "eth0")
SECOND = Gid(5, V2, "::ffff:10.0.0.2", "eth0")


@pytest.mark.parametrize(
    ("gids", "expected"),
    [
        ([LINK_LOCAL, WORLD_V1, GLOBAL, IPV4], IPV4),
        ([LINK_LOCAL, WORLD_V1, GLOBAL], GLOBAL),
        ([LINK_LOCAL, WORLD_V1], LINK_LOCAL),
        ([VLAN, IPV4], IPV4),
        ([LINK_LOCAL, VLAN], VLAN),
        ([IPV4, SECOND], IPV4),
    ],
)
def test_gid_is_chosen_by_type_and_address(gids: list[Gid], expected: Gid) -> None:
    assert choose_gid(hca(*gids)) == expected
    assert choose_gid(hca(*reversed(gids))) == expected


def test_recorded_trees_choose_their_ipv4_gid(tree: Tree) -> None:
    roce_port(tree, "mlx5_0", "eth0", host=1)
    soft_roce_port(tree)
    assert [choose_gid(each).index for each in list_hcas(tree.root)] == [3, 1]


def test_infiniband_sends_from_entry_zero(tree: Tree) -> None:
    infiniband_port(tree)
    (port,) = list_hcas(tree.root)
    assert choose_gid(port) == port.gids[0]
    alias = hca(Gid(1, V1, "fe80::2"), link_layer="InfiniBand", netdev="")
    with pytest.raises(InvalidArgument, match="no GID at index 0"):
        choose_gid(alias)


def test_an_entry_asked_for_by_index_may_be_any(tree: Tree) -> None:
    roce_port(tree, "mlx5_0", "eth0", host=1)
    (port,) = list_hcas(tree.root)
    assert choose_gid(port, index=0).kind == V1
    with pytest.raises(InvalidArgument, match=r"index 6 \(R2CC_GID_INDEX\).*3: ::ffff:10\.0\.0\.1"):
        choose_gid(port, index=6)


def test_a_port_without_roce_v2_says_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"no RoCE v2 GID.*leave the port out with R2CC_HCA$"):
        choose_gid(hca(Gid(0, V1, "fe80::1", "eth0")))
    with pytest.raises(InvalidArgument, match="its GIDs: none; give eth0 an IP address"):
        choose_gid(hca())


# Settings


def test_settings_are_read_as_nccl_spells_them() -> None:
    config = Config.from_env(
        {
            "NCCL_IB_HCA": "=mlx5_0:1",
            "NCCL_IB_GID_INDEX": "3",
            "NCCL_IB_TIMEOUT": "20",
            "NCCL_IB_RETRY_CNT": "7",
            "R2CC_IB_RETRY_CNT": "2",
            "R2CC_REGISTRATION_LIMIT_NBYTES": "4096",
        }
    )
    assert (config.hca, config.gid_index) == ("=mlx5_0:1", 3)
    assert (config.ib_timeout, config.ib_retry_cnt) == (20, 2)
    assert config.registration_limit_nbytes == 4096


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gid_index", (-2, 256)),
        ("ib_timeout", (0, 32)),
        ("ib_retry_cnt", (-1, 8)),
        ("registration_limit_nbytes", (0, -1)),
    ],
)
def test_settings_out_of_range_are_refused(name: str, values: tuple[int, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidArgument, match=f"R2CC_{name.upper()}"):
            Config(**{name: value})  # type: ignore[arg-type]


def test_ranks_may_differ_in_their_nics() -> None:
    assert Config(hca="none", gid_index=3, ib_timeout=20).digest() == Config().digest()
