"""Detection of host accesses to pinned memory that an operation may be using.

An operation is exposed once the GPU could start it at any time. From then on its pinned sources
must not change. Its pinned targets are filled with poison: a host that reads them too early gets a
wrong result. When the operation runs, the guard checks that the host has changed neither sources
nor poison. A source is guarded only while no correctly ordered access can write it, and a target
only while no such access can touch it.
"""

from __future__ import annotations

from collections.abc import Iterable

from r2ccl.testing.fakedevice.memory import MemoryPiece
from r2ccl.testing.fakedevice.order import Race
from r2ccl.testing.fakedevice.work import FakeOperation

#: Byte that fills pinned targets of exposed operations.
POISON = 0xA5


class Guard:
    """Guarded pinned memory of one operation; empty until the operation is exposed."""

    def __init__(self, operation: FakeOperation) -> None:
        self._operation = operation
        self._sources = [each for each in operation.reads if each.span.is_host]
        self._targets = [
            each
            for each in operation.writes
            if each.span.is_host and not any(each.overlaps(read) for read in operation.reads)
        ]
        self._seen: list[tuple[MemoryPiece, bytes]] = []
        self._poisoned: list[MemoryPiece] = []

    @property
    def is_wanted(self) -> bool:
        """True if the operation has pinned memory that must still be guarded."""
        return bool(self._sources or self._targets)

    def take(self, others: Iterable[FakeOperation]) -> None:
        """Guard each pinned source that no other operation writes; poison unused pinned targets.

        Parameters
        ----------
        others : iterable of FakeOperation
            Operations that may run before the guarded operation: they have not run, and are not
            behind it in its stream. A target is unused if none of them accesses it.
        """
        others = tuple(others)
        for piece in tuple(self._sources):
            if not any(write.overlaps(piece) for other in others for write in other.writes):
                self._sources.remove(piece)
                self._seen.append((piece, piece.view.tobytes()))
        for piece in tuple(self._targets):
            if not any(other.reaches(piece) for other in others):
                self._targets.remove(piece)
                self._poisoned.append(piece)
                piece.view[:] = POISON

    def check(self) -> None:
        """Check guarded memory for writes of the host; call it just before the operation runs.

        Raises
        ------
        Race
            If the host wrote to guarded memory.
        """
        for piece, seen in self._seen:
            if piece.view.tobytes() != seen:
                raise Race.between(f"the host, which wrote to {piece}", self._operation.what)
        for piece in self._poisoned:
            if not (piece.view == POISON).all():
                raise Race.between(f"the host, which wrote to {piece}", self._operation.what)


__all__ = ["POISON", "Guard"]
