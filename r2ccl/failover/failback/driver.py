"""Driver of failback: probes paths that failed, and reconnects those that have proved reliable.

The lower rank of a path decides; the higher rank only accepts the connection. The lower rank probes
the ports of the path, over separate connections, at the times that
`r2ccl.failover.failback.protocol` sets, and connects the path when the protocol allows it. If no
path to a peer is up, all paths to this peer that are in quarantine are connected at the next tick,
before they have proved reliable: an unreliable path is better than none. When the paths to a peer
are closed as idle, none stays in quarantine: all are connected at once when calls need them again.
A path whose rail is excluded at either end is neither probed nor connected; it stays in quarantine
at least until the exclusion ends.

Only one thread may use a `Failback` at a time; any thread may call `held`. Invariant: at the lower
rank, until the communicator ends, each path on a rail is in quarantine, being fenced or connected,
in use, or closed because it was idle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.failover.failback.protocol import Policy, Quarantine
from r2ccl.transport.base import Probed
from r2ccl.types import PathKey, ProbeKey


class Failback:
    """Quarantine of failed paths that this rank, the lower of the two, must bring back into use.

    Parameters
    ----------
    config : Config
    clock : Clock
    ask : callable
        ``ask(key, on_answer)`` probes `key` and later calls ``on_answer(probed)`` once.
    connect : callable
        ``connect(path)`` begins to connect the path, and retries until it succeeds.
    is_alone : callable
        ``is_alone(peer)`` returns whether no path to `peer` is up.
    is_excluded : callable
        ``is_excluded(path)`` returns whether a port of the path is excluded.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        *,
        ask: Callable[[ProbeKey, Callable[[Probed], None]], None],
        connect: Callable[[PathKey], None],
        is_alone: Callable[[int], bool],
        is_excluded: Callable[[PathKey], bool],
    ) -> None:
        self._policy = policy_of(config)
        self._clock = clock
        self._ask = ask
        self._connect = connect
        self._is_alone = is_alone
        self._is_excluded = is_excluded
        #: Quarantine of every path that ever was in one; kept, because it stores the strikes. Those
        #: of paths that are in quarantine now are also in `_waiting`.
        self._quarantines: dict[PathKey, Quarantine] = {}
        self._waiting: dict[PathKey, Quarantine] = {}

    def failed(self, key: PathKey) -> None:
        """Record a failure of the path `key`, and put the path into quarantine.

        Call it when neither end still uses the path. A failure in use adds a strike, which may
        lengthen the path's hold; see `Quarantine.failed`.
        """
        self._quarantine(key).failed(self._clock())

    def withdrawn(self, key: PathKey) -> None:
        """Put the path `key` into quarantine; it is out of use although it did not fail."""
        self._quarantine(key).withdrawn(self._clock())

    def _quarantine(self, key: PathKey) -> Quarantine:
        found = self._quarantines.get(key)
        if found is None:
            found = self._quarantines[key] = Quarantine(self._clock(), self._policy)
        self._waiting[key] = found
        return found

    def opened(self, key: PathKey) -> None:
        """Record that the path `key` is in use: its quarantine, if any, ends."""
        self._waiting.pop(key, None)
        quarantine = self._quarantines.get(key)
        if quarantine is not None:
            quarantine.returned(self._clock())

    def port_up(self, key: PathKey) -> None:
        """Make a probe of path `key` due, because one of its ports came up or is included again.

        Earlier good probes no longer count. If a probe is in flight, the next probe is due as usual
        after the result of the probe in flight. Do nothing if the path is not in quarantine.
        """
        quarantine = self._waiting.get(key)
        if quarantine is not None:
            quarantine.carrier_up(self._clock())

    def hurry(self, key: PathKey) -> None:
        """Make a probe of path `key` due, because the connection for its probes is ready.

        If a probe is in flight, the next probe is due as usual after the result of the probe in
        flight. Do nothing if the path is not in quarantine.
        """
        quarantine = self._waiting.get(key)
        if quarantine is not None:
            quarantine.hurry(self._clock())

    def tick(self, now: float) -> None:
        """Send the probes that are due, and begin to connect the paths that may return.

        If no path to a peer is up, all paths to this peer may return at once. Excluded paths are
        skipped. `now` is a clock reading in seconds.
        """
        for key, quarantine in list(self._waiting.items()):
            if self._is_excluded(key):
                continue
            if quarantine.may_return(now) or self._is_alone(key.peer):
                del self._waiting[key]
                self._connect(key)
            elif quarantine.due(now):
                quarantine.asked()
                self._ask(ProbeKey(key.peer, key.rail, key.rail), partial(self._probed, key))

    def held(self) -> dict[PathKey, float]:
        """Return the hold of each path that is in quarantine and not excluded.

        The hold is the time, in seconds, for which all probes must be answered before the path may
        return. Any thread may call this method.
        """
        waiting = self._waiting.copy().items()
        return {key: each.hold_s for key, each in waiting if not self._is_excluded(key)}

    def _probed(self, key: PathKey, event: Probed) -> None:
        quarantine = self._waiting.get(key)
        if quarantine is None:
            return
        if event.is_answered:
            quarantine.good(self._clock())
        elif event.is_answered is None:
            quarantine.unasked(self._clock())
        else:
            quarantine.bad(self._clock())


def policy_of(config: Config) -> Policy:
    """Return the failback policy that the settings define."""
    return Policy(
        nprobes=config.failback_probes,
        spacing_s=config.failback_interval_s,
        cap_s=config.failback_cap_s,
        hold_cap_s=config.quarantine_cap_s,
    )


__all__ = ["Failback", "policy_of"]
