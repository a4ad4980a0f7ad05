"""Robust mutexes: the end of a process is seen, and nothing else is taken for one."""

from __future__ import annotations

import errno
import gc
import os
import threading

import pytest
from support.local_ranks import run_ranks

from r2ccl.errors import TransportError
from r2ccl.shm import robust_mutex
from r2ccl.shm.layout import MUTEX, SLEEP_NS, SLEEP_S, set_sleep
from r2ccl.shm.robust_mutex import ExitWatch, is_abandoned
from r2ccl.shm.segment import Segment

_PROGRAMS = "support.local_programs"
_BUSY_NS = 4_000_000
_SECOND_NS = 1_000_000_000


@pytest.fixture
def segment():
    made = Segment.create_of_group(2)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["kill", "exit", "exec", "abort"])
def test_a_process_that_ends_is_reported_once(how):
    results = run_ranks(3, f"{_PROGRAMS}:end_while_awaited", how)
    assert results == [["value", [2]], ["value", [2]], ["killed"]]


@pytest.mark.parametrize("what", ["thread", "fork", "spawn", "stop"])
def test_other_ends_are_not_reported(what):
    assert run_ranks(2, f"{_PROGRAMS}:end_something_else", what) == [["value", []]] * 2


def test_a_mutex_that_is_held_or_was_released_is_not_abandoned(segment):
    address = segment.address + MUTEX
    assert [is_abandoned(address) for _ in range(3)] == [False] * 3
    assert segment._mutex.release()
    assert [is_abandoned(address) for _ in range(3)] == [False] * 3


def test_a_looker_that_ends_is_no_end_of_an_owner_that_has_left(segment):
    address = segment.address + MUTEX
    assert segment._mutex.release()
    pid = os.fork()
    if pid == 0:
        robust_mutex._libc().pthread_mutex_trylock(address)
        os._exit(0)
    os.waitpid(pid, 0)
    assert [is_abandoned(address) for _ in range(2)] == [False] * 2


def test_a_late_thread_locks_memory_that_is_still_mapped(monkeypatch):
    lock = robust_mutex._libc().pthread_mutex_lock
    began, done = threading.Event(), threading.Event()

    def lock_late(address):
        began.wait(10)
        code = lock(address)
        done.set()
        return code

    monkeypatch.setattr(robust_mutex._libc(), "pthread_mutex_lock", lock_late)
    monkeypatch.setattr(robust_mutex, "_THREAD_S", 0.05)
    with pytest.raises(TransportError, match="did not lock a robust mutex within"):
        Segment.create_of_group(2)
    gc.collect()
    began.set()
    assert done.wait(10)


def test_an_error_of_the_lock_is_reported_at_once(monkeypatch):
    monkeypatch.setattr(robust_mutex._libc(), "pthread_mutex_lock", lambda address: errno.EINVAL)
    with pytest.raises(TransportError, match="cannot lock a robust mutex: EINVAL"):
        Segment.create_of_group(2)


@pytest.mark.parametrize("busy_ns", [_BUSY_NS, 2 * _SECOND_NS])
def test_waits_are_short_once_a_peer_has_exited(segment, monkeypatch, busy_ns):
    state, found = segment.words[:64].copy(), []
    set_sleep(state, busy_ns)
    exits = ExitWatch({1: segment.address + MUTEX}, found.append)
    exits.look(state)
    assert (found, state[SLEEP_S] * _SECOND_NS + state[SLEEP_NS]) == ([], busy_ns)
    monkeypatch.setattr(robust_mutex, "is_abandoned", lambda address: True)
    exits.look(state)
    exits.look(state)
    assert found == [1]
    assert state[SLEEP_S] * _SECOND_NS + state[SLEEP_NS] < _BUSY_NS


def test_a_damaged_mutex_is_an_error(segment):
    assert segment._mutex.release()
    segment.data[MUTEX : MUTEX + 48] = 0x77
    with pytest.raises(TransportError, match="robust mutex: EINVAL"):
        is_abandoned(segment.address + MUTEX)


def test_memory_stays_mapped_while_the_mutex_is_held(monkeypatch):
    made = Segment.create_of_group(2)
    address, release = made.address + MUTEX, made._mutex.release
    monkeypatch.setattr(made._mutex, "release", lambda: False)
    made.close()
    assert not is_abandoned(address)
    assert release()


def test_without_a_thread_there_is_no_segment(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(robust_mutex.threading.Thread, "start", start)
    with pytest.raises(TransportError, match=r"cannot start a thread.*raise ulimit -u"):
        Segment.create_of_group(2)
