"""Ranks that exchange data in schedules of a whole network are few, and neighbors of each other."""

from __future__ import annotations

from math import log2

import pytest

from r2ccl.algos import dissemination, recursive_doubling, ring
from r2ccl.algos.neighbors import neighbors
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Schedule


def peers(schedule: Schedule, rank: int) -> set[int]:
    channels = schedule.program(rank).channels
    return {op.peer for ops in channels for op in ops if op.peer >= 0} - {rank}


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 33])
def test_schedules_of_a_whole_network_use_no_other_edges(nranks: int) -> None:
    schedules = [ring.allreduce(nranks), recursive_doubling.allreduce(nranks)]
    schedules += [dissemination.allgather(nranks), dissemination.reduce_scatter(nranks)]
    for rank in range(nranks):
        near = neighbors(rank, nranks)
        for schedule in schedules:
            assert peers(schedule, rank) <= near, schedule.name


@pytest.mark.parametrize(("nranks", "per_node"), [(2, 1), (9, 1), (24, 4), (64, 8), (128, 1)])
def test_it_is_symmetric(nranks: int, per_node: int) -> None:
    nodes = [rank // per_node for rank in range(nranks)] if per_node > 1 else []
    near = [neighbors(rank, nranks, nodes) for rank in range(nranks)]
    for rank in range(nranks):
        assert rank not in near[rank]
        assert all(rank in near[peer] for peer in near[rank])


@pytest.mark.parametrize("nranks", [8, 64, 1000, 16_384])
def test_there_are_about_two_log_n(nranks: int) -> None:
    assert len(neighbors(3, nranks)) <= 3 * log2(nranks)


def test_nodes_with_several_ranks_meet_at_their_distances() -> None:
    nodes = [rank // 3 for rank in range(12)]
    assert {1, 3, 6, 9} <= neighbors(0, 12, nodes)
    assert neighbors(0, 12, [0, 1, 0, 1, *nodes[4:]]) == neighbors(0, 12)


def test_there_must_be_such_a_rank() -> None:
    with pytest.raises(InvalidArgument, match="rank=3; allowed is 0 to 2"):
        neighbors(3, 3)
