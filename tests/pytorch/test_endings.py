"""Process groups end as torch's programs expect: with an error in time, and without a trace."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from pytorch.jobs import finish, run, start

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

PROGRAM = Path(__file__).with_name("endings_rank.py")


@pytest.mark.parametrize("name", ["killed_in_an_allreduce", "killed_in_a_backward_pass"])
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
        "aborted", "calls_have_a_timeout", "futures_raise", "groups_are_cheap", "groups_are_split",
        "initialized_twenty_times", "monitored_barrier_names_the_missing",
    ],
)  # fmt: skip
def test_what_each_program_asserts(name: str, nranks: int) -> None:
    run([PROGRAM, name], nranks)


def test_a_wait_may_be_shorter_than_its_call() -> None:
    run([PROGRAM, "waits_have_a_timeout"], 2)


def test_a_given_secret_is_not_in_the_store() -> None:
    run([PROGRAM, "a_given_secret_is_not_in_the_store"], 2, R2CC_SECRET="ab" * 32)


def test_a_secret_is_made_where_none_is_given() -> None:
    run([PROGRAM, "a_secret_is_made_where_none_is_given"], 2)
