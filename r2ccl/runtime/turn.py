"""Right of one thread at a time to run the collectives, or move the messages, of a communicator."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import suppress
from threading import Lock, RLock, get_ident

import numpy as np

from r2ccl.clock import monotonic

#: Compiled code that takes the turn relies on the GIL.
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


class Turn:
    """Right to run collectives of one communicator, or to move its messages in shared memory.

    One thread has the turn at a time: from the first copy of a collective to its last, or while it
    moves messages. There are two ways to take it:

    - A thread acquires `lock`, sets `is_running`, and then waits until `is_repeating` is False. The
      worker does not set `is_running`: compiled code sees that the worker is not idle.
    - Compiled code, which holds the GIL, finds that `is_running` and `is_repeating` are False and
      that the worker, if there is one, is idle, and sets `is_repeating`. Acquiring `lock` would
      take longer than all these steps together.

    If two threads try at the same time, at least one of them therefore sees the other. The lock is
    re-entrant, because only a re-entrant lock can tell whether this thread holds it. Ctrl-C may
    come just as a thread acquires the lock, so the lock is acquired within the ``try`` statement
    that releases it.

    Attributes
    ----------
    lock : RLock
    is_running : bool
        True while a thread other than the worker holds the lock.
    is_repeating : bool
        True while compiled code has the turn.
    is_awaited : bool
        True if a thread waits until compiled code has returned the turn; compiled code then calls
        `wake`.
    holder : ndarray
        One word: the identifier of the thread in which compiled code last took the turn.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.is_running = False
        self.is_repeating = False
        self.is_awaited = False
        #: Locks for which threads in `await_return` wait; several may belong to one thread.
        self._gates: deque[Lock] = deque()
        self.holder = np.zeros(1, np.int64)

    @property
    def is_taken(self) -> bool:
        """True if a blocking call has the turn."""
        return self.is_running or self.is_repeating

    @property
    def is_mine(self) -> bool:
        """True if this thread has the turn."""
        has_compiled = self.is_repeating and self.holder[0] == get_ident()
        return bool(has_compiled or self.lock._is_owned())  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        """Take the turn; only for the worker, and only while one of its tasks is queued.

        The queued task keeps compiled code from taking the turn, so `is_running` need not be set.
        """
        self.lock.acquire()
        while not self.await_return(_LOOK_S):
            pass

    def __exit__(self, *_: object) -> None:
        """Return the turn of the worker."""
        self.lock.release()

    def await_return(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for compiled code to return the turn, if it has the turn.

        Return True if compiled code does not have the turn. The caller must hold `lock`.
        """
        return not self.is_repeating or self._await_return(timeout_s)

    def _await_return(self, timeout_s: float) -> bool:
        until_s = monotonic() + timeout_s
        while True:
            # Ctrl-C may come anywhere here. A gate that is left in the list then is opened later.
            gate = Lock()
            gate.acquire()
            self._gates.append(gate)
            self.is_awaited = True
            if not self.is_repeating:
                return True
            left_s = until_s - monotonic()
            if left_s <= 0:
                return False
            gate.acquire(timeout=min(left_s, _LOOK_S))

    def wake(self) -> None:
        """Wake the threads in `await_return`."""
        self.is_awaited = False
        with suppress(IndexError):
            while True:
                self._gates.popleft().release()


#: Longest time in seconds between two checks of the turn, in case Ctrl-C prevents `Turn.wake`.
_LOOK_S = 0.1

__all__ = ["HAS_GIL", "Turn"]
