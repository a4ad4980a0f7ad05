"""Contract tests of device arrays and asynchronous calls, over real processes.

Each process has a fake GPU, so that calls go through pinned memory and real sockets. The order of
every access by GPU and host is checked.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from support import device_programs as programs
from support.jobs import launch, survivors
from support.slow import slow_but

TIMEOUT_S = 90.0


#: No data, one window, several windows; the slow cases have one element, too, and more windows.
COUNTS, MORE_COUNTS = (0, 100, 5_001), (0, 1, 100, 20_001)
CASES = [(nranks, MORE_COUNTS) for nranks in (1, 2, 3)]


@pytest.mark.parametrize(
    ("nranks", "counts"), slow_but([(1, COUNTS), (3, COUNTS)], [(1, COUNTS), (3, COUNTS), *CASES])
)
def test_every_collective_is_exact(nranks: int, counts: tuple[int, ...]) -> None:
    run = functools.partial(programs.collectives, counts)
    assert launch(run, nranks, timeout_s=TIMEOUT_S) == [[]] * nranks


@pytest.mark.parametrize(("nranks", "counts"), slow_but([(3, COUNTS)], [(3, COUNTS), *CASES]))
def test_parts_and_scans_do_as_on_the_host(nranks: int, counts: tuple[int, ...]) -> None:
    run = functools.partial(programs.copied_collectives, counts)
    assert launch(run, nranks, timeout_s=TIMEOUT_S) == [[]] * nranks


def test_a_rail_lost_in_the_middle_changes_nothing() -> None:
    run = functools.partial(programs.losing_a_rail, 50_000)
    results = launch(run, 3, timeout_s=TIMEOUT_S)
    assert [is_right for is_right, _ in results] == [True] * 3
    assert sum(nrepairs for _, nrepairs in results) >= 2


def test_no_stream_hangs_when_a_rank_dies(tmp_path: Path) -> None:
    run = functools.partial(programs.dying, 1, str(tmp_path))
    for said in survivors(run, 3, [[1]], timeout_s=TIMEOUT_S).values():
        assert "lost rank 1" in said


def test_a_failure_nobody_waited_for_is_told_at_the_next_call() -> None:
    for said in launch(programs.unseen_failure, 2, timeout_s=TIMEOUT_S):
        assert "for a test" in said


def test_a_call_can_be_asked_about_after_close() -> None:
    assert launch(programs.asked_after_close, 2, timeout_s=TIMEOUT_S) == [[]] * 2


def test_nobody_waits_for_a_rank_whose_gpu_is_broken() -> None:
    for said in launch(programs.broken_card, 3, timeout_s=TIMEOUT_S):
        assert "the driver is broken" in said


def test_allgather_and_allgatherv_are_different_calls() -> None:
    for said in launch(programs.allgather_beside_allgatherv, 2, timeout_s=TIMEOUT_S):
        assert "differs" in said


def test_a_call_beside_a_blocking_one_is_refused(tmp_path: Path) -> None:
    run = functools.partial(programs.beside_a_blocking_call, str(tmp_path))
    assert launch(run, 2, timeout_s=TIMEOUT_S) == [True] * 2


def test_a_call_is_refused_while_another_thread_begins_one() -> None:
    assert launch(programs.begun_by_two_threads, 2, timeout_s=TIMEOUT_S) == [True] * 2


def test_mistakes_are_refused_and_harm_nothing() -> None:
    for said in launch(programs.wrong_arguments, 2, timeout_s=TIMEOUT_S):
        assert "streams do not apply" in said[0]
        assert "both on the same GPU" in said[1]
        assert "both on the same GPU" in said[2]
        assert "'fast'" in said[3]
        assert "on GPU 3" in said[4]
        assert "op=99: libraries number the operations differently" in said[5]
        assert "only inputs in host memory" in said[6]


@pytest.mark.parametrize("nranks", slow_but([3], [1, 3]))
def test_asynchronous_calls_keep_their_order(nranks: int) -> None:
    run = functools.partial(programs.asynchronous_on_the_host, 20)
    assert launch(run, nranks, timeout_s=TIMEOUT_S) == [[]] * nranks


def test_groups_of_ranks_reduce_at_the_same_time_and_lose_a_rail() -> None:
    """Reduce among groups of ranks, one per position in a node, as hierarchical allreduces do."""
    results = launch(
        functools.partial(programs.allreduces_among_some, 50_001), 4, timeout_s=TIMEOUT_S
    )
    assert [is_right for is_right, _ in results] == [True] * 4
    assert sum(nrepairs for _, nrepairs in results) >= 2
