"""Messages in shared memory: errors of one thread while another one moves messages."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from r2ccl.runtime.messages import local


def test_a_thread_that_keeps_its_turn_after_an_error_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "_LAST_TURN_S", 0.05)
    errors: list[BaseException] = []
    engine: Any = SimpleNamespace(watch_end=lambda act: None, fail_local=errors.append)
    loop: Any = SimpleNamespace(rank=3, pollers=[])
    driver: Any = SimpleNamespace(rings=SimpleNamespace(direct=print, state=0, table=0))
    messages = local.LocalMessages(SimpleNamespace(), loop, driver, engine)  # type: ignore[arg-type]
    busy = threading.Thread(target=messages._lock.acquire)
    busy.start()
    busy.join()
    error = ValueError("for a test")
    assert messages._failed(error) is error
    assert errors == [error]
    assert "rank 3: a thread still moves messages 0.05 s after an error" in caplog.text
