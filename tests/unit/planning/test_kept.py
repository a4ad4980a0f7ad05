"""Results of planning that are kept: few and small, of the last two versions of the health."""

from __future__ import annotations

from time import process_time

import pytest
from msgspec.structs import replace
from support.healths import health

from r2ccl.config import Config
from r2ccl.planning import plan_cache, planner, two_level
from r2ccl.planning.cost_model import Fabric, Rates
from r2ccl.planning.kept import Kept
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.planning.two_level import TwoLevelPlans
from r2ccl.schedule.chunks import Parts, consecutive
from r2ccl.types import CallSignature, Collective, ReduceOp

CALL = CallSignature(Collective.ALLTOALL, 10, ReduceOp.SUM, 1 << 20)


def make(nranks: int = 4) -> PlanCache:
    return PlanCache(1, nranks, Fabric(range(4), 4, (), Rates(20_000, 12 * 10**9)), Config())


def test_the_last_two_versions_are_kept() -> None:
    kept: Kept[tuple[int, str], int] = Kept(4)
    for version, name in [(0, "a"), (0, "b"), (3, "a"), (0, "c")]:
        kept.keep((version, name), version)
    assert list(kept) == [(0, "a"), (0, "b"), (3, "a"), (0, "c")]
    kept.keep((5, "a"), 5)
    assert list(kept) == [(3, "a"), (5, "a")]
    for name in "bcde":
        kept.keep((5, name), 5)
    assert list(kept) == [(5, name) for name in "bcde"], "the oldest are dropped"


def test_large_results_drop_more() -> None:
    kept: Kept[tuple[int, str], str] = Kept(8, 10)
    for name, size in [("a", 4), ("b", 4), ("c", 4), ("d", 2), ("e", 50), ("f", 8), ("g", 2)]:
        kept.keep((0, name), name, size)
        if name == "d":
            assert list(kept.values()) == ["b", "c", "d"]
        if name == "e":
            assert list(kept.values()) == ["e"], "a result is kept whatever its size"
    assert list(kept.values()) == ["f", "g"]


def test_results_kept_again_count_once() -> None:
    kept: Kept[tuple[int, str], int] = Kept(8, 10)
    for _ in range(5):
        kept.keep((0, "a"), 1, 4)
    kept.keep((0, "b"), 2, 4)
    assert list(kept) == [(0, "a"), (0, "b")]
    kept.clear()
    assert kept.keep((0, "c"), 3, 8) == kept[0, "c"] == 3
    kept.keep((0, "d"), 4, 2)
    assert list(kept) == [(0, "c"), (0, "d")]


def test_many_results_are_kept_in_a_time_per_result() -> None:
    times = []
    for count in (1000, 16_000):
        tries = []
        for _ in range(3):  # the machine, or a garbage collection, may slow one down
            kept: Kept[tuple[int, int], int] = Kept(1 << 20, 1 << 30)
            began_s = process_time()
            for number in range(count):
                kept.keep((0, number), number, 1)
            tries.append(process_time() - began_s)
        times.append(min(tries))
    assert times[1] < 80 * times[0], "16 times the results; 256 times the sums of sizes"


class Size(int):
    """Size that counts the additions of sizes."""

    nadded = 0

    def __radd__(self, other: int) -> int:
        Size.nadded += 1
        return other + int(self)


def test_sizes_of_many_results_are_not_added_up_each_time() -> None:
    kept: Kept[tuple[int, int], int] = Kept(1 << 20, 1 << 30)
    for number in range(1000):
        kept.keep((0, number), number, Size(1))
    assert 1000 <= Size.nadded < 5000


@pytest.mark.parametrize("collective", [Collective.BROADCAST, Collective.SCATTERV])
def test_placements_of_many_roots_do_not_fill_memory(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_KEPT_SIZE", 200)
    plans, of = make(8), health(8, r1n0=0)
    for root in range(8):
        plans.choice_of(replace(CALL, collective=collective, root=root), of)
    placed = plans._planner._placed
    assert 1 <= len(placed) < 8
    edges = sum(len(each.placement.edges) for found in placed.values() for each in found)
    assert edges <= 200 or len(placed) == 1


def test_divisions_of_other_sizes_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of an allgather can differ in every call."""
    monkeypatch.setattr(two_level, "_KEPT_SIZE", 100)
    fabric = Fabric(range(4), 4, (0, 0, 1, 1), Rates(20_000, 12 * 10**9))
    plans = PlanCache(0, 4, fabric, Config())
    divisions = TwoLevelPlans(0, [[0, 1], [2, 3]], plans, Config())
    of = health()
    for extra in range(50):
        sizes = (1 << 20, (1 << 20) + extra, 1 << 20, 1 << 20)
        call = replace(CALL, collective=Collective.ALLGATHER, count=sum(sizes))
        found = divisions.division(call, of, sizes)
        assert found is not None
        assert divisions.division(call, of, sizes) is found
    assert 1 <= len(divisions._kept) <= 10


def test_calls_with_other_counts_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of an alltoallv can differ in every call; other plans must stay."""
    monkeypatch.setattr(plan_cache, "_UNEQUAL_SIZE", 4000)
    plans, of = make(), health(r1n0=0)
    often = plans(CALL, of, 0)
    for count in range(100):
        spans = consecutive([1000 + count] * 4)
        call = CallSignature(Collective.ALLTOALLV, 6, ReduceOp.SUM, 0)
        plan = plans(call, of, count, parts=Parts(spans, spans))
        assert plans(call, of, count, parts=Parts(spans, spans)) is plan
    assert 2 <= len(plans._unequal) < 100
    assert plans(CALL, of, 100) is often


@pytest.mark.parametrize("collective", [Collective.ALLGATHER, Collective.REDUCE_SCATTER])
def test_other_counts_are_not_placed_again(collective: Collective) -> None:
    plans, of = make(), health(r1n0=0)
    for digest in range(20):
        plans.choice_of(replace(CALL, collective=collective).with_digest(digest), of)
    assert len(plans._planner._placed) == 1


def test_plans_and_placements_of_old_health_are_dropped() -> None:
    plans = make()
    for version in range(1, 7):
        of = replace(health(r1n0=0 if version % 2 else 16), version=version)
        for collective in (Collective.ALLTOALL, Collective.ALLREDUCE, Collective.ALLGATHER):
            plans(replace(CALL, collective=collective), of, version)
        for kept in (plans._plans, plans._planner._placed, plans._costs):
            assert {key[0] for key in kept} == {max(1, version - 1), version}


def test_a_placed_exchange_has_no_flows() -> None:
    """They take most of its memory, and nothing needs them after it was placed."""
    assert make().choice_of(CALL, health(r1n0=0)).flows is None
