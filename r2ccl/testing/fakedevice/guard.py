"""What the host must leave alone while an operation may be under way, found without its help.

An operation is exposed once nothing but the GPU's leisure keeps it from running. From then on its
pinned sources must not change, which is seen when it runs, and its pinned targets hold poison, so
that a host that looks too early computes with that and not with what it hopes for; that the poison
is still there is seen when it runs too. Must not know streams.

Invariant: nothing is poisoned or compared that code in the right order may touch.
"""

from __future__ import annotations

from collections.abc import Iterable

from r2ccl.testing.fakedevice.memory import MemoryPiece
from r2ccl.testing.fakedevice.order import Race
from r2ccl.testing.fakedevice.work import FakeOperation

#: What a host finds where the GPU is about to write.
POISON = 0xA5


class Guard:
    """The guarded memory of one exposed operation.

    Parameters
    ----------
    operation : FakeOperation
    """

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
        """Whether there is memory that is not guarded yet."""
        return bool(self._sources or self._targets)

    def take(self, others: Iterable[FakeOperation]) -> None:
        """Guard what no other operation that may run first still needs or writes.

        Parameters
        ----------
        others : iterable of FakeOperation
            All that have not run and do not come after this one in its stream.
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
        """Look whether the host touched anything; the operation runs next.

        Raises
        ------
        Race
            It did.
        """
        for piece, seen in self._seen:
            if piece.view.tobytes() != seen:
                raise Race.between(f"the host, which wrote to {piece}", self._operation.what)
        for piece in self._poisoned:
            if not (piece.view == POISON).all():
                raise Race.between(f"the host, which wrote to {piece}", self._operation.what)


__all__ = ["POISON", "Guard"]
