"""Regroup: what is heard is kept for shrink(), and no wait outlasts the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from r2ccl.bootstrap.messages import Goodbye
from r2ccl.config import Config
from r2ccl.errors import CommunicatorRevoked, NoQuorum, PeerLost, TransportTimeout
from r2ccl.failover.shrink import driver as room
from r2ccl.failover.shrink.driver import Building, EventQueue, regroup
from r2ccl.failover.shrink.protocol import Built, Done, Shrinking, View

PATIENCE_S = 0.3
LONG_S = 20.0
#: Rails of rank 0 that stay excluded.
EXCLUDED = (1,)


class Handler:
    """The engine's place."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_message(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    on_path = on_peer_lost = on_tick = on_message


class Successor:
    """Connects as told: at once, never, or by losing somebody."""

    def __init__(self, failure: Exception | None = None, blocks: bool = False) -> None:
        self.failure = failure
        self.blocks = blocks
        self.members: tuple[int, ...] = ()
        self.said: list[str] = []
        self.is_connecting = threading.Event()
        self.revoked = threading.Event()

    def connect(self) -> None:
        self.is_connecting.set()
        if self.blocks:
            assert self.revoked.wait(LONG_S)
        if self.failure is not None:
            raise self.failure
        if self.revoked.is_set():
            raise CommunicatorRevoked(self.said[-1])

    def revoke(self, why: str) -> None:
        self.said.append(f"revoke: {why}")
        self.revoked.set()

    def abort(self, why: str) -> None:
        self.said.append(f"abort: {why}")


class Survivor:
    """Rank 0 of three whose rank 2 is lost; the test speaks for rank 1."""

    def __init__(self, *successors: Successor) -> None:
        self.event_queue = EventQueue(0, Handler())
        self.successors = list(successors)
        self.sent: list[object] = []
        #: Messages to the ranks with a session outside the overlay network.
        self.told: list[object] = []
        setting = SimpleNamespace(config=Config(init_timeout_s=PATIENCE_S))
        self.control: Any = SimpleNamespace(
            rank=0, nranks=3, setting=setting, broadcast=self.sent.append,
            tell_contacts=self.told.append,
        )  # fmt: skip
        self.event_queue.on_peer_lost(2, "dead", 0.0)

    def hear(self, message: object) -> None:
        self.event_queue.on_message(1, message)

    def make(self, plane: object, members: tuple[int, ...]) -> Successor:
        made = self.successors.pop(0)
        made.members = members
        return made

    def regroup(self, quorum: str = "majority") -> Successor:
        table = Shrinking(0, 3, quorum)
        return regroup(table, self.event_queue, self.control, self.make, EXCLUDED)


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each set of listeners is still open."""
    states: list[bool] = []

    class Listeners:
        def __init__(self, control: object, excluded: Sequence[int]) -> None:
            assert excluded == EXCLUDED
            self.peer_info = b"here"
            self.number = len(states)
            states.append(True)

        def make(self, infos: object, attempt: int) -> object:
            return object()

        def close(self) -> None:
            states[self.number] = False

    monkeypatch.setattr(room, "Succession", Listeners)
    return states


def test_what_concerns_shrinking_is_kept_and_the_rest_passed_on() -> None:
    handler = Handler()
    event_queue = EventQueue(0, handler)
    event_queue.on_message(1, View((), b""))
    event_queue.on_message(1, "data")
    event_queue.on_message(1, Goodbye())
    event_queue.on_peer_lost(2, "silent", 1.0)
    event_queue.on_tick(5.0)
    assert [event_queue.take(0.0) for _ in range(4)] == [
        (1, View((), b"")), (1, "it left"), (2, "silent"), None,
    ]  # fmt: skip
    assert handler.calls == [(1, "data"), (1, Goodbye()), (2, "silent", 1.0), (5.0,)]


def test_a_cancelled_shrink_says_at_which_rank_and_why() -> None:
    event_queue = EventQueue(3, Handler())
    event_queue.end("close() was called")
    with pytest.raises(CommunicatorRevoked) as caught:
        event_queue.take(0.0)
    assert str(caught.value) == "rank 3: shrink() was cancelled: close() was called"


def test_survivors_go_on_with_what_was_heard_before_the_call(opened: list[bool]) -> None:
    successor = Successor()
    here = Survivor(successor)
    for message in (View((2,), b"there"), Built((2,))):
        here.hear(message)
    assert here.regroup() is successor
    assert successor.members == (0, 1)
    assert here.sent == [View((2,), b"here"), Built((2,)), Done((2,))]
    assert here.told == [Done((2,))]
    assert successor.said == []
    assert not any(opened)


@pytest.mark.parametrize(
    ("heard", "missing"),
    [
        ([], r"ranks \[1\] have not called shrink\(\)"),
        ([View((), b"")], r"ranks \[1\] have not agreed that ranks \[2\] are gone"),
        ([View((2,), b"")], r"ranks \[1\] have not connected"),
    ],
)
def test_who_is_waited_for_too_long_is_named(
    heard: list[object], missing: str, opened: list[bool]
) -> None:
    successor = Successor()
    here = Survivor(successor)
    for message in heard:
        here.hear(message)
    begin = time.monotonic()
    with pytest.raises(TransportTimeout, match=missing):
        here.regroup()
    assert PATIENCE_S <= time.monotonic() - begin < LONG_S / 2
    assert not any(opened)
    assert successor.said == ["abort: shrink() did not use this communicator"] * bool(
        successor.members
    )


def test_connecting_that_does_not_end_is_ended_by_the_deadline() -> None:
    successor = Successor(blocks=True)
    here = Survivor(successor)
    here.hear(View((2,), b""))

    def tick() -> None:
        assert successor.is_connecting.wait(LONG_S)
        here.event_queue.on_tick(time.monotonic() + PATIENCE_S)

    ticking = threading.Thread(target=tick)
    ticking.start()
    with pytest.raises(TransportTimeout, match="timed out"):
        here.regroup()
    ticking.join(LONG_S)
    assert successor.said == ["revoke: shrink() timed out"]


def test_a_cancel_before_connecting_begins_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    successor = Successor(blocks=True)
    here = Survivor(successor)
    here.hear(View((2,), b""))

    def make(plane: object, members: tuple[int, ...]) -> Successor:
        here.event_queue.end("close() was called")
        return successor

    monkeypatch.setattr(here, "make", make)
    with pytest.raises(CommunicatorRevoked, match="cancelled: close"):
        here.regroup()
    assert successor.said == ["revoke: close() was called"]


def test_a_member_that_starts_over_ends_connecting_for_all() -> None:
    first, second = Successor(blocks=True), Successor()
    here = Survivor(first, second)
    here.hear(View((2,), b""))

    def die() -> None:
        assert first.is_connecting.wait(LONG_S)
        here.event_queue.on_peer_lost(1, "dead too", 0.0)

    dying = threading.Thread(target=die)
    dying.start()
    assert here.regroup(quorum="any") is second
    dying.join(LONG_S)
    assert second.members == (0,)
    assert first.said == [
        "revoke: shrink() starts over: rank 1 is gone, or no longer takes part in this attempt"
    ]


LOST = PeerLost(rank=0, peer=1, last_heard_s=0.0, why="silent")


@pytest.mark.parametrize("failure", [LOST, CommunicatorRevoked("rank 1 gave up")])
def test_what_only_the_new_communicator_lost_is_met_again(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_RETRY_S", PATIENCE_S / 10)
    first, second = Successor(failure=failure), Successor()
    here = Survivor(first, second)
    here.hear(View((2,), b"there"))

    def follow(message: object) -> None:
        here.sent.append(message)
        if message == View((2,), b"here", attempt=1):
            here.hear(message)
            here.hear(Built((2,), attempt=1))

    here.control.broadcast = follow
    assert here.regroup() is second
    assert here.sent == [
        View((2,), b"here"), View((2,), b"here", 1), Built((2,), 1), Done((2,), 1),
    ]  # fmt: skip


def test_a_loss_the_old_control_plane_confirms_needs_one_attempt() -> None:
    first, second = Successor(failure=LOST), Successor()
    here = Survivor(first, second)
    here.hear(View((2,), b""))

    def confirm() -> None:
        assert first.is_connecting.wait(LONG_S)
        here.event_queue.on_peer_lost(1, "dead too", 0.0)

    confirming = threading.Thread(target=confirm)
    confirming.start()
    assert here.regroup(quorum="any") is second
    confirming.join(LONG_S)
    assert here.sent[-1] == Done((1, 2), attempt=0)


def test_one_that_does_not_come_to_the_next_attempt_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_RETRY_S", PATIENCE_S / 10)
    here = Survivor(Successor(failure=LOST))
    here.hear(View((2,), b""))
    missing = r"ranks \[1\] have not agreed that ranks \[2\] are gone in attempt 2"
    with pytest.raises(TransportTimeout, match=missing) as caught:
        here.regroup()
    assert caught.value.__cause__ is LOST


def test_a_rank_that_alone_could_not_connect_names_itself() -> None:
    here = Survivor(Successor(failure=LOST))
    for message in (View((2,), b""), Built((2,))):
        here.hear(message)
    missing = r"rank 0 has not connected .*lost rank 1.*look at the log of rank 0"
    with pytest.raises(TransportTimeout, match=missing):
        here.regroup()


def test_survivors_that_miss_no_rank_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_RETRY_S", PATIENCE_S / 10)
    here = Survivor(Successor(failure=LOST))
    here.event_queue.take(0.0)  # the loss of rank 2
    for peer in (1, 2):
        here.event_queue.on_message(peer, View((), b""))
    missing = r"ranks \[1, 2\] have not agreed that no rank is gone in attempt 2"
    with pytest.raises(TransportTimeout, match=missing):
        here.regroup()


def test_too_few_are_told_at_once() -> None:
    here = Survivor()
    here.event_queue.on_peer_lost(1, "dead too", 0.0)
    begin = time.monotonic()
    with pytest.raises(NoQuorum) as caught:
        here.regroup()
    assert time.monotonic() - begin < PATIENCE_S
    assert caught.value.gone == {1: "dead too", 2: "dead"}
    assert caught.value.alive == (0,)


def test_only_members_and_only_bad_news_end_connecting() -> None:
    building = Building((0, 1), 0.0, lambda why: None)
    assert building.is_upset_by((1, "dead"))
    assert building.is_upset_by((1, View((2,), b"")))
    assert not building.is_upset_by((1, Built((2,))))
    assert not building.is_upset_by((2, "dead"))
