"""Bypasses in simulation: two ranks lose their last common rail before every event of a run.

With ``R2CC_SIM_EXAMPLES`` of 20,000 or more, the loss occurs at every event instead of every third
one.
"""

import os

import msgspec
import pytest
from support.slow import slow_but, sweep

from r2ccl.testing.simulation import CallSpec, CutPath, FailurePlan, NicDown, Workload, simulate

IS_THOROUGH = int(os.environ.get("R2CC_SIM_EXAMPLES", "0")) >= 20_000
STEP = 1 if IS_THOROUGH else 3
#: Virtual seconds: connecting waits 1 s for all rails; a silent loss is suspected after 0.5 s and
#: proved 0.06 s later; a second loss takes the same again.
BOUND_S = 4.0

CLEARED = Workload(3, 2, (CallSpec(27),), slice_nbytes=8, eager_nbytes=0)
EAGER = Workload(
    3, 2, (CallSpec(6, "recursive_doubling", 2), CallSpec(9, channels=2)), eager_nbytes=64
)
TREES = Workload(3, 2, (CallSpec(24, "packed_trees", 4),), slice_nbytes=8, eager_nbytes=0)
PAIR = Workload(2, 2, (CallSpec(24, channels=2),), slice_nbytes=8, eager_nbytes=0)


def apart(at: int, gap: int, is_seen: bool, keep: int = 0) -> tuple[NicDown, NicDown]:
    """Return faults that leave ranks 0 and 1 without a common rail: each loses one."""
    return (
        NicDown(at, 0, at % 2, is_seen, keep=keep, late_us=(0, 50, 500)[at % 3]),
        NicDown(at + gap, 1, 1 - at % 2, is_seen, keep=keep),
    )


@pytest.mark.timeout(3600 if IS_THOROUGH else 300)
@sweep(31, STEP)
@pytest.mark.parametrize("is_seen", slow_but([False], [True, False]), ids=["seen", "silent"])
@pytest.mark.parametrize("fabric", slow_but(["rail"], ["full", "rail"]))
@pytest.mark.parametrize(
    "workload", slow_but([CLEARED], [CLEARED, EAGER, TREES]), ids=["cleared", "eager", "trees"]
)
def test_a_pair_is_left_apart_at_every_event(
    workload: Workload, fabric: str, is_seen: bool, step: int
) -> None:
    struck = msgspec.structs.replace(workload, fabric=fabric)
    nbypassed = 0
    for at in range(0, simulate(struck).nevents, step):
        faults = apart(at, (0, 7, 40)[at % 3], is_seen, keep=at % 4)
        outcome = simulate(struck, FailurePlan(faults), seed=at)
        assert outcome.is_clean, (faults, outcome.errors)
        assert outcome.time_s < BOUND_S, (faults, outcome.time_s)
        nbypassed += outcome.nbypasses > 0
    # Runs with early or late faults may need no bypass.
    assert nbypassed > 5 * STEP // step


@pytest.mark.timeout(3600 if IS_THOROUGH else 300)
@sweep(13, STEP)
def test_two_ranks_alone_go_across_at_every_event(step: int) -> None:
    for at in range(0, simulate(PAIR).nevents, step):
        faults = apart(at, at % 5, is_seen=at % 2 == 0)
        outcome = simulate(PAIR, FailurePlan(faults), seed=at)
        assert outcome.is_clean, (faults, outcome.errors)


@pytest.mark.timeout(3600 if IS_THOROUGH else 300)
@sweep(83, 1 if IS_THOROUGH else 5)
@pytest.mark.parametrize("at", slow_but([120], [120, 300]))
def test_the_bypass_is_cut_at_every_event_and_another_way_found(at: int, step: int) -> None:
    """Cut the paths of a bypass in turn; ranks 2 and 3 can both forward."""
    workload = Workload(
        4, 2, (CallSpec(48, channels=2),), slice_nbytes=8, eager_nbytes=0, fabric="rail"
    )
    first = apart(at, 0, is_seen=True)
    end = simulate(workload, FailurePlan(first), seed=at).nevents
    legs = [(0, 2, 1), (0, 3, 1), (1, 2, 0), (1, 3, 0)]
    for second in range(at, min(end, at + 400), step):
        a, b, rail = legs[second // STEP % 4]
        cut = CutPath(second, a, b, rail, (a, b) if second % 2 else (), keep=second % 3)
        outcome = simulate(workload, FailurePlan((*first, cut)), seed=second)
        assert outcome.is_clean, (second, cut, outcome.errors)


@pytest.mark.timeout(3600 if IS_THOROUGH else 300)
@pytest.mark.parametrize(
    "busy_ms",
    [(8000, 8000), *(pytest.param(b, marks=pytest.mark.slow) for b in ((8000, 0), (0, 8000)))],
)
@sweep(211, 17 if IS_THOROUGH else 71)
def test_ranks_that_compute_find_a_way_meanwhile(busy_ms: tuple[int, int], step: int) -> None:
    """Compute for longer than the no-rail timeout: the loss must not end the next call."""
    workload = msgspec.structs.replace(PAIR, calls=PAIR.calls * 2, busy_ms=busy_ms)
    for at in range(0, simulate(workload).nevents, step):
        faults = apart(at, at % 5, is_seen=True)
        outcome = simulate(workload, FailurePlan(faults), seed=at)
        assert outcome.is_clean, (faults, outcome.errors)


def test_without_any_way_the_call_ends_and_says_so() -> None:
    for fabric in ("rail", "none"):
        workload = msgspec.structs.replace(PAIR, fabric=fabric)
        outcome = simulate(workload, FailurePlan(apart(80, 0, is_seen=True)))
        assert [type(error).__name__ for error in outcome.errors] == ["NoHealthyRail"] * 2
