"""Status dump on a signal, to find out what a hanging job waits for.

The handler is installed only on request. At its end, it calls the previous handler if that is a
Python function, and `SignalDump.close` restores the previous handler, so a Python program keeps its
own use of the signal. The handler writes to file descriptors directly: it may have interrupted
logging or buffered I/O, which cannot be re-entered.

Invariant: after `SignalDump.close`, a handler that could not be removed only calls the previous
handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from operator import index
from types import FrameType

from r2ccl.errors import InvalidArgument

_STDERR = 2


class SignalDump:
    """Signal handler that calls `write` and then the previous handler, if that is a function.

    Parameters
    ----------
    signum : int
    write : callable
        Called without arguments in the main thread, between two bytecodes; must not raise.

    Raises
    ------
    InvalidArgument
        If this is not the main thread, or the signal cannot be handled.
    """

    def __init__(self, signum: int, write: Callable[[], None]) -> None:
        require_main_thread()
        self.signum = signum
        self._write: Callable[[], None] | None = write
        try:
            # Without `index`, 10.5 would be signal 10, which `close` could not restore.
            number = index(signum)
            # Stored first, because the signal may arrive as soon as the new handler is installed.
            self._previous = signal.getsignal(number)
            signal.signal(number, self._on_signal)
        except (OSError, ValueError, TypeError, OverflowError) as exc:
            raise InvalidArgument(
                f"signum={signum!r} cannot be handled ({exc}): pass signal.SIGUSR1 or "
                "signal.SIGUSR2"
            ) from exc

    def close(self) -> None:
        """Stop writing, and restore the previous handler. Idempotent.

        If the previous handler was not installed from Python, the default action is installed
        instead. If another `SignalDump` was installed over this handler, that `SignalDump` then
        calls this object's previous handler directly. Otherwise, if any other handler has replaced
        this handler, or the caller is not the main thread, nothing is restored; this handler then
        only calls its previous handler.
        """
        if self._write is None:
            return
        self._write = None
        installed = signal.getsignal(self.signum)
        if installed != self._on_signal:
            self._unlink(installed)
        elif threading.current_thread() is threading.main_thread():
            # None means that the previous handler was not installed from Python and cannot be
            # restored.
            signal.signal(self.signum, self._previous or signal.SIG_DFL)

    def _unlink(self, installed: object) -> None:
        while isinstance(later := getattr(installed, "__self__", None), SignalDump):
            if later._previous == self._on_signal:
                later._previous = self._previous
                return
            installed = later._previous

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._write is not None:
            self._write()
        if callable(self._previous):
            self._previous(signum, frame)


def require_main_thread() -> None:
    """Check that this is the main thread, the only one that can install signal handlers.

    Raises
    ------
    InvalidArgument
        If this is another thread.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise InvalidArgument(
            f"a dump on a signal was requested in thread {thread.name!r}, but Python handles "
            "signals only in the main thread: make this call in the main thread, or leave "
            "R2CC_DUMP_SIGNAL empty and call dump() when needed"
        )


def write_line(text: str, path: str) -> None:
    """Append `text` and a line feed to the file `path`.

    If `path` is empty, write to stderr. If the file cannot be written, write to stderr with the
    reason. Raise no error if stderr cannot be written either.
    """
    try:
        if path:
            _append(text, path)
            return
    except (OSError, ValueError) as exc:  # ValueError: a null character in the path
        why = getattr(exc, "strerror", None) or exc
        text = f"r2ccl: cannot write to {path!a} ({why}); check R2CC_DUMP_FILE\n{text}"
    with contextlib.suppress(OSError):  # stderr is closed, so the error cannot be reported
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
