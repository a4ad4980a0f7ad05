"""Health in simulation: all ranks learn of a lost rail and of its return, and plan alike.

Every simulation checks that no two ranks plan one collective from different versions.
"""

import pytest
from support.slow import slow_but, sweep

from r2ccl.failover.health.table import WHOLE
from r2ccl.testing.simulation import (
    CallSpec,
    CutPath,
    Exclude,
    FailurePlan,
    Fault,
    NicDown,
    Noise,
    Stop,
    Workload,
    simulate,
)
from r2ccl.testing.simulation.rank import SimRank

RAIL = 1
WORKLOAD = Workload(nranks=4, calls=(CallSpec(300),) * 4, busy_ms=(700,) * 4)
MOMENTS = slow_but([700, 1_100], range(700, 1_500, 200))


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("is_seen", [True, False], ids=["carrier lost", "silent"])
def test_every_rank_hears_of_a_dead_port_and_plans_without_it(at: int, is_seen: bool) -> None:
    outcome = simulate(WORKLOAD, FailurePlan((NicDown(at, 2, RAIL, is_seen),)), seed=at)
    assert outcome.is_clean
    assert len({health.version for health in outcome.known}) == 1
    assert all(health.share(2, RAIL) == 0 for health in outcome.known)
    assert {health.degraded() for health in outcome.known} == {(2,)}
    last = len(outcome.plans)
    assert outcome.plans[1].version == 0
    assert outcome.plans[last].share(2, RAIL) == 0


@pytest.mark.parametrize("at", MOMENTS)
def test_a_rail_that_is_back_is_whole_again_for_all(at: int) -> None:
    down = NicDown(at, 2, RAIL, restore_us=200_000)
    outcome = simulate(WORKLOAD, FailurePlan((down,)), seed=at)
    assert outcome.is_clean
    for health in outcome.known:
        assert health.version == 2
        assert health.share(2, RAIL) == WHOLE
        assert health.degraded() == ()


@pytest.mark.parametrize("is_seen", [True, False], ids=["carrier lost", "silent"])
@pytest.mark.parametrize("is_short_first", [True, False])
def test_a_short_fault_of_a_dead_port_does_not_repair_it(
    is_short_first: bool, is_seen: bool
) -> None:
    down = NicDown(705, 2, RAIL, is_seen)
    faults = [
        NicDown(700 if is_short_first else 710, 2, RAIL, is_seen, restore_us=200_000),
        *(CutPath(715, 2, peer, RAIL, restore_us=200_000) for peer in (1, 3)),
    ]
    outcome = simulate(WORKLOAD, FailurePlan((*faults, down)), seed=700)
    assert outcome.is_clean
    assert all(health.share(2, RAIL) == 0 for health in outcome.known)


def test_a_stopped_rank_goes_on_after_the_last_of_its_stops() -> None:
    calls = (CallSpec(300),)
    faults = (Stop(10, 2, 1), Stop(11, 2, 2_000), Stop(12, 2, 5))
    outcome = simulate(Workload(nranks=4, calls=calls), FailurePlan(faults))
    assert outcome.is_clean
    assert outcome.time_s >= 2.0


def test_a_stopped_rank_hears_of_its_carriers_when_it_goes_on() -> None:
    heard: list[bool] = []

    class ListeningRank(SimRank):
        def on_carrier(self, rail: int, is_up: bool) -> None:
            heard.append(is_up)
            super().on_carrier(rail, is_up)

    faults = (Stop(700, 2, 600), NicDown(710, 2, RAIL, restore_us=200_000))
    assert simulate(WORKLOAD, FailurePlan(faults), rank_type=ListeningRank).is_clean
    assert heard == [False, True]


def test_a_cut_pair_and_a_slow_rank_are_no_news_for_the_plan() -> None:
    for fault in (CutPath(900, 0, 1, RAIL), Stop(900, 3, 2_000)):
        outcome = simulate(WORKLOAD, FailurePlan((fault,)), seed=1)
        assert outcome.is_clean
        assert {health.version for health in outcome.known} == {0}


@sweep(900, 300)
def test_calls_in_close_succession_agree_despite_a_noisy_control(step: int) -> None:
    workload = Workload(nranks=4, calls=(CallSpec(60),) * 12)
    noise = Noise(lose=20, repeat=20, late=30, late_ms=5)
    versions = set()
    for at in range(300, 3_000, step):
        faults = (
            NicDown(at, 2, RAIL, restore_us=5_000),
            NicDown(at + 100, 0, 2, restore_us=3_000),
        )
        outcome = simulate(workload, FailurePlan(faults, noise), seed=at)
        assert outcome.is_clean
        versions |= {health.version for health in outcome.plans.values()}
    assert len(versions) > 1, "no plan changed in the midst of the calls: the test shows nothing"


@pytest.mark.parametrize(
    "second", [NicDown(3_700, 1, RAIL), Exclude(3_700, 1, RAIL)], ids=["failed", "excluded"]
)
def test_a_rank_without_its_own_port_blames_no_other_port(second: Fault) -> None:
    workload = Workload(nranks=4, calls=(CallSpec(300),) * 30, busy_ms=(700,) * 4)
    # Rank 1 reports the port of rank 2, and then cannot observe that it works again.
    first = NicDown(700, 2, RAIL, is_seen=False, restore_us=1_500_000)
    outcome = simulate(workload, FailurePlan((first, second)), seed=700)
    assert outcome.is_clean
    assert any(health.share(2, RAIL) == 0 for health in outcome.plans.values())
    for health in outcome.known:
        assert [health.share(rank, RAIL) for rank in range(4)] == [WHOLE, 0, WHOLE, WHOLE]


@pytest.mark.parametrize("at", slow_but([300], range(300, 1_300, 200)))
def test_a_rank_that_closes_idle_paths_blames_no_port(at: int) -> None:
    # Ranks 1 and 2 are neighbours in the ring, but exchange nothing in recursive doubling.
    calls = (CallSpec(300),) * 3 + (CallSpec(300, "recursive_doubling"),) * 14
    workload = Workload(
        4, 2, calls, busy_ms=(700,), is_lazy=True, max_connections=2, no_rail_timeout_ms=20_000
    )
    down = NicDown(at, 2, RAIL, is_seen=False, restore_us=3_000_000)
    outcome = simulate(workload, FailurePlan((down,)), seed=at)
    assert outcome.is_clean
    assert any(health.share(2, RAIL) == 0 for health in outcome.plans.values())
    for health in outcome.known:
        assert health.degraded() == ()


@pytest.mark.parametrize("at", slow_but([700], range(700, 1_500, 200)))
@pytest.mark.parametrize("victim", slow_but([1], range(4)))
def test_a_port_blamed_inside_its_node_is_whole_again(victim: int, at: int) -> None:
    calls = (CallSpec(300),) * 12
    workload = Workload(nranks=4, calls=calls, busy_ms=(700,) * 4, nodes=(0, 0, 1, 1))
    down = NicDown(at, victim, RAIL, is_seen=False, restore_us=1_500_000)
    outcome = simulate(workload, FailurePlan((down,)), seed=at)
    assert outcome.is_clean
    assert any(health.share(victim, RAIL) == 0 for health in outcome.plans.values())
    for health in outcome.known:
        assert health.degraded() == ()
