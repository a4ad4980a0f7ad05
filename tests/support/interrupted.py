"""Raise KeyboardInterrupt at a chosen place: before a line of the library, or in a lock.

The lines of `r2ccl.testing` are left out: fakes stand for extension modules, which Ctrl-C does not
interrupt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import r2ccl

_LIBRARY = os.path.dirname(r2ccl.__file__)
_FAKES = os.path.join(_LIBRARY, "testing")


def at_entry(number: int, fn: Callable[[], object]) -> bool:
    """Call `fn` with Ctrl-C as function `number` (from 1) of those of the library begins.

    Python handles signals there. Returns False if `fn` calls fewer functions.
    """
    left = number

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        left -= frame.f_code.co_filename.startswith(_LIBRARY)
        if not left:
            raise KeyboardInterrupt

    return _is_interrupted(fn, on_call)


def at_line(number: int, fn: Callable[[], object]) -> bool:
    """Call `fn` with Ctrl-C before line `number` (from 1) of the library's lines that it runs.

    Returns False if `fn` runs fewer lines, so that no Ctrl-C occurred.
    """
    left = number

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        return on_line if name.startswith(_LIBRARY) and not name.startswith(_FAKES) else None

    return _is_interrupted(fn, on_call)


def _is_interrupted(fn: Callable[[], object], trace: Callable[..., Any]) -> bool:
    """Return whether `fn` raises KeyboardInterrupt while `trace` observes it."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@contextmanager
def as_acquired(lock: Any) -> Iterator[None]:
    """Let Ctrl-C come in this thread exactly as it has acquired `lock`; once."""

    def press(frame: FrameType, event: str, function: Any) -> None:
        is_acquired = event == "c_return" and function.__name__ == "acquire"
        if is_acquired and function.__self__ is lock:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(press)
    try:
        yield
    finally:
        sys.setprofile(None)
