"""What failover decides by itself, with a transport and a control plane that only take notes."""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.datapaths import DataPath

from r2ccl.config import Config
from r2ccl.errors import (
    CommunicatorRevoked,
    InvalidArgument,
    NoHealthyRail,
    PeerLost,
    TransportError,
)
from r2ccl.failover.connector import Answer, Offer
from r2ccl.failover.failover import PortUp
from r2ccl.failover.health.rounds import Promise
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.failover.migration.calls import first_channel, message_context
from r2ccl.failover.migration.link import LinkReport
from r2ccl.failover.migration.path import (
    Announcement,
    ClosePaths,
    ConnectPaths,
    PathState,
)
from r2ccl.failover.revocation import Leaving, Revoke, Spared
from r2ccl.transport.base import (
    Arrived,
    Cleared,
    Event,
    Failed,
    Fenced,
    Frame,
    Joined,
    Probed,
    RailChanged,
)
from r2ccl.types import BYPASS, BypassWay, CallSignature, Collective, PathKey, ProbeKey

A, B = PathKey(1, 0), PathKey(1, 1)


class Endpoint:
    info = b"info"
    is_closed = False

    def join(self, info: bytes, is_caller: bool) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Notes:
    """A transport that does nothing and remembers being asked."""

    nrails = 2

    def __init__(self) -> None:
        self.joined: set[int] = set()
        self.ends: dict[PathKey | ProbeKey, Endpoint] = {}
        self.opened: set[PathKey] = set()
        self.fenced: list[PathKey] = []
        self.stuck: set[PathKey] = set()
        self.confirmed: list[tuple[PathKey, int, int]] = []
        self.probed: list[ProbeKey] = []
        self.events: list[Event] = []

    def probe(self, key: ProbeKey) -> None:
        self.probed.append(key)

    def joins(self, rail: int) -> bool:
        return rail in self.joined

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        self.ends[key] = Endpoint()
        return self.ends[key]

    def open(self, path: PathKey, endpoint: object) -> None:
        self.opened.add(path)

    def is_open(self, path: PathKey) -> bool:
        return path in self.opened

    def fence(self, path: PathKey) -> None:
        self.opened.discard(path)
        self.fenced.append(path)

    def is_stuck(self, path: PathKey) -> bool:
        return path in self.stuck

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        self.confirmed.append((path, channel, ack))

    def poll(self, timeout_s: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def flush(self) -> None: ...

    def isend(self, *args: Any, **more: Any) -> None: ...

    def irecv(self, *args: Any) -> None: ...


class Control:
    """A control plane that remembers; messages to all neighbors are sent to rank -1."""

    def __init__(self) -> None:
        self.neighbors = frozenset(range(1, 4))
        self.sent: list[tuple[int, object]] = []
        self.dialed: list[tuple[int, int, int]] = []
        self.accepted: list[tuple[int, int, int]] = []
        self.kicked: list[int] = []
        self.cancelled: list[tuple[int, int]] = []
        self.bypassed: list[tuple[int, int, list[BypassWay]]] = []

    def send(self, peer: int, message: object) -> None:
        self.sent.append((peer, message))

    def gossip(self, message: object, source: int = -1) -> None:
        self.sent.append((-1, message))

    def open_session(self, peer: int) -> None: ...

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        self.accepted.append((peer, rail, epoch))

    def obstacles(self, peer: int) -> list[str]:
        return []

    def dial_path(self, peer: int, rail: int, epoch: int) -> None:
        self.dialed.append((peer, rail, epoch))

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        self.bypassed.append((peer, epoch, list(ways)))

    def cancel_path(self, peer: int, rail: int) -> None:
        self.cancelled.append((peer, rail))

    def kick(self, rail: int) -> None:
        self.kicked.append(rail)


def straight(key: PathKey) -> ProbeKey:
    return ProbeKey(key.peer, key.rail, key.rail)


class World:
    """Rank 0 of two, or more; both rails to rank 1 up.

    With a `limit` of connections, no rank is connected at the start.
    """

    def __init__(
        self,
        *,
        mode: str = "auto",
        joined: set[int] | None = None,
        is_open: bool = True,
        nranks: int = 2,
        limit: int | None = None,
        **more: Any,
    ) -> None:
        self.now = 0.0
        self.transport = Notes()
        self.transport.joined = joined or set()
        self.control = Control()
        path = DataPath(
            0,
            nranks,
            transport=self.transport,
            control=self.control,
            config=Config(
                mode=mode, no_rail_timeout_s=5.0, eager_slots=4, max_connections=limit or 128
            ),
            clock=lambda: self.now,
            **{"neighbors": None if limit is None else (), **more},
        )
        self.progress, self.links, self.failover = path.progress, path.links, path.failover
        self.migration, self.revocation = path.migration, path.revocation
        self.failover.start()
        for rail in (0, 1):
            if is_open:
                self.open(rail, 0)

    def open(self, rail: int, epoch: int) -> Endpoint:
        endpoint = Endpoint()
        self.migration.on_opened(1, rail, epoch, endpoint)
        return endpoint

    def fail(self, key: PathKey) -> None:
        self.migration.on_failed(Failed(key, "EIO", "gone"))

    def repair(self, key: PathKey, *reports: LinkReport) -> None:
        self.migration.on_fenced(Fenced(key))
        epoch = self.links.paths[key].epoch
        self.failover.on_message(1, Announcement(key.rail, epoch, "EIO", reports))

    def answer(self, key: PathKey, is_answered: bool | None) -> None:
        """Have the transport report what became of the probe of a path."""
        self.failover.on_probed(Probed(straight(key), is_answered, "because"))

    def heal(self, key: PathKey, nprobes: int = 3) -> None:
        """Answer the probes of a path that failed."""
        for _ in range(nprobes):
            self.look(0.1)
            assert self.transport.probed[-1] == straight(key)
            self.answer(key, True)
        self.look(0.1)

    def offers(self) -> list[Offer]:
        return [message for _, message in self.control.sent if isinstance(message, Offer)]

    def announcements(self) -> list[Announcement]:
        return [message for _, message in self.control.sent if isinstance(message, Announcement)]

    def look(self, seconds: float, peers: frozenset[int] = frozenset({1})) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.failover.tick(self.now, peers)


def test_the_lower_rank_dials() -> None:
    world = World()
    assert world.control.dialed == [(1, 0, 0), (1, 1, 0)]
    assert world.control.accepted == []


def routes_of(world: World) -> list[PathKey | None]:
    return [link.route for link in world.links.senders.values()]


def test_channels_live_on_joining_rails_while_there_are_any() -> None:
    world = World(joined={1})
    assert world.control.dialed == [(1, 0, 0)]
    assert [type(message) for _, message in world.control.sent] == [Offer]
    for channel in range(4):
        world.links.sender(1, channel)
    assert routes_of(world) == [B] * 4
    world.fail(B)
    world.repair(B)
    assert routes_of(world) == [A] * 4
    world.heal(B)
    world.open(1, 1)
    assert routes_of(world) == [B] * 4


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(each.levelno, each.getMessage()) for each in caplog.records]


def test_what_happens_to_a_path_is_info_and_to_a_rail_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, other = World(nranks=3), PathKey(2, 1)
    world.migration.on_opened(*other, 0, Endpoint())
    with caplog.at_level(logging.INFO, "r2ccl.failover.migration.driver"):
        for key in (B, other):
            world.fail(key)
            world.migration.on_fenced(Fenced(key))
            world.failover.on_message(key.peer, Announcement(1, 0, "EIO", ()))
    assert {level for level, _ in logged(caplog)} == {logging.INFO}
    assert sum("is out of use" in text for _, text in logged(caplog)) == 2
    caplog.clear()
    with caplog.at_level(logging.INFO, "r2ccl.failover.migration.driver"):
        world.migration.on_opened(*B, 1, Endpoint())
        world.migration.on_opened(*other, 1, Endpoint())
    assert logged(caplog) == [
        (logging.INFO, "rank 0: rail 1 to rank 1 is up again"),
        (logging.INFO, "rank 0: rail 1 to rank 2 is up again"),
        (logging.WARNING, "rank 0: rail 1 is up again on all its paths"),
    ]


def test_a_port_going_down_fails_its_paths_one_coming_up_calls() -> None:
    world = World(joined={1})
    world.failover.on_rail(RailChanged(1, False, "CQ_ERR (event 0)"))
    assert world.links.paths[B].cause == "PORT_ERR: CQ_ERR (event 0)"
    assert world.transport.fenced == [B]
    world.repair(B)
    assert world.links.paths[B].cause.startswith("PORT_ERR")
    world.look(3.0)
    world.answer(B, False)
    asked = len(world.transport.probed)
    world.failover.on_rail(RailChanged(1, True))
    world.look(0.1)
    assert world.transport.probed[asked:] == [straight(B)]


def port_down_in_a_call() -> tuple[World, PathKey]:
    """Take port 1 down while a slice of rank 1 is awaited; return an idle path of the port."""
    world, idle = World(nranks=3), PathKey(2, 1)
    world.migration.on_opened(*idle, 0, Endpoint())
    world.links.receiver(1, 0).post(None, 1, 0, None, 0)
    world.failover.on_carrier(1, False)
    assert world.transport.fenced == [B]
    return world, idle


def test_idle_paths_of_a_port_wait_for_those_in_use() -> None:
    world, idle = port_down_in_a_call()
    world.repair(B)
    assert world.transport.fenced == [B, idle]
    assert share_of_port(world) == 0


def test_idle_paths_of_a_port_do_not_wait_for_long() -> None:
    world, idle = port_down_in_a_call()
    assert share_of_port(world) == WHOLE
    world.look(0.1)
    assert world.transport.fenced == [B, idle]


def test_idle_paths_of_a_port_that_is_up_again_stay() -> None:
    world, idle = port_down_in_a_call()
    world.failover.on_carrier(1, True)
    world.repair(B)
    world.look(0.2)
    assert world.transport.fenced == [B]
    assert world.links.paths[idle].state is PathState.UP


def share_of_port(world: World) -> int:
    """Return the share that the ranks would agree on for port 1 of this rank."""
    agreement = world.failover.agreement
    assert agreement is not None
    agreement.tick(world.now + 1.0)
    return agreement.known.health.share(0, 1)


def test_a_silent_queue_pair_moves_by_its_own_error_alone() -> None:
    world = World(joined={1})
    world.links.receiver(1, 0).post(None, 1, 0, None, 0)
    world.look(0.9)
    assert straight(B) in world.transport.probed
    world.answer(B, False)
    assert world.links.paths[B].state is PathState.UP
    world.fail(B)
    assert world.links.paths[B].state is PathState.FENCING


def test_a_failed_path_is_fenced_announced_repaired_and_redialed() -> None:
    world = World()
    for channel in range(4):
        world.links.sender(1, channel)
    world.fail(A)
    assert world.transport.fenced == [A]
    assert world.announcements() == []
    assert world.links.senders[1, 0].route is None
    world.migration.on_fenced(Fenced(A))
    (announcement,) = world.announcements()
    assert announcement.routes == {0: 1, 2: 1}
    assert [report.channel for report in announcement.links] == [0, 1, 2, 3]
    world.failover.on_message(1, Announcement(0, 0, "EIO", ()))
    assert {link.route for link in world.links.senders.values()} == {B}
    world.heal(A)
    assert world.control.dialed[-1] == (1, 0, 1)
    world.open(0, 1)
    assert [link.route for link in world.links.senders.values()] == [A, B, A, B]
    assert world.transport.fenced == [A], "going home fences nothing"


# Paths closed because they were idle


def close(world: World, *keys: PathKey) -> None:
    """Have rank 1 close its paths, of which `keys` are up at this rank."""
    world.failover.on_message(1, ClosePaths())
    for key in keys:
        world.repair(key)


def nasked(world: World) -> int:
    """Return how often rank 1 was asked to connect paths."""
    return sum(isinstance(message, ConnectPaths) for _, message in world.control.sent)


def test_closed_paths_open_again_after_a_failure_at_that_time() -> None:
    world = World()
    world.fail(A)
    close(world, B)
    world.look(0.1)
    assert nasked(world) == 0, "a path is still being fenced"
    world.repair(A)
    assert nasked(world) == 1
    assert (1, 1, 1) in world.control.dialed
    world.look(0.1)
    assert (1, 0, 1) in world.control.dialed


def test_an_idle_close_does_not_change_the_record_of_a_failure() -> None:
    world = World()
    link = world.links.sender(1, 0)
    world.fail(A)
    world.repair(A)
    world.heal(A)
    world.open(0, 1)
    (repair,) = world.migration.log.repairs
    before = msgspec.structs.astuple(repair)
    # Sent as the peer closes the path, so it is replayed over the connection made later.
    item, _ = link.post(memoryview(b"abc"), True, 1, 1, None, 0)
    close(world, A, B)
    assert item.path is None
    world.look(0.1)
    world.migration.reopen(1)
    world.open(0, 2)
    assert item.path == A
    assert msgspec.structs.astuple(repair) == before


def test_a_path_that_breaks_as_it_is_reopened_is_dialed_again() -> None:
    world = World()
    close(world, A, B)
    world.look(0.1)
    assert world.control.dialed[-2:] == [(1, 0, 1), (1, 1, 1)]
    world.open(1, 1)
    assert world.links.paths[B].cause == ""
    world.failover.on_message(1, Announcement(0, 1, "EIO", ()))
    world.heal(A)
    assert world.control.dialed[-1] == (1, 0, 2)


def test_a_path_that_is_down_when_closed_waits_for_the_peer() -> None:
    world = World(is_open=False)
    world.open(0, 0)
    world.failover.on_message(1, ClosePaths())
    assert [message.rail for message in world.announcements()] == [1]
    world.repair(A)
    world.look(0.1)
    assert nasked(world) == 0
    assert world.open(1, 0).is_closed, "the peer may replay the slices of this epoch"
    world.failover.on_message(1, Announcement(1, 0, "idle", (), is_idle=True))
    assert nasked(world) == 1
    assert world.control.dialed[-2:] == [(1, 0, 1), (1, 1, 1)]


def test_both_ends_of_a_path_that_is_down_announce_it() -> None:
    world = World(is_open=False)
    world.open(0, 0)
    world.migration.close_idle(1)
    assert [message.rail for message in world.announcements()] == [1]
    assert world.transport.fenced == [], "the other end of a path that is up is fenced first"


def closed_by(world: World) -> list[int]:
    """Return the ranks that rank 0 asked to close their paths."""
    return [peer for peer, message in world.control.sent if isinstance(message, ClosePaths)]


def test_paths_that_others_need_count_towards_the_limit() -> None:
    world = World(is_open=False, nranks=6, limit=2)
    for peer in (3, 2, 1):
        world.links.begin(world.links.calls_of(0), 0)
        world.failover.on_message(peer, ConnectPaths())
        world.migration.on_opened(peer, 0, 0, Endpoint())
    assert closed_by(world) == [3]
    assert world.links.connected == {1, 2}


def test_paths_that_calls_wait_for_are_not_closed() -> None:
    world = World(is_open=False, nranks=6, limit=2)
    for peer in (1, 2):
        world.failover.connect_peers(frozenset({peer}))
        world.migration.on_opened(peer, 0, 0, Endpoint())
    world.look(0.1, frozenset())
    world.failover.on_message(3, ConnectPaths())
    world.migration.on_opened(3, 0, 0, Endpoint())
    assert closed_by(world) == []
    for peer in (1, 2):
        world.failover.joined(frozenset({peer}))
    world.failover.connect_peers(frozenset({4}))
    assert closed_by(world) == [1, 2]


def test_paths_closed_while_a_call_waits_for_them_open_again() -> None:
    world = World(is_open=False, nranks=3, limit=2)
    world.failover.connect_peers(frozenset({1}))
    world.open(0, 0)
    close(world, A)
    world.failover.on_message(1, Announcement(1, 0, "idle", (), is_idle=True))
    before = nasked(world)
    world.look(0.1, frozenset())
    assert nasked(world) == before + 1
    assert world.links.connected == {1}


def test_a_peer_that_only_confirms_slices_counts_as_used() -> None:
    world = World(nranks=4)
    for peer in (2, 3):
        world.migration.on_opened(peer, 0, 0, Endpoint())
    for peer in (2, 1):
        world.links.begin(world.links.calls_of(0), 0)
        link = world.links.sender(peer, 0)
        world.links.send(link, memoryview(b"x"), True, None, 0)  # type: ignore[arg-type]
        assert link.route is not None
        link.retired(link.route, 0)
        assert peer not in world.links.idle_peers()
        link.confirm(1)
    assert world.links.idle_peers() == [3, 2, 1]


def test_a_slow_peer_does_not_shorten_the_time_to_reopen() -> None:
    world = World()
    world.migration.close_idle(1)
    world.look(4.0)
    for rail in (0, 1):
        world.failover.on_message(1, Announcement(rail, 0, "idle", (), is_idle=True))
    world.look(4.0)
    assert world.revocation.error is None
    world.look(2.0)
    assert isinstance(world.revocation.error, NoHealthyRail)


def test_a_stale_connection_is_closed() -> None:
    world = World()
    world.fail(A)
    world.repair(A)
    assert world.open(0, 0).is_closed
    assert world.links.paths[A].state is PathState.DOWN
    assert not world.open(0, 1).is_closed
    assert world.links.paths[A].state is PathState.UP


def test_a_second_connection_in_a_used_epoch_voids_the_peers_end() -> None:
    world = World()
    assert world.open(0, 0).is_closed
    assert world.links.paths[A].state is PathState.FENCING
    assert "REDIALED" in world.links.paths[A].cause


def test_slices_consumed_without_a_route_are_confirmed_later() -> None:
    world = World()
    link = world.links.receiver(1, 0)
    for rail in (A, B):
        world.fail(rail)
        world.migration.on_fenced(Fenced(rail))
    link.consumed = link.delivered = link.received = link.posted = 3
    world.links.confirm_all()
    assert world.transport.confirmed == []
    world.failover.on_message(1, Announcement(1, 0, "EIO", ()))
    world.open(1, 1)
    assert world.transport.confirmed == [(B, 0, 3)]


def test_a_report_that_brings_credits_wakes_the_call() -> None:
    class Call:
        ncalls = 0

        def advance(self) -> None:
            self.ncalls += 1

    world = World()
    call = Call()
    world.links.begin(world.links.calls_of(0), 0)
    world.links.calls_of(0).consumers = {0: call}  # type: ignore[dict-item]
    link = world.links.sender(1, 0)
    for _ in range(4):
        world.links.send(link, memoryview(b"x"), True, call, 0)  # type: ignore[arg-type]
    world.fail(A)
    world.repair(A, LinkReport(0, 4, 4))
    world.progress.advance()
    assert link.can_post(True)
    assert call.ncalls >= 1


def test_silence_is_probed_and_no_answer_fails_the_path() -> None:
    world = World()
    world.links.recv(world.links.receiver(1, 0), None, None, 0)  # type: ignore[arg-type]
    world.look(0.4)
    assert world.transport.probed == []
    world.look(0.4)
    assert world.transport.probed == [straight(A), straight(B)]
    world.answer(A, False)
    world.answer(B, True)
    assert world.links.paths[A].state is PathState.FENCING
    assert world.links.paths[A].cause.startswith("PROBE_UNANSWERED")
    assert "because" in world.links.paths[A].cause
    assert world.links.paths[B].state is PathState.UP


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_peer_that_sends_on_another_rail_is_not_slow(is_busy: bool) -> None:
    world = World()
    diagnosis = world.failover.diagnosis
    assert diagnosis is not None
    world.links.recv(world.links.receiver(1, 0), None, None, 0)  # type: ignore[arg-type]
    for _ in range(20):
        world.look(0.1)
        world.links.paths[B].activity += is_busy
        for probed in world.transport.probed:
            world.failover.on_probed(Probed(probed, True, "because"))
        world.transport.probed.clear()
    assert diagnosis.slow_since(0.0) == (() if is_busy else (1,))


@pytest.mark.parametrize("is_stuck", [True, False])
def test_an_answered_probe_moves_only_a_stuck_flow(is_stuck: bool) -> None:
    world = World()
    world.links.recv(world.links.receiver(1, 0), None, None, 0)  # type: ignore[arg-type]
    world.look(0.8)
    if is_stuck:
        world.transport.stuck.add(A)
    world.answer(A, True)
    expected = PathState.FENCING if is_stuck else PathState.UP
    assert world.links.paths[A].state is expected


def test_a_probes_answer_is_void_when_the_path_moved_meanwhile() -> None:
    world = World()
    world.links.recv(world.links.receiver(1, 0), None, None, 0)  # type: ignore[arg-type]
    world.look(0.8)
    world.links.paths[A].activity += 1
    world.answer(A, False)
    assert world.links.paths[A].state is PathState.UP
    world.fail(B)
    world.repair(B)
    world.open(1, 1)
    world.answer(B, False)
    assert world.links.paths[B].state is PathState.UP


def test_an_idle_rank_probes_nothing_unless_a_path_is_stuck() -> None:
    world = World()
    world.links.receiver(1, 0)
    world.look(10.0)
    assert world.transport.probed == []
    world.transport.stuck.add(B)
    world.look(1.0)
    assert set(world.transport.probed) == {straight(B)}


def test_a_probe_that_cannot_be_asked_tells_nothing_of_its_path() -> None:
    world = World()
    world.links.recv(world.links.receiver(1, 0), None, None, 0)  # type: ignore[arg-type]
    world.look(0.8)
    world.transport.stuck.add(A)
    world.answer(A, None)
    assert world.links.paths[A].state is PathState.UP


def test_an_impossible_probe_is_no_verdict_and_is_made_again() -> None:
    """A descriptor was missing: neither the path in use nor the one that waits pays for it."""
    world = World()
    world.fail(B)
    world.repair(B)
    world.control.dialed.clear()
    for is_answered in (True, None, True, True):
        asked = len(world.transport.probed)
        while len(world.transport.probed) == asked:
            world.look(0.1)
        world.answer(B, is_answered)
    world.look(0.1)
    assert world.control.dialed == [(1, 1, 1)]
    assert world.links.paths[A].state is PathState.UP


def test_what_keeps_paths_from_being_connected_can_be_read() -> None:
    world = World(joined={1}, is_open=False)
    world.control.obstacles = lambda peer: [f"rail 0: rank {peer} refused"]  # type: ignore[method-assign]

    def refuse(key: PathKey | ProbeKey) -> Endpoint:
        raise TransportError("mlx5_0 refused to make a queue pair: EMFILE")

    world.transport.offer, offer = refuse, world.transport.offer  # type: ignore[method-assign]
    world.look(3.0)
    assert world.failover.obstacles(1) == [
        "rail 0: rank 1 refused",
        "rail 1: mlx5_0 refused to make a queue pair: EMFILE",
    ]
    world.transport.offer = offer  # type: ignore[method-assign]
    world.look(3.0)
    call = [offer for offer in world.offers() if offer.via < 0][-1]
    world.failover.on_message(1, Answer(1, call.epoch, call.attempt, b"info"))
    world.failover.on_joined(Joined(B, world.transport.ends[B]))
    assert world.failover.obstacles(1) == ["rail 0: rank 1 refused"]


def test_whoever_asks_is_told_once() -> None:
    world = World()
    told: list[Probed] = []
    key = ProbeKey(1, 0, 1)
    for _ in range(2):
        world.failover.probes.ask(key, told.append)
    event = Probed(key, True, "")
    world.failover.on_probed(event)
    assert told == [event, event]
    world.failover.on_probed(Probed(key, False, ""))
    assert told == [event, event]


def test_connections_of_probes_are_joined_after_the_paths() -> None:
    world = World(joined={0, 1}, is_open=False)
    world.look(0.5)
    assert {offer.via for offer in world.offers()} == {-1}
    for rail in (0, 1):
        world.open(rail, 0)
    world.look(0.5)
    probes = [(offer.rail, offer.via) for offer in world.offers() if offer.via >= 0]
    assert probes == [(0, 0), (0, 1), (1, 1), (1, 0)]


def test_probe_connections_do_not_wait_for_a_path_that_is_down() -> None:
    world = World(joined={0, 1}, is_open=False)
    world.open(0, 0)
    world.look(4.9)
    assert {offer.via for offer in world.offers()} == {-1}
    world.look(0.3)
    assert {offer.via for offer in world.offers()} > {-1}


def test_a_probe_that_broke_its_connection_is_joined_anew() -> None:
    world = World(joined={0, 1})
    world.look(0.5)
    key = straight(A)
    world.failover.on_joined(Joined(key, world.transport.ends[key]))
    before = len(world.offers())
    for is_answered in (True, None):
        world.failover.on_probed(Probed(key, is_answered, ""))
        world.look(0.1)
    assert len(world.offers()) == before
    world.failover.on_probed(Probed(key, False, "no answer"))
    world.look(0.1)
    (again,) = world.offers()[before:]
    assert (again.rail, again.via) == (0, 0)


def test_without_resilience_nothing_is_probed_or_joined_for_it() -> None:
    world = World(joined={0, 1}, mode="failstop")
    world.look(10.0)
    assert {offer.via for offer in world.offers()} == {-1}


def test_an_idle_rank_confirms_eager_slices_below_the_threshold() -> None:
    world = World()
    link = world.links.receiver(1, 0)
    link.consumed = link.delivered = link.received = link.posted = 1
    world.look(0.1, frozenset())
    assert world.transport.confirmed == [(A, 0, 1)]


def test_no_rail_counts_from_the_loss_not_from_the_last_call() -> None:
    world = World()
    world.look(1.0)
    world.now = 100.0
    world.fail(A)
    world.fail(B)
    world.look(4.9)
    assert world.revocation.error is None
    world.look(0.3)
    error = world.revocation.error
    assert isinstance(error, NoHealthyRail)
    assert set(error.causes) == {0, 1}
    assert isinstance(world.control.sent[-1][1], Revoke)


def test_a_peer_no_call_talks_to_is_not_given_up() -> None:
    world = World()
    world.fail(A)
    world.fail(B)
    world.look(20.0, frozenset())
    assert world.revocation.error is None


def test_a_rank_that_left_may_go_and_the_others_are_told() -> None:
    world = World(nranks=4)
    world.failover.on_message(3, Leaving.of([1, 3]))
    world.failover.on_peer_lost(1, "silent", 5.0)
    assert world.revocation.error is None
    assert world.control.sent[-1:] == [(-1, Spared(1))]
    world.failover.on_message(2, Spared(1))
    assert [to for to, each in world.control.sent if isinstance(each, Spared)] == [-1]


def test_who_cannot_do_without_a_rank_tells_those_that_can() -> None:
    """Whichever comes first, the loss or the news that another rank lives on with it."""
    world = World(nranks=4)
    world.failover.on_message(2, Spared(1))
    world.failover.on_peer_lost(1, "silent", 5.0)
    assert isinstance(world.revocation.error, PeerLost)
    assert revokes(world) == [("PeerLost", 1)]
    other = World(nranks=4)
    other.failover.on_peer_lost(1, "silent", 5.0)
    assert revokes(other) == [], "all ranks lose rank 1"
    other.failover.on_message(3, Spared(1))
    other.failover.on_message(2, Spared(1))
    assert revokes(other) == [("PeerLost", 1)]


def revokes(world: World) -> list[tuple[str, int]]:
    """Return kind and peer of the reasons that the rank sent to its neighbors."""
    sent = [each for to, each in world.control.sent if to == -1]
    return [(each.kind, each.peer) for each in sent if isinstance(each, Revoke)]


def test_leaving_ranks_are_passed_on_where_nobody_hears_them() -> None:
    world = World(nranks=16)
    world.failover.on_message(1, Leaving.of([5]))
    world.failover.on_message(3, Leaving.of([5, 9]))
    world.failover.tick(0.0, frozenset())
    world.failover.tick(1.0, frozenset())
    told = [(to, each.members(16)) for to, each in world.control.sent if isinstance(each, Leaving)]
    assert told == [(2, {5, 9}), (3, {9})], "ranks 1 and 3 hear rank 5 itself, and rank 1 rank 9"


def test_a_leaving_rank_tells_all_its_sessions() -> None:
    world = World(nranks=16)
    world.revocation.leave()
    told = [(to, each.members(16)) for to, each in world.control.sent if isinstance(each, Leaving)]
    assert told == [(to, {0}) for to in (-1, *range(4, 16))]
    assert world.revocation.is_leaving


def test_a_reason_is_passed_on_once() -> None:
    world = World(nranks=4)
    message = Revoke("TransportTimeout", "too late", 2)
    world.failover.on_message(1, message)
    world.failover.on_message(3, message)
    assert world.control.sent.count((-1, message)) == 1


def test_after_an_error_every_end_is_fenced_even_unseen_failures() -> None:
    """A path whose `Failed` is still on its way lets the peer's writes in until it is fenced."""
    world = World()
    world.transport.opened.discard(A)
    world.failover.on_peer_lost(1, "silent", 5.0)
    assert isinstance(world.revocation.error, PeerLost)
    assert sorted(world.transport.fenced) == [A, B]
    assert not world.migration.is_quiet
    world.migration.on_fenced(Fenced(A))
    assert not world.migration.is_quiet
    world.migration.on_fenced(Fenced(B))
    assert world.migration.is_quiet


def test_after_an_error_nothing_is_opened_announced_or_dialed() -> None:
    world = World()
    world.failover.on_peer_lost(1, "silent", 5.0)
    before = (len(world.control.sent), len(world.control.dialed))
    world.fail(A)
    world.repair(A)
    assert world.open(0, 0).is_closed
    world.look(1.0)
    assert (len(world.control.sent), len(world.control.dialed)) == before


def test_the_first_reason_wins() -> None:
    world = World()
    world.failover.on_message(1, Revoke("TransportTimeout", "too late", 1))
    world.failover.on_peer_lost(1, "silent", 5.0)
    assert isinstance(world.revocation.error, CommunicatorRevoked)
    assert str(world.revocation.error) == "rank 0: rank 1 ended the communicator: too late"


def test_a_lost_rank_heard_of_or_found_raises_the_same_error() -> None:
    finder, hearer = World(nranks=3), World(nranks=3)
    finder.failover.on_peer_lost(2, "its process is gone", 5.0)
    reason = finder.revocation.reason
    assert reason is not None
    hearer.failover.on_message(1, msgspec.structs.replace(reason, rank=1))
    error = hearer.revocation.error
    assert isinstance(error, PeerLost)
    assert (error.peer, error.last_heard_s) == (2, None)
    assert "(rank 1 reports: its process is gone; not seen in any call)" in str(error)


def test_a_rank_given_up_by_others_is_not_told_it_lost_itself() -> None:
    world = World()
    world.failover.on_message(1, Revoke("PeerLost", "silent", 1, peer=0))
    assert isinstance(world.revocation.error, CommunicatorRevoked)


def test_no_healthy_rail_is_the_same_error_at_both_ends() -> None:
    world = World()
    world.fail(A)
    world.fail(B)
    world.failover.on_message(1, Revoke("NoHealthyRail", "none", 1, peer=0))
    assert isinstance(world.revocation.error, NoHealthyRail)


def test_a_peer_cut_off_before_it_connected_is_revoked() -> None:
    world = World()
    stranger = 3
    world.failover.on_message(1, Revoke("NoHealthyRail", "no healthy rail", stranger, peer=0))
    error = world.revocation.error
    assert isinstance(error, CommunicatorRevoked)
    assert str(error) == "rank 0: rank 3 ended the communicator: no healthy rail"


def test_the_baseline_does_not_migrate() -> None:
    world = World(mode="failstop")
    world.fail(A)
    error = world.revocation.error
    assert isinstance(error, TransportError)
    assert (error.peer, error.rail, error.status) == (1, 0, "EIO")
    assert world.announcements() == []


def test_to_the_baseline_a_peer_that_leaves_first_has_not_failed() -> None:
    world = World(mode="failstop")
    world.revocation.is_leaving = True
    world.fail(A)
    assert world.revocation.error is None
    assert world.transport.fenced == [A]


def test_a_path_that_ends_while_this_rank_leaves_is_debug(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.revocation.leave()
    with caplog.at_level(logging.DEBUG, "r2ccl.failover.migration.driver"):
        world.fail(A)
        world.repair(A)
    assert len(logged(caplog)) == 2
    assert {level for level, _ in logged(caplog)} == {logging.DEBUG}


@pytest.mark.parametrize("signatures", [(7, 8), (8, 7)])
def test_every_call_seen_ahead_is_held_against_this_ranks(signatures: tuple[int, int]) -> None:
    world = World()
    world.transport.events = [
        Arrived(A, Frame(0, seq, 0, 1, signature), memoryview(b"early"), 0.0)
        for seq, signature in enumerate(signatures)
    ]
    world.progress.step()
    assert world.revocation.error is None
    calls = world.links.calls_of(0)
    world.links.begin(calls, 7)
    world.progress.begin(calls)
    assert isinstance(world.revocation.error, InvalidArgument)


def test_a_call_seen_before_its_communicator_is_made_is_compared() -> None:
    world = World()
    calls = world.links.calls_of(0)
    world.transport.events = [
        Arrived(A, Frame(0, seq, 0, op, 8), memoryview(b"early"), 0.0)
        for seq, op in enumerate((3, 6))
    ]
    world.progress.step()
    calls.skip_to(5)
    assert list(calls.ahead) == [6]
    world.links.begin(calls, 7)
    world.progress.begin(calls)
    assert isinstance(world.revocation.error, InvalidArgument)


def pair(count: int, collective: Collective = Collective.ALLTOALLV) -> int:
    return CallSignature(collective, 0, 0, count).pack()


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize(("mine", "theirs"), [(5, 5), (5, 6), (5, 0), (0, 5), (0, 0)])
def test_the_ranks_of_a_pair_compare_their_counts(mine: int, theirs: int, is_early: bool) -> None:
    world = World()
    arrived = Arrived(A, Frame(0, 0, 0, 1, pair(theirs)), memoryview(b"part"), 0.0)
    if is_early:
        world.transport.events = [arrived]
        world.progress.step()
    world.links.begin(
        world.links.calls_of(0), pair(-1), {(A.peer, False): pair(mine), (A.peer, True): pair(7)}
    )
    world.progress.begin(world.links.calls_of(0))
    if not is_early:
        world.transport.events = [arrived]
        world.progress.step()
    error = world.revocation.error
    if mine == theirs:
        assert error is None
    else:
        assert isinstance(error, InvalidArgument)
        assert f"passes {theirs} elements for rank" in str(error)
        assert f"expects {mine} elements from rank {A.peer};" in str(error)


def test_a_receivers_count_is_compared_by_the_sender() -> None:
    world = World()
    world.links.begin(
        world.links.calls_of(0), pair(-1), {(A.peer, False): pair(1), (A.peer, True): pair(7)}
    )
    world.transport.events = [Cleared(A, Frame(0, 0, 0, 1, pair(9)), 36, object())]
    world.progress.step()
    assert isinstance(world.revocation.error, InvalidArgument)
    assert "passes 7 elements" in str(world.revocation.error)
    assert "expects 9 elements" in str(world.revocation.error)


@pytest.mark.parametrize("collective", [Collective.ALLTOALLV, Collective.GATHERV])
def test_the_kind_of_a_finished_call_is_still_compared(collective: Collective) -> None:
    world = World()
    world.links.begin(world.links.calls_of(0), pair(-1), {(A.peer, False): pair(1)})
    world.links.begin(world.links.calls_of(0), 7)
    frame = Frame(0, 0, 0, 1, pair(99, collective))
    world.transport.events = [Arrived(A, frame, memoryview(b"late"), 0.0)]
    world.progress.step()
    is_other = collective != Collective.ALLTOALLV
    assert isinstance(world.revocation.error, InvalidArgument) == is_other


def test_a_failed_path_is_not_dialed_before_its_probes_are_good() -> None:
    world = World()
    dialed = len(world.control.dialed)
    world.fail(A)
    world.repair(A)
    world.look(5.0)
    assert len(world.control.dialed) == dialed
    world.answer(A, False)
    world.heal(A, 2)
    assert len(world.control.dialed) == dialed
    world.heal(A, 1)
    assert world.control.dialed[dialed:] == [(1, 0, 1)]


def test_a_path_that_fails_again_and_again_waits_ever_longer() -> None:
    world = World()
    waits = []
    for epoch in range(1, 5):
        world.fail(A)
        world.repair(A)
        dialed, began = len(world.control.dialed), world.now
        while len(world.control.dialed) == dialed:
            world.look(0.1)
            if world.transport.probed:
                world.transport.probed.clear()
                world.answer(A, True)
        waits.append(world.now - began)
        world.open(0, epoch)
    assert waits[0] < 0.5
    assert waits[1:] == pytest.approx([1, 3, 7], abs=0.5)


def test_a_path_that_joins_is_brought_back_by_offers_alone() -> None:
    world = World(joined={0, 1})
    world.fail(A)
    world.repair(A)
    assert world.control.cancelled == []
    offers = len(world.offers())
    for _ in range(3):
        world.look(0.1)
        world.answer(A, True)
    world.look(0.1)
    assert world.control.dialed == []
    assert [(each.rail, each.epoch) for each in world.offers()[offers:] if each.via < 0] == [(0, 1)]


def test_a_peer_without_any_path_is_dialed_at_once() -> None:
    world = World()
    for epoch in range(1, 6):
        for key in (A, B):
            world.fail(key)
            world.repair(key)
        world.look(0.1)
        assert world.control.dialed[-2:] == [(1, 0, epoch), (1, 1, epoch)]
        world.open(0, epoch)
        world.open(1, epoch)


def test_a_path_that_failed_in_dialing_is_dialed_in_a_new_epoch() -> None:
    world = World()
    world.fail(A)
    world.repair(A)
    world.heal(A)
    world.failover.on_message(1, Announcement(0, 1, "EIO", ()))
    assert world.control.cancelled[-1] == (1, 0)
    dialed = len(world.control.dialed)
    world.heal(A)
    assert world.control.dialed[dialed:] == [(1, 0, 2)]


def test_the_peers_port_that_came_up_is_probed_at_once() -> None:
    world = World()
    world.fail(A)
    world.repair(A)
    for _ in range(8):
        world.look(1.0)
        world.answer(A, False)
    world.transport.probed.clear()
    world.failover.on_message(1, PortUp(0))
    world.look(0.1)
    assert world.transport.probed == [straight(A)]


def test_carrier_events() -> None:
    world = World()
    world.failover.on_carrier(1, False)
    assert world.transport.fenced == [B]
    assert "CARRIER_DOWN" in world.links.paths[B].cause
    world.failover.on_carrier(1, True)
    assert world.control.kicked == [1]


def test_a_message_about_a_rail_that_does_not_exist_is_ignored() -> None:
    world = World()
    world.failover.on_message(1, Announcement(9, 0, "EIO", ()))
    assert world.revocation.error is None


# Excluded rails

OWN = (0, 0)
EXCLUDED = "EXCLUDED: the NIC at one end was declared failed"


def order(world: World, *, is_excluded: bool, port: tuple[int, int] = OWN) -> Health:
    """Exclude or include a port, with the promises of the peers; return the health."""
    agreement = world.failover.agreement
    assert agreement is not None
    world.now += 1.0
    agreement.exclude([port], lambda refusal: None, is_excluded=is_excluded)
    agreement.tick(world.now)
    for peer in range(1, agreement.known.health.nranks):
        agreement.on_message(peer, Promise(agreement.known.health.version, 0))
    return agreement.known.health


def end_repair(world: World, epoch: int, cause: str = "") -> None:
    """Fence this end of path A, and have the peer announce that its end is fenced."""
    world.migration.on_fenced(Fenced(A))
    world.migration.on_announced(1, Announcement(0, epoch, cause, ()))
    assert world.links.paths[A].state is PathState.DOWN


@pytest.mark.parametrize("port", [OWN, (1, 0)])
def test_an_excluded_path_is_neither_dialed_nor_awaited(port: tuple[int, int]) -> None:
    world = World(is_open=False, excluded=frozenset([port]))
    assert world.control.dialed == [(1, 1, 0)]
    assert not world.migration.is_whole
    world.open(1, 0)
    assert world.migration.is_whole
    assert world.links.paths[A].cause == EXCLUDED
    world.now += 60.0
    world.failover.tick(world.now, frozenset())
    assert world.transport.probed == []
    order(world, is_excluded=False, port=port)
    world.failover.tick(world.now, frozenset())
    assert world.transport.probed == [straight(A)]


def test_a_path_is_no_longer_dialed_once_it_is_excluded() -> None:
    world = World(is_open=False)
    assert (1, 0, 0) in world.control.dialed
    order(world, is_excluded=True)
    assert world.control.cancelled == [(1, 0)]
    assert world.control.dialed.count((1, 0, 0)) == 1


def test_a_path_that_comes_up_although_excluded_is_fenced() -> None:
    world = World(is_open=False, excluded=frozenset([OWN]))
    assert not world.open(0, 0).is_closed
    assert world.transport.fenced == [A]
    health = order(world, is_excluded=False)
    assert health.share(*OWN) == 0, "it does not show that the port works"


def test_an_excluded_path_moves_its_channels_without_a_strike() -> None:
    world = World()
    for epoch in range(3):
        order(world, is_excluded=True)
        assert world.migration.up(1) == [B]
        end_repair(world, epoch)
        health = order(world, is_excluded=False)
        assert health.share(*OWN) == 0, "no path has come up"
        assert world.failover.failback.held() == {A: 0.0}
        world.open(0, epoch + 1)
    assert [repair.cause for repair in world.migration.log.repairs] == [EXCLUDED] * 3


def test_a_peer_that_hears_of_it_first_causes_no_strike() -> None:
    world = World()
    for epoch in range(3):
        if epoch == 1:  # this end sees the connection close before the announcement arrives
            world.fail(A)
        world.migration.on_announced(1, Announcement(0, epoch, EXCLUDED, ()))
        world.migration.on_fenced(Fenced(A))
        assert world.failover.failback.held() == {A: 0.0}
        world.open(0, epoch + 1)
    assert all(EXCLUDED in repair.cause for repair in world.migration.log.repairs)


def test_an_included_rail_of_a_node_apart_counts_at_once() -> None:
    """Paths inside the node do not show that a port works, and this rank has no others."""
    world = World(nranks=3, nodes=(0, 0, 1), neighbors=[1])
    order(world, is_excluded=True)
    assert order(world, is_excluded=False).share(*OWN) == 0
    agreement = world.failover.agreement
    assert agreement is not None
    agreement.tick(world.now + 1.0)
    assert agreement.known.health.share(*OWN) == WHOLE


def test_bypasses_of_an_excluded_port_are_fenced_and_sought_anew() -> None:
    world = World()
    world.open(BYPASS, 0)
    order(world, is_excluded=True, port=(1, 0))
    assert world.transport.fenced == [A, PathKey(1, BYPASS)]


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
def test_messages_that_no_rank_will_take_are_confirmed(is_early: bool) -> None:
    world = World()
    channel = first_channel(message_context(3))
    arrived = Arrived(A, Frame(channel, 0, 0, 0, 0), memoryview(b"text"), 0.0)
    if is_early:
        world.progress._on_arrived(arrived)
    world.links.drop_messages()
    if not is_early:
        world.progress._on_arrived(arrived)
    assert world.links.receiver(1, channel).consumed == 1
    world.links.confirm_all()
    assert world.transport.confirmed == [(A, channel, 1)]
