"""Quarantine of a failed path: when the path is probed, and when it may carry traffic again.

Theory of operation
-------------------
A path out of use is probed until it returns. A probe that is answered is *good*. The pause after a
probe without an answer doubles with each such probe, up to a cap. The pause is reset when a probe
is answered and when the path goes out of use. When a port of the path comes up, the pause is also
reset and does not grow for a while; the count of good probes is reset too, because the path had
been down. The path may return after `Policy.nprobes` good probes in a row, once all probes have
been answered for the time of its *hold*.

The hold grows with the number of *strikes*. Each failure while in use adds one strike; time in use
without failure halves the number every `Policy.half_life_s`::

    hold = hold_unit * (2**(strikes - 1) - 1), at least 0 and at most hold_cap

The first failure after a long healthy time therefore costs only the probes. A path that fails
immediately after each return is held for 1, 3, 7 and 15 units after its second to fifth failure. A
path that goes down in quarantine gets no strike, because it carried no traffic; its hold starts
again. A path whose rail is excluded gets no strike either, because it did not fail. A path whose
good periods are shorter than its hold stays in quarantine. This is route flap damping (RFC 2439)
with the correction of RFC 7196: only failures of the path itself count, and only while it carried
traffic.

Why these values: three answers 0.1 s apart exclude a link that flaps while coming up, and cost
0.2 s after the first answer. The cap of 1 s limits how long a restored path stays unnoticed if no
carrier event is seen here (remote NIC, switch), at a cost of one probe per second and path. With a
unit of 1 s, a second failure in a row, which may be chance, costs 1 s; a fifth costs 15 s. With the
hold at its cap of 300 s, a path that fails after each return returns at most 12 times per hour.
After ten healthy minutes, the half-life has cleared its strikes.

Times are passed in as clock readings. Invariants: a path that is in use is never due for a probe;
only healthy time in use reduces the strikes, a carrier event does not.
"""

from __future__ import annotations

import math

import msgspec


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of failback; times in seconds.

    Attributes
    ----------
    nprobes : int
        Number of good probes in a row that a return requires.
    spacing_s : float
        Pause before the next probe: after the path went out of use, after the first probe without
        an answer, and after each of the first ``nprobes - 1`` good probes in a row.
    cap_s : float
        Longest pause between probes, and the pause after each further good probe unless the hold
        ends sooner.
    hold_unit_s, hold_cap_s : float
        Unit and upper limit of the hold; see the formula of this module.
    half_life_s : float
        Time in use without failure that halves the number of strikes.
    """

    nprobes: int = 3
    spacing_s: float = 0.1
    cap_s: float = 1.0
    hold_unit_s: float = 1.0
    hold_cap_s: float = 300.0
    half_life_s: float = 60.0


DEFAULT = Policy()


class Quarantine:
    """Failback state of one path: in use (initially), or out of use and probed.

    Results of probes that arrive while the path is in use are ignored.

    Parameters
    ----------
    now : float
        Clock reading, in seconds, as in all methods.
    policy : Policy
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
        #: Time when the next probe is due; and True while a probe that was sent has no result.
        self._next_s = now
        self._asked = False
        self._ngood = 0
        self._good_since_s = self._last_good_s = now
        #: Until this time, a probe without an answer does not lengthen the pause.
        self._keen_until_s = now

    @property
    def next_s(self) -> float:
        """Time of the next probe; infinite while the path is in use or a probe has no result."""
        return math.inf if self.is_in_use or self._asked else self._next_s

    @property
    def hold_s(self) -> float:
        """Time for which all probes must be answered before the path may return, in seconds."""
        return _hold_s(self._policy, self._strikes)

    def failed(self, now: float) -> None:
        """Record a failure of the path: add a strike if it is in use, else do the same as `bad`."""
        if not self.is_in_use:
            self.bad(now)
            return
        self._leave(now)
        # Strikes beyond those that reach the hold cap would only take longer to decay.
        self._strikes = min(self._strikes + 1, _most_strikes(self._policy))

    def withdrawn(self, now: float) -> None:
        """Record that the path was taken out of use although it had not failed."""
        if self.is_in_use:
            self._leave(now)

    def _leave(self, now: float) -> None:
        policy = self._policy
        self._strikes *= 0.5 ** ((now - self._returned_s) / policy.half_life_s)
        self.is_in_use = False
        self._asked = False
        self._ngood = 0
        # The pause may have grown: a path may return without a good probe.
        self._pause_s = policy.spacing_s
        self._next_s = now + policy.spacing_s

    def carrier_up(self, now: float) -> None:
        """Make a probe due at once because a port of the path came up; no strike is removed.

        Earlier good probes no longer count, because the port had been down, even if no probe was
        sent during that time.
        """
        self._ngood = 0
        self.hurry(now)

    def hurry(self, now: float) -> None:
        """Make a probe due at once, and reset the pause, which then does not grow for a while.

        If a probe has no result yet, the next probe is due as usual after that result.
        """
        self._next_s = now
        self._pause_s = self._policy.spacing_s
        self._keen_until_s = now + _KEEN_NCAPS * self._policy.cap_s

    def due(self, now: float) -> bool:
        """Return whether a probe is due now; the caller then sends it and calls `asked`."""
        return now >= self.next_s

    def asked(self) -> None:
        """Record that a probe was sent; `good`, `bad` or `unasked` must follow."""
        self._asked = True

    def good(self, now: float) -> None:
        """Record a probe that was answered."""
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
            # Until the end of the hold, probe at intervals of `cap_s`, and once when it ends.
            end_s = max(self._good_since_s + self.hold_s, now + policy.spacing_s)
            self._next_s = min(now + policy.cap_s, end_s)

    def bad(self, now: float) -> None:
        """Record a probe without an answer, or a failure of the path while out of use."""
        if self.is_in_use:
            return
        self._asked = False
        self._ngood = 0
        self._put_off(now)

    def unasked(self, now: float) -> None:
        """Record a probe that proved nothing, because it could not be made; pause as in `bad`."""
        if self.is_in_use:
            return
        self._asked = False
        self._put_off(now)

    def may_return(self, now: float) -> bool:
        """Return whether the path may carry traffic again; call `returned` once it is in use."""
        policy = self._policy
        # After a time without probes, because the loop was busy, an old answer proves nothing.
        is_fresh = now - self._last_good_s <= 2 * policy.cap_s
        is_served = now >= self._good_since_s + self.hold_s
        return not self.is_in_use and self._ngood >= policy.nprobes and is_fresh and is_served

    def returned(self, now: float) -> None:
        """Record that the path is in use again, whether or not `may_return` allowed it."""
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


#: Time for which the pause does not grow after `hurry`, in units of `Policy.cap_s`. A kernel that
#: got no answer to a request for the peer's link-layer address repeats it only after a second.
_KEEN_NCAPS = 2.0


def _most_strikes(policy: Policy) -> float:
    return 1 + math.log2(1 + policy.hold_cap_s / policy.hold_unit_s)


__all__ = ["DEFAULT", "Policy", "Quarantine"]
