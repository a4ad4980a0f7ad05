"""Signs of life: when silence on a path is suspicious, and probes of ports by who suspects.

Rails that dial are asked without preparation. Those that join need a connection for each probe,
made once the paths are up, and made anew after a probe that was not answered broke it.

Must not import sockets or verbs; owned by one caller at a time, like
`r2ccl.failover.migration.driver`. Invariant: whoever asked is told, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from r2ccl.failover.connector import Connector
from r2ccl.transport.base import Probed, Transport
from r2ccl.types import PathKey, ProbeKey


class Probes:
    """The probes of one rank.

    Parameters
    ----------
    transport : Transport
    connector : Connector
        Makes the connections.
    unjoined : iterable of ProbeKey
        Probes that need one.
    """

    def __init__(
        self, transport: Transport, connector: Connector, unjoined: Iterable[ProbeKey] = ()
    ) -> None:
        self._transport = transport
        self._connector = connector
        #: Those whose connection nobody has begun to make.
        self.unjoined = list(unjoined)
        #: Who is to be told what became of a probe.
        self._asking: dict[ProbeKey, list[Callable[[Probed], None]]] = {}

    def ask(self, key: ProbeKey, on_answer: Callable[[Probed], None]) -> None:
        """Ask for a sign of life; `on_answer` is told within the probe timeout."""
        waiting = self._asking.setdefault(key, [])
        waiting.append(on_answer)
        if len(waiting) == 1:
            self._transport.probe(key)

    def join(self) -> None:
        """Begin to make the connections of `unjoined`."""
        unjoined, self.unjoined = self.unjoined, []
        for key in unjoined:
            self._connector.begin_probe(key)

    def on_probed(self, event: Probed, *, is_over: bool = False) -> None:
        """Tell who asked; `is_over`: nothing is joined any more."""
        key = event.key
        if not is_over and self._transport.joins(key.rail):
            if event.is_answered is False:
                self._connector.begin_probe(key)
            elif event.is_answered is None and key.via == key.rail:
                self._connector.hurry(key)
        for on_answer in self._asking.pop(key, ()):
            on_answer(event)


class Watch:
    """Tells which paths stood still for `suspicion_s` while work was outstanding on them.

    A path that stays silent is suspected again after each further `suspicion_s`. A suspicion only
    starts probes, it never moves a link by itself. A rank that was itself stopped or starved does
    not blame its paths for the time it was away: the gap between two looks counts as at most one
    ordinary interval.
    """

    def __init__(self, suspicion_s: float) -> None:
        self._suspicion_s = suspicion_s
        self._seen: dict[PathKey, int] = {}
        self._still_s: dict[PathKey, float] = {}
        self._last: float | None = None

    def look(self, now: float, paths: Iterable[tuple[PathKey, int, bool]]) -> list[PathKey]:
        """Look at ``(path, activity, has_work)`` of every path that is up."""
        gap = 0.0 if self._last is None else now - self._last
        gap = min(gap, self._suspicion_s / 4)
        self._last = now
        suspects: list[PathKey] = []
        for path, activity, has_work in paths:
            if not has_work or self._seen.get(path) != activity:
                self._seen[path] = activity
                self._still_s[path] = 0.0
                continue
            self._still_s[path] += gap
            if self._still_s[path] >= self._suspicion_s:
                self._still_s[path] = 0.0
                suspects.append(path)
        return suspects


__all__ = ["Probes", "Watch"]
