"""Ahead: plans for a health that ranks are still agreeing on, made while calls go on without it.

A new health holds from a later collective on; the one that was struck, and those until then, run
as planned before. Meanwhile a thread of its own plans what ran last for the new one, so that no
call waits for it. Plans depend on the call and the health alone: made here or when they are
needed, they are the same.

Invariant: one thread at a time; a health that a newer one overtakes is dropped.
"""

from __future__ import annotations

import logging
import threading

from r2ccl.errors import R2cclError
from r2ccl.plans import Plans
from r2ccl.resilience.health import Health

_log = logging.getLogger(__name__)


class PlanAhead:
    """Plans ahead for one rank.

    Parameters
    ----------
    plans : Plans
    name : str
        Of its thread.
    """

    def __init__(self, plans: Plans, name: str) -> None:
        self._plans = plans
        self._name = name
        self._lock = threading.Lock()
        self._wanted: Health | None = None
        self._thread: threading.Thread | None = None

    def begin(self, health: Health) -> None:
        """Plan the last calls for `health`; returns at once."""
        with self._lock:
            self._wanted = health
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Drop what is not planned yet, and wait for the plan that is being made."""
        with self._lock:
            self._wanted = None
            thread = self._thread
        if thread is not None:
            thread.join(deadline_s)

    def _run(self) -> None:
        while (health := self._take()) is not None:
            try:
                for call in self._plans.recent():
                    if self._wanted is not health:
                        break
                    self._plans.prepare(call, health)
            except R2cclError as exc:
                # Whoever makes the call is told.
                _log.debug("%s: %s", self._name, exc)
            self._done(health)

    def _take(self) -> Health | None:
        with self._lock:
            if self._wanted is None:
                self._thread = None
            return self._wanted

    def _done(self, health: Health) -> None:
        with self._lock:
            if self._wanted is health:
                self._wanted = None


__all__ = ["PlanAhead"]
