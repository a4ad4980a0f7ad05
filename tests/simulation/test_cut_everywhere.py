"""Cuts of a path before every event of a run: the results must not change.

With ``R2CC_SIM_EXAMPLES`` of 20,000 or more, every path is cut at every event, with and without a
restore; otherwise one path per event, with or without a restore in turn.
"""

import itertools
import os

import msgspec
import pytest
from support.slow import slow_but, sweep

from r2ccl.testing.simulation import CallSpec, CutPath, FailurePlan, NicDown, Workload, simulate
from r2ccl.testing.simulation.rank import SimRank

CLEARED = Workload(calls=(CallSpec(27),), slice_nbytes=8, eager_nbytes=0)
EAGER = Workload(
    calls=(CallSpec(6, "recursive_doubling", 2), CallSpec(9, channels=2)), eager_nbytes=64
)
TREES = Workload(calls=(CallSpec(24, "packed_trees", 4),), slice_nbytes=8, eager_nbytes=0)
PATHS = [(a, b, rail) for a, b in ((0, 1), (0, 2), (1, 2)) for rail in range(3)]
IS_THOROUGH = int(os.environ.get("R2CC_SIM_EXAMPLES", "0")) >= 20_000
#: Virtual seconds within which any single fault is over: connecting waits 1 s for all rails, a
#: silent loss is suspected after 0.5 s and proved 0.06 s later.
BOUND_S = 2.5


def paths_for(at: int) -> list[tuple[int, int, int]]:
    return PATHS if IS_THOROUGH else [PATHS[at % len(PATHS)]]


def told_to(who: str, a: int, b: int, at: int) -> tuple[int, ...]:
    return {"both": (a, b), "one": ((a, b)[at % 2],), "nobody": ()}[who]


@pytest.mark.timeout(3600 if IS_THOROUGH else 120)
@sweep(17, 1)
@pytest.mark.parametrize("who", slow_but(["one", "nobody"], ["both", "one", "nobody"]))
@pytest.mark.parametrize(
    "workload", slow_but([EAGER], [CLEARED, EAGER, TREES]), ids=["cleared", "eager", "trees"]
)
def test_a_path_is_cut_at_every_event(workload: Workload, who: str, step: int) -> None:
    for at in range(0, simulate(workload).nevents, step):
        restores_us = (0, 400) if IS_THOROUGH else (400 * (at // len(PATHS) % 2),)
        for (a, b, rail), restore_us in itertools.product(paths_for(at), restores_us):
            cut = CutPath(
                at,
                a,
                b,
                rail,
                told_to(who, a, b, at),
                keep=at % 4,
                late_us=(0, 50, 500)[at % 3],
                is_stall=at % 5 == 0,
                restore_us=restore_us,
            )
            outcome = simulate(workload, FailurePlan((cut,)), seed=at)
            assert outcome.is_clean, (cut, outcome.errors)
            assert outcome.time_s < BOUND_S, (cut, outcome.time_s)


@pytest.mark.timeout(3600 if IS_THOROUGH else 120)
@sweep(47, 1 if IS_THOROUGH else 3)
@pytest.mark.parametrize("is_lazy", [True, False])
@pytest.mark.parametrize("is_seen", slow_but([False], [True, False]))
def test_a_nic_goes_down_at_every_event(is_seen: bool, is_lazy: bool, step: int) -> None:
    workload = msgspec.structs.replace(CLEARED, is_lazy=is_lazy)
    for at in range(0, simulate(workload).nevents, step):
        down = NicDown(at, at % 3, at // 3 % 3, is_seen, keep=at % 3, restore_us=300 * (at % 2))
        outcome = simulate(workload, FailurePlan((down,)), seed=at)
        assert outcome.is_clean, (down, outcome.errors)
        assert outcome.time_s < BOUND_S, (down, outcome.time_s)


@pytest.mark.timeout(3600 if IS_THOROUGH else 120)
@sweep(31, 1)
@pytest.mark.parametrize(
    ("first_us", "second_us"), slow_but([(300, 0)], [(0, 0), (300, 0), (0, 300), (300, 300)])
)
def test_the_path_moved_to_is_cut_at_every_event_of_the_repair(
    first_us: int, second_us: int, step: int
) -> None:
    """Cut the second path in every state of the first repair: fencing, announced, replaying."""
    workload = Workload(2, 3, (CallSpec(24, channels=2),), slice_nbytes=8, eager_nbytes=0)
    end = simulate(workload).nevents
    firsts = range(60, end, 5 if IS_THOROUGH else 80)
    for first, rail in itertools.product(firsts, (1, 2)):
        for second in range(first, first + 160, step):
            cuts = (
                CutPath(first, 0, 1, 0, (first % 2,), keep=first % 3, restore_us=first_us),
                CutPath(second, 0, 1, rail, (0, 1), keep=second % 3, restore_us=second_us),
            )
            outcome = simulate(workload, FailurePlan(cuts), seed=second)
            assert outcome.is_clean, (cuts, outcome.errors)


@sweep(115, 23)
def test_no_slice_counts_as_in_flight_after_the_last_call(step: int) -> None:
    workload = Workload(nranks=3, calls=(CallSpec(300),) * 3, eager_nbytes=0)
    for at in range(100, simulate(workload).nevents, step):
        ranks: list[SimRank] = []

        class KeptRank(SimRank):
            def __init__(self, *given: object) -> None:
                super().__init__(*given)  # type: ignore[arg-type]
                ranks.append(self)  # noqa: B023 - used in this turn only

        cut = CutPath(at, 0, 1, 1, restore_us=200_000)
        outcome = simulate(workload, FailurePlan((cut,)), seed=at, rank_type=KeptRank)
        assert outcome.is_clean, (cut, outcome.errors)
        now = outcome.time_s
        for rank in ranks:
            balance = rank.links.balance
            assert balance is not None
            assert balance.active_s(now) == balance.active_s(now + 1), (cut, rank.rank)
