"""Collective algorithms: pure functions that build a `Schedule`, one module per algorithm.

Equal arguments give equal schedules on every rank. `port_packing` returns trees, not a schedule.
`bandwidths`, `blend` and `roles` are helpers of the other modules. `neighbors` returns the ranks
with which a rank exchanges data in many of the algorithms.
"""

from __future__ import annotations

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
    port_packing,
    r2cc_allreduce,
    recursive_doubling,
    ring,
    scan,
    spanning_tree,
    tree,
    tree_gather,
)

__all__ = [
    "bridged_ring",
    "direct_exchange",
    "dissemination",
    "hierarchy",
    "leaf_ring",
    "nested_rings",
    "one_shot",
    "optcc",
    "packed_trees",
    "port_packing",
    "r2cc_allreduce",
    "recursive_doubling",
    "ring",
    "scan",
    "spanning_tree",
    "tree",
    "tree_gather",
]
