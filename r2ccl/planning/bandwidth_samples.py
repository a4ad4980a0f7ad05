"""Bandwidth samples: selection of the calls that run as rings or chains to measure the rails.

The traffic of a port shows its bandwidth only if a single peer sends to the port, as in rings and
chains. A *candidate* is a call that can run as a ring or chain, but has a faster schedule. A
*sample* is a candidate that runs as a ring or chain in spite of the longer time. A single
collective is too short for a clear result, so samples come in *windows* of `_WINDOW` consecutive
candidates.

Only candidates are counted, because a program may make the same few calls in every step: if all
calls were counted, windows could always, or never, meet the same calls of a step.

Invariant: all ranks select the same calls. The decisions depend only on the candidates, their
costs and the versions of the health. All of these are equal on all ranks. Other calls have no
influence, so a rank need not pass them to `BandwidthSamples.take`, except in the case described at
`BandwidthSamples.op`. For example, a rank does not pass a call that compiled code repeats without a
new plan. A call in two levels (`r2ccl.planning.two_level`) uses one collective number per chunk;
`take` is called only for the first number. If a rank passes a call to `take` but then does not make
the call, its next `take` has the same number and replaces the earlier one.
"""

from __future__ import annotations

from typing import NamedTuple


class SampleCost(NamedTuple):
    """Predicted time of a candidate with its fastest schedule, and the extra time of a sample.

    Both are in ns; `usual_ns` is above 0, `extra_ns` is at least 0.
    """

    usual_ns: int
    extra_ns: int


class _Count(NamedTuple):
    """Position in the sequence of candidates since the last change of health.

    Attributes
    ----------
    age : int
        Number of candidates.
    since_window : int or None
        Number of candidates since the last window began; None if no window has begun.
    saved_ns : int
        `_BUDGET` times the extra time, in ns, that samples may take now; negative if past samples
        took more time than allowed. It is 0 during the first `_SOON` candidates. Each later
        candidate adds its `usual_ns`.
    """

    age: int = 0
    since_window: int | None = None
    saved_ns: int = 0


class BandwidthSamples:
    """Selector of the calls of one communicator that run as samples.

    Samples are frequent soon after a change of the health, because the health may change back.
    Later, the extra time of samples is at most 1 % of the predicted time of the candidates, except
    that a new window begins at the latest after `_RAREST` candidates.

    Attributes
    ----------
    version : int
        Version of the health in the last `begin`; -1 before the first.
    op : int
        Argument `op` of the last `take`; -1 before the first. A call that is not a candidate
        must be passed to `take` only if it has this number: the earlier call with this number then
        no longer counts.
    """

    def __init__(self) -> None:
        self.version = -1
        #: Smallest distance of two windows, in candidates, from the start of one to the start of
        #: the next.
        self._distance = 0
        self.op = -1
        #: Counts before and after the call of the last `take`.
        self._before = self._after = _Count()

    def begin(self, version: int, *, is_slow: bool) -> None:
        """Start a new count: the next candidate counts as the first since the health changed.

        Parameters
        ----------
        version : int
            Version of the health.
        is_slow : bool
            True if a rail is slow. It may recover at any time, so windows are then more frequent.
        """
        self.version, self._distance = version, _DISTANCE_SLOW if is_slow else _DISTANCE
        self._before = self._after = _Count()

    def take(self, op: int, cost: SampleCost | None) -> bool:
        """Return whether a call is a sample, and count it.

        Parameters
        ----------
        op : int
            Number of the collective before the call. Only the last call with this number counts.
        cost : SampleCost or None
            None: the call is not a candidate.
        """
        if op != self.op:
            self.op, self._before = op, self._after
        self._after, is_sample = self._counted(cost)
        return is_sample

    def _counted(self, cost: SampleCost | None) -> tuple[_Count, bool]:
        """Return the count after a call with this cost, and whether the call is a sample."""
        if cost is None:
            return self._before, False
        age, since, saved_ns = self._before
        is_soon = age < _SOON
        saved_ns = 0 if is_soon else saved_ns + cost.usual_ns
        window_ns = _WINDOW * _BUDGET * cost.extra_ns
        if since is None or (
            since >= self._distance and (is_soon or saved_ns >= window_ns or since >= _RAREST)
        ):
            # Savings beyond a window would allow many windows in a row later. A window that begins
            # only because of `_RAREST` leaves no debt, which would delay all later ones as much.
            since, saved_ns = 0, 0 if is_soon else window_ns
        is_sample = since < _WINDOW
        if is_sample and not is_soon:
            saved_ns -= _BUDGET * cost.extra_ns
        return _Count(age + 1, since + 1, saved_ns), is_sample


#: Number of consecutive candidates in a window.
_WINDOW = 3
#: Smallest distance of windows while a rail is slow, and while none is. For the first `_SOON`
#: candidates after a change of health, windows have this distance. Later, samples cost at most one
#: part in `_BUDGET` of the time, but windows have at most the distance `_RAREST`.
_DISTANCE_SLOW, _DISTANCE = 16, 48
_SOON = 64
_BUDGET = 100
_RAREST = 4096

__all__ = ["BandwidthSamples", "SampleCost"]
