"""Ranks above their number of connections close idle paths, and nothing is lost by that.

The schedules of successive calls name different ranks, so a rank that may keep paths to one or two
ranks closes and reopens paths at most calls, at times that differ from rank to rank.
"""

import random

import pytest
from support.slow import slow_but, sweep

from r2ccl.failover.migration.path import PathState
from r2ccl.testing.simulation import (
    CallSpec,
    CutPath,
    FailurePlan,
    Fault,
    NicDown,
    Noise,
    Stop,
    Workload,
    simulate,
)
from r2ccl.testing.simulation.network import SimNetwork
from r2ccl.testing.simulation.rank import RankPhase, SimRank
from r2ccl.testing.simulation.run import MAX_EVENTS, World
from r2ccl.types import PathKey

#: Schedules that name neighbours at distance 1, at 1, 2 and 4, and of a tree.
ALTERNATING = ("ring", "recursive_doubling", "dissemination", "tree/broadcast", "ring", "one_shot")


def workload(nranks: int, limit: int, *, busy_ms: tuple[int, ...] = (40,)) -> Workload:
    calls = tuple(CallSpec(48, algorithm, channels=2) for algorithm in ALTERNATING)
    return Workload(
        nranks, 2, calls, busy_ms=busy_ms, is_lazy=True, max_connections=limit,
        slice_nbytes=16, no_rail_timeout_ms=20_000,
    )  # fmt: skip


def test_idle_paths_are_closed_and_connected_again() -> None:
    unlimited, limited = (simulate(workload(8, limit)) for limit in (0, 2))
    assert unlimited.is_clean
    assert limited.is_clean
    assert limited.nmessages > unlimited.nmessages
    assert limited.repairs == 0
    assert not any(limited.verdicts)


@pytest.mark.parametrize(
    ("nranks", "nseeds"), slow_but([(5, 3), (6, 3)], [(5, 3), (6, 3), (5, 10), (6, 10)])
)
def test_rails_that_connect_again_need_no_bypass(nranks: int, nseeds: int) -> None:
    for seed in range(nseeds):
        assert simulate(workload(nranks, 1), seed=seed).nbypasses == 0


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize(
    ("nranks", "nseeds"),
    slow_but([(5, 2), (8, 1)], [(5, 2), (8, 1), *((n, 20) for n in range(3, 10))]),
)
def test_ranks_at_different_speeds_lose_nothing(nranks: int, nseeds: int, limit: int) -> None:
    for seed in range(nseeds):
        job = workload(nranks, limit, busy_ms=(40, 30 + seed, 70, 20, 3 * seed))
        outcome = simulate(job, FailurePlan((), Noise(late=30, late_ms=20)), seed)
        assert outcome.is_clean, (seed, outcome.errors)


@pytest.mark.parametrize("is_seen", [True, False])
@sweep(1009, 37)
def test_a_nic_goes_down_while_idle_paths_are_closed(is_seen: bool, step: int) -> None:
    job = workload(6, 2)
    for at in range(0, simulate(job).nevents, step):
        down = NicDown(at, at % 6, at // 6 % 2, is_seen, keep=at % 3, restore_us=50_000 * (at % 2))
        outcome = simulate(job, FailurePlan((down,)), seed=at)
        assert outcome.is_clean, (down, outcome.errors)


@sweep(809, 29)
def test_a_path_is_cut_while_idle_paths_are_closed(step: int) -> None:
    job = workload(5, 1)
    for at in range(0, simulate(job).nevents, step):
        a, b = at % 5, (at + 1 + at // 5 % 4) % 5
        cut = CutPath(at, a, b, at % 2, (a,), keep=at % 4, late_us=500, restore_us=1_000)
        outcome = simulate(job, FailurePlan((cut,)), seed=at)
        assert outcome.is_clean, (cut, outcome.errors)


class ClosingRank(SimRank):
    """Rank that closes an idle path before many of its turns, as if it needed another one."""

    def _turn(self) -> None:
        chance = random.Random(self._timeline.count)
        is_busy = self.phase in (RankPhase.JOINING, RankPhase.CALLING)
        if (is_busy or self.phase is RankPhase.COMPUTING) and chance.random() < 0.3:
            assert self._task is not None or not is_busy
            needed = self._task.layout.peers if is_busy and self._task is not None else ()
            idle = [peer for peer in self.links.idle_peers() if peer not in needed]
            if idle and self.revocation.error is None and not self.is_stopped and not self.is_dead:
                self.migration.close_idle(chance.choice(idle))
        super()._turn()


def left_behind(world: World) -> list[tuple[int, PathKey]]:
    """Return the paths that are down although both ranks use paths to each other.

    Paths that are being repaired, connected or probed are left out.
    """
    found = []
    for rank in world.ranks:
        for key, path in rank.links.on_rails.items():
            peer, back = world.ranks[key.peer], PathKey(rank.rank, key.rail)
            states = {
                end.links.paths[PathKey(other, rail)].state
                for end, other in ((rank, peer.rank), (peer, rank.rank))
                for rail in range(world.network.nrails)
                if PathKey(other, rail) in end.links.paths
            }
            is_used = key.peer in rank.links.connected and rank.rank in peer.links.connected
            if (
                is_used
                and not states & {PathState.FENCING, PathState.FENCED}
                and path.state is peer.links.paths[back].state is PathState.DOWN
                and not rank.control.is_connecting(*key, path.epoch)
                and key not in rank.failover.failback.held()
            ):
                found.append((rank.rank, key))
    return found


@pytest.mark.parametrize("seed", slow_but((1, 17, 103), range(200)))
def test_paths_closed_at_any_time_lose_no_rail(seed: int) -> None:
    draw = random.Random(seed)
    nranks, nrails = draw.randrange(2, 6), draw.randrange(1, 4)
    calls = tuple(CallSpec(60, draw.choice(ALTERNATING), channels=2) for _ in range(8))
    busy_ms = tuple(draw.choice((0, 3, 20, 30, 70, 150)) for _ in range(nranks))
    job = Workload(
        nranks, nrails, calls, busy_ms=busy_ms, is_lazy=True, max_connections=1, slice_nbytes=16,
        no_rail_timeout_ms=20_000, fabric="none", is_loud=bool(seed % 2),
    )  # fmt: skip
    faults: list[Fault] = []
    for _ in range(draw.randrange(16)):
        a, b = draw.sample(range(nranks), 2)
        at, rail = draw.randrange(4000), draw.randrange(nrails)
        told, restore_us = draw.choice(((a,), (a, b), ())), draw.choice((100, 1000, 50_000))
        cut = CutPath(at, a, b, rail, told, keep=at % 4, late_us=500, restore_us=restore_us)
        faults.append(draw.choice((cut, cut, cut, Stop(at, a, 60))))
    plan = FailurePlan(tuple(faults), Noise(lose=10, late=20, late_ms=60 * (seed % 2)))
    world = World(job, plan, seed, SimNetwork, ClosingRank)
    outcome = world.run(MAX_EVENTS)
    assert outcome.is_clean, outcome.errors
    assert left_behind(world) == []
