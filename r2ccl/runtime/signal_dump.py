"""Write a text when a signal comes: how a job that hangs is asked what it waits for.

Taken only when asked for, and given back: a library that took a signal silently would take it from
the program. Must not log or use buffered files: the handler may have interrupted just that.

Invariant: once closed, a handler that was not given back does nothing but call the one before it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from r2ccl.errors import InvalidArgument

_STDERR = 2


class SignalDump:
    """Calls `write` whenever `signum` comes, then the handler that was there before.

    Parameters
    ----------
    signum : int
    write : callable
        Runs in the main thread, between two of its bytecodes; must not raise.

    Raises
    ------
    InvalidArgument
        Not the main thread, or a signal that cannot be handled.
    """

    def __init__(self, signum: int, write: Callable[[], None]) -> None:
        require_main_thread()
        self._signum = signum
        self._write: Callable[[], None] | None = write
        try:
            self._previous = signal.signal(signum, self._on_signal)
        except (OSError, ValueError) as exc:
            raise InvalidArgument(
                f"signal {signum}: {exc}; it cannot be handled, take SIGUSR1 or SIGUSR2"
            ) from exc

    def close(self) -> None:
        """Put the former handler back, unless another one came over this one. Idempotent."""
        if self._write is None:
            return
        self._write = None
        is_ours = signal.getsignal(self._signum) == self._on_signal
        if is_ours and threading.current_thread() is threading.main_thread():
            # None: a handler that was not Python's, which cannot be put back.
            signal.signal(self._signum, self._previous or signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._write is not None:
            self._write()
        if callable(self._previous):
            self._previous(signum, frame)


def require_main_thread() -> None:
    """Refuse in any other thread: Python's signal handlers belong to the main one.

    Raises
    ------
    InvalidArgument
        This is another thread.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise InvalidArgument(
            f"a dump on a signal was asked for in thread {thread.name!r}, but Python handles "
            "signals in the main thread: ask there, or leave R2CC_DUMP_SIGNAL empty and call "
            "dump() when it is needed"
        )


def write_line(text: str, path: str) -> None:
    """Append `text` and a line feed to the file `path`; to stderr if it is empty or refuses."""
    try:
        if path:
            _append(text, path)
            return
    except OSError as exc:
        text = f"r2ccl: cannot write to {path} ({exc.strerror}); R2CC_DUMP_FILE names it\n{text}"
    with contextlib.suppress(OSError):  # a closed stderr: there is nowhere left to complain
        _write_all(_STDERR, text)


def _append(text: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        _write_all(file, text)
    finally:
        os.close(file)


def _write_all(file: int, text: str) -> None:
    data = memoryview(f"{text}\n".encode())
    while data:
        data = data[os.write(file, data) :]


__all__ = ["SignalDump", "require_main_thread", "write_line"]
