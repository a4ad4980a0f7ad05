"""Calls over TCP in compiled code: results do not depend on where they return to Python."""

from __future__ import annotations

import functools

import pytest
from support import compiled_programs as programs
from support.slow import slow_but

import r2ccl

LIMITS = (0, 1, 2, 3, 4, 5, 7, 11, 16, 25)
#: Many slices, and confirmations that peers wait for.
SMALL = {"eager_nbytes": 1 << 10, "slice_nbytes": 1 << 12, "eager_slots": 2}


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("nranks", slow_but([3], [2, 3, 4]))
@pytest.mark.parametrize("limit", slow_but([0, 3], LIMITS))
def test_results_are_exact_wherever_a_call_leaves(limit, nranks, settings):
    program = functools.partial(programs.mixture, limit, 10, settings)
    found = r2ccl.launch(program, nranks, timeout_s=100.0)
    assert [nwrong for nwrong, _, _ in found] == [0] * nranks
    assert sum(nfinished for _, nfinished, _ in found) > 0
    if limit:
        assert sum(nleft for _, _, nleft in found) > 0


def test_bandwidth_is_measured_as_in_python():
    program = functools.partial(programs.mixture, 0, 10, {"balance": "1", "algo": "ring"})
    assert [nwrong for nwrong, _, _ in r2ccl.launch(program, 3, timeout_s=100.0)] == [0, 0, 0]
