"""Bandwidth samples: which calls of a communicator run as rings or chains to measure its rails.

The traffic of a port shows its bandwidth only if one peer sends to it, as in rings and chains. A
call that can run as a ring or chain, but whose fastest schedule is another one, is a *candidate*.
If it runs as a ring or chain all the same, which takes longer, it is a *sample*. One collective
alone is too short for a clear result, so samples come in *windows* of `_WINDOW` consecutive
candidates.

Only candidates are counted, because a program may make the same few calls in every step: if all
calls were counted, windows could always, or never, meet the same calls of a step.

Invariant: all ranks select the same calls. The decisions depend only on the candidates, their
costs and the versions of the health, which are equal on all ranks, and not on other calls. A rank
may therefore leave out `BandwidthSamples.take` for other calls, with the exception described at
`BandwidthSamples.op`. It does so if compiled code repeats a call without a new plan. A call in two
levels uses one collective number per chunk; `take` is called for the first of them only. If a rank
passes a call to `take` but then does not make the call, its next `take` has the same number and
replaces the earlier one.
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
        took more than they may. After the first `_SOON` candidates, each one raises it by its
        `usual_ns`; before, it is 0.
    """

    age: int = 0
    since_window: int | None = None
    saved_ns: int = 0


class BandwidthSamples:
    """Selector of the calls of one communicator that run as samples.

    Samples are frequent soon after the health changed, because it may change back. Later they cost
    at most 1 % of the predicted time of the candidates, but are not rarer than `_RAREST` allows.

    Attributes
    ----------
    version : int
        Version of the health in the last `begin`; -1 before.
    op : int
        Argument `op` of the last `take`; -1 before. A call that is not a candidate changes nothing,
        and needs no `take`, unless its `op` is this number.
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
        """Start a new count; the next call is the first candidate since the health changed.

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
