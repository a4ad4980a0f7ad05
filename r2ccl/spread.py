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


def place_edges(
    schedule: Schedule, homes: Sequence[int], health: Health, nodes: Sequence[int] = ()
) -> Placement:
    """Spread the edges of any schedule over the rails.

    Edges of nodes with few rails choose first, of those the heaviest; each takes the rail on which
    the busier of its two ports has least to do for what it can carry. Then edges leave the busiest
    port, or change places with others, as long as that helps. One between nodes that share no home
    is left to routing.

    Parameters
    ----------
    schedule : Schedule
        Of as many ranks as there are in `health`.
    homes, health
        As for `place`.
    nodes : sequence of int, optional
        Of every rank, the node whose ports it uses. Default: each has its own.

    Raises
    ------
    InvalidArgument
        There is no home, or no such rail.
    """
    _require(homes)
    width = len(homes)
    ports = _Ports(homes, health, nodes)
    flows = [flow for flow in _flows(schedule, schedule.weights) if not ports.is_inside(flow)]
    chosen: dict[_Flow, int] = {}
    for flow in sorted(flows, key=lambda flow: (ports.fewest(flow), flow)):
        chosen[flow] = min(range(width), key=lambda at: ports.burden(flow, at))
        ports.add(flow, chosen[flow])
    if len(flows) <= _MOST_IMPROVED:
        _improve(chosen, ports)
    edges = [
        Edge(flow.channel, flow.low, flow.high, flow.channel * width + at)
        for flow, at in sorted(chosen.items())
    ]
    channels = tuple(channel * width for channel in range(schedule.nchannels))
    return Placement(channels, schedule.weights, tuple(edges))


def inlets(placement: Placement, homes: Sequence[int]) -> int:
    """Return how many links end at the port at which most do, of edges placed one by one."""
    found = Counter(
        (rank, number % len(homes))
        for _, low, high, number in placement.edges
        for rank in (low, high)
    )
    return max(found.values(), default=0)


def port_time(
    schedule: Schedule,
    placement: Placement,
    homes: Sequence[int],
    health: Health,
    nodes: Sequence[int] = (),
) -> Fraction | None:
    """Return what the busiest port takes for one unit of data, on rails that carry `WHOLE` a unit.

    What is placed on a port that is down makes a detour over those that are up at both ends, in
    proportion to what they carry. None: two neighbours have no home in common.
    """
    flows = _flows(schedule, placement.weights)
    unit = sum(placement.weights) * math.lcm(*schedule.nchunks)
    time = _busy(flows, placement, _Ports(homes, health, nodes))
    return None if time is None else time / unit


def ring_time(
    placement: Placement, homes: Sequence[int], health: Health, nodes: Sequence[int] = ()
) -> Fraction | None:
    """Return what `port_time` does for a ring allreduce of ranks in order, without its ops."""
    n = health.nranks
    flows = [
        _Flow(0, channel, min(pair), max(pair), *((load, 0) if pair[0] < pair[1] else (0, load)))
        for channel, weight in enumerate(placement.weights)
        for pair in ((rank, (rank + 1) % n) for rank in range(n) if n > 1)
        for load in (2 * (n - 1) * weight,)
    ]
    time = _busy(flows, placement, _Ports(homes, health, nodes))
    return None if time is None else time / (n * sum(placement.weights))


def _busy(flows: Sequence[_Flow], placement: Placement, ports: _Ports) -> Fraction | None:
    """Put flows where they are placed; return the time of the busiest port.

    None: a flow has no way, for its ends have no home in common.
    """
    number_of = {edge[:3]: edge.number for edge in placement.edges}
    for flow in flows:
        if not ports.is_inside(flow):
            default = placement.channels[flow.channel]
            number = number_of.get((flow.channel, flow.low, flow.high), default)
            ways = ports.ways(flow, number % ports.width)
            if not ways:
                return None
            for at, part in ways:
                ports.add(flow, at, part)
    return Fraction(ports.busiest()[0]) / _SCALE


class _Flow(NamedTuple):
    """What an edge carries, each way, in units of the schedule; the heaviest come first."""

    negative_weight: int
    channel: int
    low: int
    high: int
    up: int
    down: int


#: A node and one of the homes, by its place.
_Port = tuple[int, int]
#: What a port is busy for, in units of which `_SCALE` take a rail that carries 1 a unit of time.
_Time = int | Fraction


class _Ports:
    """What the ports of all nodes have to send and to receive."""

    def __init__(self, homes: Sequence[int], health: Health, nodes: Sequence[int]) -> None:
        self.width = len(homes)
        self._nodes = nodes or range(health.nranks)
        rows: dict[int, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            row = [health.share(rank, rail) for rail in homes]
            rows[node] = [*map(min, row, rows.get(node, row))]
        #: Of every node and home, what it carries.
        self._shares = rows
        self._load: dict[_Port, tuple[_Time, _Time]] = {
            (node, at): (0, 0) for node in rows for at in range(self.width)
        }

    def is_inside(self, flow: _Flow) -> bool:
        """Whether both ends of it are at one node."""
        return self._nodes[flow.low] == self._nodes[flow.high]

    def fewest(self, flow: _Flow) -> int:
        """Return how many ports are up at the end that has fewer."""
        return min(sum(map(bool, self._shares[node])) for node in self._ends(flow))

    def add(self, flow: _Flow, at: int, part: _Time = 1) -> None:
        """Have home `at` carry a part of a flow; a negative part is taken away."""
        for port, sent, received in self._moved(flow, at):
            before = self._load[port]
            self._load[port] = before[0] + part * sent, before[1] + part * received

    def burden(self, flow: _Flow, at: int) -> tuple[bool, _Time, _Time, int]:
        """Rate a home for a flow, the least first: is a port down, the busier one, both."""
        times = [
            self._time(port, self._load[port][0] + sent, self._load[port][1] + received)
            for port, sent, received in self._moved(flow, at)
            if self._shares[port[0]][at]
        ]
        turn = (at - flow.channel) % self.width
        return len(times) < 2, max(times, default=0), sum(times), turn

    def busiest(self) -> tuple[_Time, _Port]:
        """Return the time of the busiest port that is up, and which one it is."""
        times = [(self._time(port, *load), port) for port, load in self._load.items()]
        return max(times, key=lambda found: (found[0], -found[1][0], -found[1][1]))

    def time_of(self, flow: _Flow, at: int) -> _Time:
        """Return the time of the busier of the two ports `flow` uses at home `at`."""
        return max(self._time(port, *self._load[port]) for port, _, _ in self._moved(flow, at))

    def is_up(self, flow: _Flow, at: int) -> bool:
        """Whether home `at` is up at both ends."""
        return all(self._shares[node][at] for node in self._ends(flow))

    def uses(self, flow: _Flow, node: int) -> bool:
        """Whether a flow ends at `node`."""
        return node in self._ends(flow)

    def ways(self, flow: _Flow, at: int) -> list[tuple[int, _Time]]:
        """Return what carries a flow that is at home on `at`: homes, and the part of each."""
        if self.is_up(flow, at):
            return [(at, 1)]
        low, high = (self._shares[node] for node in self._ends(flow))
        left = [min(both) for both in zip(low, high, strict=True)]
        return [(other, Fraction(share, sum(left))) for other, share in enumerate(left) if share]

    def _ends(self, flow: _Flow) -> tuple[int, int]:
        return self._nodes[flow.low], self._nodes[flow.high]

    def _moved(self, flow: _Flow, at: int) -> tuple[tuple[_Port, int, int], ...]:
        """Return both ports, with what each sends and receives."""
        low, high = self._ends(flow)
        return ((low, at), flow.up, flow.down), ((high, at), flow.down, flow.up)

    def _time(self, port: _Port, sent: _Time, received: _Time) -> _Time:
        share = self._shares[port[0]][port[1]]
        return max(sent, received) * (_SCALE // share) if share else 0


def _improve(chosen: dict[_Flow, int], ports: _Ports) -> None:
    """Relieve the busiest port, edge by edge, until no step does."""
    for _ in range(2 * len(chosen)):
        worst, (node, at) = ports.busiest()
        crowd = [flow for flow, home in chosen.items() if home == at and ports.uses(flow, node)]
        if not any(_relieve(flow, chosen, ports, worst) for flow in crowd):
            return


def _relieve(flow: _Flow, chosen: dict[_Flow, int], ports: _Ports, worst: _Time) -> bool:
    """Move a flow elsewhere, or have it change places, so that all ports concerned take less."""
    here = chosen[flow]
    there = [at for at in range(ports.width) if at != here and ports.is_up(flow, at)]
    for at in there:
        others = [None, *(other for other, home in chosen.items() if home == at)]
        for other in others:
            if other is not None and not ports.is_up(other, here):
                continue
            moves = [(flow, here, at), *([(other, at, here)] if other is not None else [])]
            for moved, source, target in moves:
                ports.add(moved, source, -1)
                ports.add(moved, target)
            if all(
                max(ports.time_of(moved, source), ports.time_of(moved, target)) < worst
                for moved, source, target in moves
            ):
                chosen.update((moved, target) for moved, _, target in moves)
                return True
            for moved, source, target in moves:
                ports.add(moved, target, -1)
                ports.add(moved, source)
    return False


def _flows(schedule: Schedule, weights: Sequence[int]) -> list[_Flow]:
    """Add up what every edge carries, with channels that share the work by `weights`."""
    ops = as_arrays(schedule).ops
    sends = ops[ops["kind"] == Kind.SEND]
    common = math.lcm(*schedule.nchunks)
    units = [
        weight * (common // nchunks)
        for weight, nchunks in zip(weights, schedule.nchunks, strict=True)
    ]
    carried: dict[tuple[int, int, int], list[int]] = {}
    ways, counts = np.unique(sends[["channel", "rank", "peer"]], return_counts=True)
    for (channel, rank, peer), count in zip(ways.tolist(), counts.tolist(), strict=True):
        both = carried.setdefault((channel, min(rank, peer), max(rank, peer)), [0, 0])
        both[rank > peer] += count * units[channel]
    return [_Flow(-max(both), *edge, *both) for edge, both in carried.items()]


def _require(homes: Sequence[int]) -> None:
    if not homes:
        raise InvalidArgument("channels need at least one rail to be at home on")


#: Divided by every share but 0.
_SCALE = math.lcm(*range(1, WHOLE + 1))
#: Edges up to which their places are looked over again (2,000: 0.7 s).
_MOST_IMPROVED = 4000

__all__ = ["Edge", "Placement", "inlets", "place", "place_edges", "port_time", "ring_time"]
