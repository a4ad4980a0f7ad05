"""What the degraded bench runs, by name: the same schedules in its ranks and in the tables.

Imports schedules and the planner, neither the simulator nor the network. Invariant: equal names,
equal schedules, in every process.

CloudLab is 3 nodes of 2 ranks and 3 NICs each, of which the last node loses one; straggler is 4
nodes of 4 NICs.
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

#: A NIC, by node and rail.
Nic = tuple[int, int]

#: CloudLab's nodes, which NICs each has when one is lost, and that one.
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

#: What the straggler's network loses.
STRAGGLER: dict[str, tuple[Nic, ...]] = {
    "nothing": (),
    "1/4 of one node": ((2, 1),),
    "1/4 of one, 1/2 of another": ((0, 3), (2, 0), (2, 2)),
}
STRAGGLER_NODES = STRAGGLER_NICS = 4

_NRANKS = 6
#: Channels of a ring that are equally many on every rail, with all of them and with one less.
_RING_CHANNELS = {3: 6, 4: 12}
#: Of the buffer for which the number of trees is the best.
_NBYTES = 64 << 20


class Case(NamedTuple):
    """A schedule with what is known of it.

    Attributes
    ----------
    name : str
    schedule : Schedule
    model : Fraction or None
        T/T0 of its closed form; of packed trees and leaf rings, the bound they tend to.
    k, trees : int or None
        Segments or chunks; trees.
    paper : str
        T/T0 as published; empty: it was not.
    """

    name: str
    schedule: Schedule
    model: Fraction | None
    k: int | None = None
    trees: int | None = None
    paper: str = ""

    @property
    def key(self) -> str:
        """Name and K: different for all cases of a list."""
        return self.name if self.k is None else f"{self.name}, K={self.k}"


def cloudlab(chunks: Sequence[int] = tuple(PUBLISHED)) -> Iterator[Case]:
    """Make what runs on CloudLab's shape: as published, for each K in `chunks`, and ours."""
    flat = ring.allreduce(_NRANKS, _RING_CHANNELS[NICS])
    yield Case(BALANCE, flat, 1 / (1 - LOST), paper=PUBLISHED_BALANCE)
    for k in chunks:
        name = "R2CC-AllReduce, published"
        yield Case(name, published(k), model_of(k), k=k, paper=PUBLISHED[k])
    k = 16
    # Nearly as `split` shares the data, and not so many that slices get small.
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
    """Make what runs on 4 nodes of 4 NICs that lose some."""
    bound = straggler_bound(lost)
    nodes, nics = STRAGGLER_NODES, STRAGGLER_NICS
    flat = ring.allreduce(nodes, _RING_CHANNELS[nics])
    yield Case(BALANCE, flat, Fraction(nics, min(nics_left(lost))))
    packed = _packed(lost)
    yield Case(PACKED, packed, bound, trees=packed.nchannels)


def _packed(lost: Sequence[Nic]) -> Schedule:
    """Make the packed trees that the planner would, of as many trees as are best there."""
    health = Health.whole(STRAGGLER_NODES, STRAGGLER_NICS)
    health = health.changed(RailShare(node, rail, 0) for node, rail in lost)
    fabric = Fabric(range(STRAGGLER_NICS), STRAGGLER_NICS)
    return best(Planner(fabric, Config()).compare(_NBYTES, health, ["packed_trees"])).schedule


def nics_left(lost: Sequence[Nic]) -> list[int]:
    """Return how many NICs each of the straggler's nodes has without those `lost`."""
    gone = [node for node, _ in lost]
    return [STRAGGLER_NICS - gone.count(node) for node in range(STRAGGLER_NODES)]


def straggler_bound(lost: Sequence[Nic]) -> Fraction:
    """Return T*/T0 of 4 nodes of 4 NICs that lose some."""
    whole = packed_trees.lower_bound([STRAGGLER_NICS] * STRAGGLER_NODES)
    return packed_trees.lower_bound(nics_left(lost)) / whole


def cloudlab_bound() -> Fraction:
    """Return T*/T0: the bound is on what leaves nodes, T0 the flat ring's."""
    return packed_trees.lower_bound(LEFT) * NICS / _FLAT_RING


def model_of(nchunks: int) -> Fraction:
    """Return the published T/T0: the flat ring's T1 and the tail's T3, P = 6, Y = X."""
    of_tail = LOST / (1 - LOST) * (1 + Fraction(1, nchunks))
    return 1 + _NRANKS * of_tail / (2 * (_NRANKS - 1))


def published(nchunks: int) -> Schedule:
    """Build R2CC-AllReduce as published, but with the straggler's data in the sum.

    Parameters
    ----------
    nchunks : int
        K.
    """
    inner = r2cc_allreduce.allreduce((NICS, NICS, NICS, NICS, NICS - 1), nchunks, Fraction(1))
    partial = hierarchy.wrap(inner, [(0,), (1,), (2,), (3,), MEMBERS[2]])
    tail = [part_of(partial, channel) for channel in range(partial.nchannels)]
    parts = [leaf_ring.part(_NRANKS, range(_NRANKS)), *tail]
    schedule = blend("r2cc_published", parts, [1 - LOST, LOST], PUBLISHED_CHANNELS)
    return msgspec.structs.replace(schedule, cost=measure(schedule))


def part_of(schedule: Schedule, channel: int) -> BlendPart:
    """Make one channel of a schedule part of a blend, which has to be measured anew."""
    return BlendPart(
        nchunks=schedule.nchunks[channel],
        steps=schedule.cost.steps,
        # Of the busiest rank: a schedule does not say what each does.
        sent=(schedule.cost.sent,) * schedule.nranks,
        received=(schedule.cost.received,) * schedule.nranks,
        nops=schedule.cost.ops,
        ops_of=lambda rank: schedule.program(rank).channels[channel],
    )


#: T0 of the flat ring of all ranks, in units of D/B with B of a whole node.
_FLAT_RING = Fraction(2 * (_NRANKS - 1), _NRANKS)
#: The ring of all has 1 - X of every port, the partial ring X; and both as many channels on either
#: of the rails that the straggler has left.
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
