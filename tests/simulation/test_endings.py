"""Failures beyond repair: every rank ends, in bounded time, with an error that names the cause."""

import pytest
from support.slow import sweep

from r2ccl.errors import CommunicatorRevoked, NoHealthyRail, PeerLost, TransportTimeout
from r2ccl.testing.simulation import (
    CallSpec,
    CutPath,
    FailurePlan,
    Kill,
    Lose,
    NicDown,
    Noise,
    Stop,
    Workload,
    simulate,
)

TWICE = (CallSpec(300), CallSpec(300))
#: Timeouts of the simulated ranks, in seconds.
NO_RAIL_TIMEOUT_S = 5.0
PEER_TIMEOUT_S = 5.0
#: Events until all paths are connected.
CONNECTED = 150


@sweep(400, 60)
@pytest.mark.parametrize("told", [(0, 1), (0,), ()], ids=["both told", "one told", "none told"])
@pytest.mark.parametrize("is_loud", [True, False])
def test_all_rails_of_a_pair_dead(told: tuple[int, ...], is_loud: bool, step: int) -> None:
    workload = Workload(calls=TWICE, is_loud=is_loud, fabric="none")
    for at in range(CONNECTED, 900, step):
        cuts = tuple(CutPath(at + 20 * rail, 0, 1, rail, told, keep=rail) for rail in range(3))
        outcome = simulate(workload, FailurePlan(cuts), seed=at)
        zero, one, two = outcome.errors
        assert isinstance(zero, NoHealthyRail)
        assert isinstance(one, NoHealthyRail)
        assert (zero.peer, one.peer) == (1, 0)
        assert set(zero.causes) == {0, 1, 2}
        assert isinstance(two, CommunicatorRevoked)
        # Suspected three times at most, one rail after the other.
        assert NO_RAIL_TIMEOUT_S < outcome.time_s < NO_RAIL_TIMEOUT_S + 3 * 0.7


@sweep(4, 1)
def test_a_rank_that_dies_after_its_goodbye_owes_confirmations(step: int) -> None:
    """Kill a rank that has all its data before it confirms; found at random: survivors waited."""
    workload = Workload(
        nranks=3, nrails=2, calls=(CallSpec(0, channels=6, is_in_place=False),), slice_nbytes=32,
        eager_nbytes=0, eager_slots=1, landing_depth=1, no_rail_timeout_ms=20_000, is_loud=False,
    )  # fmt: skip
    down = NicDown(273, 1, 1, keep=1, late_us=100)
    for at in range(380, 400, step):
        outcome = simulate(
            workload, FailurePlan((down, Kill(at, 1)), Noise(lose=30, late_ms=1)), seed=1
        )
        assert outcome.time_s < PEER_TIMEOUT_S + 1.0
        for error in (outcome.errors[0], outcome.errors[2]):
            assert error is None or isinstance(error, PeerLost | CommunicatorRevoked)


@sweep(5, 1)
def test_a_loss_that_only_some_ranks_survive_ends_those_too(step: int) -> None:
    """Kill rank 0 after it said goodbye to rank 3 only, while ranks 1 and 2 still need it.

    Found at random: rank 3 needed nothing more of rank 0, and waited for the goodbyes of ranks that
    had given up.
    """
    workload = Workload(
        nranks=4, nrails=2, calls=(CallSpec(120, "packed_trees", 6, is_in_place=False),),
        slice_nbytes=256, eager_nbytes=0, eager_slots=1, landing_depth=1, busy_ms=(1, 30),
        no_rail_timeout_ms=20_000, is_loud=False,
    )  # fmt: skip
    down = NicDown(196, 0, 1, keep=2)
    for at in range(410, 425, step):
        outcome = simulate(workload, FailurePlan((down, Kill(at, 0)), Noise(lose=30)), seed=35419)
        assert outcome.time_s < PEER_TIMEOUT_S + 1.0
        for error in outcome.errors[1:]:
            assert error is None or isinstance(error, PeerLost | CommunicatorRevoked)


def test_no_rail_from_the_start() -> None:
    cuts = tuple(CutPath(0, 0, 1, rail) for rail in range(3))
    outcome = simulate(Workload(fabric="none"), FailurePlan(cuts))
    assert all(
        isinstance(error, NoHealthyRail | TransportTimeout | CommunicatorRevoked)
        for error in outcome.errors
    )


@sweep(700, 60)
@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("is_loud", [True, False])
def test_a_killed_rank_is_lost_for_all(dead: int, is_loud: bool, step: int) -> None:
    workload = Workload(calls=TWICE, is_loud=is_loud)
    for at in range(0, 1_500, step):
        outcome = simulate(workload, FailurePlan((Kill(at, dead),)), seed=at)
        survivors = [error for rank, error in enumerate(outcome.errors) if rank != dead]
        assert all(isinstance(error, PeerLost) for error in survivors), (at, outcome.errors)
        assert [error.peer for error in survivors] == [dead, dead]  # type: ignore[union-attr]
        assert outcome.time_s < PEER_TIMEOUT_S + 1.0


@sweep(500, 100)
def test_a_killed_rank_behind_a_noisy_control_plane(step: int) -> None:
    noise = Noise(lose=30, repeat=20, late=50, late_ms=50)
    for at in range(200, 1_200, step):
        plan = FailurePlan((Kill(at, 1), CutPath(at, 0, 2, 0, restore_us=1_000)), noise)
        outcome = simulate(Workload(calls=TWICE), plan, seed=at)
        assert isinstance(outcome.errors[0], PeerLost)
        assert isinstance(outcome.errors[2], PeerLost)


@sweep(325, 25)
def test_memory_of_a_call_that_raised_is_left_alone(step: int) -> None:
    """Check that late writes of paths cut just before the error find every end fenced.

    The simulation itself checks each write.
    """
    for at in range(CONNECTED, 800, step):
        cuts = tuple(
            CutPath(at, 0, 1, rail, (0, 1), keep=6, late_us=6_000_000) for rail in range(3)
        )
        cuts += (CutPath(at + 40, 1, 2, 0, keep=6, late_us=5_500_000),)
        outcome = simulate(Workload(calls=TWICE, fabric="none"), FailurePlan(cuts), seed=at)
        assert all(outcome.errors)


@sweep(375, 50)
@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stopped_rank_goes_on(stopped: int, step: int) -> None:
    """Stop a rank for longer than the suspicion and less than the peer timeout: no path is lost."""
    for at in range(CONNECTED, 900, step):
        outcome = simulate(Workload(calls=TWICE), FailurePlan((Stop(at, stopped, 2_000),)), seed=at)
        assert outcome.is_clean
        assert outcome.repairs == 0


def test_a_rank_stopped_too_long_is_lost() -> None:
    outcome = simulate(Workload(calls=TWICE), FailurePlan((Stop(400, 1, 20_000),)))
    assert isinstance(outcome.errors[0], PeerLost)
    assert isinstance(outcome.errors[2], PeerLost)
    assert outcome.errors[1] is not None


@sweep(19, 1)
def test_every_message_lost_once(step: int) -> None:
    """Lose every message once: control frames are sent again, data frames break the connection."""
    workload = Workload(calls=(CallSpec(60),))
    for number in range(0, simulate(workload).nmessages, step):
        outcome = simulate(workload, FailurePlan((Lose(number),)), seed=number)
        assert outcome.is_clean, number


@sweep(275, 25)
def test_a_computing_rank_keeps_its_paths_and_answers_failures(step: int) -> None:
    """Let rank 0 compute for 2 s while one of its paths fails and is repaired."""
    workload = Workload(calls=TWICE, busy_ms=(2_000, 0, 0))
    for at in range(CONNECTED, 700, step):
        outcome = simulate(workload, FailurePlan((CutPath(at, 0, 1, at % 3, (1,)),)), seed=at)
        assert outcome.is_clean
        assert outcome.repairs in (0, 2)


def test_init_does_not_wait_for_a_rank_that_left_and_died() -> None:
    """Rank 0 sends, leaves and dies while rank 3 is stopped before its first path is up."""
    call = CallSpec(0, "chain/reduce", 1)
    workload = Workload(7, 2, (call, call), slice_nbytes=32, eager_nbytes=0)
    outcome = simulate(workload, FailurePlan((Stop(91, 3, 1500), Kill(394, 0))), seed=0)
    assert outcome.errors == (None,) * 7
    assert outcome.ncalls == (2,) * 7
