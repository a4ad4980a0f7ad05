"""Paths that are closed because they were idle, and opened again when calls need them."""

import msgspec
from support.failover_world import A, B, Endpoint, World

from r2ccl.errors import NoHealthyRail
from r2ccl.failover.migration.path import Announcement, ClosePaths, ConnectPaths
from r2ccl.types import PathKey


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
