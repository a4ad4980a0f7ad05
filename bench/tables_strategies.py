"""What the training and the serving table compare: allreduces of a cluster that has lost NICs.

Each strategy is a set of schedules of `r2ccl.algos` and a way of using what NICs are left; its time
is that of the best of them, simulated. Two kinds of cluster: small ones, whose GPUs all are ranks,
and whose published strategies run flat rings over them, as NCCL does; and large ones, whose nodes
are the ranks: each GPU of a node holds a part of the tensors and reduces it with its fellows.
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

#: Bytes/s each way of a NIC of 400 Gbit/s, and of a GPU into NVLink (900 GB/s both ways together).
NIC_RATE, INSIDE_RATE = 50e9, 450e9

#: Seconds from the end of a slice to its landing, between nodes and inside one.
ALPHA_S, INSIDE_ALPHA_S = 5e-6, 2e-6

#: Chunks of the published tail, K.
TAIL_CHUNKS = 16

#: Up to here the published strategies run a double binary tree over nodes instead of their rings.
TREE_NBYTES = 1 << 20

_LEAST_SLICE_NBYTES = 128 << 10

#: Rails that each node has lost.
Lost = tuple[tuple[int, ...], ...]


class Strategy(StrEnum):
    """What is done about lost NICs; see `NOTES`."""

    HOT_REPAIR = "HotRepair"
    BALANCE = "Balance"
    R2CC = "R2CC-AllReduce"
    AMONG_NODES = "ring among nodes"
    PACKED = "packed trees"
    LEAF = "leaf ring"
    AUTO = "auto"


#: Those that the library has of its own; on a small cluster they run among nodes.
OURS = (Strategy.AMONG_NODES, Strategy.PACKED, Strategy.LEAF)

#: What must be known of them to read a table.
NOTES = (
    "HotRepair: the channels of a lost NIC move to the next one of their node that is alive, whose "
    "port then carries twice as much, or more if several neighbours are lost",
    "Balance: they spread over all NICs of the node that are left",
    f"R2CC-AllReduce: the share lost, X, beside the ring over fewer, and a tail of K = "
    f"{TAIL_CHUNKS} chunks; with several nodes short of NICs the recursion over faster and faster "
    "nodes (nested rings); or Balance, where that is faster",
    "auto: the fastest, as simulated, of ring, packed trees and leaf ring, among nodes: what a "
    "planner takes whose predictions are right",
    f"NICs of {NIC_RATE / 1e9:g} GB/s each way, {NICS} a node; NVLink {INSIDE_RATE / 1e9:g} GB/s "
    f"each way and GPU; latency {1e6 * ALPHA_S:g} us between nodes, {1e6 * INSIDE_ALPHA_S:g} us "
    "inside; reducing takes no time; the network beyond the NICs is never the limit",
    "model: closed forms of bandwidth alone; of R2CC-AllReduce with one node spared, and its "
    "recursion can be faster than that",
)


class Cluster(NamedTuple):
    """Nodes of `NICS` NICs, and how many ranks each has in the schedules."""

    nnodes: int
    nranks_per_node: int = 1

    @property
    def is_flat(self) -> bool:
        """Whether GPUs are ranks."""
        return self.nranks_per_node > 1

    @property
    def nranks(self) -> int:
        """Ranks of the published strategies' rings."""
        return self.nnodes * self.nranks_per_node

    @property
    def node_rate(self) -> float:
        """Bytes/s each way of a whole node."""
        return NICS * NIC_RATE

    def alive(self, lost: Lost) -> tuple[int, ...]:
        """Return the NICs that each node has left; `lost` may leave out nodes at the end."""
        return tuple(NICS - len(rails) for rails in self._padded(lost))

    def network(self, lost: Lost) -> Network:
        """Return the network that is left."""
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
        """Return the rail that a channel at home on each rail uses, (nnodes, NICS): the next."""
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
    """A schedule, the most slices a chunk is cut in, and rails if ports are not a node's."""

    program: Program
    slices: int
    rails: Rails | None = None


@functools.cache
def allreduce_s(cluster: Cluster, strategy: Strategy, lost: Lost, nbytes: int) -> float:
    """Simulate the strategy's allreduce of `nbytes` bytes on every rank; seconds.

    Every strategy sees what is lost, and takes the best of the schedules it has for that.
    """
    if strategy == Strategy.AUTO:
        return min(allreduce_s(cluster, each, lost, nbytes) for each in OURS)
    network = cluster.network(lost)
    runs = _compiled(cluster, strategy, lost, nbytes <= TREE_NBYTES)
    return min(_simulated_s(run, network, nbytes) for run in runs)


def smaller_s(cluster: Cluster, nbytes: int) -> float:
    """Simulate AdapCC's answer: a flat ring without the last GPU and its NIC; seconds."""
    nranks = cluster.nranks - 1
    orders = [[rank for rank in order if rank < nranks] for order in _orders(cluster)]
    whole = cluster.network(((),) * (cluster.nnodes - 1) + ((0,),))
    network = msgspec.structs.replace(whole, nodes=whole.nodes[:-1])
    return _simulated_s(_run(ring.allreduce(nranks, NICS, orders), 16), network, nbytes)


def smaller_model_s(cluster: Cluster, nbytes: int) -> float:
    """Return what the closed form says of that ring."""
    nranks = cluster.nranks - 1
    return 2 * (nranks - 1) / nranks * nbytes / ((NICS - 1) * NIC_RATE)


def canonical(strategy: Strategy, lost: Lost) -> Lost:
    """Name the first of all patterns that are one for this strategy.

    Nodes can be numbered by what they have lost. Only HotRepair sees which of a node's NICs are
    lost, up to a turn of the rails; for all others their number is enough.
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
    """Make the strategy's schedules, for little data or much, once for several sizes."""
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
    """Return k; the ops of a schedule grow with its square times the nodes."""
    return 16 if cluster.nnodes <= 64 else 8


def _fabric_wide(cluster: Cluster, is_small: bool) -> Schedule:
    """Return NCCL's: a ring over all ranks for each NIC; of little data, trees over nodes."""
    if not cluster.is_flat:
        return ring.allreduce(cluster.nnodes, NICS)
    if is_small:
        trees = tree.double_binary(cluster.nnodes) * (NICS // 2)
        return _wrapped(cluster, tree.allreduce(trees, "double_binary_tree"))
    return ring.allreduce(cluster.nranks, NICS, _orders(cluster))


def _orders(cluster: Cluster) -> list[list[int]]:
    """Return the ranks of each ring: node by node, and out of each node by another GPU."""
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
    """Leave each channel on its own NIC, or on the next one of its node that is alive."""
    table, nodes = cluster.backups(lost), np.array(cluster.network(lost).nodes)

    def rails(src: Ints, dst: Ints, channel: Ints) -> tuple[Ints, Ints]:
        return table[nodes[src], channel % NICS], table[nodes[dst], channel % NICS]

    return rails


def _published(cluster: Cluster, alive: tuple[int, ...]) -> Iterator[_Run]:
    """Return R2CC-AllReduce for one straggler, and its recursion for several nodes."""
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
    """Build R2CC-AllReduce over GPUs: the partial ring leaves out those of the slowest node.

    The published share, Y = X. All GPUs of the slowest node take turns in leading its tail, so that
    none of their links is its limit, and rings share ports with tails as (1 - X) to X.
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
    """Return what the closed forms say of bandwidth alone: no latency, no beginning, no end."""
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
    """Return the bound among nodes, a ring's own time, or that inside nodes if longer."""
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
