"""Where some nodes have no rail in common, no schedule makes them neighbours."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import strategies as st
from support.slow import given

from r2ccl.algos import packed_trees
from r2ccl.config import Config
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.cost_model import Fabric, Rates
from r2ccl.planning.planner import Planner
from r2ccl.schedule.check import check
from r2ccl.schedule.ir import Schedule
from r2ccl.types import PAIRWISE, PREFIXES, CallSignature, Collective, ReduceOp

MIB = 1 << 20
RATES = Rates(100_000, 25_000_000)
NRAILS = 3

Rows = list[tuple[int, ...]]
#: Collectives in which no third rank can forward (no rank knows the parts of others), or in which
#: the order of ranks is fixed: pairs without a common rail use a bypass.
FIXED = PAIRWISE | PREFIXES | {Collective.ALLTOALL}


def meet(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return any(map(min, one, other))


def is_joined(rows: Rows) -> bool:
    joined = {0}
    for _ in rows:
        joined |= {v for v, row in enumerate(rows) if any(meet(row, rows[u]) for u in joined)}
    return len(joined) == len(rows)


def without_a_way(schedule: Schedule, rows: Rows, nodes: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of ranks that talk although their nodes have no rail in common."""
    return [
        (rank, op.peer)
        for rank in range(schedule.nranks)
        for ops in schedule.program(rank).channels
        for op in ops
        if op.peer >= 0
        and nodes[op.peer] != nodes[rank]
        and not meet(rows[nodes[rank]], rows[nodes[op.peer]])
    ]


@given(
    3,
    60,
    st.lists(
        st.tuples(*[st.sampled_from([0, 0, 5, WHOLE])] * NRAILS).filter(any), min_size=2, max_size=7
    ).filter(is_joined),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(["auto", "2", "3"]),
    st.sampled_from(["auto", "ring", "dissemination", "leaf_ring"]),
)
def test_every_collective_is_bridged_whatever_is_lost(
    rows: Rows, per_node: int, is_dealt: bool, mode: str, algo: str
) -> None:
    nodes = [node for node in range(len(rows)) for _ in range(per_node)]
    if is_dealt:
        nodes = [*range(len(rows))] * per_node
    health = Health(1, NRAILS, bytes(share for node in nodes for share in rows[node]))
    fabric = Fabric(range(NRAILS), NRAILS, nodes if per_node > 1 else (), RATES)
    planner = Planner(fabric, Config(mode=mode, algo=algo))
    checked = set()
    for collective, nbytes in product(Collective, (100, 64 * MIB)):
        call = CallSignature(collective, 0, ReduceOp.SUM, 0, len(nodes) - 1)
        for is_sample in (False, True):
            choice = planner.plan(call, nbytes, health, is_bandwidth_sample=is_sample)
            schedule = choice.schedule
            key = (schedule.digest(), schedule.root)
            if key in checked:
                continue
            checked.add(key)
            check(schedule)
            if collective not in FIXED:
                assert not without_a_way(schedule, rows, nodes)


def test_traffic_without_a_way_is_not_free() -> None:
    """Found on 4 nodes of 3 rails: a leaf ring that needed nodes 0 and 2 looked fastest."""
    rows: Rows = [(0, 16, 16), (16, 16, 16), (16, 0, 0), (16, 16, 16)]
    health = Health(1, NRAILS, bytes(share for row in rows for share in row))
    planner = Planner(Fabric(range(NRAILS), NRAILS, (), RATES), Config())
    for each in planner.compare(64 * MIB, health):
        assert not without_a_way(each.schedule, rows, [0, 1, 2, 3]), each.name
        assert each.load >= packed_trees.lower_bound([32, 48, 16, 48]) * WHOLE


@pytest.mark.parametrize("collective", Collective)
def test_parts_that_nothing_joins_are_left_to_the_last_resort(collective: Collective) -> None:
    rows: Rows = [(16, 0), (16, 0), (0, 16), (0, 16)]
    health = Health(1, 2, bytes(share for row in rows for share in row))
    planner = Planner(Fabric(range(2), 2, (), RATES), Config())
    call = CallSignature(collective, 0, ReduceOp.SUM, 0)
    check(planner.plan(call, 64 * MIB, health).schedule)
