"""Type of the clocks that components receive as arguments, and the real clock.

`r2ccl.testing.simulation` passes a clock of its own.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Callable that returns a monotonic time in seconds."""

    def __call__(self) -> float:
        """Return the current time in seconds."""
        ...


#: The real clock, CLOCK_MONOTONIC: equal in all processes and network namespaces of a host.
monotonic: Clock = time.monotonic

__all__ = ["Clock", "monotonic"]
