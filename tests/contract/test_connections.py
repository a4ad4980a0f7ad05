"""Data paths follow the plans: few at the start, others when a call needs them."""

from __future__ import annotations

import json
import time

import numpy as np
from support.jobs import launch

import r2ccl
from r2ccl.algos.neighbors import neighbors
from r2ccl.config import Config
from r2ccl.runtime import status

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
    for rank, found in enumerate(launch(rounds_of_calls, NRANKS, timeout_s=90.0)):
        first, (once, twice), is_right = found
        assert is_right
        assert first == len(neighbors(rank, NRANKS)) < NRANKS - 1
        assert once == twice, "the same calls connect nothing more"


def late_message() -> float:
    """Receive on rank 0 from a rank without paths to it, which sends later."""
    with r2ccl.init() as comm:
        stranger = next(peer for peer in range(1, NRANKS) if peer not in neighbors(0, NRANKS))
        x = np.zeros(1)
        comm.barrier()
        if comm.rank == 0:
            comm.recv(x, stranger)
        elif comm.rank == stranger:
            time.sleep(0.3)
            comm.send(x + 7, 0)
        comm.barrier()
        return float(x[0])


def test_a_receive_may_wait_for_a_rank_without_paths() -> None:
    assert launch(late_message, NRANKS, timeout_s=90.0) == [7.0] + [0.0] * (NRANKS - 1)


def calls_of_many_sizes() -> tuple[status.MemoryReport, dict[str, float]]:
    with r2ccl.init() as comm:
        for count in (*range(1, 2_000, 37), *range(2_000, 200_000, 5_003)):
            comm.allreduce(np.ones(count))
        return comm.health().memory, json.loads(comm.dump())["planning"]


def test_memory_does_not_grow_with_the_number_of_sizes() -> None:
    config = Config()
    bound = 2 * config.slice_nbytes * config.landing_depth
    for memory, planning in launch(calls_of_many_sizes, 3, timeout_s=90.0):
        assert 0 < memory.landing_nbytes <= bound * 2 * 3, "places per link, of two ring neighbors"
        assert memory.eager_nbytes <= config.eager_nbytes * config.eager_slots * 2 * 3
        assert (memory.ring_nbytes, memory.registered_nbytes) == (0, 0), "over TCP"
        assert planning["version"] == 0
        assert planning["nplans"] > 90
        assert 0 < planning["longest_s"] <= planning["total_s"]
