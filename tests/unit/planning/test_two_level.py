"""How calls are divided between two levels: alike on all ranks, and by what the rails carry."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from msgspec.structs import replace
from support.healths import health

from r2ccl.config import Config
from r2ccl.failover.health.table import Health
from r2ccl.planning.cost_model import UNMEASURED, Fabric, Rates
from r2ccl.planning.placement import rail_weights
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.planning.two_level import (
    COLLECTIVES,
    Division,
    Piece,
    TwoLevelPlans,
    count_chunks,
    divide_rails,
    slowdown_of,
)
from r2ccl.types import PARTED, CallSignature, Collective, ReduceOp

FLOAT32 = 7
CALL = CallSignature(Collective.ALLREDUCE, FLOAT32, ReduceOp.SUM, 4 << 20)
RATES = Rates(100_000, 25_000_000)
NODES = (0, 0, 1, 1)
TEAMS = ((0, 1), (2, 3))


def make(rank: int = 0, nrails: int = 4, rates: Rates = RATES, **settings: Any) -> TwoLevelPlans:
    fabric = Fabric(range(nrails), nrails, NODES, rates)
    config = Config(**{"balance": "0", **settings})
    return TwoLevelPlans(rank, TEAMS, PlanCache(rank, 4, fabric, config), config)


def shares_of(division: Division | None) -> list[Fraction]:
    """Return the share of each rank of a node in the whole buffer."""
    assert division is not None
    parts = zip(*(piece.parts for chunk in division.chunks for piece in chunk), strict=True)
    sizes = [sum(end - first for first, end in part) for part in parts]
    return [Fraction(size, sum(sizes)).limit_denominator(1000) for size in sizes]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000, 123_457, 4 << 20])
def test_chunks_and_parts_cover_a_buffer(count: int) -> None:
    plans = make(eager_nbytes=0)
    division = plans.division(CallSignature(Collective.ALLREDUCE, FLOAT32, 0, count), health())
    assert division is not None
    at = 0
    for (piece,) in division.chunks:
        assert piece.first == at
        at = piece.end
        assert_divided(piece)
    assert at == count


def assert_divided(piece: Piece) -> None:
    """Check that the parts of two ranks cover a piece."""
    assert piece.parts[0][0] == 0
    assert piece.parts[0][1] == piece.parts[1][0]
    assert piece.parts[1][1] == piece.end - piece.first


@pytest.mark.parametrize("sizes", [(1000,) * 4, (0, 7, 1, 0), (0, 0, 123_457, 1)])
@pytest.mark.parametrize("collective", sorted(PARTED))
def test_pieces_cover_the_parts_of_each_node(
    collective: Collective, sizes: tuple[int, ...]
) -> None:
    call = CallSignature(collective, FLOAT32, 0, sum(sizes))
    division = make(eager_nbytes=0).division(call, health(), sizes)
    assert division is not None
    at = [0, sizes[0] + sizes[1]]
    for chunk in division.chunks:
        for node, piece in enumerate(chunk):
            assert piece.first == at[node]
            at[node] = piece.end
            assert_divided(piece)
    assert at == [sizes[0] + sizes[1], sum(sizes)]


@pytest.mark.parametrize("lost", [{}, {"r1n2": 0}, {"r1n2": 0, "r1n3": 0}, {"r3n0": 4}])
def test_all_ranks_divide_alike(lost: dict[str, int]) -> None:
    found = [make(rank).division(CALL, health(**lost)) for rank in range(4)]
    assert found[0] is not None
    assert all(each == found[0] for each in found)


def test_a_lost_nic_costs_all_groups_the_same() -> None:
    lost = make().division(CALL, health(r1n2=0, r1n3=0))
    assert shares_of(lost) == [Fraction(1, 2)] * 2


def test_a_slow_nic_leaves_work_to_the_other_groups() -> None:
    slow = make().division(CALL, health(r1n2=8))
    assert shares_of(slow) == [Fraction(24, 56).limit_denominator(1000), Fraction(4, 7)]


@pytest.mark.parametrize("mode", ["failstop", "migrate", "balance"])
def test_modes_that_do_not_plan_divide_alike_whatever_fails(mode: str) -> None:
    plans, whole = make(mode=mode), make().division(CALL, health())
    assert whole is not None
    no_common = health(r0n0=0, r1n0=0, r2n2=0, r3n2=0)
    for each in (health(), health(r1n2=8), health(r1n2=0, r1n3=0), no_common):
        found = plans.division(CALL, each)
        assert found is not None
        assert found._replace(predicted_ns=0) == whole._replace(predicted_ns=0)


def of_nodes(nnodes: int, nlocal: int) -> TwoLevelPlans:
    """Return the plans of nodes of 4 rails."""
    nodes = [node for node in range(nnodes) for _ in range(nlocal)]
    teams = [range(first, first + nlocal) for first in range(0, len(nodes), nlocal)]
    config = Config(balance="0")
    plans = PlanCache(0, len(nodes), Fabric(range(4), 4, nodes, RATES), config)
    return TwoLevelPlans(0, teams, plans, config)


@pytest.mark.parametrize("nlocal", [2, 8])
@pytest.mark.parametrize(("nnodes", "is_at_home"), [(2, True), (3, False), (4, False)])
def test_groups_share_ports_where_that_spares_a_node(
    nnodes: int, nlocal: int, is_at_home: bool
) -> None:
    """A schedule can spare a node that lost a NIC only if there are more than two nodes."""
    plans, nranks = of_nodes(nnodes, nlocal), nnodes * nlocal
    whole, lost = health(nranks=nranks), health(nranks=nranks, r1n0=0)
    for each, expected in ((whole, True), (lost, is_at_home)):
        division = plans.division(CALL, each)
        assert division is not None
        assert division.is_at_home == expected
        assert shares_of(division) == [Fraction(1, nlocal)] * nlocal


def test_nodes_without_a_common_rail_share_ports() -> None:
    plans = of_nodes(3, 2)
    apart = health(nranks=6, r0n0=0, r1n0=0, r2n2=0, r3n2=0)
    division = plans.division(CALL, apart)
    assert division is not None
    assert not division.is_at_home


def test_without_a_common_rail_calls_run_in_one_level() -> None:
    apart = Health(1, 4, bytes([0, 0, 16, 16] * 2 + [16, 16, 0, 0] * 2), "")
    assert of_nodes(2, 2).division(CALL, apart) is None


@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_calls_sample_the_bandwidth_in_one_level(collective: Collective) -> None:
    plans, call = make(balance="1"), replace(CALL, collective=collective)
    division = plans.division(call, health())
    assert division is not None
    found = [plans.is_bandwidth_sample(call, health(), op, division) for op in range(8)]
    assert found == [True] * 3 + [False] * 5


@pytest.mark.parametrize("nbytes", [65 << 10, 1 << 20, 64 << 20])
@pytest.mark.parametrize("rates", [RATES, UNMEASURED])
@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_a_whole_network_has_two_levels(collective: Collective, nbytes: int, rates: Rates) -> None:
    call = CallSignature(collective, FLOAT32, 0, nbytes // 4)
    assert make(rates=rates).division(call, health()) is not None


@pytest.mark.parametrize(("nlocal", "has_levels"), [(2, False), (4, True)])
@pytest.mark.parametrize("mode", ["auto", "balance"])
def test_little_data_has_two_levels_for_fewer_steps(
    mode: str, nlocal: int, has_levels: bool
) -> None:
    nodes = [node for node in range(2) for _ in range(nlocal)]
    teams = [range(first, first + nlocal) for first in (0, nlocal)]
    config, nranks = Config(balance="0", mode=mode), 2 * nlocal
    plans = PlanCache(0, nranks, Fabric(range(4), 4, nodes, RATES), config)
    found = TwoLevelPlans(0, teams, plans, config)
    call = CallSignature(Collective.ALLREDUCE, FLOAT32, 0, 1000)
    for each in (health(nranks=nranks), health(nranks=nranks, r0n0=0)):
        assert (found.division(call, each) is not None) == has_levels


@pytest.mark.parametrize("collective", [Collective.SCAN, Collective.ALLTOALL, Collective.GATHER])
def test_other_collectives_run_in_one_level(collective: Collective) -> None:
    assert make().division(replace(CALL, collective=collective), health()) is None


@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_parts_need_ranks_numbered_node_by_node(collective: Collective) -> None:
    """Otherwise the parts of the ranks of a node are not neighbours in the buffer."""
    nodes, teams, config = (0, 1, 0, 1), ((0, 2), (1, 3)), Config(balance="0")
    plans = TwoLevelPlans(
        0, teams, PlanCache(0, 4, Fabric(range(4), 4, nodes, RATES), config), config
    )
    division = plans.division(replace(CALL, collective=collective), health())
    assert (division is None) == (collective in PARTED)


@pytest.mark.parametrize(("rank", "root", "peer"), [(0, 3, 2), (1, 2, 3), (3, 0, 1), (2, 1, 0)])
def test_the_root_of_a_group_is_on_the_node_of_the_root(rank: int, root: int, peer: int) -> None:
    call = replace(CALL, collective=Collective.BROADCAST, root=root)
    plan = make(rank).plan(call, 1000, health(), is_at_home=True)
    assert plan.signature == call.pack()
    for lane in plan.layout.lanes:
        assert [way.peer for way in lane.recvs] == [peer]
        assert not lane.sends


def test_shares_follow_the_bandwidth_in_every_block() -> None:
    slow = make().division(replace(CALL, collective=Collective.ALLGATHER), health(r1n2=8))
    assert shares_of(slow) == [Fraction(24, 56).limit_denominator(1000), Fraction(4, 7)]


def test_more_nodes_have_fewer_chunks() -> None:
    assert [count_chunks(64 << 20, npieces) for npieces in (1, 2, 4, 64)] == [5, 5, 3, 1]


def test_losing_a_rail_of_a_shared_wire_changes_nothing() -> None:
    fabric = Fabric(range(2), 1, NODES, is_loopback=True)
    config = Config()
    plans = TwoLevelPlans(0, TEAMS, PlanCache(0, 4, fabric, config), config)
    lost = plans.division(CALL, health(nrails=2, r1n0=0))
    assert shares_of(lost) == [Fraction(1, 2)] * 2


@pytest.mark.parametrize("is_at_home", [True, False])
def test_the_plan_of_a_part_has_the_signature_of_the_call(is_at_home: bool) -> None:
    plan = make(1).plan(CALL, 1000, health(), is_at_home=is_at_home)
    assert plan.signature == CALL.pack()
    assert plan.layout.count == 1000
    assert plan.layout.peers == {3}


@pytest.mark.parametrize(
    ("nrails", "nlocal", "divided"),
    [
        (4, 2, [(0, 1), (2, 3)]),
        (4, 3, [(0,), (1,), (2, 3)]),
        (2, 2, [(0,), (1,)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (1, 3, [(0,), (0,), (0,)]),
    ],
)
def test_rails_are_divided_in_order(
    nrails: int, nlocal: int, divided: list[tuple[int, ...]]
) -> None:
    assert divide_rails(Fabric(range(nrails), nrails), nlocal) == divided


def test_rails_of_one_wire_belong_to_all() -> None:
    assert divide_rails(Fabric(range(2), 1, is_loopback=True), 3) == [(0, 1)] * 3


@pytest.mark.parametrize(
    ("nrails", "fourths"), [(4, [1, 1, 2]), (2, [1, 1, 2]), (1, [Fraction(4, 3)] * 3)]
)
def test_parts_follow_the_rails_of_their_groups(nrails: int, fourths: list[int]) -> None:
    nodes, teams = (0, 0, 0, 1, 1, 1), ((0, 1, 2), (3, 4, 5))
    fabric, config = Fabric(range(nrails), nrails, nodes, RATES), Config(balance="0")
    plans = TwoLevelPlans(0, teams, PlanCache(0, 6, fabric, config), config)
    found = plans.division(CALL, health(nranks=6, nrails=nrails))
    assert shares_of(found) == [Fraction(each) / 4 for each in fourths]


@pytest.mark.parametrize(
    ("rows", "slowdown"),
    [
        ([[16] * 4] * 2, 1),
        ([[0, 16, 16, 16], [16] * 4], Fraction(4, 3)),
        ([[0, 16, 16, 16], [16, 0, 16, 16]], 2),
        ([[0, 16, 16, 16], [0, 16, 16, 16]], Fraction(4, 3)),
        ([[8, 16, 16, 16], [16] * 4], Fraction(8, 7)),
        ([[16] * 4, [0, 16, 16, 16], [16] * 4], Fraction(4, 3)),
        ([[0, 16], [16, 0]], None),
    ],
)
def test_the_busiest_port_is_found(rows: list[list[int]], slowdown: Fraction | None) -> None:
    assert slowdown_of(rows, rail_weights(rows)) == slowdown


def test_large_calls_have_more_chunks() -> None:
    counts = [count_chunks(nbytes) for nbytes in (0, 4, 1 << 20, 16 << 20, 64 << 20, 1 << 40)]
    assert counts == sorted(counts)
    assert counts[:3] == [1, 1, 1]
    assert counts[3] > 1
    assert counts[-1] == 32
