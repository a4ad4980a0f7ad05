"""Contract tests of messages between two ranks, over real processes."""

from __future__ import annotations

import functools

import pytest
from support import local_message_programs
from support import message_programs as programs
from support.jobs import launch
from support.slow import slow_but

from r2ccl import Message

TIMEOUT_S = 90.0


@pytest.mark.parametrize("nranks", slow_but([1, 3], [1, 2, 3, 5]))
def test_messages_of_all_sizes_arrive(nranks: int) -> None:
    assert launch(programs.of_all_sizes, nranks, timeout_s=TIMEOUT_S) == [[]] * nranks


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_a_ring_of_blocking_calls_does_not_block(count: int) -> None:
    run = functools.partial(programs.in_a_ring, count)
    assert launch(run, 3, timeout_s=TIMEOUT_S) == [True] * 3


def test_receives_choose_by_source_and_tag() -> None:
    found, *_ = launch(programs.in_order, 3, timeout_s=TIMEOUT_S)
    assert found == [Message(1, 2, 10), None, None, False, True, False]


def test_a_synchronous_send_waits_for_its_receive() -> None:
    sender, receiver = launch(programs.synchronous, 2, timeout_s=TIMEOUT_S)
    taken = [Message(0, tag, count) for tag, count in enumerate((0, 1, 100_000))]
    assert sender == [(False, got) for each in taken for got in (each, None)]
    assert receiver == [(False, got) for each in taken for got in (None, each)]


def test_a_message_that_does_not_fit_is_refused_and_not_lost() -> None:
    receiver, sender = launch(programs.not_fitting, 2, timeout_s=TIMEOUT_S)
    assert len(receiver) == 4 + 5
    assert len(sender) == 2 + 5
    assert all(line.startswith("InvalidArgument") for line in (*receiver, *sender))
    assert (
        "rank 1 sent 10 elements of float64 with tag 0, but rank 0 receives up to 9" in receiver[0]
    )
    assert "float32" in receiver[1]
    assert "receives up to 99999" in receiver[2]
    assert receiver[2:4] == sender[:2]


def test_the_memory_of_unexpected_messages_is_bounded() -> None:
    run = functools.partial(programs.many_unexpected, 1000, 1000)
    (is_right, kept), _ = launch(run, 2, timeout_s=TIMEOUT_S)
    assert is_right
    assert 0.5 < kept <= 1


@pytest.mark.parametrize("nranks", slow_but([3], [2, 3, 4]))
def test_messages_and_collectives_mix(nranks: int) -> None:
    run = functools.partial(programs.beside_collectives, 40, 0, nranks)
    assert launch(run, nranks, timeout_s=TIMEOUT_S) == [([], 0)] * nranks


@pytest.mark.rails
@pytest.mark.parametrize("nranks", slow_but([3], [2, 3, 4]))
def test_messages_and_collectives_mix_while_rails_fail(nranks: int) -> None:
    run = functools.partial(programs.beside_collectives, 40, 5, nranks)
    found = launch(run, nranks, timeout_s=TIMEOUT_S)
    assert [wrong for wrong, _ in found] == [[]] * nranks
    assert sum(nrepairs for _, nrepairs in found) > 0


def test_pending_tells_what_a_receive_waits_for() -> None:
    found, _ = launch(programs.blocked, 2, timeout_s=TIMEOUT_S)
    assert all("recv() from rank 1 with tag 4" in each for each in found)


def test_messages_wait_for_no_receive_of_an_idle_rank() -> None:
    run = functools.partial(programs.before_any_receive, 100)
    assert launch(run, 2, timeout_s=TIMEOUT_S) == [True, True]


def test_messages_that_nobody_receives_do_not_delay_the_end() -> None:
    assert launch(programs.never_received, 2, timeout_s=TIMEOUT_S) == [2.0, 2.0]


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_message_whose_sender_closes_is_received_unchanged(is_awaited: bool) -> None:
    run = functools.partial(programs.closed_by_the_sender, is_awaited)
    assert launch(run, 2, timeout_s=TIMEOUT_S) == ["", "1 to 1"]


def test_a_close_in_another_thread_tears_no_message_on_links() -> None:
    run = functools.partial(local_message_programs.closing_children_in_threads, 6, 5)
    assert launch(run, 2, timeout_s=TIMEOUT_S) == [[], []]


def test_unfinished_messages_end_with_the_job() -> None:
    ended = ["True", "CommunicatorRevoked"]
    found = launch(programs.unfinished_after_the_close, 2, timeout_s=TIMEOUT_S)
    assert found == [[["CommunicatorRevoked"], ended, ended]] * 2


def test_unfinished_messages_are_refused_in_a_forked_child() -> None:
    child = ["True", "CommunicatorRevoked"] * 2
    found = launch(programs.unfinished_in_a_forked_child, 2, timeout_s=TIMEOUT_S)
    assert found == [[*child, "2 to 2", "True"], [*child, "1 to 1", "True"]]


def test_a_refused_message_goes_to_the_next_receive() -> None:
    _, found = launch(programs.refused_to_the_first, 2, timeout_s=TIMEOUT_S)
    took = [str(Message(0, tag, 3)) for tag in (0, 1)]
    assert found == ["InvalidArgument", *took, "True", "None", "True"]


def test_a_refused_message_keeps_its_place() -> None:
    _, found = launch(programs.order_after_a_refusal, 2, timeout_s=TIMEOUT_S)
    assert found == [-1.0, 1.0, 2.0]


def test_a_limited_wait_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_TIMEOUT_S", "1.5")
    for rank, found in enumerate(launch(programs.waited_for_a_while, 2, timeout_s=TIMEOUT_S)):
        assert found == ["TIMEOUT", str(Message(rank, 4, 3))]


def test_a_request_frees_its_array_at_the_wait() -> None:
    sizes = [25, 25, 1_000_001, 1_000_001, 4]
    assert launch(programs.resized_after_a_wait, 2, timeout_s=TIMEOUT_S) == [sizes] * 2


def test_messages_need_no_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_EAGER_NBYTES", "0")
    found = launch(programs.without_eager_calls, 2, timeout_s=TIMEOUT_S)
    assert found == [[(count, float(count)) for count in (0, 3, 100_000)] * 2] * 2


def test_each_thread_has_its_own_wait() -> None:
    for_2, peers_of_2, for_1, peers_of_1 = launch(programs.two_waits, 2, timeout_s=TIMEOUT_S)[0]
    assert "recv() from rank 1 with tag" in for_2
    assert "recv() from rank 1 with tag 1, " in for_1
    assert (peers_of_2, peers_of_1) == ("[1, 1]", "[1]")


@pytest.mark.parametrize("has_others", [False, True])
def test_closing_in_a_handler_ends_a_receive(has_others: bool) -> None:
    close = functools.partial(programs.closed_in_a_handler, has_others)
    first, second = launch(close, 2, timeout_s=TIMEOUT_S)
    assert first == ["closed", "CommunicatorRevoked"]
    assert second == ["CommunicatorRevoked"]
