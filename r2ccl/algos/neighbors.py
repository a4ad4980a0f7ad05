"""Ranks with which a rank exchanges data in the schedules that connect few pairs of ranks.

Rings and chains in rank order connect consecutive ranks. Recursive doubling, dissemination and
binary trees connect ranks at distances of powers of two; recursive doubling uses further distances
if the number of ranks is not a power of two. If nodes have several ranks, such schedules also run
among nodes. Ranks at the same position in nodes that are a power of two apart are therefore
included too. A rank thus has about 2 log2(n) neighbors, and up to twice as many with several ranks
per node. Not included are the pairs of other schedules, such as direct exchanges, packed trees and
the schedules for a degraded network; the further distances of recursive doubling among nodes; and
other pairs within a node that hierarchical schedules connect.
"""

from __future__ import annotations

from collections.abc import Sequence

from r2ccl.algos import recursive_doubling
from r2ccl.errors import InvalidArgument


def neighbors(rank: int, nranks: int, nodes: Sequence[int] = ()) -> frozenset[int]:
    """Return the neighbors of `rank`: its peers in rings, chains, binary trees and doublings.

    The module docstring defines them exactly. If a is a neighbor of b, b is a neighbor of a.

    Parameters
    ----------
    rank, nranks : int
    nodes : sequence of int, optional
        Number of the node of each rank. Ignored unless every node has equally many ranks, with
        consecutive numbers. Default: one rank per node.

    Returns
    -------
    frozenset of int
        About 2 log2(`nranks`) other ranks, up to twice as many with several ranks per node.

    Raises
    ------
    InvalidArgument
        If `rank` is not in ``range(nranks)``.
    """
    if not 0 <= rank < nranks:
        raise InvalidArgument(f"rank={rank}; allowed is 0 to {nranks - 1}")
    distances = set(_powers_of_two(nranks))
    per_node = _ranks_per_node(nodes)
    if per_node > 1:
        distances |= {per_node * power for power in _powers_of_two(nranks // per_node)}
    near = {(rank + sign * distance) % nranks for distance in distances for sign in (1, -1)}
    if nranks > 1:  # if `nranks` is no power of two, recursive doubling uses more distances
        ops = recursive_doubling.allreduce(nranks).program(rank).channels[0]
        near |= {op.peer for op in ops if op.peer >= 0}
    return frozenset(near - {rank})


def _powers_of_two(limit: int) -> list[int]:
    return [1 << power for power in range(max(1, limit - 1).bit_length()) if 1 << power < limit]


def _ranks_per_node(nodes: Sequence[int]) -> int:
    """Return the number of consecutive ranks that every node has.

    Return 0 if `nodes` is empty, nodes differ in their number of ranks, or the ranks of a node are
    not consecutive.
    """
    if not nodes:
        return 0
    number = list(nodes).count(nodes[0])
    is_regular = all(
        len(set(nodes[first : first + number])) == 1 for first in range(0, len(nodes), number)
    )
    return number if is_regular and len(nodes) == number * len(set(nodes)) else 0


__all__ = ["neighbors"]
