"""Which interfaces become rails, in which order, and what is said when none does."""

import socket

import pytest

from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.topology import Interface, discover, list_interfaces, select

LO = Interface("lo", 1, ("127.0.0.1", "::1"), True, is_loopback=True)


def nic(name: str, index: int, *addresses: str, is_up: bool = True) -> Interface:
    return Interface(name, index, addresses or (f"10.0.{index}.1",), is_up, speed_mbps=1000)


HOST = (
    LO,
    nic("eth10", 12),
    nic("eth2", 9),
    nic("ib0", 5),
    nic("docker0", 6),
    nic("virbr0", 7),
    nic("eth3", 8, is_up=False),
    Interface("eth4", 10, (), True),
)


def names(config: Config, **options: object) -> list[str]:
    return [each.name for each in select(HOST, config, **options)]  # type: ignore[arg-type]


def rails(config: Config, **options: object) -> list[str]:
    found = select(HOST, config, **options)  # type: ignore[arg-type]
    return [each.name for each in found if not each.is_last_resort]


def test_up_interfaces_with_an_address_in_natural_order() -> None:
    assert names(Config()) == ["eth2", "eth10", "ib0"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("eth", ["eth2", "eth10"]),
        ("eth1,ib", ["eth10", "ib0"]),
        ("=eth2,ib0", ["eth2", "ib0"]),
        ("=eth2,=ib0", ["eth2", "ib0"]),
        ("ib,=eth2", ["eth2", "ib0"]),
        ("^ib", ["eth2", "eth10"]),
        ("^=eth2", ["eth10", "ib0"]),
        ("docker", ["docker0"]),
        ("ib,docker", ["docker0", "ib0"]),
    ],
)
def test_socket_ifname_syntax(asked: str, expected: list[str]) -> None:
    assert names(Config(socket_ifname=asked)) == expected


@pytest.mark.parametrize("asked", ["=", "^", "=eth0,=", "^="])
def test_socket_ifname_without_a_name_is_refused(asked: str) -> None:
    with pytest.raises(InvalidArgument, match="name is missing"):
        select(HOST, Config(socket_ifname=asked))


def test_rails_caps_the_number() -> None:
    assert names(Config(rails=2)) == ["eth2", "eth10"]


def test_more_rails_than_interfaces_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidArgument, match=r"R2CC_RAILS=4.*3 interface.*eth3 \(down"):
        select(HOST, Config(rails=4))


def test_management_interface_is_a_rail_only_when_named() -> None:
    assert rails(Config(), exclude_addresses=["10.0.9.1"]) == ["eth10", "ib0"]
    assert rails(Config(socket_ifname="eth"), exclude_addresses=["10.0.9.1"]) == ["eth2", "eth10"]


def test_else_it_is_the_last_resort_unless_another_is_named() -> None:
    control = {"exclude_addresses": ["10.0.9.1"]}
    assert names(Config(), **control) == ["eth10", "ib0", "eth2"]
    assert names(Config(socket_ifname="=ib0"), **control) == ["ib0", "eth2"]
    assert names(Config(socket_ifname="eth"), **control) == ["eth2", "eth10"], "it is a rail"
    assert names(Config(last_resort="none"), **control) == ["eth10", "ib0"]
    assert names(Config(socket_ifname="^eth2"), **control) == ["eth10", "ib0"], "it is left out"
    assert names(Config(socket_ifname="=ib0", last_resort="eth10"), **control) == ["ib0", "eth10"]
    assert names(Config(last_resort="eth10"), **control) == ["eth10", "ib0"], "it is a rail"
    with pytest.raises(InvalidArgument, match=r"R2CC_LAST_RESORT='eth9'.*eth10"):
        names(Config(last_resort="eth9"), **control)


def test_loopback_is_no_last_resort_and_not_listed_as_one() -> None:
    with pytest.raises(InvalidArgument, match="R2CC_LAST_RESORT='lo'") as caught:
        names(Config(last_resort="lo"))
    assert "lo (" not in str(caught.value)
    assert "eth2 (up, 10.0.9.1)" in str(caught.value)


def test_where_all_ranks_are_on_one_host_there_is_none() -> None:
    assert names(Config(), is_one_host=True, exclude_addresses=["127.0.0.1"]) == ["lo", "lo"]


def test_interfaces_beside_rdma_are_rails_managements_too() -> None:
    rdma = ["eth2", "ib0"]
    assert names(Config(), rdma_names=rdma, exclude_addresses=["10.0.9.1"]) == ["eth10"]
    every = ["eth2", "eth10", "ib0"]
    assert names(Config(), rdma_names=every) == every, "better one NIC for both than no last resort"


def test_loopback_never_leads_to_another_host() -> None:
    interfaces = (LO, nic("eth0", 2, is_up=False))
    rails = select(interfaces, Config(), is_one_host=True)
    assert [each.address for each in rails] == ["127.0.0.1", "127.0.0.2"]
    assert {each.index for each in rails} == {1}
    with pytest.raises(InvalidArgument, match="eth0"):
        select(interfaces, Config())


def test_an_only_nic_carries_control_and_data() -> None:
    only = nic("eth0", 2)
    rails = select((LO, only), Config(), exclude_addresses=only.addresses)
    assert [each.name for each in rails] == ["eth0"]


def test_one_host_uses_as_many_loopback_rails_as_asked() -> None:
    rails = select(HOST, Config(rails=4), is_one_host=True)
    assert [each.address for each in rails] == [f"127.0.0.{i}" for i in (1, 2, 3, 4)]


def test_one_host_still_uses_interfaces_asked_for_by_name() -> None:
    assert names(Config(socket_ifname="ib"), is_one_host=True) == ["ib0"]


def test_loopback_asked_for_by_name() -> None:
    assert [each.name for each in select(HOST, Config(socket_ifname="=lo"))] == ["lo", "lo"]


def test_too_many_loopback_rails_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 254"):
        select(HOST, Config(rails=255), is_one_host=True)


def test_ipv6_serves_where_there_is_no_ipv4() -> None:
    rails = select(
        (nic("eth0", 2, "2001:db8::1"), nic("eth1", 3, "10.0.0.1", "2001:db8::2")), Config()
    )
    assert [each.address for each in rails] == ["2001:db8::1", "10.0.0.1"]


def test_nothing_found_lists_what_there_is() -> None:
    with pytest.raises(InvalidArgument, match=r"'=foo'.*eth4 \(up, no address\)"):
        select(HOST, Config(socket_ifname="=foo"))


def test_this_machine_has_loopback() -> None:
    (loopback,) = (each for each in list_interfaces() if each.is_loopback)
    assert loopback.index == socket.if_nametoindex(loopback.name)
    assert "127.0.0.1" in loopback.addresses
    assert not any(
        address.startswith("fe80") for each in list_interfaces() for address in each.addresses
    )


def test_every_loopback_rail_can_be_bound() -> None:
    for rail in discover(Config(rails=3), is_one_host=True):
        with socket.create_server((rail.address, 0)) as server:
            assert server.getsockname()[0] == rail.address
