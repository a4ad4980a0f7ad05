"""Planner: which schedule a call runs, on which rails and in what slices; alike on every rank.

Pure: it reads what all ranks share (the call, the configuration, the fabric, the agreed health) and
nothing a rank measured for itself.

While the data fits one eager slice, where latency decides, it is recursive doubling or a flat tree;
above it, where bandwidth does, the ring, and for collectives with a root a chain. ``R2CC_ALGO``
names another schedule of large allreduces, or asks for a choice: over rails of which some are slow
or down, packed trees (`r2ccl.algos.packed_trees`) if these are expected to end sooner, for a ring
is as slow as its slowest node. Without being asked the schedule stays, and with it every bit.

What is expected of a schedule is what its most loaded port takes for its share of the data, and for
trees the time until the first slice is everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.algos import packed_trees, recursive_doubling, ring, tree
from r2ccl.config import Config
from r2ccl.resilience.health import WHOLE, Health
from r2ccl.schedule.ir import Schedule
from r2ccl.spread import Placement, place, place_trees
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
    is_flat : bool
        Whether every rank has a host, and so NICs, of its own.
    """

    homes: Sequence[int]
    nwires: int
    is_flat: bool = True


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
    nranks = health.nranks
    rings = _on_rings(ring.allreduce(nranks, nchannels), fabric, health, config)
    if config.algo == "ring":
        return rings
    if config.algo == "tree":
        trees = tree.double_binary(nranks) * max(1, nchannels // 2)
        schedule = tree.allreduce(trees, "double_binary_tree")
        return Choice(
            schedule, place_trees(trees, fabric.homes, health), _slice(nbytes, trees, config)
        )
    if config.algo == "auto" and not _may_pack(nbytes, fabric, health):
        return rings
    packed, packed_time = _packed(nbytes, fabric, health, config)
    if config.algo == "auto" and packed_time >= _ring_time(rings, fabric, health):
        return rings
    return packed


def _may_pack(nbytes: int, fabric: Fabric, health: Health) -> bool:
    """Whether packed trees are worth a thought."""
    if not fabric.is_flat or health.nranks < _MIN_NODES:
        return False
    if nbytes // (_TREES_PER_RAIL[0] * len(fabric.homes)) < _MIN_CHUNK_NBYTES:
        return False
    ranks = range(health.nranks)
    return any(health.share(rank, rail) < WHOLE for rank in ranks for rail in fabric.homes)


def _packed(nbytes: int, fabric: Fabric, health: Health, config: Config) -> tuple[Choice, Fraction]:
    """Return the best packing, and its time for one unit of data on rails of `WHOLE` a unit."""
    bandwidths = [
        # A node without any home is reached by the last resort.
        max(1, sum(health.share(rank, rail) for rail in fabric.homes))
        for rank in range(health.nranks)
    ]
    found = []
    for times in _TREES_PER_RAIL if health.nranks <= _MANY_NODES else _TREES_PER_RAIL[:1]:
        trees = packed_trees.pack(bandwidths, times * len(fabric.homes))
        placement = place_trees(trees, fabric.homes, health)
        slice_nbytes = _slice(nbytes, trees, config)
        nslices = max(1, nbytes // len(trees) // slice_nbytes)
        height = max(max(tree.grow(each).heights) for each in trees)
        time = _load(placement, fabric, health) * (1 + Fraction(height, nslices))
        found.append((time, len(trees), trees, placement, slice_nbytes))
    time, _, trees, placement, slice_nbytes = min(found, key=lambda each: each[:2])
    schedule = tree.allreduce(trees, "packed_trees")
    return Choice(schedule, placement, slice_nbytes), time


def _slice(nbytes: int, trees: Sequence[tree.Parents], config: Config) -> int:
    """Return a slice's size: small enough for a pipeline, large enough to be worth its handling."""
    fine = max(_MIN_SLICE_NBYTES, nbytes // len(trees) // _PIPELINED_SLICES)
    return min(config.slice_nbytes, fine)


def _load(placement: Placement, fabric: Fabric, health: Health) -> Fraction:
    """Return what the busiest port takes for its edges, of trees that share one unit of data."""
    nedges: dict[tuple[int, int], int] = {}
    for edge in placement.edges:
        rail = fabric.homes[edge.number % len(fabric.homes)]
        for rank in (edge.low, edge.high):
            nedges[rank, rail] = nedges.get((rank, rail), 0) + 1
    ntrees = len(placement.channels)
    return max(
        Fraction(number, ntrees * max(1, health.share(*port))) for port, number in nedges.items()
    )


def _ring_time(rings: Choice, fabric: Fabric, health: Health) -> Fraction:
    """Return what the busiest port takes, as for `_load`; detours are shared out at their node."""
    homes, nranks = fabric.homes, health.nranks
    weight = dict.fromkeys(homes, 0)
    for number, share in zip(rings.placement.channels, rings.placement.weights, strict=True):
        weight[homes[number % len(homes)]] += share
    total = sum(weight.values())
    times = []
    for rank in range(nranks):
        alive = [rail for rail in homes if health.share(rank, rail)]
        detour = sum(weight[rail] for rail in homes if rail not in alive)
        capacity = sum(health.share(rank, rail) for rail in alive)
        times += [
            Fraction(weight[rail], health.share(rank, rail)) + Fraction(detour, capacity)
            for rail in alive
        ] or [Fraction(total)]
    return rings.schedule.cost.sent * max(times) / total


#: A channel is worth its overhead from this many bytes per chunk on: below it the ring's steps
#: cost more than the rails gain.
_MIN_CHUNK_NBYTES = 64 << 10
#: Two nodes have one tree, and it is the ring.
_MIN_NODES = 3
#: Trees for every rail, in the order they are tried; more of them come closer to the degrees
#: wanted, but their slices are fewer.
_TREES_PER_RAIL = (4, 3, 5, 6)
#: Nodes from which on one number of trees is as good as another.
_MANY_NODES = 16
#: Slices of one tree that are enough for its pipeline, and the least a slice should have.
_PIPELINED_SLICES = 32
_MIN_SLICE_NBYTES = 128 << 10

__all__ = ["Choice", "Fabric", "full_channels", "plan"]
