"""What a rank does in calls of one shape: kept, checked, and now and then a measurement."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.healths import health

from r2ccl.algos import leaf_ring, one_shot, recursive_doubling, ring
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument, ScheduleError
from r2ccl.failover.health.table import Health
from r2ccl.kernels import user_op
from r2ccl.planning import plan_cache
from r2ccl.planning.cost_model import Fabric, Rates
from r2ccl.planning.plan_cache import CheckedSchedules, Plan, PlanCache
from r2ccl.planning.planner import Planner
from r2ccl.planning.two_level import COLLECTIVES
from r2ccl.schedule.check import check_order
from r2ccl.schedule.ir import Schedule
from r2ccl.types import REDUCTIONS, ROOTED, CallSignature, Collective, ReduceOp

CALL = CallSignature(Collective.ALLREDUCE, 8, ReduceOp.SUM, 1 << 24)
RATES = Rates(100_000, 25_000_000)


def make(**settings: str) -> PlanCache:
    return PlanCache(1, 4, Fabric(range(4), 4, (), RATES), Config(**settings))  # type: ignore[arg-type]


def gauges(plans: PlanCache, of: Health, ops: range = range(96)) -> list[int]:
    return [op for op in ops if plans(CALL, of, op).is_bandwidth_sample]


def test_a_plan_is_made_once_for_each_health() -> None:
    plans, lost = make(), health(r1n0=0)
    first = plans(CALL, lost, 5)
    assert plans(CALL, lost, 6) is first
    assert plans(CALL, health(), 5) is not first
    plans.measured(RATES)
    assert plans(CALL, lost, 5) is not first, "it was planned with other rates"


def test_a_small_group_runs_if_nodes_share_no_home_rail() -> None:
    """The root of a group's call is a digest of its calls, not a rank."""
    fabric = Fabric(range(2), 2, (), RATES)
    apart = health(nrails=2, r1n0=0, r0n3=0)
    call = replace(CALL, count=16)
    found = [PlanCache(0, 4, fabric, Config())(each, apart) for each in (call, call.with_digest(9))]
    assert found[0].layout == found[1].layout


def test_rails_are_measured_oftener_while_one_is_slow() -> None:
    """All ranks must do so in the same calls: the number of the call decides."""
    assert gauges(make(), health()) == list(range(96)), "a ring always shows it"
    soon = range(64)
    assert gauges(make(), health(r1n0=0), soon) == [0, 1, 2, 48, 49, 50]
    slow = gauges(make(), health(r1n0=4), soon)
    assert slow == [op for op in soon if op % 16 < 3]
    assert gauges(make(algo="packed_trees"), health(r1n0=0)) == [], "what is named runs always"


def test_a_plan_lasts_unless_some_calls_are_samples() -> None:
    plans, lost, small = make(), health(r1n0=0), replace(CALL, count=8)
    assert gauges(plans, lost)
    assert not any(plans(CALL, lost, op).is_lasting for op in range(96))
    assert plans(CALL, health(), 5).is_lasting, "a ring is always a sample"
    assert plans(small, lost, 5).is_lasting
    assert plans(CALL, lost, 5, leaf_ring.allreduce([3, 4, 4, 4], 4, 4)).is_lasting
    assert not plans(small, health(), None).is_lasting, "the number of the call is not known"


@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_a_plan_can_be_asked_to_be_a_sample(collective: Collective) -> None:
    plan = make()(replace(CALL, collective=collective), health(r1n0=0), is_bandwidth_sample=True)
    assert plan.is_bandwidth_sample


def test_samples_cost_a_hundredth_of_the_time_in_two_levels() -> None:
    """One level is a ring, which is a sample itself; two levels take two thirds of its time."""
    plans, call = make(), replace(CALL, collective=Collective.ALLGATHER)
    ring_ns = plans.choice_of(call, health()).predicted_ns
    ops, two_ns = range(10_000), ring_ns * 2 // 3
    found = sum(plans.is_bandwidth_sample(call, health(), op, two_ns) for op in ops)
    assert 0.005 < found / len(ops) * (ring_ns / two_ns - 1) < 0.011
    assert not any(plans.is_bandwidth_sample(call, health(), op) for op in ops)


def test_the_count_begins_when_the_health_changes() -> None:
    plans = make()
    plans(CALL, health(), 99)
    assert gauges(plans, health(r1n0=0), range(100, 164)) == [100, 101, 102, 148, 149, 150]


@pytest.mark.parametrize("of", [health(r1n0=0), health(r1n0=1), health(r1n0=4, r2n0=1)], ids=str)
def test_in_the_long_run_measuring_costs_a_hundredth_of_the_time(of: Health) -> None:
    plans = make()
    ops = range(64, 64 + 4096)
    planner = Planner(plans.fabric, Config())
    nbytes = CALL.count * 4
    usual, ring_ = (
        planner.plan(CALL, nbytes, of, is_bandwidth_sample=is_sample).predicted_ns
        for is_sample in (False, True)
    )
    plans(CALL, of, 0)
    ngauges = len(gauges(plans, of, ops))
    assert ngauges > 0
    assert ngauges * (ring_ - usual) <= 0.011 * len(ops) * usual + 3 * (ring_ - usual)


def test_slices_that_may_overrun_a_port_are_asked_for() -> None:
    def is_eager(plan: Plan) -> set[bool]:
        return {
            step.is_eager for lane in plan.layout.lanes for step in lane.steps if step.peer >= 0
        }

    trees = make(algo="packed_trees")
    little = CallSignature(Collective.ALLREDUCE, 8, ReduceOp.SUM, 24 << 10)
    assert is_eager(trees(CALL, health())) == {False}
    assert is_eager(trees(little, health())) == {True}


def test_schedules_with_other_ops_are_each_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees packed for little and for much data are as many and have the same name."""
    of = health(4, 2, r0n0=4, r1n0=4, r0n1=8, r0n2=12, r1n2=8, r0n3=4, r1n3=12)
    plans = PlanCache(1, 4, Fabric(range(2), 2, (), Rates(10**6, 25_000_000)), Config())
    checked: list[int] = []
    monkeypatch.setattr(plan_cache, "check", lambda schedule: checked.append(schedule.digest()))
    sizes = (1 << 20, 16 << 20)
    little, much = (plans.choose(nbytes, of).schedule for nbytes in sizes)
    assert (little.name, little.nchannels) == (much.name, much.nchannels)
    assert little.digest() != much.digest()
    for each in (of, replace(of, version=of.version + 1)):
        for nbytes in sizes:
            plans(replace(CALL, count=nbytes // 8), each)
    assert checked == [little.digest(), much.digest()]


def test_plan_caches_share_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    nchecks: list[Schedule] = []
    monkeypatch.setattr(plan_cache, "check", nchecks.append)
    checked, fabric = CheckedSchedules(), Fabric(range(4), 4, (), RATES)
    for _ in range(2):
        PlanCache(1, 4, fabric, Config(), checked=checked)(CALL, health())
    assert len(nchecks) == 1
    make()(CALL, health())
    assert len(nchecks) == 2


def test_a_users_schedule_is_checked_and_kept() -> None:
    plans, mine = make(), leaf_ring.allreduce([3, 4, 4, 4], 4, 4)
    plan = plans(CALL, health(), 5, mine)
    assert plans(CALL, health(), 7, mine) is plan
    assert not plan.is_bandwidth_sample
    whole = ring.allreduce(4, 1)
    half = replace(whole, generate=lambda rank: (whole.generate(rank)[0][:3],))
    with pytest.raises(ScheduleError):
        plans(CALL, health(), 5, half)
    with pytest.raises(ScheduleError):
        plans.check_own(half)


@pytest.mark.parametrize("name", ["ring", "direct"])
def test_the_name_of_a_users_schedule_changes_nothing(name: str) -> None:
    """Many ranks send to one port, so it must not be taken for a ring, which is a sample."""
    mine = replace(one_shot.allreduce(4), name=name)
    named, other = (make()(CALL, health(), 5, replace(mine, name=each)) for each in (name, "mine"))
    assert not named.is_bandwidth_sample
    assert named.layout == other.layout


@pytest.mark.parametrize("of", [health(), health(r1n0=0), health(r1n0=4, r2n0=1)], ids=str)
@pytest.mark.parametrize("count", [1, 1 << 20])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_non_commutative_operation_keeps_rank_order(
    kind: Collective, count: int, of: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = user_op(lambda left, right: left, name="first", is_commutative=False)
    checked: list[Schedule] = []
    monkeypatch.setattr(plan_cache, "check_order", checked.append)
    call = CallSignature(kind, 8, op.number, count * 4, 2, op.digest)

    for root in range(4):
        plan = make()(replace(call, root=root if kind in ROOTED else 0), of, root)
        assert not plan.is_bandwidth_sample, "a port may have two senders"

    assert len(checked) == 4
    for schedule in checked:
        check_order(schedule)


def test_an_own_schedule_must_keep_rank_order() -> None:
    op = user_op(lambda left, right: left, name="first", is_commutative=False)
    call = replace(CALL, op=op.number, user=op.digest)
    plans = make()
    plans.check_own(ring.allreduce(4))
    for refuse in (
        lambda: plans.check_own(ring.allreduce(4), is_ordered=True),
        lambda: plans(call, health(), own=ring.allreduce(4)),
    ):
        with pytest.raises(ScheduleError, match="needs rank order"):
            refuse()
    plans(call, health(), own=recursive_doubling.allreduce(4))


@pytest.mark.parametrize("op", [99, "sum"])
def test_an_op_that_does_not_exist_is_refused(op: object) -> None:
    with pytest.raises(InvalidArgument, match=f"op={op!r} for dtype float64"):
        make()(replace(CALL, op=op), health())
