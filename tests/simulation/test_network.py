"""The simulated network by itself: effect of each fate and of each kind of cut."""

from collections.abc import Callable
from typing import Any

import pytest

from r2ccl.testing.simulation.network import (
    Act,
    Cut,
    Fate,
    MessageKind,
    SimMessage,
    SimNetwork,
    Timeline,
)
from r2ccl.testing.simulation.transport import SimTransport
from r2ccl.transport.base import Arrived, Cleared, Event, Failed, Frame, Probed, Sent
from r2ccl.types import PathKey, ProbeKey

TO_1, TO_0 = PathKey(1, 0), PathKey(0, 0)


class Two:
    """Two ranks on one rail, with a path between them."""

    def __init__(self, **settings: Any) -> None:
        self.timeline = Timeline(3)
        self.network = SimNetwork(self.timeline, 2, 1, **settings)
        self.wire = self.network.wire(0, 1, 0)
        self.zero, self.one = (SimTransport(self.network, rank) for rank in (0, 1))
        low, high = self.network.connect(self.wire)
        self.zero.open(TO_1, low)
        self.one.open(TO_0, high)
        self.events: list[list[Event]] = [[], []]

    def eager(self, seq: int, data: bytes = b"eager") -> None:
        self.zero.isend(TO_1, Frame(0, seq, 0, 0, 0), memoryview(data), None)
        self.zero.flush()

    def cleared(self, region: bytearray, data: bytes) -> None:
        self.one.irecv(TO_0, Frame(0, 0, 0, 0, 0), memoryview(region))
        self.one.flush()
        self.run(lambda: any(isinstance(e, Cleared) for e in self.events[0]))
        token = next(e.token for e in self.events[0] if isinstance(e, Cleared))
        self.zero.isend(TO_1, Frame(0, 0, 0, 0, 0), memoryview(data), token)
        self.zero.flush()

    def run(self, is_done: Callable[[], bool] = lambda: False) -> None:
        while not is_done() and self.timeline.step():
            for rank, transport in enumerate((self.zero, self.one)):
                self.events[rank] += transport.poll(0.0)

    def arrived(self) -> list[int]:
        return [e.frame.seq for e in self.events[1] if isinstance(e, Arrived)]

    def failures(self) -> list[list[str]]:
        return [[e.status for e in events if isinstance(e, Failed)] for events in self.events]


def fate_of(number: int, fate: Fate) -> Callable[[SimMessage], Fate]:
    return lambda message: fate if message.number == number else Fate(Act.DELIVER)


def test_a_dropped_message_breaks_its_path_late_at_the_sender() -> None:
    two = Two()
    two.network.route = fate_of(1, Fate(Act.DROP))
    for seq in range(4):
        two.eager(seq)
    two.run()
    assert two.arrived() == [0]
    assert two.failures()[0] == ["RETRY_EXC_ERR"]
    assert two.timeline.now >= two.network.retry_s


def test_a_delayed_message_holds_up_what_follows() -> None:
    two = Two()
    two.network.route = fate_of(1, Fate(Act.DELAY, 0.5))
    for seq in range(4):
        two.eager(seq)
    two.run()
    assert two.arrived() == [0, 1, 2, 3]
    assert two.timeline.now >= 0.5


def test_a_message_may_cut_its_own_path() -> None:
    two = Two()
    two.network.route = fate_of(1, Fate(Act.CUT))
    for seq in range(4):
        two.eager(seq)
    two.run()
    assert set(two.arrived()) <= {0}
    assert not two.wire.is_up


@pytest.mark.parametrize(("keep", "expected"), [(0, b"....."), (1, b"ab..."), (2, b"abcde")])
def test_a_cut_tears_a_slice_and_what_it_keeps_lands_late(keep: int, expected: bytes) -> None:
    two = Two()
    region = bytearray(b".....")
    two.cleared(region, b"abcde")
    two.run(lambda: bool(two.wire.ends[0].flight))
    two.network.cut(two.wire, Cut(keep=keep, late_s=0.05))
    assert region == b"....."
    two.run(lambda: two.timeline.now > 0.04)
    two.run()
    assert region == expected
    assert two.arrived() == ([0] if keep == 2 else [])
    assert two.timeline.now >= 0.05
    assert not any(isinstance(event, Sent) for event in two.events[0])


def test_only_those_told_report_at_once() -> None:
    two = Two()
    two.network.cut(two.wire, Cut(told=(1,)))
    two.run()
    assert two.failures() == [[], ["PORT_ERR"]]


def test_a_stalled_path_goes_on_when_restored_in_order_and_whole() -> None:
    two = Two()
    region = bytearray(5)
    two.cleared(region, b"abcde")
    two.network.cut(two.wire, Cut(is_stall=True))
    two.eager(1)
    two.run()
    assert two.arrived() == []
    assert two.zero.is_stuck(TO_1)
    two.network.restore(two.wire)
    two.run()
    assert two.arrived() == [0, 1] or two.arrived() == [1, 0]
    assert region == b"abcde"
    assert two.failures() == [[], []]
    assert not two.zero.is_stuck(TO_1)


def test_a_path_cut_twice_goes_on_after_both_repairs() -> None:
    two = Two()
    for _ in range(2):
        two.network.cut(two.wire, Cut(is_stall=True))
    two.eager(0)
    two.network.restore(two.wire)
    two.run()
    assert two.arrived() == []
    two.network.restore(two.wire)
    two.run()
    assert two.arrived() == [0]


def test_a_break_of_a_stalled_path_loses_its_connection() -> None:
    two = Two()
    two.network.cut(two.wire, Cut(is_stall=True))
    two.eager(0)
    two.network.cut(two.wire, Cut(told=(1,)))
    for _ in range(2):
        two.network.restore(two.wire)
    two.run()
    assert two.arrived() == []
    assert two.failures() == [["RETRY_EXC_ERR"], ["PORT_ERR"]]


def test_a_second_cut_does_not_recall_what_is_in_flight() -> None:
    two = Two()
    two.eager(0)
    two.run(lambda: bool(two.wire.ends[0].flight))
    two.network.cut(two.wire, Cut(keep=1, late_s=0.05))
    two.network.cut(two.wire, Cut())
    two.run()
    assert two.arrived() == [0]


def test_a_broken_path_stays_broken_when_restored() -> None:
    two = Two()
    two.network.cut(two.wire, Cut())
    two.network.restore(two.wire)
    two.eager(0)
    two.run()
    assert two.arrived() == []
    assert two.failures()[0] == ["RETRY_EXC_ERR"]


@pytest.mark.parametrize("is_loud", [True, False])
def test_closing_one_end_is_noticed_at_once_only_if_loud(is_loud: bool) -> None:
    two = Two(is_loud=is_loud)
    two.one.fence(TO_0)
    two.run()
    assert two.failures()[0] == (["EOF"] if is_loud else [])
    two.eager(0)
    two.run()
    assert two.failures()[0] == (["EOF"] if is_loud else ["RETRY_EXC_ERR"])


def test_nothing_leaves_before_flush() -> None:
    two = Two()
    two.zero.isend(TO_1, Frame(0, 0, 0, 0, 0), memoryview(b"x"), None)
    two.run()
    assert two.network.nmessages == 0
    two.zero.flush()
    two.run()
    assert two.arrived() == [0]


def test_small_messages_overtake_queued_writes() -> None:
    two = Two()
    region = bytearray(100_000)
    two.cleared(region, bytes(100_000))
    two.zero.confirm(TO_1, 0, 7)
    two.zero.flush()
    kinds = []
    two.network.route = lambda message: kinds.append(message.kind) or Fate(Act.DELIVER)  # type: ignore[func-returns-value]
    two.zero.isend(TO_1, Frame(0, 1, 0, 0, 0), memoryview(region), memoryview(bytearray(100_000)))
    two.eager(2)
    two.run()
    assert kinds == [MessageKind.CONFIRM, MessageKind.EAGER, MessageKind.WRITE]


class Three:
    """Three ranks on two rails; rank 0 probes."""

    def __init__(self) -> None:
        self.timeline = Timeline(5)
        self.network = SimNetwork(self.timeline, 3, 2)
        self.zero = SimTransport(self.network, 0)

    def ask(self, key: ProbeKey) -> bool | None:
        self.zero.probe(key)
        began = self.timeline.now
        while not (events := self.zero.poll(0.0)):
            assert self.timeline.step()
        (probed,) = events
        assert isinstance(probed, Probed)
        assert probed.key == key
        assert self.timeline.now - began <= self.network.probe_timeout_s * (1 + 1e-9)
        return probed.is_answered


def test_a_cut_wire_is_between_its_two_ports_alone() -> None:
    three = Three()
    three.network.cut(three.network.wire(0, 1, 0), Cut())
    assert three.ask(ProbeKey(1, 0, 0)) is False
    for key in (ProbeKey(1, 0, 1), ProbeKey(1, 1, 0), ProbeKey(1, 1, 1), ProbeKey(2, 0, 0)):
        assert three.ask(key) is True
    three.network.restore(three.network.wire(0, 1, 0))
    assert three.ask(ProbeKey(1, 0, 0)) is True


def test_a_port_off_the_fabric_answers_nobody_and_asks_nobody() -> None:
    three = Three()
    three.network.set_port(1, 0, is_up=False)
    assert [three.ask(ProbeKey(1, 0, via)) for via in (0, 1)] == [False, False]
    assert [three.ask(ProbeKey(1, 1, via)) for via in (0, 1)] == [True, True]
    three.network.set_port(1, 0, is_up=True)
    for is_up in (False, False, True):
        three.network.set_port(0, 0, is_up=is_up)
    assert [three.ask(ProbeKey(1, rail, 0)) for rail in (0, 1)] == [False, False]
    assert three.ask(ProbeKey(1, 0, 1)) is True


def test_a_probe_whose_answer_is_cut_off_is_not_answered() -> None:
    three = Three()
    three.zero.probe(ProbeKey(1, 0, 0))
    three.network.cut(three.network.wire(0, 1, 0), Cut())
    # The answer is that of the probe in progress; a second call starts no other.
    assert three.ask(ProbeKey(1, 0, 0)) is False
    assert three.timeline.now == pytest.approx(three.network.probe_timeout_s)
