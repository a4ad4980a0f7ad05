"""Packed trees: allreduce for nodes of arbitrary bandwidths.

If a byte is reduced up one spanning tree and broadcast down again, a node sends and receives the
byte once per edge. The number of its edges is its degree. An allreduce over c trees, each with 1/c
of the data, therefore takes the time of the node with the largest ratio of total degree to
bandwidth. The trees are built in three steps:

1. Compute the mean degree of every node (`degrees`): in proportion to its bandwidth, at least 1
   (every tree contains the node) and at most n - 1. The sum is 2(n - 1), as in a tree.
2. Round the total degree of each node over all trees. Then assign edges tree by tree, always to the
   node that lags most behind an even distribution of its total over the trees. Edges are assigned
   in pairs where possible, as in a double binary tree: many single edges would make long paths;
   pairs keep the height logarithmic.
3. Build each tree as flat as its degrees allow (`flat_tree`).

With equal bandwidths this nearly reaches the bandwidth of a ring, at the height of a binary tree. A
node that lost bandwidth is a leaf in more trees.

The lower bound (`lower_bound`) holds for every schedule that does not encode data, if the rails of
each node act as one port: each node sends and receives all the data at least once, and each byte
takes n - 1 transfers to be reduced and n - 1 to be distributed. Packed trees approach the bound
with many trees and many slices.

All computations use integers and fractions; equal arguments give equal trees on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush

from r2ccl.algos import tree
from r2ccl.algos.bandwidths import require_positive
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Schedule

#: ``reach(a, b)`` returns True if nodes a and b share a rail.
Reach = Callable[[int, int], bool]


def allreduce(bandwidths: Sequence[int], ntrees: int, reach: Reach | None = None) -> Schedule:
    """Build the allreduce over trees packed for `bandwidths`.

    Parameters
    ----------
    bandwidths : sequence of int
        Bandwidth of each node, in any unit, above 0.
    ntrees : int
        Number of trees, one per channel. More trees come closer to the optimal mean degrees.
    reach : callable, optional
        ``reach(a, b)`` returns True if nodes a and b can be neighbors. Default: all can.

    Raises
    ------
    InvalidArgument
        If there is no node, a bandwidth or `ntrees` is below 1, or no tree connects all nodes.
    """
    return tree.allreduce(pack(bandwidths, ntrees, reach), "packed_trees")


def lower_bound(bandwidths: Sequence[int]) -> Fraction:
    """Return a lower bound on the time of any allreduce of one unit of data.

    `bandwidths` has the bandwidth of each node in units of data per unit of time.

    Raises
    ------
    InvalidArgument
        If there is no node, or a bandwidth is below 1.
    """
    require_positive(bandwidths)
    n = len(bandwidths)
    if n == 1:
        return Fraction(0)
    return max(Fraction(1, min(bandwidths)), Fraction(2 * (n - 1), sum(bandwidths)))


def degrees(bandwidths: Sequence[int]) -> tuple[Fraction, ...]:
    """Return the mean degree of each node: in proportion to bandwidth, between 1 and n - 1.

    A single node has degree 0. The mean degrees add up to 2(n - 1), as the degrees of a tree do.

    Raises
    ------
    InvalidArgument
        If there is no node, or a bandwidth is below 1.
    """
    require_positive(bandwidths)
    n = len(bandwidths)
    if n == 1:
        return (Fraction(0),)
    low, high = set[int](), set[int]()
    while True:
        free = [node for node in range(n) if node not in low and node not in high]
        rest = 2 * (n - 1) - len(low) - (n - 1) * len(high)
        if not free:
            break
        level = Fraction(rest, sum(bandwidths[node] for node in free))
        wanted = {node: level * bandwidths[node] for node in free}
        # Clamping at one limit changes the degrees of all other nodes, so clamp at one limit per
        # iteration: the one with the larger excess.
        short = sum(1 - each for each in wanted.values() if each < 1)
        over = sum(each - (n - 1) for each in wanted.values() if each > n - 1)
        if not short and not over:
            return tuple(wanted.get(v, Fraction(1 if v in low else n - 1)) for v in range(n))
        if short >= over:
            low.update(node for node in free if wanted[node] < 1)
        else:
            high.update(node for node in free if wanted[node] > n - 1)
    return tuple(Fraction(1 if node in low else n - 1) for node in range(n))


def pack(
    bandwidths: Sequence[int], ntrees: int, reach: Reach | None = None
) -> tuple[tree.Parents, ...]:
    """Return the packed trees; arguments and errors as in `allreduce`."""
    if ntrees < 1:
        raise InvalidArgument(f"ntrees={ntrees}; give 1 or more")
    n = len(bandwidths)
    sums = _round([ntrees * each for each in degrees(bandwidths)])
    return tuple(
        flat_tree(dealt, first, reach)
        for first, dealt in zip(_firsts(n, ntrees), _deal(sums, ntrees), strict=True)
    )


def pack_rooted(rooms: Sequence[int], ntrees: int, root: int) -> tuple[tree.Parents, ...]:
    """Return packed trees with a common root, for a broadcast or a reduce.

    Every node except the root has one edge to its parent in each tree, so its number of edges to
    children determines its load. Over all trees, a node gets edges to children about in proportion
    to `rooms`, mostly in pairs, so that the trees are flat. The root gets at least one such edge in
    each tree.

    Parameters
    ----------
    rooms : sequence of int
        For each node, its maximum number of edges to children over all trees; `ntrees` or more.
    ntrees : int
        Number of trees, one per channel.
    root : int
        Root of all trees.

    Raises
    ------
    InvalidArgument
        If `ntrees` is below 1, `root` is not a node, or a value of `rooms` is below `ntrees`.
    """
    n = len(rooms)
    if ntrees < 1 or not 0 <= root < n or min(rooms) < ntrees:
        raise InvalidArgument(
            f"rooms={tuple(rooms)}, ntrees={ntrees}, root={root}: give 1 tree or more, a root of 0 "
            f"to {n - 1}, and {ntrees} edges or more for every node"
        )
    if n == 1:
        return ((-1,),) * ntrees
    total = ntrees * (n - 1)
    # The root has an edge down in every tree.
    of_root = max(Fraction(total * rooms[root], sum(rooms)), Fraction(ntrees))
    rest = sum(rooms) - rooms[root]
    shares = [(total - of_root) * Fraction(room, rest) for room in rooms]
    # Leave out the edge that the root has in every tree: `_deal_down` adds it.
    shares[root] = of_root - ntrees
    left = [room - ntrees * (node == root) for node, room in enumerate(rooms)]
    extra = _in_twos(shares, left)
    return tuple(
        _rooted_tree(wanted, root, first)
        for first, wanted in zip(_firsts(n, ntrees), _deal_down(extra, ntrees, root), strict=True)
    )


def _deal_down(extra: Sequence[int], ntrees: int, root: int) -> list[list[int]]:
    """Return each node's number of children in each tree, one list per tree.

    Over all trees, node v gets ``extra[v]`` children; the root gets one more in every tree.
    """
    n = len(extra)
    left = list(extra)
    given = list(left)
    dealt = []
    for turn in range(1, ntrees + 1):
        row = [0] * n
        row[root] = 1

        def urgency(node: int, turn: int = turn) -> int:
            return (left[node] - given[node]) * ntrees + given[node] * turn

        missing = _take(n - 2, 1, 2, left, row, urgency, lambda rest: rest > 1)
        _take(missing, 0, 1, left, row, urgency, lambda rest: rest > 0)
        dealt.append(row)
    return dealt


def _rooted_tree(wanted: Sequence[int], root: int, first: int) -> tree.Parents:
    """Return the flattest tree in which node v has ``wanted[v]`` children.

    After the root, nodes are added in order of ``wanted``, largest first. The parent of a node is
    the earliest added node that still lacks a child. `first` is as in `flat_tree`.
    """
    n = len(wanted)
    waiting = [node for node in range(n) if node != root]
    waiting.sort(key=lambda node: (-wanted[node], (node - first) % n))
    parents = [-1] * n
    free = deque([root] * wanted[root])
    for node in waiting:
        parents[node] = free.popleft()
        free.extend([node] * wanted[node])
    return tuple(parents)


def flat_tree(wanted: Sequence[int], first: int = 0, reach: Reach | None = None) -> tree.Parents:
    """Return a flat tree with the given degrees; without `reach`, the flattest tree.

    Nodes are added in order of degree, largest first, as far as `reach` allows. The parent of a
    node is the earliest added node that it reaches and that has a free edge, that is, fewer edges
    than its degree.

    Parameters
    ----------
    wanted : sequence of int
        Degree of each node, 1 or more, with the sum 2(n - 1); 0 for a single node.
    first : int
        Node that comes first among nodes of equal degree; the others follow in cyclic order.
    reach : callable, optional
        As for `allreduce`. If no node outside the tree shares a rail with a node that has a free
        edge, a node is added below a node without a free edge; degrees then differ from `wanted`.

    Raises
    ------
    InvalidArgument
        If `reach` does not connect all nodes.
    """
    n = len(wanted)
    waiting = sorted(range(n), key=lambda node: (-wanted[node], (node - first) % n))
    parents = [-1] * n
    if reach is None:
        # A free edge exists as long as a node waits, because the degrees are those of a tree.
        free = deque([waiting[0]] * wanted[waiting[0]])
        for node in waiting[1:]:
            parents[node] = free.popleft()
            free.extend([node] * (wanted[node] - 1))
        return tuple(parents)
    placed = [waiting.pop(0)]
    left = {placed[0]: wanted[placed[0]]}
    while waiting:
        node, parent = _next(waiting, placed, left, reach)
        waiting.remove(node)
        parents[node] = parent
        left[parent] -= 1
        left[node] = wanted[node] - 1
        placed.append(node)
    return tuple(parents)


def _next(
    waiting: list[int], placed: list[int], left: dict[int, int], reach: Reach
) -> tuple[int, int]:
    """Return the next node to add to the tree, and its parent."""
    for has_room in (True, False):
        for node in waiting:
            for parent in placed:
                if (left[parent] > 0) == has_room and reach(node, parent):
                    return node, parent
    raise InvalidArgument(
        f"nodes {sorted(waiting)} share no rail with any of {sorted(placed)}, so no tree connects "
        "all nodes: pass a reach that connects them"
    )


def _round(values: Sequence[Fraction]) -> list[int]:
    """Round `values` to integers whose sum is that of `values`, rounded down.

    The values with the largest fractional parts are rounded up, all others down.
    """
    floors = [int(each) for each in values]
    missing = int(sum(values)) - sum(floors)
    order = sorted(range(len(values)), key=lambda at: (floors[at] - values[at], at))
    for at in order[:missing]:
        floors[at] += 1
    return floors


def _in_twos(values: Sequence[Fraction], rooms: Sequence[int]) -> list[int]:
    """Round `values` to integers, mostly even, none above its limit in `rooms`; keep the sum."""
    halves = _round([each / 2 for each in values])
    found = [min(2 * half, room - room % 2) for half, room in zip(halves, rooms, strict=True)]
    missing = int(sum(values)) - sum(found)
    for at in sorted(range(len(values)), key=lambda at: (found[at] - values[at], at)):
        more = min(missing, rooms[at] - found[at])
        found[at] += more
        missing -= more
    return found


def _deal(sums: Sequence[int], ntrees: int) -> list[list[int]]:
    """Return the degrees of the nodes in each tree.

    Over all trees, the degrees of node v add up to ``sums[v]``. Every node gets one edge in every
    tree. The further edges of a tree are assigned two at a time, each pair to the node that lags
    most behind an even distribution of its total over the trees. Single edges, which nodes with an
    odd number of further edges need, are spread over the trees, because a tree with many of them
    would become a path.
    """
    n = len(sums)
    if n == 1:
        return [[0]] * ntrees
    extra = [each - ntrees for each in sums]
    left = list(extra)
    nodd, nsingles = sum(each % 2 for each in extra), 0
    dealt = []
    for turn in range(1, ntrees + 1):
        single = nodd * turn // ntrees - nsingles
        single += (n - single) % 2
        nsingles += single
        row = [1] * n

        def urgency(node: int, turn: int = turn) -> int:
            return (left[node] - extra[node]) * ntrees + extra[node] * turn

        missing = _take(n - 2, max(0, single), 2, left, row, urgency, lambda rest: rest > 1)
        _take(missing, 0, 1, left, row, urgency, lambda rest: rest % 2 == 1)
        dealt.append(row)
    return dealt


def _take(
    missing: int,
    end: int,
    number: int,
    left: list[int],
    row: list[int],
    urgency: Callable[[int], int],
    is_fit: Callable[[int], bool],
) -> int:
    """Give nodes edges of one tree, `number` at a time, while more than `end` are `missing`.

    ``left[v]`` counts the edges that node v still gets in all trees, ``row[v]`` those that it has
    in this tree; both are updated. Each time, the edges go to the node with the largest `urgency`
    among the nodes whose number in `left` satisfies `is_fit`; if there is no such node, among all
    nodes that have edges left. Ties go to the lowest node. Return the number of edges still
    missing.
    """
    heap = [(-urgency(node), node) for node, rest in enumerate(left) if is_fit(rest)]
    heapify(heap)
    while missing > end:
        if heap:
            node = heappop(heap)[1]
        else:
            node = min((-urgency(node), node) for node, rest in enumerate(left) if rest)[1]
        taken = min(number, left[node], missing)
        left[node] -= taken
        row[node] += taken
        missing -= taken
        # Only the urgency of this node has changed.
        if is_fit(left[node]):
            heappush(heap, (-urgency(node), node))
    return missing


def _firsts(n: int, ntrees: int) -> list[int]:
    """Return, for each tree, the node that comes first among nodes of equal degree.

    These nodes are spread evenly over all nodes, so that no node is preferred in every tree.
    """
    return [number * n // ntrees if ntrees < n else number % n for number in range(ntrees)]


__all__ = ["Reach", "allreduce", "degrees", "flat_tree", "lower_bound", "pack", "pack_rooted"]
