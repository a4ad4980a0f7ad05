"""Records of path failures and their repairs, which `comm.repairs()` returns.

All times are readings of CLOCK_MONOTONIC in seconds. That clock is the same for all processes of a
host, so the time since a fault that another process injected can be computed.
"""

from __future__ import annotations

from collections import deque

import msgspec

from r2ccl.types import PathKey, rail_name


class Repair(msgspec.Struct):
    """Record of one path that failed or was excluded, as seen by one end of the path.

    Attributes
    ----------
    peer, rail, epoch : int
        Peer and rail of the path, and the epoch that the failure or the exclusion ended.
    cause : str
        Evidence of the failure, in words; contains ``EXCLUDED:`` if the path was excluded.
    failed_s : float
        Time when this end learned of the failure or the exclusion.
    fenced_s : float
        Time when this end was fenced. 0: not yet.
    resumed_s : float
        Time when both ends were fenced and this end began to use other paths. 0: not yet.
    first_byte_s : float
        Arrival time, over any path, of the first byte of a slice that this end lacked at its fence.
        For an eager slice, and for any slice over RDMA, this is the arrival time of the whole
        slice. 0: no slice was missing, the slice has not arrived yet, or it arrived before this end
        resumed. Only the first missing slice of each channel counts.
    moved : dict of int to int
        Each channel that used the path, and the rail of the channel when this end resumed
        (`r2ccl.types.BYPASS` for a bypass); empty if no channel used the path, or no path was left.
    nbytes_replayed : int
        Payload bytes that this rank sent again.
    restored_s : float
        Time when the path was in use again. 0: not yet. A bypass is connected again only when its
        two ranks have no common rail.
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
    """Log of a rank's path failures and repairs.

    ``repairs`` has the last `_KEPT` records, oldest first. ``open`` has the records that are
    resumed but still wait for the first byte of a missing slice. Each of these records is stored
    with the number of the first missing slice of each channel.
    """

    def __init__(self) -> None:
        self.repairs: deque[Repair] = deque()
        self.open: list[tuple[Repair, dict[int, int]]] = []
        #: First missing slices of the paths that are fenced and not resumed.
        self._awaited: dict[PathKey, dict[int, int]] = {}

    def failed(self, key: PathKey, epoch: int, cause: str, now: float) -> None:
        """Add a record: path `key` failed in `epoch`, for the reason `cause`.

        `now` is the time of the failure in seconds. In the other methods, `now` is the time of the
        event that the method records.
        """
        if len(self.repairs) == _KEPT:
            dropped = self.repairs.popleft()
            self.open = [each for each in self.open if each[0] is not dropped]
        self.repairs.append(Repair(key.peer, key.rail, epoch, cause, now))

    def explained(self, key: PathKey, epoch: int, cause: str) -> None:
        """Replace the recorded cause of the failure of `key` in `epoch` by the peer's `cause`."""
        for repair in self._last(key, epoch):
            repair.cause = cause

    def fenced(self, key: PathKey, epoch: int, now: float) -> None:
        """Record that the local end of `key` is fenced after its failure in `epoch`.

        Do nothing if there is no record of this failure: the path was closed as idle, or failed
        while this rank was leaving.
        """
        for repair in self._last(key, epoch):
            repair.fenced_s = now

    def awaits(self, key: PathKey, received: dict[int, int]) -> None:
        """Store the number of each channel's first missing slice after the fence of path `key`.

        `received` has this number for each channel whose first missing slice may have been lost on
        the path.
        """
        self._awaited[key] = received

    def resumed(self, key: PathKey, moved: dict[int, int], now: float) -> None:
        """Record that both ends of `key` are fenced; `moved` is as in `Repair`."""
        for repair in self._last(key):
            if repair.resumed_s:  # a later failure, announced before this end was open again
                continue
            repair.resumed_s = now
            repair.moved = moved
            awaited = self._awaited.pop(key, None)
            if awaited:
                self.open.append((repair, awaited))

    def replayed(self, lost_on: tuple[PathKey, int] | None, nbytes: int) -> None:
        """Add the `nbytes` bytes of a replayed slice to the record of the failure that lost it.

        `lost_on` is the path and the epoch of that failure. Do nothing if `lost_on` is None (the
        slice is sent for the first time), or if the newest record of the path is not of this epoch.
        """
        if lost_on is not None:
            for repair in self._last(*lost_on):
                repair.nbytes_replayed += nbytes

    def arrived(self, path: PathKey, channel: int, seq: int, began_s: float) -> None:
        """Set the first-byte time of the open repairs that wait for slice `seq` of `channel`.

        The slice arrived on `path`. `began_s` is `Arrived.began_s` of the event of this arrival.
        """
        for each in list(self.open):
            repair, awaited = each
            if path.peer == repair.peer and awaited.get(channel) == seq:
                repair.first_byte_s = began_s
                self.open.remove(each)

    def opened(self, key: PathKey, epoch: int, now: float) -> None:
        """Record that `key` is in use again, in `epoch`."""
        for repair in self._last(key):
            if repair.epoch < epoch and not repair.restored_s:
                repair.restored_s = now

    def sequel(self, key: PathKey, epoch: int) -> str:
        """Return a description of the repair of `key` in `epoch`; empty before this end resumes.

        The text is also empty if the newest record of the path is not of this epoch.
        """
        for repair in self._last(key, epoch):
            if repair.resumed_s:
                took_ms = (repair.resumed_s - repair.failed_s) * 1e3
                rails = ", ".join(map(rail_name, sorted(set(repair.moved.values()))))
                channels = sorted(repair.moved)
                what = f"moved channels {channels} to {rails}" if rails else "no channels moved"
                return f"{what}, in {took_ms:.1f} ms"
        return ""

    def _last(self, key: PathKey, epoch: int | None = None) -> list[Repair]:
        """Return a list with the newest record of `key`; empty if there is no record of it.

        The list is also empty if `epoch` is given and the newest record is not of this epoch.
        """
        for repair in reversed(self.repairs):
            if (repair.peer, repair.rail) == key:
                return [repair] if epoch in (None, repair.epoch) else []
        return []


#: Maximum number of records kept; the oldest are dropped.
_KEPT = 1024

__all__ = ["Repair", "RepairLog"]
