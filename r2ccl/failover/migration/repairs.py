"""What repairs did: the record the user reads, kept while they happen.

Values and bookkeeping only. Times are readings of the clock in seconds (CLOCK_MONOTONIC, the same
for all processes of a host), so that a fault injected by another process can be subtracted.
"""

from __future__ import annotations

from collections import deque

import msgspec

from r2ccl.types import PathKey, rail_name


class Repair(msgspec.Struct):
    """One path that failed, seen from one of its ends.

    Attributes
    ----------
    peer, rail, epoch : int
        Which path.
    cause : str
        Evidence, decoded.
    failed_s, fenced_s, resumed_s : float
        When this end knew, had its end fenced, and went on. 0: not yet.
    first_byte_s : float
        When the first byte of a slice that had been under way on the path arrived here over
        another one. 0: none was, or not yet.
    moved : dict of int to int
        Channel to its new rail; empty: no path was left then.
    nbytes_replayed : int
        Bytes this rank wrote again.
    restored_s : float
        When the path came back. 0: not yet.
    """

    peer: int
    rail: int
    epoch: int
    cause: str
    failed_s: float
    fenced_s: float = 0.0
    resumed_s: float = 0.0
    first_byte_s: float = 0.0
    moved: dict[int, int] = msgspec.field(default_factory=dict)
    nbytes_replayed: int = 0
    restored_s: float = 0.0


class RepairLog:
    """The last repairs of a rank, oldest first, and those whose first byte is awaited."""

    def __init__(self) -> None:
        self.repairs: deque[Repair] = deque(maxlen=_KEPT)
        self.open: list[Repair] = []
        self._awaited: dict[PathKey, dict[int, int]] = {}

    def failed(self, key: PathKey, epoch: int, cause: str, now: float) -> None:
        """Begin a record."""
        self.repairs.append(Repair(key.peer, key.rail, epoch, cause, now))

    def fenced(self, key: PathKey, now: float) -> None:
        """The local end is fenced."""
        for repair in self._last(key):
            repair.fenced_s = now

    def awaits(self, key: PathKey, received: dict[int, int]) -> None:
        """Channel to the first slice that was wanted but not here when `key` was fenced."""
        self._awaited[key] = received

    def resumed(self, key: PathKey, moved: dict[int, int], now: float) -> None:
        """Both ends are fenced; `moved` channels go on elsewhere."""
        for repair in self._last(key):
            if repair.resumed_s:  # the peer's end failed before this one was in use again
                continue
            repair.resumed_s = now
            repair.moved = moved
            if self._awaited.get(key):
                self.open.append(repair)

    def replayed(self, lost_on: PathKey | None, nbytes: int) -> None:
        """Count bytes of a slice lost on `lost_on` that are written again."""
        if lost_on is not None:
            for repair in self._last(lost_on):
                repair.nbytes_replayed += nbytes

    def arrived(self, path: PathKey, channel: int, seq: int, began_s: float) -> None:
        """Close the repairs for which this slice is the first byte."""
        for repair in list(self.open):
            key = PathKey(repair.peer, repair.rail)
            first = self._awaited.get(key, {}).get(channel)
            if path.peer == repair.peer and first == seq:
                repair.first_byte_s = began_s
                self.open.remove(repair)

    def opened(self, key: PathKey, epoch: int, now: float) -> None:
        """`key` is up again under `epoch`."""
        for repair in self._last(key):
            if repair.epoch < epoch and not repair.restored_s:
                repair.restored_s = now

    def sequel(self, key: PathKey, epoch: int) -> str:
        """Say what was done about the failure of `key` in `epoch`; empty: nothing is known."""
        for repair in self._last(key):
            if repair.epoch == epoch and repair.resumed_s:
                took_ms = (repair.resumed_s - repair.failed_s) * 1e3
                rails = ", ".join(map(rail_name, sorted(set(repair.moved.values()))))
                channels = sorted(repair.moved)
                what = f"moved channels {channels} to {rails}" if rails else "nothing moved"
                return f"{what}, in {took_ms:.1f} ms"
        return ""

    def _last(self, key: PathKey) -> list[Repair]:
        """Return the newest record of `key`, or nothing if it was never in use."""
        for repair in reversed(self.repairs):
            if (repair.peer, repair.rail) == key:
                return [repair]
        return []


#: Records kept; older ones are forgotten.
_KEPT = 1024

__all__ = ["Repair", "RepairLog"]
