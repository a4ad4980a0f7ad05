"""Exclusion of rails at every event of a run: results stay right, the rail stays unused."""

from typing import Any

import msgspec
import pytest
from support.slow import slow_but, sweep

from r2ccl.failover.health.table import WHOLE
from r2ccl.failover.migration.link import SendLink, Slice
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.testing.simulation import (
    CallSpec,
    CutPath,
    Exclude,
    FailurePlan,
    Fault,
    Kill,
    NicDown,
    Noise,
    SimOutcome,
    Workload,
    simulate,
)
from r2ccl.testing.simulation.rank import SimRank
from r2ccl.types import PathKey

CLEARED = Workload(calls=(CallSpec(27),), slice_nbytes=8, eager_nbytes=0)
EAGER = Workload(
    calls=(CallSpec(6, "recursive_doubling", 2), CallSpec(9, channels=2)), eager_nbytes=64
)
#: Long enough for a rail to come back between two calls.
LONG = Workload(nranks=4, calls=(CallSpec(300),) * 4, busy_ms=(700,) * 4)
RANK, RAIL = 2, 1


class Job:
    """A run that counts the slices on the paths of a port when its exclusion is in force."""

    def __init__(
        self,
        workload: Workload,
        *faults: Fault,
        noise: Noise = Noise(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        self.ranks: list[SimRank] = []
        self.at_answers: list[int] = []
        #: Rank and path of each slice sent.
        self.written: list[tuple[int, PathKey]] = []
        job = self

        class Rank(SimRank):
            def __init__(self, *given: object) -> None:
                super().__init__(*given)  # type: ignore[arg-type]
                job.ranks.append(self)
                self._write = self.links.write
                self.links.write = self.write  # type: ignore[method-assign]

            def write(self, link: SendLink, item: Slice, *given: Any, **named: Any) -> None:
                assert item.path is not None
                # A path that is being fenced drops what is written; it is replayed on another.
                if self.links.paths[item.path].state is PathState.UP:
                    job.written.append((self.rank, item.path))
                self._write(link, item, *given, **named)

            def on_answer(self, refusal: str) -> None:
                super().on_answer(refusal)
                job.at_answers.append(job.nslices())

        plan = FailurePlan(faults, noise)
        self.outcome: SimOutcome = simulate(workload, plan, seed, rank_type=Rank)

    def nslices(self, rank: int = RANK, rail: int = RAIL) -> int:
        """Return the number of slices that were sent on the paths of a port."""
        return sum(key.rail == rail and rank in (sender, key.peer) for sender, key in self.written)

    def paths(self, rank: int = RANK, rail: int = RAIL) -> list[Path]:
        return [
            path
            for each in self.ranks
            for key, path in each.links.on_rails.items()
            if key.rail == rail and rank in (each.rank, key.peer)
        ]

    def answers(self) -> list[str]:
        return [answer for rank in self.ranks for answer in rank.answers]

    def check_excluded(self, rank: int = RANK, rail: int = RAIL) -> None:
        """Check that the port is out of use for all ranks."""
        assert self.outcome.is_clean, self.outcome.errors
        for health in self.outcome.known:
            assert (rank, rail) in health.excluded
            assert health.share(rank, rail) == 0
        assert all(path.state is PathState.DOWN for path in self.paths(rank, rail))
        assert self.outcome.verdicts == ((),) * len(self.ranks), "an exclusion is no failure"


@pytest.mark.parametrize("by", [0, 1, RANK])
@pytest.mark.parametrize(
    ("workload", "step"),
    slow_but([(CLEARED, 41), (EAGER, 41)], [(CLEARED, 41), (EAGER, 41), (CLEARED, 1), (EAGER, 1)]),
)
def test_a_rail_is_excluded_at_every_event(workload: Workload, step: int, by: int) -> None:
    for at in range(by, simulate(workload).nevents, step):
        job = Job(workload, Exclude(at, RANK, RAIL, by), seed=at)
        assert job.outcome.is_clean, (at, job.outcome.errors)
        if job.answers():
            assert job.answers() == [""]
            job.check_excluded()
            assert job.at_answers == [job.nslices()], f"event {at}: a slice on an excluded rail"


def test_an_excluded_rail_stays_unused_although_its_nic_works() -> None:
    job = Job(LONG, Exclude(700, RANK, RAIL))
    job.check_excluded()
    assert job.outcome.plans[len(job.outcome.plans)].share(RANK, RAIL) == 0
    assert job.at_answers == [job.nslices()]


@pytest.mark.parametrize("at", range(300, 1_100, 200))
def test_an_included_rail_carries_data_again(at: int) -> None:
    job = Job(LONG, Exclude(at, RANK, RAIL, 1), Exclude(at + 400, RANK, RAIL, 3, False), seed=at)
    assert job.outcome.is_clean
    assert job.answers() == ["", ""]
    for health in job.outcome.known:
        assert (health.excluded, health.share(RANK, RAIL)) == ((), WHOLE)
    assert all(path.state is PathState.UP for path in job.paths())
    assert job.nslices() > job.at_answers[-1]


def test_a_cable_pulled_and_plugged_in_meanwhile_harms_nothing() -> None:
    order = Exclude(700, RANK, RAIL), Exclude(1_600, RANK, RAIL, 0, False)
    job = Job(LONG, *order, NicDown(1_000, RANK, RAIL, restore_us=300_000))
    assert job.outcome.is_clean
    assert job.at_answers[0] == job.at_answers[1], "a slice used the rail between the orders"
    for health in job.outcome.known:
        assert health.share(RANK, RAIL) == WHOLE
    assert all(path.state is PathState.UP for path in job.paths())


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_rail_included_without_its_cable_stays_down(is_seen: bool) -> None:
    order = Exclude(700, RANK, RAIL), Exclude(1_600, RANK, RAIL, 0, False)
    job = Job(LONG, *order, NicDown(1_000, RANK, RAIL, is_seen))
    assert job.outcome.is_clean
    for health in job.outcome.known:
        assert (health.excluded, health.share(RANK, RAIL)) == ((), 0)


@pytest.mark.parametrize("is_restored", [True, False])
@sweep(50, 2)
def test_a_rail_is_excluded_at_every_event_of_its_repair(is_restored: bool, step: int) -> None:
    first = 150
    for at in range(first, first + 200, step):
        cut = CutPath(first, 0, RANK, RAIL, (0, RANK), keep=at % 3, restore_us=300 * is_restored)
        job = Job(CLEARED, cut, Exclude(at, RANK, RAIL, at % 3), seed=at)
        assert job.outcome.is_clean, (at, job.outcome.errors)
        if job.answers():
            assert all(path.state is PathState.DOWN for path in job.paths())
            assert job.at_answers == [job.nslices()], at


@pytest.mark.parametrize("at", slow_but([300], range(200, 500, 20)))
def test_both_ends_of_a_path_are_excluded(at: int) -> None:
    workload = msgspec.structs.replace(LONG, nranks=3)
    orders = Exclude(at, RANK, RAIL, RANK), Exclude(at + at % 7, 0, RAIL, 0)
    job = Job(workload, *orders, seed=at)
    job.check_excluded()
    job.check_excluded(0)
    again = Job(workload, *orders, Exclude(at + 300, RANK, RAIL, 1, False), seed=at)
    again.check_excluded(0)
    up = {path.key.peer for path in again.paths() if path.state is PathState.UP}
    assert up == {1, RANK}, "the path between the other two ends is back, this one is not"


def test_the_last_rail_cannot_be_excluded() -> None:
    orders = [Exclude(700 + rail, RANK, rail, by=rail) for rail in range(3)]
    job = Job(LONG, *orders)
    assert job.outcome.is_clean
    assert sorted(job.answers()) == ["", "", f"rank {RANK} would have no rail left"]
    for health in job.outcome.known:
        assert len(health.excluded) == 2


def test_two_ranks_keep_a_common_rail() -> None:
    orders = Exclude(700, 0, 0), Exclude(800, 1, 1), Exclude(900, 1, 2)
    job = Job(LONG, *orders)
    assert job.outcome.is_clean
    assert sorted(job.answers()) == ["", "", "ranks 1 and 0 would have no common rail left"]


def test_a_rail_that_is_down_is_no_other_rail() -> None:
    down = [NicDown(700, RANK, rail) for rail in (0, 2)]
    job = Job(LONG, *down, Exclude(1_300, RANK, RAIL))
    assert job.outcome.is_clean
    assert job.answers() == [f"rank {RANK} would have no rail left"]


@sweep(20, 1)
def test_an_order_and_its_opposite_at_once_are_both_answered(step: int) -> None:
    for at in range(700, 740, step):
        job = Job(LONG, Exclude(at, RANK, RAIL, 0), Exclude(at, RANK, RAIL, 1, False), seed=at)
        assert job.outcome.is_clean
        assert job.answers() == ["", ""]
        assert len({health.excluded for health in job.outcome.known}) == 1


@pytest.mark.parametrize("by", [0, 1])
def test_rails_declared_failed_are_not_waited_for_and_not_used(by: int) -> None:
    workload = msgspec.structs.replace(LONG, excluded=((RANK, RAIL),))
    whole, job = Job(LONG), Job(workload, NicDown(0, RANK, RAIL))
    job.check_excluded()
    assert job.nslices() == 0
    assert job.outcome.plans[1].share(RANK, RAIL) == 0
    assert job.outcome.time_s < whole.outcome.time_s + 0.5
    job = Job(workload, Exclude(700, RANK, RAIL, by, False))
    assert job.outcome.is_clean
    assert all(health.share(RANK, RAIL) == WHOLE for health in job.outcome.known)
    assert job.nslices() > 0


@pytest.mark.parametrize("at", slow_but([300, 1_320], range(300, 2_000, 170)))
def test_orders_survive_a_noisy_control(at: int) -> None:
    workload = msgspec.structs.replace(LONG, calls=(CallSpec(60),) * 12, busy_ms=(30,))
    orders = [Exclude(at + 60 * i, RANK, RAIL, i % 4, i % 2 == 0) for i in range(7)]
    job = Job(workload, *orders, noise=Noise(lose=20, repeat=20, late=30), seed=at)
    assert job.outcome.is_clean
    assert job.answers() == [""] * 7


@sweep(900, 90)
def test_a_path_closed_as_idle_is_excluded_too(step: int) -> None:
    workload = msgspec.structs.replace(
        LONG, nranks=5, is_lazy=True, max_connections=2, busy_ms=(50,), calls=(CallSpec(60),) * 8
    )
    for at in range(200, 2_000, step):
        job = Job(workload, Exclude(at, RANK, RAIL, at % 5), seed=at)
        assert job.outcome.is_clean, (at, job.outcome.errors)
        assert all(path.state is PathState.DOWN for path in job.paths()), at


@sweep(40, 10)
def test_an_exclusion_beside_a_death_ends_as_the_death_does(step: int) -> None:
    for at in range(300, 420, step):
        job = Job(CLEARED, Exclude(at, RANK, RAIL, 1), Kill(at + at % 20, 0), seed=at)
        assert all(job.outcome.errors[1:]), "the survivors hear of the loss"


@pytest.mark.parametrize("at", slow_but([400, 1_600], range(400, 2_400, 400)))
def test_the_planner_makes_schedules_without_excluded_rails(at: int) -> None:
    calls = (CallSpec(400, "auto", is_planned=True),) * 4
    workload = msgspec.structs.replace(LONG, calls=calls, excluded=((0, 0),))
    job = Job(workload, Exclude(at, RANK, RAIL, 3), Exclude(at + 100, 0, 0, 1, False), seed=at)
    job.check_excluded()
    assert job.at_answers[0] == job.nslices()
