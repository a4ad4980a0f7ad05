"""Time, passed in rather than looked up, so that the simulator can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float:
        """Return the time in seconds."""
        ...


#: The real clock. CLOCK_MONOTONIC: the same for every process and network namespace of a host.
monotonic: Clock = time.monotonic

__all__ = ["Clock", "monotonic"]
