"""Algorithms: pure functions from (ranks, channels) to a `Schedule`, one file each.

This package imports `schedule` and `errors`; it never sees a socket, a thread, the clock or a
random source. Invariant: equal arguments give equal schedules on every rank.
"""

from __future__ import annotations

from r2ccl.algos import (
    bridged_ring,
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
    tree,
)

__all__ = [
    "bridged_ring",
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
    "tree",
]
