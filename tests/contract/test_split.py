"""Contract tests of communicators made from others, over real processes and real sockets."""

from __future__ import annotations

import functools

import pytest
from support import split_programs as programs
from support.jobs import launch
from support.slow import slow_but

TIMEOUT_S = 90.0


def test_ranks_of_a_color_are_ordered_by_their_keys() -> None:
    found = launch(programs.split_in_halves, 5, timeout_s=TIMEOUT_S)
    even, odd = [4, 2, 0], [3, 1]
    for rank, got in enumerate(found):
        members = odd if rank % 2 else even
        whole = float(sum(each + 1 for each in members))
        at = members.index(rank)
        part = sum(range(10 * at, 10 * at + 10)) * len(members)
        assert got == [at, tuple(members), whole, whole, members, part, members[-1]]


def test_parts_of_any_size_are_exchanged_within_a_half() -> None:
    assert launch(programs.exchanged_in_halves, 5, timeout_s=TIMEOUT_S) == [True] * 5


def test_ranks_outside_get_none_and_children_can_be_split() -> None:
    found = launch(programs.created, 4, timeout_s=TIMEOUT_S)
    assert found == [
        [False, False, [2, 0], [0, 2, 3], (0, 1, 2)],
        [True, True],
        [False, False, [2, 0], [0, 2, 3], (0, 1, 2)],
        [True, False, [0, 2, 3], (0, 1, 2)],
    ]


def test_some_ranks_can_make_one_alone() -> None:
    found = launch(programs.created_among, 3, timeout_s=TIMEOUT_S)
    assert found == [[1, (2, 0), [2, 0]], [], [0, (2, 0), [2, 0]]]


@pytest.mark.rails
@pytest.mark.parametrize("nranks", slow_but([4], [2, 3, 4, 5]))
@pytest.mark.parametrize("nfaults", [0, 4])
def test_threads_may_call_at_once_even_while_rails_fail(nranks: int, nfaults: int) -> None:
    run = functools.partial(programs.in_threads, 20, (10, 5_000, 300_000), nfaults)
    found = launch(run, nranks, timeout_s=TIMEOUT_S)
    assert [errors for errors, _ in found] == [[]] * nranks
    assert bool(sum(nrepairs for _, nrepairs in found)) == bool(nfaults)


def test_communicators_need_no_descriptors_and_no_threads() -> None:
    for counts in launch(functools.partial(programs.many, 20, 3), 3, timeout_s=TIMEOUT_S):
        # Connections of the job itself come and go: the last ones of init, probes of a slow rank.
        assert max(counts) - min(counts) < 10


def test_misuse_is_refused_and_the_job_stays_usable() -> None:
    (found, _) = launch(programs.misused, 2, timeout_s=TIMEOUT_S)
    assert [line.partition(":")[0] for line in found] == [
        *["InvalidArgument"] * 23, *["CommunicatorRevoked"] * 3,
    ]  # fmt: skip
    assert "rank 0, which calls create_among(), must be among them" in found[4]


def test_errors_of_a_child_number_ranks_as_in_the_job() -> None:
    found = launch(programs.numbered, 2, timeout_s=TIMEOUT_S)
    assert found == [[], ["rank 1"] * 5]


@pytest.mark.parametrize(
    ("kind", "doing"), [("allreduce", "call "), ("recv", "recv() from rank 1")]
)
def test_an_error_says_which_communicator_the_call_was_on(kind: str, doing: str) -> None:
    text = launch(functools.partial(programs.late, kind), 3, timeout_s=TIMEOUT_S)[2]
    assert text.startswith(f"rank 2: {doing}")
    assert "the communicator of ranks [2, 1] of the job, begun" in text
    assert "rank 1" in text


def test_an_error_in_one_communicator_ends_all_of_the_job() -> None:
    for found in launch(programs.differing, 2, timeout_s=TIMEOUT_S):
        assert len(found) == 2
        assert found[0].startswith("InvalidArgument")
        assert "count=4" in found[0]
        assert "count=3" in found[0]


@pytest.mark.rails
def test_a_rank_that_closes_early_still_agrees_on_the_health() -> None:
    assert launch(programs.closed_early, 2, timeout_s=TIMEOUT_S) == [2.0, 1.0]


@pytest.mark.parametrize("count", [10, 1_000_000])
def test_closing_finishes_the_messages_that_arrive(count: int) -> None:
    run = functools.partial(programs.closed_with_messages, count)
    for rank, found in enumerate(launch(run, 2, timeout_s=TIMEOUT_S)):
        assert found[:5] == ["True True True"] * 5
        closed = f"rank {rank}: the communicator was closed"
        assert found[5:] == ["Message", closed, closed]


def test_closing_the_job_ends_a_call_on_a_child() -> None:
    found = launch(programs.closed_below_a_call, 2, timeout_s=TIMEOUT_S)
    assert found == ["CommunicatorRevoked", "CommunicatorRevoked"]


@pytest.mark.parametrize("shm", ["0", "1"])
def test_a_close_that_times_out_ends_the_calls(shm: str) -> None:
    run = functools.partial(programs.closed_before_a_late_rank, shm)
    found = launch(run, 2, timeout_s=TIMEOUT_S)
    assert found[0] == ("TransportTimeout", False, False)
    assert found[1] == ("CommunicatorRevoked", False, False)


def test_context_ids_are_used_again() -> None:
    run = functools.partial(programs.made_and_closed, 200)
    assert max(launch(run, 3, timeout_s=TIMEOUT_S)) < 150


def test_a_split_that_waits_does_not_hold_up_others() -> None:
    assert launch(programs.made_in_other_orders, 2, timeout_s=TIMEOUT_S) == [2, 2]


def test_closing_ends_a_receive_in_another_thread() -> None:
    found = launch(programs.closed_below_a_receive, 2, timeout_s=TIMEOUT_S)
    assert found == [["CommunicatorRevoked", 2.0]] * 2


def test_each_communicator_may_have_its_own_timeout() -> None:
    (late,), (revoked,) = launch(programs.with_own_timeouts, 2, timeout_s=TIMEOUT_S)
    assert late.startswith("TransportTimeout: "), late
    assert "gave up after 0.5 s" in late
    assert revoked.startswith("CommunicatorRevoked: "), revoked


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_child", [False, True])
def test_a_call_is_refused_if_closed_as_it_begins(is_child: bool, is_async: bool) -> None:
    run = functools.partial(programs.closed_as_a_call_begins, is_child, is_async)
    for rank, (error, *after) in enumerate(launch(run, 2, timeout_s=TIMEOUT_S)):
        assert error == f"CommunicatorRevoked: rank {rank}: the communicator was closed"
        assert after == ([2.0] if is_child else [])


@pytest.mark.parametrize(
    ("nbefore", "is_grouped"), [(0, False), (3, False), (0, True)], ids=["first", "later", "group"]
)
def test_a_call_is_refused_if_closed_before_its_turn(nbefore: int, is_grouped: bool) -> None:
    run = functools.partial(programs.closed_before_the_turn, nbefore, is_grouped)
    for rank, found in enumerate(launch(run, 2, timeout_s=TIMEOUT_S)):
        error = f"CommunicatorRevoked: rank {rank}: the communicator was closed"
        assert found == [error, 2.0]


@pytest.mark.parametrize("kind", ["split", "dup", "create", "create_among"])
def test_ctrl_c_while_making_one_ends_the_job(kind: str) -> None:
    run = functools.partial(programs.interrupted_making, kind)
    found = launch(run, 2, timeout_s=TIMEOUT_S)
    assert found == ["KeyboardInterrupt", "CommunicatorRevoked"]
