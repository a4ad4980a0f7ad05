"""Prediction: how long a candidate takes on what the rails have left.

::

    T = steps x alpha + D x (load + mean x fill of the pipeline) / beta

`load` is what the most loaded port carries of the data D, over what that port has left; it includes
the detours of what is at home on a port that is down. A pipeline has to be filled and emptied: a
chain of n ranks takes n - 1 slices for that; a tree its height, at the pace of ports that carry
what they do on average, of which some is hidden where trees take turns (`_fill_of_trees`). alpha
and beta were measured (`r2ccl.planning.calibration`).

Pure. Invariant: integers and fractions only, so that all ranks predict the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, isqrt
from typing import NamedTuple

import msgspec

from r2ccl.config import Config
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.allreduce_registry import Candidate
from r2ccl.planning.edge_loads import Flows, flows_of
from r2ccl.planning.placement import (
    Placement,
    inlets,
    mean_time,
    place,
    place_edges,
    placed_at,
    port_time,
    ring_time,
)
from r2ccl.schedule.ir import Schedule


class Rates(NamedTuple):
    """What all ranks agreed that the network gives.

    Attributes
    ----------
    alpha_ns : int
        From one rank's slice to the next one's, of no size.
    beta : int
        Bytes/s of a rail that carries all it should, each way.
    """

    alpha_ns: int
    beta: int


#: Where nothing was measured: candidates are compared by their loads alone.
UNMEASURED = Rates(0, 10**9)


class Fabric(NamedTuple):
    """What lies between the ranks; the same for all of them.

    Attributes
    ----------
    homes : sequence of int
        Rails that channels are at home on.
    nwires : int
        Rails that add bandwidth to one another: rails on one wire, as on loopback, are backups of
        each other and get one channel together (measured there, 1 against 2 channels: 8 to 30 %
        less time from 256 KiB to 64 MiB, with 2 and 4 ranks).
    nodes : sequence of int
        Of every rank its node, whose ports it shares; empty: one rank a node.
    rates : Rates
    """

    homes: Sequence[int]
    nwires: int
    nodes: Sequence[int] = ()
    rates: Rates = UNMEASURED

    @property
    def inlet_nbytes(self) -> int:
        """What a port to which several peers send is to be sent at once."""
        return max(_LEAST_INLET_NBYTES, int(self.rates.beta * _INLET_S))


class Choice(NamedTuple):
    """What a call runs, where its channels go, and the size of a slice.

    Attributes
    ----------
    name : str
        Of the schedule's family.
    schedule : Schedule
    placement : Placement
    slice_nbytes : int
    load : Fraction
        What the busiest port takes for the data, as a multiple of what one whole rail takes.
    predicted_ns : int
        How long the call takes, 0: nothing is known of it.
    steps : int
        Messages one after another.
    is_among_nodes : bool
        Whether the schedule is over nodes, of several ranks each, and not expanded yet.
    flows : Flows or None
        What its edges carry, where that is known without its ops.
    """

    name: str
    schedule: Schedule
    placement: Placement
    slice_nbytes: int
    load: Fraction = Fraction(0)
    predicted_ns: int = 0
    steps: int = 0
    is_among_nodes: bool = False
    flows: Flows | None = None

    @property
    def is_bandwidth_sample(self) -> bool:
        """Whether its slices show what rails carry: one peer sends to a port, and all the time."""
        return self.schedule.name in _GAUGES and not self.is_among_nodes


class Placed(NamedTuple):
    """A candidate on the rails of one health, for data of any size.

    Attributes
    ----------
    candidate : Candidate
    placement : Placement
    load : Fraction
        As in `Choice`.
    mean : Fraction
        Average over all ports, in the same unit.
    nlinks : int
        Links that end at the port at which most do; 0: that is no matter.
    has_way : bool
        Whether all neighbours have a home in common. Without one, they use the last resort, whose
        rate is not known, or cannot exchange data.
    """

    candidate: Candidate
    placement: Placement
    load: Fraction
    mean: Fraction
    nlinks: int
    has_way: bool


def put(candidate: Candidate, fabric: Fabric, health: Health) -> Placed:
    """Place a candidate: on the ports of nodes if it is among these."""
    schedule, homes, nodes = candidate.schedule, fabric.homes, fabric.nodes
    if candidate.is_among_nodes:
        health, nodes = _of_nodes(health, nodes), ()
    if candidate.is_ring:
        placement = place(schedule.nchannels, homes, health)
        load, nlinks = ring_time(placement, homes, health, nodes), 0
        if candidate.is_among_nodes:
            # The leader's fellows feed a pipeline too, so its slices are small.
            nlinks = 2 * -(-schedule.nchannels // len(homes))
        if load and schedule.collective != "allreduce":
            load /= 2  # an allreduce is a reduce-scatter and an allgather
        mean = load or Fraction(0)
    else:
        flows = candidate.flows or flows_of(schedule)
        if candidate.edges:
            placement = placed_at(schedule, len(homes), candidate.edges)
        else:
            placement = place_edges(schedule, homes, health, nodes, flows)
        load = port_time(schedule, placement, homes, health, nodes, flows)
        mean = mean_time(flows, homes, health, nodes)
        if load and fabric.nwires == 1:
            wire = _of_one_wire(health, homes)
            load = port_time(schedule, placement, (0,), wire, nodes, flows)
            mean = mean_time(flows, (0,), wire, nodes)
        nlinks = inlets(placement, homes)
    busy = (load or Fraction(0)) * WHOLE
    return Placed(candidate, placement, busy, mean * WHOLE, nlinks, load is not None)


def _of_nodes(health: Health, nodes: Sequence[int]) -> Health:
    """Return the table of nodes in the order of their first ranks; the worst of a node's counts."""
    rows: dict[int, bytes] = {}
    for rank, node in enumerate(nodes):
        row = health.shares[rank * health.nrails : (rank + 1) * health.nrails]
        before = rows.get(node)
        rows[node] = row if before is None else bytes(map(min, row, before))
    return msgspec.structs.replace(health, shares=b"".join(rows.values()))


def _of_one_wire(health: Health, homes: Sequence[int]) -> Health:
    """Return the table of rails that are one wire: it carries what the best of them does."""
    shares = bytes(max(health.share(rank, rail) for rail in homes) for rank in range(health.nranks))
    return msgspec.structs.replace(health, nrails=1, shares=shares)


def predict(placed: Placed, nbytes: int, fabric: Fabric, config: Config) -> Choice:
    """Cut a call of `nbytes` in slices, and say how long it takes."""
    candidate, placement, load, mean, nlinks, _ = placed
    schedule, rates = candidate.schedule, fabric.rates
    wire_ns = load * nbytes * 10**9 / rates.beta
    slice_nbytes = config.slice_nbytes
    if nlinks:
        # Small enough for a pipeline, and for the ports, and large enough to be worth handling.
        nslices = _nslices(int(wire_ns) * candidate.fill, rates.alpha_ns)
        wanted = min(nbytes // schedule.nchannels // nslices, fabric.inlet_nbytes // (2 * nlinks))
        slice_nbytes = min(slice_nbytes, max(_MIN_SLICE_NBYTES, wanted))
    channel_nbytes = Fraction(nbytes * max(placement.weights), sum(placement.weights))
    nslices = max(1, ceil(channel_nbytes / slice_nbytes))
    fill = Fraction(candidate.fill, nslices)
    steps = schedule.cost.steps + 2 * candidate.is_among_nodes
    if candidate.name in NOT_TREES:
        shown = _OVERLAPPED if candidate.name == "dissemination" else 1
        total_ns = wire_ns * (1 + fill) + steps * shown * rates.alpha_ns
    else:
        mean_ns = min(wire_ns, mean * nbytes * 10**9 / rates.beta)
        nwires = 1 if fabric.nwires == 1 else len(fabric.homes)
        filling = _fill_of_trees(fill, schedule.nranks, schedule.nchannels, nwires)
        total_ns = wire_ns + mean_ns * filling + steps * _SHOWN_STEPS * rates.alpha_ns
    return Choice(
        candidate.name,
        schedule,
        placement,
        slice_nbytes,
        load,
        int(total_ns),
        steps,
        candidate.is_among_nodes,
        candidate.flows,
    )


def _fill_of_trees(fill: Fraction, nranks: int, ntrees: int, nwires: int) -> Fraction:
    """Return what filling trees takes, as a part of what ports carry on average.

    `fill` is the height of a tree over the slices of its channel. Trees on one rail take turns at a
    port, so that some fill it while others wait; the fewer slices, the more of that there is.
    (Fitted to simulations of 1,220 trees on 400 random clusters of 3 to 64 nodes, 1 to 16 MiB: 94 %
    of the predictions are within 10 %.)
    """
    root = Fraction(isqrt(10_000 * ntrees // nwires), 100)
    shown = Fraction(15, 7) * fill * (1 - Fraction(2, 3 * nranks))
    return shown / (root * (1 + fill * Fraction(5, 14)))


def _nslices(fill_ns: int, alpha_ns: int) -> int:
    """Return the slices of a channel that a pipeline does best with.

    To fill it takes `fill_ns` divided by their number, about; each takes a fourth of a step to
    handle.
    """
    return max(_FEW_SLICES, min(_MANY_SLICES, isqrt(4 * fill_ns // max(1, alpha_ns))))


#: Schedules in which everybody receives from one rank alone.
_GAUGES = ("ring", "bridged_ring", "chain")
#: Schedules that wait for their fill with all of their ports, or have none. All others count as
#: trees: leaf rings, nested rings, OptCC and R2CC-AllReduce too.
NOT_TREES = (
    "chain",
    "ring",
    "bridged_ring",
    "dissemination",
    "recursive_doubling",
    "one_shot",
)
#: Steps of a dissemination overlap: the first parts of each are there before.
_OVERLAPPED = Fraction(1, 3)
#: Part of a tree's steps that shows: the others pass while its ports are busy (same fit).
_SHOWN_STEPS = Fraction(9, 11)
#: Bounds of the slices of a channel, and the least a slice should have.
_FEW_SLICES, _MANY_SLICES = 16, 128
_MIN_SLICE_NBYTES = 32 << 10
#: What a port is sent at once: as much as it takes in this time, and no less than that.
_INLET_S = Fraction(1, 100)
_LEAST_INLET_NBYTES = 256 << 10

__all__ = ["NOT_TREES", "UNMEASURED", "Choice", "Fabric", "Placed", "Rates", "predict", "put"]
