"""Placement: choose the rails that a schedule's channels travel on, and the share of each channel.

A channel's slices travel on its *home rail* while that rail is up (see
`r2ccl.failover.migration.routes`). A *link channel* is the channel number that links use. The home
rail of link channel c is ``homes[c % len(homes)]``, so choosing a link channel chooses a rail.

`place` serves rings: all hops of a channel use the same rail. A ring is as slow as its slowest
channel, and a channel as slow as its slowest hop. Each channel therefore gets work in proportion to
the worst port of its home rail, so that all channels end together. A port that is down does not
count for this, because the rail's channels detour only at the hops that use this port
(`rail_weights`).

`place_edges` serves any schedule: a rail is chosen for each edge between two nodes, so that the
ports of a node are loaded in proportion to their shares, and ports that are down are avoided.

Invariant: equal arguments give equal placements, on every rank.
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
    """Edge between ranks `low` < `high` on a schedule's channel, and its link channel `number`."""

    channel: int
    low: int
    high: int
    number: int


#: An edge placed on a rail: channel, lower rank, higher rank, and index of its home rail.
EdgeAtHome: TypeAlias = tuple[int, int, int, int]


class Placement(NamedTuple):
    """Link channels and weights of a schedule's channels.

    Attributes
    ----------
    channels : tuple of int
        Link channel that each of the schedule's channels travels on.
    weights : tuple of int
        Weight of each channel's share of the work.
    edges : tuple of Edge
        Edges with their own link channel, which overrides `channels`.
    spread : int
        If above 0, channel 0 has an edge between every two ranks, with the link channel ``(low +
        high) % spread``. `edges` then omits all edges of channel 0, because there are too many. If
        0, `edges` has all edges that have their own link channel.
    """

    channels: tuple[int, ...]
    weights: tuple[int, ...]
    edges: tuple[Edge, ...] = ()
    spread: int = 0

    def numbers(self, rank: int, nranks: int) -> dict[tuple[int, int], int]:
        """Return the link channels that override `channels` for edges of `rank`.

        A key of the result is a channel of the schedule and a peer. `nranks` is the schedule's
        number of ranks.
        """
        found = {}
        if self.spread:
            peers = (peer for peer in range(nranks) if peer != rank)
            found = {(0, peer): self.number(0, rank, peer) for peer in peers}
        for channel, low, high, number in self.edges:
            if rank in (low, high):
                found[channel, low + high - rank] = number
        return found

    def number(self, channel: int, low: int, high: int) -> int:
        """Return the link channel of an edge that is not in `edges`."""
        is_spread = self.spread and channel == 0
        return (low + high) % self.spread if is_spread else self.channels[channel]

    def packed(self, width: int) -> Placement:
        """Return the placement with the lowest possible link channels on each of the home rails.

        `width` is the number of home rails. On every rail, the channels of the schedule that have
        an edge there are numbered from 0. Schedules with equally many channels per rail then use
        the same link channels, and detours of the channels of a lost rail are spread evenly.
        `edges` must have all edges of the schedule, so every node must have one rank. If `edges` is
        empty, the placement is returned unchanged.
        """
        users = [
            sorted({e.channel for e in self.edges if e.number % width == at}) for at in range(width)
        ]
        turns = [{channel: turn for turn, channel in enumerate(each)} for each in users]
        edges = []
        for edge in self.edges:
            at = edge.number % width
            edges.append(edge._replace(number=turns[at][edge.channel] * width + at))
        return self._replace(edges=tuple(edges))


def place(nchannels: int, homes: Sequence[int], health: Health) -> Placement:
    """Place the channels of rings on the home rails in turn, best rails first.

    Parameters
    ----------
    nchannels : int
        Number of channels.
    homes : sequence of int
        Home rails.
    health : Health
        Shares of the ports of all ranks.

    Returns
    -------
    Placement
        Link channel and weight of each channel. On a healthy network, the link channels are the
        channel numbers, and the weights are equal.

    Raises
    ------
    InvalidArgument
        If `homes` is empty or names a rail that `health` does not have.
    """
    _require(homes)
    rows = [[health.share(rank, rail) for rail in homes] for rank in range(health.nranks)]
    worst = [min(column) for column in zip(*rows, strict=True)]
    order = sorted(range(len(homes)), key=lambda at: -worst[at])
    weight_of = rail_weights(rows)
    channels, weights = [], []
    for number in range(nchannels):
        turn, place = divmod(number, len(homes))
        at = order[place]
        channels.append(at + turn * len(homes))
        weights.append(weight_of[at])
    return Placement(tuple(channels), tuple(weights))


def rail_weights(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the relative bandwidth of each rail; ``rows[i][r]`` is the share of port i on rail r.

    The bandwidth of a rail is the least share of its ports that are up, because the channels of a
    port that is down detour to the other rails. A rail without a port that is up counts as much as
    the best rail.
    """
    columns = zip(*rows, strict=True)
    least = [min((share for share in column if share), default=0) for column in columns]
    best = max(least) or WHOLE
    return [each or best for each in least]


def place_edges(
    schedule: Schedule,
    homes: Sequence[int],
    health: Health,
    nodes: Sequence[int] = (),
    flows: Flows | None = None,
) -> Placement:
    """Place each edge between two nodes on a home rail, for any schedule.

    Edges of nodes with few rails are placed first; among edges of nodes with equally many rails,
    those with the highest load come first. Each edge gets the rail on which the busier of its two
    ports ends earliest. Then edges change rails: if all loads are equal, by edge colouring (see
    `_even_out`); otherwise, edges leave the busiest port, or swap rails with other edges, as long
    as this shortens the time. An edge between nodes without a common home rail gets an arbitrary
    rail; routing chooses its path. Edges inside a node are not placed.

    Parameters
    ----------
    schedule : Schedule
        Schedule over all ranks of `health`.
    homes : sequence of int
        Home rails, all of them rails of `health`.
    health : Health
        Shares of the ports of all ranks.
    nodes : sequence of int, optional
        Node of each rank; ranks of a node share its ports. Default: one rank per node.
    flows : Flows, optional
        Flows of the schedule, if they are known.

    Raises
    ------
    InvalidArgument
        If `homes` is empty.

    Notes
    -----
    *Cost*: some 10 us per edge, plus the edge colouring or at most `_MOST_TRIED` trial moves.
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
    """Return the placement of edges whose home rails are known.

    Parameters
    ----------
    schedule : Schedule
    width : int
        Number of home rails.
    edges : iterable of EdgeAtHome
        Edges between nodes, with their rails. All other edges get the first home rail.
    """
    return Placement(
        tuple(channel * width for channel in range(schedule.nchannels)),
        schedule.weights,
        tuple(Edge(c, low, high, c * width + at) for c, low, high, at in edges),
    )


def inlets(placement: Placement, homes: Sequence[int]) -> int:
    """Return the largest number of edges in ``placement.edges`` that one rank has on one rail."""
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
    """Return the time that the busiest port takes for its part of one buffer.

    A port with share s carries s buffers per unit of time; s is at most `WHOLE`. Load placed on a
    port that is down detours over the home rails that are up at both ends, in proportion to their
    shares. Returns None if two neighbors have no common home rail.
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


def ports_of(homes: Sequence[int], health: Health, nodes: Sequence[int]) -> dict[int, list[int]]:
    """Return the share of each node's port on each home rail, the least among the node's ranks.

    `nodes` has the node of each rank.
    """
    rows: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        start = rank * health.nrails
        row = [health.shares[start + rail] for rail in homes]
        before = rows.get(node)
        rows[node] = row if before is None else [*map(min, row, before)]
    return rows


def mean_time(
    flows: Flows, homes: Sequence[int], health: Health, nodes: Sequence[int] = ()
) -> Fraction:
    """Return the average time that a port takes for its part of one buffer; see `port_time`.

    The result is 0 if all ports are down.
    """
    ports = _Ports(homes, health, nodes)
    total = sum(flow.up + flow.down for flow in flows.flows if not ports.is_inside(flow))
    capacity = sum(map(sum, ports.shares.values()))
    return Fraction(total, capacity * flows.unit) if capacity else Fraction(0)


def ring_time(
    placement: Placement, homes: Sequence[int], health: Health, nodes: Sequence[int] = ()
) -> Fraction | None:
    """Return the `port_time` of a ring allreduce in rank order, computed without its flows.

    Unlike in `port_time`, a channel detours as a whole, to the rail that then has the least
    detoured weight relative to its share. Returns None if two neighbors have no common home rail.
    """
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


#: Busy time of a port: a load of 1 takes ``_SCALE / share``.
_Time = int | Fraction


class _Ports:
    """Loads that the ports of all nodes send and receive; `at` is an index among the home rails."""

    def __init__(self, homes: Sequence[int], health: Health, nodes: Sequence[int]) -> None:
        self.width = len(homes)
        self._node_of = list(nodes) or list(range(health.nranks))
        rows = ports_of(homes, health, self._node_of)
        #: Share of each port, by node and home rail. `_scale` has the time of one unit of load.
        self.shares = rows
        self._scale = {
            node: [_SCALE // share if share else 0 for share in row] for node, row in rows.items()
        }
        self._sent: dict[int, list[_Time]] = {node: [0] * self.width for node in rows}
        self._received: dict[int, list[_Time]] = {node: [0] * self.width for node in rows}
        self._nup = {node: sum(map(bool, row)) for node, row in rows.items()}
        self._both: dict[tuple[int, int], list[int]] = {}

    def ends(self, flow: Flow) -> tuple[int, int]:
        """Return the nodes at both ends of `flow`, that of rank `flow.low` first."""
        return self._node_of[flow.low], self._node_of[flow.high]

    def is_inside(self, flow: Flow) -> bool:
        """Return whether both ends of `flow` are on the same node."""
        return self._node_of[flow.low] == self._node_of[flow.high]

    def fewest(self, flow: Flow) -> int:
        """Count the ports that are up at each end of `flow`; return the smaller count."""
        return min(self._nup[self._node_of[flow.low]], self._nup[self._node_of[flow.high]])

    def common(self, flow: Flow) -> list[int]:
        """Return the indices of the home rails that are up at both ends of `flow`."""
        low, high = self.ends(flow)
        found = self._both.get((low, high))
        if found is None:
            pairs = zip(self.shares[low], self.shares[high], strict=True)
            found = [at for at, (one, other) in enumerate(pairs) if one and other]
            self._both[low, high] = found
        return found

    def add(self, flow: Flow, at: int, part: _Time = 1) -> None:
        """Add `part` times the load of `flow` to home rail `at`; a negative `part` removes load."""
        low, high = self.ends(flow)
        up, down = part * flow.up, part * flow.down
        self._sent[low][at] += up
        self._received[low][at] += down
        self._sent[high][at] += down
        self._received[high][at] += up

    def add_detoured(self, flow: Flow, at: int) -> bool:
        """Add `flow` to home rail `at`, or if `at` is down at an end, to the rails up at both ends.

        Returns
        -------
        bool
            False if no home rail is up at both ends.
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
        """Add the weights of all channels to the ports of one hop of a ring.

        ``channels[at]`` has the weights of the channels whose home rail is ``at``. A channel whose
        home rail is down at either end moves as a whole to a rail that is up at both ends. Of these
        rails, it moves to the rail on which the total weight of moved channels, including its own,
        is smallest relative to the rail's share. `r2ccl.failover.migration.routes` does the same
        with numbers of channels. Returns False if no home rail is up at both ends.
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
        """Add `flow` to the rail where the busier of its two ports ends earliest; return the rail.

        Returns the rail's index among the home rails. If no home rail is up at both ends, the index
        is the number of the flow's channel, modulo the number of home rails.
        """
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
        """Return the busy time of the port of `node` on home rail `at`; 0 if it is down."""
        return max(self._sent[node][at], self._received[node][at]) * self._scale[node][at]

    def busier(self, flow: Flow, at: int) -> _Time:
        """Return the larger busy time of the two ports that `flow` uses on home rail `at`."""
        low, high = self.ends(flow)
        return max(self.time(low, at), self.time(high, at))

    def busiest(self) -> tuple[_Time, int, int]:
        """Return the busy time, the node and the home rail of the busiest port that is up."""
        times = (
            (self.time(node, at), -node, -at) for node in self.shares for at in range(self.width)
        )
        time, node, at = max(times)
        return time, -node, -at

    def floor(self) -> _Time:
        """Return a lower bound of the busy time of the busiest port, which holds for any placement.

        The ports of a node would all be busy equally long if they carried its load in proportion to
        their shares. The bound is the longest such time of any node.
        """
        times = (
            Fraction(max(sum(self._sent[node]), sum(self._received[node])) * _SCALE, sum(row))
            for node, row in self.shares.items()
            if any(row)
        )
        return max(times, default=0)


def _even_out(flows: Sequence[Flow], chosen: Sequence[int], ports: _Ports) -> list[int] | None:
    """Return a rail for each edge, found by edge colouring; `chosen` if no better ones are found.

    Return None if edge colouring does not apply. It applies if every edge has a rail that is up at
    both ends, and all edges carry the same load, either all in both directions or each in one
    direction only. In the second case, edges out of a node and edges into it use different
    directions of its ports, so each direction of a node is a vertex.
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
    """Change `chosen`, the rails of edges, so that the busiest port has less load.

    Stop when no move helps, the loads are nearly even, or `_MOST_TRIED` moves were tried.
    """
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
        """Move flow `index` to another rail, or swap it with a flow there, if that helps.

        A change helps if it makes the busy times of all old and new ports of the moved flows less
        than `worst`. Return True if the flow was moved.
        """
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
            heapq.heappop(heap)  # outdated by a move
            continue
        if -worst <= enough:
            return
        if not any(relieve(index, -worst) for index in sorted(crowds[node, at])):
            return


def _require(homes: Sequence[int]) -> None:
    if not homes:
        raise InvalidArgument("no home rails; a placement needs at least one")


#: Least common multiple of all shares above 0, so that times are integers.
_SCALE = math.lcm(*range(1, WHOLE + 1))
#: Maximum number of moves and swaps that `_improve` tries (3 us each), and the multiple of the
#: lower bound at which it stops.
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
    "ports_of",
    "rail_weights",
    "ring_time",
]
