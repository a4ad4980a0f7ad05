"""Spread: on which rails the channels of a schedule travel, and how much each carries.

A rail that is *home* to a channel is where its slices go while that is up, see `r2ccl.routing`.
The links' channels are numbered so that number c is at home on ``homes[c % len(homes)]``: to choose
a number is to choose a rail.

Rings: every hop of a channel on the same rail. A ring is as slow as its slowest channel, and a
channel as its slowest hop. So the channels that are at home on a rail get the share of the work
which the worst port of that rail can carry, and then all of them end together. A port that is down
is no reason to spare its rail elsewhere: its channels make a detour at that one hop, and carry as
much as any other.

Trees: every edge on a rail of its own choice, so that the ports of each node are loaded in
proportion to what they carry, and none that is down is used.

Pure: it reads what all ranks share. Invariant: equal arguments, equal placement, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.algos.tree import Parents
from r2ccl.errors import InvalidArgument
from r2ccl.resilience.health import WHOLE, Health


class Edge(NamedTuple):
    """The links between ranks `low` < `high` of a schedule's channel: which of theirs it takes."""

    channel: int
    low: int
    high: int
    number: int


class Placement(NamedTuple):
    """Where a schedule's channels go.

    Attributes
    ----------
    channels : tuple of int
        For each of them the links' channel it travels on.
    weights : tuple of int
        Its share of the work.
    edges : tuple of Edge
        Those that travel on another.
    """

    channels: tuple[int, ...]
    weights: tuple[int, ...]
    edges: tuple[Edge, ...] = ()

    def numbers(self, rank: int) -> dict[tuple[int, int], int]:
        """Return the links' channel of every edge of `rank`: by the schedule's channel and peer."""
        found = {}
        for channel, low, high, number in self.edges:
            if rank in (low, high):
                found[channel, low + high - rank] = number
        return found


def place(nchannels: int, homes: Sequence[int], health: Health) -> Placement:
    """Spread the channels of rings over the rails, the best ones first.

    Parameters
    ----------
    nchannels : int
    homes : sequence of int
        Rails that channels are at home on.
    health : Health
        What the ports of all ranks carry.

    Returns
    -------
    Placement
        Of a whole network the channels in order, all of one weight.

    Raises
    ------
    InvalidArgument
        There is no home, or no such rail.
    """
    _require(homes)
    worst = [min(health.share(rank, rail) for rank in range(health.nranks)) for rail in homes]
    order = sorted(range(len(homes)), key=lambda at: -worst[at])
    # What makes a detour shares the rails of others: as if its own were as good as the best.
    detour = worst[order[0]] or WHOLE
    channels, weights = [], []
    for number in range(nchannels):
        turn, place = divmod(number, len(homes))
        at = order[place]
        channels.append(at + turn * len(homes))
        weights.append(worst[at] or detour)
    return Placement(tuple(channels), tuple(weights))


def place_trees(trees: Sequence[Parents], homes: Sequence[int], health: Health) -> Placement:
    """Spread the edges of trees over the rails.

    Edges of ranks with few rails choose first; each takes the rail on which the busier of its two
    ports is least loaded. One between ranks that share no home is left to routing.

    Parameters
    ----------
    trees : sequence of Parents
        One a channel, all of the same weight.
    homes, health
        As for `place`.

    Raises
    ------
    InvalidArgument
        There is no home, or no such rail.
    """
    _require(homes)
    width = len(homes)
    shares = [[health.share(rank, rail) for rail in homes] for rank in range(health.nranks)]
    alive = [sum(map(bool, of_rank)) for of_rank in shares]
    load = [[0] * width for _ in shares]
    pairs = [
        (number, min(rank, parent), max(rank, parent))
        for number, parents in enumerate(trees)
        for rank, parent in enumerate(parents)
        if parent >= 0
    ]

    def burden(number: int, low: int, high: int, at: int) -> tuple[bool, Fraction, Fraction, int]:
        ends = [(load[rank][at] + 1, shares[rank][at]) for rank in (low, high)]
        if not all(share for _, share in ends):
            return True, Fraction(0), Fraction(0), (at - number) % width
        one, other = (Fraction(*end) for end in ends)
        return False, max(one, other), one + other, (at - number) % width

    edges = []
    for number, low, high in sorted(pairs, key=lambda e: (min(alive[e[1]], alive[e[2]]), e)):
        at = min(range(width), key=lambda at: burden(number, low, high, at))
        load[low][at] += 1
        load[high][at] += 1
        edges.append(Edge(number, low, high, number * width + at))
    channels = tuple(number * width for number in range(len(trees)))
    return Placement(channels, (1,) * len(trees), tuple(edges))


def _require(homes: Sequence[int]) -> None:
    if not homes:
        raise InvalidArgument("channels need at least one rail to be at home on")


__all__ = ["Edge", "Placement", "place", "place_trees"]
