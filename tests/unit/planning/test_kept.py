"""Results of planning that are kept: few, and of the last two versions of the health."""

from __future__ import annotations

from msgspec.structs import replace
from support.healths import health

from r2ccl.config import Config
from r2ccl.planning.cost_model import Fabric, Rates
from r2ccl.planning.kept import Kept
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.types import CallSignature, Collective, ReduceOp

CALL = CallSignature(Collective.ALLTOALL, 10, ReduceOp.SUM, 1 << 20)


def make() -> PlanCache:
    return PlanCache(1, 4, Fabric(range(4), 4, (), Rates(20_000, 12 * 10**9)), Config())


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
