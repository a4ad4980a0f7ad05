"""Which schedule a call runs: alike on all ranks, and what is expected to end first."""

from __future__ import annotations

import pytest
from healths import health
from hypothesis import given, settings
from hypothesis import strategies as st

from r2ccl.algos.packed_trees import lower_bound
from r2ccl.config import ALGOS, Config
from r2ccl.planner import Choice, Fabric, plan
from r2ccl.resilience.health import WHOLE, Health
from r2ccl.schedule.check import check
from r2ccl.spread import port_time
from r2ccl.types import ROOTED, CallSignature, Collective, ReduceOp

MIB = 1 << 20


def call(collective: Collective, root: int = 0) -> CallSignature:
    return CallSignature(collective, 0, ReduceOp.SUM, 0, root)


def choose(
    nbytes: int,
    of: Health,
    collective: Collective = Collective.ALLREDUCE,
    root: int = 0,
    algo: str = "ring",
) -> Choice:
    fabric = Fabric(range(of.nrails), of.nrails)
    return plan(call(collective, root), nbytes, fabric, of, Config(algo=algo))


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("nbytes", [0, 1000, 1 << 26])
@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_there_is_a_schedule_for_every_call(
    collective: Collective, nbytes: int, nranks: int
) -> None:
    schedule = choose(nbytes, health(nranks, 3), collective, nranks - 1).schedule
    check(schedule)
    computes = "allreduce" if collective is Collective.BARRIER else collective.name.lower()
    assert (schedule.collective, schedule.nranks) == (computes, nranks)
    assert schedule.root == (nranks - 1 if collective in ROOTED else 0)


def test_small_data_takes_few_steps_and_large_data_is_sent_once() -> None:
    for collective in ROOTED:
        small = choose(1000, health(16, 3), collective, 3).schedule.cost
        large = choose(1 << 26, health(16, 3), collective, 3).schedule.cost
        assert small.steps <= 5 < large.steps
        assert large.sent <= 1 < max(small.sent, small.received)


def test_channels_are_as_many_as_the_data_is_worth() -> None:
    counts = [
        choose(nbytes, health(4, 3), Collective.BROADCAST).schedule.nchannels
        for nbytes in (1000, 1 << 19, 1 << 26)
    ]
    assert counts == [1, 2, 6]


@pytest.mark.parametrize("algo", ALGOS)
def test_the_named_schedule_runs(algo: str) -> None:
    named = {"tree": "double_binary_tree"}.get(algo, algo)
    assert choose(64 * MIB, health(), algo=algo).schedule.name == named
    assert choose(1000, health(), algo=algo).schedule.name == "recursive_doubling"


def test_trees_leave_a_dead_port_alone_and_have_slices_enough() -> None:
    lost = choose(64 * MIB, health(r1n0=0), algo="packed_trees")
    assert lost.slice_nbytes < Config().slice_nbytes
    assert all(edge.number % 4 != 1 for edge in lost.placement.edges if 0 in edge[1:3])
    bound = lower_bound([48, 64, 64, 64])
    assert port_time(lost.schedule, lost.placement, range(4), health(r1n0=0)) <= bound * 21 / 20


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, WHOLE), min_size=12, max_size=12), st.sampled_from(ALGOS))
def test_every_health_gives_a_schedule_that_is_right(shares: list[int], algo: str) -> None:
    of = Health(1, 4, bytes(shares))
    first, again = (choose(8 * MIB, of, algo=algo) for _ in range(2))
    check(first.schedule)
    assert first.placement == again.placement
    assert len(first.placement.weights) == first.schedule.nchannels
