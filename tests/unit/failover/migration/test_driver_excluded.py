"""Paths of ports that are excluded, and included again."""

import pytest
from support.failover_world import A, B, World, straight

from r2ccl.failover.health.rounds import Promise
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.failover.migration.path import Announcement, PathState
from r2ccl.transport.base import Fenced
from r2ccl.types import BYPASS, PathKey

OWN = (0, 0)
EXCLUDED = "EXCLUDED: the NIC at one end was excluded"


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


def test_a_rank_that_leaves_still_carries_out_orders_of_others() -> None:
    world, answers = World(), []
    order(world, is_excluded=True)
    world.revocation.leave()
    agreement = world.failover.agreement
    assert agreement is not None
    # Postponed, because the last round has just ended.
    agreement.exclude([OWN], answers.append, is_excluded=False)
    world.look(1.0)
    agreement.on_message(1, Promise(agreement.known.health.version, 0))
    assert answers == [""]


def test_bypasses_of_an_excluded_port_are_fenced_and_sought_anew() -> None:
    world = World()
    world.open(BYPASS, 0)
    order(world, is_excluded=True, port=(1, 0))
    assert world.transport.fenced == [A, PathKey(1, BYPASS)]
