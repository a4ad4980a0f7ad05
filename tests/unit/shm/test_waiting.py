"""Compiled waits and copies: what they order, when they return."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from numba import njit, types

from r2ccl.shm import atomics
from r2ccl.shm.cpus import move_to_cpu
from r2ccl.shm.layout import (
    BASES,
    CPU,
    HOME,
    KEPT,
    MISSES,
    NRANKS,
    RANK,
    SHARERS,
    SPIN,
    SPIN_MAX,
    SPIN_MIN,
    WAITERS,
    WAKER,
    set_sleep,
    state_size,
)
from r2ccl.shm.rounds import copy
from r2ccl.shm.waiting import leave_full_cpu, publish, sleep, wait

_I64 = types.int64


def _wait(address, word, value):
    return wait(atomics.words_at(address), address, word, value)


def _publish(word, value):
    publish(word, value)


def _copy(target, source, nbytes, is_streamed):
    copy(target, source, nbytes, is_streamed)
    atomics.stream_fence()


@pytest.fixture(scope="module")
def compiled_wait():
    return njit(types.boolean(_I64, _I64, _I64), nogil=True)(_wait)


@pytest.fixture(scope="module")
def compiled_publish():
    return njit(types.void(_I64, _I64), nogil=True)(_publish)


def _leave_full_cpu(address):
    leave_full_cpu(atomics.words_at(address), address)
    return atomics.current_cpu()


def _move_to_cpu(cpu):
    move_to_cpu(cpu, atomics.cpu_sets())
    return atomics.current_cpu()


def _sleep(address, word):
    return sleep(atomics.words_at(address), address, word, 0)


@njit(types.void(_I64))
def _futex_wake(word):
    atomics.futex_wake(word)


class Memory:
    """A state, and memory with the word that is waited for."""

    def __init__(self, sleep_ns=2_000_000):
        self.state = np.zeros(state_size(2), np.int64)
        self.words = np.zeros(512, np.int64)
        self.word = self.words.ctypes.data
        self.state[[RANK, NRANKS]] = 0, 2
        self.state[[SPIN, SPIN_MIN, SPIN_MAX]] = 10, 5, 100
        set_sleep(self.state, sleep_ns)
        self.state[BASES : BASES + 2] = self.word
        self.address = self.state.ctypes.data


def test_wait_for_a_reached_value_returns_at_once(compiled_wait):
    memory = Memory()
    memory.words[0] = 8
    assert compiled_wait(memory.address, memory.word, 8)
    assert memory.state[MISSES] == 0


def test_wait_returns_after_the_sleep(compiled_wait):
    memory = Memory()
    memory.words[0] = 7
    assert not compiled_wait(memory.address, memory.word, 8)
    assert memory.words[WAITERS // 8] == 0


def test_vain_waits_pause_less_and_less(compiled_wait):
    memory = Memory(sleep_ns=1000)
    for _ in range(10):
        compiled_wait(memory.address, memory.word, 1)
    assert memory.state[SPIN] == memory.state[SPIN_MIN]
    assert memory.state[MISSES] == 10


@pytest.mark.parametrize("sleep_ns", [999_000_000, 1_000_000_000, 1_500_000_000])
def test_publish_wakes_a_sleeping_thread(compiled_wait, compiled_publish, sleep_ns):
    memory = Memory(sleep_ns=sleep_ns)
    results = []

    def sleep():
        began_s = time.monotonic()
        results.append(compiled_wait(memory.address, memory.word, 3))
        results.append(time.monotonic() - began_s < 0.9)

    thread = threading.Thread(target=sleep)
    thread.start()
    while not memory.words[WAITERS // 8]:
        time.sleep(0.001)
    compiled_publish(memory.word, 3)
    thread.join()
    assert results == [True, True]


def test_words_are_seen_in_the_order_of_publishing(compiled_wait, compiled_publish):
    memory = Memory(sleep_ns=999_000_000)
    seen = []

    def read():
        for number in range(1, 200):
            while not compiled_wait(memory.address, memory.word, number):
                pass
            seen.append(memory.words[64 + number % 8] >= number)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 200):
        memory.words[64 + number % 8] = number
        compiled_publish(memory.word, number)
    thread.join()
    assert all(seen)


@pytest.mark.parametrize("is_on_the_same_cpu", [True, False])
def test_a_woken_thread_keeps_its_cpu_from_then_on(is_on_the_same_cpu):
    compiled = njit(_I64(_I64, _I64), nogil=True)(_sleep)
    memory = Memory(sleep_ns=999_000_000)
    allowed = os.sched_getaffinity(0)
    here = min(allowed)
    memory.state[[HOME, SHARERS]] = here, 1
    seen = []

    def doze():
        os.sched_setaffinity(0, {here})  # of this thread
        seen.append(compiled(memory.address, memory.word))
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=doze)
    thread.start()
    os.sched_setaffinity(0, {here} if is_on_the_same_cpu else allowed - {here} or allowed)
    waker = here if is_on_the_same_cpu else here + 1
    try:
        while thread.is_alive():
            memory.words[WAKER // 8] = waker + 1
            _futex_wake(memory.word)
            thread.join(0.01)
    finally:
        os.sched_setaffinity(0, allowed)
    assert seen == [1, {here}]
    assert (memory.state[KEPT] > 0) == is_on_the_same_cpu


@pytest.mark.parametrize("nhere", [1, 2, 3])
def test_a_rank_goes_home_from_a_cpu_with_too_many_ranks(nhere):
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    compiled = njit(_I64(_I64))(_leave_full_cpu)
    move = njit(_I64(_I64))(_move_to_cpu)
    state, words = np.zeros(state_size(4), np.int64), np.zeros((4, 512), np.int64)
    here, home = allowed[:2]
    state[[RANK, NRANKS, HOME, SHARERS]] = 0, 4, home, 2
    state[BASES : BASES + 4] = [each.ctypes.data for each in words]
    words[1:nhere, CPU // 8], words[nhere:, CPU // 8] = here + 1, home + 1
    before = move(here)
    found = compiled(state.ctypes.data)
    if words[0, CPU // 8] == before + 1 == here + 1:  # else the scheduler has moved the thread
        assert found == (home if nhere > 2 else here)
    assert os.sched_getaffinity(0) == set(allowed)


def test_kept_sleeps_are_counted_and_change_no_affinity():
    compiled = njit(_I64(_I64, _I64), nogil=True)(_sleep)
    memory = Memory(sleep_ns=1000)
    memory.state[[HOME, SHARERS, KEPT]] = min(os.sched_getaffinity(0)), 1, 2
    before = os.sched_getaffinity(0)
    for _ in range(3):
        assert compiled(memory.address, memory.word) == 0
    assert memory.state[KEPT] == 0
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 4095, 4096, 4097, 70_001])
def test_copies_are_exact_at_any_alignment(is_streamed, nbytes):
    compiled = njit(types.void(_I64, _I64, _I64, types.boolean))(_copy)
    source = np.random.default_rng(nbytes).integers(0, 255, nbytes + 64).astype(np.uint8)
    for offset in (0, 1, 33, 63):
        target = np.zeros(nbytes + 128, np.uint8)
        compiled(target.ctypes.data + offset, source.ctypes.data + 3, nbytes, is_streamed)
        assert target[offset : offset + nbytes].tobytes() == source[3 : 3 + nbytes].tobytes()
        assert not target[:offset].any()
        assert not target[offset + nbytes :].any()
