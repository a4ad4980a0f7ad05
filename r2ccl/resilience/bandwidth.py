"""Bandwidth of rails, measured from the traffic itself, and the shares of work that follow.

Theory of operation
-------------------
What a data loop sees for nothing is when a slice was handed to a rail and when it was confirmed.
From one slice alone no rate follows: its time has the latency in it, and the wait behind others.
While at least one slice is under way all the time, though, a slice's confirmation comes one
service time after the one before it. So a *train* counts from one confirmation to a later one::

    posted      1 2   3   4   5          6 7
    confirmed       1   2   3   4   5          6   7 ...
                    |---- train ----|          |---- next one

    rate = bytes confirmed after the first / time since the first

That is the delivery rate of Cheng, Cardwell et al. (draft-cheng-iccrg-delivery-rate-estimation-02)
and, at its core, the packet pair of Keshav (SIGCOMM 1991), with trains that begin at a confirmation
and end when the rail falls idle. So neither latency nor idle time, nor the caller's, nor a slower
rail's that the schedule waits for, is in any rate, and nothing has to be marked as limited by the
application. What is confirmed at one instant counts as one: confirmations that were held up and
come together (ack compression) neither begin nor end a train in their midst. Trains too short to
mean anything, as those of small operations are, count for nothing.

The estimate is the median, weighted by bytes, of the trains within the last `WINDOW_S` of busy
time. BBR takes the maximum of its samples (Cardwell et al., ACM Queue 14(5), 2016), many of which
fall short of the path's rate; here idle time is left out beforehand, and a maximum would be what
noise makes of it. One train that a stalled process spoiled is outvoted.

A rail that lost most of its rate gets less work in proportion, but always some: at a quarter of
the work it is as busy as the others, so that its trains show at once when it recovers. One that
carries too little to form trains is taken to be better with time (`Balance.rates`), until it gets
enough work to be measured again. What is measured is what a rail gives with the slices that links
keep under way, the same for all rails.

A *weight* is a rail's share of `r2ccl.resilience.health`, in sixteenths of its nominal rate. No
rail ever gives all of that, so the one that comes closest counts as whole.

Pure: times are passed in. Invariants: an idle rail's estimate does not change; a weight is at least
one, for what still carries anything is not down; equal arguments give equal shares on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec

from r2ccl.errors import InternalError, InvalidArgument
from r2ccl.resilience.health import WHOLE

#: Busy time of a rail that its estimate covers: a quarter of the rate is found within it.
WINDOW_S = 0.5
#: A weight that differs from the one in use is taken once it has done so for this long.
_SETTLE_S = 0.2
#: Time with traffic anywhere after which a rail without a train is taken to be better; each
#: further one doubles what it is taken for.
_FRESH_S = 2.0
#: A train is measured once it has this many slices and lasted this long: what one confirmation
#: is late by is then small beside it.
_NSLICES = 8
_TRAIN_S = 0.002
#: So that slow rails, with slices of hundreds of ms, are measured in time too.
_LONG_TRAIN_S = 0.1
_LONG_NSLICES = 2
#: A train that ended because the rail fell idle needs this much.
_SHORT_NSLICES = 3
#: Less than this is no train: a small operation's time is not the rail's.
_LEAST_NBYTES = 256 << 10
#: Trains kept.
_KEPT = 64


class _Train(msgspec.Struct, frozen=True, gc=False):
    """A measured train: ``end_s`` on the rail's busy clock, ``rate`` in bytes/s."""

    end_s: float
    nbytes: int
    rate: float


class Meter:
    """Measures one rail. Times that are read within one poll must be equal."""

    __slots__ = ("_began_s", "_busy_s", "_last_s", "_nbytes", "_nslices", "_trains", "under_way")

    def __init__(self) -> None:
        #: Slices handed to the rail and not confirmed.
        self.under_way = 0
        #: The train under way, if any: its first and last confirmation, and what came between.
        self._began_s: float | None = None
        self._last_s = 0.0
        self._nslices = self._nbytes = 0
        #: Total length of all trains so far: the rail's busy clock.
        self._busy_s = 0.0
        self._trains: deque[_Train] = deque(maxlen=_KEPT)

    def posted(self) -> None:
        """A slice was handed to the rail."""
        self.under_way += 1

    def confirmed(self, now: float, nbytes: int) -> bool:
        """A slice was confirmed; returns whether a train was measured by that.

        Raises
        ------
        InternalError
            None was under way.
        """
        if self.under_way == 0:
            raise InternalError("a rail confirmed a slice it was never given")
        self.under_way -= 1
        is_measured = False
        if self._began_s is None:
            self._begin(now)
        elif now > self._last_s:
            is_measured = self._is_whole() and self._measure()
            if is_measured:
                self._begin(self._last_s)
            self._add(now, nbytes)
        elif now > self._began_s:  # at the same instant as the one before it
            self._add(now, nbytes)
        if self.under_way == 0:
            is_enough = self._nslices >= _SHORT_NSLICES and self._nbytes >= _LEAST_NBYTES
            is_measured |= is_enough and self._measure()
            self._began_s = None
        return is_measured

    def dropped(self, nslices: int) -> None:
        """So many of those under way will not be confirmed: their path was fenced.

        Raises
        ------
        InternalError
            Fewer were under way.
        """
        if nslices > self.under_way:
            raise InternalError(f"a rail lost {nslices} slices of {self.under_way} under way")
        self.under_way -= nslices
        self._began_s = None

    def rate(self) -> float | None:
        """Estimate in bytes/s, as of the last train; None: nothing was measured yet."""
        if not self._trains:
            return None
        recent = [train for train in self._trains if train.end_s > self._busy_s - WINDOW_S]
        recent.sort(key=lambda train: train.rate)
        half = sum(train.nbytes for train in recent) / 2
        below = 0
        for train in recent:
            below += train.nbytes
            if below >= half:
                return train.rate
        return recent[-1].rate

    def _begin(self, at_s: float) -> None:
        self._began_s = self._last_s = at_s
        self._nslices = self._nbytes = 0

    def _add(self, now: float, nbytes: int) -> None:
        self._last_s = max(now, self._last_s)
        self._nslices += 1
        self._nbytes += nbytes

    def _is_whole(self) -> bool:
        assert self._began_s is not None
        elapsed = self._last_s - self._began_s
        is_full = self._nslices >= _NSLICES and elapsed >= _TRAIN_S
        is_long = self._nslices >= _LONG_NSLICES and elapsed >= _LONG_TRAIN_S
        return (is_full or is_long) and self._nbytes >= _LEAST_NBYTES

    def _measure(self) -> bool:
        """Record the train that is under way, if it took any time."""
        assert self._began_s is not None
        elapsed = self._last_s - self._began_s
        if elapsed <= 0:
            return False
        self._busy_s += elapsed
        self._trains.append(_Train(self._busy_s, self._nbytes, self._nbytes / elapsed))
        return True


class Balance:
    """The rails of one rank: what each gives, and the weights that follow.

    Parameters
    ----------
    rails : iterable of int
    nominal : mapping of int to float, optional
        What each rail should give, in any unit; left out: all the same.
    """

    def __init__(self, rails: Iterable[int], nominal: Mapping[int, float] | None = None) -> None:
        self._meters = {rail: Meter() for rail in rails}
        self._nominal = nominal or {}
        #: Weights in use.
        self.weights = dict.fromkeys(self._meters, WHOLE)
        #: Since when, in active time, other weights are proposed.
        self._proposed_s: float | None = None
        #: Time with traffic on any rail, until the rails last fell idle; since when they are busy.
        self._active_s = 0.0
        self._busy_since_s: float | None = None
        self._under_way = 0
        #: Active time at each rail's last train.
        self._measured_s = dict.fromkeys(self._meters, 0.0)

    def posted(self, rail: int, now: float) -> None:
        """A cleared slice was handed to `rail`.

        Eager ones wait for a peer that may not have called yet: they say nothing about a rail.
        """
        self._meters[rail].posted()
        if self._under_way == 0:
            self._busy_since_s = now
        self._under_way += 1

    def confirmed(self, rail: int, now: float, nbytes: int) -> None:
        """A slice of `rail` that was counted by `posted` was confirmed."""
        if self._meters[rail].confirmed(now, nbytes):
            self._measured_s[rail] = self.active_s(now)
        self._ended(1, now)

    def dropped(self, rail: int, now: float, nslices: int) -> None:
        """So many slices under way on `rail` will not be confirmed there."""
        self._meters[rail].dropped(nslices)
        self._ended(nslices, now)

    def active_s(self, now: float) -> float:
        """Time with traffic on any rail so far."""
        if self._busy_since_s is None:
            return self._active_s
        return self._active_s + max(0.0, now - self._busy_since_s)

    def rates(self, now: float) -> dict[int, float | None]:
        """Estimate every rail, in bytes/s; None: nothing is known of it.

        One that had no train for a while, with traffic elsewhere, is taken to be better the
        longer ago it was measured, until it counts as whole: only work can tell.
        """
        measured = {rail: meter.rate() for rail, meter in self._meters.items()}
        best = max(_relative(measured, self._nominal).values(), default=0.0)
        active_s = self.active_s(now)
        found: dict[int, float | None] = {}
        for rail, rate in measured.items():
            stale_s = active_s - self._measured_s[rail] - _FRESH_S
            if rate is not None and stale_s > 0:
                doublings = min(stale_s / _FRESH_S, 64.0)
                rate = min(best * self._nominal.get(rail, 1.0), rate * 2**doublings)
            found[rail] = rate
        return found

    def update(self, now: float) -> bool:
        """Bring the weights up to date; returns whether they changed. Call it now and then."""
        proposed = shares(self.rates(now), self.weights, self._nominal)
        if proposed == self.weights:
            self._proposed_s = None
            return False
        active_s = self.active_s(now)
        if self._proposed_s is None:
            self._proposed_s = active_s
        if active_s - self._proposed_s < _SETTLE_S:
            return False
        self.weights = proposed
        self._proposed_s = None
        return True

    def _ended(self, nslices: int, now: float) -> None:
        self._under_way -= nslices
        if self._under_way == 0:
            self._active_s = self.active_s(now)
            self._busy_since_s = None


def shares(
    rates: Mapping[int, float | None],
    previous: Mapping[int, int] | None = None,
    nominal: Mapping[int, float] | None = None,
) -> dict[int, int]:
    """Quantise rates: sixteenths of nominal, as the rail that comes closest to it counts 16.

    A previous weight is kept while the rate is within 3/16 of it, or within 3/4 of a step: noise
    does not flip weights. One that equals the best, to half a step, is whole again. Where nothing
    is known the previous weight stays, or a rail gets the full one and will be measured.

    Parameters
    ----------
    rates : mapping of int to float or None
        Bytes/s of every rail that may be used.
    previous : mapping of int to int, optional
        Weights in use.
    nominal : mapping of int to float, optional
        What each rail should give, in any unit; left out: all the same.
    """
    old = previous or {}
    given = _relative(rates, nominal or {})
    best = max(given.values(), default=0.0)
    weights = {}
    for rail in rates:
        weight = old.get(rail, WHOLE)
        if rail in given and best > 0:
            wanted = WHOLE * given[rail] / best
            slack = max(0.75, 3 * weight / WHOLE)
            is_as_good = wanted >= WHOLE - 0.5
            if rail not in old or is_as_good or abs(wanted - weight) > slack:
                weight = max(1, round(wanted))
                # One less than whole would hardly be left again, and differs as noise does.
                weight = WHOLE if weight == WHOLE - 1 else weight
        weights[rail] = weight
    return weights


def _relative(rates: Mapping[int, float | None], nominal: Mapping[int, float]) -> dict[int, float]:
    """Rates that are known, as parts of what the rail should give."""
    return {rail: rate / nominal.get(rail, 1.0) for rail, rate in rates.items() if rate is not None}


def split(total: int, weights: Sequence[int], granularity: int = 1) -> list[int]:
    """Share out `total` in proportion to `weights`, exactly, by largest remainder.

    Parameters
    ----------
    total : int
        Channels, or elements.
    weights : sequence of int
        A weight of 0 gets nothing.
    granularity : int
        Shares are multiples of it, but for what `total` has beyond a multiple: that goes to the
        first of the heaviest.

    Returns
    -------
    list of int
        As many as there are weights; their sum is `total`.

    Raises
    ------
    InvalidArgument
        A negative number, no weight above 0, or a granularity below 1.
    """
    if total < 0 or granularity < 1 or any(weight < 0 for weight in weights) or not any(weights):
        raise InvalidArgument(
            f"split({total}, {list(weights)}, {granularity}): total and weights must not be "
            "negative, one weight must be above 0, granularity at least 1"
        )
    units, rest = divmod(total, granularity)
    whole = sum(weights)
    exact = [Fraction(units * weight, whole) for weight in weights]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: units - sum(found)]:
        found[i] += 1
    result = [share * granularity for share in found]
    result[max(range(len(weights)), key=lambda i: weights[i])] += rest
    return result


__all__ = ["WINDOW_S", "Balance", "Meter", "shares", "split"]
