"""Quarantine: when a path that failed is probed, and when it may carry work again.

Theory of operation
-------------------
A path out of use is probed for ever. Silence doubles the pause between probes up to a cap; an
answer, or a carrier that came up, makes it short again; the latter also says that the path had been
down, and for a while silence lengthens nothing. It may return after `Policy.nprobes` good
probes in a row, and once it has been good for its *hold* without a break.

The hold grows with *strikes*: each failure in use adds one, and time in use without failure halves
what there is every `Policy.half_life_s`::

    hold = hold_unit * (2**(strikes - 1) - 1), at most hold_cap

So the first failure after a long healthy time costs nothing but the probes; one unit, three,
seven, fifteen follow for a path that fails as soon as it is back. A path that goes down while in
quarantine gets no strike, for nothing moved; it only has to be good for the whole hold again. A
path whose good times are shorter than its hold stays away until they are not. This is route flap
damping (RFC 2439), with what its users learned (RFC 7196): only failures of this very path, while
it carried work, count.

Why these values: three answers 0.1 s apart keep out a link that bounces as it comes up, and cost
0.2 s after the first; a cap of 1 s bounds what a restored path without a carrier event of its own
(the far NIC, the switch) waits to be noticed, at one probe per second and path. A unit of 1 s makes
of a second failure in a row hardly more than of bad luck, and of a fifth a quarter of a minute. The
hold's cap leaves a path that is bad for days 12 returns an hour, and the half-life lets it forget
all that within ten healthy minutes.

Pure: the time is passed in. Invariant: a path is never due and in use at once, and what is known
of it is forgotten by healthy time alone, never by a carrier event.
"""

from __future__ import annotations

import math

import msgspec


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How patient failback is; times in seconds.

    Attributes
    ----------
    nprobes : int
        Good probes in a row (K).
    spacing_s : float
        Between good probes, and after the first that failed (W).
    cap_s : float
        Longest pause between probes.
    hold_unit_s, hold_cap_s : float
        See the theory of operation.
    half_life_s : float
        Healthy time in use that halves the strikes.
    """

    nprobes: int = 3
    spacing_s: float = 0.1
    cap_s: float = 1.0
    hold_unit_s: float = 1.0
    hold_cap_s: float = 300.0
    half_life_s: float = 60.0


DEFAULT = Policy()


class Quarantine:
    """Failback of one path, or of one rail. In use from the start.

    Parameters
    ----------
    policy : Policy
    now : float
        Reading of the clock, as all others.
    """

    __slots__ = (
        "_asked", "_good_since_s", "_keen_until_s", "_last_good_s", "_next_s", "_ngood", "_pause_s",
        "_policy", "_returned_s", "_strikes", "is_in_use",
    )  # fmt: skip

    def __init__(self, now: float, policy: Policy = DEFAULT) -> None:
        self.is_in_use = True
        self._policy = policy
        self._returned_s = now
        self._strikes = 0.0
        self._pause_s = policy.spacing_s
        #: When the next probe is due, and whether one is under way.
        self._next_s = now
        self._asked = False
        self._ngood = 0
        self._good_since_s = self._last_good_s = now
        #: Until then silence does not lengthen the pause.
        self._keen_until_s = now

    @property
    def next_s(self) -> float:
        """When `due` will be true, unless something happens; infinite while that is awaited."""
        return math.inf if self.is_in_use or self._asked else self._next_s

    @property
    def hold_s(self) -> float:
        """How long the path has to be good without a break."""
        return _hold_s(self._policy, self._strikes)

    def failed(self, now: float) -> None:
        """Take it out of use; a path that is already counts as `bad`."""
        if not self.is_in_use:
            self.bad(now)
            return
        policy = self._policy
        kept = 0.5 ** ((now - self._returned_s) / policy.half_life_s)
        # More strikes than the cap has room for would take longer to forget than to explain.
        self._strikes = min(self._strikes * kept + 1, _most_strikes(policy))
        self.is_in_use = False
        self._asked = False
        self._ngood = 0
        self._next_s = now + policy.spacing_s

    def carrier_up(self, now: float) -> None:
        """A port of the path came up: probe at once, and keep at it. Nothing is forgiven.

        So it had been down, whether or not a probe fell into that time.
        """
        self._ngood = 0
        self.hurry(now)

    def hurry(self, now: float) -> None:
        """Probe at once, and keep at it for a while."""
        self._next_s = now
        self._pause_s = self._policy.spacing_s
        self._keen_until_s = now + _KEEN_NCAPS * self._policy.cap_s

    def due(self, now: float) -> bool:
        """Whether to probe now; say so with `asked`."""
        return now >= self.next_s

    def asked(self) -> None:
        """A probe is under way: `good`, `bad` or `unasked` follows."""
        self._asked = True

    def good(self, now: float) -> None:
        """A probe was answered, or the path was joined."""
        if self.is_in_use:
            return
        policy = self._policy
        self._asked = False
        self._ngood += 1
        self._last_good_s = now
        self._pause_s = policy.spacing_s
        if self._ngood == 1:
            self._good_since_s = now
        if self._ngood < policy.nprobes:
            self._next_s = now + policy.spacing_s
        else:
            # Seldom while it waits for the end of its hold, and once when that has come.
            end_s = max(self._good_since_s + self.hold_s, now + policy.spacing_s)
            self._next_s = min(now + policy.cap_s, end_s)

    def bad(self, now: float) -> None:
        """A probe was not answered, or a port of the path went down."""
        if self.is_in_use:
            return
        self._asked = False
        self._ngood = 0
        self._put_off(now)

    def unasked(self, now: float) -> None:
        """A probe could not be made: it proves nothing, and is made again after the pause."""
        if self.is_in_use:
            return
        self._asked = False
        self._put_off(now)

    def may_return(self, now: float) -> bool:
        """Whether it may carry work again; say that it does with `returned`."""
        policy = self._policy
        # What was good long ago, while nobody had time to probe, has to be seen once more.
        is_fresh = now - self._last_good_s <= 2 * policy.cap_s
        is_served = now >= self._good_since_s + self.hold_s
        return not self.is_in_use and self._ngood >= policy.nprobes and is_fresh and is_served

    def returned(self, now: float) -> None:
        """It carries work again; before its time, if there is no other way to the peer."""
        if self.is_in_use:
            return
        self.is_in_use = True
        self._returned_s = now

    def _put_off(self, now: float) -> None:
        self._next_s = now + self._pause_s
        if now >= self._keen_until_s:
            self._pause_s = min(2 * self._pause_s, self._policy.cap_s)


def _hold_s(policy: Policy, strikes: float) -> float:
    grown = policy.hold_unit_s * (2 ** max(0.0, strikes - 1) - 1)
    return min(grown, policy.hold_cap_s)


#: How long a port that came up is probed without a pause that grows, in caps: a kernel that has
#: asked for the peer's link-layer address in vain asks again only after a second.
_KEEN_NCAPS = 2.0


def _most_strikes(policy: Policy) -> float:
    return 1 + math.log2(1 + policy.hold_cap_s / policy.hold_unit_s)


__all__ = ["DEFAULT", "Policy", "Quarantine"]
