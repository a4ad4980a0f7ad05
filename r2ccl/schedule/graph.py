"""Algorithms on directed graphs in arrays: topological levels, strong components, cycles.

Nodes are ``0 .. nnodes - 1``; edge ``i`` leads from ``source[i]`` to ``target[i]``. Apart from
sorts, the time is linear in the number of nodes and edges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Levels(NamedTuple):
    """Result of `topological_levels`.

    Parameters
    ----------
    level : ndarray of int64, shape (nnodes,)
        Number of edges on the longest path to the node; -1 if the node is on a cycle or reachable
        from a cycle.
    distance : ndarray of int64, shape (nnodes,)
        Largest sum of weights on a path to the node; undefined where ``level`` is -1.
    """

    level: Ints
    distance: Ints


def topological_levels(nnodes: int, source: Ints, target: Ints, weight: Ints) -> Levels:
    """Return the topological level of every node, and the largest weight of a path to it.

    Uses Kahn's algorithm; each level takes one vectorized NumPy step.
    """
    by_source = np.argsort(source, kind="stable")
    heads, gains = target[by_source], weight[by_source]
    first = np.zeros(nnodes + 1, np.int64)
    np.cumsum(np.bincount(source, minlength=nnodes), out=first[1:])
    missing = np.bincount(target, minlength=nnodes)
    level = np.full(nnodes, -1, np.int64)
    distance = np.zeros(nnodes, np.int64)
    entry_of = np.empty(nnodes, np.int64)
    frontier = np.flatnonzero(missing == 0)
    depth = 0
    while frontier.size:
        level[frontier] = depth
        depth += 1
        fan_out = first[frontier + 1] - first[frontier]
        ends = np.cumsum(fan_out)
        edges = np.arange(ends[-1]) + np.repeat(first[frontier] - ends + fan_out, fan_out)
        reached = heads[edges]
        np.maximum.at(distance, reached, np.repeat(distance[frontier], fan_out) + gains[edges])
        np.subtract.at(missing, reached, 1)
        ready = reached[missing[reached] == 0]
        entries = np.arange(ready.size)
        entry_of[ready] = entries  # a node can be in `ready` several times: keep one entry
        frontier = ready[entry_of[ready] == entries]
    return Levels(level, distance)


def strong_components(nnodes: int, source: Ints, target: Ints) -> Ints:
    """Return a label for every node; nodes of one strongly connected component have equal labels.

    The label of a component is the number of one of its nodes. Uses Tarjan's algorithm without
    recursion.
    """
    heads: list[list[int]] = [[] for _ in range(nnodes)]
    for tail, head in zip(source.tolist(), target.tolist(), strict=True):
        heads[tail].append(head)
    number = [-1] * nnodes  # order of discovery
    low = [0] * nnodes  # smallest number reachable through the subtree
    label = np.full(nnodes, -1, np.int64)
    pending: list[int] = []  # discovered nodes whose component is not complete
    count = 0
    for root in range(nnodes):
        if number[root] >= 0:
            continue
        walk = [(root, iter(heads[root]))]
        number[root] = low[root] = count
        count += 1
        pending.append(root)
        while walk:
            node, rest = walk[-1]
            for head in rest:
                if number[head] < 0:
                    number[head] = low[head] = count
                    count += 1
                    pending.append(head)
                    walk.append((head, iter(heads[head])))
                    break
                if label[head] < 0:
                    low[node] = min(low[node], number[head])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[node])
                if low[node] == number[node]:
                    cut = len(pending) - 1
                    while pending[cut] != node:
                        cut -= 1
                    label[pending[cut:]] = node
                    del pending[cut:]
    return label


def find_cycle(nnodes: int, source: Ints, target: Ints) -> list[int]:
    """Return the nodes of one cycle, in edge order.

    There must be at least one edge, and every node with an outgoing edge must have an incoming
    edge.
    """
    before = np.zeros(nnodes, np.int64)
    before[target] = source
    seen: dict[int, int] = {}
    path: list[int] = []
    node = int(target[0])
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = int(before[node])
    return path[seen[node] :][::-1]


__all__ = ["Bools", "Ints", "Levels", "find_cycle", "strong_components", "topological_levels"]
