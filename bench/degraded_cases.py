"""Define the schedules of the degraded bench by name, for its ranks and for the tables.

Equal names mean equal schedules in every process. CloudLab is 3 nodes of 2 ranks and 3 NICs each;
the last node loses one NIC. Straggler is 4 nodes of 4 NICs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from r2ccl.algos import hierarchy, leaf_ring, packed_trees, r2cc_allreduce, ring
from r2ccl.algos.blend import BlendPart, blend
from r2ccl.config import Config
from r2ccl.failover.health.table import Health, RailShare
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.planner import Planner, best
from r2ccl.schedule import Schedule
from r2ccl.schedule.cost import measure

#: A NIC, as (node, rail).
Nic = tuple[int, int]

#: CloudLab's shape: ranks of each node, NICs per node, NICs left on each node, share and NIC lost.
MEMBERS = ((0, 1), (2, 3), (4, 5))
NICS = 3
LEFT = (NICS, NICS, NICS - 1)
LOST = Fraction(1, NICS)
LOST_NIC: Nic = (2, 2)

#: Published T/T0 at 4 GiB, by number of chunks K, and of Balance.
PUBLISHED = {1: "1.599", 2: "1.458", 4: "1.376", 8: "1.341", 16: "1.329"}
PUBLISHED_BALANCE = "1.498"

BALANCE = "ring, Balance"
PACKED = "packed trees"

#: NICs that the straggler's network loses, by name of the case.
STRAGGLER: dict[str, tuple[Nic, ...]] = {
    "nothing": (),
    "1/4 of one node": ((2, 1),),
    "1/4 of one, 1/2 of another": ((0, 3), (2, 0), (2, 2)),
}
STRAGGLER_NODES = STRAGGLER_NICS = 4

_NRANKS = 6
#: Channels of a ring, by NICs per node: divisible by this number and by one less, so that every
#: rail carries equally many channels before and after a loss.
_RING_CHANNELS = {3: 6, 4: 12}
#: Size of the buffer in bytes for which the number of trees is optimal.
_NBYTES = 64 << 20


class Case(NamedTuple):
    """Schedule, and what is known about it.

    Attributes
    ----------
    name : str
    schedule : Schedule
    model : Fraction or None
        T/T0 of its closed form; for packed trees and leaf rings, the bound they approach.
    k, trees : int or None
        Number of segments or chunks; number of trees.
    paper : str
        Published T/T0; empty if none was published.
    """

    name: str
    schedule: Schedule
    model: Fraction | None
    k: int | None = None
    trees: int | None = None
    paper: str = ""

    @property
    def key(self) -> str:
        """Name and K: unique within a list of cases."""
        return self.name if self.k is None else f"{self.name}, K={self.k}"


def cloudlab(chunks: Sequence[int] = tuple(PUBLISHED)) -> Iterator[Case]:
    """Yield the cases of CloudLab's shape: R2CC-AllReduce for each K in `chunks`, and ours."""
    flat = ring.allreduce(_NRANKS, _RING_CHANNELS[NICS])
    yield Case(BALANCE, flat, 1 / (1 - LOST), paper=PUBLISHED_BALANCE)
    for k in chunks:
        name = "R2CC-AllReduce, published"
        yield Case(name, published(k), model_of(k), k=k, paper=PUBLISHED[k])
    k = 16
    # Nearly the shares that `split` gives, but in fewer channels, so that slices stay large.
    shared = hierarchy.wrap(r2cc_allreduce.allreduce(LEFT, k, None, (6, 4)), MEMBERS)
    share = r2cc_allreduce.split(len(LEFT), LOST, k)
    model = r2cc_allreduce.time_of(len(LEFT), LOST, k, share) / _FLAT_RING
    yield Case("R2CC-AllReduce among nodes", shared, model, k=k)
    k = 8
    leaves = hierarchy.wrap(leaf_ring.allreduce(LEFT, k, 8), MEMBERS)
    yield Case("leaf ring among nodes", leaves, cloudlab_bound(), k=k)
    ntrees = 12
    trees = hierarchy.wrap(packed_trees.allreduce(LEFT, ntrees), MEMBERS)
    yield Case("packed trees among nodes", trees, cloudlab_bound(), trees=ntrees)


def straggler(lost: Sequence[Nic]) -> Iterator[Case]:
    """Yield the cases for 4 nodes of 4 NICs without the NICs in `lost`."""
    bound = straggler_bound(lost)
    nodes, nics = STRAGGLER_NODES, STRAGGLER_NICS
    flat = ring.allreduce(nodes, _RING_CHANNELS[nics])
    yield Case(BALANCE, flat, Fraction(nics, min(nics_left(lost))))
    packed = _packed(lost)
    yield Case(PACKED, packed, bound, trees=packed.nchannels)


def _packed(lost: Sequence[Nic]) -> Schedule:
    """Return the packed trees the planner would choose without the NICs in `lost`."""
    health = Health.whole(STRAGGLER_NODES, STRAGGLER_NICS)
    health = health.changed(RailShare(node, rail, 0) for node, rail in lost)
    fabric = Fabric(range(STRAGGLER_NICS), STRAGGLER_NICS)
    return best(Planner(fabric, Config()).compare(_NBYTES, health, ["packed_trees"])).schedule


def nics_left(lost: Sequence[Nic]) -> list[int]:
    """Return the number of NICs of each of the straggler's nodes without those in `lost`."""
    gone = [node for node, _ in lost]
    return [STRAGGLER_NICS - gone.count(node) for node in range(STRAGGLER_NODES)]


def straggler_bound(lost: Sequence[Nic]) -> Fraction:
    """Return the bound T*/T0 for 4 nodes of 4 NICs without those in `lost`."""
    whole = packed_trees.lower_bound([STRAGGLER_NICS] * STRAGGLER_NODES)
    return packed_trees.lower_bound(nics_left(lost)) / whole


def cloudlab_bound() -> Fraction:
    """Return the bound T*/T0: T* is bounded by what leaves the nodes, T0 is the flat ring's."""
    return packed_trees.lower_bound(LEFT) * NICS / _FLAT_RING


def model_of(nchunks: int) -> Fraction:
    """Return the published T/T0: the flat ring's T1 plus the tail's T3, for P = 6 and Y = X."""
    of_tail = LOST / (1 - LOST) * (1 + Fraction(1, nchunks))
    return 1 + _NRANKS * of_tail / (2 * (_NRANKS - 1))


def published(nchunks: int) -> Schedule:
    """Build R2CC-AllReduce as published, but include the straggler's data in the sum.

    Parameters
    ----------
    nchunks : int
        Number of chunks K.
    """
    inner = r2cc_allreduce.allreduce((NICS, NICS, NICS, NICS, NICS - 1), nchunks, Fraction(1))
    partial = hierarchy.wrap(inner, [(0,), (1,), (2,), (3,), MEMBERS[2]])
    tail = [part_of(partial, channel) for channel in range(partial.nchannels)]
    parts = [leaf_ring.part(_NRANKS, range(_NRANKS)), *tail]
    schedule = blend("r2cc_published", parts, [1 - LOST, LOST], PUBLISHED_CHANNELS)
    return msgspec.structs.replace(schedule, cost=measure(schedule))


def part_of(schedule: Schedule, channel: int) -> BlendPart:
    """Return one channel of `schedule` as part of a blend, whose cost must be measured anew."""
    return BlendPart(
        nchunks=schedule.nchunks[channel],
        steps=schedule.cost.steps,
        # The counts of the busiest rank: a schedule's cost has no counts per rank.
        sent=(schedule.cost.sent,) * schedule.nranks,
        received=(schedule.cost.received,) * schedule.nranks,
        nops=schedule.cost.ops,
        ops_of=lambda rank: schedule.program(rank).channels[channel],
    )


#: T0 of the flat ring of all ranks, in units of D/B, where B is the bandwidth of a whole node.
_FLAT_RING = Fraction(2 * (_NRANKS - 1), _NRANKS)
#: Channels of the ring of all ranks, which has 1 - X of every port, and of the partial ring, which
#: has X: each puts equally many channels on both rails that the straggler has left.
PUBLISHED_CHANNELS = (2 * (1 - LOST).numerator, 2 * LOST.numerator)

__all__ = [
    "BALANCE",
    "LEFT",
    "LOST",
    "LOST_NIC",
    "MEMBERS",
    "NICS",
    "PACKED",
    "PUBLISHED",
    "PUBLISHED_BALANCE",
    "PUBLISHED_CHANNELS",
    "STRAGGLER",
    "STRAGGLER_NICS",
    "STRAGGLER_NODES",
    "Case",
    "Nic",
    "cloudlab",
    "cloudlab_bound",
    "model_of",
    "nics_left",
    "part_of",
    "published",
    "straggler",
    "straggler_bound",
]
