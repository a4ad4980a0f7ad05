"""Write a rank's program op by op; what each op waits for follows from the memory it touches.

Algorithms say what moves where; which earlier ops read or write the same chunk is bookkeeping, and
the same for all of them. INPUT and OUTPUT count as one memory, as they are in place, so a program
is right in place and out of place.

Imports the IR. Invariant: every op waits for the ops of its own program that last wrote what it
touches and, if it writes, for those that read it since; what only messages between ranks order is
not known here, and left to the checker.
"""

from __future__ import annotations

from collections.abc import Sequence

from r2ccl.schedule.ir import Op, OpKind, Space

#: The caller's memory, INPUT and OUTPUT, or SCRATCH; and a chunk of it.
_Place = tuple[bool, int]


class ProgramBuilder:
    """The ops of one rank on one channel.

    A chunk is read from INPUT until this rank has written it to OUTPUT, and from there on from
    OUTPUT. All methods return the new op's index, for others to wait for; ``after`` adds to what
    it waits for by itself.
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._written: dict[_Place, int] = {}
        self._readers: dict[_Place, list[int]] = {}

    def __len__(self) -> int:
        return len(self._ops)

    def ops(self) -> tuple[Op, ...]:
        """Return what was written so far."""
        return tuple(self._ops)

    def held(self, chunk: int) -> Space:
        """Where this rank's `chunk` is: INPUT, or OUTPUT once that was written."""
        return Space.OUTPUT if (False, chunk) in self._written else Space.INPUT

    def send(self, peer: int, chunk: int, *, after: Sequence[int] = ()) -> int:
        """Give `peer` a chunk."""
        source = self.held(chunk)
        waits = self._reading(source, chunk)
        return self._add(Op(OpKind.SEND, peer, source, chunk, Space.OUTPUT, -1, _all(waits, after)))

    def recv(
        self,
        peer: int,
        chunk: int,
        *,
        after: Sequence[int] = (),
        space: Space = Space.OUTPUT,
        is_proof: bool = False,
    ) -> int:
        """Have a chunk of `peer` replace this rank's; see `Op.is_proof`."""
        waits = _all(self._writing(space, chunk), after)
        # Without a send to prove there is nothing the mark could say.
        proves = is_proof and any(self._ops[index].kind == OpKind.SEND for index in waits)
        op = Op(OpKind.RECV, peer, Space.OUTPUT, -1, space, chunk, waits, False, proves)
        return self._add(op)

    def recv_reduce(
        self, peer: int, chunk: int, *, after: Sequence[int] = (), is_final: bool = False
    ) -> int:
        """Add a chunk of `peer` to this rank's."""
        source = self.held(chunk)
        waits = _all(self._writing(Space.OUTPUT, chunk), after)
        op = Op(OpKind.RECV_REDUCE, peer, source, chunk, Space.OUTPUT, chunk, waits, is_final)
        return self._add(op)

    def copy(
        self, chunk: int, source: Space, target: Space = Space.OUTPUT, *, is_final: bool = False
    ) -> int:
        """Copy this rank's own chunk from one space to another."""
        waits = _all(self._reading(source, chunk), self._writing(target, chunk))
        return self._add(Op(OpKind.COPY, -1, source, chunk, target, chunk, waits, is_final))

    def reduce(self, chunk: int, source: Space, *, is_final: bool = False) -> int:
        """Add this rank's own chunk in `source` to the one in OUTPUT."""
        waits = _all(self._reading(source, chunk), self._writing(Space.OUTPUT, chunk))
        return self._add(Op(OpKind.REDUCE, -1, source, chunk, Space.OUTPUT, chunk, waits, is_final))

    def _reading(self, space: Space, chunk: int) -> list[int]:
        """Note that the op to come reads a chunk; return what it must wait for."""
        place = space == Space.SCRATCH, chunk
        self._readers.setdefault(place, []).append(len(self._ops))
        return [self._written[place]] if place in self._written else []

    def _writing(self, space: Space, chunk: int) -> list[int]:
        """Note that the op to come writes a chunk; return what it must wait for."""
        place = space == Space.SCRATCH, chunk
        number = len(self._ops)
        readers = [index for index in self._readers.pop(place, ()) if index != number]
        before = self._written.get(place)
        self._written[place] = number
        # Readers waited for what was written before.
        return readers or ([] if before is None else [before])

    def _add(self, op: Op) -> int:
        self._ops.append(op)
        return len(self._ops) - 1


def _all(waits: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*waits, *more}))


__all__ = ["ProgramBuilder"]
