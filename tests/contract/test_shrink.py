"""Contract tests of shrink: survivors continue with the right sums, or learn why they cannot."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import failure_programs as programs
from support import localjobs
from support.jobs import launch
from support.slow import slow_but

from r2ccl.bootstrap.launch import LocalJob

pytestmark = pytest.mark.timeout(200)

SCRIPT = Path(__file__).with_name("shrink_rank.py")
#: Seconds for the start (half a minute on a busy machine), R2CC_INIT_TIMEOUT_S, and the error: the
#: library's own message must come first.
TIMEOUT_S = 150.0
STEPS = 30
PLAN: dict[str, Any] = {"steps": STEPS, "count": 200_000}


@contextmanager
def ranks(
    nranks: int, fates: Mapping[int, Mapping[str, Any]], **plan: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `nranks` of the script, each with its own plan.

    Ranks that die at the same step are one process group, which one signal kills: a rank that died
    later could still shrink together with the survivors.
    """
    groups: dict[Any, int] = {}
    started = []
    with LocalJob(nranks) as job:
        for rank in range(nranks):
            fate = fates.get(rank, {})
            argv = [sys.executable, str(SCRIPT), json.dumps({**PLAN, **plan, **fate})]
            group = groups.get(fate["dies"], 0) if "dies" in fate else None
            started.append(localjobs.start(job, rank, argv, process_group=group))
            if group == 0:
                groups[fate["dies"]] = started[rank].pid
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def reports(
    nranks: int, fates: Mapping[int, Mapping[str, Any]], **plan: Any
) -> dict[int, dict[str, Any]]:
    """Return the reports of the ranks that do not die."""
    with ranks(nranks, fates, **plan) as started:
        dying = {rank for rank, fate in fates.items() if "dies" in fate}
        for rank in dying:
            started[rank].wait(TIMEOUT_S)
            assert started[rank].returncode == -signal.SIGKILL
        return {rank: report(started[rank]) for rank in range(nranks) if rank not in dying}


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


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line  # readline() ends with the process if it fails


def test_a_stopped_rank_that_was_given_up_wakes_as_no_member() -> None:
    fates = {1: {"stops": 3}}
    with ranks(3, fates, settings={"peer_timeout_s": 1.0}) as started:
        survivors = [started[0], started[2]]
        for process in survivors:
            wait_for_line(process, "shrunk")
        started[1].send_signal(signal.SIGCONT)
        woken = report(started[1])
        check_finished({0: report(started[0]), 2: report(started[2])})
    assert woken["failure"].startswith("NoQuorum: rank 1: can reach only ranks [1] of 3, but")
    assert woken["errors"] == ["PeerLost"]


def test_a_rank_that_does_not_call_is_named() -> None:
    first, second, third = launch(programs.does_not_shrink, 3, timeout_s=TIMEOUT_S)
    for text in (first, third):
        assert text.startswith("TransportTimeout"), text
        assert "ranks [1] have not called shrink()" in text
    assert second.startswith("NoQuorum")
    assert "(rank 0: it left; rank 2: it left)" in second


def test_a_revoked_communicator_shrinks_to_all_without_leaks() -> None:
    found = launch(functools.partial(programs.shrink_again_and_again, 6), 3, timeout_s=TIMEOUT_S)
    assert found == [[]] * 3


def test_abort_beside_a_stopped_peer_takes_bounded_time() -> None:
    fates: dict[int, dict[str, Any]] = {0: {"aborts_after_s": 1.0}, 1: {"stops": 3}}
    with ranks(2, fates, settings={"peer_timeout_s": 600.0}) as started:
        begin = time.monotonic()
        left = report(started[0])
        assert time.monotonic() - begin < 20
        assert left["failure"].startswith("CommunicatorRevoked: rank 0: abort() was called")
