"""Process groups end as torch's programs expect: errors come in time, and nothing is left over."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from pytorch.jobs import finish, run, start

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

PROGRAM = Path(__file__).with_name("endings_rank.py")


@pytest.mark.parametrize(
    "name",
    [
        "killed_in_an_allreduce", "killed_in_a_backward_pass", "killed_while_gradients_travel",
    ],
)  # fmt: skip
def test_the_others_raise_after_a_kill(name: str) -> None:
    ranks = start([PROGRAM, name], 3)
    written = finish(ranks)
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL, 0], written
    assert [written[rank][0].strip() for rank in (0, 2)] == ["PeerLost"] * 2


def test_the_others_raise_after_an_exception_of_a_program() -> None:
    ranks = start([PROGRAM, "ends_with_an_error"], 3)
    written = finish(ranks)
    assert [rank.returncode for rank in ranks] == [0, 1, 0], written


def test_a_program_may_end_without_destroying_its_groups() -> None:
    assert run([PROGRAM, "ends_without_destroy"], 2) == ["last line\n"] * 2


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize(
    "name",
    [
        "a_group_may_have_a_longer_timeout",
        "aborted", "calls_end_in_time_without_a_wait", "calls_have_a_timeout", "futures_raise",
        "groups_are_cheap", "groups_are_split",
        "initialized_again_after_a_failure", "initialized_a_hundred_times",
        "messages_have_a_timeout", "messages_into_a_transposed_tensor",
        "monitored_barrier_names_the_missing", "waits_in_another_order",
        "what_is_refused_leaves_the_group_usable",
    ],
)  # fmt: skip
def test_what_each_program_asserts(name: str, nranks: int) -> None:
    run([PROGRAM, name], nranks)


def test_a_wait_may_be_shorter_than_its_call() -> None:
    run([PROGRAM, "waits_have_a_timeout"], 2)


def test_a_forked_child_may_end_during_a_call() -> None:
    assert run([PROGRAM, "forks_during_a_call"], 2) == ["7 2.0\n"] * 2


def test_a_given_secret_is_not_in_the_store() -> None:
    run([PROGRAM, "a_given_secret_is_not_in_the_store"], 2, R2CC_SECRET="ab" * 32)


def test_a_secret_is_made_where_none_is_given() -> None:
    run([PROGRAM, "a_secret_is_made_where_none_is_given"], 2)


def test_a_rank_may_destroy_its_group_while_others_call() -> None:
    run([PROGRAM, "destroyed_while_others_call"], 3, R2CC_INIT_TIMEOUT_S="3")


def test_a_rank_that_makes_no_group_is_named() -> None:
    run([PROGRAM, "a_missing_rank_is_named"], 2)


@pytest.mark.parametrize("name", ["groups_in_threads", "groups_made_beside_calls"])
def test_groups_work_at_the_same_time(name: str) -> None:
    run([PROGRAM, name], 3)


def test_two_jobs_run_at_once() -> None:
    jobs = [start([PROGRAM, "groups_in_threads"], 2) for _ in range(2)]
    for ranks in jobs:
        written = finish(ranks)
        assert [rank.returncode for rank in ranks] == [0, 0], written
