"""Compiled functions that keep a thread on a CPU: where it runs, and that its affinity stays."""

from __future__ import annotations

import os

import numpy as np
import pytest
from numba import njit, types

from r2ccl.shm import atomics
from r2ccl.shm.cpus import leave_free, move_to_cpu, stay_on
from r2ccl.shm.layout import CPU_SET_NBYTES

_I64 = types.int64


@njit(_I64(_I64))
def _move(cpu):
    move_to_cpu(cpu, atomics.cpu_sets())
    return atomics.current_cpu()


@njit(_I64(_I64, _I64))
def _stay(cpu, sets):
    return stay_on(cpu, sets)


@njit(types.void(_I64, _I64))
def _leave(nbytes, sets):
    leave_free(nbytes, sets)


@pytest.fixture
def allowed():
    cpus = os.sched_getaffinity(0)
    yield cpus
    os.sched_setaffinity(0, cpus)


def test_thread_moves_to_each_allowed_cpu(allowed):
    for cpu in allowed:
        assert _move(cpu) == cpu
        assert os.sched_getaffinity(0) == allowed


def test_thread_does_not_move_to_a_cpu_that_is_not_allowed(allowed):
    here, elsewhere = min(allowed), max(allowed)
    os.sched_setaffinity(0, {here})
    assert _move(8 * CPU_SET_NBYTES) == here
    assert here == elsewhere or _move(elsewhere) == here
    assert os.sched_getaffinity(0) == {here}


def test_thread_stays_on_one_cpu_until_it_is_free(allowed):
    sets = np.zeros(3 * CPU_SET_NBYTES, np.uint8)
    at = sets.ctypes.data
    nbytes = _stay(max(allowed), at)
    assert nbytes > 0
    assert os.sched_getaffinity(0) == {max(allowed)}
    _leave(nbytes, at)
    assert os.sched_getaffinity(0) == allowed


def test_affinity_that_somebody_else_changed_stays(allowed):
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    sets = np.zeros(3 * CPU_SET_NBYTES, np.uint8)
    at = sets.ctypes.data
    nbytes = _stay(min(allowed), at)
    os.sched_setaffinity(0, {max(allowed)})
    _leave(nbytes, at)
    assert os.sched_getaffinity(0) == {max(allowed)}
