"""The turn, which one thread or compiled code has at a time."""

from __future__ import annotations

import threading

import pytest

from r2ccl.runtime.turn import Turn

pytestmark = pytest.mark.timeout(60)


def _returned(turn: Turn) -> None:
    """Do what compiled code does at the end of a call."""
    turn.is_repeating = False
    if turn.is_awaited:
        turn.wake()


def test_a_blocking_call_or_compiled_code_takes_the_turn() -> None:
    turn = Turn()
    assert not turn.is_taken
    turn.is_running = True
    assert turn.is_taken
    turn.is_running, turn.is_repeating = False, True
    assert turn.is_taken


def test_a_thread_waits_for_compiled_code_up_to_a_limit() -> None:
    turn = Turn()
    assert turn.await_return(0.0)
    turn.is_repeating = True
    assert not turn.await_return(0.0)
    assert not turn.await_return(0.01)
    assert turn.is_awaited


def test_a_thread_that_waits_is_woken() -> None:
    turn, found = Turn(), []
    turn.is_repeating = True
    thread = threading.Thread(target=lambda: found.append(turn.await_return(50.0)))
    thread.start()
    while not turn.is_awaited:
        pass
    _returned(turn)
    thread.join()
    assert found == [True]


def test_the_worker_waits_for_compiled_code() -> None:
    turn, entered, is_over = Turn(), threading.Event(), threading.Event()
    turn.is_repeating = True

    def work() -> None:
        with turn:
            entered.set()
            is_over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    assert not entered.wait(0.05)
    _returned(turn)
    assert entered.wait(50.0)
    assert not turn.lock.acquire(False)
    is_over.set()
    thread.join()
    assert turn.lock.acquire(False)


def test_the_thread_that_has_the_turn_knows_it() -> None:
    turn, others = Turn(), []

    def is_mine_elsewhere() -> bool:
        thread = threading.Thread(target=lambda: others.append(turn.is_mine))
        thread.start()
        thread.join()
        return others.pop()

    assert not turn.is_mine
    turn.holder[0], turn.is_repeating = threading.get_ident(), True
    assert turn.is_mine
    assert not is_mine_elsewhere()
    turn.is_repeating = False
    assert not turn.is_mine
    with turn:
        assert turn.is_mine
        assert not is_mine_elsewhere()
