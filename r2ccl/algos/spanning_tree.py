"""Collectives over one spanning tree, for networks in which some pairs of ranks share no rail.

A tree needs only n - 1 pairs of neighbors. A tree exists if all ranks are connected, directly or
through other ranks. `span` finds a flat tree. `r2ccl.algos.tree` has allreduce, broadcast and
reduce over a tree; this module has allgather and reduce-scatter.

In the allgather every rank forwards each chunk to all neighbors except the sender. In the
reduce-scatter chunk r is reduced on its way to rank r.

Steps: the diameter of the tree. Bytes on the wire: an edge that separates k of the n ranks from the
others carries k/n of the data in one direction and (n - k)/n in the other.

Use these collectives only if no ring is possible in which all neighbors share a rail.
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

#: Maximum number of children of a rank, as long as other ranks can take the remaining ones.
_ARITY = 2


def span(nranks: int, reach: Reach, root: int = 0) -> Parents:
    """Return a spanning tree in which parent and child always share a rail.

    In breadth-first order, each rank gets up to two children among the ranks that it reaches and
    that are not in the tree yet. Each rank that is still not in the tree then becomes a further
    child of the first rank in this order that reaches it.

    Parameters
    ----------
    nranks : int
        Number of ranks.
    reach : callable
        ``reach(a, b)`` returns True if ranks a and b share a rail. It must be symmetric.
    root : int
        Root of the tree.

    Raises
    ------
    InvalidArgument
        If `nranks` is below 1, `root` is not a rank, or some ranks are not connected to `root`. The
        message names them.
    """
    if nranks < 1:
        raise InvalidArgument(f"nranks={nranks}; give 1 or more")
    if not 0 <= root < nranks:
        raise InvalidArgument(f"root={root}; allowed is 0 to {nranks - 1}")
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
            f"ranks {waiting} share no rail with any of {sorted(placed)}, so no tree connects all "
            "ranks: pass a reach that connects them"
        )
    return tuple(parents)


def allgather(parents: Sequence[int], nchannels: int = 1) -> Schedule:
    """Build the allgather over a tree.

    Parameters
    ----------
    parents : Parents
        Parent of each rank, -1 for the root.
    nchannels : int
        Number of independent copies of the pattern, each on its own share of the buffer.

    Raises
    ------
    InvalidArgument
        If `nchannels` is below 1, or `parents` is not a tree; see `r2ccl.algos.tree.grow`.
    """
    return _schedule("allgather", parents, nchannels, _allgather_ops)


def reduce_scatter(parents: Sequence[int], nchannels: int = 1) -> Schedule:
    """Build the reduce-scatter over a tree: rank r ends with chunk r.

    Arguments and errors as in `allgather`.
    """
    return _schedule("reduce_scatter", parents, nchannels, _reduce_scatter_ops)


class _Ways:
    """Neighbors of every rank in a tree, and the next hop between every pair of ranks."""

    def __init__(self, parents: Sequence[int]) -> None:
        tree = grow(parents)
        self.neighbours = [
            sorted((*tree.children[rank], *((parent,) if parent >= 0 else ())))
            for rank, parent in enumerate(parents)
        ]
        ranks = range(len(parents))
        #: ``distance[a][b]`` is in edges; ``towards[a][b]`` is the neighbor of `a` towards `b`.
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
    # Chunks of near ranks come first, so that no chunk waits behind one that arrives later.
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
    # Unlike in the allgather, chunks of far ranks come first: they have the longest way to go.
    distance = ways.distance[rank]
    for chunk in sorted(range(len(ways.neighbours)), key=lambda chunk: (-distance[chunk], chunk)):
        target = ways.towards[rank][chunk]
        sources = [near for near in ways.neighbours[rank] if chunk == rank or near != target]
        for near in sources:
            is_final = chunk == rank and near == sources[-1]
            program.recv_reduce(near, chunk, is_final=is_final)
        if chunk != rank:
            program.send(target, chunk)
    return program.ops()


__all__ = ["allgather", "reduce_scatter", "span"]
