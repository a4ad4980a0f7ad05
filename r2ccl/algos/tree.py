"""Allreduce, reduce and broadcast over trees, one tree per channel.

In the allreduce a leaf sends its data to its parent. An inner rank reduces its own data and that of
its children, and sends the sum to its parent. The root gets the result, which is broadcast over the
same edges. Slices are in flight up and down the tree at the same time. A rank reduces its
children's data by ascending height of their subtrees, because the data of flat subtrees arrives
first.

In the allreduce, every edge carries the tree's share of the data once in each direction, so a rank
of degree d sends and receives d times that share. A rank that is a leaf in many trees thus has a
low load. `double_binary` returns two trees in which the inner ranks of one are leaves of the other,
except rank 0 if the number of ranks is odd. `r2ccl.algos.packed_trees` builds trees for ranks of
arbitrary bandwidths.

Steps: twice the height for an allreduce, 2 ceil(log2(n)) with binary trees; the height for a reduce
or a broadcast. Bytes on the wire: in an allreduce over a double binary tree, the busiest rank sends
and receives at most twice the data.

References
----------
Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35(12), 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from r2ccl.errors import InvalidArgument
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.ir import Cost, Op, Schedule, Space

#: Parent of each rank; -1 for the root.
Parents: TypeAlias = tuple[int, ...]


class Tree(NamedTuple):
    """Rooted spanning tree of the ranks.

    Attributes
    ----------
    parents : Parents
    children : tuple of tuple of int
        Children of each rank, by ascending height of their subtrees.
    heights : tuple of int
        Number of edges from each rank to its deepest descendant.
    """

    parents: Parents
    children: tuple[tuple[int, ...], ...]
    heights: tuple[int, ...]

    @property
    def root(self) -> int:
        """Rank without a parent."""
        return self.parents.index(-1)

    def degree(self, rank: int) -> int:
        """Return the number of edges at `rank`."""
        return len(self.children[rank]) + (self.parents[rank] >= 0)


def grow(parents: Sequence[int]) -> Tree:
    """Build a `Tree` from the parent of each rank.

    Raises
    ------
    InvalidArgument
        If there is not exactly one root, a parent is not a rank, or a rank does not descend from
        the root.
    """
    n = len(parents)
    found: list[list[int]] = [[] for _ in range(n)]
    roots = [rank for rank, parent in enumerate(parents) if parent == -1]
    for rank, parent in enumerate(parents):
        if 0 <= parent < n:
            found[parent].append(rank)
    order = list(roots)
    for rank in order:
        order.extend(found[rank])
    if len(roots) != 1 or len(order) != n:
        raise InvalidArgument(
            f"parents={tuple(parents)}: give the parent -1 to exactly one rank, which is the root, "
            f"and a parent of 0 to {n - 1} to every other rank; all ranks must descend from the "
            "root"
        )
    heights = [0] * n
    for rank in reversed(order):
        heights[rank] = max((heights[child] + 1 for child in found[rank]), default=0)
    children = tuple(tuple(sorted(each, key=lambda c: (heights[c], c))) for each in found)
    return Tree(tuple(parents), children, tuple(heights))


def allreduce(trees: Sequence[Sequence[int]], name: str = "tree") -> Schedule:
    """Build the allreduce over `trees`: one channel per tree, of equal weights.

    Parameters
    ----------
    trees : sequence of Parents
        Parent of each rank in each tree, -1 for the root. All trees have the same number of ranks.
        With one rank the schedule copies input to output.
    name : str
        Name of the schedule.

    Raises
    ------
    InvalidArgument
        If there is no tree, the trees differ in their number of ranks, or one of them is not a
        tree; see `grow`.
    """
    return _schedule(trees, name, "allreduce", _allreduce_ops, 2)


def reduce(trees: Sequence[Sequence[int]], name: str = "tree") -> Schedule:
    """Build the reduce to the common root of `trees`: one channel per tree, of equal weights.

    Arguments and errors as in `allreduce`; also raises `InvalidArgument` if the roots differ.
    """
    return _schedule(trees, name, "reduce", _reduce_ops, 1)


def broadcast(trees: Sequence[Sequence[int]], name: str = "tree") -> Schedule:
    """Build the broadcast from the common root of `trees`: one channel per tree, of equal weights.

    Arguments and errors as in `allreduce`; also raises `InvalidArgument` if the roots differ.
    """
    return _schedule(trees, name, "broadcast", _broadcast_ops, 1)


def double_binary(nranks: int) -> tuple[Parents, Parents]:
    """Return two trees of height ceil(log2(n)), in which a rank has at most four edges in total.

    In the first tree rank 0 is the root. The height of any other rank is the number of trailing
    zero bits of its number, so all odd ranks are leaves. The second tree is the mirror image of the
    first for an even number of ranks, and the first tree shifted by one rank for an odd number.

    Raises
    ------
    InvalidArgument
        If `nranks` is below 1.
    """
    if nranks < 1:
        raise InvalidArgument(f"nranks={nranks}; give 1 or more")
    first = tuple(_in_order_parent(rank, nranks) for rank in range(nranks))
    if nranks % 2:
        second = tuple(_shift(first[(rank - 1) % nranks], nranks) for rank in range(nranks))
    else:
        last = nranks - 1
        second = tuple(-1 if p < 0 else last - p for p in reversed(first))
    return first, second


def chain(order: Sequence[int]) -> Parents:
    """Return the tree in which each rank of `order`, a permutation, is the parent of the next."""
    parents = [-1] * len(order)
    for parent, child in pairwise(order):
        parents[child] = parent
    return tuple(parents)


def line(nranks: int, root: int) -> Parents:
    """Return the tree of two chains to `root`, one from rank 0 and one from the last rank.

    Every subtree has consecutive ranks, so a reduce keeps the rank order.
    """
    return tuple(
        -1 if rank == root else rank + (1 if rank < root else -1) for rank in range(nranks)
    )


def turned(parents: Sequence[int], root: int) -> Parents:
    """Return the tree with all rank numbers shifted cyclically so that `root` becomes the root."""
    n = len(parents)
    by = root - parents.index(-1)
    found = [-1] * n
    for rank, parent in enumerate(parents):
        found[(rank + by) % n] = -1 if parent < 0 else (parent + by) % n
    return tuple(found)


def _in_order_parent(rank: int, nranks: int) -> int:
    if rank == 0:
        return -1
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    return up if up < nranks else rank ^ bit


def _shift(parent: int, nranks: int) -> int:
    return -1 if parent < 0 else (parent + 1) % nranks


def _schedule(
    parents: Sequence[Sequence[int]],
    name: str,
    collective: str,
    ops_of: Callable[[Tree, int], tuple[Op, ...]],
    ways: int,
) -> Schedule:
    trees = [grow(each) for each in parents]
    roots = {tree.root for tree in trees}
    sizes = sorted({len(tree.parents) for tree in trees})
    if len(sizes) != 1:
        raise InvalidArgument(
            f"trees of {sizes} ranks: give one tree or more, all with the same number of ranks"
        )
    if collective != "allreduce" and len(roots) != 1:
        raise InvalidArgument(
            f"{collective} over trees with roots {sorted(roots)}: give trees with one common root"
        )
    n = len(trees[0].parents)
    return Schedule(
        name=name,
        collective=collective,
        nranks=n,
        nchunks=(1,) * len(trees),
        cost=_cost(trees, collective, ways),
        generate=lambda rank: tuple(ops_of(tree, rank) for tree in trees),
        root=0 if collective == "allreduce" else min(roots),
    )


def _cost(trees: Sequence[Tree], collective: str, ways: int) -> Cost:
    ranks = range(len(trees[0].parents))
    ups = [sum(tree.parents[rank] >= 0 for tree in trees) for rank in ranks]
    downs = [sum(len(tree.children[rank]) for tree in trees) for rank in ranks]
    both = [up + down for up, down in zip(ups, downs, strict=True)]
    sent, received = {
        "allreduce": (max(both), max(both)),
        "reduce": (max(ups), max(downs)),
        "broadcast": (max(downs), max(ups)),
    }[collective]
    return Cost(
        ways * max(tree.heights[tree.root] for tree in trees),
        Fraction(sent, len(trees)),
        Fraction(received, len(trees)),
        max(_nops(tree, rank, collective, ways) for tree in trees for rank in ranks),
    )


def _nops(tree: Tree, rank: int, collective: str, ways: int) -> int:
    has_copy = rank == tree.root and (collective == "broadcast" or not tree.children[rank])
    return ways * tree.degree(rank) + has_copy


def _allreduce_ops(tree: Tree, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    _up(program, tree, rank)
    _down(program, tree, rank)
    return program.ops()


def _reduce_ops(tree: Tree, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    _up(program, tree, rank)
    return program.ops()


def _broadcast_ops(tree: Tree, rank: int) -> tuple[Op, ...]:
    program = ProgramBuilder()
    if rank == tree.root:
        program.copy(0, Space.INPUT)
    _down(program, tree, rank)
    return program.ops()


def _up(program: ProgramBuilder, tree: Tree, rank: int) -> None:
    """Add the ops that reduce the children's data and send the sum to the parent."""
    children, parent = tree.children[rank], tree.parents[rank]
    is_root = parent < 0
    for child in children:
        program.recv_reduce(child, 0, is_final=is_root and child == children[-1])
    if not is_root:
        program.send(parent, 0)
    elif not children:
        program.copy(0, Space.INPUT, is_final=True)


def _down(program: ProgramBuilder, tree: Tree, rank: int) -> None:
    """Add the ops that receive the result and send it to the children, deepest subtree first."""
    if tree.parents[rank] >= 0:
        # The arrival of the result proves that this rank's contribution arrived.
        program.recv(tree.parents[rank], 0, is_proof=True)
    for child in reversed(tree.children[rank]):
        program.send(child, 0)


__all__ = [
    "Parents",
    "Tree",
    "allreduce",
    "broadcast",
    "chain",
    "double_binary",
    "grow",
    "line",
    "reduce",
    "turned",
]
