"""Measure what a slice takes that is given away in one way or another.

The one who asks says how a slice is given; it is timed as the data loop goes on with slices: a few
under way, one `commit` and one `poll` a turn. Must not import a device. Invariant: when a
measurement returns, all that it gave is done.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from r2ccl.clock import Clock
from r2ccl.errors import TransportTimeout

_log = logging.getLogger(__name__)

#: Slices that are timed together, those before them that are not, and those under way at once.
NSLICES, NFIRST, NAHEAD = 32, 8, 4
#: How often each way is timed, by turns, for the median.
NROUNDS = 5


class Computer(Protocol):
    """What is needed of `r2ccl.progress.Computer`."""

    def commit(self) -> None:
        """Have `poll` tell of all that was given until now."""
        ...

    def poll(self) -> int:
        """Return the number of the last work that is done."""
        ...


def slice_s(
    computer: Computer, give: Callable[[], int], *, clock: Clock, timeout_s: float
) -> float:
    """Return what a slice takes, in seconds, when several follow one another.

    Parameters
    ----------
    computer : Computer
    give : callable
        Gives it a slice, and returns the slice's number.
    clock : Clock
    timeout_s : float
        How long all of them may take.

    Raises
    ------
    TransportTimeout
        They took longer; some are under way.
    """
    until_s = clock() + timeout_s
    began_s = 0.0
    for nslices in (NFIRST, NSLICES):
        began_s = clock()
        ahead: deque[int] = deque()
        while nslices or ahead:
            if nslices and len(ahead) < NAHEAD:
                ahead.append(give())
                nslices -= 1
                continue
            computer.commit()
            done = computer.poll()
            while ahead and ahead[0] <= done:
                ahead.popleft()
            if ahead and clock() >= until_s:
                raise TransportTimeout(
                    f"the GPU has not reduced {NFIRST + NSLICES} slices in {timeout_s:g} s: look "
                    "for a kernel that hangs",
                    status="TIMEOUT",
                )
    return (clock() - began_s) / NSLICES


def is_second_faster(
    computer: Computer,
    give: Callable[[], int],
    second: Callable[[], AbstractContextManager[None]],
    *,
    clock: Clock,
    timeout_s: float,
) -> bool:
    """Measure slices as they are given, and as they are given in another way, by turns.

    Parameters
    ----------
    computer, give, clock, timeout_s
        As for `slice_s`.
    second : callable
        Makes a context in which `give` gives slices in the other way.

    Returns
    -------
    bool
        Whether the other way took less time: the medians of `NROUNDS` are compared.

    Raises
    ------
    TransportTimeout
        As `slice_s`.
    """
    times_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(NROUNDS):
        for times, way in zip(times_s, (contextlib.nullcontext, second), strict=True):
            with way():
                times.append(slice_s(computer, give, clock=clock, timeout_s=timeout_s))
    first_s, second_s = map(statistics.median, times_s)
    _log.info(
        "a slice takes %.1f us in one way, %.1f us in the other", 1e6 * first_s, 1e6 * second_s
    )
    return second_s < first_s


__all__ = ["NAHEAD", "NFIRST", "NROUNDS", "NSLICES", "is_second_faster", "slice_s"]
