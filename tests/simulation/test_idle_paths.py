"""Ranks above their number of connections close idle paths, and nothing is lost by that.

The schedules of successive calls name different ranks, so a rank that may keep paths to one or two
ranks closes and reopens paths at most calls, at times that differ from rank to rank.
"""

import pytest
from support.slow import slow_but

from r2ccl.testing.simulation import (
    CallSpec,
    CutPath,
    FailurePlan,
    NicDown,
    Noise,
    Workload,
    simulate,
)

#: Schedules that name neighbours at distance 1, at 1, 2 and 4, and of a tree.
ALTERNATING = ("ring", "recursive_doubling", "dissemination", "tree/broadcast", "ring", "one_shot")


def workload(nranks: int, limit: int, *, busy_ms: tuple[int, ...] = (40,)) -> Workload:
    calls = tuple(CallSpec(48, algorithm, channels=2) for algorithm in ALTERNATING)
    return Workload(
        nranks, 2, calls, busy_ms=busy_ms, is_lazy=True, max_connections=limit,
        slice_nbytes=16, no_rail_timeout_ms=20_000,
    )  # fmt: skip


def test_idle_paths_are_closed_and_connected_again() -> None:
    unlimited, limited = (simulate(workload(8, limit)) for limit in (0, 2))
    assert unlimited.is_clean
    assert limited.is_clean
    assert limited.nmessages > unlimited.nmessages
    assert limited.repairs == 0
    assert not any(limited.verdicts)


@pytest.mark.parametrize("nranks", [5, 6])
def test_rails_that_connect_again_need_no_bypass(nranks: int) -> None:
    for seed in range(10):
        assert simulate(workload(nranks, 1), seed=seed).nbypasses == 0


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("nranks", slow_but([5, 8], [3, 4, 5, 6, 7, 8, 9]))
def test_ranks_at_different_speeds_lose_nothing(nranks: int, limit: int) -> None:
    for seed in range(20):
        job = workload(nranks, limit, busy_ms=(40, 30 + seed, 70, 20, 3 * seed))
        outcome = simulate(job, FailurePlan((), Noise(late=30, late_ms=20)), seed)
        assert outcome.is_clean, (seed, outcome.errors)


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_nic_goes_down_while_idle_paths_are_closed(is_seen: bool) -> None:
    job = workload(6, 2)
    for at in range(0, simulate(job).nevents, 37):
        down = NicDown(at, at % 6, at // 6 % 2, is_seen, keep=at % 3, restore_us=50_000 * (at % 2))
        outcome = simulate(job, FailurePlan((down,)), seed=at)
        assert outcome.is_clean, (down, outcome.errors)


def test_a_path_is_cut_while_idle_paths_are_closed() -> None:
    job = workload(5, 1)
    for at in range(0, simulate(job).nevents, 29):
        a, b = at % 5, (at + 1 + at // 5 % 4) % 5
        cut = CutPath(at, a, b, at % 2, (a,), keep=at % 4, late_us=500, restore_us=1_000)
        outcome = simulate(job, FailurePlan((cut,)), seed=at)
        assert outcome.is_clean, (cut, outcome.errors)
