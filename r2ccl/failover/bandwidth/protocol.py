"""Comparison of the bandwidths of a rank's rails, and the weights derived from it.

Theory of operation
-------------------
`r2ccl.failover.bandwidth.trains` measures the rate of one rail during *trains*, times in which the
rail always has slices in flight. Rates measured at different times cannot be compared: a process
that stalls, at either end, slows all rails at that time, and its backlog looks like a burst
afterwards. The rate of a rail is therefore compared only with the rates of other rails in the same
short interval, called a *spell*. A rail is *busy* during its trains. The *reference* of a spell is
the median rate of the rails that have the highest weight and were busy in the spell. An example,
with rates in MB/s::

    spell       0     1     2     3     4
    rail 0     196   198    51   285
    rail 1     199   195    53   281
    rail 2      49    51    13    70    50

Here the process stalled in spell 2 and caught up in spell 3. In spells 0 to 3, rail 2 has a quarter
of the rate of rails 0 and 1. Spell 4 has no reference, because only rail 2 was busy.

In each spell, the rate of a rail is divided by the reference. The estimate of a rail is the mean of
these quotients, weighted by busy time, over the latest spells that contain `_COMPARED_S` of its
busy time. A spell counts only if more than half of the rails with the highest weight were busy:
when the fast rails have finished their part of a long operation, a slow rail would otherwise be
compared with other slow rails.

A weight changes only after the estimate has implied a different weight for `_SETTLE_S` of active
time (time with a slice in flight on any rail) without interruption. A slow rail gets work in
proportion to its rate, and at least a little. With a quarter of the work, a rail with a quarter of
the rate is as busy as the others, so its trains show at once when the rail recovers. If a rail
carries too little traffic to form trains, its estimate rises with time (`Balance.estimates`), until
the rail gets enough work to be measured again. Links keep the same number of slices in flight on
all rails, so this number does not affect the comparison.

A *weight* is the share of a rail in `r2ccl.failover.health.table`, in sixteenths of the rate of the
best rail. Rails of unequal nominal rates therefore get unequal weights too. If all rails of a rank
are slow, the comparison cannot show it. For this case the nominal rate can be set
(`Balance.set_nominal_rate`): the best rails keep weight 16 only if their *level* is at least
`_WHOLE_LEVEL`. The level is the upper quartile, over the last `_LEVEL_NSPELLS` spells with a
reference, of the reference divided by the nominal rate. The median would be too low: a process that
stalls lowers the rate in many spells, and raises it in only a few spells, when it catches up.

Times are passed in as clock readings. Invariants: the estimate of a rail does not change while all
rails are idle; a weight is at least 1, because share 0 means down; equal arguments of `shares` give
equal results on every rank.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from r2ccl.failover.bandwidth.trains import Meter, Train
from r2ccl.failover.health.table import WHOLE

#: Length of a spell, in seconds of active time.
_SPELL_S = 0.05
#: Busy time of a rail that its estimate covers, and the age, in active time, at which spells are
#: dropped. That age is long, because a rail at a hundredth of its rate takes seconds for one slice.
_COMPARED_S = 0.3
_MEMORY_S = 10.0
#: Active time for which another weight must be proposed before it replaces the one in use.
_SETTLE_S = 0.5
#: A level is the quantile `_LEVEL_QUANTILE` of the references of `_LEVEL_NSPELLS` spells, divided
#: by the nominal rate. A level of at least `_WHOLE_LEVEL` counts as the full rate.
_LEVEL_NSPELLS = 16
_LEVEL_QUANTILE = 0.75
_WHOLE_LEVEL = 0.7
#: Active time without a train after which the estimate of a rail may rise. It then doubles with
#: each further period of this length; see `Balance.estimates`.
_FRESH_S = 2.0


class _Spell:
    """Traffic in one short interval: per rail, the bytes confirmed and the busy time in seconds."""

    __slots__ = ("busy_s", "nbytes", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.nbytes: dict[int, float] = {}
        self.busy_s: dict[int, float] = {}

    def add(self, rail: int, nbytes: float, busy_s: float) -> None:
        self.nbytes[rail] = self.nbytes.get(rail, 0.0) + nbytes
        self.busy_s[rail] = self.busy_s.get(rail, 0.0) + busy_s

    def rate(self, rail: int) -> float:
        return self.nbytes[rail] / self.busy_s[rail]


class Balance:
    """Measured bandwidths of the rails of one rank, and the weights derived from them.

    *Active time* is the time during which at least one slice was in flight on any rail.

    Parameters
    ----------
    rails : iterable of int
        Rails to measure. Slices on other rails are ignored.

    Notes
    -----
    ``now`` is a clock reading in seconds, in all methods.
    """

    def __init__(self, rails: Iterable[int]) -> None:
        self._meters = {rail: Meter() for rail in rails}
        #: Nominal rate of each rail in bytes/s; 0 if unknown.
        self._nominal = 0
        #: Rank that the last recorded slice on each rail was sent to; -1 before the first one.
        self.toward = dict.fromkeys(self._meters, -1)
        #: Weight in use of each rail, 1 to `WHOLE`.
        self.weights = dict.fromkeys(self._meters, WHOLE)
        #: Active time when another weight was first proposed, per rail with such a proposal.
        self._proposed_s: dict[int, float] = {}
        #: Active time until all rails last became idle, and the clock reading at which the first
        #: rail became busy after that.
        self._active_s = 0.0
        self._busy_since_s: float | None = None
        self._under_way = 0
        self._spells: deque[_Spell] = deque()
        #: Active time at the last train of each rail, and the last estimate of each rail.
        self._measured_s = dict.fromkeys(self._meters, 0.0)
        self._last_known: dict[int, float] = {}
        #: Active time of the last update. -1 if there was none, if it changed a weight, or if the
        #: nominal rate was set since: the next update must then compute the weights.
        self._updated_s = -1.0

    def set_nominal_rate(self, rate: int) -> None:
        """Set the nominal rate, the same for all rails, in bytes/s; 0 means unknown."""
        self._nominal = rate
        self._updated_s = -1.0

    def posted(self, rail: int, peer: int, now: float) -> None:
        """Record that a cleared slice for `peer` was posted to `rail`.

        Eager slices must not be recorded: they may wait for a peer that has not called yet, so
        their times say nothing about the rail.
        """
        if rail not in self._meters:
            return
        self._meters[rail].posted()
        self.toward[rail] = peer
        if self._under_way == 0:
            self._busy_since_s = now
        self._under_way += 1

    def confirmed(self, rail: int, now: float, nbytes: int) -> None:
        """Record that a slice of `nbytes`, which `posted` has recorded, was confirmed on `rail`."""
        if rail not in self._meters:
            return
        train = self._meters[rail].confirmed(now, nbytes)
        if train is not None:
            active_s = self.active_s(now)
            self._measured_s[rail] = active_s
            self._record(rail, train, active_s)
        self._ended(1, now)

    def dropped(self, rail: int, now: float, nslices: int) -> None:
        """Record that `nslices` slices in flight on `rail` are lost: their path was fenced."""
        if rail not in self._meters:
            return
        self._meters[rail].dropped(nslices)
        self._ended(nslices, now)

    def active_s(self, now: float) -> float:
        """Return the active time (with a slice in flight on any rail) so far, in seconds."""
        if self._busy_since_s is None:
            return self._active_s
        return self._active_s + max(0.0, now - self._busy_since_s)

    def rates(self) -> dict[int, float]:
        """Return the rate of each rail in bytes/s over its last `_COMPARED_S` of busy time.

        Rails without a train in the last `_MEMORY_S` of active time are left out. The result is for
        display only: the rates are measured at different times, so they cannot be compared.
        """
        found = {}
        for rail in self._meters:
            nbytes = busy_s = 0.0
            for spell in reversed(self._spells):
                if rail in spell.busy_s and busy_s < _COMPARED_S:
                    nbytes += spell.nbytes[rail]
                    busy_s += spell.busy_s[rail]
            if busy_s:
                found[rail] = nbytes / busy_s
        return found

    def estimates(self, now: float) -> dict[int, float | None]:
        """Return the rate of each rail relative to the median rate of the rails of highest weight.

        The rate is computed from the comparisons in the last `_MEMORY_S` of active time. If there
        are none, and the last train of the rail is more than `_FRESH_S` of active time ago, the
        result is based on the last estimate, which doubles with every further `_FRESH_S`, up to the
        estimate of the best rail. The rail thus gets work again, and can be measured. The value is
        None for a rail that was never compared, and for a rail that has no comparison in the last
        `_MEMORY_S` but has a train in the last `_FRESH_S`.
        """
        active_s = self.active_s(now)
        self._forget(active_s)
        found = self._compare()
        self._last_known |= found
        best = max(found.values(), default=1.0)
        for rail, last in self._last_known.items():
            stale_s = active_s - self._measured_s[rail] - _FRESH_S
            if rail not in found and stale_s > 0:
                found[rail] = min(best, last * 2 ** min(stale_s / _FRESH_S, 64.0))
        return {rail: found.get(rail) for rail in self._meters}

    def level(self) -> float:
        """Return the rate of the rails of highest weight, as a fraction of the nominal rate.

        Return 1.0 if the fraction is at least `_WHOLE_LEVEL`, the nominal rate is unknown, or there
        are too few measurements.
        """
        if not self._nominal:
            return 1.0
        found, best = [], self._best()
        for spell in reversed(self._spells):
            whole = _whole(spell, best)
            if whole:
                found.append(statistics.median(whole) / self._nominal)
                if len(found) == _LEVEL_NSPELLS:
                    level = sorted(found)[int(_LEVEL_QUANTILE * _LEVEL_NSPELLS)]
                    return 1.0 if level >= _WHOLE_LEVEL else level
        return 1.0

    def update(self, now: float) -> bool:
        """Update `weights` from the measurements; return whether a weight changed.

        Call it periodically. The weight of a rail changes only after every call during `_SETTLE_S`
        of active time has found a weight that differs from the current weight.
        """
        active_s = self.active_s(now)
        if active_s == self._updated_s:
            return False  # no new measurement
        estimates, level = self.estimates(now), self.level()
        rates = {rail: each and each * level for rail, each in estimates.items()}
        proposed = shares(rates, self.weights, nominal=1.0 if level < 1.0 else None)
        settled = {}
        for rail, weight in proposed.items():
            if weight == self.weights[rail]:
                self._proposed_s.pop(rail, None)
            elif active_s - self._proposed_s.setdefault(rail, active_s) >= _SETTLE_S:
                del self._proposed_s[rail]
                settled[rail] = weight
        self.weights = self.weights | settled
        self._updated_s = -1.0 if settled else active_s
        return bool(settled)

    def _record(self, rail: int, train: Train, active_s: float) -> None:
        """Add the bytes and busy time of a train to the spells that it overlaps.

        The train is assumed to end at `active_s`; each spell gets a share in proportion to the time
        of the train that falls into the spell.
        """
        begun_s = active_s - train.length_s
        first = max(int(begun_s / _SPELL_S), int((active_s - _MEMORY_S) / _SPELL_S), 0)
        for number in range(first, int(active_s / _SPELL_S) + 1):
            end_s = min(active_s, (number + 1) * _SPELL_S)
            busy_s = end_s - max(begun_s, number * _SPELL_S)
            if busy_s > 0:
                self._spell(number).add(rail, train.nbytes * busy_s / train.length_s, busy_s)

    def _spell(self, number: int) -> _Spell:
        spells = self._spells
        while not spells or spells[-1].number < number:
            spells.append(_Spell(spells[-1].number + 1 if spells else number))
        while spells[0].number > number:
            spells.appendleft(_Spell(spells[0].number - 1))
        return spells[number - spells[0].number]

    def _forget(self, active_s: float) -> None:
        oldest = int((active_s - _MEMORY_S) / _SPELL_S)
        while self._spells and self._spells[0].number < oldest:
            self._spells.popleft()

    def _compare(self) -> dict[int, float]:
        total = dict.fromkeys(self._meters, 0.0)
        busy_s = dict.fromkeys(self._meters, 0.0)
        best = self._best()
        for spell in reversed(self._spells):
            whole = _whole(spell, best)
            if not whole:
                continue
            standard = statistics.median(whole)
            for rail, length_s in spell.busy_s.items():
                if busy_s[rail] < _COMPARED_S:
                    total[rail] += length_s * spell.rate(rail) / standard
                    busy_s[rail] += length_s
            if min(busy_s.values()) >= _COMPARED_S:
                break
        return {rail: total[rail] / length_s for rail, length_s in busy_s.items() if length_s}

    def _best(self) -> set[int]:
        """Return the rails of highest weight."""
        highest = max(self.weights.values(), default=WHOLE)
        return {rail for rail, weight in self.weights.items() if weight == highest}

    def _ended(self, nslices: int, now: float) -> None:
        self._under_way -= nslices
        if self._under_way == 0:
            self._active_s = self.active_s(now)
            self._busy_since_s = None


def _whole(spell: _Spell, best: set[int]) -> list[float]:
    """Return the rates of the rails in `best` that were busy in `spell`.

    The list is empty unless more than half of these rails were busy.
    """
    rails = [rail for rail in spell.busy_s if rail in best]
    return [spell.rate(rail) for rail in rails] if len(rails) > len(best) / 2 else []


def shares(
    rates: Mapping[int, float | None],
    previous: Mapping[int, int] | None = None,
    nominal: float | None = None,
) -> dict[int, int]:
    """Round rates to weights, in sixteenths of a reference.

    The reference is `nominal` or, by default, the best rate.

    A new weight is 1 to 14, or 16. A previous weight is kept while the rate differs from it by at
    most 3/16 of the weight or 1/16 of the reference, whichever is larger, so that noise does not
    change weights. A rail whose rate is at least 31/32 of the reference always gets weight 16.
    A rail of unknown rate keeps its previous weight. Without a previous weight it gets weight 16,
    so that it gets work and can be measured.

    Parameters
    ----------
    rates : mapping of int to float or None
        Rate of every rail that may be used, all in the same unit; None if not known.
    previous : mapping of int to int, optional
        Weights in use.
    nominal : float, optional
        Rate that counts as weight 16, in the unit of `rates`; default: the best rate.

    Returns
    -------
    dict of int to int
        Weight of each rail.
    """
    old = previous or {}
    given = {rail: rate for rail, rate in rates.items() if rate is not None}
    best = max(given.values(), default=0.0) if nominal is None else nominal
    weights = {}
    for rail in rates:
        weight = old.get(rail, WHOLE)
        if rail in given and best > 0:
            wanted = WHOLE * given[rail] / best
            slack = max(1.0, 3 * weight / WHOLE)
            is_as_good = wanted >= WHOLE - 0.5
            if rail not in old or is_as_good or abs(wanted - weight) > slack:
                weight = min(WHOLE, max(1, round(wanted)))
                # Weight 15 differs from 16 by no more than noise, and a healthy rail measured just
                # below 15.5 would keep it.
                weight = WHOLE if weight == WHOLE - 1 else weight
        weights[rail] = weight
    return weights


__all__ = ["Balance", "shares"]
