"""Random jobs of every schedule under random faults: exact results, no hang.

No slice may be wrong, lost, doubled or torn. Every simulation also checks that no two ranks plan a
collective from different versions of the health. ``R2CC_SIM_EXAMPLES`` is the number of plans.
hypothesis shrinks a failing plan, and the message has seed and plan. One rail of every pair is
never lost for good nor excluded, so a job in which no rank dies must end without error.
"""

import itertools
import os

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st
from support.slow import given

from r2ccl.errors import CommunicatorRevoked, PeerLost
from r2ccl.testing.simulation import (
    PAIRS,
    SCHEDULES,
    CallSpec,
    CutPath,
    Exclude,
    FailurePlan,
    Fault,
    Hold,
    Kill,
    Lose,
    NicDown,
    Noise,
    Stop,
    Workload,
    simulate,
)
from r2ccl.types import ReduceOp

EXAMPLES = int(os.environ.get("R2CC_SIM_EXAMPLES", "250"))
#: Numbers of the events of a run, from its start; most runs have 300 to 1,500 events.
EVENTS = st.integers(0, 2_000)
#: Numbers of ranks that are all neighbors in the overlay of the control plane, and that are not.
FEW, MORE = st.integers(2, 4), st.integers(7, 9)
RESTORES_US = st.sampled_from([50, 200, 1_000, 20_000, 150_000, 600_000])
LATE_US = st.sampled_from([0, 100, 1_000, 50_000, 300_000])


@st.composite
def calls(draw: st.DrawFn, nranks: int) -> CallSpec:
    algorithm = draw(st.sampled_from(list(SCHEDULES)))
    count = draw(st.sampled_from([0, 1, 7, 40, 120, 300]))
    # A scan has no mean: each rank reduces another number of ranks.
    pairs = [pair for pair in PAIRS if pair[1] is not ReduceOp.AVG or "scan" not in algorithm]
    dtype, op = draw(st.sampled_from(pairs))
    return CallSpec(
        count=count - count % SCHEDULES[algorithm](nranks, 1).nparts,
        algorithm=algorithm,
        channels=draw(st.sampled_from([1, 2, 3, 6])),
        is_in_place=draw(st.booleans()),
        dtype=dtype,
        op=op,
    )


@st.composite
def workloads(draw: st.DrawFn, nranks: st.SearchStrategy[int]) -> Workload:
    nranks = draw(nranks)
    return Workload(
        nranks=nranks,
        nrails=draw(st.integers(1, 3 if nranks < 5 else 2)),
        calls=tuple(draw(st.lists(calls(nranks), min_size=1, max_size=4))),
        slice_nbytes=draw(st.sampled_from([32, 64, 256])),
        eager_nbytes=draw(st.sampled_from([0, 16, 64, 256])),
        eager_slots=draw(st.sampled_from([1, 2, 4, 16])),
        landing_depth=draw(st.sampled_from([1, 2, 4])),
        busy_ms=tuple(draw(st.lists(st.sampled_from([0, 1, 30, 700]), max_size=nranks))),
        is_loud=draw(st.booleans()),
        is_lazy=draw(st.booleans()),
        max_connections=draw(st.sampled_from([0, 0, 1, 2])),
        # Long enough for eight losses of 0.6 s, each during a redial.
        no_rail_timeout_ms=20_000,
    )


@st.composite
def faults(draw: st.DrawFn, workload: Workload, safe_rail: int) -> Fault:
    at = draw(EVENTS)
    kind = draw(st.sampled_from(["cut", "cut", "cut", "nic", "order", "stop", "lose", "hold"]))
    if kind == "stop":
        ms = draw(st.sampled_from([1, 20, 200, 1_500]))
        return Stop(at, draw(st.integers(0, workload.nranks - 1)), ms)
    if kind == "lose":
        return Lose(at)
    if kind == "hold":
        return Hold(at, draw(st.sampled_from([1, 10, 100, 700])))
    rail = draw(st.integers(0, workload.nrails - 1))
    if kind == "order":
        rank, by = (draw(st.integers(0, workload.nranks - 1)) for _ in range(2))
        return Exclude(at, rank, rail, by, rail != safe_rail and draw(st.booleans()))
    is_for_ever = rail != safe_rail and draw(st.booleans())
    details = {
        "keep": draw(st.integers(0, 7)),
        "late_us": draw(LATE_US),
        "is_stall": draw(st.booleans()),
        "restore_us": 0 if is_for_ever else draw(RESTORES_US),
    }
    a = draw(st.integers(0, workload.nranks - 1))
    if kind == "nic":
        return NicDown(at, a, rail, draw(st.booleans()), **details)
    b = (a + draw(st.integers(1, workload.nranks - 1))) % workload.nranks
    told = tuple(rank for rank in (a, b) if draw(st.booleans()))
    return CutPath(at, a, b, rail, told, **details)


@st.composite
def jobs(
    draw: st.DrawFn, nranks: st.SearchStrategy[int] = FEW
) -> tuple[Workload, FailurePlan, int]:
    workload = draw(workloads(nranks))
    safe_rail = draw(st.integers(0, workload.nrails - 1))
    ports = itertools.product(range(workload.nranks), range(workload.nrails))
    others = [port for port in ports if port[1] != safe_rail]
    if others and draw(st.booleans()):
        excluded = draw(st.sets(st.sampled_from(others)))
        workload = msgspec.structs.replace(workload, excluded=tuple(sorted(excluded)))
    several = st.lists(faults(workload, safe_rail), min_size=1, max_size=8)
    noise = draw(
        st.builds(
            Noise,
            lose=st.sampled_from([0, 0, 10, 30]),
            repeat=st.sampled_from([0, 20]),
            late=st.sampled_from([0, 30, 80]),
            late_ms=st.sampled_from([1, 20, 200]),
        )
    )
    return workload, FailurePlan(tuple(draw(several)), noise), draw(st.integers(0, 1 << 16))


LIMIT = pytest.mark.timeout(300 if EXAMPLES <= 1_000 else 7_200)
UNCHECKED = list(hypothesis.HealthCheck)
random_plans = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=UNCHECKED,
)
larger_plans = hypothesis.settings(random_plans, max_examples=max(1, EXAMPLES // 5))


@LIMIT
@given(min(20, EXAMPLES), EXAMPLES, jobs(), suppress_health_check=UNCHECKED)
def test_every_job_ends_with_the_exact_result(job: tuple[Workload, FailurePlan, int]) -> None:
    check_result(job)


@LIMIT
@given(min(3, EXAMPLES), max(1, EXAMPLES // 5), jobs(MORE), suppress_health_check=UNCHECKED)
def test_every_larger_job_ends_with_the_exact_result(
    job: tuple[Workload, FailurePlan, int],
) -> None:
    check_result(job)


@pytest.mark.slow
@LIMIT
@random_plans
@hypothesis.given(jobs(), EVENTS, st.integers(0, 3))
def test_a_death_beside_all_else_ends_every_survivor_in_time(
    job: tuple[Workload, FailurePlan, int], at: int, rank: int
) -> None:
    """Kill any rank, including rank 0, which coordinates the agreement."""
    check_death(job, at, rank)


@pytest.mark.slow
@LIMIT
@larger_plans
@hypothesis.given(jobs(MORE), EVENTS, st.integers(0, 8))
def test_a_death_in_a_larger_job_ends_every_survivor_in_time(
    job: tuple[Workload, FailurePlan, int], at: int, rank: int
) -> None:
    """Kill any rank, most of which pass on messages of others."""
    check_death(job, at, rank)


def check_result(job: tuple[Workload, FailurePlan, int]) -> None:
    workload, plan, seed = job
    outcome = simulate(workload, plan, seed)
    assert outcome.is_clean, (outcome.errors, outcome.ncalls)


def check_death(job: tuple[Workload, FailurePlan, int], at: int, rank: int) -> None:
    workload, plan, seed = job
    victim = rank % workload.nranks
    faults = (*plan.faults, Kill(at, victim))
    # A death takes the ranks seconds to find, in which many of them probe many paths.
    outcome = simulate(workload, FailurePlan(faults, plan.noise), seed, max_events=1_000_000)
    survivors = [other for other in range(workload.nranks) if other != victim]
    for survivor in survivors:
        error = outcome.errors[survivor]
        is_done = outcome.ncalls[survivor] == len(workload.calls)
        assert is_done if error is None else isinstance(error, PeerLost | CommunicatorRevoked)
    named = {e.peer for e in outcome.errors if isinstance(e, PeerLost)}
    assert named <= {victim}
