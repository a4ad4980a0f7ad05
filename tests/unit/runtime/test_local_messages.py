"""Messages in shared memory: errors and Ctrl-C in the thread that moves messages, or beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.interrupted import at_entry

from r2ccl.runtime.messages import local
from r2ccl.runtime.messages.local import LocalMessages


def _messages(errors: list[BaseException]) -> LocalMessages:
    """Return messages whose engine appends to `errors`, and whose driver has nothing to move."""
    engine: Any = SimpleNamespace(watch_end=lambda act: None, fail_local=errors.append)
    loop: Any = SimpleNamespace(rank=3, pollers=[])
    driver: Any = SimpleNamespace(
        rings=SimpleNamespace(direct=print, state=0, table=0), advance=lambda waits: None,
        forget=lambda **_: None, has_work=False, is_quiet=True,
    )  # fmt: skip
    caller: Any = SimpleNamespace(check=lambda: None)
    return LocalMessages(caller, loop, driver, engine)


def test_a_thread_that_keeps_its_turn_after_an_error_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "_LAST_TURN_S", 0.05)
    errors: list[BaseException] = []
    messages = _messages(errors)
    busy = threading.Thread(target=messages._turn.lock.acquire)
    busy.start()
    busy.join()
    error = ValueError("for a test")
    assert messages._failed(error) is error
    assert errors == [error]
    assert "rank 3: a thread still moves messages 0.05 s after an error" in caplog.text


@pytest.mark.parametrize(
    "call",
    [
        lambda messages: messages.own(lambda: None, is_step=True),
        lambda messages: messages._step(lambda: True),
        lambda messages: messages.poll(),
        lambda messages: messages._forget(1.0, is_closing=False),
    ],
    ids=["own", "step", "poll", "forget"],
)
def test_ctrl_c_as_a_turn_ends_ends_the_turn(call: Callable[[LocalMessages], object]) -> None:
    number, came = 1, True
    while came:
        messages = _messages([])
        came = at_entry(number, lambda messages=messages: call(messages))  # type: ignore[misc]
        assert not messages.is_below, number
        number += 1
    assert number > 2
