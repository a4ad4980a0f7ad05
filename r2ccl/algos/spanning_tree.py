"""Collectives over one spanning tree, for networks in which not every pair of ranks has a rail.

A tree needs only n - 1 pairs of neighbours, so there is one whenever the ranks are connected at
all. `span` finds a flat one; `r2ccl.algos.tree` has allreduce, broadcast and reduce over it.

Allgather: every rank passes each chunk on to all neighbours but the one it came from.
Reduce-scatter is the mirror image: chunk r is added up on its way to rank r.

Steps: the tree's diameter. Bytes on the wire: over the edge between two parts of a and n - a ranks,
a/n of the data one way and the rest the other way.

They win only where no ring of neighbours exists. Imports `tree`. Invariant: both ends of an edge
list its chunks in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction

import msgspec

from r2ccl.algos.packed_trees import Reach
from r2ccl.algos.tree import Parents, grow
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.cost import measure
from r2ccl.schedule.ir import Cost, Op, Schedule, Space

#: Children of a rank while others can take more.
_ARITY = 2


def span(nranks: int, reach: Reach, root: int = 0) -> Parents:
    """Return a spanning tree whose neighbours reach each other.

    Each rank, in breadth-first order, takes up to two children that no other rank of its level
    needs; what is left over joins the highest rank it reaches.

    Parameters
    ----------
    nranks : int
    reach : callable
    root : int

    Raises
    ------
    InvalidArgument
        Ranks that no way leads to from `root`; names them.
    """
    parents = [-1] * nranks
    waiting = [(root + place) % nranks for place in range(1, nranks)]
    placed = [root]
    nchildren = dict.fromkeys(range(nranks), 0)
    for limit in (_ARITY, nranks):
        at = 0
        while at < len(placed) and waiting:
            parent = placed[at]
            free = limit - nchildren[parent]
            chosen = [rank for rank in waiting if reach(parent, rank)][: max(free, 0)]
            for child in chosen:
                parents[child] = parent
                waiting.remove(child)
            nchildren[parent] += len(chosen)
            placed += chosen
            at += 1
    if waiting:
        raise InvalidArgument(
            f"ranks {waiting} share no rail with any of {sorted(placed)}; no tree spans both"
        )
    return tuple(parents)


def allgather(parents: Sequence[int], nchannels: int = 1) -> Schedule:
    """Build the allgather over a tree.

    Parameters
    ----------
    parents : Parents
        Of every rank its parent, -1 for the root.
    nchannels : int
        Shares of the data that travel independently of each other.

    Raises
    ------
    InvalidArgument
        It is no tree, see `tree.grow`.
    """
    return _schedule("allgather", parents, nchannels, _allgather_ops)


def reduce_scatter(parents: Sequence[int], nchannels: int = 1) -> Schedule:
    """Build the reduce-scatter over a tree: rank r ends with chunk r; else as `allgather`."""
    return _schedule("reduce_scatter", parents, nchannels, _reduce_scatter_ops)


class _Ways:
    """For every rank its neighbours, and for every pair the neighbour that leads there."""

    def __init__(self, parents: Sequence[int]) -> None:
        tree = grow(parents)
        self.neighbours = [
            sorted((*tree.children[rank], *((parent,) if parent >= 0 else ())))
            for rank, parent in enumerate(parents)
        ]
        ranks = range(len(parents))
        #: ``distance[a][b]`` in edges, ``towards[a][b]``: the neighbour of `a` on the way to `b`.
        self.distance = [self._distances(rank) for rank in ranks]
        self.towards = [
            [
                rank
                if rank == other
                else min(self.neighbours[rank], key=lambda near: self.distance[other][near])
                for other in ranks
            ]
            for rank in ranks
        ]

    def _distances(self, start: int) -> list[int]:
        found = {start: 0}
        queue = deque([start])
        while queue:
            at = queue.popleft()
            for near in self.neighbours[at]:
                if near not in found:
                    found[near] = found[at] + 1
                    queue.append(near)
        return [found[rank] for rank in range(len(self.neighbours))]


def _schedule(
    collective: str,
    parents: Sequence[int],
    nchannels: int,
    ops_of: Callable[[_Ways, int], tuple[Op, ...]],
) -> Schedule:
    n = len(parents)
    ways = _Ways(parents)
    schedule = Schedule(
        name="spanning_tree",
        collective=collective,
        nranks=n,
        nchunks=(n,) * nchannels,
        cost=Cost(0, Fraction(0), Fraction(0), 0),
        generate=lambda rank: (ops_of(ways, rank),) * nchannels,
    )
    return msgspec.structs.replace(schedule, cost=measure(schedule))


def _allgather_ops(ways: _Ways, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    program.copy(rank, Space.INPUT)
    chunks = range(len(ways.neighbours))
    # Near chunks come first, so that none waits behind one that is still far away.
    for chunk in sorted(chunks, key=lambda chunk: (ways.distance[rank][chunk], chunk)):
        source = ways.towards[rank][chunk]
        if chunk != rank:
            program.recv(source, chunk)
        for near in ways.neighbours[rank]:
            if chunk == rank or near != source:
                program.send(near, chunk)
    return program.ops()


def _reduce_scatter_ops(ways: _Ways, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    if len(ways.neighbours) == 1:
        program.copy(0, Space.INPUT, is_final=True)
    for chunk in range(len(ways.neighbours)):
        target = ways.towards[rank][chunk]
        sources = [near for near in ways.neighbours[rank] if chunk == rank or near != target]
        for near in sources:
            is_final = chunk == rank and near == sources[-1]
            program.recv_reduce(near, chunk, is_final=is_final)
        if chunk != rank:
            program.send(target, chunk)
    return program.ops()


__all__ = ["allgather", "reduce_scatter", "span"]
