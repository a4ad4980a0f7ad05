"""Handles of messages: waits of several threads, and waits that Ctrl-C ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support import interrupted

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

from r2ccl.interop.torch.works import MessageWork


def make_work(wait: Any) -> MessageWork:
    """Return the handle of a message whose wait is ``wait(timeout_s)``."""
    request: Any = SimpleNamespace(wait=wait, is_done=lambda: True)
    return MessageWork(request, [], 30.0, lambda reason: None)


def test_ctrl_c_as_a_wait_begins_holds_up_no_other_wait() -> None:
    work = make_work(lambda timeout_s: None)
    with pytest.raises(KeyboardInterrupt), interrupted.as_acquired(work._lock):
        work.is_completed()
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(work.is_completed()))
    other.start()
    other.join(30)
    assert found == [True]


def test_a_handler_within_a_wait_sees_an_unfinished_message() -> None:
    found: list[bool] = []
    work = make_work(lambda timeout_s: found.append(work.is_completed()))
    assert work.is_completed()
    assert found == [False]
