"""When paths are probed, what the answers do to them, and how connections of probes are joined."""

import pytest
from support.failover_world import A, B, Endpoint, World, straight

from r2ccl.errors import TransportError
from r2ccl.failover.connector import Answer
from r2ccl.failover.migration.path import PathState
from r2ccl.transport.base import Joined, Probed
from r2ccl.types import PathKey, ProbeKey


def test_a_silent_queue_pair_moves_by_its_own_error_alone() -> None:
    world = World(joined={1})
    world.links.receiver(1, 0).post(None, 1, 0, None, 0)
    world.look(0.9)
    assert straight(B) in world.transport.probed
    world.answer(B, False)
    assert world.links.paths[B].state is PathState.UP
    world.fail(B)
    assert world.links.paths[B].state is PathState.FENCING


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


def test_the_silence_of_a_path_ends_with_its_connection() -> None:
    world = World()
    world.links.recv(world.links.receiver(1, 0), None, None, 0)  # type: ignore[arg-type]
    world.look(0.4)
    world.fail(A)
    world.repair(A)
    world.open(A.rail, 1)
    world.look(0.1)
    world.answer(A, True)  # the probe of the failure's diagnosis
    world.transport.probed.clear()
    world.look(0.2)
    assert world.transport.probed == [straight(B)]


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
