"""Set of sockets that the event loop watches as one descriptor: the class `ReaderSet`.

To begin or end watching a descriptor takes asyncio about 20 Python calls, and it runs each callback
in a separate context. During the rendezvous, rank 0 watches one connection per rank, so it adds
these to a separate epoll descriptor, and the event loop watches that.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol


class ReadLoop(Protocol):
    """Methods of `asyncio.AbstractEventLoop` that `ReaderSet` has, too."""

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` with `args` whenever `fd` is readable."""

    def remove_reader(self, fd: int) -> bool:
        """Stop watching `fd`; return whether it was watched."""


class ReaderSet:
    """Watched descriptors, in the running event loop; borrowed.

    A callback is called again as long as its descriptor has unread data, even after it raised.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], Any]] = {}
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._run)

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` with `args` whenever `fd` is readable; replaces an earlier callback."""
        if fd not in self._calls:
            self._epoll.register(fd, select.EPOLLIN)
        self._calls[fd] = partial(callback, *args)

    def remove_reader(self, fd: int) -> bool:
        """Stop watching `fd`, which must be open; return whether it was watched."""
        if self._calls.pop(fd, None) is None:
            return False
        self._epoll.unregister(fd)
        return True

    def close(self) -> None:
        """Stop watching all descriptors."""
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._calls.clear()

    def _run(self) -> None:
        for fd, _ in self._epoll.poll(0):
            call = self._calls.get(fd)
            if call is not None:  # else: an earlier callback has removed it
                call()


__all__ = ["ReadLoop", "ReaderSet"]
