"""Spread: on which rails the channels of a schedule travel, and how much each carries.

A rail that is *home* to a channel is where its slices go while that is up, see
`r2ccl.failover.migration.routes`. The links' channels are numbered so that number c is at home on
``homes[c % len(homes)]``: to choose a number is to choose a rail.

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

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.edge_colouring import even_out
from r2ccl.planning.edge_loads import Flow, Flows, flows_of
from r2ccl.schedule.ir import Schedule


class Edge(NamedTuple):
    """The links between ranks `low` < `high` of a schedule's channel: which of theirs it takes."""

    channel: int
    low: int
    high: int
    number: int


#: Channel, lower rank, higher rank of an edge, and which of the homes it is on.
EdgeAtHome: TypeAlias = tuple[int, int, int, int]


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
    schedule: Schedule,
    homes: Sequence[int],
    health: Health,
    nodes: Sequence[int] = (),
    flows: Flows | None = None,
) -> Placement:
    """Spread the edges of any schedule over the rails.

    Edges of nodes with few rails choose first, of those the heaviest; each takes the rail on which
    the busier of its two ports has least to do for what it can carry. Then edges leave the busiest
    port, or change places with others, as long as that helps; edges that all carry the same are
    evened out (`r2ccl.planning.edge_colouring`). One between nodes that share no home is left to
    routing.

    Parameters
    ----------
    schedule : Schedule
        Of as many ranks as there are in `health`.
    homes, health
        As for `place`.
    nodes : sequence of int, optional
        Of every rank, the node whose ports it uses. Default: each has its own.
    flows : Flows, optional
        Those of the schedule, if they are known.

    Raises
    ------
    InvalidArgument
        There is no home, or no such rail.

    Notes
    -----
    *Cost*: some 10 us an edge, and at most `_MOST_TRIED` changes of place.
    """
    _require(homes)
    width = len(homes)
    ports = _Ports(homes, health, nodes)
    found = [flow for flow in (flows or flows_of(schedule)).flows if not ports.is_inside(flow)]
    found.sort(key=lambda flow: (ports.fewest(flow), -max(flow.up, flow.down), flow))
    chosen = [ports.take_best(flow) for flow in found]
    evened = _even_out(found, chosen, ports)
    if evened is None:
        _improve(found, chosen, ports)
    placed = sorted(zip(found, evened or chosen, strict=True))
    return placed_at(schedule, width, [(*flow[:3], at) for flow, at in placed])


def placed_at(schedule: Schedule, width: int, edges: Iterable[EdgeAtHome]) -> Placement:
    """Return the placement of edges whose homes are known.

    Parameters
    ----------
    schedule : Schedule
    width : int
        Homes there are.
    edges : iterable of EdgeAtHome
    """
    return Placement(
        tuple(channel * width for channel in range(schedule.nchannels)),
        schedule.weights,
        tuple(Edge(c, low, high, c * width + at) for c, low, high, at in edges),
    )


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
    flows: Flows | None = None,
) -> Fraction | None:
    """Return what the busiest port takes for one unit of data, on rails that carry `WHOLE` a unit.

    What is placed on a port that is down makes a detour over those that are up at both ends, in
    proportion to what they carry. None: two neighbours have no home in common.
    """
    ports = _Ports(homes, health, nodes)
    carried = flows or flows_of(schedule)
    number_of = {edge[:3]: edge.number for edge in placement.edges}
    for flow in carried.flows:
        if ports.is_inside(flow):
            continue
        default = placement.channels[flow.channel]
        at = number_of.get((flow.channel, flow.low, flow.high), default) % ports.width
        if not ports.add_detoured(flow, at):
            return None
    return Fraction(ports.busiest()[0]) / (_SCALE * carried.unit)


def mean_time(
    flows: Flows, homes: Sequence[int], health: Health, nodes: Sequence[int] = ()
) -> Fraction:
    """Return what ports take on average for one unit of data, in the unit of `port_time`."""
    ports = _Ports(homes, health, nodes)
    total = sum(flow.up + flow.down for flow in flows.flows if not ports.is_inside(flow))
    capacity = sum(map(sum, ports.shares.values()))
    return Fraction(total, capacity * flows.unit) if capacity else Fraction(0)


def ring_time(
    placement: Placement, homes: Sequence[int], health: Health, nodes: Sequence[int] = ()
) -> Fraction | None:
    """Return what `port_time` does for a ring allreduce of ranks in order, without its ops."""
    n, width = health.nranks, len(homes)
    channels: list[list[int]] = [[] for _ in homes]
    for channel, weight in zip(placement.channels, placement.weights, strict=True):
        channels[channel % width].append(weight)
    ports = _Ports(homes, health, nodes)
    for rank, after in [*pairwise(range(n)), (n - 1, 0)] if n > 1 else []:
        ways = (1, 0) if rank < after else (0, 1)
        hop = Flow(0, min(rank, after), max(rank, after), *ways)
        if not ports.is_inside(hop) and not ports.add_channels(hop, channels):
            return None
    time = Fraction(ports.busiest()[0]) / _SCALE
    return time * 2 * (n - 1) / (n * sum(placement.weights))


#: What a port is busy for, in units of which `_SCALE` take a rail that carries 1 a unit of time.
_Time = int | Fraction


class _Ports:
    """What the ports of all nodes have to send and to receive."""

    def __init__(self, homes: Sequence[int], health: Health, nodes: Sequence[int]) -> None:
        self.width = len(homes)
        self._node_of = list(nodes) or list(range(health.nranks))
        rows: dict[int, list[int]] = {}
        for rank, node in enumerate(self._node_of):
            start = rank * health.nrails
            row = [health.shares[start + rail] for rail in homes]
            before = rows.get(node)
            rows[node] = row if before is None else [*map(min, row, before)]
        #: Of every node and home, what it carries, and the time of one unit of load.
        self.shares = rows
        self._scale = {
            node: [_SCALE // share if share else 0 for share in row] for node, row in rows.items()
        }
        self._sent: dict[int, list[_Time]] = {node: [0] * self.width for node in rows}
        self._received: dict[int, list[_Time]] = {node: [0] * self.width for node in rows}
        self._nup = {node: sum(map(bool, row)) for node, row in rows.items()}
        self._both: dict[tuple[int, int], list[int]] = {}

    def ends(self, flow: Flow) -> tuple[int, int]:
        """Return the nodes of both ends."""
        return self._node_of[flow.low], self._node_of[flow.high]

    def is_inside(self, flow: Flow) -> bool:
        """Whether both ends of it are at one node."""
        return self._node_of[flow.low] == self._node_of[flow.high]

    def fewest(self, flow: Flow) -> int:
        """Return how many ports are up at the end that has fewer."""
        return min(self._nup[self._node_of[flow.low]], self._nup[self._node_of[flow.high]])

    def common(self, flow: Flow) -> list[int]:
        """Return the homes that are up at both ends."""
        low, high = self.ends(flow)
        found = self._both.get((low, high))
        if found is None:
            pairs = zip(self.shares[low], self.shares[high], strict=True)
            found = [at for at, (one, other) in enumerate(pairs) if one and other]
            self._both[low, high] = found
        return found

    def add(self, flow: Flow, at: int, part: _Time = 1) -> None:
        """Have home `at` carry a part of a flow; a negative part is taken away."""
        low, high = self.ends(flow)
        up, down = part * flow.up, part * flow.down
        self._sent[low][at] += up
        self._received[low][at] += down
        self._sent[high][at] += down
        self._received[high][at] += up

    def add_detoured(self, flow: Flow, at: int) -> bool:
        """Have home `at` carry a flow, or where it is down those that are up at both ends.

        Returns
        -------
        bool
            False: there is none.
        """
        common = self.common(flow)
        if at in common:
            self.add(flow, at)
            return True
        low, high = self.ends(flow)
        left = {each: min(self.shares[low][each], self.shares[high][each]) for each in common}
        total = sum(left.values())
        for other, share in left.items():
            self.add(flow, other, Fraction(share, total))
        return bool(common)

    def add_channels(self, hop: Flow, channels: Sequence[Sequence[int]]) -> bool:
        """Have a hop carry the channels of all homes, by their weights.

        One whose home is down goes whole to another that is up, the one whose detours are the
        fewest for what it carries, as `r2ccl.failover.migration.routes` sends it. False: there is
        none.
        """
        low, high = self.ends(hop)
        left = {at: min(self.shares[low][at], self.shares[high][at]) for at in self.common(hop)}
        detours = dict.fromkeys(left, 0)
        for at, weights in enumerate(channels):
            if at in left:
                self.add(hop, at, sum(weights))
                continue
            for weight in weights if left else ():
                best = min(left, key=lambda each: Fraction(detours[each] + weight, left[each]))
                detours[best] += weight
                self.add(hop, best, weight)
        return bool(left)

    def take_best(self, flow: Flow) -> int:
        """Put a flow on the home on which the busier of its ports has least to do; return that."""
        low, high = self.ends(flow)
        sent, received, scale = self._sent[low], self._received[low], self._scale[low]
        others = self._sent[high], self._received[high], self._scale[high]
        _, _, up, down = flow[1:]
        turn = flow.channel % self.width
        best, best_at = None, turn
        for at in self.common(flow):
            one = max(sent[at] + up, received[at] + down) * scale[at]
            other = max(others[0][at] + down, others[1][at] + up) * others[2][at]
            key = (max(one, other), one + other, (at - turn) % self.width)
            if best is None or key < best:
                best, best_at = key, at
        self.add(flow, best_at)
        return best_at

    def time(self, node: int, at: int) -> _Time:
        """Return what a port takes; 0 where it is down."""
        return max(self._sent[node][at], self._received[node][at]) * self._scale[node][at]

    def busier(self, flow: Flow, at: int) -> _Time:
        """Return the time of the busier of the two ports `flow` uses at home `at`."""
        low, high = self.ends(flow)
        return max(self.time(low, at), self.time(high, at))

    def busiest(self) -> tuple[_Time, int, int]:
        """Return the time of the busiest port that is up, its node and home."""
        times = (
            (self.time(node, at), -node, -at) for node in self.shares for at in range(self.width)
        )
        time, node, at = max(times)
        return time, -node, -at

    def floor(self) -> _Time:
        """Return the time of the busiest node if its ports shared its load in proportion."""
        times = (
            Fraction(max(sum(self._sent[node]), sum(self._received[node])) * _SCALE, sum(row))
            for node, row in self.shares.items()
            if any(row)
        )
        return max(times, default=0)


def _even_out(flows: Sequence[Flow], chosen: Sequence[int], ports: _Ports) -> list[int] | None:
    """Spread edges that all carry the same; None where they do not, or one has no home.

    Edges that carry both ways take as much of a port out as in. Of edges that carry one way, those
    out of a node and those into it are no concern of each other.
    """
    loads = {flow[3:] for flow in flows}
    is_one_way = len({up + down for up, down in loads}) == 1 and not any(u * d for u, d in loads)
    is_both_ways = len(loads) == 1 and all(up == down for up, down in loads)
    allowed = [ports.common(flow) for flow in flows]
    if not (is_one_way or is_both_ways) or not all(allowed):
        return None
    if is_both_ways:
        return even_out([ports.ends(flow) for flow in flows], allowed, ports.shares, chosen)
    ends = [
        (2 * low, 2 * high + 1) if flow.up else (2 * low + 1, 2 * high)
        for flow, (low, high) in ((flow, ports.ends(flow)) for flow in flows)
    ]
    shares = {2 * node + way: row for node, row in ports.shares.items() for way in (0, 1)}
    return even_out(ends, allowed, shares, chosen)


def _improve(flows: Sequence[Flow], chosen: list[int], ports: _Ports) -> None:
    """Relieve the busiest port, edge by edge, until no step does or it is as good as can be."""
    crowds: dict[tuple[int, int], set[int]] = {}
    for index, (flow, at) in enumerate(zip(flows, chosen, strict=True)):
        for node in ports.ends(flow):
            crowds.setdefault((node, at), set()).add(index)
    heap = [(-ports.time(node, at), node, at) for node, at in crowds]
    heapq.heapify(heap)
    enough = ports.floor() * _GOOD_ENOUGH if heap else 0
    left = _MOST_TRIED

    def move(index: int, target: int) -> None:
        flow, source = flows[index], chosen[index]
        ports.add(flow, source, -1)
        ports.add(flow, target)
        for node in ports.ends(flow):
            crowds[node, source].discard(index)
            crowds.setdefault((node, target), set()).add(index)
            heapq.heappush(heap, (-ports.time(node, target), node, target))
            heapq.heappush(heap, (-ports.time(node, source), node, source))
        chosen[index] = target

    def relieve(index: int, worst: _Time) -> bool:
        """Move a flow elsewhere, or have it change places, so that all ports take less."""
        nonlocal left
        flow, here = flows[index], chosen[index]
        for there in ports.common(flow):
            if there == here:
                continue
            near: set[int] = set().union(*(crowds.get((v, there), ()) for v in ports.ends(flow)))
            for other in (None, *sorted(near)):
                if other is not None and here not in ports.common(flows[other]):
                    continue
                left -= 1
                if left < 0:
                    return False
                moved = [index] if other is None else [index, other]
                for each, target in zip(moved, (there, here), strict=False):
                    ports.add(flows[each], chosen[each], -1)
                    ports.add(flows[each], target)
                is_better = all(
                    max(ports.busier(flows[each], here), ports.busier(flows[each], there)) < worst
                    for each in moved
                )
                for each, target in zip(moved, (there, here), strict=False):
                    ports.add(flows[each], target, -1)
                    ports.add(flows[each], chosen[each])
                if is_better:
                    for each, target in zip(moved, (there, here), strict=False):
                        move(each, target)
                    return True
        return False

    while heap and left > 0:
        worst, node, at = heap[0]
        if -worst != ports.time(node, at):
            heapq.heappop(heap)  # what it was before a move
            continue
        if -worst <= enough:
            return
        if not any(relieve(index, -worst) for index in sorted(crowds[node, at])):
            return


def _require(homes: Sequence[int]) -> None:
    if not homes:
        raise InvalidArgument("channels need at least one rail to be at home on")


#: Divided by every share but 0.
_SCALE = math.lcm(*range(1, WHOLE + 1))
#: Changes of place that are looked at, 3 us each; and how close to an even spread is close enough.
_MOST_TRIED = 20_000
_GOOD_ENOUGH = Fraction(201, 200)

__all__ = [
    "Edge",
    "EdgeAtHome",
    "Placement",
    "inlets",
    "mean_time",
    "place",
    "place_edges",
    "placed_at",
    "port_time",
    "ring_time",
]
