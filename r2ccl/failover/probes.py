"""Probes of ports, and detection of paths that make no progress.

A TCP rail is probed without preparation. An RDMA rail needs a connection for each `ProbeKey`. The
connection is set up when all paths are up, at the latest after the time limit for connecting the
paths. An unanswered probe breaks the connection, which is then set up again.

Not thread-safe. Invariant: every caller of `Probes.ask` gets exactly one result, unless the
transport is closed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from r2ccl.failover.connector import Connector
from r2ccl.transport.base import Probed, Transport
from r2ccl.types import PathKey, ProbeKey


class Probes:
    """Probes that one rank makes; simultaneous requests for the same probe share one result.

    Parameters
    ----------
    transport : Transport
    connector : Connector
        Makes the connections of probes.
    unjoined : iterable of ProbeKey
        RDMA probes that need a connection; the first `join` begins to connect them.
    """

    def __init__(
        self, transport: Transport, connector: Connector, unjoined: Iterable[ProbeKey] = ()
    ) -> None:
        self._transport = transport
        self._connector = connector
        #: RDMA probes that need a connection; the next `join` begins to connect them.
        self.unjoined = list(unjoined)
        #: Callbacks that wait for the result of a probe.
        self._asking: dict[ProbeKey, list[Callable[[Probed], None]]] = {}

    def ask(self, key: ProbeKey, on_answer: Callable[[Probed], None]) -> None:
        """Send the probe `key`; call ``on_answer(probed)`` once, when the outcome is known.

        If a probe of `key` is in flight, no second probe is sent: the result of the first probe
        counts for this call too.
        """
        waiting = self._asking.setdefault(key, [])
        waiting.append(on_answer)
        if len(waiting) == 1:
            self._transport.probe(key)

    def join(self) -> None:
        """Begin to connect the RDMA probes in `unjoined`, and clear that list."""
        unjoined, self.unjoined = self.unjoined, []
        for key in unjoined:
            self._connector.begin_probe(key)

    def on_probed(self, event: Probed, *, is_over: bool = False) -> None:
        """Pass the result of a probe to all callers that wait for it.

        After an unanswered RDMA probe there is no connection, because this probe or an earlier one
        broke it. A new connection is then scheduled, which replaces any attempt in progress. If an
        RDMA probe between the two ports of one rail could not be made, the next attempt to connect
        the probe starts without further pause (`Connector.hurry`).

        Parameters
        ----------
        event : Probed
        is_over : bool
            True if the communicator has ended, so that no new connection is made.
        """
        key = event.key
        if not is_over and self._transport.joins(key.rail):
            if event.is_answered is False:
                self._connector.begin_probe(key)
            elif event.is_answered is None and key.via == key.rail:
                self._connector.hurry(key)
        for on_answer in self._asking.pop(key, ()):
            on_answer(event)


class Watch:
    """Detector of paths without progress for `suspicion_s` seconds while work is outstanding.

    A path that stays silent is suspected again after each further `suspicion_s`. A suspicion
    starts probes; it does not move slices. The time between two calls of `look` counts as at most
    ``suspicion_s / 4``, so that a rank that was stopped or got no CPU time does not suspect its
    paths.
    """

    def __init__(self, suspicion_s: float) -> None:
        self._suspicion_s = suspicion_s
        self._seen: dict[PathKey, object] = {}
        #: Seconds without progress of each path, and the value at which it is suspected next.
        self._silent_s: dict[PathKey, float] = {}
        self._limit_s: dict[PathKey, float] = {}
        self._last: float | None = None

    def look(self, now: float, paths: Iterable[tuple[PathKey, object, bool]]) -> list[PathKey]:
        """Update how long each path has been silent, and return the paths to suspect now.

        Parameters
        ----------
        now : float
            Time in seconds.
        paths : iterable of (PathKey, object, bool)
            ``(path, activity, has_work)`` of every path that is up. ``activity`` is a value that
            changes with every event on the path and whenever the path is connected again.
            ``has_work`` is True if an event is expected.

        Returns
        -------
        list of PathKey
        """
        gap = 0.0 if self._last is None else now - self._last
        gap = min(gap, self._suspicion_s / 4)
        self._last = now
        suspects: list[PathKey] = []
        for path, activity, has_work in paths:
            if not has_work or self._seen.get(path) != activity:
                self._seen[path] = activity
                self._silent_s[path] = 0.0
                self._limit_s[path] = self._suspicion_s
                continue
            self._silent_s[path] += gap
            if self._silent_s[path] >= self._limit_s[path]:
                self._limit_s[path] += self._suspicion_s
                suspects.append(path)
        return suspects

    def are_silent(self, paths: Iterable[PathKey]) -> bool:
        """Return whether each path made no progress for `suspicion_s`; True if `paths` is empty."""
        return all(self._silent_s.get(path, 0.0) >= self._suspicion_s for path in paths)


__all__ = ["Probes", "Watch"]
