"""Calibration: derive the latency and the bandwidth of the network from a few timed allreduces.

The latency alpha is the time per step of an allreduce of a few bytes. The bandwidth beta of a rail
follows from the time of a large allreduce minus alpha times the number of its steps. `Rates` holds
both.

The caller supplies the timing function. It must return the same times on all ranks (the longest
time of any rank), because equal times give equal rates, and equal rates give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable

from r2ccl.planning.cost_model import UNMEASURED, Choice, Rates


def calibrate(time_ns: Callable[[int, int], int], of: Callable[[int], Choice]) -> Rates:
    """Measure the step latency and the rail bandwidth of the network.

    Parameters
    ----------
    time_ns : callable
        ``time_ns(nbytes, n)`` runs ``max(2, n)`` consecutive allreduces of `nbytes` each. It
        returns the time of the fastest allreduce in ns. The first allreduce does not count, because
        TCP windows are still small and token buckets are full. The value must be the same on all
        ranks.
    of : callable
        ``of(nbytes)`` returns the `Choice` of an allreduce of `nbytes`.

    Returns
    -------
    Rates
        Equal on all ranks. `UNMEASURED` if some neighbors in the large allreduce share no home
        rail, because the rails that the allreduce used are then unknown.

    Notes
    -----
    *Collective*: all ranks, because `time_ns` runs allreduces.
    """
    if not of(_FIRST_NBYTES).has_way:
        return UNMEASURED
    small = of(_SMALL_NBYTES).schedule.cost.steps
    alpha_ns = min(time_ns(_SMALL_NBYTES, 2) for _ in range(_NSMALL)) // small
    nbytes = _FIRST_NBYTES
    while nbytes < _MOST_NBYTES and time_ns(nbytes, 1) < _ENOUGH_NS:
        nbytes *= 2
    took_ns = _settled(lambda: time_ns(nbytes, _NLARGE))
    large = of(nbytes)
    # If latency dominates, the difference is mostly noise; use at least half of the measured time.
    wire_ns = max(took_ns - large.schedule.cost.steps * alpha_ns, took_ns // 2, 1)
    beta = large.load * nbytes * 10**9 / wire_ns
    return Rates(max(1, alpha_ns), max(1, int(beta)))


def _settled(measure: Callable[[], int]) -> int:
    """Repeat a measurement until it is within 5 % of the least so far; return the least.

    Disturbances only add time. After `_NTRIES` repetitions, return the least in any case.
    """
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
#: Sufficient duration of the large allreduce, in ns: longer than one wait of a process for the CPU.
_ENOUGH_NS = 50_000_000
#: Number of allreduces per measurement of the bandwidth, and maximum number of repetitions.
_NLARGE = 4
_NTRIES = 3
#: Size of the largest allreduce measured, in bytes: needed on fast networks, and limits the memory.
_MOST_NBYTES = 64 << 20

__all__ = ["calibrate"]
