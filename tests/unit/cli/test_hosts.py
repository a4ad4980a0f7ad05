"""Host lists and host files: what they mean, and how wrong ones are refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from r2ccl.cli.hosts import JobHost, parse_hosts, place, read_hostfile
from r2ccl.errors import InvalidArgument


def test_hosts_have_slots_users_and_addresses() -> None:
    assert parse_hosts("a:4, deploy-bot@b.example-1:2,[fe80::1%eth0]:3,10.0.0.1") == [
        JobHost("a", 4),
        JobHost("deploy-bot@b.example-1", 2),
        JobHost("fe80::1%eth0", 3),
        JobHost("10.0.0.1", 1),
    ]


def test_a_host_that_is_listed_twice_has_the_slots_of_both() -> None:
    assert parse_hosts("a:2,b,a:3") == [JobHost("a", 5), JobHost("b", 1)]


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "-oProxyCommand=x:1", "-l@a", "a:x", "a b", "::1:4", "a;b", "a:" + "9" * 5000],
)
def test_a_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="allowed is NAME or NAME:SLOTS"):
        parse_hosts(text)


def test_a_host_without_slots_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="host a has 0 slots"):
        parse_hosts("a:0")


def test_a_list_is_written_as_it_is_read() -> None:
    text = "a:4,me@[fe80::1]:2"
    assert ",".join(host.listed(host.slots) for host in parse_hosts(text)) == text


def test_the_users_name_is_no_part_of_the_address() -> None:
    assert parse_hosts("me@b:2")[0].address == "b"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_host_is_known_by_its_names(name: str) -> None:
    assert JobHost(name, 1).is_here
    assert not JobHost(f"{name}.elsewhere", 1).is_here


def test_host_files_of_both_kinds_are_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\na max_slots=8 slots=4\n\nb:2  # the small one\nc\n")
    assert read_hostfile(str(file)) == [JobHost("a", 4), JobHost("b", 2), JobHost("c", 1)]


@pytest.mark.parametrize(
    ("line", "slots"), [("a max_slots=8 slots=4", 4), ("a:2 max-slots=8", 2), ("a max_slots=8", 1)]
)
def test_a_maximum_of_slots_is_not_their_number(tmp_path: Path, line: str, slots: int) -> None:
    file = tmp_path / "hosts"
    file.write_text(line)
    assert read_hostfile(str(file)) == [JobHost("a", slots)]


@pytest.mark.parametrize(
    ("text", "message"), [("a slots=x", "line 1"), ("a\nb cpus=2", "line 2"), ("#\n", "no host")]
)
def test_a_malformed_host_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_hostfile(str(file))


def test_a_missing_host_file_is_named() -> None:
    with pytest.raises(InvalidArgument, match="nowhere"):
        read_hostfile("/nowhere")


@pytest.mark.parametrize(
    ("nranks", "expected"),
    [(None, [("a", 0, 2), ("b", 2, 3)]), (3, [("a", 0, 2), ("b", 2, 1)]), (2, [("a", 0, 2)])],
)
def test_hosts_are_filled_in_their_order(
    nranks: int | None, expected: list[tuple[str, int, int]]
) -> None:
    placed = place([JobHost("a", 2), JobHost("b", 3)], nranks)
    assert [(host.name, first, count) for host, first, count in placed] == expected


@pytest.mark.parametrize("nranks", [0, 6])
def test_ranks_that_do_not_fit_are_refused(nranks: int) -> None:
    with pytest.raises(InvalidArgument, match="5 slots"):
        place([JobHost("a", 2), JobHost("b", 3)], nranks)
