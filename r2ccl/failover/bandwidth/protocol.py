"""Bandwidth of rails, compared by their traffic, and the shares of work that follow.

Theory of operation
-------------------
`r2ccl.failover.bandwidth.trains` measures what a rail carries at one time. What counts is how the
rails compare, and a time is hard on all of them or on none: a process that stalls, at either end,
slows whatever is under way, and lets the backlog look like a burst afterwards. So rails are
compared within short spells of time, each with the rails that count as whole and were busy in the
same spell::

    spell       0     1     2     3     4
    rail 0     196   198    51   285         the process stalled in 2 and caught up in 3:
    rail 1     199   195    53               each spell says that they are equal
    rail 2      49    51    13    70    50   a quarter; nothing to compare 4 with

A rail's estimate is the mean of its last comparisons, of `_COMPARED_S` in all that it was busy. A
spell in which not most of the whole rails were busy says nothing: when a long operation's fast
rails are done, the slow ones alone would look as good as any.

A weight changes only if it should for `_SETTLE_S` on end. A rail that lost most of its rate gets
less work in proportion, but always some: at a quarter of the work it is as busy as the others, so
that its trains show at once when it recovers. One that carries too little to form trains is taken
to be better with time (`Balance.estimates`), until it gets enough work to be measured again. What
is measured is what a rail gives with the slices that links keep under way, the same for all rails.

A *weight* is a rail's share of `r2ccl.failover.health.table`, in sixteenths of what the best rail
gives: rails that were made unequal are told apart like those that became so. Where all rails of a
rank are slow, none of them shows it. Once the network's rate is known (`set_nominal_rate`), those
that count as whole do so only if their median is most of that rate: their *level* is what they gave
in the better spells, as a process that stalls makes some of them worse and few better.

Pure: times are passed in. Invariants: an idle rail's estimate does not change; a weight is at least
one, for what still carries anything is not down; equal arguments give equal shares on every rank.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from r2ccl.failover.bandwidth.trains import Meter, Train
from r2ccl.failover.health.table import WHOLE

#: Length of a spell.
_SPELL_S = 0.05
#: Busy time of a rail that its estimate covers, and how much time with traffic that may take: a
#: rail at a hundredth of its rate carries a slice in seconds.
_COMPARED_S = 0.3
_MEMORY_S = 10.0
#: A weight that differs from the one in use is taken once it has done so for this long.
_SETTLE_S = 0.5
#: Spells that a level takes, which of them counts, and from what part of the network's rate on
#: rails count as whole.
_LEVEL_NSPELLS = 16
_LEVEL_QUANTILE = 0.75
_WHOLE_LEVEL = 0.7
#: Time with traffic anywhere after which a rail without a train is taken to be better; each
#: further one doubles what it is taken for.
_FRESH_S = 2.0


class _Spell:
    """What each rail carried in a short time: bytes, and how long it was busy with them."""

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
    """The rails of one rank: how they compare, and the weights that follow.

    Parameters
    ----------
    rails : iterable of int
        What is reported of others counts for nothing.
    """

    def __init__(self, rails: Iterable[int]) -> None:
        self._meters = {rail: Meter() for rail in rails}
        #: Bytes/s that a whole rail carries, 0: not known.
        self._nominal = 0
        #: Rank that the last slice on a rail went to.
        self.toward = dict.fromkeys(self._meters, -1)
        #: Weights in use.
        self.weights = dict.fromkeys(self._meters, WHOLE)
        #: Since when, in active time, another weight of a rail is proposed.
        self._proposed_s: dict[int, float] = {}
        #: Time with traffic on any rail, until the rails last fell idle; since when they are busy.
        self._active_s = 0.0
        self._busy_since_s: float | None = None
        self._under_way = 0
        self._spells: deque[_Spell] = deque()
        #: Active time at each rail's last train, and its last estimate.
        self._measured_s = dict.fromkeys(self._meters, 0.0)
        self._last_known: dict[int, float] = {}

    def set_nominal_rate(self, rate: int) -> None:
        """Set the rate of a whole rail, in bytes/s."""
        self._nominal = rate

    def posted(self, rail: int, peer: int, now: float) -> None:
        """A cleared slice for `peer` was handed to `rail`.

        Eager ones wait for a peer that may not have called yet: they say nothing about a rail.
        """
        if rail not in self._meters:
            return
        self._meters[rail].posted()
        self.toward[rail] = peer
        if self._under_way == 0:
            self._busy_since_s = now
        self._under_way += 1

    def confirmed(self, rail: int, now: float, nbytes: int) -> None:
        """A slice of `rail` that was counted by `posted` was confirmed."""
        if rail not in self._meters:
            return
        train = self._meters[rail].confirmed(now, nbytes)
        if train is not None:
            active_s = self.active_s(now)
            self._measured_s[rail] = active_s
            self._record(rail, train, active_s)
        self._ended(1, now)

    def dropped(self, rail: int, now: float, nslices: int) -> None:
        """So many slices under way on `rail` will not be confirmed there."""
        if rail not in self._meters:
            return
        self._meters[rail].dropped(nslices)
        self._ended(nslices, now)

    def active_s(self, now: float) -> float:
        """Time with traffic on any rail so far."""
        if self._busy_since_s is None:
            return self._active_s
        return self._active_s + max(0.0, now - self._busy_since_s)

    def rates(self) -> dict[int, float]:
        """Return the last rates of the rails that were measured, in bytes/s; for people."""
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
        """Compare every rail with those that count as whole: 1.0 is as good; None: not known.

        One that had no train for a while, with traffic elsewhere, is taken to be better the
        longer ago it was measured, until it counts as whole: only work can tell.
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
        """Return the rate of the whole rails over the nominal one; 1.0 from `_WHOLE_LEVEL` on."""
        if not self._nominal:
            return 1.0
        found = []
        for spell in reversed(self._spells):
            whole = self._whole(spell)
            if whole:
                found.append(statistics.median(whole) / self._nominal)
                if len(found) == _LEVEL_NSPELLS:
                    level = sorted(found)[int(_LEVEL_QUANTILE * _LEVEL_NSPELLS)]
                    return 1.0 if level >= _WHOLE_LEVEL else level
        return 1.0

    def update(self, now: float) -> bool:
        """Bring the weights up to date; returns whether they changed. Call it now and then."""
        estimates, level = self.estimates(now), self.level()
        rates = {rail: each and each * level for rail, each in estimates.items()}
        proposed = shares(rates, self.weights, nominal=1.0 if level < 1.0 else None)
        active_s = self.active_s(now)
        settled = {}
        for rail, weight in proposed.items():
            if weight == self.weights[rail]:
                self._proposed_s.pop(rail, None)
            elif active_s - self._proposed_s.setdefault(rail, active_s) >= _SETTLE_S:
                del self._proposed_s[rail]
                settled[rail] = weight
        self.weights = self.weights | settled
        return bool(settled)

    def _record(self, rail: int, train: Train, active_s: float) -> None:
        """Share a train out among the spells it lasted through."""
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
        for spell in reversed(self._spells):
            whole = self._whole(spell)
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

    def _whole(self, spell: _Spell) -> list[float]:
        """Return the rates of the rails that count as whole, if most were busy in this spell."""
        highest = max(self.weights.values())
        most = sum(weight == highest for weight in self.weights.values()) / 2
        whole = [spell.rate(rail) for rail in spell.busy_s if self.weights[rail] == highest]
        return whole if len(whole) > most else []

    def _ended(self, nslices: int, now: float) -> None:
        self._under_way -= nslices
        if self._under_way == 0:
            self._active_s = self.active_s(now)
            self._busy_since_s = None


def shares(
    rates: Mapping[int, float | None],
    previous: Mapping[int, int] | None = None,
    nominal: float | None = None,
) -> dict[int, int]:
    """Quantise rates: the best rail counts 16, or what it is of `nominal`, and never more.

    A previous weight is kept while the rate is within 3/16 of it, or within one step: noise
    does not flip weights. One that equals the best, to half a step, is whole again. Where nothing
    is known the previous weight stays, or a rail gets the full one and will be measured.

    Parameters
    ----------
    rates : mapping of int to float or None
        What every rail that may be used gives of what it should, in any unit.
    previous : mapping of int to int, optional
        Weights in use.
    nominal : float, optional
        What a whole rail gives.
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
                # One less than whole would hardly be left again, and differs as noise does.
                weight = WHOLE if weight == WHOLE - 1 else weight
        weights[rail] = weight
    return weights


__all__ = ["Balance", "shares"]
