"""What a rank does in allreduces among some ranks: planned by their own rails, alike at all."""

from __future__ import annotations

import pytest
from healths import health

from r2ccl.config import Config
from r2ccl.plans import GroupPlans
from r2ccl.prediction import Fabric, Rates
from r2ccl.types import CallSignature, Collective, ReduceOp

CALL = CallSignature(Collective.ALLREDUCE, 8, ReduceOp.SUM, 1 << 24)
RATES = Rates(100_000, 25_000_000)
MEMBERS = (1, 3, 5, 7)


def make(rank: int = 3, homes: tuple[int, ...] = (), **settings: str) -> GroupPlans:
    fabric = Fabric(range(4), 4, (0, 0, 1, 1, 2, 2, 3, 3), RATES)
    config = Config(**settings)  # type: ignore[arg-type]
    return GroupPlans(rank, MEMBERS, 8, fabric, config, homes=homes)


def channels_of(plans: GroupPlans, **lost: int) -> set[int]:
    layout = plans(CALL, health(nranks=8, **lost)).layout
    return {way.channel for lane in layout.lanes for way in (*lane.sends, *lane.recvs)}


def test_a_group_runs_what_is_best_and_measures_nothing() -> None:
    """Its slices do not show what rails carry, so it has no turns in which it is a ring."""
    lost = health(nranks=8, r0n3=0)
    found, named = (make(**each)(CALL, lost) for each in ({}, {"algo": "ring"}))
    assert not found.is_gauge
    assert found.layout.lanes != named.layout.lanes


def test_a_group_at_home_uses_its_own_rails_whatever_is_lost() -> None:
    plans = make(homes=(1, 2))
    assert {channel % 4 for channel in channels_of(plans)} == {1, 2}
    assert channels_of(plans, r1n3=0) == channels_of(plans)
    assert plans(CALL, health(nranks=8, r1n3=0)) is plans(CALL, health(nranks=8))


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
