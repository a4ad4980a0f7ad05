"""Netlink frames: what is packed is what is parsed, and torn input ends quietly."""

import errno
import itertools
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import slow

from r2ccl.topology import LinkEvent, LinkMonitor, netlink
from r2ccl.types import Nic


@slow.given(25, 100, st.lists(st.tuples(st.integers(0, 0x3FFF), st.binary(max_size=40))))
def test_attributes_survive_a_round_trip(pairs: list[tuple[int, bytes]]) -> None:
    packed = b"".join(netlink.attribute(kind, payload) for kind, payload in pairs)
    assert [(kind, bytes(each)) for kind, each in netlink.attributes(memoryview(packed))] == pairs


@given(st.binary(max_size=200))
def test_any_bytes_parse_without_error_and_within_bounds(data: bytes) -> None:
    found = list(netlink.messages(data))
    assert sum(len(each.body) + netlink.HEADER.size for each in found) <= len(data)
    for each in found:
        assert sum(len(payload) + 4 for _, payload in netlink.attributes(each.body)) <= len(
            each.body
        )


@pytest.fixture
def route() -> Iterator[netlink.RouteSocket]:
    sock = netlink.RouteSocket()
    yield sock
    sock.close()


def test_dump_lists_loopback(route: netlink.RouteSocket) -> None:
    body = netlink.IFINFO.pack(0, 0, 0, 0, 0)
    found = route.dump(netlink.RTM_GETLINK, body)
    indexes = {netlink.IFINFO.unpack_from(each.body)[2] for each in found}
    assert indexes == {index for index, _ in socket.if_nameindex()}


def test_a_refusal_carries_the_kernels_errno_and_spoils_nothing(
    route: netlink.RouteSocket,
) -> None:
    with pytest.raises(OSError, match=r"No such device|Operation not permitted"):
        route.transact(netlink.RTM_NEWLINK, netlink.IFINFO.pack(0, 0, 1 << 30, 0, 1))
    assert route.dump(netlink.RTM_GETLINK, netlink.IFINFO.pack(0, 0, 0, 0, 0))


class ScriptedKernel:
    """Answers each request with the next of `answers`: (kind, flags, sequence offset, body)."""

    def __init__(self, *answers: list[tuple[int, int, int, bytes]]) -> None:
        self._answers = list(answers)
        self._waiting = b""

    def send(self, data: bytes) -> None:
        sequence = netlink.HEADER.unpack_from(data)[3]
        self._waiting = b"".join(
            netlink.HEADER.pack(netlink.HEADER.size + len(body), kind, flags, sequence + late, 0)
            + body
            for kind, flags, late, body in self._answers.pop(0)
        )

    def settimeout(self, timeout_s: float) -> None:
        pass

    def recv(self, nbytes: int) -> bytes:
        data, self._waiting = self._waiting, b""
        if not data:
            raise TimeoutError
        return data


def scripted(
    monkeypatch: pytest.MonkeyPatch, *answers: list[tuple[int, int, int, bytes]]
) -> netlink.RouteSocket:
    route = netlink.RouteSocket()
    route.close()
    monkeypatch.setattr(route, "_socket", ScriptedKernel(*answers))
    return route


DONE = (netlink.NLMSG_DONE, 0, 0, b"\0\0\0\0")


def test_a_dump_torn_by_a_change_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    torn = (netlink.RTM_NEWLINK, netlink.NLM_F_DUMP_INTR, 0, b"torn")
    good = (netlink.RTM_NEWLINK, 0, 0, b"good")
    route = scripted(monkeypatch, [torn, DONE], [good, DONE])
    assert [bytes(each.body) for each in route.dump(netlink.RTM_GETLINK, b"")] == [b"good"]
    with pytest.raises(OSError, match="changed during all"):
        scripted(monkeypatch, *[[torn, DONE]] * 10).dump(netlink.RTM_GETLINK, b"")


def test_an_answer_to_an_earlier_request_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    late = (netlink.NLMSG_ERROR, 0, -1, b"\0\0\0\0")
    refusal = (netlink.NLMSG_ERROR, 0, 0, struct.pack("=i", -19))
    with pytest.raises(OSError, match="No such device"):
        scripted(monkeypatch, [late, refusal]).transact(netlink.RTM_SETLINK, b"")
    with pytest.raises(TimeoutError):
        scripted(monkeypatch, [late]).transact(netlink.RTM_SETLINK, b"")


def test_datagrams_do_not_extend_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    monkeypatch.setattr(netlink, "monotonic", lambda: float(next(now)))
    part = [(netlink.RTM_NEWLINK, 0, 0, b"part")]
    route = scripted(monkeypatch, part)
    kernel = route._socket
    monkeypatch.setattr(kernel, "recv", lambda nbytes: kernel._waiting)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match="within 5 s"):
        route.dump(netlink.RTM_GETLINK, b"")


def test_monitor_is_quiet_on_a_quiet_machine_and_closes_twice() -> None:
    with LinkMonitor() as monitor:
        assert monitor.fileno() >= 0
        assert monitor.is_up(socket.if_nametoindex("lo"))
        assert not monitor.is_up(1 << 30)
        monitor.read()
    monitor.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        monitor.read()


def test_monitor_that_cannot_be_made_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(netlink, "RouteSocket", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Too many open files") as caught:
        LinkMonitor()
    assert os.listdir("/proc/self/fd") == before
    assert caught.tb is not None  # its frames keep the monitor alive


def test_an_event_concerns_the_nic_or_just_its_address() -> None:
    nic = Nic("eth0", "10.0.0.1", 3)
    assert LinkEvent(3, "eth0", False, 0.0).concerns(nic)
    assert LinkEvent(3, "eth0", False, 0.0, "10.0.0.1").concerns(nic)
    assert not LinkEvent(3, "eth0", False, 0.0, "10.0.0.2").concerns(nic)
    assert not LinkEvent(4, "eth1", False, 0.0).concerns(nic)
