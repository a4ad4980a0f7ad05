"""Placement of direct exchanges: alltoall, gather and scatter, also with parts of unequal size.

A part is the data that one rank sends to another. Small parts travel undivided on channel 0
(`r2ccl.algos.direct_exchange`), whose load is neglected. Each larger part is divided evenly among
the other channels, and each channel of each pair of ranks is placed on a rail. If all ports have
their full bandwidth, all rails share one wire, or there are more than `_MOST_EDGES_PLACED` edges,
channel c uses home rail ``(c - 1) % n``, of n home rails, for all pairs. In a healthy network, this
loads all ports of a rank alike if the number of channels without channel 0 is a multiple of n.
If none of the three conditions holds, one of two rules applies:

1. Parts of equal size: channels are placed so that the ports of each rank are loaded in proportion
   to their shares.
2. Collectives in `PAIRWISE`, whose parts may differ in size: each pair divides its part among the
   rails that both ranks have, in proportion to the smaller of the two shares, independently of all
   other pairs. This rule needs no sizes: no rank knows all of them, but all ranks must compute the
   same placement.

Times in simulations of 30 degraded clusters of up to 12 nodes (`bench/clusters.py --seed 11`), as
multiples of the lower bound, from the median to the worst: with equal parts, 1.005 to 1.09 by the
first rule and 1.07 to 1.53 by the second; with parts whose sizes differ by up to 1000x, 1.17 to
1.95 by the first rule and 1.09 to 1.39 by the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations

from r2ccl.algos import direct_exchange
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.allreduce_registry import Candidate
from r2ccl.planning.cost_model import Fabric, Placed, of_one_wire
from r2ccl.planning.edge_loads import Flow, Flows
from r2ccl.planning.exchange_time import alltoall_time
from r2ccl.planning.placement import (
    Edge,
    Placement,
    mean_time,
    place_edges,
    placed_at,
    port_time,
)
from r2ccl.schedule.ir import Schedule
from r2ccl.types import PAIRWISE, Collective


def place_exchange(
    collective: Collective, root: int, nchannels: int, fabric: Fabric, health: Health
) -> Placed:
    """Return the direct exchange for a collective, placed on the home rails.

    Parameters
    ----------
    collective : Collective
        One of `r2ccl.types.DIRECT`.
    root : int
        Root rank of gather and scatter; otherwise ignored.
    nchannels : int
        Number of channels among which a part is divided. If 0, the number is w, the smaller of
        ``fabric.nwires`` and the number of home rails, or 2 w if w > 1 and any port of a rank on a
        home rail has less than its full bandwidth.
    fabric : Fabric
    health : Health
    """
    n, width = health.nranks, len(fabric.homes)
    is_whole = all(health.share(rank, rail) == WHOLE for rank in range(n) for rail in fabric.homes)
    nwires = min(width, fabric.nwires)
    # In a degraded network, channels share rails. A channel whose rail is shared ends late if it
    # carries much data, so there are more channels, each with less data.
    count = nchannels or (nwires if is_whole or nwires == 1 else 2 * nwires)
    schedule = _MAKERS[collective](n, root, count)
    npairs = n * (n - 1) // 2 if schedule.collective == "alltoall" else n - 1
    times: Callable[[Sequence[int], Health], tuple[Fraction | None, Fraction]]
    is_alike = is_whole or fabric.nwires == 1 or npairs * count > _MOST_EDGES_PLACED
    if is_alike and schedule.collective == "alltoall":
        # The flows are too many to list them while a call waits: a million with 512 ranks.
        placement = Placement(_turns(schedule, width), schedule.weights, spread=width)
        times = partial(alltoall_time, count, nodes=fabric.nodes)
    else:
        flows = flows_of_exchange(schedule)
        if is_alike:
            placement = _alike(schedule, width)
        elif collective in PAIRWISE:
            placement = _with_whole_parts(_in_proportion(schedule, flows, fabric, health), width)
        else:
            placement = _with_whole_parts(
                place_edges(schedule, fabric.homes, health, fabric.nodes, flows), width
            )

        def listed(homes: Sequence[int], health: Health) -> tuple[Fraction | None, Fraction]:
            busiest = port_time(schedule, placement, homes, health, fabric.nodes, flows)
            return busiest, mean_time(flows, homes, health, fabric.nodes)

        times = listed
    load, mean = times(fabric.homes, health)
    if load and fabric.nwires == 1:
        load, mean = times((0,), of_one_wire(health, fabric.homes))
    nlinks = (n - 1) * -(-count // width)
    busy = (load or Fraction(0)) * WHOLE
    candidate = Candidate("direct", schedule)  # kept per health, so without the flows
    return Placed(candidate, placement, busy, mean * WHOLE, nlinks, load is not None)


def flows_of_exchange(schedule: Schedule) -> Flows:
    """Return the flows of a direct exchange of equal parts, without channel 0 (see the module)."""
    n, root = schedule.nranks, schedule.root
    collective = schedule.collective
    if collective == "alltoall":
        pairs = [(low, high, 1, 1) for low, high in combinations(range(n), 2)]
    else:
        is_up = [(rank < root) == (collective == "gather") for rank in range(n)]
        pairs = [
            (min(rank, root), max(rank, root), int(is_up[rank]), int(not is_up[rank]))
            for rank in range(n)
            if rank != root
        ]
    channels = range(1, schedule.nchannels)
    flows = tuple(Flow(channel, *pair) for channel in channels for pair in pairs)
    return Flows(flows, n * len(channels))


def _alike(schedule: Schedule, width: int) -> Placement:
    """Place each channel on one rail for all pairs; spread undivided parts over all rails.

    The schedule must be a gather or scatter.
    """
    pairs = sorted({flow[1:3] for flow in flows_of_exchange(schedule).flows})
    edges = tuple(Edge(0, low, high, (low + high) % width) for low, high in pairs)
    return Placement(_turns(schedule, width), schedule.weights, edges)


def _turns(schedule: Schedule, width: int) -> tuple[int, ...]:
    """Return link channels that place each channel c above 0 on home rail ``(c - 1) % width``.

    Channel 0 gets link channel 0.
    """
    return (0, *(c * width + (c - 1) % width for c in range(1, schedule.nchannels)))


def _in_proportion(schedule: Schedule, flows: Flows, fabric: Fabric, health: Health) -> Placement:
    """Place each pair's channels on its common rails in proportion to the smaller shares."""
    nodes = fabric.nodes or range(schedule.nranks)
    known: dict[tuple[int, ...], list[int]] = {}
    edges = []
    for channel, low, high, *_ in flows.flows:
        if nodes[low] == nodes[high]:
            continue
        shares = [min(health.share(low, rail), health.share(high, rail)) for rail in fabric.homes]
        turn = (low + high) % len(shares)
        key = (turn, *shares)
        if key not in known:
            known[key] = _dealt(shares, turn, schedule.nchannels - 1)
        edges.append((channel, low, high, known[key][channel - 1]))
    return placed_at(schedule, len(fabric.homes), edges)


def _dealt(shares: Sequence[int], turn: int, count: int) -> list[int]:
    """Return a rail for each of `count` channels, in proportion to the rails' `shares`.

    Ties go to the first rail at or after rail `turn`, cyclically.
    """
    width = len(shares)
    if not any(shares):  # routing chooses the path
        return [(turn + number) % width for number in range(count)]
    taken = [0] * width
    found = []
    for _ in range(count):
        at = max(
            range(width),
            key=lambda rail: (Fraction(shares[rail], taken[rail] + 1), -((rail - turn) % width)),
        )
        taken[at] += 1
        found.append(at)
    return found


def _with_whole_parts(placement: Placement, width: int) -> Placement:
    """Place the undivided parts of each pair on a rail that carries its divided parts."""
    rails: dict[tuple[int, int], list[int]] = {}
    for _, low, high, number in placement.edges:
        rails.setdefault((low, high), []).append(number % width)
    edges = [
        Edge(0, low, high, found[(low + high) % len(found)])
        for (low, high), found in sorted(rails.items())
    ]
    return placement._replace(edges=(*edges, *placement.edges))


#: Functions ``make(nranks, root, nchannels)`` that build the schedules.
_MAKERS: dict[Collective, Callable[[int, int, int], Schedule]] = {
    Collective.ALLTOALL: lambda nranks, root, nchannels: direct_exchange.alltoall(
        nranks, nchannels
    ),
    Collective.ALLTOALLV: lambda nranks, root, nchannels: direct_exchange.alltoall(
        nranks, nchannels
    ),
    Collective.GATHER: direct_exchange.gather,
    Collective.GATHERV: direct_exchange.gather,
    Collective.SCATTER: direct_exchange.scatter,
    Collective.SCATTERV: direct_exchange.scatter,
}
#: Maximum number of edges that are placed one by one (0.2 s). With more edges, every channel is
#: placed on one rail, and its links at ports that are down use other rails.
_MOST_EDGES_PLACED = 20_000

__all__ = ["flows_of_exchange", "place_exchange"]
