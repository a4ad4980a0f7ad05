"""Gather and scatter over a tree, for small parts and for ranks without a common rail.

In the gather every rank but the root sends its own part and those of its descendants to its parent;
in the scatter, parts travel in the opposite direction. Parts that a rank only forwards stay in
scratch memory. In a `binomial` tree, the distance between two neighbors is a power of two, as in
dissemination, so a call uses only connections that dissemination uses too.

Steps: the height of the tree; at most floor(log2 n) in a binomial tree. Bytes on the wire: a part
crosses each edge between its rank and the root once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from r2ccl.algos.tree import Parents, Tree, grow, turned
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Cost, Op, Schedule, Space


def gather(parents: Sequence[int], nchannels: int = 1, name: str = "binomial") -> Schedule:
    """Build the gather over a tree: its root gets part r from rank r.

    Parameters
    ----------
    parents : Parents
        Parent of each rank, -1 for the root.
    nchannels : int
        Number of independent copies of the pattern, each on its own share of the buffer.
    name : str
        Name of the schedule.

    Raises
    ------
    InvalidArgument
        If `nchannels` is below 1, or `parents` is not a tree; see `r2ccl.algos.tree.grow`.
    """
    return _schedule("gather", parents, nchannels, name, _gather_ops)


def scatter(parents: Sequence[int], nchannels: int = 1, name: str = "binomial") -> Schedule:
    """Build the scatter over a tree: rank r gets part r from the root of the tree.

    Arguments and errors as in `gather`.
    """
    return _schedule("scatter", parents, nchannels, name, _scatter_ops)


def binomial(nranks: int, root: int = 0) -> Parents:
    """Return the binomial tree with the given root.

    Let d be ``rank - root`` modulo `nranks`. The d of a rank's parent is the d of the rank with the
    lowest set bit cleared.

    Raises
    ------
    InvalidArgument
        If `nranks` is below 1, or `root` is not a rank.
    """
    if nranks < 1:
        raise InvalidArgument(f"nranks={nranks}; give 1 or more")
    if not 0 <= root < nranks:
        raise InvalidArgument(f"root={root}; allowed is 0 to {nranks - 1}")
    return turned((-1, *(rank & (rank - 1) for rank in range(1, nranks))), root)


def _schedule(
    collective: str,
    parents: Sequence[int],
    nchannels: int,
    name: str,
    ops_of: Callable[[Tree, list[list[int]], int], tuple[Op, ...]],
) -> Schedule:
    tree = grow(parents)
    n = len(parents)
    orders = [_order(tree, rank) for rank in range(n)]
    branch = max((len(orders[rank]) for rank in range(n) if rank != tree.root), default=0)
    sizes = Fraction(branch, n), Fraction(n - 1, n)
    sent, received = sizes if collective == "gather" else sizes[::-1]
    return Schedule(
        name=name,
        collective=collective,
        nranks=n,
        nchunks=(n,) * nchannels,
        cost=Cost(tree.heights[tree.root], sent, received, max(n, 2 * branch - 1)),
        generate=lambda rank: (ops_of(tree, orders, rank),) * nchannels,
        root=tree.root,
    )


def _order(tree: Tree, rank: int) -> list[int]:
    """Return the parts of `rank` and its descendants, in their order on the edge to its parent."""
    found, waiting = [], [rank]
    while waiting:
        found.append(waiting.pop())
        waiting.extend(reversed(tree.children[found[-1]]))
    return found


def _gather_ops(tree: Tree, orders: list[list[int]], rank: int) -> tuple[Op, ...]:
    program, parent = ProgramBuilder(), tree.parents[rank]
    if parent < 0:
        program.copy(rank, Space.INPUT)
    for child in tree.children[rank]:
        for part in orders[child]:
            program.recv(child, part, space=Space.OUTPUT if parent < 0 else Space.SCRATCH)
    for part in orders[rank] if parent >= 0 else ():
        program.send(parent, part, space=Space.INPUT if part == rank else Space.SCRATCH)
    return program.ops()


def _scatter_ops(tree: Tree, orders: list[list[int]], rank: int) -> tuple[Op, ...]:
    program, parent = ProgramBuilder(), tree.parents[rank]
    if parent < 0:
        program.copy(rank, Space.INPUT)
    for part in orders[rank] if parent >= 0 else ():
        program.recv(parent, part, space=Space.OUTPUT if part == rank else Space.SCRATCH)
    for child in tree.children[rank]:
        for part in orders[child]:
            program.send(child, part, space=Space.INPUT if parent < 0 else Space.SCRATCH)
    return program.ops()


__all__ = ["binomial", "gather", "scatter"]
