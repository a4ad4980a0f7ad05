"""Contract tests of messages in shared memory, over real processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import local_message_programs as programs
from support import message_programs, punctual
from support.jobs import launch, survivors
from support.reading_programs import needs_reading
from support.slow import slow_but

pytestmark = pytest.mark.timeout(200)
TIMEOUT_S = 90.0


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_SHM", "1")


def run(program: Callable[..., Any], nranks: int, *given: Any, **limits: Any) -> Any:
    call = functools.partial(program, *given)
    return launch(call, nranks, **{"timeout_s": TIMEOUT_S, **limits})


@pytest.mark.parametrize(("setting", "is_shared"), [("1", True), ("auto", True), ("0", False)])
def test_the_setting_decides_how_messages_go(
    setting: str, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_SHM", setting)
    assert run(programs.way, 4) == [[is_shared] * 3] * 4


@pytest.mark.parametrize(
    ("nranks", "nmessages"), slow_but([(3, 500)], [(3, 500), (2, 10_000), (4, 10_000)])
)
def test_any_mixture_of_messages_is_exact(nranks: int, nmessages: int) -> None:
    for wrong, early, later in run(programs.mixed, nranks, nmessages, 7, timeout_s=180.0):
        assert wrong == []
        assert later <= early + (64 << 20)


@needs_reading
def test_any_mixture_of_messages_that_are_read_is_exact() -> None:
    for wrong, nread in run(programs.mixed_and_read, 3, 400, 8, timeout_s=180.0):
        assert wrong == []
        assert nread > 10


def test_repeated_messages_see_changed_arrays() -> None:
    run(programs.repeated, 3)


def test_the_sizes_of_messages_are_right_after_many_kinds() -> None:
    assert run(programs.many_kinds, 2) == [[], []]


def test_a_repeated_message_that_does_not_fit_is_refused() -> None:
    receiver, sender = run(programs.not_fitting_repeated, 2)
    assert len(receiver) == 4
    assert sender == receiver[2:]
    assert "receives up to 99 of float64" in receiver[0]
    assert "receives up to 199999 of float64" in receiver[2]


def test_messages_reach_a_rank_that_computes() -> None:
    sent_s, _ = run(programs.while_computing, 2, 1 << 19)
    assert sent_s < 2.5


def test_a_fast_pair_does_not_starve_a_third_rank() -> None:
    exchanged_s, _, sent_s = run(programs.beside_a_fast_pair, 3, 16)
    assert sent_s < exchanged_s


def test_threads_may_send_and_receive_at_once() -> None:
    assert run(programs.from_two_threads, 2, 60) == [[True, True]] * 2


def test_a_stopped_rank_is_waited_for() -> None:
    first, second = run(programs.stopped, 2)
    assert first == second > 2


def test_a_forked_child_is_refused() -> None:
    assert run(programs.forked, 2) == [["CommunicatorRevoked", "True"]] * 2


def test_unfinished_messages_end_with_the_job() -> None:
    ended = ["True", "CommunicatorRevoked"]
    found = run(message_programs.unfinished_after_the_close, 2)
    assert found == [[["CommunicatorRevoked"], ended, ended]] * 2


def test_unfinished_messages_are_refused_in_a_forked_child() -> None:
    child = ["True", "CommunicatorRevoked"] * 2
    found = run(message_programs.unfinished_in_a_forked_child, 2)
    assert found == [[*child, "2 to 2", "True"], [*child, "1 to 1", "True"]]


def test_closing_waits_for_data_that_moves() -> None:
    assert run(programs.closing_a_child, 2) == [[True]] * 2


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_close_by_the_sender_ends_a_receive_at_once(is_awaited: bool) -> None:
    said = (
        "rank 1: rank 0 closed the communicator before its message with tag 0 was received: wait "
        "for all sends before close()"
    )
    found = run(message_programs.closed_by_the_sender, 2, is_awaited)
    assert found == ["", "1 to 1" if is_awaited else said]


@needs_reading
def test_a_close_in_another_thread_tears_no_message() -> None:
    assert run(programs.closing_children_in_threads, 2, 10, 5) == [[], []]


def test_a_close_in_another_thread_ends_a_receive_at_once() -> None:
    punctual.in_time(close_in_a_thread)


def close_in_a_thread() -> None:
    for name, took_s in run(programs.closing_in_a_thread, 2):
        assert name == "CommunicatorRevoked"
        punctual.check(took_s, 1.0)


def test_a_short_wait_during_a_close_says_the_send_continues() -> None:
    found = run(programs.waiting_briefly_during_a_close, 2)
    assert found == [("TransportTimeout", True), ("", True)]


@needs_reading
@pytest.mark.parametrize("ntimes", slow_but([6], [6, 100]))
def test_an_abort_in_another_thread_tears_no_message(ntimes: int) -> None:
    for number in range(ntimes):
        assert run(programs.aborting_in_a_thread, 2, 0.02 * number / ntimes) == [[], []]


@pytest.mark.parametrize("name", slow_but(["send", "recv any"], programs.WAITS))
def test_a_late_peer_is_named(name: str) -> None:
    error, _ = run(programs.late, 2, name)
    assert error.startswith("TransportTimeout: ")
    if name != "recv any":
        assert "rank 1" in error


@pytest.mark.parametrize("name", slow_but(["recv", "long sendrecv"], programs.WAITS))
def test_a_killed_peer_is_named(name: str, tmp_path: Path) -> None:
    punctual.in_time(lambda: kill_peer(name, tmp_path))


def kill_peer(name: str, tmp_path: Path) -> None:
    lost = functools.partial(programs.lost_peer, name)
    env = {"DIED_AT": str(tmp_path / "died")}
    error, took_s = survivors(lost, 2, [[1]], timeout_s=TIMEOUT_S, env=env)[0]
    print(f"{1e3 * took_s:.1f} ms from the death to the error")
    assert error == "PeerLost of rank 1"
    punctual.check(took_s, 1.0)


@pytest.mark.parametrize(
    ("how", "name"),
    slow_but(
        [("interrupt", "recv"), ("revoke thread", "send"), ("abort handler", "sendrecv")],
        [
            (how, name)
            for how in ("interrupt", "revoke thread", "revoke handler", "abort thread",
                        "abort handler", "close handler")
            for name in programs.WAITS
        ],
    ),
)  # fmt: skip
def test_a_call_that_waits_can_be_ended(how: str, name: str) -> None:
    first, second = run(programs.ended_by, 2, how, name)
    own = "KeyboardInterrupt" if how == "interrupt" else "CommunicatorRevoked"
    assert first == [own, "in time", "CommunicatorRevoked"]
    assert second == ["CommunicatorRevoked", "in time", "CommunicatorRevoked"]


@pytest.mark.parametrize("is_sendrecv", [False, True])
def test_no_message_arrives_after_ctrl_c_before_the_wait(is_sendrecv: bool) -> None:
    assert run(programs.interrupted_before_the_wait, 2, is_sendrecv) == [[True, True]] * 2
