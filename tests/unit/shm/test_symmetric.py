"""Arrays that peers reach: exact results, how calls find them, failures and lifetime."""

from __future__ import annotations

import re

import pytest
from support.local_ranks import run_ranks
from support.reading_programs import needs_reading
from support.slow import slow_but

pytestmark = pytest.mark.timeout(300)
_PROGRAMS = "support.symmetric_programs"


def _run(nranks, program, *arguments):
    return [result for _, result in run_ranks(nranks, f"{_PROGRAMS}:{program}", *arguments)]


@pytest.mark.parametrize("nranks", slow_but([1, 3], [1, 2, 3, 4, 5]))
def test_collectives_on_arrays_that_peers_reach_are_exact(nranks):
    for wrong, ndirect, nanew in _run(nranks, "check_matrix", "all"):
        assert wrong == []
        assert ndirect > 30
        assert nanew == 0


def test_inputs_that_peers_reach_suffice():
    for wrong, ndirect, nanew in _run(3, "check_matrix", "inputs"):
        assert wrong == []
        assert ndirect > 20
        assert nanew == 0


def test_peers_reach_the_arrays_of_some_ranks():
    for rank, (wrong, ndirect, nanew) in enumerate(_run(3, "check_matrix", "even")):
        assert wrong == []
        assert nanew > 5  # allreduces
        assert ndirect > 40 if rank % 2 == 0 else ndirect == 0


def test_other_arrays_pass_through_slots():
    for wrong, ndirect, nanew in _run(2, "check_matrix", "none"):
        assert (wrong, ndirect, nanew) == ([], 0, 0)


@pytest.mark.parametrize("nranks", slow_but([3], [2, 3]))
def test_mixed_calls_at_any_offset_are_exact(nranks):
    assert _run(nranks, "mix", 300) == [[]] * nranks


def test_views_outlive_the_group():
    assert _run(3, "keep") == [[1, True, 0]] * 3


def test_memory_that_all_ranks_have_dropped_is_freed():
    assert _run(3, "drop") == [[6, 12, 15, 12]] * 3


def test_arrays_have_no_name_and_no_descriptor():
    for names, opened, *during_and_after in _run(2, "leave_nothing"):
        assert during_and_after == [names, opened, names, opened]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("size", "InvalidArgument.*rank 10: 8192, rank 11: 12288"),
        ("room", "TransportError.*has 12288 bytes left"),
        ("create", "TransportError.*rank 11: no memory is left, in a test EMFILE$"),
        ("map", r"TransportError.*\(rank 12: no address is left, in a test\)"),
        *((f"{n}", "TransportError.*rank 11: cannot .*EMFILE.*EMFILE$") for n in range(4)),
    ],
)
def test_failed_allocations_fail_on_all_ranks(what, text):
    for (said,) in _run(3, "fail", what):
        assert re.search(text, said), said


@pytest.mark.parametrize(
    "which",
    ["ALLREDUCE", "REDUCE", "BROADCAST", pytest.param("ALLGATHER", marks=needs_reading)],
)
def test_no_call_finishes_with_the_array_of_a_rank_that_left(which):
    assert _run(2, "leave", which)[0] == ["left"]


def test_peers_cannot_write_after_control_c_in_compiled_code():
    assert _run(2, "interrupt") == [True, True]
