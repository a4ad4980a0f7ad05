"""Builder of the ops of one rank, with dependencies derived from the memory that each op uses.

Every op waits for the earlier op of the same rank and channel that last wrote its memory; an op
that writes also waits for the ops that have read the memory since. INPUT and OUTPUT count as the
same memory, as in an in-place call, so the program is correct in place and out of place.
Collectives in `r2ccl.schedule.ir.APART` are never in place: for them, INPUT and OUTPUT can be
different memory. The builder knows only one rank, so it ignores the order that messages between
ranks guarantee; the checker (`r2ccl.schedule.check`) takes this order into account.
"""

from __future__ import annotations

from collections.abc import Sequence

from r2ccl.schedule.ir import Op, OpKind, Space

#: A memory location: a space and a chunk index.
_Place = tuple[Space, int]


class ProgramBuilder:
    """Builder of the ops of one rank on one channel.

    By default, `send` and `recv_reduce` read a chunk from OUTPUT if an earlier op has written the
    chunk there, otherwise from INPUT. The methods that add an op return its index. The new op waits
    for the ops in ``after``, and for the earlier ops that use the same memory and conflict with it.

    Parameters
    ----------
    can_be_in_place : bool
        If False, INPUT and OUTPUT are different memory.
    """

    def __init__(self, *, can_be_in_place: bool = True) -> None:
        #: Space whose memory INPUT shares.
        self._input = Space.OUTPUT if can_be_in_place else Space.INPUT
        self._ops: list[Op] = []
        self._written: dict[_Place, int] = {}
        self._readers: dict[_Place, list[int]] = {}

    def __len__(self) -> int:
        return len(self._ops)

    def ops(self) -> tuple[Op, ...]:
        """Return the ops added so far."""
        return tuple(self._ops)

    def held(self, chunk: int) -> Space:
        """Return the space that holds this rank's `chunk`: OUTPUT if an op wrote it, else INPUT."""
        return Space.OUTPUT if (Space.OUTPUT, chunk) in self._written else Space.INPUT

    def send(
        self, peer: int, chunk: int, *, after: Sequence[int] = (), space: Space | None = None
    ) -> int:
        """Add an op that sends this rank's `chunk` in `space` (default: see `held`) to `peer`."""
        source = self.held(chunk) if space is None else space
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
        """Add an op that receives `chunk` from `peer` into `space`.

        `is_proof` sets `Op.is_proof`, but only if the op waits for a SEND.
        """
        waits = _all(self._writing(space, chunk), after)
        proves = is_proof and any(self._ops[index].kind == OpKind.SEND for index in waits)
        op = Op(OpKind.RECV, peer, Space.OUTPUT, -1, space, chunk, waits, False, proves)
        return self._add(op)

    def recv_reduce(
        self, peer: int, chunk: int, *, after: Sequence[int] = (), is_final: bool = False
    ) -> int:
        """Add an op that receives `chunk` from `peer` and reduces it with this rank's `chunk`.

        The result is written to OUTPUT. `is_final` sets `Op.is_final`.
        """
        source = self.held(chunk)
        waits = _all(self._writing(Space.OUTPUT, chunk), after)
        op = Op(OpKind.RECV_REDUCE, peer, source, chunk, Space.OUTPUT, chunk, waits, is_final)
        return self._add(op)

    def copy(
        self, chunk: int, source: Space, target: Space = Space.OUTPUT, *, is_final: bool = False
    ) -> int:
        """Add an op that copies this rank's `chunk` from space `source` to space `target`."""
        waits = _all(self._reading(source, chunk), self._writing(target, chunk))
        return self._add(Op(OpKind.COPY, -1, source, chunk, target, chunk, waits, is_final))

    def reduce(
        self, chunk: int, source: Space, target: Space = Space.OUTPUT, *, is_final: bool = False
    ) -> int:
        """Add an op that reduces `chunk` in space `source` into the same chunk in `target`."""
        waits = _all(self._reading(source, chunk), self._writing(target, chunk))
        return self._add(Op(OpKind.REDUCE, -1, source, chunk, target, chunk, waits, is_final))

    def _reading(self, space: Space, chunk: int) -> list[int]:
        """Record that the next op reads a chunk; return the ops that it must wait for."""
        place = space or self._input, chunk
        self._readers.setdefault(place, []).append(len(self._ops))
        return [self._written[place]] if place in self._written else []

    def _writing(self, space: Space, chunk: int) -> list[int]:
        """Record that the next op writes a chunk; return the ops that it must wait for."""
        place = space or self._input, chunk
        number = len(self._ops)
        readers = [index for index in self._readers.pop(place, ()) if index != number]
        before = self._written.get(place)
        self._written[place] = number
        # Readers themselves wait for the write before them.
        return readers or ([] if before is None else [before])

    def _add(self, op: Op) -> int:
        self._ops.append(op)
        return len(self._ops) - 1


def _all(waits: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*waits, *more}))


__all__ = ["ProgramBuilder"]
