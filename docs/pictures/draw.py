"""Draw the schedules shown in docs/algorithms.md, for four ranks; `make pictures` runs this.

`PICTURES` lists the schedules; `r2ccl.schedule.draw` draws each from its ops.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from r2ccl.algos import (
    bridged_ring,
    direct_exchange,
    dissemination,
    hierarchy,
    leaf_ring,
    nested_rings,
    one_shot,
    optcc,
    packed_trees,
    r2cc_allreduce,
    recursive_doubling,
    ring,
    scan,
    tree,
    tree_gather,
)
from r2ccl.algos.blend import blend
from r2ccl.schedule.draw import svg
from r2ccl.schedule.ir import Schedule

FOLDER = Path(__file__).parent
N = 4

#: Pictures in this folder that are drawn by other programs.
OTHERS = frozenset({"nic_loss", "packages"})

#: Bandwidth of each rank, in any unit: rank 3 has lost a quarter, or half, of its bandwidth.
QUARTER_LOST, HALF_LOST = (4, 4, 4, 3), (2, 2, 2, 1)


class Picture(NamedTuple):
    """A schedule, and a caption that states its conditions."""

    schedule: Schedule
    caption: str = ""


def of_quarter(schedule: Schedule) -> Picture:
    """Return a picture whose caption says that rank 3 has lost a quarter of its bandwidth."""
    return Picture(schedule, "Rank 3 has 3/4 of the bandwidth of each other rank")


def of_half(schedule: Schedule) -> Picture:
    """Return a picture whose caption says that rank 3 has lost half of its bandwidth."""
    return Picture(schedule, "Rank 3 has 1/2 of the bandwidth of each other rank")


def without_channel_0(schedule: Schedule) -> Schedule:
    """Return a direct exchange without the channel of parts that are not divided."""
    return replace(
        schedule,
        nchunks=schedule.nchunks[1:],
        weights=schedule.weights[1:],
        generate=lambda rank: schedule.generate(rank)[1:],
    )


#: Pictures by file name, without the suffix.
PICTURES = {
    "ring": Picture(ring.allreduce(N)),
    "recursive_doubling": Picture(recursive_doubling.allreduce(N)),
    "dissemination": Picture(dissemination.allreduce(N)),
    "one_shot": Picture(one_shot.allreduce(N)),
    "double_binary_tree": Picture(tree.allreduce(tree.double_binary(N), "double_binary_tree")),
    "packed_trees": of_quarter(packed_trees.allreduce(QUARTER_LOST, 5)),
    "leaf_ring": of_half(leaf_ring.allreduce(HALF_LOST, 1)),
    "leaf_ring_relay": Picture(
        blend("leaf_ring", [leaf_ring.part(N, (0, 1, 2), [(3,)])], [Fraction(1)], [1]),
        "One segment, in which rank 3 relays",
    ),
    "r2cc": of_quarter(r2cc_allreduce.allreduce(QUARTER_LOST, 1, Fraction(1, 4))),
    "optcc": of_half(optcc.allreduce(HALF_LOST, 2)),
    "nested_rings": of_quarter(nested_rings.allreduce(QUARTER_LOST, 1)),
    "bridged_ring": Picture(
        bridged_ring.allreduce(N, 1, lambda a, b: {a, b} != {0, 1}),
        "Ranks 0 and 1 have no common rail",
    ),
    "hierarchy": Picture(
        hierarchy.wrap(ring.allreduce(2, 2), ((0, 1), (2, 3))),
        "Ranks 0 and 1 are one node, ranks 2 and 3 the other",
    ),
    "allgather": Picture(ring.allgather(N)),
    "reduce_scatter": Picture(ring.reduce_scatter(N)),
    "broadcast": Picture(tree.broadcast(tree.double_binary(N)[:1])),
    "reduce": Picture(tree.reduce(tree.double_binary(N)[:1])),
    "alltoall": Picture(
        without_channel_0(direct_exchange.alltoall(N)),
        "Chunk k of rank r goes to rank r + k, modulo 4",
    ),
    "gather": Picture(tree_gather.gather(tree_gather.binomial(N))),
    "scan": Picture(scan.doubling(N)),
}


def drawn(name: str) -> str:
    """Return the SVG text of the picture `name`."""
    return svg(*PICTURES[name])


def main() -> None:
    """Write all SVG files, and remove the files of pictures that no longer exist."""
    for path in FOLDER.glob("*.svg"):
        if path.stem not in OTHERS.union(PICTURES):
            path.unlink()
    for name in PICTURES:
        (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()
