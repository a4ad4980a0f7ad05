"""Packed trees: one allreduce for nodes of any bandwidths, and so for every pattern of failures.

A byte that is reduced up and broadcast down one spanning tree costs a node as many sends, and as
many receives, as it has edges there: its degree. An allreduce over c trees, each with its c-th of
the data, therefore takes what the node with the largest sum of degrees over bandwidth takes. So:

1. Give every node a mean degree in proportion to its bandwidth, but 1 at least (a tree reaches it)
   and n - 1 at most, such that they add up to the 2(n - 1) a tree has: `degrees`, by filling water.
2. Round the sums over all trees, and deal the edges out tree by tree, to whoever is due most. They
   are dealt in twos, as in a double binary tree: a node is a leaf, or has two children. Ones would
   make long paths, twos keep the height logarithmic.
3. Build each tree as flat as its degrees allow: `flat_tree`.

With equal bandwidths this is nearly a ring's bandwidth at the height of a binary tree; a node that
lost bandwidth becomes a leaf in just as many trees as it has to.

The lower bound (`lower_bound`): every node sends and receives all the data once, and every byte
takes n - 1 transfers to be combined and n - 1 to be distributed, whatever the schedule. The packing
reaches it for many trees and many slices; that holds for reduction without coding, and for nodes
whose rails act as one port.

Pure arithmetic on integers and fractions. Invariant: equal arguments, equal trees, on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction

from r2ccl.algos import tree
from r2ccl.algos.bandwidths import require_positive
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Schedule

#: ``reach(a, b)``: whether two nodes share a rail.
Reach = Callable[[int, int], bool]


def allreduce(bandwidths: Sequence[int], ntrees: int, reach: Reach | None = None) -> Schedule:
    """Build the allreduce over trees packed for `bandwidths`.

    Parameters
    ----------
    bandwidths : sequence of int
        Of every node, in any unit, above 0.
    ntrees : int
        Channels of the schedule. More trees come closer to the mean degrees wanted.
    reach : callable, optional
        ``reach(a, b)``: whether two nodes can be neighbours. By default all can.

    Raises
    ------
    InvalidArgument
        No node, a bandwidth or a number of trees below 1, or nodes nobody can be a neighbour of.
    """
    return tree.allreduce(pack(bandwidths, ntrees, reach), "packed_trees")


def lower_bound(bandwidths: Sequence[int]) -> Fraction:
    """Return the least time of any allreduce, for one unit of data and bandwidths in units a time.

    Raises
    ------
    InvalidArgument
        No node, or a bandwidth below 1.
    """
    require_positive(bandwidths)
    n = len(bandwidths)
    if n == 1:
        return Fraction(0)
    return max(Fraction(1, min(bandwidths)), Fraction(2 * (n - 1), sum(bandwidths)))


def degrees(bandwidths: Sequence[int]) -> tuple[Fraction, ...]:
    """Return each node's mean degree: in proportion to bandwidth, between 1 and n - 1.

    They add up to 2(n - 1), the degrees of a tree.

    Raises
    ------
    InvalidArgument
        No node, or a bandwidth below 1.
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
        # What is cut off at one end raises or lowers all others, so one end at a time, the worse.
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
    """Choose the trees; see `allreduce`."""
    if ntrees < 1:
        raise InvalidArgument(f"ntrees={ntrees}; give 1 or more")
    n = len(bandwidths)
    sums = _round([ntrees * each for each in degrees(bandwidths)])
    return tuple(
        flat_tree(dealt, first, reach)
        for first, dealt in zip(_firsts(n, ntrees), _deal(sums, ntrees), strict=True)
    )


def pack_rooted(rooms: Sequence[int], ntrees: int, root: int) -> tuple[tree.Parents, ...]:
    """Choose trees with one root, for a broadcast or a reduce.

    In each tree every node but the root has one edge up; what counts are its edges down, which all
    trees together give it in proportion to its room, in twos, so that the trees are flat.

    Parameters
    ----------
    rooms : sequence of int
        Edges down of every node in all trees, at most; `ntrees` or more each.
    ntrees, root : int

    Raises
    ------
    InvalidArgument
        No node, no tree, no such root, or too little room.
    """
    n = len(rooms)
    if ntrees < 1 or not 0 <= root < n or min(rooms) < ntrees:
        raise InvalidArgument(
            f"rooms={tuple(rooms)}, ntrees={ntrees}, root={root}: give a tree or more, a root of 0 "
            f"to {n - 1}, and room for {ntrees} edges or more at every node"
        )
    if n == 1:
        return ((-1,),) * ntrees
    total = ntrees * (n - 1)
    # The root has an edge down in every tree.
    of_root = max(Fraction(total * rooms[root], sum(rooms)), Fraction(ntrees))
    rest = sum(rooms) - rooms[root]
    shares = [(total - of_root) * Fraction(room, rest) for room in rooms]
    # The root has one edge down in every tree whatever it is dealt.
    shares[root] = of_root - ntrees
    left = [room - ntrees * (node == root) for node, room in enumerate(rooms)]
    extra = _in_twos(shares, left)
    return tuple(
        _rooted_tree(wanted, root, first)
        for first, wanted in zip(_firsts(n, ntrees), _deal_down(extra, ntrees, root), strict=True)
    )


def _deal_down(extra: Sequence[int], ntrees: int, root: int) -> list[list[int]]:
    """Deal every node's edges down out to the trees, beside the one that the root has in each."""
    n = len(extra)
    left = list(extra)
    given = list(left)
    dealt = []
    for turn in range(1, ntrees + 1):
        row = [0] * n
        row[root] = 1
        missing = n - 2

        def urgency(node: int, turn: int = turn) -> tuple[int, int]:
            return (left[node] - given[node]) * ntrees + given[node] * turn, -node

        while missing:
            number = min(2, missing)
            fit = [node for node in range(n) if left[node] >= number]
            node = max(fit or [each for each in range(n) if left[each]], key=urgency)
            number = min(number, left[node])
            left[node] -= number
            row[node] += number
            missing -= number
        dealt.append(row)
    return dealt


def _rooted_tree(wanted: Sequence[int], root: int, first: int) -> tree.Parents:
    """Build the flattest tree with these numbers of edges down; most first, from the root."""
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
    """Build the flattest tree with these degrees.

    Nodes join by degree, largest first, each below the highest node that has an edge left.

    Parameters
    ----------
    wanted : sequence of int
        Degree of every node, 1 or more, adding up to 2(n - 1).
    first : int
        Of nodes of equal degree, which comes first; the others follow in order, round.
    reach : callable, optional
        As for `allreduce`. A node that cannot be where its degree puts it joins below the highest
        node it reaches, so that degrees can differ from those wanted.

    Raises
    ------
    InvalidArgument
        Nodes that no way leads to.
    """
    n = len(wanted)
    waiting = sorted(range(n), key=lambda node: (-wanted[node], (node - first) % n))
    parents = [-1] * n
    if reach is None:
        # There is an edge left as long as anybody waits, for the degrees are those of a tree.
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
    """Choose who joins, and below whom."""
    for has_room in (True, False):
        for node in waiting:
            for parent in placed:
                if (left[parent] > 0) == has_room and reach(node, parent):
                    return node, parent
    raise InvalidArgument(
        f"nodes {sorted(waiting)} share no rail with any of {sorted(placed)}; no tree spans both"
    )


def _round(values: Sequence[Fraction]) -> list[int]:
    """Round to integers of the same sum; those lose that were rounded up most."""
    floors = [int(each) for each in values]
    missing = int(sum(values)) - sum(floors)
    order = sorted(range(len(values)), key=lambda at: (floors[at] - values[at], at))
    for at in order[:missing]:
        floors[at] += 1
    return floors


def _in_twos(values: Sequence[Fraction], rooms: Sequence[int]) -> list[int]:
    """Round to integers of the same sum, at most `rooms`; to even ones as far as there is room."""
    halves = _round([each / 2 for each in values])
    found = [min(2 * half, room - room % 2) for half, room in zip(halves, rooms, strict=True)]
    missing = int(sum(values)) - sum(found)
    for at in sorted(range(len(values)), key=lambda at: (found[at] - values[at], at)):
        more = min(missing, rooms[at] - found[at])
        found[at] += more
        missing -= more
    return found


def _deal(sums: Sequence[int], ntrees: int) -> list[list[int]]:
    """Deal every node's edges out to the trees, `sums` in all; one edge each is a matter of course.

    A node is due what it would have if its share came evenly; who is due most gets two more edges,
    until the tree is complete. The odd edges are spread over the trees: many in one tree would make
    a path of it.
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

        def urgency(node: int, turn: int = turn) -> tuple[int, int]:
            return (left[node] - extra[node]) * ntrees + extra[node] * turn, -node

        missing = n - 2
        while missing:
            is_pair = missing > single
            fit = [v for v in range(n) if (left[v] > 1 if is_pair else left[v] % 2)]
            node = max(fit or [v for v in range(n) if left[v]], key=urgency)
            number = min(2 if is_pair else 1, left[node], missing)
            left[node] -= number
            row[node] += number
            missing -= number
        dealt.append(row)
    return dealt


def _firsts(n: int, ntrees: int) -> list[int]:
    """Return which node comes first among its equals in each tree: all of them in turn."""
    return [number * n // ntrees if ntrees < n else number % n for number in range(ntrees)]


__all__ = ["Reach", "allreduce", "degrees", "flat_tree", "lower_bound", "pack", "pack_rooted"]
