"""Results of a part of the GPU bench, and its time budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec


class Outcome(msgspec.Struct):
    """Results of a part of the bench.

    Attributes
    ----------
    rows : list of dict
        Flat objects for the JSON file.
    lines : list of str
        Lines to print.
    failures : list of str
        Wrong elements, and mandatory measurements that could not run. Any entry fails the bench.
    missed : list of str
        Speed thresholds that were not reached.
    left_out : list of str
        Measurements that were left out, with the reasons.
    """

    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    failures: list[str] = []
    missed: list[str] = []
    left_out: list[str] = []


class Budget:
    """Time limit that starts when the object is created.

    Parameters
    ----------
    seconds : float
        Length of the limit.
    clock : callable, optional
        ``clock()`` returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._until_s = self._begun_s + seconds

    @property
    def left_s(self) -> float:
        """Remaining time in seconds; 0 if none is left."""
        return max(0.0, self._until_s - self._clock())

    def part(self, weight: float, of: float) -> Budget:
        """Return a budget with the share `weight` / `of` of the remaining time."""
        return Budget(self.left_s * weight / of, self._clock)

    def is_late(self, nrounds: int) -> bool:
        """Return whether one more round would exceed the limit.

        The round is expected to take the mean time of the `nrounds` rounds so far.
        """
        passed_s = self._clock() - self._begun_s
        return passed_s * (nrounds + 1) / nrounds > self._until_s - self._begun_s


__all__ = ["Budget", "Outcome"]
