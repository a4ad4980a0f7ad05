"""Trees: reduced up, broadcast down; one tree a channel.

A leaf sends its data to its parent; an inner rank adds what its children send and passes the sum
on; the root has the result, which travels back over the same edges. Slices of the way up and of the
way down are in flight together. Children are added lowest subtree first, for theirs come first.

Every edge of a tree carries its share of the data once each way, so a rank of degree d sends and
receives d times that share: which ranks are leaves of how many trees decides what each must carry.
`double_binary` makes two trees in which the inner ranks of one are leaves of the other,
`r2ccl.algos.packed_trees` those for ranks of any bandwidths.

Steps: twice the height, 2 log2(n) for two-ary trees. Bytes on the wire: the busiest rank sends and
receives about twice the data.

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

#: Of every rank its parent; -1 for the root.
Parents: TypeAlias = tuple[int, ...]


class Tree(NamedTuple):
    """A rooted spanning tree of the ranks.

    Attributes
    ----------
    parents : Parents
    children : tuple of tuple of int
        Of every rank, those of lower subtrees first.
    heights : tuple of int
        Edges from each rank down to its deepest descendant.
    """

    parents: Parents
    children: tuple[tuple[int, ...], ...]
    heights: tuple[int, ...]

    @property
    def root(self) -> int:
        """The rank without a parent."""
        return self.parents.index(-1)

    def degree(self, rank: int) -> int:
        """Edges at `rank`."""
        return len(self.children[rank]) + (self.parents[rank] >= 0)


def grow(parents: Sequence[int]) -> Tree:
    """Make a tree of every rank's parent.

    Raises
    ------
    InvalidArgument
        Not one root, a parent that is no rank, or ranks that no way leads to from the root.
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
            f"parents={tuple(parents)}: give every rank a parent of 0 to {n - 1}, and -1 to the "
            "one root that all of them lead to"
        )
    heights = [0] * n
    for rank in reversed(order):
        heights[rank] = max((heights[child] + 1 for child in found[rank]), default=0)
    children = tuple(tuple(sorted(each, key=lambda c: (heights[c], c))) for each in found)
    return Tree(tuple(parents), children, tuple(heights))


def allreduce(trees: Sequence[Sequence[int]], name: str = "tree") -> Schedule:
    """Build the allreduce over `trees`, one channel each, of equal weight.

    Parameters
    ----------
    trees : sequence of Parents
        Of the same ranks; with one rank the schedule copies input to output.
    name : str
        Who chose the trees.

    Raises
    ------
    InvalidArgument
        No tree, or one that is none, see `grow`.
    """
    return _schedule(trees, name, "allreduce", _allreduce_ops, 2)


def reduce(trees: Sequence[Sequence[int]], name: str = "tree") -> Schedule:
    """Build the reduction to the common root of `trees`; else as `allreduce`."""
    return _schedule(trees, name, "reduce", _reduce_ops, 1)


def broadcast(trees: Sequence[Sequence[int]], name: str = "tree") -> Schedule:
    """Build the broadcast from the common root of `trees`; else as `allreduce`."""
    return _schedule(trees, name, "broadcast", _broadcast_ops, 1)


def double_binary(nranks: int) -> tuple[Parents, Parents]:
    """Return two trees of height log2(n), in which no rank has more than four edges together.

    The first is in order: a rank's height is the number of its trailing zeros, so all odd ranks are
    leaves. The second is its mirror image, or for an odd number of ranks the same one rank further.
    """
    first = tuple(_in_order_parent(rank, nranks) for rank in range(nranks))
    if nranks % 2:
        second = tuple(_shift(first[(rank - 1) % nranks], nranks) for rank in range(nranks))
    else:
        last = nranks - 1
        second = tuple(-1 if p < 0 else last - p for p in reversed(first))
    return first, second


def chain(order: Sequence[int]) -> Parents:
    """Return the tree in which each rank of `order` is the parent of the next."""
    parents = [-1] * len(order)
    for parent, child in pairwise(order):
        parents[child] = parent
    return tuple(parents)


def turned(parents: Sequence[int], root: int) -> Parents:
    """Renumber the ranks of a tree, round, so that `root` is its root."""
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
    if not trees or len({len(tree.parents) for tree in trees}) != 1:
        raise InvalidArgument(f"{len(trees)} trees: give one or more, all of the same ranks")
    if collective != "allreduce" and len(roots) != 1:
        raise InvalidArgument(f"{collective} over trees with roots {sorted(roots)}: give one root")
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
    """Add what the children send, and pass the sum on."""
    children, parent = tree.children[rank], tree.parents[rank]
    is_root = parent < 0
    for child in children:
        program.recv_reduce(child, 0, is_final=is_root and child == children[-1])
    if not is_root:
        program.send(parent, 0)
    elif not children:
        program.copy(0, Space.INPUT, is_final=True)


def _down(program: ProgramBuilder, tree: Tree, rank: int) -> None:
    """Take the result from the parent, and pass it on; deepest subtree first."""
    if tree.parents[rank] >= 0:
        # The result cannot be there before this rank's part of it was.
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
    "reduce",
    "turned",
]
