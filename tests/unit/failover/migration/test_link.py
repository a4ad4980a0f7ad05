"""The link tables: each call by itself, then both halves over several paths, at random."""

from collections import deque
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.slow import slow_but

from r2ccl.errors import InternalError
from r2ccl.failover.migration.link import LinkReport, RecvLink, SendLink, SliceState
from r2ccl.types import PathKey

A, B = PathKey(1, 0), PathKey(1, 1)
DATA = memoryview(b"data")


def sender(slots: int = 4, *, is_confirmed: bool = True) -> SendLink:
    link = SendLink(1, 0, slots, is_confirmed=is_confirmed)
    link.route = A
    return link


def post(link: SendLink, *, is_eager: bool = True) -> Any:
    return link.post(DATA, is_eager, 1, 0, None, 0)


def seqs(items: list[Any]) -> list[int]:
    return [item.seq for item in items]


# Sending


def test_credits_bound_eager_slices() -> None:
    link = sender(slots=2)
    for _ in range(2):
        assert link.can_post(True)
        post(link)
    assert not link.can_post(True)
    link.confirm(1)
    assert link.can_post(True)


def test_a_cleared_slice_takes_its_landings_path_and_token() -> None:
    link = sender()
    assert not link.can_post(False)
    assert link.cleared(B, 0, 4, "token") is None
    assert link.can_post(False)
    item, token = post(link, is_eager=False)
    assert (item.path, token, item.state) == (B, "token", SliceState.WRITING)
    assert not link.can_post(False)


def test_memory_is_released_when_confirmed_and_retired() -> None:
    link = sender()
    link.cleared(A, 0, 4, None)
    link.cleared(A, 1, 4, None)
    post(link, is_eager=False)
    post(link, is_eager=False)
    assert link.confirm(1) == []
    assert seqs(link.retired(A, 0)) == [0]
    assert link.retired(A, 1) == []
    assert seqs(link.confirm(2)) == [1]


def test_the_fail_stop_baseline_releases_when_retired() -> None:
    link = sender(is_confirmed=False)
    link.cleared(A, 0, 4, None)
    post(link, is_eager=False)
    assert seqs(link.retired(A, 0)) == [0]


def test_slices_are_released_in_order() -> None:
    link = sender()
    for _ in range(3):
        post(link)
    link.confirm(3)
    assert link.retired(A, 2) == []
    assert link.retired(A, 1) == []
    assert seqs(link.retired(A, 0)) == [0, 1, 2]


def test_an_old_confirmation_and_one_from_the_future() -> None:
    link = sender()
    post(link)
    link.confirm(1)
    assert link.confirm(0) == []
    assert link.confirm(1) == []
    with pytest.raises(InternalError, match=r"confirmed 2 slices .* only 1 were posted to it"):
        link.confirm(2)


def test_retired_on_another_path_means_nothing() -> None:
    link = sender()
    item, _ = post(link)
    link.retired(B, 0)
    assert item.state is SliceState.WRITING
    link.retired(A, 7)
    link.retired(A, 0)
    assert item.state is SliceState.RETIRED


def test_a_fence_retires_and_voids_only_its_paths_landing_places() -> None:
    link = sender()
    on_a, _ = post(link)
    link.route = B
    on_b, _ = post(link)
    link.cleared(A, 2, 4, None)
    link.cleared(B, 3, 4, None)
    link.fenced(A)
    assert (on_a.state, on_b.state) == (SliceState.RETIRED, SliceState.WRITING)
    assert list(link.clears) == [3]


def test_exactly_what_is_not_in_the_report_is_replayed() -> None:
    link = sender(slots=8)
    for rail in (A, A, B, A, A, A):
        link.route = rail
        post(link)
    link.fenced(A)
    link.route = None
    # Slice 2 rides B and slice 4 came early: lost are 3 and 5.
    link.resume(A, 0, LinkReport(0, 1, 2, (4,)))
    link.route = B
    assert seqs(link.waiting()) == [3, 5]
    assert link.waiting() == []
    assert all(item.path == B for item in link.outstanding if item.seq in (2, 3, 5))
    assert {item.seq: item.state for item in link.outstanding}[4] is SliceState.HELD


def test_a_report_confirms_and_gives_credits() -> None:
    link = sender(slots=2)
    post(link)
    post(link)
    link.fenced(A)
    assert seqs(link.resume(A, 0, LinkReport(0, 2, 2))) == [0, 1]
    assert link.can_post(True)


def test_a_report_older_than_a_confirmation_that_overtook_it() -> None:
    link = sender()
    post(link)
    link.route = B
    post(link)
    link.fenced(A)
    link.retired(B, 1)
    assert seqs(link.confirm(2)) == [0, 1]
    assert link.resume(A, 0, LinkReport(0, 0, 1)) == []
    assert link.waiting() == []


def test_a_report_of_slices_never_posted() -> None:
    link = sender()
    post(link)
    link.fenced(A)
    with pytest.raises(InternalError, match="only 1 slices were posted to it"):
        link.resume(A, 0, LinkReport(0, 0, 2))


def test_a_lost_cleared_slice_goes_to_its_new_landing_place() -> None:
    link = sender()
    link.cleared(A, 0, 4, None)
    item, _ = post(link, is_eager=False)
    link.fenced(A)
    assert link.cleared(B, 0, 4, "new") == (item, A)
    assert (item.path, item.state) == (B, SliceState.WRITING)
    link.resume(A, 0, LinkReport(0, 0, 0))
    assert (item.path, item.state) == (B, SliceState.WRITING)
    link.confirm(1)
    assert seqs(link.retired(B, 0)) == [0]


def test_a_landing_place_for_a_slice_that_needs_none() -> None:
    link = sender()
    post(link)
    with pytest.raises(InternalError, match="which needs none"):
        link.cleared(A, 0, 4, None)


def test_slices_posted_without_a_route_wait_for_one() -> None:
    link = sender()
    link.route = None
    item, _ = post(link)
    assert (item.path, item.state) == (None, SliceState.WAITING)
    link.route = B
    assert link.waiting() == [item]
    assert (item.path, item.state) == (B, SliceState.WRITING)


# Receiving


def receiver() -> RecvLink:
    link = RecvLink(1, 0)
    link.route = A
    return link


def want(link: RecvLink, *, is_eager: bool = True) -> Any:
    return link.post(None if is_eager else memoryview(bytearray(4)), 1, 0, None, 0)


def test_delivery_is_in_order_and_awaits_slice_and_landing() -> None:
    link = receiver()
    assert link.arrived(1, b"1")
    assert (link.received, link.take()) == (0, None)
    assert link.arrived(0, b"0")
    assert (link.received, link.take()) == (2, None)
    first = want(link)
    assert link.take() == (first, 0, b"0")
    assert link.take() is None


@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_slice_that_was_here_is_dropped_and_counted(is_delivered: bool) -> None:
    link = receiver()
    link.arrived(0, b"0")
    if is_delivered:
        want(link)
        link.take()
    assert not link.arrived(0, b"other")
    assert link.duplicates == 1
    if not is_delivered:
        want(link)
        assert link.take()[2] == b"0"  # type: ignore[index]


def test_the_report_has_what_came_early() -> None:
    link = receiver()
    for seq in (0, 2, 5):
        link.arrived(seq, b"")
    want(link)
    link.take()
    link.consume()
    assert link.report() == LinkReport(0, 1, 1, (2, 5))


def test_landings_of_a_fenced_path_are_named_again_unless_filled() -> None:
    link = receiver()
    landings = [want(link, is_eager=False) for _ in range(3)]
    link.route = B
    landings.append(want(link, is_eager=False))
    link.arrived(1, None)  # waits for slice 0
    link.resume(A)
    assert [landing.path for landing in landings] == [None, A, None, B]
    assert link.unnamed() == [landings[0], landings[2]]
    assert [landing.path for landing in landings] == [B, A, B, B]


def want_last(link: RecvLink) -> Any:
    return link.post(memoryview(bytearray(4)), 1, 0, None, 0, is_last=True)


def test_only_the_last_slice_of_a_call_may_be_confirmed_early() -> None:
    link = receiver()
    assert link.early_ack(want(link, is_eager=False)) == 0
    assert link.early_ack(want_last(link)) == 2


@pytest.mark.parametrize("is_eager", [True, False])
def test_no_early_confirmation_while_another_path_owes_a_slice(is_eager: bool) -> None:
    link = receiver()
    want(link, is_eager=is_eager)
    link.route = B
    last = want_last(link)
    assert link.early_ack(last) == 0
    link.arrived(0, b"")
    link.take()
    assert link.early_ack(last) == 2


def test_a_replay_overtaking_the_queue_is_not_confirmed_early() -> None:
    """Slice 0 rides B; slice 1, lost on A, is named on B too and would get there first."""
    link = receiver()
    link.route = B
    want(link, is_eager=False)
    link.route = A
    last = want_last(link)
    link.resume(A)
    link.route = B
    assert link.unnamed() == [last]
    assert link.early_ack(last) == 0


def test_consuming_more_than_was_delivered() -> None:
    with pytest.raises(InternalError, match=r"channel \d: more slices were consumed"):
        receiver().consume()


# Both halves at random


class Wire:
    """One connection of one path: frames under way each way, and which ends are fenced."""

    def __init__(self) -> None:
        self.to_receiver: deque[Any] = deque()
        self.to_sender: deque[Any] = deque()
        self.is_sender_fenced = False
        self.is_receiver_fenced = False
        #: The receiver's report, once its end is fenced, and who has acted on the exchange.
        self.report: LinkReport | None = None
        self.has_sender_resumed = False
        self.has_receiver_resumed = False


class Links(RuleBasedStateMachine):
    """A link whose two halves choose their routes on their own, over paths that come and go.

    The machine plays transport and owner as `r2ccl.runtime.progress` and
    `r2ccl.failover.migration.driver` do, with every step that can happen at its own time a rule of
    its own.
    """

    NPATHS = 3

    @initialize(slots=st.integers(1, 4), kinds=st.lists(st.booleans(), min_size=1, max_size=5))
    def begin(self, slots: int, kinds: list[bool]) -> None:
        self.kinds = kinds
        self.send_link = SendLink(1, 0, slots)
        self.recv_link = RecvLink(0, 0)
        self.keys = [PathKey(1, rail) for rail in range(self.NPATHS)]
        self.wires: dict[PathKey, Wire | None] = dict.fromkeys(self.keys)
        for key in self.keys:
            self.wires[key] = Wire()
        self.send_link.route = self.recv_link.route = self.keys[0]
        self.ndelivered = 0
        self.nreleased = 0
        self.written: dict[int, int] = {}

    def is_eager(self, seq: int) -> bool:
        return self.kinds[seq % len(self.kinds)]

    def usable(self, *, is_sender: bool) -> list[PathKey]:
        return [
            key
            for key, wire in self.wires.items()
            if wire and not (wire.is_sender_fenced if is_sender else wire.is_receiver_fenced)
        ]

    # Sender's own steps

    def write(self, item: Any, token: Any) -> None:
        wire = self.wires[item.path]
        if wire and not wire.is_sender_fenced:
            wire.to_receiver.append((item.seq, item.is_eager, token))

    @precondition(lambda self: self.send_link.can_post(self.is_eager(self.send_link.posted)))
    @rule()
    def post(self) -> None:
        link = self.send_link
        item, token = link.post(DATA, self.is_eager(link.posted), 1, 0, None, 0)
        if item.path is not None:
            self.write(item, token)

    @rule(number=st.integers(0, 2))
    def reroute_sender(self, number: int) -> None:
        up = self.usable(is_sender=True)
        self.send_link.route = up[number % len(up)] if up else None
        if self.send_link.route is not None:
            for item in self.send_link.waiting():
                self.write(item, None)

    # Receiver's own steps

    def name(self, landing: Any) -> None:
        wire = self.wires[landing.path]
        if wire and not wire.is_receiver_fenced:
            wire.to_sender.append(("clear", landing.seq))

    @precondition(lambda self: len(self.recv_link.landings) < 4)
    @rule()
    def want(self) -> None:
        link = self.recv_link
        landing = want(link, is_eager=self.is_eager(link.posted))
        if landing.path is not None:
            self.name(landing)
        self.deliver()

    @precondition(lambda self: self.recv_link.consumed < self.recv_link.delivered)
    @rule()
    def consume(self) -> None:
        self.recv_link.consume()

    @rule()
    def confirm(self) -> None:
        link = self.recv_link
        wire = self.wires[link.route] if link.route else None
        if wire and not wire.is_receiver_fenced:
            wire.to_sender.append(("confirm", link.consumed))

    @rule(number=st.integers(0, 2))
    def reroute_receiver(self, number: int) -> None:
        up = self.usable(is_sender=False)
        self.recv_link.route = up[number % len(up)] if up else None
        if self.recv_link.route is not None:
            for landing in self.recv_link.unnamed():
                self.name(landing)

    def deliver(self) -> None:
        while (taken := self.recv_link.take()) is not None:
            landing, _, payload = taken
            assert landing.seq == self.ndelivered
            assert (payload is not None) == self.is_eager(landing.seq)
            self.ndelivered += 1

    # The network

    @rule(number=st.integers(0, 2))
    def move_to_receiver(self, number: int) -> None:
        wire = self.wires[self.keys[number]]
        if wire and wire.to_receiver:
            seq, is_eager, _ = wire.to_receiver.popleft()
            if not wire.is_receiver_fenced:
                assert self.recv_link.arrived(seq, b"" if is_eager else None), "doubled"
                self.deliver()
                wire.to_sender.append(("sent", seq))

    @rule(number=st.integers(0, 2))
    def move_to_sender(self, number: int) -> None:
        key = self.keys[number]
        wire = self.wires[key]
        if wire and wire.to_sender:
            what, value = wire.to_sender.popleft()
            if wire.is_sender_fenced:
                return
            if what == "confirm":
                self.released(self.send_link.confirm(value))
            elif what == "sent":
                self.released(self.send_link.retired(key, value))
            else:
                again = self.send_link.cleared(key, value, 4, "token")
                if again is not None:
                    self.write(again[0], "token")

    # Failures, each step in its own time

    @rule(number=st.integers(0, 2))
    def fence_sender(self, number: int) -> None:
        key = self.keys[number]
        wire = self.wires[key]
        if wire and not wire.is_sender_fenced:
            wire.is_sender_fenced = True
            if self.send_link.route == key:
                self.send_link.route = None
            self.released(self.send_link.fenced(key))

    @rule(number=st.integers(0, 2))
    def fence_receiver(self, number: int) -> None:
        key = self.keys[number]
        wire = self.wires[key]
        if wire and not wire.is_receiver_fenced:
            wire.is_receiver_fenced = True
            if self.recv_link.route == key:
                self.recv_link.route = None
            wire.report = self.recv_link.report()

    @rule(number=st.integers(0, 2))
    def resume_sender(self, number: int) -> None:
        wire = self.wires[self.keys[number]]
        if wire and wire.is_sender_fenced and wire.report and not wire.has_sender_resumed:
            wire.has_sender_resumed = True
            self.released(self.send_link.resume(self.keys[number], 0, wire.report))

    @rule(number=st.integers(0, 2))
    def resume_receiver(self, number: int) -> None:
        wire = self.wires[self.keys[number]]
        is_due = wire and wire.is_sender_fenced and wire.report
        if wire and is_due and not wire.has_receiver_resumed:
            wire.has_receiver_resumed = True
            self.recv_link.resume(self.keys[number])

    @rule(number=st.integers(0, 2))
    def reopen(self, number: int) -> None:
        wire = self.wires[self.keys[number]]
        if wire and wire.has_sender_resumed and wire.has_receiver_resumed:
            self.wires[self.keys[number]] = Wire()

    # What must hold

    def released(self, items: list[Any]) -> None:
        for item in items:
            assert item.seq == self.nreleased
            assert item.seq < self.send_link.confirmed
            assert item.state >= SliceState.RETIRED
            self.nreleased += 1

    @invariant()
    def counts_are_ordered(self) -> None:
        if not hasattr(self, "send_link"):
            return
        send, recv = self.send_link, self.recv_link
        assert self.nreleased <= send.confirmed <= recv.consumed <= recv.delivered
        assert recv.delivered <= recv.received <= send.posted
        assert recv.duplicates == 0

    def teardown(self) -> None:
        """With one path healthy and both ends going on, everything arrives and is released."""
        if not hasattr(self, "send_link"):
            return
        target = self.send_link.posted + 3
        for _ in range(60):
            for number, key in enumerate(self.keys):
                wire = self.wires[key]
                if wire and (wire.is_sender_fenced or wire.is_receiver_fenced):
                    self.fence_sender(number)
                    self.fence_receiver(number)
                    self.resume_sender(number)
                    self.resume_receiver(number)
                    self.reopen(number)
                self.move_to_receiver(number)
                self.move_to_sender(number)
            for _ in range(8):
                while len(self.recv_link.landings) < 4 and self.recv_link.posted < target:
                    self.want()
                while self.recv_link.consumed < self.recv_link.delivered:
                    self.consume()
                if self.send_link.posted < target and self.send_link.can_post(
                    self.is_eager(self.send_link.posted)
                ):
                    self.post()
            if self.send_link.route is None:
                self.reroute_sender(0)
            if self.recv_link.route is None:
                self.reroute_receiver(0)
            self.reroute_sender(self.keys.index(self.send_link.route))  # type: ignore[arg-type]
            self.reroute_receiver(self.keys.index(self.recv_link.route))  # type: ignore[arg-type]
            self.confirm()
            for _ in range(12):
                for number in range(self.NPATHS):
                    self.move_to_receiver(number)
                    self.move_to_sender(number)
        assert self.ndelivered == target
        assert self.nreleased == target


@pytest.mark.parametrize("nexamples", slow_but([40], [40, 150]))
def test_a_link_over_paths_that_come_and_go(nexamples: int) -> None:
    limits = hypothesis.settings(max_examples=nexamples, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(Links, settings=limits)
