"""File descriptor that wakes a thread waiting in epoll."""

from __future__ import annotations

import contextlib
import os

_ONE = (1).to_bytes(8, "little")


class Wakeup:
    """Eventfd that makes an epoll set readable. `wake` may be called from any thread.

    The eventfd is kept as a file object, not as a number: after `close` the kernel may give the
    number to another file, and a late `wake` must not write to that file.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+b", buffering=0)
        #: File descriptor number; keeps its value after `close`.
        self.number = self._file.fileno()

    def wake(self) -> None:
        """Make the descriptor readable; do nothing after `close`."""
        with contextlib.suppress(ValueError):
            self._file.write(_ONE)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `wake`."""
        self._file.read(len(_ONE))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._file.close()


__all__ = ["Wakeup"]
