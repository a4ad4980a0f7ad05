"""Edge colouring with capacities: assigns edges to rails in proportion to the ports' shares.

A vertex is a node, or one direction of a node's traffic; a colour is a rail; a (vertex, colour)
pair is a port. If a port with its full bandwidth (share `WHOLE`) may have `edges` edges, a port
with another share may have ``edges * share // WHOLE``, its capacity. `even_out` searches for a
colouring with the smallest `edges`.

As in proofs of Vizing's and König's theorems, excess moves along an alternating path: a vertex over
its capacity in one colour recolours one of its edges to a colour in which it has capacity left. If
the vertex at the other end of this edge then exceeds its capacity, it also recolours one of its
edges, and so on. Breadth-first search finds the shortest path that ends at a vertex with capacity
left.

Invariant: equal arguments give equal colours.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from r2ccl.failover.health.table import WHOLE

#: A vertex, a colour of which it has one edge too many, and the colour that the edge added to it
#: had before (-1: no edge was added).
_Excess = tuple[int, int, int]
#: A recolouring on a path: the excess before it, the edge, and the new colour of the edge.
_Step = tuple[_Excess, int, int]


def even_out(
    ends: Sequence[tuple[int, int]],
    allowed: Sequence[Sequence[int]],
    shares: Mapping[int, Sequence[int]],
    colours: Sequence[int],
) -> list[int]:
    """Spread edges over the colours in proportion to each vertex's shares.

    Parameters
    ----------
    ends : sequence of (int, int)
        The two vertices of each edge.
    allowed : sequence of sequence of int
        Colours that each edge may have: at least one, each with a share above 0 at both vertices.
    shares : mapping of int to sequence of int
        For each vertex, its share of each colour, 0 to `WHOLE`.
    colours : sequence of int
        Initial colour of each edge, one of its `allowed` colours. The better the initial colours,
        the fewer edges change.

    Returns
    -------
    list of int
        Colour of each edge; the initial colours if no better ones are found.

    Notes
    -----
    *Cost*: some microseconds per edge for each number `edges` (see the module) that is
    tried; usually a few are tried.
    """
    given = _Colouring(ends, allowed, shares, colours)
    for edges in range(_least(ends, shares), given.most()):
        trial = _Colouring(ends, allowed, shares, colours)
        if trial.fit(edges):
            return trial.colours
    return list(colours)


class _Colouring:
    """Colour of each edge, and the edges of each vertex by colour."""

    def __init__(
        self,
        ends: Sequence[tuple[int, int]],
        allowed: Sequence[Sequence[int]],
        shares: Mapping[int, Sequence[int]],
        colours: Sequence[int],
    ) -> None:
        self.colours = list(colours)
        self._ends = ends
        self._allowed = allowed
        self._shares = shares
        #: Edges of every vertex, by colour.
        self._at = {vertex: [set[int]() for _ in row] for vertex, row in shares.items()}
        for edge, colour in enumerate(colours):
            for vertex in ends[edge]:
                self._at[vertex][colour].add(edge)
        self._room: dict[int, list[int]] = {}

    def most(self) -> int:
        """Return the smallest number `edges` (see the module) at which the current colours fit."""
        return max(
            (
                -(-len(edges) * WHOLE // share) if share else 0
                for vertex, row in self._shares.items()
                for edges, share in zip(self._at[vertex], row, strict=True)
            ),
            default=0,
        )

    def fit(self, edges: int) -> bool:
        """Change colours until every port fits its capacity; return False if the search fails.

        A port with share s has the capacity ``edges * s // WHOLE``.
        """
        self._room = {
            vertex: [edges * share // WHOLE for share in row]
            for vertex, row in self._shares.items()
        }
        for vertex, row in self._room.items():
            for colour, room in enumerate(row):
                while len(self._at[vertex][colour]) > room:
                    path = self._path(vertex, colour)
                    if not path:
                        return False
                    for edge, new in path.items():
                        self._change(edge, new)
        return True

    def _has_room(self, vertex: int, colour: int) -> bool:
        return len(self._at[vertex][colour]) < self._room[vertex][colour]

    def _path(self, vertex: int, colour: int) -> dict[int, int]:
        """Return new colours of edges, after which `vertex` has one edge fewer of `colour`.

        Return an empty dict if no alternating path is found.
        """
        start: _Excess = (vertex, colour, -1)
        came: dict[_Excess, _Step | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            at, full, freed = state
            free = [
                each
                for each in range(len(self._shares[at]))
                if each != full and (each == freed or self._has_room(at, each))
            ]
            for edge in sorted(self._at[at][full]):
                low, high = self._ends[edge]
                other = high if low == at else low
                for new in free:
                    after = (other, new, full)
                    if after in came or new not in self._allowed[edge]:
                        continue
                    came[after] = state, edge, new
                    if self._has_room(other, new) and (path := _walked(after, came)):
                        return path
                    queue.append(after)
        return {}

    def _change(self, edge: int, colour: int) -> None:
        for vertex in self._ends[edge]:
            self._at[vertex][self.colours[edge]].discard(edge)
            self._at[vertex][colour].add(edge)
        self.colours[edge] = colour


def _least(ends: Sequence[tuple[int, int]], shares: Mapping[int, Sequence[int]]) -> int:
    """Return a lower bound for the number `edges` (see the module)."""
    counts = Counter(vertex for both in ends for vertex in both)
    most = 0
    for vertex, count in counts.items():
        row = shares[vertex]
        edges = max(most, -(-count * WHOLE // sum(row)))
        while sum(edges * share // WHOLE for share in row) < count:
            edges += 1
        most = edges
    return most


def _walked(end: _Excess, came: Mapping[_Excess, _Step | None]) -> dict[int, int]:
    """Return the new colour of each edge on the path to `end`.

    Return an empty dict if the path passes an edge or a vertex twice.
    """
    steps: dict[int, int] = {}
    vertices = {end[0]}
    at = end
    while (step := came[at]) is not None:
        at, edge, colour = step
        if edge in steps or at[0] in vertices:
            return {}
        steps[edge] = colour
        vertices.add(at[0])
    return steps


__all__ = ["even_out"]
