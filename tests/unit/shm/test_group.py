"""`LocalGroup` between processes: exact results, failures, and what it leaves behind."""

from __future__ import annotations

import pytest
from support.local_ranks import run_ranks

_PROGRAMS = "support.local_programs"


def _run(nranks, program, *arguments):
    return run_ranks(nranks, f"{_PROGRAMS}:{program}", *arguments)


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5])
def test_collectives_give_exact_results(nranks):
    assert _run(nranks, "check_matrix") == [["value", []]] * nranks


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_all_dtypes_and_ops_give_exact_results(nranks):
    assert _run(nranks, "check_reductions") == [["value", []]] * nranks


@pytest.mark.parametrize("nranks", [2, 3, 5])
def test_calls_in_any_order_do_not_mix(nranks):
    assert _run(nranks, "mix_calls", 300) == [["value", []]] * nranks


def test_memory_does_not_grow():
    for _, grown in _run(2, "count_memory", 100_000):
        assert grown < 1 << 20


@pytest.mark.parametrize("when", ["before", "within"])
def test_killed_rank_is_named(when):
    *survivors, killed = _run(3, "die", when)
    assert killed == ["killed"]
    for _, name, message, _ in survivors:
        assert name == "PeerLost"
        assert "lost rank 12" in message


def test_stopped_rank_is_waited_for():
    assert _run(3, "stop", 1.0) == [["value", float(1 << 20)]] * 3


def test_revoked_call_raises_on_all_ranks():
    for _, name, message, _ in _run(3, "revoke"):
        assert name == "CommunicatorRevoked"
        assert "enough" in message


def test_ctrl_c_ends_the_call_on_all_ranks():
    first, *others = _run(3, "interrupt")
    assert first == ["value", "interrupted"]
    for _, name, message, _ in others:
        assert name == "CommunicatorRevoked"
        assert "KeyboardInterrupt" in message


def test_timeout_names_the_rank():
    first, *_ = _run(2, "time_out")
    assert first[1] == "TransportTimeout"
    assert "waited 0.3 s for rank 11" in first[2]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("collective", "barrier of 0 elements"),
        ("count", "allreduce of 4 elements"),
        ("op", "op MAX"),
        ("parts", "sends another number of elements"),
    ],
)
def test_different_calls_are_found(what, message):
    first, *_ = results = _run(3, "differ", what)
    assert [each[1] for each in results] == ["InvalidArgument"] * 3
    assert message in first[2]


def test_call_after_a_peer_closed_names_it():
    first, second, last = _run(3, "leave")
    assert last == ["value", None]
    for _, name, message, _ in (first, second):
        assert name == "PeerLost"
        assert "lost rank 12" in message


def test_ranks_may_end_after_the_last_call():
    assert _run(3, "finish_and_leave") == [["value", "closed"]] * 3


def test_second_thread_is_refused():
    assert _run(2, "use_twice") == [["value", "ConcurrentCalls"]] * 2


def test_rank_with_another_secret_is_refused():
    results = _run(3, "wrong_secret")
    assert [each[1] for each in results] == ["TransportError"] * 3


def test_group_leaves_nothing_behind():
    for _, (names, open_before, *during, names_after, open_after) in _run(2, "leave_nothing"):
        assert during[0] == names_after == names
        assert open_after == open_before
