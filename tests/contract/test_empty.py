"""Contract tests of arrays of `Communicator.empty`, over real processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
from support import empty_programs as programs
from support.jobs import launch, survivors
from support.slow import slow_but

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_SHM", "1")


def run(program: Callable[..., Any], nranks: int, *given: Any) -> Any:
    return launch(functools.partial(program, *given), nranks, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("setting", ["0", "1"])
@pytest.mark.parametrize("nranks", [1, 3])
def test_arrays_have_the_form_that_was_asked_for(
    setting: str, nranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_SHM", "0" if nranks == 1 else setting)
    run(programs.forms, nranks)


def test_slices_and_views_are_reached() -> None:
    wanted = [[True] * 8 + [rank == programs.ROOT] + [False] * 3 for rank in range(3)]
    assert run(programs.slices, 3) == wanted


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("every", slow_but([127], [127, 41, 5]))
def test_a_slice_of_the_matrix_is_exact(every: int) -> None:
    found = launch(functools.partial(programs.matrix, every), 3, timeout_s=1180.0)
    assert [wrong for _, wrong in found] == [[]] * 3


def test_peers_cannot_write_after_control_c_in_a_repeated_call() -> None:
    assert run(programs.interrupted, 2) == [(True, True)] * 2


@pytest.mark.parametrize("nranks", [2, 3])
def test_equal_parts_may_have_other_places_on_each_rank(nranks: int) -> None:
    assert run(programs.placed, nranks) == [[True] * 8] * nranks


def test_empty_in_another_thread_leaves_the_running_call_alone() -> None:
    assert run(programs.empty_beside_a_call, 2) == [("ConcurrentCalls", 2.0)] * 2


def test_survivors_of_an_allocation_do_not_wait_for_the_dead() -> None:
    found = survivors(programs.killed_in_an_allocation, 3, [[2]], timeout_s=TIMEOUT_S)
    assert len(found) == 2
    assert all(seconds < 5.0 for seconds in found.values())


def test_views_outlive_the_communicator() -> None:
    assert run(programs.kept, 2) == [(2.0, 0)] * 2


def test_a_forked_child_shares_the_contents() -> None:
    for first, said in run(programs.forked, 2):
        assert first == 2.0
        assert "forked" in said


def test_peers_cannot_write_to_an_output_after_an_error() -> None:
    first, *others = run(programs.revoked, 2)
    assert first == ("CommunicatorRevoked", True)
    assert others == [("", True)]


def test_too_large_arrays_are_an_error_that_ends_nothing() -> None:
    for said, total in run(programs.refused, 3, 1 << 50):
        assert re.search(r"cannot share \d+ bytes each: their host, or one of their cgroups", said)
        assert total == 3.0


def test_arrays_survive_the_death_of_a_rank() -> None:
    found = survivors(functools.partial(programs.survived, 1), 3, [[1]], timeout_s=TIMEOUT_S)
    assert list(found.values()) == [("PeerLost of rank 1", [6.0, 4.0, 8.0])] * 2
