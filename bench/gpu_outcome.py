"""What a part of the GPU bench comes to, and how long it may take.

Values and arithmetic. Must not print.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec


class Outcome(msgspec.Struct):
    """What a part found.

    Attributes
    ----------
    rows : list of dict
        Flat objects, for the JSON file.
    lines : list of str
        What is shown.
    failures : list of str
        Wrong elements, and what could not be run though it must: any of them fails the bench.
    missed : list of str
        Thresholds of speed that were not reached.
    left_out : list of str
        What was not measured, and why.
    """

    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    failures: list[str] = []
    missed: list[str] = []
    left_out: list[str] = []


class Budget:
    """A stretch of time, begun when it is made.

    Parameters
    ----------
    seconds : float
    clock : callable, optional
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._until_s = self._begun_s + seconds

    @property
    def left_s(self) -> float:
        """What is left of it; 0 if it is over."""
        return max(0.0, self._until_s - self._clock())

    def part(self, weight: float, of: float) -> Budget:
        """Return the part of what is left that one of several things may take, by their weights."""
        return Budget(self.left_s * weight / of, self._clock)

    def is_late(self, nrounds: int) -> bool:
        """Whether one more round, as long as the mean of those before, would exceed it."""
        passed_s = self._clock() - self._begun_s
        return passed_s * (nrounds + 1) / nrounds > self._until_s - self._begun_s


__all__ = ["Budget", "Outcome"]
