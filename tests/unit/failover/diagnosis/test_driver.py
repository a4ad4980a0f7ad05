"""The diagnosis's own decisions: when it asks whom, what it answers, and what it keeps."""

import logging
from collections.abc import Callable

import pytest

from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.config import Config
from r2ccl.failover.diagnosis.driver import MAX_DIAGNOSES, MAX_SERVED, Diagnosis
from r2ccl.failover.diagnosis.port_map import port_map_of
from r2ccl.failover.diagnosis.verdict import Finding, ProbeReply, ProbeRequest, Verdict, VerdictKind
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.transport.base import Probed
from r2ccl.types import Nic, PathKey, ProbeKey

A = PathKey(1, 0)
CARRIER = "CARRIER_DOWN: no carrier"


class Wire:
    """A transport that is only asked what it knows."""

    nrails = 2
    stuck = False

    def joins(self, rail: int) -> bool:
        return False

    def is_stuck(self, path: PathKey) -> bool:
        return self.stuck


class World:
    """Rank 0 of `nranks`, each on a host of its own, with two rails."""

    def __init__(self, nranks: int = 4) -> None:
        self.now = 0.0
        self.wire = Wire()
        self.sent: list[tuple[int, object]] = []
        self.asked: list[tuple[ProbeKey, Callable[[Probed], None]]] = []
        self.told: list[Verdict] = []
        self.paths = {
            PathKey(peer, rail): Path(PathKey(peer, rail))
            for peer in range(1, nranks)
            for rail in range(2)
        }
        for path in self.paths.values():
            path.state = PathState.UP
        self.diagnosis = Diagnosis(
            0,
            nranks,
            paths=self.paths,
            transport=self.wire,  # type: ignore[arg-type]
            control=self,
            ask=lambda key, on_answer: self.asked.append((key, on_answer)),
            config=Config(),
            clock=lambda: self.now,
            sequel=lambda key, epoch: f"moved from {key.rail} in epoch {epoch}",
            on_verdict=self.told.append,
        )

    def send(self, peer: int, message: object) -> None:
        self.sent.append((peer, message))

    def broadcast(self, message: object) -> None:
        raise AssertionError(f"a verdict concerns one peer, not all: {message}")

    def fail(self, key: PathKey, cause: str = "EIO: gone", *, is_own: bool = True) -> None:
        epoch = self.paths[key].epoch
        self.paths[key].state = PathState.DOWN
        self.diagnosis.failed(key, epoch, cause, is_own=is_own)

    def tick(self, seconds: float = 0.0, *, is_calm: bool = True) -> None:
        self.now += seconds
        self.diagnosis.tick(self.now, is_calm=is_calm)

    def answer(self, is_answered: Callable[[ProbeKey], bool | None]) -> None:
        """Answer every probe this rank has asked for so far."""
        asked, self.asked = self.asked, []
        for key, on_answer in asked:
            on_answer(Probed(key, is_answered(key), ""))

    def reply(self, is_answered: Callable[[int, ProbeKey], bool]) -> None:
        """Answer every request to another rank."""
        for peer, message in list(self.sent):
            if isinstance(message, ProbeRequest):
                told = is_answered(peer, message.key)
                reply = ProbeReply(message.number, message.key, told, "")
                self.diagnosis.on_message(peer, reply)

    def kinds(self) -> dict[PathKey, VerdictKind]:
        return {verdict.path: verdict.kind for verdict in self.diagnosis.verdicts()}

    def findings(self) -> list[tuple[int, VerdictKind]]:
        return [(peer, each.kind) for peer, each in self.sent if isinstance(each, Finding)]


def test_a_ports_own_word_is_a_verdict_without_a_question() -> None:
    world = World()
    world.fail(A, CARRIER)
    world.tick()
    assert world.kinds() == {A: VerdictKind.LOCAL_NIC}
    assert world.asked == []
    assert world.findings() == [(1, VerdictKind.LOCAL_NIC)]
    assert [verdict.kind for verdict in world.told] == [VerdictKind.LOCAL_NIC]


def not_told_apart() -> World:
    """Two ranks, and no way between rails: nobody else can be asked."""
    world = World(nranks=2)
    world.fail(A, "LOC_QP_OP_ERR: gone")
    world.tick()
    for _ in range(4):
        world.answer(lambda key: key.rail == 1 if key.rail == key.via else None)
        world.tick(0.1)
    return world


def test_a_ports_word_that_comes_late_names_it_at_both_ends() -> None:
    world = not_told_apart()
    assert world.kinds() == {A: VerdictKind.PATH}
    world.diagnosis.port_down(0, CARRIER)
    assert world.kinds() == {A: VerdictKind.LOCAL_NIC}
    assert world.findings() == [(1, VerdictKind.LOCAL_NIC)]


def test_a_ports_word_is_worth_more_than_what_came_before_it() -> None:
    world = World()
    world.fail(A, "LOC_QP_OP_ERR: gone")
    world.diagnosis.port_down(0, CARRIER)
    world.tick()
    assert world.kinds() == {A: VerdictKind.LOCAL_NIC}
    assert world.asked == []


def test_a_finding_says_more_than_a_path_that_was_not_told_apart() -> None:
    world = not_told_apart()
    finding = Finding(0, 0, VerdictKind.LOCAL_NIC, "CARRIER_DOWN")
    world.diagnosis.on_message(1, finding)
    assert world.kinds() == {A: VerdictKind.REMOTE_NIC}
    world.diagnosis.on_message(1, Finding(0, 0, VerdictKind.LINK, "something else"))
    assert world.kinds() == {A: VerdictKind.REMOTE_NIC}


def test_what_the_peer_only_repeats_is_no_evidence_of_its_own() -> None:
    world = World()
    world.fail(A, CARRIER)
    world.fail(A, f"reported by rank 0: {CARRIER}", is_own=False)
    world.tick()
    assert world.kinds() == {A: VerdictKind.LOCAL_NIC}


def test_a_later_word_of_the_other_port_revises_the_verdict() -> None:
    world = World()
    world.fail(A, CARRIER)
    world.tick()
    world.fail(A, CARRIER, is_own=False)
    assert world.kinds() == {A: VerdictKind.RAIL}
    assert [verdict.kind for verdict in world.told] == [VerdictKind.LOCAL_NIC, VerdictKind.RAIL]


def test_repairs_come_first_but_not_for_ever() -> None:
    world = World()
    world.fail(A)
    world.tick(0.05, is_calm=False)
    assert world.asked == []
    world.tick(0.06, is_calm=False)
    assert [key for key, _ in world.asked] == [ProbeKey(1, 0, 0)]


def test_a_cut_pair_is_found_by_third_ranks_and_told_to_the_peer() -> None:
    world = World()
    world.fail(A)
    world.tick()
    world.answer(lambda key: False)
    requests = [(peer, m.key) for peer, m in world.sent if isinstance(m, ProbeRequest)]
    assert (2, ProbeKey(1, 0, 0)) in requests
    assert (1, ProbeKey(0, 0, 0)) in requests
    world.answer(lambda key: True)
    world.reply(lambda peer, key: peer != 1)
    assert world.kinds() == {A: VerdictKind.LINK}
    assert world.findings() == [(1, VerdictKind.LINK)]


def test_replies_that_never_come_end_the_inquiry_at_its_deadline() -> None:
    world = World(nranks=2)
    world.fail(A)
    world.tick()
    world.answer(lambda key: False)
    world.answer(lambda key: False)
    assert world.kinds() == {}
    world.tick(0.4)
    world.answer(lambda key: False)
    world.tick(0.4)
    assert world.kinds() == {A: VerdictKind.PEER}


def test_a_reply_of_another_rank_or_question_is_ignored() -> None:
    world = World()
    world.fail(A)
    world.tick()
    world.answer(lambda key: False)
    world.answer(lambda key: True)
    peer, request = next((p, m) for p, m in world.sent if isinstance(m, ProbeRequest) and p == 2)
    world.diagnosis.on_message(3, ProbeReply(request.number, request.key, True, ""))
    world.diagnosis.on_message(peer, ProbeReply(request.number, ProbeKey(3, 1, 1), True, ""))
    world.diagnosis.on_message(peer, ProbeReply(99, request.key, True, ""))
    assert world.kinds() == {}
    world.diagnosis.on_message(peer, ProbeReply(request.number, request.key, True, ""))
    assert world.kinds() == {A: VerdictKind.LINK}


def test_a_finding_settles_what_is_open_and_is_not_sent_back() -> None:
    world = World()
    world.fail(A)
    world.tick()
    world.diagnosis.on_message(1, Finding(0, 0, VerdictKind.LOCAL_NIC, "x" * 10_000))
    assert world.kinds() == {A: VerdictKind.REMOTE_NIC}
    assert world.findings() == []
    assert len(str(world.told[0])) < 1_000


def test_a_finding_that_comes_before_the_failure_is_kept_for_it() -> None:
    world = World()
    world.diagnosis.on_message(1, Finding(0, 0, VerdictKind.LINK, "found"))
    assert world.kinds() == {}
    world.fail(A)
    world.tick()
    assert world.kinds() == {A: VerdictKind.LINK}
    assert world.findings() == []


def test_a_finding_about_a_suspect_counts_once_it_fails() -> None:
    world = World()
    world.diagnosis.suspect(A)
    world.diagnosis.on_message(1, Finding(0, 0, VerdictKind.LINK, "found"))
    assert world.kinds() == {}
    world.fail(A)
    assert world.kinds() == {A: VerdictKind.LINK}
    assert world.findings() == []


def test_a_finding_of_the_next_epoch_outlives_this_one() -> None:
    world = World()
    world.fail(A)
    world.diagnosis.on_message(1, Finding(0, 1, VerdictKind.LINK, "found"))
    world.tick()
    world.answer(lambda key: True)
    assert world.kinds() == {A: VerdictKind.FLOW}
    world.paths[A].epoch = 1
    world.fail(A)
    world.tick()
    assert world.kinds() == {A: VerdictKind.LINK}


def test_a_finding_of_an_old_epoch_or_unknown_rail_is_ignored() -> None:
    world = World()
    world.paths[A].epoch = 5
    world.diagnosis.on_message(1, Finding(0, 3, VerdictKind.LINK, ""))
    world.diagnosis.on_message(1, Finding(9, 5, VerdictKind.LINK, ""))
    world.fail(A)
    world.tick()
    assert world.kinds() == {}


@pytest.mark.parametrize(
    "key", [ProbeKey(0, 0, 0), ProbeKey(9, 0, 0), ProbeKey(1, 2, 0), ProbeKey(1, 0, -1)]
)
def test_a_senseless_request_is_answered_with_could_not_be_asked(key: ProbeKey) -> None:
    world = World()
    world.diagnosis.on_message(2, ProbeRequest(7, key))
    assert world.asked == []
    ((peer, reply),) = world.sent
    assert isinstance(reply, ProbeReply)
    assert (peer, reply.number, reply.key, reply.is_answered) == (2, 7, key, None)


def test_a_rank_that_asks_too_much_is_put_off_and_others_are_not() -> None:
    world = World()
    for number in range(MAX_SERVED + 1):
        world.diagnosis.on_message(2, ProbeRequest(number, ProbeKey(1, 0, 0)))
    world.diagnosis.on_message(3, ProbeRequest(0, ProbeKey(1, 0, 0)))
    assert len(world.asked) == MAX_SERVED + 1
    ((peer, reply),) = world.sent
    assert isinstance(reply, ProbeReply)
    assert (peer, reply.number) == (2, MAX_SERVED)
    assert reply.detail == "too many probes for rank 2 are running"
    world.answer(lambda key: True)
    assert len(world.sent) == MAX_SERVED + 2
    world.diagnosis.on_message(2, ProbeRequest(0, ProbeKey(1, 0, 0)))
    assert len(world.asked) == 1


def test_inquiries_beyond_the_limit_wait_for_one_to_end() -> None:
    world = World(nranks=MAX_DIAGNOSES)
    for key in world.paths:
        world.fail(key)
    world.tick()
    assert len(world.asked) == MAX_DIAGNOSES
    world.answer(lambda key: True)
    world.tick()
    assert len(world.kinds()) == MAX_DIAGNOSES
    world.answer(lambda key: True)
    assert set(world.kinds()) == set(world.paths)


def test_a_slow_peer_costs_one_probe_and_one_mention_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    with caplog.at_level(logging.INFO, "r2ccl.failover.diagnosis.driver"):
        for _ in range(3):
            world.now += 0.5
            for rail in (0, 1):
                world.diagnosis.suspect(PathKey(1, rail))
            assert len(world.asked) == 2
            world.answer(lambda key: True)
    assert world.kinds() == {A: VerdictKind.PEER_SLOW, PathKey(1, 1): VerdictKind.PEER_SLOW}
    assert world.findings() == []
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("rank 0: rail 0 to rank 1: rank 1: the process is slow")


def failures(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(each.levelno, each.getMessage().split(":")[1]) for each in caplog.records]


def test_a_nic_that_dies_is_one_warning_not_one_per_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(nranks=5)
    with caplog.at_level(logging.INFO, "r2ccl.failover.diagnosis.driver"):
        for peer in range(1, 5):
            world.fail(PathKey(peer, 1), CARRIER)
        world.tick()
    assert set(world.kinds().values()) == {VerdictKind.LOCAL_NIC}
    levels = [level for level, _ in failures(caplog)]
    assert levels == [logging.WARNING, *[logging.INFO] * 3]
    caplog.clear()
    for path in world.paths.values():
        path.state = PathState.UP
        path.epoch += 1
    with caplog.at_level(logging.INFO, "r2ccl.failover.diagnosis.driver"):
        world.fail(PathKey(2, 1), CARRIER)
        world.tick()
    assert failures(caplog) == [(logging.WARNING, " rail 1 to rank 2")], "it failed again"


def test_two_nics_that_die_are_two_warnings(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, "r2ccl.failover.diagnosis.driver"):
        for path in world.paths:
            world.fail(path, CARRIER)
        world.tick()
    assert [text for _, text in failures(caplog)] == [" rail 0 to rank 1", " rail 1 to rank 1"]


def test_nics_of_two_peers_that_die_are_two_warnings(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.INFO, "r2ccl.failover.diagnosis.driver"):
        for peer in (1, 2):
            world.fail(PathKey(peer, 1), CARRIER, is_own=False)
        world.tick()
    assert set(world.kinds().values()) == {VerdictKind.REMOTE_NIC}
    assert [level for level, _ in failures(caplog)] == [logging.WARNING] * 2


def test_who_is_slow_is_known_and_from_when_on() -> None:
    world = World()
    world.now = 5.0
    for key in (A, PathKey(2, 0)):
        world.diagnosis.suspect(key)
    world.answer(lambda key: True)
    assert world.diagnosis.slow_since(5.0) == (1, 2)
    assert world.diagnosis.slow_since(5.1) == ()


def test_a_peer_whose_path_could_not_be_probed_is_not_slow() -> None:
    world = World()
    world.diagnosis.suspect(A)
    world.answer(lambda key: None)
    assert world.kinds() == {A: VerdictKind.PATH}
    assert world.diagnosis.slow_since(0.0) == ()


def test_a_verdict_says_what_was_done_about_it() -> None:
    world = World()
    world.fail(A, CARRIER)
    world.tick()
    assert world.told[0].sequel == "moved from 0 in epoch 0"
    assert world.diagnosis.verdicts() == tuple(world.told)


def test_a_path_that_moves_again_before_the_answer_was_not_slow() -> None:
    world = World()
    world.diagnosis.suspect(A)
    world.paths[A].activity += 1
    world.answer(lambda key: True)
    assert world.kinds() == {}


def test_a_stuck_flow_is_told_from_a_slow_peer() -> None:
    world = World()
    world.wire.stuck = True
    world.diagnosis.suspect(A)
    world.answer(lambda key: True)
    assert world.kinds() == {A: VerdictKind.FLOW}


def test_a_path_that_fails_again_gets_a_verdict_of_its_own() -> None:
    world = World()
    world.fail(A)
    world.tick()
    first = world.asked
    world.paths[A].epoch = 1
    world.fail(A, CARRIER)
    world.tick()
    assert world.kinds() == {A: VerdictKind.LOCAL_NIC}
    world.asked = first
    world.answer(lambda key: True)
    assert world.kinds() == {A: VerdictKind.LOCAL_NIC}, "an answer about the epoch before"


def test_names_of_ports_are_those_a_user_knows() -> None:
    rails = (("10.0.0.1", 1), ("10.1.0.1", 1))
    peers = [
        PeerInfo(rank, f"host{rank}/boot/net", 1, (), rails, (f"mlx5_{rank}:1",))
        for rank in range(2)
    ]
    nics = Nic("eth1", "10.0.0.1"), Nic("eth2", "10.1.0.1"), Nic("mlx5_0:1", "")
    places = port_map_of(0, peers, nics)
    assert places.name(0, 1) == "rank 0 rail 1 (host0 eth2)"
    assert places.name(1, 0) == "rank 1 rail 0 (host1 10.0.0.1)"
    assert places.name(0, 2) == "rank 0 rail 2 (host0 mlx5_0:1)"
    assert places.name(1, 2) == "rank 1 rail 2 (host1 mlx5_1:1)"


def test_ranks_share_a_nic_by_host_and_address_or_rdma_port() -> None:
    def info(rank: int, host: str, address: str, hca: str) -> PeerInfo:
        return PeerInfo(rank, f"{host}/boot/net", 1, (), ((address, rank),), (hca,))

    peers = [
        info(0, "a", "10.0.0.1", "mlx5_0:1"),
        info(1, "a", "10.0.0.1", "mlx5_1:1"),
        info(2, "b", "10.0.0.1", "mlx5_0:1"),
        info(3, "a", "10.0.0.3", "mlx5_0:1"),
    ]
    nics = port_map_of(0, peers, (Nic("eth1", "10.0.0.1"), Nic("mlx5_0:1", ""))).nics
    groups = [
        [other for other in range(4) if nics(rail)[other] == nics(rail)[0]] for rail in (0, 1)
    ]
    assert groups == [[0, 1], [0, 3]]
