"""Exact results of every schedule, operation and element type, whatever fails at any moment.

The expected result is computed with NumPy alone, in the schedule's own order
(`r2ccl.testing.simulation.data`); every simulation compares the results of all ranks with it.

With ``R2CC_SIM_EXAMPLES`` of 20,000 or more, rails are cut at every event with four ranks too, and
ports of planned schedules are lost at many more moments.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import random
import sys
from typing import Any

import pytest
from support.slow import slow_but, sweep

from r2ccl import algos
from r2ccl.config import ALGOS
from r2ccl.failover.health.table import RailShare
from r2ccl.testing.simulation import (
    PAIRS,
    SCHEDULES,
    CallSpec,
    CutPath,
    FailurePlan,
    Fault,
    NicDown,
    Workload,
    simulate,
)
from r2ccl.types import PAIRWISE, Collective, ReduceOp

IS_THOROUGH = int(os.environ.get("R2CC_SIM_EXAMPLES", "0")) >= 20_000
LIMIT = pytest.mark.timeout(7200 if IS_THOROUGH else 120)
RAILS = 2
#: Ranks of the jobs in which every event is tried; ranks 0 and 1 are not neighbours in a bridged
#: ring of 4.
SIZES = (3, 4) if IS_THOROUGH else (3,)
FOUR = frozenset({"bridged_ring"})


def job(schedule: str, nranks: int, *, eager_nbytes: int = 0, **call: object) -> Workload:
    """Return a job of one collective, in slices of two or four elements."""
    spec = CallSpec(12, schedule, 2, **call)  # type: ignore[arg-type]
    return Workload(nranks, RAILS, (spec,), slice_nbytes=8, eager_nbytes=eager_nbytes)


def breakage(at: int, nranks: int) -> Fault:
    """Return a fault before event `at`; its path or port, and other fields, vary with `at`."""
    a, rail = at % nranks, at // nranks % RAILS
    keep, late_us, restore_us = at % 4, (0, 50, 500)[at % 3], 400 * (at // 7 % 2)
    if at % 4 == 3:
        return NicDown(at, a, rail, at % 8 < 4, keep, late_us, restore_us=restore_us)
    b = (a + 1 + at // 5 % (nranks - 1)) % nranks
    told = ((a, b), (b,), ())[at // 2 % 3]
    return CutPath(at, a, b, rail, told, keep, late_us, at % 5 == 0, restore_us)


@LIMIT
@sweep(13, 1)
@pytest.mark.parametrize(
    "schedule", slow_but(["ring", "packed_trees", "direct/alltoall"], SCHEDULES)
)
def test_a_rail_is_cut_at_every_event(schedule: str, step: int) -> None:
    for nranks in (4,) if schedule in FOUR else SIZES:
        workload = job(schedule, nranks)
        clean = simulate(workload)
        assert clean.is_clean
        repairs = 0
        for at in range(clean.began[1], clean.nevents, step):
            fault = breakage(at, nranks)
            outcome = simulate(workload, FailurePlan((fault,)), seed=at)
            assert outcome.is_clean, (fault, outcome.errors)
            repairs += outcome.repairs
        assert repairs > clean.nevents // step // 2, (
            "hardly a cut was noticed: the test shows nothing"
        )


def makers_of_schedules() -> dict[Any, str]:
    """Return the public functions of the algorithms that build schedules: their code and name."""
    modules = [
        importlib.import_module(f"{algos.__name__}.{each.name}")
        for each in pkgutil.iter_modules(algos.__path__)
    ]
    return {
        value.__code__: f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
        and getattr(value, "__annotations__", {}).get("return") == "Schedule"
    }


def test_every_algorithm_and_collective_is_simulated() -> None:
    called, made = set(), []
    sys.setprofile(lambda frame, event, arg: called.add(frame.f_code))
    try:
        made = [make(4, 2) for make in SCHEDULES.values()]
    finally:
        sys.setprofile(None)
    makers = makers_of_schedules()
    assert len(makers) > 20
    assert [name for code, name in makers.items() if code not in called] == []
    computed = {each.name.lower() for each in set(Collective) - PAIRWISE - {Collective.BARRIER}}
    assert {schedule.collective for schedule in made} == computed
    parted = {SCHEDULES[name](4, 2).collective for name in PARTED}
    assert parted >= {each.name.lower().removesuffix("v") for each in PAIRWISE}


@LIMIT
@sweep(5, 1)
@pytest.mark.parametrize("nranks", slow_but([3], [2, 3, 5]))
def test_a_barrier_survives_a_cut_at_every_event(nranks: int, step: int) -> None:
    """A barrier is an allreduce of no elements."""
    workload = Workload(nranks, RAILS, (CallSpec(0, "recursive_doubling", 1),) * 3)
    clean = simulate(workload)
    assert clean.is_clean
    repairs = 0
    for at in range(clean.began[1], clean.nevents, step):
        outcome = simulate(workload, FailurePlan((breakage(at, nranks),)), seed=at)
        assert outcome.is_clean, (at, outcome.errors)
        repairs += outcome.repairs
    assert repairs > clean.nevents // step // 4, "hardly a cut was noticed: the test shows nothing"


#: Schedules whose parts can differ in size.
PARTED = (
    "ring/allgather",
    "ring/reduce_scatter",
    "dissemination/allgather",
    "dissemination/reduce_scatter",
    "spanning_tree/allgather",
    "spanning_tree/reduce_scatter",
    "direct/alltoall",
    "direct/gather",
    "direct/scatter",
)


@LIMIT
@sweep(13, 1 if IS_THOROUGH else 2)
@pytest.mark.parametrize("eager_nbytes", [0, 16])
@pytest.mark.parametrize("schedule", slow_but(["direct/alltoall"], PARTED))
def test_parts_of_any_size_survive_a_cut_at_every_event(
    schedule: str, eager_nbytes: int, step: int
) -> None:
    """Move parts of no, a few and many elements; with `eager_nbytes`, small ones are sent whole."""
    sizes = (17, 0, 2)
    spec = CallSpec(sum(sizes), schedule, 2, sizes=sizes)
    workload = Workload(3, RAILS, (spec,), slice_nbytes=8, eager_nbytes=eager_nbytes)
    clean = simulate(workload)
    assert clean.is_clean
    repairs = 0
    moments = range(clean.began[1], clean.nevents, step)
    for at in moments:
        outcome = simulate(workload, FailurePlan((breakage(at, 3),)), seed=at)
        assert outcome.is_clean, (at, outcome.errors)
        repairs += outcome.repairs
    assert repairs > len(moments) // 2, "hardly a cut was noticed: the test shows nothing"


@LIMIT
@sweep(7, 1)
@pytest.mark.parametrize("schedule", slow_but(["ring"], SCHEDULES))
def test_every_operation_and_element_type_survives_a_cut(schedule: str, step: int) -> None:
    """Use eager slices in every other run, and separate output memory in every third."""
    draw = random.Random(schedule)
    repairs = 0
    # A mean over the ranks up to each rank is refused: see `r2ccl.runtime.arguments`.
    pairs = [pair for pair in PAIRS if pair[1] is not ReduceOp.AVG or "scan" not in schedule]
    pairs = pairs[::step]
    for number, (dtype, op) in enumerate(pairs):
        workload = job(
            schedule,
            4 if schedule in FOUR else 3,
            eager_nbytes=64 * (number % 2),
            dtype=dtype,
            op=op,
            is_in_place=number % 3 > 0,
        )
        clean = simulate(workload)
        assert clean.is_clean
        at = draw.randrange(clean.began[1], clean.nevents)
        outcome = simulate(workload, FailurePlan((breakage(at, workload.nranks),)), seed=at)
        assert outcome.is_clean, (workload, at, outcome.errors)
        repairs += outcome.repairs
    assert repairs > len(pairs) // 2, "hardly a cut was noticed: the test shows nothing"


@LIMIT
@pytest.mark.parametrize("nranks", slow_but([2], [2, 4]))
@pytest.mark.parametrize(
    "schedule", slow_but(["ring"], ["ring", "recursive_doubling", "ring/reduce_scatter"])
)
def test_every_operation_and_element_type_is_exact(schedule: str, nranks: int) -> None:
    for dtype, op in PAIRS:
        assert simulate(job(schedule, nranks, dtype=dtype, op=op)).is_clean, (dtype, op)


@LIMIT
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_a_mean_over_nine_ranks_is_exact(dtype: str) -> None:
    """Divide by a number that not all of these types can represent."""
    assert simulate(job("ring", 9, dtype=dtype, op=ReduceOp.AVG)).is_clean


#: Rank 1 has half of its rail 0 from the beginning, and rank 2 loses its rail 1 before the first
#: call; the second call is planned for both.
SLOW, FIRST = RailShare(1, 0, 8), (2, 1)
#: Ports lost in the second call: every two ranks keep a common rail.
SECOND, THIRD = (0, 0), (3, 2)
#: Events between these losses: during the first repair, and long afterwards.
GAPS = (5, 40, 200)
#: Numbers of moments of the second call to try.
QUICK, MOMENTS = 3, 200 if IS_THOROUGH else 10


@LIMIT
@pytest.mark.parametrize("nmoments", slow_but([QUICK], [QUICK, MOMENTS]))
@pytest.mark.parametrize("is_seen", [True, False], ids=["carrier lost", "silent"])
@pytest.mark.parametrize("algo", slow_but(["packed_trees"], ALGOS))
def test_a_schedule_for_one_failure_survives_two_more(
    algo: str, is_seen: bool, nmoments: int
) -> None:
    """Let the planner make the schedule for the remaining ports, then lose two more."""
    calls = (CallSpec(12), CallSpec(96, algo, is_planned=True))
    workload = Workload(
        4, 3, calls, slice_nbytes=16, eager_nbytes=0, busy_ms=(700,) * 4, slow=(SLOW,)
    )
    first = NicDown(simulate(workload).began[1] - 1, *FIRST)
    before = simulate(workload, FailurePlan((first,)))
    assert before.is_clean
    assert before.plans[2].share(*FIRST) == 0, "the call was planned before all knew"
    begin, end = before.began[2], before.nevents
    moments = range(begin, end, max(1, (end - begin) // nmoments))
    repairs = 0
    for at, gap in zip(moments, itertools.cycle(GAPS), strict=False):
        faults = (
            first,
            NicDown(at, *SECOND, is_seen, keep=at % 3),
            NicDown(at + gap, *THIRD, is_seen, late_us=at % 7 * 100),
        )
        outcome = simulate(workload, FailurePlan(faults))
        assert outcome.is_clean, (faults, outcome.errors)
        assert outcome.began[2] == before.began[2], "runs of one seed differ before the fault"
        repairs += outcome.repairs - before.repairs
    assert repairs > len(moments), "few ports were missed: the test shows nothing"
