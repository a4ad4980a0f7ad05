"""Watching many sockets through one entry in the event loop.

asyncio takes some 20 calls of Python to begin or end watching a descriptor, and runs each callback
in a context of its own. Rank 0 watches a connection of every rank during the rendezvous, so its
connections have an epoll descriptor of their own, which the loop watches.
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
    """Set of watched descriptors; a callback that raises is called again while data is left."""

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
