"""Errors that end the communicator, who is told of them, and ranks that leave."""

import msgspec
import pytest
from support.failover_world import A, B, World, straight

from r2ccl.errors import CommunicatorRevoked, NoHealthyRail, PeerLost, TransportError
from r2ccl.failover.revocation import Leaving, Revoke, Spared
from r2ccl.transport.base import Fenced


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


def test_a_path_that_ends_while_this_rank_leaves_is_no_repair() -> None:
    world = World()
    world.revocation.leave()
    world.fail(A)
    world.repair(A)
    assert world.transport.fenced == [A]
    assert not world.migration.log.repairs


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


@pytest.mark.parametrize("is_asked", [True, False], ids=["running", "waiting for its port"])
def test_after_an_error_no_verdict_is_made(
    is_asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.fail(B)
    world.repair(B)
    world.look(0.1)
    assert world.transport.probed.count(straight(B)) >= 1
    if not is_asked:
        # The paths that no call waits for follow once no path is being repaired.
        world.fail(A)
        world.failover.on_carrier(1, False)
    world.failover.on_peer_lost(1, "silent", 5.0)
    if is_asked:
        world.answer(B, True)
    else:
        world.now += 1.0
        world.repair(A)
    assert world.failover.diagnosis is not None
    assert world.failover.diagnosis.verdicts() == ()
    assert not [each for each in caplog.records if "failed" in each.getMessage()]


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
    assert "(rank 1 reports: its process is gone; no data over the network)" in str(error)


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
