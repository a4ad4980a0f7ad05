"""Calls over TCP that repeat the last one behave as those that do not."""

from __future__ import annotations

import functools

import pytest
from support import repeated_programs as programs
from support.jobs import launch
from support.slow import slow_but


@pytest.mark.parametrize("what", ["empty", "exclude", "send"])
def test_a_handler_in_a_repeated_call_is_refused(what: str) -> None:
    found = launch(functools.partial(programs.handler_calls, what), 2, timeout_s=60.0)
    assert found[0][0] == "ConcurrentCalls"
    assert [is_exact for _, is_exact, _ in found] == [True, True]
    assert found[0][2] > 0


def test_sums_that_overflow_raise_no_error() -> None:
    for total, nleft in launch(programs.overflows, 2, timeout_s=60.0):
        assert total == float("inf")
        assert nleft > 0


def test_a_failed_repetition_leaves_no_reference_to_its_arrays() -> None:
    assert launch(programs.times_out, 2, timeout_s=60.0) == [[False, False]] * 2


@pytest.mark.parametrize("nlocal", [10, 100])
def test_calls_in_shared_memory_after_a_held_one_are_counted(nlocal: int) -> None:
    program = functools.partial(programs.held_until_close, nlocal)
    for found in launch(program, 2, timeout_s=60.0):
        assert [passed_on for _, passed_on in found] == [said for said, _ in found]


def test_senders_of_small_slices_may_be_sixty_calls_ahead() -> None:
    """Otherwise rank 1 would wait for the root, which waits for a message of rank 1."""
    assert launch(functools.partial(programs.calls_ahead, 60), 2, timeout_s=60.0) == [True, True]


def test_slices_that_arrive_before_their_call_are_counted_once() -> None:
    (sent, _), (_, received) = launch(programs.counts_of_early_slices, 2, timeout_s=60.0)
    assert sent == received > 0


def test_ctrl_c_counts_the_traffic_of_repeated_calls_once() -> None:
    """Before each line that settles them: some add to counts that others have changed already."""
    program = functools.partial(programs.counts_despite_ctrl_c, 300)
    found = launch(program, 2, timeout_s=100.0)
    (sent, received, ncalls, ncame), (peer_sent, peer_received, peer_ncalls, _) = found
    assert (sent, received) == (peer_received, peer_sent)
    assert max(ncalls, peer_ncalls) <= 3 * 300
    assert 0 < ncame < 300  # the last lines are after the end of settling


def test_calls_are_repeated_after_calls_of_another_form() -> None:
    for usual, after in launch(programs.repeats_after_another_form, 2, timeout_s=60.0):
        assert usual > 10
        assert after > 10


def test_timers_that_are_due_run_before_a_repetition() -> None:
    for ndue, *found in launch(programs.timers_between_repetitions, 2, timeout_s=60.0):
        # On a busy machine a rank may wait so long that the data loop takes over.
        nrun, nleft, nread = found
        assert nrun > ndue // 2 > max(nleft, nread)


def test_timers_that_are_due_run_before_calls_that_are_not_held() -> None:
    for ncalls, ntimers, nafter in launch(programs.timers_before_other_calls, 2, timeout_s=60.0):
        assert ntimers >= ncalls  # more if a call waits long
        assert nafter >= ncalls // 2


def test_calls_after_one_in_python_run_in_compiled_code() -> None:
    assert launch(programs.calls_after_one_in_python, 2, timeout_s=60.0)[0] > 15


def test_ctrl_c_in_a_join_leaves_the_held_calls_whole() -> None:
    found = launch(functools.partial(programs.joins_despite_ctrl_c, 250), 3, timeout_s=100.0)
    assert [nwrong for nwrong, _, _ in found] == [0, 0, 0]
    _, nheld, ncame = found[0]
    assert nheld > ncame > 0  # the last lines are after the end of the join


def test_receivers_of_scatters_in_turn_repeat_them() -> None:
    found = launch(functools.partial(programs.scatters_in_turn, 500), 2, timeout_s=60.0)
    assert [nwrong for nwrong, _ in found] == [0, 0]
    assert all(nrepeated > 50 for _, nrepeated in found)


@pytest.mark.parametrize(
    "what",
    slow_but(["allreduce", "message"], ["allreduce", "message", "health", "registration"]),
)
def test_ctrl_c_as_a_function_begins_frees_the_data_loop(what: str) -> None:
    (owned, nfunctions), _ = launch(
        functools.partial(programs.owned_after_ctrl_c, what), 2, timeout_s=100.0
    )
    assert owned == []
    assert nfunctions > 3
