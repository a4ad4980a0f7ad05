"""Spread: on which rails the channels of a schedule travel, and how much each carries.

A rail that is *home* to a channel is where its slices go while that is up, see `r2ccl.routing`.
The links' channels are numbered so that number c is at home on ``homes[c % len(homes)]``: to choose
a number is to choose a rail.

Rings: every hop of a channel on the same rail. A ring is as slow as its slowest channel, and a
channel as its slowest hop. So the channels that are at home on a rail get the share of the work
which the worst port of that rail can carry, and then all of them end together. A port that is down
is no reason to spare its rail elsewhere: its channels make a detour at that one hop, and carry as
much as any other.

Schedules for unequal ranks: every edge on a rail of its own choice, so that the ports of each node
are loaded in proportion to what they carry, and none that is down is used.

Pure: it reads what all ranks share. Invariant: equal arguments, equal placement, on every rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from r2ccl.errors import InvalidArgument
from r2ccl.resilience.health import WHOLE, Health
from r2ccl.schedule.arrays import as_arrays
from r2ccl.schedule.ir import Kind, Schedule


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


def place_edges(schedule: Schedule, homes: Sequence[int], health: Health) -> Placement:
    """Spread the edges of any schedule over the rails.

    Edges of ranks with few rails choose first, of those the heaviest; each takes the rail on which
    the busier of its two ports has least to do for what it can carry. One between ranks that share
    no home is left to routing.

    Parameters
    ----------
    schedule : Schedule
        Of as many ranks as there are in `health`.
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
    #: Of every rank and home, what it sends and what it receives.
    load = [[(0, 0)] * width for _ in shares]
    edges = []
    for flow in sorted(_flows(schedule), key=lambda f: (min(alive[f.low], alive[f.high]), f)):
        at = min(range(width), key=lambda at: _burden(flow, at, load, shares))
        for rank, sent, received in flow.ends():
            before = load[rank][at]
            load[rank][at] = before[0] + sent, before[1] + received
        edges.append(Edge(flow.channel, flow.low, flow.high, flow.channel * width + at))
    channels = tuple(channel * width for channel in range(schedule.nchannels))
    return Placement(channels, schedule.weights, tuple(edges))


def inlets(placement: Placement, homes: Sequence[int]) -> int:
    """Return how many links end at the port at which most do, of edges placed one by one."""
    found = Counter(
        (rank, number % len(homes)) for _, low, high, number in placement.edges
        for rank in (low, high)
    )  # fmt: skip
    return max(found.values(), default=0)


def port_time(
    schedule: Schedule, placement: Placement, homes: Sequence[int], health: Health
) -> Fraction:
    """Return what the busiest port takes for one unit of data, on rails that carry `WHOLE` a unit.

    A port that is down is left out: what is placed there makes a detour.
    """
    number_of = {edge[:3]: edge.number for edge in placement.edges}
    unit = sum(schedule.weights) * math.lcm(*schedule.nchunks)
    load: dict[tuple[int, int], tuple[int, int]] = {}
    for flow in _flows(schedule):
        key = (flow.channel, flow.low, flow.high)
        rail = homes[number_of.get(key, placement.channels[flow.channel]) % len(homes)]
        for rank, sent, received in flow.ends():
            before = load.get((rank, rail), (0, 0))
            load[rank, rail] = before[0] + sent, before[1] + received
    times = [
        Fraction(max(both), unit * health.share(*port))
        for port, both in load.items()
        if health.share(*port)
    ]
    return max(times, default=Fraction(0))


class _Flow(NamedTuple):
    """What an edge carries, each way, in units of the schedule; the heaviest come first."""

    negative_weight: int
    channel: int
    low: int
    high: int
    up: int
    down: int

    def ends(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return both ranks, with what each sends and receives."""
        return (self.low, self.up, self.down), (self.high, self.down, self.up)


def _flows(schedule: Schedule) -> list[_Flow]:
    """Add up what every edge carries."""
    ops = as_arrays(schedule).ops
    sends = ops[ops["kind"] == Kind.SEND]
    common = math.lcm(*schedule.nchunks)
    units = [
        weight * (common // nchunks)
        for weight, nchunks in zip(schedule.weights, schedule.nchunks, strict=True)
    ]
    carried: dict[tuple[int, int, int], list[int]] = {}
    ways, counts = np.unique(sends[["channel", "rank", "peer"]], return_counts=True)
    for (channel, rank, peer), count in zip(ways.tolist(), counts.tolist(), strict=True):
        both = carried.setdefault((channel, min(rank, peer), max(rank, peer)), [0, 0])
        both[rank > peer] += count * units[channel]
    return [_Flow(-max(both), *edge, *both) for edge, both in carried.items()]


def _burden(
    flow: _Flow, at: int, load: Sequence[Sequence[tuple[int, int]]], shares: Sequence[Sequence[int]]
) -> tuple[bool, Fraction, Fraction, int]:
    """Rate a home for an edge, the least first."""
    turn = (at - flow.channel) % len(load[0])
    times = []
    for rank, sent, received in flow.ends():
        if not shares[rank][at]:
            return True, Fraction(0), Fraction(0), turn
        before = load[rank][at]
        busier = max(before[0] + sent, before[1] + received)
        times.append(Fraction(busier, shares[rank][at]))
    return False, max(times), sum(times, Fraction(0)), turn


def _require(homes: Sequence[int]) -> None:
    if not homes:
        raise InvalidArgument("channels need at least one rail to be at home on")


__all__ = ["Edge", "Placement", "inlets", "place", "place_edges", "port_time"]
