"""Soundness of the simulator: runs repeat, and every known mistake is found."""

import msgspec
import pytest
from simulation.families import FAMILIES
from simulation.mistakes import MISTAKES

from r2ccl.testing.simulation import (
    CallSpec,
    CutPath,
    FailurePlan,
    Kill,
    Noise,
    Violation,
    Workload,
    simulate,
)
from r2ccl.testing.simulation.checks import Array, Checker

PLAN = FailurePlan((CutPath(300, 0, 1, 0, (0,), keep=1, restore_us=500),), Noise(lose=10, late=30))


def test_same_seed_same_trace() -> None:
    first = simulate(Workload(), PLAN, seed=7)
    again = simulate(Workload(), PLAN, seed=7)
    assert first.trace == again.trace
    assert first.digest() == again.digest()


def test_other_seed_other_trace() -> None:
    digests = {simulate(Workload(), PLAN, seed=seed).digest() for seed in range(5)}
    assert len(digests) == 5


def test_a_plan_does_something() -> None:
    assert simulate(Workload(), FailurePlan(), seed=7).repairs == 0
    assert simulate(Workload(), PLAN, seed=7).repairs == 2


#: Events within which every run of a family ends, more than twice as many as the longest takes.
MAX_EVENTS = 6_000
#: Plan at which the search for a mistake begins: where it was found last. Default is the first.
FIRST = {
    "no fence": 16,
    "early slices unreported": 28,
    "alone since the last call": 15,
    "replay confirmed early": 86,
}


def is_right(workload: Workload, plan: FailurePlan, seed: int) -> bool:
    try:
        return simulate(workload, plan, seed, max_events=MAX_EVENTS).is_clean
    except Violation:
        return False


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    workload, plans = FAMILIES[mistake]
    first = FIRST.get(mistake, 0)
    seeds = [*range(first, len(plans)), *range(first)]
    with MISTAKES[mistake]():
        seed = next(seed for seed in seeds if not is_right(workload, plans[seed], seed))
    assert is_right(workload, plans[seed], seed)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_without_the_mistake_every_plan_is_right(mistake: str) -> None:
    workload, plans = FAMILIES[mistake]
    assert all(is_right(workload, plan, seed) for seed, plan in enumerate(plans))


def test_another_order_of_additions_shows_in_floats_alone() -> None:
    workload, plans = FAMILIES["reduced as it comes"]
    (call,) = workload.calls
    with MISTAKES["reduced as it comes"]():
        for dtype, is_seen in (("int32", False), ("float16", True), ("float64", True)):
            calls = (msgspec.structs.replace(call, dtype=dtype),)
            other = msgspec.structs.replace(workload, calls=calls)
            assert is_seen is not all(
                is_right(other, plan, seed) for seed, plan in enumerate(plans[:15])
            ), dtype


def test_a_violation_names_seed_and_plan() -> None:
    workload, plans = FAMILIES["released when confirmed"]
    assert simulate(workload, plans[0], seed=11).is_clean
    with MISTAKES["released when confirmed"](), pytest.raises(Violation) as caught:
        simulate(workload, plans[0], seed=11)
    assert "seed=11" in str(caught.value)
    assert "after the slice's memory was released" in str(caught.value)


def test_a_late_write_shows_though_the_rank_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    retire = Checker.retire

    def retire_and_write(self: Checker, what: str, *arrays: Array) -> None:
        retire(self, what, *arrays)
        if what == "rank 0, call 1":
            arrays[0][0] = 0

    monkeypatch.setattr(Checker, "retire", retire_and_write)
    workload = Workload(calls=(CallSpec(30), CallSpec(30)), busy_ms=(500,))
    kill = FailurePlan((Kill(400, 1),))
    with pytest.raises(Violation, match="memory of rank 0, call 1 was written"):
        simulate(workload, kill)


def test_without_the_fence_memory_is_corrupted_and_with_it_never() -> None:
    workload, plans = FAMILIES["no fence"]
    some = list(enumerate(plans))[FIRST["no fence"] :][:15]
    with MISTAKES["no fence"]():
        found = []
        for seed, plan in some:
            try:
                simulate(workload, plan, seed)
            except Violation as exc:
                found.append(str(exc))
    assert any("was written" in text for text in found)
    for seed, plan in some:
        assert simulate(workload, plan, seed).is_clean
