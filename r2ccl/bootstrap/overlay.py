"""Overlay network of the control plane: the sessions of a rank, and routes to the other ranks.

If every two ranks had a session, each rank would need as many connections as there are other ranks.
In the overlay, a rank has sessions with its *neighbors* only, the ranks at distances 1, 2, 4, ...
in both directions around the ring of ranks: about 2 log2(n) of them. A message to any other rank
passes through at most log2(n) sessions while no rank is lost or has left. A message for all ranks
is passed on by every rank to its neighbors, so it arrives as long as the ranks that are alive are
connected: the failure of some ranks delays no such message and needs no repair. A binomial tree
with root 0, whose edges all join neighbors, collects answers from all ranks with one message per
rank.

There is no I/O here: results depend only on the rank, the number of ranks, and the ranks recorded
as lost or as having left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from r2ccl.errors import InvalidArgument


def neighbors(rank: int, nranks: int) -> frozenset[int]:
    """Return the neighbors of `rank`: the ranks at distances 1, 2, 4, ... in both directions.

    The relation is symmetric. If there are at most five ranks, all are neighbors of each other.

    Raises
    ------
    InvalidArgument
        If `rank` is not in ``range(nranks)``.
    """
    if not 0 <= rank < nranks:
        raise InvalidArgument(f"rank={rank}; allowed is 0 to {nranks - 1}")
    return frozenset(_around(rank, nranks))


def are_neighbors(a: int, b: int, nranks: int) -> bool:
    """Return True if the ranks `a` and `b`, which must differ, are neighbors."""
    up, down = (a - b) % nranks, (b - a) % nranks
    return up & (up - 1) == 0 or down & (down - 1) == 0


def without_session(ranks: Iterable[int], peer: int, nranks: int) -> list[int]:
    """Return the members of `ranks` that are neither `peer` nor a neighbor of `peer`."""
    return [rank for rank in ranks if rank != peer and not are_neighbors(rank, peer, nranks)]


def parent(rank: int) -> int:
    """Return the parent of `rank` in the binomial tree; `rank` must not be 0, the root."""
    return rank & (rank - 1)


def children(rank: int, nranks: int) -> tuple[int, ...]:
    """Return the children of `rank` in the binomial tree of `nranks` ranks, in ascending order."""
    most = rank & -rank or nranks
    distances = (1 << power for power in range(nranks.bit_length()))
    return tuple(rank + each for each in distances if each < most and rank + each < nranks)


def _around(rank: int, nranks: int) -> Iterator[int]:
    for power in range(nranks.bit_length()):
        if 1 << power < nranks:
            yield (rank + (1 << power)) % nranks
            yield (rank - (1 << power)) % nranks


class Overlay:
    """Overlay network as one rank sees it.

    Parameters
    ----------
    rank, nranks : int

    Attributes
    ----------
    neighbors : frozenset of int
        Ranks that this rank has a session with from the start.
    max_hops : int
        Upper bound of the length of any route, in sessions: the number of ranks.
    """

    def __init__(self, rank: int, nranks: int) -> None:
        self.neighbors = neighbors(rank, nranks)
        self.max_hops = nranks
        self._rank = rank
        self._nranks = nranks
        self._lost: set[int] = set()
        self._left: set[int] = set()
        self._is_checked = True

    def is_closed(self, rank: int) -> bool:
        """Return True if `rank` is lost or has left."""
        return rank in self._lost or rank in self._left

    def leave(self, rank: int) -> None:
        """Record that `rank` closed normally: no message is sent to it, or through it."""
        self._left.add(rank)

    def lose(self, rank: int) -> None:
        """Record that `rank` is lost."""
        self._lost.add(rank)
        self._is_checked = False

    def open_neighbors(self) -> list[int]:
        """Return the neighbors that are not lost and have not left."""
        return [rank for rank in self.neighbors if not self.is_closed(rank)]

    def next_hop(self, destination: int) -> int | None:
        """Return the neighbor through which to send a message for `destination`.

        Return None if every route contains a rank that is lost or has left.
        """
        if not self._lost and not self._left:
            return min(self.neighbors, key=lambda rank: self._distance(rank, destination))
        steps = self._reached({destination}, self._lost | self._left)
        ready = [rank for rank in self.open_neighbors() if rank in steps]
        return min(ready, key=lambda rank: steps[rank], default=None)

    def cut_off(self) -> list[int]:
        """Return the ranks that are cut off: every route to them contains a lost rank.

        Ranks that are known to be lost are not returned.

        After a partition of the network, this rank itself detects only the loss of those ranks on
        the other side with which it has sessions. The caller must treat the ranks returned here as
        lost, too. The list is empty if `lose` was not called since the last call of `cut_off`.
        """
        if self._is_checked:
            return []
        self._is_checked = True
        reached = self._reached({self._rank}, self._lost)
        everyone = range(self._nranks)
        return [rank for rank in everyone if rank not in reached and rank not in self._lost]

    def _distance(self, a: int, b: int) -> int:
        return min((a - b) % self._nranks, (b - a) % self._nranks)

    def _reached(self, start: set[int], closed: set[int]) -> dict[int, int]:
        """Return the distance from `start` of each rank reached without passing through `closed`.

        The distance is the number of sessions on the shortest route from any rank in `start`.
        """
        steps = dict.fromkeys(start, 0)
        border = list(start)
        while border:
            further = []
            for rank in border:
                for near in _around(rank, self._nranks):
                    if near not in steps and near not in closed:
                        steps[near] = steps[rank] + 1
                        further.append(near)
            border = further
        return steps


__all__ = ["Overlay", "are_neighbors", "children", "neighbors", "parent", "without_session"]
