"""Comparison of the calls of ranks, and confirmation of the slices that arrive."""

import pytest
from support.failover_world import A, B, World

from r2ccl.errors import InvalidArgument
from r2ccl.failover.migration.calls import first_channel, message_context
from r2ccl.failover.migration.path import Announcement
from r2ccl.transport.base import Arrived, Cleared, Fenced, Frame
from r2ccl.types import CallSignature, Collective


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


def test_an_idle_rank_confirms_eager_slices_below_the_threshold() -> None:
    world = World()
    link = world.links.receiver(1, 0)
    link.consumed = link.delivered = link.received = link.posted = 1
    world.look(0.1, frozenset())
    assert world.transport.confirmed == [(A, 0, 1)]


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
