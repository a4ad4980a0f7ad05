"""Planner: which schedule a call runs, on which rails and in what slices; alike on every rank.

Pure: it reads what all ranks share (the call, the configuration, the fabric, the agreed health) and
nothing a rank measured for itself.

While the data fits one eager slice, where latency decides, it is recursive doubling or a flat tree;
above it, where bandwidth does, the ring, and for collectives with a root a chain. ``R2CC_ALGO``
names another schedule of large allreduces. Those for unequal nodes are made for what each node has
left; of several forms of one the best is taken, by what its most loaded port takes for its share of
the data, and by the time until its pipeline is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.algos import leaf_ring, packed_trees, recursive_doubling, ring, tree
from r2ccl.config import Config
from r2ccl.resilience.health import Health
from r2ccl.schedule.ir import Schedule
from r2ccl.spread import Placement, inlets, place, place_edges, port_time
from r2ccl.types import CallSignature, Collective


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
    inlet_nbytes : int
        What a port to which several peers send is to be sent at once.
    """

    homes: Sequence[int]
    nwires: int
    inlet_nbytes: int = 256 << 10


class Choice(NamedTuple):
    """What a call runs, where its channels go, and the size of a slice."""

    schedule: Schedule
    placement: Placement
    slice_nbytes: int


def plan(
    call: CallSignature, nbytes: int, fabric: Fabric, health: Health, config: Config
) -> Choice:
    """Choose for a call whose whole buffer has `nbytes` bytes."""
    nranks = health.nranks
    nchannels = _nchannels(nbytes, nranks, fabric, config)
    is_small = nbytes <= config.eager_nbytes
    match call.collective:
        case Collective.ALLGATHER:
            schedule = ring.allgather(nranks, nchannels)
        case Collective.REDUCE_SCATTER:
            schedule = ring.reduce_scatter(nranks, nchannels)
        case Collective.BROADCAST:
            schedule = tree.broadcast(_rooted(nranks, call.root, nchannels, is_small))
        case Collective.REDUCE:
            schedule = tree.reduce(_rooted(nranks, call.root, nchannels, is_small))
        case Collective.ALLREDUCE if not is_small:
            return _allreduce(nbytes, nchannels, fabric, health, config)
        case _:
            schedule = recursive_doubling.allreduce(nranks)
    return _on_rings(schedule, fabric, health, config)


def full_channels(nrails: int) -> int:
    """Channels that keep every rail busy, also when one is lost.

    Each rail carries a multiple of ``nrails - 1`` channels, so that those of a lost rail spread
    evenly over the others.
    """
    return nrails * max(1, nrails - 1)


def _nchannels(nbytes: int, nranks: int, fabric: Fabric, config: Config) -> int:
    most = config.channels or full_channels(fabric.nwires)
    return min(most, max(1, nbytes // (nranks * _MIN_CHUNK_NBYTES)))


def _rooted(nranks: int, root: int, nchannels: int, is_small: bool) -> list[tree.Parents]:
    """Return the trees of a rooted collective: one that is flat, or chains that are pipelines."""
    if is_small:
        return [tree.turned(tree.double_binary(nranks)[0], root)]
    order = [(root + place) % nranks for place in range(nranks)]
    return [tree.chain(order)] * nchannels


def _on_rings(schedule: Schedule, fabric: Fabric, health: Health, config: Config) -> Choice:
    placement = place(schedule.nchannels, fabric.homes, health)
    return Choice(schedule, placement, config.slice_nbytes)


def _allreduce(
    nbytes: int, nchannels: int, fabric: Fabric, health: Health, config: Config
) -> Choice:
    if config.algo == "ring":
        return _on_rings(ring.allreduce(health.nranks, nchannels), fabric, health, config)
    placed = [
        _placed(schedule, fill, nbytes, fabric, health, config)
        for schedule, fill in _CANDIDATES[config.algo](fabric, health)
    ]
    return min(placed, key=lambda found: found[0])[1]


def _placed(
    schedule: Schedule,
    fill: int,
    nbytes: int,
    fabric: Fabric,
    health: Health,
    config: Config,
) -> tuple[Fraction, Choice]:
    """Place a candidate; return what is expected of it, for one unit of data, and the choice.

    `fill` is how many slices of a channel pass before all ports are busy, and after.
    """
    placement = place_edges(schedule, fabric.homes, health)
    channel_nbytes = nbytes // schedule.nchannels
    # Small enough for a pipeline, and large enough to be worth its handling.
    nlinks = inlets(placement, fabric.homes)
    wanted = min(channel_nbytes // _PIPELINED_SLICES, fabric.inlet_nbytes // max(1, nlinks))
    fine = max(_MIN_SLICE_NBYTES, wanted)
    slice_nbytes = min(config.slice_nbytes, fine)
    nslices = max(1, channel_nbytes // slice_nbytes)
    load = port_time(schedule, placement, fabric.homes, health)
    return load * (1 + Fraction(fill, nslices)), Choice(schedule, placement, slice_nbytes)


def _bandwidths(fabric: Fabric, health: Health) -> list[int]:
    """Return what each node carries; one without any home is reached by the last resort."""
    return [
        max(1, sum(health.share(rank, rail) for rail in fabric.homes))
        for rank in range(health.nranks)
    ]


def _packings(fabric: Fabric, health: Health) -> Iterator[tuple[Schedule, int]]:
    bandwidths = _bandwidths(fabric, health)
    for times in _TREES_PER_RAIL if health.nranks <= _MANY_NODES else _TREES_PER_RAIL[:1]:
        schedule = packed_trees.allreduce(bandwidths, times * len(fabric.homes))
        yield schedule, schedule.cost.steps // 2


def _leaf_rings(fabric: Fabric, health: Health) -> Iterator[tuple[Schedule, int]]:
    bandwidths = _bandwidths(fabric, health)
    for times in _RINGS_PER_RAIL:
        yield leaf_ring.allreduce(bandwidths, _SEGMENTS, times * len(fabric.homes)), 1


def _double_trees(fabric: Fabric, health: Health) -> Iterator[tuple[Schedule, int]]:
    trees = tree.double_binary(health.nranks) * max(1, len(fabric.homes) // 2)
    schedule = tree.allreduce(trees, "double_binary_tree")
    yield schedule, schedule.cost.steps // 2


#: Of each schedule that is placed edge by edge, its forms, and how long their pipeline is.
_CANDIDATES: dict[str, Callable[[Fabric, Health], Iterator[tuple[Schedule, int]]]] = {
    "tree": _double_trees,
    "packed_trees": _packings,
    "leaf_ring": _leaf_rings,
}

#: A channel is worth its overhead from this many bytes per chunk on: below it the ring's steps
#: cost more than the rails gain.
_MIN_CHUNK_NBYTES = 64 << 10
#: Trees for every rail, in the order they are tried; more of them come closer to the degrees
#: wanted, but their slices are fewer.
_TREES_PER_RAIL = (4, 3, 5, 6)
#: Channels of a leaf ring for every rail; with more, edges are shared out more evenly.
_RINGS_PER_RAIL = (2, 3)
#: Nodes from which on one number of trees is as good as another.
_MANY_NODES = 16
#: Segments of a leaf ring: relaying comes close to the shares wanted.
_SEGMENTS = 8
#: Slices of a channel that are enough for its pipeline, and the least a slice should have.
_PIPELINED_SLICES = 32
_MIN_SLICE_NBYTES = 32 << 10

__all__ = ["Choice", "Fabric", "full_channels", "plan"]
