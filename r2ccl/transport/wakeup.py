"""A descriptor that ends another thread's sleep in epoll."""

from __future__ import annotations

import contextlib
import os

_ONE = (1).to_bytes(8, "little")


class Wakeup:
    """An eventfd to register for reading. `wake` may be called from any thread.

    A file object, as its number may be another file's by the time a late `wake` writes to it.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+b", buffering=0)
        #: The descriptor's number, also after `close`.
        self.number = self._file.fileno()

    def wake(self) -> None:
        """Make the descriptor readable; nothing happens once it is closed, as nobody sleeps."""
        with contextlib.suppress(ValueError):
            self._file.write(_ONE)

    def clear(self) -> None:
        """Make it unreadable again."""
        self._file.read(len(_ONE))

    def close(self) -> None:
        """Close it; a second call does nothing."""
        self._file.close()


__all__ = ["Wakeup"]
