"""Calibration: derive the latency and the bandwidth of the network from a few timed allreduces.

alpha is the time per step of an allreduce of a few bytes. beta, the bandwidth of a rail, follows
from the time of a large allreduce minus alpha times its steps. `Rates` holds both.

The caller supplies the timing function. It must return the same times on all ranks (the longest
time of any rank), because equal times give equal rates, and equal rates equal plans.
"""

from __future__ import annotations

from collections.abc import Callable

from r2ccl.planning.cost_model import Choice, Rates


def calibrate(time_ns: Callable[[int, int], int], of: Callable[[int], Choice]) -> Rates:
    """Measure the step latency and the rail bandwidth of the network.

    Parameters
    ----------
    time_ns : callable
        ``time_ns(nbytes, n)`` runs ``max(2, n)`` consecutive allreduces of `nbytes` each and
        returns the time of the fastest in ns, excluding the first one, which finds cold TCP windows
        and full token buckets. Returns the same value on all ranks.
    of : callable
        ``of(nbytes)`` returns the `Choice` of an allreduce of `nbytes`.

    Notes
    -----
    *Collective*: all ranks, because `time_ns` runs allreduces.
    """
    small, large = (of(nbytes).schedule.cost.steps for nbytes in (_SMALL_NBYTES, _MOST_NBYTES))
    alpha_ns = min(time_ns(_SMALL_NBYTES, 2) for _ in range(_NSMALL)) // small
    nbytes = _FIRST_NBYTES
    while nbytes < _MOST_NBYTES and time_ns(nbytes, 1) < _ENOUGH_NS:
        nbytes *= 2
    took_ns = _settled(lambda: time_ns(nbytes, _NLARGE))
    # If latency dominates, the difference is noise; use at least half of the time.
    wire_ns = max(took_ns - large * alpha_ns, took_ns // 2, 1)
    beta = of(nbytes).load * nbytes * 10**9 / wire_ns
    return Rates(max(1, alpha_ns), max(1, int(beta)))


def _settled(measure: Callable[[], int]) -> int:
    """Measure until a time repeats within 5 %; return the least, as disturbances only add time."""
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
#: Longer than the time that a process may wait for the CPU once.
_ENOUGH_NS = 50_000_000
#: Allreduces per measurement of the bandwidth, and most repetitions of the measurement.
_NLARGE = 4
_NTRIES = 3
#: Largest allreduce measured; bounds the memory, and is what very fast networks are measured with.
_MOST_NBYTES = 64 << 20

__all__ = ["calibrate"]
