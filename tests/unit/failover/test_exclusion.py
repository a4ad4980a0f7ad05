"""NICs declared failed: which rails of which ranks a name stands for."""

from __future__ import annotations

import numpy as np
import pytest

from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.errors import InvalidArgument
from r2ccl.failover.exclusion import declared, is_declared, ports_of


def info(rank: int, host: str, *failed: str, excluded: tuple[int, ...] = ()) -> PeerInfo:
    """Return a rank with rails eth0, eth1 and the RDMA port mlx5_0:1."""
    return PeerInfo(
        rank,
        f"{host}/boot/net",
        1,
        (),
        (("10.0.0.1", 1), ("10.1.0.1", 1)),
        ("mlx5_0:1",),
        interfaces=("eth0", "eth1"),
        failed_nics=",".join(failed),
        excluded=excluded,
    )


def job(*failed: str) -> list[PeerInfo]:
    """Return two ranks on a.example.org, which declare nothing, and one on b, which does."""
    hosts = ("a.example.org", "a.example.org", "b")
    return [info(rank, host, *failed * (rank == 2)) for rank, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("entry", "ports"),
    [
        ("b:eth1", {(2, 1)}),
        ("a.example.org:eth1", {(0, 1), (1, 1)}),
        ("a:eth1", {(0, 1), (1, 1)}),
        ("a:mlx5_0:1", {(0, 2), (1, 2)}),
        ("a:mlx5_0", {(0, 2), (1, 2)}),
        ("1:eth0", {(2, 0)}),
        ("0:1", {(0, 1), (1, 1)}),
    ],
)
def test_an_entry_stands_for_a_nic_of_all_ranks_of_a_host(
    entry: str, ports: set[tuple[int, int]]
) -> None:
    assert declared(job(entry)) == (ports, ())


@pytest.mark.parametrize(
    "entry", ["c:eth0", "b:eth9", "2:eth0", "²:eth0", "b:7", "b:eth", "b:mlx5"]
)
def test_an_entry_without_a_nic_in_this_job_is_named(entry: str) -> None:
    assert declared(job("b:eth0", entry)) == ({(2, 0)}, (entry,))


def test_the_entries_of_all_ranks_count() -> None:
    peers = [info(0, "a", "a:eth0"), info(1, "b", "b:eth1", "a:eth0"), info(2, "c")]
    assert declared(peers).ports == {(0, 0), (1, 1)}


def test_what_was_excluded_before_a_shrink_counts_for_its_rank() -> None:
    assert declared([info(0, "a"), info(1, "a", excluded=(1,))]).ports == {(1, 1)}


@pytest.mark.parametrize(
    ("failed", "pair"),
    [
        (
            ("b:eth0", "b:eth1", "b:mlx5_0", "a:eth0"),
            r"rank 2 on b \(NICs: eth0, eth1, mlx5_0:1\) has no rail left",
        ),
        (
            ("b:eth0", "a:eth1", "a:mlx5_0"),
            "rank 0 on a.example.org .* and rank 2 on b have no common rail left",
        ),
    ],
)
def test_ranks_without_a_rail_are_an_error(failed: tuple[str, ...], pair: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{pair}.*exclude fewer"):
        declared(job(*failed))


@pytest.mark.parametrize(
    ("nic", "ports"),
    [
        ("eth1", ((0, 1), (1, 1))),
        ("mlx5_0", ((0, 2), (1, 2))),
        ("mlx5_0:1", ((0, 2), (1, 2))),
        (1, ((1, 1),)),
        (np.int64(1), ((1, 1),)),
    ],
)
def test_a_name_means_a_nic_of_the_node_a_number_a_rail(
    nic: str | int, ports: tuple[tuple[int, int], ...]
) -> None:
    found = ports_of(job(), np.int32(1), nic)
    assert found == ports
    assert {type(number) for port in found for number in port} == {int}


@pytest.mark.parametrize("nic", ["eth2", "eth", "", 3, -1, 1.0, None])
def test_a_nic_that_the_rank_lacks_is_refused_with_those_it_has(nic: str | int) -> None:
    known = r"rank 1 on a.example.org has eth0 \(rail 0\), eth1 \(rail 1\), mlx5_0:1 \(rail 2\)"
    with pytest.raises(InvalidArgument, match=f"names no NIC: {known}; pass one of these"):
        ports_of(job(), 1, nic)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(InvalidArgument, match=f"rank={rank}; allowed is 0 to 2"):
        ports_of(job(), rank, "eth0")


def test_a_host_finds_its_own_nics_by_name_or_number() -> None:
    text = "a:eth1, b:0"
    assert is_declared(text, "a.example.org", 1, "eth1")
    assert is_declared(text, "b", 0, "eth0")
    assert not is_declared(text, "a", 0, "eth0")
    assert not is_declared(text, "b", 1, "eth1")
    assert not is_declared("", "a", 0, "eth0")
