"""What a rank does in allreduces among some ranks: planned by their own rails, alike at all."""

from __future__ import annotations

from collections import Counter

import pytest
from support.healths import health

from r2ccl.config import Config
from r2ccl.failover.health.table import Health
from r2ccl.planning.cost_model import Fabric, Rates
from r2ccl.planning.plan_cache import GroupPlanCache
from r2ccl.types import CallSignature, Collective, ReduceOp

CALL = CallSignature(Collective.ALLREDUCE, 8, ReduceOp.SUM, 1 << 24)
RATES = Rates(100_000, 25_000_000)
MEMBERS = (1, 3, 5, 7)


def make(rank: int = 3, homes: tuple[int, ...] = (), **settings: str) -> GroupPlanCache:
    fabric = Fabric(range(4), 4, (0, 0, 1, 1, 2, 2, 3, 3), RATES)
    config = Config(**settings)  # type: ignore[arg-type]
    return GroupPlanCache(rank, MEMBERS, 8, fabric, config, homes=homes)


def channels_of(plans: GroupPlanCache, **lost: int) -> set[int]:
    layout = plans(CALL, health(nranks=8, **lost)).layout
    return {way.channel for lane in layout.lanes for way in (*lane.sends, *lane.recvs)}


def test_a_group_runs_what_is_best_and_measures_nothing() -> None:
    """Its slices do not show what rails carry, so it has no turns in which it is a ring."""
    lost = health(nranks=8, r0n3=0)
    found, named = (make(**each)(CALL, lost) for each in ({}, {"algo": "ring"}))
    assert not found.is_bandwidth_sample
    assert found.layout.lanes != named.layout.lanes


def test_a_group_at_home_uses_its_own_rails_whatever_is_lost() -> None:
    plans = make(homes=(1, 2))
    assert {channel % 4 for channel in channels_of(plans)} == {1, 2}
    assert channels_of(plans, r1n3=0) == channels_of(plans)
    assert plans(CALL, health(nranks=8, r1n3=0)).layout == plans(CALL, health(nranks=8)).layout


def test_a_group_at_home_gives_a_slow_rail_less() -> None:
    plans = make(homes=(1, 2))

    def sent_on(each: Health) -> Counter[int]:
        sent: Counter[int] = Counter()
        for lane in plans(CALL, each).layout.lanes:
            for way in lane.sends:
                cuts = [lane.steps[at].cuts for at in way.steps]
                sent[way.channel % 4] += sum(each[-1] - each[0] for each in cuts)
        return sent

    whole, slow = sent_on(health(nranks=8)), sent_on(health(nranks=8, r1n3=4))
    assert whole[1] == whole[2]
    assert slow[1] < 0.6 * slow[2]


@pytest.mark.parametrize("nhomes", [1, 2, 4])
def test_each_rail_has_channels_that_can_spread_over_all_others(nhomes: int) -> None:
    layout = make(homes=tuple(range(nhomes)), algo="ring")(CALL, health(nranks=8)).layout
    assert len(layout.lanes) == 3 * nhomes


@pytest.mark.parametrize("homes", [(), (0,), (1, 3)])
def test_members_send_what_others_receive(homes: tuple[int, ...]) -> None:
    lost = health(nranks=8, r1n5=0)
    sent, received = set(), set()
    for rank in MEMBERS:
        layout = make(rank, homes)(CALL, lost).layout
        assert layout.rank == rank
        for lane in layout.lanes:
            sent |= {(rank, way.peer, way.channel) for way in lane.sends}
            received |= {(way.peer, rank, way.channel) for way in lane.recvs}
    assert sent == received
    assert {peer for _, peer, _ in sent} <= set(MEMBERS)


@pytest.mark.parametrize("homes", [(), (1, 2)])
def test_a_group_plans_an_excluded_rail_as_a_lost_one(homes: tuple[int, ...]) -> None:
    excluded = health(nranks=8).changed((), [(3, 1)])
    plans = make(homes=homes)
    assert plans(CALL, excluded).layout == make(homes=homes)(CALL, health(nranks=8, r1n3=0)).layout
