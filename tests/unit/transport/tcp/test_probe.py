"""TCP's probes: which answers count, what is evidence and what is none, and by when."""

import errno
import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.limits import no_descriptor_left

from r2ccl.transport.base import Probed
from r2ccl.transport.tcp.probe import TcpProber
from r2ccl.types import Nic, PathKey, ProbeKey

TIMEOUT_S = 0.3
STRAIGHT, CROSS = ProbeKey(1, 0, 0), ProbeKey(1, 0, 1)


class Bench:
    """A prober on a clock that only the test moves, and one far port."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held = ExitStack()
        self.epoll = select.epoll()
        self.sources = {0: Nic("lo", "127.0.0.1"), 1: Nic("lo", "127.0.0.2")}
        self.far = self.held.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.far.setblocking(False)
        self.targets: dict[PathKey, Any] = {PathKey(1, 0): self.far.getsockname()}
        self.prober = TcpProber(
            self.epoll, self.sources, self.targets, TIMEOUT_S, lambda: self.now, rank=0
        )

    def refuse(self) -> None:
        self.far.close()

    def silence(self) -> None:
        """Have the far port drop what comes: its queue is full."""
        full = self.held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        self.held.enter_context(socket.create_connection(full.getsockname(), 5.0))
        self.targets[PathKey(1, 0)] = full.getsockname()

    def look(self, wait_s: float = 0.0) -> list[Probed]:
        for fd, _ in self.epoll.poll(wait_s):
            self.prober.on_ready(fd)
        return self.prober.advance()

    def outcome(self) -> Probed:
        """Let time pass, step by step, until the one probe is over."""
        while not (found := self.look(0.02)):
            assert self.now <= TIMEOUT_S, "too late"
            self.now += TIMEOUT_S / 12
        (probed,) = found
        assert not self.prober.is_busy
        return probed

    def ask(self, key: ProbeKey) -> Probed:
        self.now = 0.0
        self.prober.probe(key)
        return self.outcome()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.prober.close()
    made.epoll.close()
    made.held.close()


def test_a_connection_is_an_answer_and_is_not_kept(bench: Bench) -> None:
    assert bench.ask(STRAIGHT) == Probed(
        STRAIGHT, True, "the host is reachable: it accepted the connect"
    )
    sock, _ = bench.far.accept()
    with sock, pytest.raises(ConnectionResetError):
        sock.recv(1)


def test_a_refusal_is_an_answer(bench: Bench) -> None:
    bench.refuse()
    detail = "the host is reachable: it refused the connect, as expected"
    assert bench.ask(STRAIGHT) == Probed(STRAIGHT, True, detail)


def test_silence_lasts_as_long_as_the_timeout(bench: Bench) -> None:
    bench.silence()
    assert bench.ask(STRAIGHT).is_answered is False
    assert bench.now >= TIMEOUT_S


def test_connects_spread_over_the_timeout_and_one_answer_will_do(bench: Bench) -> None:
    bench.silence()
    bench.prober.probe(STRAIGHT)
    assert bench.prober.limit_s(5.0) == pytest.approx(TIMEOUT_S / 3)
    assert not bench.look()
    bench.targets[PathKey(1, 0)] = bench.far.getsockname()
    assert bench.outcome().is_answered is True
    assert bench.now < TIMEOUT_S / 2


@pytest.mark.parametrize(
    ("key", "source", "expected"),
    [
        (STRAIGHT, Nic("lo", "203.0.113.1"), "EADDRNOTAVAIL"),
        (CROSS, Nic("no-such-nic", "127.0.0.2"), "ENODEV"),
    ],
)
def test_an_error_of_this_end_says_which(
    bench: Bench, key: ProbeKey, source: Nic, expected: str
) -> None:
    bench.ask(CROSS)  # there is a way: this is no fabric without
    bench.sources[key.via] = source
    probed = bench.ask(key)
    assert probed.is_answered is False
    assert expected in probed.detail


def test_a_network_that_cannot_be_reached_is_no_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a NIC without carrier has it."""
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.ENETUNREACH)
    probed = bench.ask(STRAIGHT)
    assert probed.is_answered is False
    assert "ENETUNREACH" in probed.detail


def test_without_a_descriptor_there_is_a_log_line_but_no_verdict(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.silence()
    bench.ask(CROSS)
    caplog.clear()
    with no_descriptor_left():
        for key in (STRAIGHT, CROSS, STRAIGHT):
            probed = bench.ask(key)
            assert probed.is_answered is None
            assert "EMFILE" in probed.detail
    (record,) = caplog.records
    assert "raise `ulimit -n`" in record.getMessage()
    assert "rank 0: rail 0 to rank 1" in record.getMessage()


def test_an_impossible_connect_leaves_the_answer_to_the_next_one(
    bench: Bench,
) -> None:
    with no_descriptor_left():
        bench.prober.probe(STRAIGHT)
    assert bench.outcome().is_answered is True


def test_silence_proves_nothing_if_a_connect_was_not_made(bench: Bench) -> None:
    bench.silence()
    with no_descriptor_left():
        bench.prober.probe(STRAIGHT)
    assert bench.outcome().is_answered is None
    assert bench.ask(STRAIGHT).is_answered is False


@pytest.mark.parametrize("call", ["bind", "connect_ex"])
def test_no_local_port_is_no_verdict(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As bind(2) and connect(2) say it when all of ip_local_port_range is taken."""
    code = {"bind": errno.EADDRINUSE, "connect_ex": errno.EADDRNOTAVAIL}[call]

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket.socket, call, refuse)
    probed = bench.ask(STRAIGHT)
    assert probed.is_answered is None
    assert "ip_local_port_range" in probed.detail


def test_between_rails_silence_is_evidence_only_after_an_answer(
    bench: Bench,
) -> None:
    far = bench.targets[PathKey(1, 0)]
    bench.silence()
    assert bench.ask(CROSS).is_answered is None
    full, bench.targets[PathKey(1, 0)] = bench.targets[PathKey(1, 0)], far
    assert bench.ask(CROSS).is_answered is True
    bench.targets[PathKey(1, 0)] = full
    assert bench.ask(CROSS).is_answered is False


def test_between_rails_the_nic_is_chosen_not_only_the_address(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noting(socket.socket):
        def setsockopt(self, *args: Any) -> None:
            if args[1] == socket.SO_BINDTODEVICE:
                bound.append(args[2])
            super().setsockopt(*args)

    bound: list[bytes] = []
    monkeypatch.setattr(socket, "socket", Noting)
    bench.ask(STRAIGHT)
    assert bound == []
    bench.ask(CROSS)
    assert bound == [b"lo"]


def test_a_rail_that_does_not_exist_is_no_verdict(bench: Bench) -> None:
    key = ProbeKey(1, 7, 0)
    bench.prober.probe(key)
    why = "rail 0 of rank 0 or rail 7 of rank 1 does not exist"
    assert bench.prober.advance() == [Probed(key, None, why)]


def test_one_probe_at_a_time_of_a_key_and_any_number_of_keys(bench: Bench) -> None:
    for key in (STRAIGHT, CROSS, STRAIGHT, CROSS):
        bench.prober.probe(key)
    found: list[Probed] = []
    while bench.prober.is_busy:
        found += bench.look(0.02)
    assert sorted(each.key for each in found) == [STRAIGHT, CROSS]


def test_a_late_look_counts_answers_that_wait_before_the_time(bench: Bench) -> None:
    """This process stood still for an hour: the kernel has had the answer all along."""
    bench.prober.probe(STRAIGHT)
    bench.now = 3600.0
    (probed,) = bench.look(1.0)
    assert probed.is_answered is True


def test_a_late_look_does_not_shorten_what_is_still_to_be_tried(bench: Bench) -> None:
    bench.silence()
    bench.prober.probe(STRAIGHT)
    bench.now = 3600.0
    assert bench.look() == []
    assert bench.prober.limit_s(5.0) == pytest.approx(TIMEOUT_S / 3)


def test_closing_drops_what_is_under_way(bench: Bench) -> None:
    bench.silence()
    bench.prober.probe(STRAIGHT)
    bench.prober.close()
    assert not bench.prober.is_busy
    assert bench.look() == []
