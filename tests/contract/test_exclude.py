"""Contract tests of NICs declared failed, over real processes and real sockets."""

from __future__ import annotations

import functools

import pytest
from support import exclude_programs as programs
from support.jobs import launch
from support.slow import slow_but

TIMEOUT_S = 90.0


@pytest.mark.parametrize("nranks", slow_but([3], [2, 3, 4]))
def test_a_rail_is_excluded_beside_a_call_and_comes_back(nranks: int) -> None:
    run = functools.partial(programs.exclude_beside_a_call, 5_000_000)
    assert launch(run, nranks, timeout_s=TIMEOUT_S) == [[]] * nranks


@pytest.mark.parametrize("mode", slow_but(["auto", "failstop"], ["auto", "migrate", "failstop"]))
def test_what_one_rank_declares_failed_no_rank_uses(mode: str) -> None:
    found = launch(functools.partial(programs.declared_failed, mode), 3, timeout_s=TIMEOUT_S)
    for unused, used in found:
        assert unused == ("excluded", 0)
        assert used[0] == "up"
        assert used[1] > 0


def test_a_declaration_without_a_rail_left_ends_init_on_all() -> None:
    for said in launch(programs.declared_too_much, 2, timeout_s=TIMEOUT_S):
        assert "rank 0 on " in said
        assert "has no rail left, because of NICs excluded" in said
        assert "(R2CC_FAILED_NICS)" in said


def test_a_rail_stays_excluded_in_the_communicator_of_survivors() -> None:
    excluded = ((2, 1),)
    found = launch(programs.exclude_then_shrink, 3, timeout_s=TIMEOUT_S)
    assert found == [[excluded, excluded, ()]] * 3


def test_exclude_and_include_end_if_ranks_close() -> None:
    env = {"R2CC_TIMEOUT_S": "30"}
    first, *others = launch(programs.exclude_while_closing, 3, timeout_s=TIMEOUT_S, env=env)
    assert first == (0, True)
    for norders, is_over in others:
        assert norders >= 6, "the first rank did not carry out the orders"
        assert is_over


def test_an_exclusion_holds_for_all_communicators_of_the_job() -> None:
    found = launch(programs.exclude_for_all_communicators, 3, timeout_s=TIMEOUT_S)
    assert found == [[], [0, 16], [0, 16]]
