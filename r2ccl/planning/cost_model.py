"""Cost model: predict the time of a candidate schedule on the bandwidth that the rails have left.

::

    T = steps x alpha + D x (load + mean x fill of the pipeline) / beta

A port is a node's end of a rail. `load` is the part of the data D that the busiest port carries,
divided by the share of its bandwidth that the port has left. It includes slices that detour from a
failed port. `mean` is the average load of all ports. A pipeline must be filled and drained: in a
chain of n ranks, this takes the time of n - 1 slices at the busiest port (`load` replaces `mean`);
in a tree of height h, the time of h slices at the average port, minus the overlap of trees that
take turns at a port (`_fill_of_trees`). The steps of trees overlap, so only a fraction of alpha
counts. A dissemination waits only between steps that are shorter than alpha (`_waits_of_strides`).
alpha and beta are measured (`r2ccl.planning.calibration`).

Invariant: the model uses only integers and fractions, so all ranks predict the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, isqrt
from typing import NamedTuple

import msgspec

from r2ccl.algos import dissemination
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
from r2ccl.schedule.chunks import ALIGNMENT_NBYTES
from r2ccl.schedule.ir import Schedule


class Rates(NamedTuple):
    """Latency and bandwidth of the network, agreed on by all ranks.

    Attributes
    ----------
    alpha_ns : int
        Time of one step of an allreduce of a few bytes, in ns.
    beta : int
        Bandwidth of a healthy rail in each direction, in bytes/s.
    """

    alpha_ns: int
    beta: int


#: Rates of an unmeasured network. With these, predicted times leave out the latency of steps, and
#: can only be compared with each other.
UNMEASURED = Rates(0, 10**9)


class Fabric(NamedTuple):
    """The network between the ranks, as the planner sees it; equal on all ranks.

    Attributes
    ----------
    homes : sequence of int
        Numbers of the home rails, on which channels are placed: the RDMA rails or, if there are
        none, all TCP rails except last resorts.
    nwires : int
        Number of rails whose bandwidths add up. Rails that share one wire, as on loopback, only
        back each other up and get one channel together (loopback, 2 and 4 ranks, 256 KiB to 64 MiB:
        1 channel takes 8 to 30 % less time than 2).
    nodes : sequence of int
        Node of each rank; ranks of a node share its ports. Empty: every rank counts as a node.
    rates : Rates
    is_loopback : bool
        True if all rails are loopback: all ranks share the memory and the cores of one host.
    """

    homes: Sequence[int]
    nwires: int
    nodes: Sequence[int] = ()
    rates: Rates = UNMEASURED
    is_loopback: bool = False

    @property
    def inlet_nbytes(self) -> int:
        """Number of bytes that may be in flight to a port with several senders."""
        return max(_LEAST_INLET_NBYTES, int(self.rates.beta * _INLET_S))


class Choice(NamedTuple):
    """The schedule of a call, its placement, its slice size and its predicted time.

    Attributes
    ----------
    name : str
        Name of the schedule's family; for a schedule of the user, its own name.
    schedule : Schedule
    placement : Placement
    slice_nbytes : int
        Largest size of a slice, in bytes.
    load : Fraction
        Time of the busiest port, as a multiple of the time in which a rail with its full bandwidth
        carries the data; 0 if unknown.
    predicted_ns : int
        Predicted time of the call in ns; 0 if unknown.
    steps : int
        Number of messages on the longest chain of dependent messages; 0 if the choice was made
        without `predict`.
    is_among_nodes : bool
        True if the ranks of the schedule stand for nodes with several ranks, because it has not yet
        been expanded (`r2ccl.planning.allreduce_registry.expand`).
    flows : Flows or None
        Load of each edge of the schedule over nodes; kept when this schedule is expanded to a
        schedule over ranks. None if there is no schedule over nodes with several ranks, or if the
        loads are not known without generating its ops.
    has_way : bool
        False if the schedule was placed although two neighbors on different nodes have no common
        home rail (`Placed`); its load and time are then unknown. Always True if the choice was
        made without `predict`.
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
    has_way: bool = True

    @property
    def is_bandwidth_sample(self) -> bool:
        """True if the call can measure rail bandwidth: each port has one sender that never pauses.

        Only then is the traffic of a port limited by its rail and not by the schedule.
        """
        return self.schedule.name in _GAUGES and not self.is_among_nodes


class Placed(NamedTuple):
    """A candidate placed on the rails for one health, valid for data of any size.

    Attributes
    ----------
    candidate : Candidate
    placement : Placement
    load : Fraction
        Load of the busiest port, as in `Choice`; 0 unless `has_way`.
    mean : Fraction
        Average load of all ports, in the same unit.
    nlinks : int
        Largest number of edges that one rank, or node, has on one rail; 0 if it does not limit the
        slice size.
    has_way : bool
        True if every two neighbors on different nodes have a common home rail. Neighbors without a
        common home rail use a bypass or a rail that is not a home rail and has an unknown
        bandwidth, or they cannot exchange data.
    """

    candidate: Candidate
    placement: Placement
    load: Fraction
    mean: Fraction
    nlinks: int
    has_way: bool


def put(candidate: Candidate, fabric: Fabric, health: Health) -> Placed:
    """Return `candidate`, placed on the rails of the ranks, or of the nodes if `is_among_nodes`."""
    schedule, homes, nodes = candidate.schedule, fabric.homes, fabric.nodes
    if candidate.is_among_nodes:
        health, nodes = _of_nodes(health, nodes), ()
    is_one_wire = fabric.nwires == 1
    wire = of_one_wire(health, homes) if is_one_wire else health
    if candidate.is_ring:
        placement = place(schedule.nchannels, homes, health)
        load, nlinks = ring_time(placement, homes, health, nodes), 0
        if load and is_one_wire:
            load = ring_time(place(schedule.nchannels, (0,), wire), (0,), wire, nodes)
        if candidate.is_among_nodes:
            # The other ranks of a node send to their leader in a pipeline too, which needs small
            # slices.
            nlinks = 2 * -(-schedule.nchannels // len(homes))
        if load and schedule.collective != "allreduce":
            load /= 2  # an allreduce is a reduce-scatter and an allgather
        mean = load or Fraction(0)
    else:
        flows = candidate.flows or flows_of(schedule)
        placement = _placed(candidate, flows, homes, health, nodes)
        load = port_time(schedule, placement, homes, health, nodes, flows)
        mean = mean_time(flows, homes, health, nodes)
        if load and is_one_wire:
            load = port_time(schedule, placement, (0,), wire, nodes, flows)
            mean = mean_time(flows, (0,), wire, nodes)
        nlinks = inlets(placement, homes)
    busy = (load or Fraction(0)) * WHOLE
    if not candidate.is_among_nodes:  # only the expansion of a schedule needs its flows
        candidate = candidate._replace(flows=None)
    return Placed(candidate, placement, busy, mean * WHOLE, nlinks, load is not None)


def _placed(
    candidate: Candidate,
    flows: Flows,
    homes: Sequence[int],
    health: Health,
    nodes: Sequence[int],
) -> Placement:
    """Place channels with edges in ``candidate.edges`` as given, and all others edge by edge."""
    schedule, given = candidate.schedule, candidate.edges
    channels = {edge[0] for edge in given}
    if not given:
        return place_edges(schedule, homes, health, nodes, flows)
    found = placed_at(schedule, len(homes), given)
    if len(channels) == schedule.nchannels:
        return found
    left = Flows(tuple(flow for flow in flows.flows if flow.channel not in channels), flows.unit)
    others = place_edges(schedule, homes, health, nodes, left)
    return found._replace(edges=(*found.edges, *others.edges))


def _of_nodes(health: Health, nodes: Sequence[int]) -> Health:
    """Return the health with one row per node, in the order of their first ranks.

    The share of a node's port is the least share that any of the node's ranks has on that rail.
    """
    rows: dict[int, bytes] = {}
    for rank, node in enumerate(nodes):
        row = health.shares[rank * health.nrails : (rank + 1) * health.nrails]
        before = rows.get(node)
        rows[node] = row if before is None else bytes(map(min, row, before))
    return msgspec.structs.replace(health, shares=b"".join(rows.values()), excluded=())


def of_one_wire(health: Health, homes: Sequence[int]) -> Health:
    """Return `health` with one rail, on which each rank has its largest share on any of `homes`."""
    shares = bytes(max(health.share(rank, rail) for rail in homes) for rank in range(health.nranks))
    return msgspec.structs.replace(health, nrails=1, shares=shares, excluded=())


def predict(placed: Placed, nbytes: int, fabric: Fabric, config: Config) -> Choice:
    """Return `placed` as the choice for a call of `nbytes`: add slice size and predicted time."""
    candidate, placement, load, mean, nlinks, has_way = placed
    schedule, rates = candidate.schedule, fabric.rates
    wire_ns = load * nbytes * 10**9 / rates.beta
    slice_nbytes = config.slice_nbytes
    if nlinks:
        # Slices must be small enough for the pipeline and for the byte budget of the ports, large
        # enough to be worth their overhead, and of whole elements of any type.
        fill_ns = int(wire_ns) * candidate.fill
        nslices = _nslices(fill_ns, rates) if fill_ns else 1
        wanted = min(nbytes // schedule.nchannels // nslices, fabric.inlet_nbytes // (2 * nlinks))
        wanted -= wanted % ALIGNMENT_NBYTES
        slice_nbytes = min(slice_nbytes, max(_MIN_SLICE_NBYTES, wanted))
    channel_nbytes = Fraction(nbytes * max(placement.weights), sum(placement.weights))
    nslices = max(1, ceil(channel_nbytes / slice_nbytes))
    steps = schedule.cost.steps + 2 * candidate.is_among_nodes
    if candidate.name in NOT_TREES:
        total_ns = wire_ns + steps * rates.alpha_ns
        total_ns += _pauses_ns(candidate, wire_ns, nbytes, nslices, rates)
    else:
        fill = Fraction(candidate.fill, nslices)
        mean_ns = min(wire_ns, mean * nbytes * 10**9 / rates.beta)
        nwires = 1 if fabric.nwires == 1 else len(fabric.homes)
        filling = _fill_of_trees(fill, schedule.nranks, schedule.nchannels, nwires)
        shown = 1 - _HIDDEN * (1 - Fraction(1, nslices))
        total_ns = wire_ns + mean_ns * filling + steps * shown * rates.alpha_ns
    return Choice(
        candidate.name,
        schedule,
        placement,
        slice_nbytes,
        load,
        int(total_ns) if has_way else 0,
        steps,
        candidate.is_among_nodes,
        candidate.flows,
        has_way,
    )


def _pauses_ns(
    candidate: Candidate, wire_ns: Fraction, nbytes: int, nslices: int, rates: Rates
) -> Fraction:
    """Return the time in which the busiest port waits, in ns, besides ``steps x alpha``.

    The result is negative if steps overlap, so that less than alpha per step is lost. `nslices` is
    the number of slices of a channel. The family of `candidate` must be one of `NOT_TREES`.
    """
    schedule = candidate.schedule
    if candidate.name == "dissemination":
        waits_ns = _waits_of_strides(schedule, wire_ns, nslices, rates.alpha_ns)
        return waits_ns - schedule.cost.steps * rates.alpha_ns
    if candidate.name in _EXCHANGES:
        # Each step moves a slice of the channel after the previous step, usually on another port.
        share = Fraction(max(schedule.weights), sum(schedule.weights))
        chain_ns = schedule.cost.steps * share * nbytes * 10**9 / rates.beta
        return max(Fraction(0), chain_ns - wire_ns) / nslices
    if candidate.name == "one_shot":
        # The receives of a rank wait for each other's memory. (Fitted to simulations of 2 to 32
        # nodes, 64 KiB to 256 MiB: predictions are within 35 %.)
        fill = Fraction(schedule.nranks - 1, nslices)
        return wire_ns * fill / (1 + fill / 4) + (schedule.nranks - 1) * rates.alpha_ns
    return wire_ns * Fraction(candidate.fill, nslices)


def _waits_of_strides(
    schedule: Schedule, wire_ns: Fraction, nslices: int, alpha_ns: int
) -> Fraction:
    """Return the time in which a port of a dissemination waits, in ns.

    The first slice of a step arrives alpha after it was sent. Then the next step can start; until
    then, the port is busy with the other slices, if the step has enough of them. The last step ends
    alpha after its last slice was sent.
    """
    nranks, is_allreduce = schedule.nranks, schedule.collective == "allreduce"
    if nranks == 1:
        return Fraction(0)
    # The last step of the allgather is incomplete unless nranks is a power of two. Every part that
    # it then sends has skipped an earlier step, so the longest chain has one message less.
    chain = [each.nparts for each in dissemination.steps_of(nranks)][: nranks.bit_length() - 1]
    part_ns = wire_ns / ((1 + is_allreduce) * (nranks - 1))
    first_ns = alpha_ns + part_ns / max(1, nslices // nranks)
    # The reduce-scatter has the steps of the allgather in reverse; its last one comes before the
    # first one of the allgather.
    strides = chain[1:] if schedule.collective == "reduce_scatter" else chain[:-1]
    strides += chain if is_allreduce else []
    waits_ns = sum((max(Fraction(0), first_ns - n * part_ns) for n in strides), Fraction(0))
    return waits_ns + alpha_ns


def _fill_of_trees(fill: Fraction, nranks: int, ntrees: int, nwires: int) -> Fraction:
    """Return the time to fill and drain trees, as a fraction of the time of the average port.

    `fill` is the height of a tree divided by the number of slices of its channel. Trees on one rail
    take turns at a port: some use the port while others wait. The fewer slices there are, the more
    the trees overlap. (Fitted to simulations of 1,220 trees on 400 random clusters of 3 to 64
    nodes, 1 to 16 MiB: 94 % of the predictions are within 10 %.)
    """
    root = Fraction(isqrt(10_000 * ntrees // nwires), 100)
    shown = Fraction(15, 7) * fill * (1 - Fraction(2, 3 * nranks))
    return shown / (root * (1 + fill * Fraction(5, 14)))


def _nslices(fill_ns: int, rates: Rates) -> int:
    """Return the number of slices per channel with the least pipeline time, within bounds.

    With n slices, filling takes about ``fill_ns / n``. Handling a slice takes a quarter of the
    latency of a step, or `_UNMEASURED_SLICE_NS` if the network was not measured.
    """
    if rates == UNMEASURED:
        return max(1, min(_MANY_SLICES, isqrt(fill_ns // _UNMEASURED_SLICE_NS)))
    return max(_FEW_SLICES, min(_MANY_SLICES, isqrt(4 * fill_ns // rates.alpha_ns)))


#: Families whose calls are bandwidth samples: every rank receives from at most one other rank.
_GAUGES = ("ring", "bridged_ring", "chain")
#: Families whose ports all wait while the pipeline fills, or that have no pipeline. All others,
#: leaf rings, nested rings, OptCC and R2CC-AllReduce included, are predicted as trees.
NOT_TREES = (
    "chain",
    "ring",
    "bridged_ring",
    "dissemination",
    "recursive_doubling",
    "one_shot",
    "direct",
    "prefix_chain",
    "prefix_doubling",
)
#: Families in which each step sends the whole data of a channel to another rank.
_EXCHANGES = ("recursive_doubling", "prefix_doubling")
#: Fraction of a tree's step latencies that passes while ports are busy, if channels have many
#: slices; with one slice, nothing overlaps. From the same fit as `_fill_of_trees`; for 363 trees
#: with up to 4 slices, 64 KiB to 16 MiB, 78 % of the predictions are within 10 %.
_HIDDEN = Fraction(2, 11)
#: Bounds of the number of slices per channel (the lower one only for a measured network), and
#: smallest size of a slice, in bytes.
_FEW_SLICES, _MANY_SLICES = 16, 128
_MIN_SLICE_NBYTES = 32 << 10
#: Time to handle a slice in ns, at the bandwidth of `UNMEASURED`; fitted to broadcasts over
#: loopback (16 MiB, 4 ranks on 2 cores: slices of 1 MiB take a quarter of the time of slices of 128
#: KiB).
_UNMEASURED_SLICE_NS = 300_000
#: In-flight byte budget of a port: what the port receives in `_INLET_S` seconds, at least
#: `_LEAST_INLET_NBYTES`.
_INLET_S = Fraction(1, 100)
_LEAST_INLET_NBYTES = 256 << 10

__all__ = [
    "NOT_TREES",
    "UNMEASURED",
    "Choice",
    "Fabric",
    "Placed",
    "Rates",
    "of_one_wire",
    "predict",
    "put",
]
