"""Calibration: what the network gives, measured once with a few calls and agreed on.

alpha is what a step of an allreduce of a few bytes takes; beta follows from what a large one takes
beyond the alphas of its steps.

All ranks take the same times, the longest that any rank saw, or they would plan differently.

Pure: whoever calls it has the clock and the network. Invariant: equal times, equal rates.
"""

from __future__ import annotations

from collections.abc import Callable

from r2ccl.planning.cost_model import Choice, Rates


def calibrate(time_ns: Callable[[int, int], int], of: Callable[[int], Choice]) -> Rates:
    """Measure.

    Parameters
    ----------
    time_ns : callable
        Runs allreduces of so many bytes one after another, so many of them; returns what the
        fastest took but for the first, which finds cold windows and full buckets. The same at all
        ranks.
    of : callable
        What an allreduce of that many bytes runs.
    """
    small, large = (of(nbytes).schedule.cost.steps for nbytes in (_SMALL_NBYTES, _MOST_NBYTES))
    alpha_ns = min(time_ns(_SMALL_NBYTES, 2) for _ in range(_NSMALL)) // small
    nbytes = _FIRST_NBYTES
    while nbytes < _MOST_NBYTES and time_ns(nbytes, 1) < _ENOUGH_NS:
        nbytes *= 2
    took_ns = _settled(lambda: time_ns(nbytes, _NLARGE))
    # Where latency is most of it, what is left of the time says nothing.
    wire_ns = max(took_ns - large * alpha_ns, took_ns // 2, 1)
    beta = of(nbytes).load * nbytes * 10**9 / wire_ns
    return Rates(max(1, alpha_ns), max(1, int(beta)))


def _settled(measure: Callable[[], int]) -> int:
    """Measure until a time repeats; return the least. Whatever disturbs makes it longer."""
    least = measure()
    for _ in range(_NTRIES):
        again = measure()
        is_same = abs(again - least) * 20 <= least
        least = min(least, again)
        if is_same:
            break
    return least


_SMALL_NBYTES = 8
_NSMALL = 10
_FIRST_NBYTES = 1 << 20
#: So long that a process that was not scheduled for once does not make it.
_ENOUGH_NS = 50_000_000
#: Calls of one measurement, and how often one is repeated at most.
_NLARGE = 4
_NTRIES = 3
#: Memory to measure with, at most; also what a network so fast is measured with.
_MOST_NBYTES = 64 << 20

__all__ = ["calibrate"]
