"""Contract tests of shrink: survivors continue with the right sums, or learn why they cannot."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from contract import shrink_rank
from support import failure_programs as programs
from support.jobs import launch, survivors
from support.slow import slow_but

pytestmark = pytest.mark.timeout(200)

#: Seconds for the start (half a minute on a busy machine), R2CC_INIT_TIMEOUT_S, and the error: the
#: library's own message must come first.
TIMEOUT_S = 150.0
STEPS = 30
PLAN: dict[str, Any] = {"steps": STEPS, "count": 200_000}


def reports(
    nranks: int, fates: Mapping[int, Mapping[str, Any]], dying: Sequence[int] = (), **plan: Any
) -> dict[int, dict[str, Any]]:
    """Run `nranks` ranks, each with its own plan; return the reports of those that do not die.

    Ranks that die at the same step are one process group, which one signal kills: a rank that died
    later could still shrink together with the survivors. `dying` are others that are killed.
    """
    groups: dict[Any, list[int]] = {}
    for rank, fate in fates.items():
        if "dies" in fate:
            groups.setdefault(fate["dies"], []).append(rank)
    plans = {rank: {**PLAN, **plan, **fates.get(rank, {})} for rank in range(nranks)}
    ends = [*groups.values(), *([rank] for rank in dying)]
    return survivors(functools.partial(shrink_rank.run, plans), nranks, ends, timeout_s=TIMEOUT_S)


def check_finished(found: Mapping[int, Mapping[str, Any]]) -> None:
    for rank, each in found.items():
        assert (each["failure"], each["steps"]) == ("", STEPS), f"rank {rank}: {each}"
        assert each["names"] == sorted(found)


@pytest.mark.parametrize(
    ("nranks", "victim"),
    slow_but([(4, 2), (3, 0)], [(4, 2), (4, 0), (3, 0), (2, 1), (9, 4)]),
)
def test_survivors_of_a_death_in_mid_call_finish_the_job(nranks: int, victim: int) -> None:
    found = reports(nranks, {victim: {"dies": 3}})
    check_finished(found)
    for each in found.values():
        assert each["errors"] == ["PeerLost"]


def test_two_deaths_at_once_of_five() -> None:
    check_finished(reports(5, {0: {"dies": 3}, 3: {"dies": 3}}))


def test_one_death_after_another() -> None:
    check_finished(reports(5, {0: {"dies": 3}, 4: {"dies": 12}}))


@pytest.mark.parametrize("point", slow_but(["built"], ["tell", "begin_building", "built", "go_on"]))
@pytest.mark.parametrize("second", slow_but([0], [0, 4]))
def test_a_death_in_the_middle_of_shrinking(point: str, second: int) -> None:
    check_finished(reports(5, {1: {"dies": 3}, second: {"dies": point}}))


def test_a_survivor_that_comes_late_is_met_again() -> None:
    """Delay one survivor: the first attempt gives it up, although it never failed."""
    fates = {1: {"dies": 3}, 3: {"lingers_s": 4.0}}
    settings = {"peer_timeout_s": 2.0, "init_timeout_s": 30.0}
    check_finished(reports(4, fates, settings=settings))


def test_of_two_halves_the_one_with_rank_0_goes_on() -> None:
    check_finished(reports(4, {2: {"dies": 3}, 3: {"dies": 3}}))


@pytest.mark.parametrize(
    ("nranks", "victims"), [(4, (0, 1)), (5, (0, 2, 4)), (2, (0,))], ids=["half", "most", "other"]
)
def test_too_few_survivors_are_told_why(nranks: int, victims: tuple[int, ...]) -> None:
    found = reports(nranks, {victim: {"dies": 3} for victim in victims})
    for each in found.values():
        assert each["failure"].startswith("NoQuorum"), each
        assert 'shrink(quorum="any")' in each["failure"]
        for victim in victims:
            assert f"rank {victim}: its process is gone" in each["failure"]


def test_any_quorum_goes_on_alone() -> None:
    check_finished(reports(3, {0: {"dies": 3}, 1: {"dies": 3}}, quorum="any"))


def test_a_stopped_rank_that_was_given_up_wakes_as_no_member() -> None:
    fates: dict[int, dict[str, Any]] = {0: {"wakes": 1}, 1: {"stops": 3}}
    found = reports(3, fates, tells_pids=True, settings={"peer_timeout_s": 1.0})
    woken = found.pop(1)
    check_finished(found)
    assert woken["failure"].startswith("NoQuorum: rank 1: can reach only ranks [1] of 3, but")
    assert woken["errors"] == ["PeerLost"]


def test_a_rank_that_does_not_call_is_named() -> None:
    first, second, third = launch(programs.does_not_shrink, 3, timeout_s=TIMEOUT_S)
    for text in (first, third):
        assert text.startswith("TransportTimeout"), text
        assert "ranks [1] have not called shrink()" in text
    assert second.startswith("NoQuorum")
    # One of them may report the other as gone before the farewell of the other arrives.
    gone = [f"rank {peer}: (it left|reported gone by rank {2 - peer})" for peer in (0, 2)]
    assert re.search(rf"\({'; '.join(gone)}\)", second), second


def test_a_revoked_communicator_shrinks_to_all_without_leaks() -> None:
    found = launch(functools.partial(programs.shrink_again_and_again, 6), 3, timeout_s=TIMEOUT_S)
    assert found == [[]] * 3


def test_abort_beside_a_stopped_peer_takes_bounded_time() -> None:
    fates: dict[int, dict[str, Any]] = {0: {"aborts_after_s": 0.5, "kills": 1}, 1: {"stops": 3}}
    settings = {"peer_timeout_s": 600.0}
    left = reports(2, fates, dying=[1], tells_pids=True, settings=settings)[0]
    assert left["took_s"] < 20
    assert left["failure"].startswith("CommunicatorRevoked: rank 0: abort() was called")
