"""Calls that measure the bandwidth of rails: the same on all ranks, whatever a program calls."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from support.healths import health

from r2ccl.config import Config
from r2ccl.planning.bandwidth_samples import BandwidthSamples, SampleCost
from r2ccl.planning.cost_model import Fabric, Rates
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.planning.two_level import TwoLevelPlans
from r2ccl.types import CallSignature, Collective, ReduceOp

MIB = 1 << 20
FLOAT32 = 10
CALL = CallSignature(Collective.ALLREDUCE, FLOAT32, ReduceOp.SUM, 64 * MIB)
SMALL = replace(CALL, count=1)
RATES = Rates(20_000, 12 * 10**9)
COST = SampleCost(1000, 200)


def make(rank: int = 0) -> PlanCache:
    return PlanCache(rank, 8, Fabric(range(4), 4, (), RATES), Config())


def begun() -> BandwidthSamples:
    """Return a new count with a health in which no rail is slow."""
    samples = BandwidthSamples()
    samples.begin(0, is_slow=False)
    return samples


def sampled_steps(nsmall: int, nsteps: int = 2000) -> list[int]:
    """Return the steps that are samples in a program of `nsmall` small calls and one large."""
    plans, of = make(), health(8)
    found = []
    for step in range(nsteps):
        op = step * (nsmall + 1)
        for number in range(nsmall):
            assert not plans.is_bandwidth_sample(SMALL, of, op + number)
        if plans.is_bandwidth_sample(CALL, of, op + nsmall):
            found.append(step)
    return found


@pytest.mark.parametrize("nsmall", [3, 7, 15])
def test_small_calls_do_not_change_what_is_measured(nsmall: int) -> None:
    """If they counted, the large call would have the same place in every period, and miss it."""
    expected = [step for step in range(2000) if step % 48 < 3]
    assert sampled_steps(0) == sampled_steps(nsmall) == expected


def test_chunks_in_two_levels_do_not_count() -> None:
    """If the 16 chunks counted, the samples would be 37 % of the calls, not 3 in 83."""
    nodes = [rank // 4 for rank in range(16)]
    one_level = PlanCache(0, 16, Fabric(range(4), 4, nodes, RATES), Config())
    teams = [range(first, first + 4) for first in range(0, 16, 4)]
    plans = TwoLevelPlans(0, teams, one_level, Config())
    call, of = replace(CALL, count=2048 * MIB // 4), health(16)
    division = plans.division(call, of)
    assert division is not None
    assert len(division.chunks) == 16
    op = nsamples = 0
    for _ in range(10_000):
        is_sample = plans.is_bandwidth_sample(call, of, op, division)
        nsamples += is_sample
        op += 1 if is_sample else len(division.chunks)
    assert 350 < nsamples < 380


def test_ranks_agree_if_only_some_ask_about_lasting_plans() -> None:
    """Compiled code repeats a call with a lasting plan without a new plan, on some ranks."""
    one, other, chosen = make(), make(1), random.Random(5)
    exchange = replace(CALL, collective=Collective.ALLTOALL)
    for op in range(3000):
        of = health(8) if op < 1000 else health(8, 4, r0n3=0)
        call = chosen.choice((CALL, SMALL, exchange, replace(CALL, count=16 * MIB)))
        plan = one(call, of, op)
        if not plan.is_lasting or chosen.random() < 0.5:
            assert other(call, of, op).is_bandwidth_sample == plan.is_bandwidth_sample


@pytest.mark.parametrize("instead", [COST, SampleCost(7, 9000), None], ids=str)
def test_a_call_that_is_not_made_does_not_count(instead: SampleCost | None) -> None:
    """A rank may ask, fail before the call begins, and make the same or another call."""
    one, other, chosen = begun(), begun(), random.Random(6)
    for op in range(5000):
        if chosen.random() < 0.1:
            one.take(op, instead)
        cost = chosen.choice((COST, None))
        assert one.take(op, cost) == other.take(op, cost)


def test_every_health_begins_a_new_count() -> None:
    samples = BandwidthSamples()
    for version, (is_slow, distance) in enumerate([(False, 48), (True, 16), (False, 48)]):
        samples.begin(version, is_slow=is_slow)
        found = [samples.take(100 * version + age, COST) for age in range(64)]
        assert found == [age % distance < 3 for age in range(64)]


def test_steps_of_several_large_calls_cost_a_hundredth() -> None:
    """Whatever the places of dear and cheap samples in a step, both are bounded together."""
    dear, cheap = SampleCost(1000, 13_000), SampleCost(1000, 100)
    for ndear in range(1, 8):
        step = [dear] * ndear + [cheap] * (8 - ndear)
        for first in range(8):
            samples = begun()
            costs = [step[(first + op) % 8] for op in range(40_000)]
            found = [samples.take(op, cost) for op, cost in enumerate(costs)][64:]
            extra_ns = sum(
                cost.extra_ns for cost, is_one in zip(costs[64:], found, strict=True) if is_one
            )
            assert sum(found) >= 3 * len(found) // 4096
            assert extra_ns <= 0.01 * 1000 * len(found) + 3 * 13_000


def test_a_sample_that_costs_too_much_still_runs_at_times() -> None:
    samples = begun()
    found = [samples.take(op, SampleCost(1, 10**6)) for op in range(20_000)]
    late = [op - 48 for op, is_one in enumerate(found) if is_one and op > 64]
    assert late[:4] == [4096, 4097, 4098, 2 * 4096]
