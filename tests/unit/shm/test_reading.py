"""`r2ccl.shm.reading`: exact results, and ranks and arrays that cannot be read."""

from __future__ import annotations

import pytest
from support.local_ranks import run_ranks
from support.reading_programs import has_secret_memory, needs_reading
from support.slow import slow_but

pytestmark = [pytest.mark.timeout(300), needs_reading]


def _run(nranks, program, *arguments):
    found = run_ranks(nranks, f"support.reading_programs:{program}", *arguments)
    return [result for _, result in found]


@pytest.mark.parametrize("nranks", slow_but([3], [2, 3, 5]))
def test_arrays_read_from_other_processes_give_exact_results(nranks):
    for wrong, nread in _run(nranks, "check_matrix"):
        assert wrong == []
        assert nread > 60


def test_no_array_is_read_if_one_rank_cannot_be():
    assert _run(3, "check_matrix", 1) == [[[], 0]] * 3


@pytest.mark.skipif(not has_secret_memory(), reason="the kernel has no memfd_secret")
def test_memory_that_nobody_can_read_is_copied():
    assert _run(2, "gather_secret_memory") == [[[True, False], [True, True]]] * 2


def test_a_process_that_can_no_longer_be_read_ends_the_call_soon():
    reader, owner = _run(2, "stop_being_readable")
    assert len(reader) == len(owner) == 2
    assert reader[0].startswith("TransportError: rank 10: process_vm_readv(2) can no longer read")
    assert owner[0].startswith("TimeoutError")
    assert (reader[1], owner[1]) == ("0", "1")
