"""Steps of a chunk of a two-level collective on one rank, and the memory that they use.

Rank i of a node has part i of every piece of a chunk (`r2ccl.planning.two_level`). Between the
nodes, it exchanges or reduces these parts with the ranks i of the other nodes. Within the nodes::

    collective      before                             after
    allreduce       reduce-scatter of the piece        allgather of the piece
    reduce          reduce-scatter of the piece        node of the root: gather to the root
    broadcast       node of the root: broadcast        other nodes: allgather of the piece
    allgather       allgather of the node's piece      allgather of every other node's piece
    reduce_scatter  reduce-scatter of every piece      exchange of parts of the node's piece

In an allgather and a reduce-scatter, a node's piece is cut from the node's block: the data of its
ranks, one after the other. A part of a piece may therefore hold elements of several ranks, or only
some elements of one rank.

Invariant: the steps of different chunks use different memory, so they may run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt

from r2ccl.planning.two_level import Chunk, NodePlace, Piece
from r2ccl.schedule.chunks import Parts, Range
from r2ccl.types import Collective

Array = npt.NDArray[Any]


class LocalStep(msgspec.Struct, frozen=True, eq=False):
    """Collective of the ranks of a node.

    Attributes
    ----------
    collective : Collective
    count : int
        Number of elements of the call, equal on all ranks of the node.
    parts : tuple of (tuple of Range, tuple of Range) or None
        Parts as for `r2ccl.shm.group.LocalGroup.prepare`.
    source, output : ndarray
    root : int
        Local rank of the root.
    """

    collective: Collective
    count: int
    parts: tuple[tuple[Range, ...], tuple[Range, ...]] | None
    source: Array
    output: Array
    root: int = 0


class NetworkStep(msgspec.Struct, frozen=True, eq=False):
    """Collective among the ranks of this rank's group: `count` elements of `array`, in place.

    A group has one rank of each node (`r2ccl.planning.two_level`). ``parts`` has the places of the
    group's parts in `array`; None if the collective has no such parts.
    """

    count: int
    array: Array
    parts: Parts | None = None


class Steps(NamedTuple):
    """Steps of one chunk, in the order of the fields; ``before`` and ``after`` may be empty."""

    before: tuple[LocalStep, ...]
    between: NetworkStep
    after: tuple[LocalStep, ...]


class CallMemory(NamedTuple):
    """Memory of a call on one rank.

    Attributes
    ----------
    source : ndarray
        Input of the call; not read on ranks without an input.
    work : ndarray
        Memory with the size and layout of the call's whole buffer, which the network reads and
        writes: the output or, if the rank has no output with this layout, other memory.
    output : ndarray
        Output of a reduce-scatter; not used by other collectives.
    """

    source: Array
    work: Array
    output: Array


class StepMaker:
    """Maker of the steps of all chunks of one call.

    Parameters
    ----------
    place : NodePlace
    memory : CallMemory
    root : NodePlace
        Place of the root; ignored if the collective has no root.
    bounds : sequence of int
        For an allgather or a reduce-scatter, first element of the part of each rank of this node in
        the whole buffer, and the end of the last part.
    """

    def __init__(
        self, place: NodePlace, memory: CallMemory, root: NodePlace, bounds: Sequence[int]
    ) -> None:
        self._place = place
        self._memory = memory
        self._root = root
        self._bounds = bounds
        self._makers: dict[int, Callable[[Chunk], Steps]] = {
            Collective.ALLREDUCE: self._allreduce,
            Collective.REDUCE: self._reduce,
            Collective.BROADCAST: self._broadcast,
            Collective.ALLGATHER: self._allgather,
            Collective.REDUCE_SCATTER: self._reduce_scatter,
        }

    def steps(self, collective: int, chunk: Chunk) -> Steps:
        """Return the steps of a chunk of a call of `collective`."""
        return self._makers[collective](chunk)

    # Collectives

    def _allreduce(self, chunk: Chunk) -> Steps:
        (piece,) = chunk
        return Steps((self._scatter(piece),), self._network(piece), (self._gather(piece),))

    def _reduce(self, chunk: Chunk) -> Steps:
        (piece,) = chunk
        after = (self._gather_to_root(piece),) if self._is_at_root else ()
        return Steps((self._scatter(piece),), self._network(piece), after)

    def _broadcast(self, chunk: Chunk) -> Steps:
        (piece,) = chunk
        if not self._is_at_root:
            return Steps((), self._network(piece), (self._gather(piece),))
        count, work = piece.end - piece.first, self._memory.work
        is_root = self._root.local_rank == self._place.local_rank
        source = self._memory.source[piece.first : piece.end] if is_root else work[:0]
        output = work[piece.first : piece.end]
        step = LocalStep(Collective.BROADCAST, count, None, source, output, self._root.local_rank)
        return Steps((step,), self._network(piece), ())

    def _allgather(self, chunk: Chunk) -> Steps:
        own = self._place.node
        after = tuple(self._gather(each) for node, each in enumerate(chunk) if node != own)
        return Steps((self._collect(chunk[own]),), self._network(*chunk), after)

    def _reduce_scatter(self, chunk: Chunk) -> Steps:
        before = tuple(self._scatter(piece) for piece in chunk)
        return Steps(before, self._network(*chunk), (self._hand_out(chunk[self._place.node]),))

    # Steps

    def _network(self, *pieces: Piece) -> NetworkStep:
        work, ranges = self._memory.work, tuple(self._range(piece) for piece in pieces)
        if len(ranges) > 1:
            count = sum(end - first for first, end in ranges)
            return NetworkStep(count, work, Parts(ranges, ranges))
        ((first, end),) = ranges
        return NetworkStep(end - first, work[first:end])

    def _scatter(self, piece: Piece) -> LocalStep:
        """Return the step that reduces this rank's part of a piece from the node's inputs."""
        first, end = self._range(piece)
        put = ((0, end - first),) * self._place.nlocal
        return LocalStep(
            Collective.REDUCE_SCATTER,
            piece.end - piece.first,
            (piece.parts, put),
            self._memory.source[piece.first : piece.end],
            self._memory.work[first:end],
        )

    def _gather(self, piece: Piece) -> LocalStep:
        """Return the step that gathers the parts of a piece at every rank of the node."""
        first, end = self._range(piece)
        work = self._memory.work
        parts = self._only(self._place.local_rank, (0, end - first)), piece.parts
        count = piece.end - piece.first
        return LocalStep(
            Collective.ALLGATHER, count, parts, work[first:end], work[piece.first : piece.end]
        )

    def _gather_to_root(self, piece: Piece) -> LocalStep:
        """Return the step that copies the parts of a piece to the root, on the root's node."""
        first, end = self._range(piece)
        work, root, index = self._memory.work, self._root.local_rank, self._place.local_rank
        put: tuple[Range, ...] = ((0, 0),) * self._place.nlocal
        output = work[:0]
        if index == root:
            put, output = piece.parts, work[piece.first : piece.end]
        parts = self._only(root, (0, end - first)), put
        count = piece.end - piece.first
        return LocalStep(Collective.GATHERV, count, parts, work[first:end], output, root)

    def _collect(self, piece: Piece) -> LocalStep:
        """Return the step that collects a piece of the node from the inputs of its ranks."""
        index, bounds = self._place.local_rank, self._bounds
        owned = [self._owned(piece, rank) for rank in range(self._place.nlocal)]
        sent = self._only(index, _shifted(owned[index], bounds[index]))
        put = tuple(_shifted(each, piece.first) for each in owned)
        output = self._memory.work[piece.first : piece.end]
        count = piece.end - piece.first
        return LocalStep(Collective.ALLGATHER, count, (sent, put), self._memory.source, output)

    def _hand_out(self, piece: Piece) -> LocalStep:
        """Return the step that copies the reduced elements of a piece to their ranks."""
        index, bounds = self._place.local_rank, self._bounds
        first, end = self._range(piece)
        ranks = range(self._place.nlocal)
        sent = tuple(_shifted(_common((first, end), self._owned(piece, to)), first) for to in ranks)
        mine = self._owned(piece, index)
        put = tuple(
            _shifted(_common(self._range(piece, source), mine), bounds[index]) for source in ranks
        )
        work, output = self._memory.work[first:end], self._memory.output
        return LocalStep(Collective.ALLTOALLV, 0, (sent, put), work, output)

    # Ranges

    @property
    def _is_at_root(self) -> bool:
        return self._root.node == self._place.node

    def _range(self, piece: Piece, index: int | None = None) -> Range:
        """Return the range, in the buffer, of a local rank's part of a piece.

        `index` is the local rank; None: this rank.
        """
        lo, hi = piece.parts[self._place.local_rank if index is None else index]
        return piece.first + lo, piece.first + hi

    def _owned(self, piece: Piece, index: int) -> Range:
        """Return the range, in the buffer, of the elements of local rank `index` in a piece."""
        return _common((piece.first, piece.end), (self._bounds[index], self._bounds[index + 1]))

    def _only(self, index: int, part: Range) -> tuple[Range, ...]:
        """Return the parts of the node's ranks: `part` for rank `index`, empty parts for others."""
        return tuple(part if each == index else (0, 0) for each in range(self._place.nlocal))


def _common(one: Range, other: Range) -> Range:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def _shifted(part: Range, start: int) -> Range:
    """Return the range `part`, counted from element `start`; (0, 0) if the range is empty."""
    return (part[0] - start, part[1] - start) if part[0] < part[1] else (0, 0)


__all__ = ["CallMemory", "LocalStep", "NetworkStep", "StepMaker", "Steps"]
