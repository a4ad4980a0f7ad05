"""Verdicts in simulation: every rank diagnoses the fault, from its own side of each path."""

import pytest

from r2ccl.failover.diagnosis.verdict import VerdictKind
from r2ccl.testing.simulation import (
    CallSpec,
    CutPath,
    FailurePlan,
    Fault,
    NicDown,
    Noise,
    SimOutcome,
    Stop,
    Workload,
    simulate,
)
from r2ccl.types import PathKey

RAIL = 1
#: Long enough for diagnoses: a pause without traffic precedes each call.
WORKLOAD = Workload(nranks=4, calls=(CallSpec(300),) * 4, busy_ms=(700,) * 4)
#: Events at which the first call is in progress.
MOMENTS = range(700, 1_500, 200)
QUIET = Noise()
SEEDS = pytest.mark.parametrize("at", MOMENTS)


def kinds(outcome: SimOutcome) -> dict[tuple[int, PathKey], VerdictKind]:
    """Return the kind of each verdict, by rank and path."""
    assert outcome.is_clean, outcome.errors
    return {
        (rank, verdict.path): verdict.kind
        for rank, verdicts in enumerate(outcome.verdicts)
        for verdict in verdicts
    }


def run(at: int, *faults: Fault, noise: Noise = QUIET) -> SimOutcome:
    return simulate(WORKLOAD, FailurePlan(faults, noise), seed=at)


def star(rank: int, peers: set[int]) -> dict[tuple[int, PathKey], VerdictKind]:
    """Return the verdicts on the paths of `rank`, whose port is dead, to `peers`, at both ends."""
    found = {(rank, PathKey(peer, RAIL)): VerdictKind.LOCAL_NIC for peer in peers}
    return found | {(peer, PathKey(rank, RAIL)): VerdictKind.REMOTE_NIC for peer in peers}


@SEEDS
@pytest.mark.parametrize("is_seen", [True, False], ids=["carrier lost", "silent"])
def test_a_dead_port_is_local_to_its_owner_and_remote_to_others(at: int, is_seen: bool) -> None:
    outcome = run(at, NicDown(at, 2, RAIL, is_seen))
    # Silence is noticed only where there is traffic: between neighbours of the ring.
    assert kinds(outcome) == star(2, {0, 1, 3} if is_seen else {1, 3})


@SEEDS
def test_a_dead_port_is_named_over_a_noisy_control_plane(at: int) -> None:
    noise = Noise(lose=20, repeat=20, late=30, late_ms=5)
    outcome = run(at, NicDown(at, 2, RAIL), noise=noise)
    assert kinds(outcome) == star(2, {0, 1, 3})


@SEEDS
def test_one_unreachable_pair_is_a_link_fault_at_both_ends(at: int) -> None:
    outcome = run(at, CutPath(at, 0, 1, RAIL))
    assert kinds(outcome) == {
        (0, PathKey(1, RAIL)): VerdictKind.LINK,
        (1, PathKey(0, RAIL)): VerdictKind.LINK,
    }


@SEEDS
def test_all_ports_of_a_rail_at_once_are_the_rail(at: int) -> None:
    outcome = run(at, *(NicDown(at, rank, RAIL, is_seen=False) for rank in range(4)))
    found = kinds(outcome)
    assert set(found.values()) == {VerdictKind.RAIL}
    assert {path.rail for _, path in found} == {RAIL}


@SEEDS
def test_a_stopped_process_is_slow_and_nothing_moves(at: int) -> None:
    outcome = run(at, Stop(at, 3, 2_000))
    found = kinds(outcome)
    assert set(found.values()) == {VerdictKind.PEER_SLOW}
    # A rank that waits for a waiting rank calls that one slow.
    assert 3 in {path.peer for _, path in found}
    assert outcome.repairs == 0


def test_without_a_fault_there_is_no_verdict() -> None:
    assert kinds(run(0)) == {}
