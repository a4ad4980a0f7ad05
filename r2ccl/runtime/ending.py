"""Cleanup of a job at one rank, which runs once and in a separate thread.

A separate thread allows cleanup to be requested anywhere: while another thread is in a call, in a
signal handler that interrupted a call, or again after Ctrl-C ended the first wait. The cleanup
thread waits until the resources are no longer in use; a requester waits for that thread with a
timeout.

The thread is started in advance, because Ctrl-C can arrive between any two Python instructions and
would leave a thread half started. Invariant: after `Ending.prepare` and `Ending.begin`, each step
runs exactly once, even if an earlier step raises an exception.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)


class Ending:
    """Thread that runs a sequence of cleanup steps once.

    Parameters
    ----------
    name : str
        Name of the thread.
    steps : sequence of callable
        Each step is called with the timeout of `begin`, in seconds; a step may wait longer. If a
        step raises an exception, the exception is logged, and the next step runs.
    """

    def __init__(self, name: str, steps: Sequence[Callable[[float], None]]) -> None:
        self._steps = steps
        self._taken = [threading.Event() for _ in steps]
        self._timeout_s = 0.0
        #: Lock held until the steps may begin: Ctrl-C cannot interrupt the release of a lock.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def prepare(self) -> None:
        """Start the thread, which waits for `begin`."""
        self._thread.start()

    def begin(self, timeout_s: float) -> None:
        """Start the steps, passing them `timeout_s` (above 0); do nothing if they were started."""
        if not self._timeout_s:
            self._timeout_s = timeout_s
        with contextlib.suppress(RuntimeError):  # the steps were started before
            self._gate.release()

    def wait(self, timeout_s: float, nsteps: int | None = None) -> bool:
        """Wait up to `timeout_s` seconds for all steps, or the first `nsteps`.

        Return whether they have finished.
        """
        # Thread.join is not used: after Ctrl-C in a join, CPython 3.11 reports a running thread as
        # ended.
        return self._taken[(nsteps or len(self._steps)) - 1].wait(timeout_s)

    def _run(self) -> None:
        self._gate.acquire()
        for step, taken in zip(self._steps, self._taken, strict=True):
            try:
                step(self._timeout_s)
            except Exception:
                _log.exception(
                    "%s: a cleanup step failed: please report it; the remaining steps still run",
                    self._thread.name,
                )
            finally:
                taken.set()


__all__ = ["Ending"]
