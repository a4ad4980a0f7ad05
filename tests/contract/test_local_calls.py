"""Contract tests of calls in shared memory, over real processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
from support import matrix_programs, mixed_programs
from support import sharing_programs as programs
from support.jobs import launch, survivors
from support.slow import slow_but

import r2ccl

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_SHM", "1")


def run(program: Callable[..., Any], nranks: int, *given: Any) -> Any:
    return launch(functools.partial(program, *given), nranks, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("every", slow_but([71], [71, 29]))
def test_a_slice_of_the_matrix_is_exact(every: int) -> None:
    found = run(matrix_programs.matrix, 3, every)
    assert [wrong for _, wrong in found] == [[]] * 3


def test_all_ways_to_call_take_the_same_path() -> None:
    for ncalls, nslow, of_all in run(programs.ways_to_call, 3):
        assert (ncalls, nslow, of_all) == (13, 0, 15)


def test_calls_on_different_paths_differ() -> None:
    for error in run(programs.other_paths, 3):
        assert "differs between ranks" in error
        assert "allreduce(count=1000" in error
        assert "scan(" in error or "rank 2 called a collective that uses the network" in error


def test_a_rank_that_does_not_call_is_named() -> None:
    first, second, _ = run(programs.late, 3)
    for pending, _ in (first, second):
        assert "ranks [2] have not called it" in pending
        assert "data in shared memory from rank 2" in pending
    errors = sorted(error for _, error in (first, second))
    assert errors[-1].startswith("TransportTimeout")
    assert "ranks [2] have not called it" in errors[-1]


def test_messages_advance_while_a_call_waits() -> None:
    assert run(programs.beside_the_network, 3)[2] == (1 << 24, 3000.0)


def test_a_stopped_rank_is_waited_for() -> None:
    assert run(programs.stopped, 3) == [float(1 << 18)] * 3


def test_a_repeated_call_sees_changed_arrays() -> None:
    run(programs.repeated, 2)


@pytest.mark.parametrize("what", ["broadcast", "reduce", "child broadcast", "child reduce"])
def test_last_calls_that_differ_are_found_at_the_end(what: str) -> None:
    for error in run(programs.differ_at_the_end, 2, what):
        assert re.search(r"^call \d+ differs between ranks: .*broadcast", error), error


@pytest.mark.parametrize("what", ["missing", "child missing"])
def test_a_last_call_that_one_rank_leaves_out_is_found(what: str) -> None:
    for error in run(programs.differ_at_the_end, 2, what):
        wanted = r"^rank 1 called close\(\) after call \d+, but rank 0 made call \d+: all ranks"
        assert re.search(wanted, error), error


def test_a_late_receiver_has_made_no_other_call() -> None:
    assert run(programs.slow_receiver, 3) == [40] * 3


@pytest.mark.parametrize("kind", ["list", "arrays", "array"])
def test_a_repeated_call_sees_changed_places(kind: str) -> None:
    wanted = [[1.0, 2.0, 2.0, 0.0]] * 5 + [[0.0, 1.0, 2.0, 2.0]] * 3 + [[2.0]]
    assert run(programs.moved, 2, kind) == [wanted] * 2


@pytest.mark.parametrize("what", ["empty", "allreduce", "queued"])
def test_a_handler_in_a_repeated_call_may_not_call(what: str) -> None:
    (said, *results), (_, *others) = run(programs.handled, 2, what)
    assert said == "ConcurrentCalls"
    assert results == others == [2.0, 2.0 if what == "queued" else 1.0]


def test_calls_of_several_forms_are_all_repeated() -> None:
    run(programs.alternated, 2)


def test_a_communicator_may_close_as_a_thread_repeats_a_call() -> None:
    for name in run(programs.closed_in_a_repetition, 2):
        assert name in ("CommunicatorRevoked", "ConcurrentCalls", "PeerLost")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("size", "count=24.*count=21|count=21.*count=24"),
        ("root", "root=0.*root=2|root=2.*root=0"),
        ("counts", "differs between ranks"),
        ("sizes", "passes 8 elements for rank 2, rank 2 expects [79] elements"),
    ],
)
def test_a_repeated_call_that_differs_is_found(what: str, why: str) -> None:
    for error in run(programs.repeated_differently, 3, what):
        assert re.search(why, error), error


@pytest.mark.parametrize("what", ["numba", "memory"])
@pytest.mark.parametrize("rank", [0, 1])
def test_auto_uses_the_network_if_one_rank_cannot(
    what: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_SHM", "auto")
    assert run(programs.obstructed, 3, what, rank) == [(False, 9.0)] * 3


def test_it_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R2CC_SHM")
    assert run(programs.shares, 2, "") == [True] * 2


def test_auto_uses_the_network_that_faults_are_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R2CC_SHM")
    assert run(programs.shares, 2, "faults") == [False] * 2


def test_auto_uses_the_network_for_a_chosen_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R2CC_SHM")
    assert run(programs.shares, 2, "ring") == [False] * 2


def test_an_error_says_why_memory_cannot_be_shared() -> None:
    # A rank that hears of another one's error first raises CommunicatorRevoked, with this error.
    with pytest.raises(r2ccl.R2cclError, match=r"no shared memory: rank 1: .*in a test"):
        run(programs.obstructed, 3, "memory", 1)


def test_a_rank_that_fails_as_memory_is_shared_ends_the_others() -> None:
    errors = run(programs.exhausted, 3, 1)
    assert errors[1] == "MemoryError"
    for rank in (0, 2):
        assert re.search("rank 1.*MemoryError|CommunicatorRevoked.*MemoryError", errors[rank])


def test_only_so_many_communicators_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_SHM", "auto")
    for first, _, *shared, without, again in run(programs.many, 2):
        assert all((first, *shared))
        assert (without, again) == (False, True)


@pytest.mark.parametrize(("setting", "is_loaded"), [("0", False), ("auto", True), ("1", True)])
def test_code_is_loaded_before_ranks_are_forked(
    setting: str, is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_SHM", setting)
    assert r2ccl.launch(programs.is_loaded, 2, timeout_s=TIMEOUT_S) == [is_loaded] * 2


def test_memory_is_freed_at_the_end() -> None:
    # A segment is mapped twice: as memory for collectives, and for messages.
    assert run(programs.freed, 2) == [(8, 0)] * 2


def test_survivors_share_memory_again() -> None:
    run = functools.partial(programs.survived, 1)
    found = survivors(run, 3, [[1]], timeout_s=TIMEOUT_S)
    assert list(found.values()) == [("PeerLost of rank 1", 2.0, True)] * 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ncalls", "dtypes"),
    slow_but(
        [(60, mixed_programs.QUICK)], [(60, mixed_programs.QUICK), (34_000, mixed_programs.DTYPES)]
    ),
    ids=lambda given: str(given) if isinstance(given, int) else f"{len(given)} types",
)
def test_any_mixture_of_calls_is_exact_and_holds_nothing(
    ncalls: int, dtypes: tuple[str, ...]
) -> None:
    mixed_programs.compile_kernels(dtypes)
    run = functools.partial(mixed_programs.mixed, dtypes, ncalls, 0, 7)
    reports = launch(run, 4, timeout_s=840.0)
    assert [report.wrong for report in reports] == [[]] * 4
    for report in reports:
        assert report.late[:2] == report.early[:2]
        assert report.late[2] <= report.early[2] + 12
