"""Watch: when silence on a path becomes a suspicion.

Pure: the time is passed in. A suspicion only starts probes, it never moves a link by itself.

Invariant: a rank that was itself stopped or starved does not blame its paths for the time it was
away: the gap between two looks counts as at most one ordinary interval.
"""

from __future__ import annotations

from collections.abc import Iterable

from r2ccl.types import PathKey


class Watch:
    """Tells which paths stood still for `suspicion_s` while work was outstanding on them.

    A path that stays silent is suspected again after each further `suspicion_s`.
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


__all__ = ["Watch"]
