"""Failback: brings paths that failed back into use, not before they deserve it.

One end of a path decides, the lower rank's: it probes the path's ports, over connections of their
own, as `r2ccl.failover.failback.protocol` asks, and connects the path once that says so. The other
end only lets it in. A peer that no path leads to is another matter: then a doubtful path is better
than none, and is connected at once.

Must not import sockets, verbs or threads; owned by one caller at a time, like
`r2ccl.failover.migration.driver`. Invariant: a path waits here or is being connected or is in use,
never two of them.
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
    """The paths of one rank that failed, those it has to bring back.

    Parameters
    ----------
    config : Config
    clock : Clock
    ask : callable
        ``ask(key, on_answer)``: probe `key`; `on_answer` gets the `Probed`.
    connect : callable
        ``connect(path)``: bring it up, for as long as it takes.
    is_alone : callable
        ``is_alone(peer)``: whether no path to `peer` is up.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        *,
        ask: Callable[[ProbeKey, Callable[[Probed], None]], None],
        connect: Callable[[PathKey], None],
        is_alone: Callable[[int], bool],
    ) -> None:
        self._policy = policy_of(config)
        self._clock = clock
        self._ask = ask
        self._connect = connect
        self._is_alone = is_alone
        #: Of every path that ever failed: a quarantine remembers.
        self._quarantines: dict[PathKey, Quarantine] = {}
        self._waiting: dict[PathKey, Quarantine] = {}

    def failed(self, key: PathKey) -> None:
        """Both ends of `key` are out of use."""
        now = self._clock()
        quarantine = self._quarantines.get(key)
        if quarantine is None:
            quarantine = self._quarantines[key] = Quarantine(now, self._policy)
        quarantine.failed(now)
        self._waiting[key] = quarantine

    def opened(self, key: PathKey) -> None:
        """`key` is in use."""
        self._waiting.pop(key, None)
        quarantine = self._quarantines.get(key)
        if quarantine is not None:
            quarantine.returned(self._clock())

    def port_up(self, key: PathKey) -> None:
        """A port of `key` came up: it had been down, and is worth a probe."""
        quarantine = self._waiting.get(key)
        if quarantine is not None:
            quarantine.carrier_up(self._clock())

    def hurry(self, key: PathKey) -> None:
        """Probes of `key` can be sent again: send one."""
        quarantine = self._waiting.get(key)
        if quarantine is not None:
            quarantine.hurry(self._clock())

    def tick(self, now: float) -> None:
        """Probe what is due, and connect what may return."""
        for key, quarantine in list(self._waiting.items()):
            if quarantine.may_return(now) or self._is_alone(key.peer):
                del self._waiting[key]
                self._connect(key)
            elif quarantine.due(now):
                quarantine.asked()
                self._ask(ProbeKey(key.peer, key.rail, key.rail), partial(self._probed, key))

    def held(self) -> dict[PathKey, float]:
        """Return how long each path that waits has to be good without a break, in seconds."""
        return {key: quarantine.hold_s for key, quarantine in self._waiting.copy().items()}

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
    """Return how patient failback is by the settings."""
    return Policy(
        nprobes=config.failback_probes,
        spacing_s=config.failback_interval_s,
        cap_s=config.failback_cap_s,
        hold_cap_s=config.quarantine_cap_s,
    )


__all__ = ["Failback", "policy_of"]
