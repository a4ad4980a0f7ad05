"""The control plane of up to 1,024 ranks: agreement, deaths and storms of reports, in virtual time.

Only the control planes and the health agreements are simulated, without data paths. The library's
`Session`, `Overlay` and `HealthAgreement` run as they are. All control messages are on time.
"""

from __future__ import annotations

import math

import pytest
from support.slow import slow_but

from r2ccl.bootstrap.messages import Codec
from r2ccl.failover.health.driver import HealthAgreement
from r2ccl.failover.health.rounds import Commit, Prepare, Promise, Report
from r2ccl.failover.health.table import Health
from r2ccl.testing.simulation.control import SimControl
from r2ccl.testing.simulation.network import End, SimNetwork
from r2ccl.testing.simulation.wire import Timeline

NRAILS = 8
PEER_TIMEOUT_S = 2.0
TICK_S = 0.02
SIZES = slow_but([8, 36], [8, 36, 100, 1024])


class Rank:
    """Control plane and health agreement of one rank."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.rank = rank
        self.is_dead = self.is_stopped = False
        self.nreceived = 0
        self.lost: dict[int, float] = {}
        self._cluster = cluster
        codec = Codec(Report | Prepare | Promise | Commit)
        self.control = SimControl(cluster.network, self, codec, peer_timeout_s=PEER_TIMEOUT_S)
        health = Health.whole(cluster.nranks, NRAILS)
        clock = cluster.timeline
        self.agreement = HealthAgreement(rank, health, control=self.control, clock=clock)

    @property
    def version(self) -> int:
        """Newest version agreed on; -1 while a round is running."""
        return -1 if self.agreement.waits_for() else self.agreement.known.health.version

    def on_message(self, peer: int, message: object) -> None:
        self.nreceived += 1
        self.agreement.on_message(peer, message)  # type: ignore[arg-type]

    def on_path(self, peer: int, rail: int, epoch: int, endpoint: End) -> None:
        raise AssertionError("no data paths are connected")

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        assert peer not in self.lost
        self.lost[peer] = self._cluster.timeline.now
        self.agreement.peer_lost(peer)

    def tick(self) -> None:
        if not self.is_dead:
            self.control.tick(0.0)
            self.agreement.tick(self._cluster.timeline.now)
            self._cluster.timeline.after(TICK_S, self.tick)


class Cluster:
    """All ranks, one per node, after their sessions were connected."""

    def __init__(self, nranks: int, seed: int = 1) -> None:
        self.nranks = nranks
        self.timeline = Timeline(seed)
        self.network = SimNetwork(self.timeline, nranks, 0)
        self.ranks = [Rank(self, rank) for rank in range(nranks)]
        controls = {each.rank: each.control for each in self.ranks}
        for each in self.ranks:
            each.control.connect(controls)
            self.timeline.after(TICK_S * self.timeline.random.random(), each.tick)

    @property
    def delay_s(self) -> float:
        """Longest one-way delay of a message."""
        return self.network.latency_s * (1.0 + self.network.jitter)

    def run(self, duration_s: float) -> None:
        end_s = self.timeline.now + duration_s
        while self.timeline.now < end_s:
            self.timeline.step()

    def run_until_agreed(self, limit_s: float) -> float:
        """Return how long all ranks took to plan with the same, new version."""
        begun_s = self.timeline.now
        before = {each.version for each in self.ranks}
        while True:
            versions = {each.version for each in self.ranks}
            if len(versions) == 1 and versions != before and -1 not in versions:
                return self.timeline.now - begun_s
            assert self.timeline.now - begun_s < limit_s, versions
            self.run(self.delay_s / 10)


@pytest.mark.parametrize("nranks", SIZES)
def test_all_ranks_agree_within_4_log2_n_delays(nranks: int) -> None:
    cluster = Cluster(nranks)
    cluster.run(0.1)
    before = [each.nreceived for each in cluster.ranks]
    cluster.ranks[nranks - 3].agreement.report_down(nranks - 3, 5)
    limit_s = 4 * math.log2(nranks) * cluster.delay_s
    assert cluster.run_until_agreed(limit_s) <= limit_s
    assert {each.agreement.known.health.share(nranks - 3, 5) for each in cluster.ranks} == {0}
    most = max(each.nreceived - old for each, old in zip(cluster.ranks, before, strict=True))
    assert most <= 4 * math.ceil(math.log2(nranks)) + 4, "no rank is a bottleneck"


@pytest.mark.parametrize("nranks", SIZES)
def test_a_storm_of_losses_ends_in_few_rounds(nranks: int) -> None:
    cluster = Cluster(nranks)
    cluster.run(0.1)
    lost = [(each * 37 % nranks, each % NRAILS) for each in range(100)]
    for rank, rail in lost:
        cluster.ranks[rank].agreement.report_down(rank, rail)
    rest_s = 0.02
    cluster.run(4 * (rest_s + TICK_S + 4 * math.log2(nranks) * cluster.delay_s))
    (health,) = {each.agreement.known.health for each in cluster.ranks}
    assert {each.version for each in cluster.ranks} == {health.version}
    assert all(health.share(rank, rail) == 0 for rank, rail in lost)
    assert health.version <= 4


#: Victims that do not all have the same watchers.
MANY = [64, 65, 66, 67, 68, 69, 70, 71]


@pytest.mark.parametrize("nranks", SIZES)
@pytest.mark.parametrize("victims", slow_but([[0], MANY], [[0], [1], [4], MANY]), ids=str)
def test_all_ranks_learn_of_a_death(nranks: int, victims: list[int]) -> None:
    victims = sorted({victim % nranks for victim in victims})[: nranks // 2]
    cluster = Cluster(nranks)
    cluster.run(0.1)
    for victim in victims:
        cluster.ranks[victim].is_dead = True
    died_s = cluster.timeline.now
    cluster.run(PEER_TIMEOUT_S + PEER_TIMEOUT_S / 5 + 2 * TICK_S)
    alive = [each for each in cluster.ranks if not each.is_dead]
    for each in alive:
        assert set(each.lost) == set(victims)
    for victim in victims:
        found_s = [each.lost[victim] for each in alive]
        assert min(found_s) - died_s > PEER_TIMEOUT_S - 1.0, "not before its timeout"
        assert max(found_s) - min(found_s) <= 2 * math.log2(nranks) * cluster.delay_s + TICK_S


@pytest.mark.parametrize("nranks", slow_but([8], [8, 100]))
def test_both_sides_of_a_partition_lose_each_other(nranks: int) -> None:
    cluster = Cluster(nranks)
    cluster.run(0.1)
    first = range(nranks // 4)
    sides = set(first), set(range(nranks)) - set(first)
    for each in cluster.ranks:
        near = each.control.peers
        side = next(side for side in sides if each.rank in side)
        each.control.peers = {
            peer: control if peer in side else Nobody() for peer, control in near.items()
        }  # type: ignore[assignment]
    cluster.run(PEER_TIMEOUT_S + 0.5 + 4 * TICK_S)
    for here, there in (sides, sides[::-1]):
        for rank in here:
            assert set(cluster.ranks[rank].lost) == there


class Nobody:
    """A control plane that cannot be reached."""

    def _receive(self, peer: int, carrier: int, data: bytes) -> None:
        return
