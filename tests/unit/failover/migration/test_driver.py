"""Paths that are dialed, fail with or without their port, are fenced, and are dialed again."""

import logging

import pytest
from support.failover_world import A, B, Endpoint, World, straight

from r2ccl.failover.connector import Offer
from r2ccl.failover.failover import PortUp
from r2ccl.failover.health.rounds import Promise
from r2ccl.failover.health.table import WHOLE
from r2ccl.failover.migration.link import LinkReport
from r2ccl.failover.migration.path import Announcement, PathState
from r2ccl.transport.base import Fenced, RailChanged
from r2ccl.types import PathKey


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


def test_a_path_that_ends_while_this_rank_leaves_is_debug(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.revocation.leave()
    with caplog.at_level(logging.DEBUG, "r2ccl.failover.migration.driver"):
        world.fail(A)
        world.repair(A)
    assert len(logged(caplog)) == 2
    assert {level for level, _ in logged(caplog)} == {logging.DEBUG}


# Ports


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


def test_carrier_events() -> None:
    world = World()
    world.failover.on_carrier(1, False)
    assert world.transport.fenced == [B]
    assert "CARRIER_DOWN" in world.links.paths[B].cause
    world.failover.on_carrier(1, True)
    assert world.control.kicked == [1]


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


# Repairs


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


@pytest.mark.parametrize("is_new", [True, False], ids=["a channel is added", "a path comes up"])
def test_a_repair_names_channels_that_got_a_route_before(is_new: bool) -> None:
    world = World(is_open=is_new)
    if not is_new:
        world.open(0, 0)
    for channel in range(4):
        world.links.sender(1, channel)
    lost = [channel for channel in range(4) if world.links.senders[1, channel].route == A]
    world.fail(A)
    if is_new:
        world.links.sender(1, 4)
    else:
        world.open(1, 0)
    world.repair(A)
    (repair,) = world.migration.log.repairs
    assert repair.moved == dict.fromkeys(lost, 1)


def test_each_of_two_repairs_names_its_own_channels() -> None:
    world = World()
    for channel in range(2):
        world.links.sender(1, channel)
    world.fail(A)
    world.fail(B)
    world.repair(A)
    world.open(0, 1)
    world.repair(B)
    first, second = world.migration.log.repairs
    assert (first.moved, second.moved) == ({}, {1: 0})


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


def test_a_message_about_a_rail_that_does_not_exist_is_ignored() -> None:
    world = World()
    world.failover.on_message(1, Announcement(9, 0, "EIO", ()))
    assert world.revocation.error is None


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_carrier_suffices_where_no_path_leaves_the_node(is_apart: bool) -> None:
    world = World(nranks=3, nodes=(0, 0, 1), neighbors=[1] if is_apart else [1, 2])
    agreement = world.failover.agreement
    assert agreement is not None

    def share() -> int:
        world.now += 1.0
        agreement.tick(world.now)
        for peer in (1, 2) if agreement.waits_for() else ():
            agreement.on_message(peer, Promise(agreement.known.health.version, 0))
        return agreement.known.health.share(0, 0)

    world.failover.on_carrier(0, False)
    world.repair(A)
    world.look(0.1, frozenset())
    assert share() == 0
    world.failover.on_carrier(0, True)
    world.heal(A)
    world.open(0, 1)
    assert world.links.paths[A].state is PathState.UP
    assert share() == (WHOLE if is_apart else 0)
