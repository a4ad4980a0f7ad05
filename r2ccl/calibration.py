"""Calibration: what the network gives, measured once with a few calls and agreed on.

alpha is what a step of an allreduce of a few bytes takes. beta follows from two large ones of which
one has twice the data: the difference of their times has no latency in it.

All ranks take the same times, the longest that any rank saw, or they would plan differently.

Pure: whoever calls it has the clock and the network. Invariant: equal times, equal rates.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from r2ccl.prediction import Rates


def calibrate(
    time_ns: Callable[[int, int], int], nsteps: int, load: Callable[[int], Fraction]
) -> Rates:
    """Measure.

    Parameters
    ----------
    time_ns : callable
        Runs allreduces of so many bytes one after another, so many of them; returns what the
        fastest took but for the first, which finds cold windows and full buckets. The same at all
        ranks.
    nsteps : int
        Messages that follow one another in a small one.
    load : callable
        Of an allreduce of that many bytes: what its busiest port carries, in multiples of it.
    """
    alpha_ns = min(time_ns(_SMALL_NBYTES, 2) for _ in range(_NSMALL)) // nsteps
    nbytes = _FIRST_NBYTES
    while nbytes < _MOST_NBYTES and time_ns(nbytes, 1) < _ENOUGH_NS:
        nbytes *= 2
    half_ns, whole_ns = time_ns(nbytes // 2, _NLARGE), time_ns(nbytes, _NLARGE)
    # Where the larger one was not slower, noise is all there is: take its whole time.
    more_nbytes, more_ns = nbytes // 2, whole_ns - half_ns
    if more_ns <= 0:
        more_nbytes, more_ns = nbytes, max(1, whole_ns)
    beta = load(nbytes) * more_nbytes * 10**9 / more_ns
    return Rates(max(1, alpha_ns), max(1, int(beta)))


_SMALL_NBYTES = 8
_NSMALL = 10
_FIRST_NBYTES = 1 << 20
#: So long that a process that was not scheduled for once does not make it.
_ENOUGH_NS = 50_000_000
_NLARGE = 4
#: Memory to measure with, at most; also what a network so fast is measured with.
_MOST_NBYTES = 64 << 20

__all__ = ["calibrate"]
