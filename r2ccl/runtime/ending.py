"""Ending: what a communicator holds is freed once, in a thread of its own.

So it does not matter where the end is asked for: beside a call that is under way in another thread,
in a signal handler above it, or again after Ctrl-C broke the first wait. The thread waits for
whoever still owns what is freed; who asked waits for the thread, no longer than it wants to.

The thread is there from the beginning: Ctrl-C can come between any two lines of Python, and would
leave one half started. Must not know what is freed. Invariant: each step is taken once, whatever
those before it raised.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)


class Ending:
    """Steps that free something, to be taken once.

    Parameters
    ----------
    name : str
        Of the thread.
    steps : sequence of callable
        Called with the timeout in seconds; a step may have a bound of its own.
    """

    def __init__(self, name: str, steps: Sequence[Callable[[float], None]]) -> None:
        self._steps = steps
        self._taken = [threading.Event() for _ in steps]
        self._timeout_s = 0.0
        #: Held until the end begins. Its release cannot be interrupted.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def prepare(self) -> None:
        """Start the thread, which waits."""
        self._thread.start()

    def begin(self, timeout_s: float) -> None:
        """Begin, if nobody has."""
        if not self._timeout_s:
            self._timeout_s = timeout_s
        with contextlib.suppress(RuntimeError):  # it was begun before
            self._gate.release()

    def wait(self, timeout_s: float, nsteps: int | None = None) -> bool:
        """Wait for all steps, or the first `nsteps`; return whether they finished."""
        # Not by joining: Ctrl-C in a join leaves a thread that looks ended (CPython 3.11).
        return self._taken[(nsteps or len(self._steps)) - 1].wait(timeout_s)

    def _run(self) -> None:
        self._gate.acquire()
        for step, taken in zip(self._steps, self._taken, strict=True):
            try:
                step(self._timeout_s)
            except Exception:
                _log.exception("%s: what comes after it is freed all the same", self._thread.name)
            finally:
                taken.set()


__all__ = ["Ending"]
