"""Data paths follow the plans: few at the start, others when a call needs them."""

from __future__ import annotations

import json

import numpy as np

import r2ccl
from r2ccl.algos.neighbors import neighbors

NRANKS = 8


def rounds_of_calls() -> tuple[int, list[int], bool]:
    """Return the peers at the start, calls that connected paths by round, and if sums are right."""
    connected = []
    with r2ccl.init() as comm:
        first = len(comm.health().rails[0].paths)
        is_right = True
        for _ in range(2):
            for count in (1, 5_000, 100_000):
                x = np.full(count, comm.rank + 1.0)
                comm.allreduce(x)
                is_right &= bool((x == sum(range(NRANKS + 1))).all())
                for root in range(NRANKS):
                    y = np.full(count, comm.rank)
                    comm.broadcast(y, root=root)
                    is_right &= bool((y == root).all())
            connected.append(json.loads(comm.dump())["nconnects"])
    return first, connected, is_right


def test_ranks_connect_to_neighbors_and_to_whom_plans_name() -> None:
    for rank, found in enumerate(r2ccl.launch(rounds_of_calls, NRANKS, timeout_s=90.0)):
        first, (once, twice), is_right = found
        assert is_right
        assert first == len(neighbors(rank, NRANKS)) < NRANKS - 1
        assert once == twice, "the same calls connect nothing more"
