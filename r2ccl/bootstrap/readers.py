"""Set of sockets that the event loop watches as one descriptor: the class `ReaderSet`.

asyncio makes about 20 Python calls to begin or end watching a descriptor, and runs each callback in
a separate context. During the rendezvous, rank 0 watches one connection per rank. It adds these
connections to a separate epoll descriptor, which the event loop watches. It can also handle them in
batches: on a busy host, waking up for each connection costs as much as handling it.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

#: Maximum number of times that a `ReaderSet` looks for readable descriptors before the event loop
#: runs other callbacks.
_MAX_ROUNDS = 32


class ReadLoop(Protocol):
    """Methods that `asyncio.AbstractEventLoop` and `ReaderSet` have in common."""

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` with `args` whenever `fd` is readable."""

    def remove_reader(self, fd: int) -> bool:
        """Stop watching `fd`; return True if it was watched."""


class ReaderSet:
    """Set of watched descriptors; the event loop in which it is made calls the callbacks.

    The descriptors are borrowed. A callback is called again as long as its descriptor has unread
    data, even after it raised.

    Parameters
    ----------
    pause_s : callable, optional
        Called without arguments after each batch of readable descriptors; returns the time in
        seconds until the next batch. By default there is no pause.
    """

    def __init__(self, pause_s: Callable[[], float] = lambda: 0.0) -> None:
        self._pause_s = pause_s
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], Any]] = {}
        #: Ends the present pause.
        self._pause: asyncio.TimerHandle | None = None
        self._resume()

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` with `args` whenever `fd` is readable; replaces an earlier callback."""
        if fd not in self._calls:
            self._epoll.register(fd, select.EPOLLIN)
        self._calls[fd] = partial(callback, *args)

    def remove_reader(self, fd: int) -> bool:
        """Stop watching `fd`, which must still be open; return True if it was watched."""
        if self._calls.pop(fd, None) is None:
            return False
        self._epoll.unregister(fd)
        return True

    def close(self) -> None:
        """Stop watching all descriptors."""
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._calls.clear()

    def _resume(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._run)

    def _run(self) -> None:
        for _ in range(_MAX_ROUNDS):
            ready = self._epoll.poll(0)
            if not ready:
                break
            for fd, _ in ready:
                call = self._calls.get(fd)
                if call is not None:  # else: an earlier callback has removed it
                    call()
        if (pause_s := self._pause_s()) > 0:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._epoll.fileno())
            self._pause = loop.call_later(pause_s, self._resume)


__all__ = ["ReadLoop", "ReaderSet"]
