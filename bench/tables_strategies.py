"""Allreduces of a cluster with lost NICs, for the training and serving tables.

Each strategy is a set of schedules of `r2ccl.algos` and a way of using the NICs that are left. Its
time is that of the best of its schedules, simulated. There are two kinds of cluster. In small ones
every GPU is a rank, and the published strategies run flat rings over them, as NCCL does. In large
ones the nodes are the ranks: each GPU of a node holds a part of the tensors and reduces it with the
GPUs of other nodes that hold the same part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

import msgspec
import numpy as np
from degraded_cases import part_of
from tables_rows import TOLERANCE

from r2ccl.algos import (
    hierarchy,
    leaf_ring,
    nested_rings,
    packed_trees,
    r2cc_allreduce,
    recursive_doubling,
    ring,
    tree,
)
from r2ccl.algos.blend import blend
from r2ccl.flowsim import Network, Program, Rails, compile_schedule, simulate
from r2ccl.schedule import Schedule
from r2ccl.schedule.cost import measure
from r2ccl.schedule.graph import Ints

NICS = 8

#: Bytes/s per direction of a NIC of 400 Gbit/s, and of a GPU's NVLink (900 GB/s bidirectional).
NIC_RATE, INSIDE_RATE = 50e9, 450e9

#: Seconds from the end of a slice's transmission to its arrival, between nodes and inside one.
ALPHA_S, INSIDE_ALPHA_S = 5e-6, 2e-6

#: Chunks of the published tail, K.
TAIL_CHUNKS = 16

#: Bytes up to which the published strategies run a double binary tree over nodes, not rings.
TREE_NBYTES = 1 << 20

_LEAST_SLICE_NBYTES = 128 << 10

#: Lost rails of each node.
Lost = tuple[tuple[int, ...], ...]


class Strategy(StrEnum):
    """Reaction to lost NICs; see `NOTES`."""

    HOT_REPAIR = "HotRepair"
    BALANCE = "Balance"
    R2CC = "R2CC-AllReduce"
    AMONG_NODES = "ring among nodes"
    PACKED = "packed trees"
    LEAF = "leaf ring"
    AUTO = "auto"


#: Strategies of this library; on a small cluster they run among nodes.
OURS = (Strategy.AMONG_NODES, Strategy.PACKED, Strategy.LEAF)

#: Notes on the strategies, printed below the tables.
NOTES = (
    "HotRepair: the channels of a lost NIC move to the next working NIC of their node, whose "
    "port then carries twice as much, or more if several neighbours are lost",
    "Balance: the channels of a lost NIC spread over all working NICs of the node",
    f"R2CC-AllReduce: a ring of all ranks and, for the lost share X, a partial ring with a tail "
    f"of K = {TAIL_CHUNKS} chunks; with losses on several nodes the recursion over ever faster "
    "nodes (nested rings); or Balance, where that is faster",
    "auto: the fastest in simulation of ring, packed trees and leaf ring, among nodes: the "
    "choice of a planner whose predictions are right",
    f"NICs of {NIC_RATE / 1e9:g} GB/s per direction, {NICS} per node; NVLink "
    f"{INSIDE_RATE / 1e9:g} GB/s per direction and GPU; latency {1e6 * ALPHA_S:g} us between "
    f"nodes, {1e6 * INSIDE_ALPHA_S:g} us inside; reducing takes no time; the "
    "network beyond the NICs is never the limit",
    "model: closed forms of bandwidth alone; for R2CC-AllReduce the form for one straggler; its "
    "recursion can be faster than that",
)


class Cluster(NamedTuple):
    """Nodes of `NICS` NICs, and the ranks per node of the schedules."""

    nnodes: int
    nranks_per_node: int = 1

    @property
    def is_flat(self) -> bool:
        """True if every GPU is a rank, False if every node is one."""
        return self.nranks_per_node > 1

    @property
    def nranks(self) -> int:
        """Ranks in the rings of the published strategies."""
        return self.nnodes * self.nranks_per_node

    @property
    def node_rate(self) -> float:
        """Bandwidth of a whole node, in bytes/s per direction."""
        return NICS * NIC_RATE

    def alive(self, lost: Lost) -> tuple[int, ...]:
        """Return the number of working NICs of each node; `lost` may omit nodes at the end."""
        return tuple(NICS - len(rails) for rails in self._padded(lost))

    def network(self, lost: Lost) -> Network:
        """Return the network without the lost NICs."""
        network = Network.uniform(
            self.nnodes,
            NICS,
            NIC_RATE,
            ranks_per_node=self.nranks_per_node,
            alpha_s=ALPHA_S,
            inside_bandwidth=INSIDE_RATE,
            inside_alpha_s=INSIDE_ALPHA_S,
        )
        for node, dead in enumerate(lost):
            network = network.without(node, *dead)
        return network

    def backups(self, lost: Lost) -> Ints:
        """Return the next working rail from each home rail of each node, shape (nnodes, NICS)."""
        return np.array(
            [
                [next(r % NICS for r in range(rail, rail + NICS) if r % NICS not in dead)
                 for rail in range(NICS)]
                for dead in self._padded(lost)
            ]
        )  # fmt: skip

    def _padded(self, lost: Lost) -> Lost:
        return lost + ((),) * (self.nnodes - len(lost))


#: Two nodes of 8 GPUs, each a rank.
PAIR = Cluster(2, 8)


class _Run(NamedTuple):
    """Schedule, most slices per chunk, and rails (None: ports are shared by the whole node)."""

    program: Program
    slices: int
    rails: Rails | None = None


@functools.cache
def allreduce_s(cluster: Cluster, strategy: Strategy, lost: Lost, nbytes: int) -> float:
    """Return the simulated time in seconds of the strategy's allreduce of `nbytes` per rank.

    The strategy knows the lost NICs, and takes the best of its schedules for them.
    """
    if strategy == Strategy.AUTO:
        return min(allreduce_s(cluster, each, lost, nbytes) for each in OURS)
    network = cluster.network(lost)
    runs = _compiled(cluster, strategy, lost, nbytes <= TREE_NBYTES)
    return min(_simulated_s(run, network, nbytes) for run in runs)


def smaller_s(cluster: Cluster, nbytes: int) -> float:
    """Return AdapCC's simulated time in seconds: a flat ring without the last GPU and its NIC."""
    nranks = cluster.nranks - 1
    orders = [[rank for rank in order if rank < nranks] for order in _orders(cluster)]
    whole = cluster.network(((),) * (cluster.nnodes - 1) + ((0,),))
    network = msgspec.structs.replace(whole, nodes=whole.nodes[:-1])
    return _simulated_s(_run(ring.allreduce(nranks, NICS, orders), 16), network, nbytes)


def smaller_model_s(cluster: Cluster, nbytes: int) -> float:
    """Return the time in seconds of AdapCC's ring by the closed form."""
    nranks = cluster.nranks - 1
    return 2 * (nranks - 1) / nranks * nbytes / ((NICS - 1) * NIC_RATE)


def canonical(strategy: Strategy, lost: Lost) -> Lost:
    """Return the representative of all patterns equivalent to `lost` under this strategy.

    Nodes can be renumbered by their losses. Only HotRepair depends on which of a node's NICs are
    lost, up to a rotation of the rails; for all other strategies the number of lost NICs is enough.
    """
    if strategy == Strategy.HOT_REPAIR:
        turned = [
            min(tuple(sorted((rail + turn) % NICS for rail in dead)) for turn in range(NICS))
            for dead in lost
        ]
    else:
        turned = [tuple(range(len(dead))) for dead in lost]
    return tuple(sorted(filter(None, turned), key=lambda dead: (-len(dead), dead)))


def _simulated_s(run: _Run, network: Network, nbytes: int) -> float:
    weights, nchunks = run.program.weights, run.program.nchunks
    shares = [Fraction(w, sum(weights) * n) for w, n in zip(weights, nchunks, strict=True)]
    fine = int(max(shares) * nbytes) // _LEAST_SLICE_NBYTES
    return simulate(
        run.program,
        nbytes,
        network,
        nslices=max(1, min(run.slices, fine)),
        rails=run.rails,
        node_ports=run.rails is None,
        tolerance=TOLERANCE,
    ).time_s


@functools.lru_cache(maxsize=8)
def _compiled(cluster: Cluster, strategy: Strategy, lost: Lost, is_small: bool) -> tuple[_Run, ...]:
    """Return the strategy's schedules for small or large data, cached for several sizes."""
    return tuple(_runs(cluster, strategy, lost, is_small))


def _run(schedule: Schedule, slices: int, rails: Rails | None = None) -> _Run:
    return _Run(compile_schedule(schedule), slices, rails)


def _runs(cluster: Cluster, strategy: Strategy, lost: Lost, is_small: bool) -> Iterator[_Run]:
    alive = cluster.alive(lost)
    match strategy:
        case Strategy.HOT_REPAIR:
            yield _run(_fabric_wide(cluster, is_small), 16, _migrated(cluster, lost))
        case Strategy.BALANCE:
            yield _run(_fabric_wide(cluster, is_small), 16)
        case Strategy.R2CC:
            yield _run(_fabric_wide(cluster, is_small), 16)
            yield from () if is_small else _published(cluster, alive)
        case Strategy.AMONG_NODES:
            yield _run(_wrapped(cluster, ring.allreduce(cluster.nnodes, NICS)), 64)
            if cluster.is_flat:
                yield _run(recursive_doubling.allreduce(cluster.nranks), 1)
        case Strategy.PACKED:
            schedule = packed_trees.allreduce(alive, NICS if cluster.is_flat else 28)
            yield _run(_wrapped(cluster, schedule), 64)
        case Strategy.LEAF:
            nchannels = NICS if cluster.is_flat else 1
            schedule = leaf_ring.allreduce(alive, _segments(cluster), nchannels)
            yield _run(_wrapped(cluster, schedule), 4)


def _segments(cluster: Cluster) -> int:
    """Return the number of segments k; a schedule has about k**2 ops per node."""
    return 16 if cluster.nnodes <= 64 else 8


def _fabric_wide(cluster: Cluster, is_small: bool) -> Schedule:
    """Return NCCL's schedule: a ring over all ranks per NIC, or trees over nodes for small data."""
    if not cluster.is_flat:
        return ring.allreduce(cluster.nnodes, NICS)
    if is_small:
        trees = tree.double_binary(cluster.nnodes) * (NICS // 2)
        return _wrapped(cluster, tree.allreduce(trees, "double_binary_tree"))
    return ring.allreduce(cluster.nranks, NICS, _orders(cluster))


def _orders(cluster: Cluster) -> list[list[int]]:
    """Return the ranks of each ring, node by node; each ring leaves a node from another GPU."""
    size = cluster.nranks_per_node
    return [
        [node * size + (turn + at) % size for node in range(cluster.nnodes) for at in range(size)]
        for turn in range(NICS)
    ]


def _wrapped(cluster: Cluster, inner: Schedule) -> Schedule:
    if not cluster.is_flat:
        return inner
    size = cluster.nranks_per_node
    members = [range(node * size, (node + 1) * size) for node in range(cluster.nnodes)]
    return hierarchy.wrap(inner, members)


def _migrated(cluster: Cluster, lost: Lost) -> Rails:
    """Return rails that keep each channel on its own NIC, or the next working NIC of its node."""
    table, nodes = cluster.backups(lost), np.array(cluster.network(lost).nodes)

    def rails(src: Ints, dst: Ints, channel: Ints) -> tuple[Ints, Ints]:
        return table[nodes[src], channel % NICS], table[nodes[dst], channel % NICS]

    return rails


def _published(cluster: Cluster, alive: tuple[int, ...]) -> Iterator[_Run]:
    """Yield R2CC-AllReduce for one straggler, and its recursion for several nodes."""
    least = min(alive)
    if cluster.is_flat:
        if alive.count(least) == 1:
            yield _run(_flat_r2cc(cluster, alive), 16)
        return
    if alive.count(least) == 1:
        left = Fraction(least, min(each for each in alive if each > least))
        channels = (left.numerator, (1 - left).numerator)
        yield _run(r2cc_allreduce.allreduce(alive, TAIL_CHUNKS, nchannels=channels), 2)
    if least < NICS:
        yield _run(nested_rings.allreduce(alive, 4), 4)


def _flat_r2cc(cluster: Cluster, alive: tuple[int, ...]) -> Schedule:
    """Build R2CC-AllReduce over GPUs: the partial ring leaves out the GPUs of the slowest node.

    The published share, Y = X. All GPUs of the slowest node take turns as leader of its tail, so
    that no single GPU's NVLink limits it. Rings and tails share ports in the ratio (1 - X) to X.
    """
    size, slowest = cluster.nranks_per_node, alive.index(min(alive))
    lost = 1 - Fraction(alive[slowest], max(alive))
    left = range(slowest * size, (slowest + 1) * size)
    teams = sorted([*([r] for r in range(cluster.nranks) if r not in left), list(left)])
    bandwidths = [alive[slowest] if len(team) > 1 else max(alive) for team in teams]
    inner = r2cc_allreduce.allreduce(bandwidths, TAIL_CHUNKS, Fraction(1), (1, size))
    tails = hierarchy.wrap(inner, teams)
    whole = ring.allreduce(cluster.nranks, NICS, _orders(cluster))
    parts = [part_of(whole, at) for at in range(NICS)] + [part_of(tails, at) for at in range(size)]
    shares = [(1 - lost) / NICS] * NICS + [lost / size] * size
    counts = [(1 - lost).numerator] * NICS + [lost.numerator] * size
    schedule = blend("r2cc_published", parts, shares, counts)
    return msgspec.structs.replace(schedule, cost=measure(schedule))


def model_s(cluster: Cluster, strategy: Strategy, lost: Lost, nbytes: int) -> float:
    """Return the time in seconds by the closed forms, without latency or pipeline fill."""
    alive = cluster.alive(lost)
    unit = nbytes / cluster.node_rate
    if strategy in (*OURS, Strategy.AUTO):
        return _among_nodes_s(cluster, strategy, alive, nbytes)
    whole = float(Fraction(2 * (cluster.nranks - 1), cluster.nranks)) * unit
    if strategy == Strategy.HOT_REPAIR:
        busiest = max(np.bincount(row).max() for row in cluster.backups(lost))
        return whole * int(busiest)
    balanced = whole * NICS / min(alive)
    if strategy == Strategy.R2CC and alive.count(min(alive)) == 1:
        left = Fraction(min(alive), sorted(alive)[1])
        share = (
            1 - left
            if cluster.is_flat
            else r2cc_allreduce.split(cluster.nranks, 1 - left, TAIL_CHUNKS)
        )
        factor = r2cc_allreduce.time_of(cluster.nranks, 1 - left, TAIL_CHUNKS, share)
        return min(balanced, float(factor) * unit * NICS / sorted(alive)[1])
    return balanced


def _among_nodes_s(
    cluster: Cluster, strategy: Strategy, alive: tuple[int, ...], nbytes: int
) -> float:
    """Return the time among nodes (the bound, or the ring's), or that inside nodes if longer."""
    bound = float(packed_trees.lower_bound(alive))
    if strategy == Strategy.AMONG_NODES:
        bound = 2 * (cluster.nnodes - 1) / cluster.nnodes / min(alive)
    size = cluster.nranks_per_node
    inside = 2 * (size - 1) / size / INSIDE_RATE
    return nbytes * max(bound / NIC_RATE, inside)


__all__ = [
    "NICS",
    "NOTES",
    "OURS",
    "PAIR",
    "TREE_NBYTES",
    "Cluster",
    "Lost",
    "Strategy",
    "allreduce_s",
    "canonical",
    "model_s",
    "smaller_model_s",
    "smaller_s",
]
