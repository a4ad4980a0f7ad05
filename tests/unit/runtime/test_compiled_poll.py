"""The wait of a compiled call for its sockets."""

from __future__ import annotations

import os
import select

import numpy as np
import pytest
from numba import njit, types

from r2ccl.runtime.compiled.layout import NCONNS, POLLS, STATE_NWORDS, TIME
from r2ccl.runtime.compiled.loop import poll
from r2ccl.shm.atomics import words_at


@njit(types.int64(types.int64, types.int64))
def compiled_poll(address, timeout_ns):
    return poll(words_at(address), timeout_ns)


@pytest.mark.parametrize("timeout_ns", [0, 900_000_000, 1_000_000_000, 2_500_000_000])
def test_the_kernel_accepts_every_timeout(timeout_ns: int) -> None:
    """It would not report the descriptor, which is ready, if it refused the timeout."""
    reading, writing = os.pipe()
    os.write(writing, b"x")
    # Without connections, the only descriptor is the one that wakes the call.
    polls = np.array([reading | select.POLLIN << 32], np.int64)
    time, state = np.zeros(2, np.int64), np.zeros(STATE_NWORDS, np.int64)
    state[[NCONNS, POLLS, TIME]] = 0, polls.ctypes.data, time.ctypes.data
    try:
        assert compiled_poll(state.ctypes.data, timeout_ns) == -1
    finally:
        os.close(reading)
        os.close(writing)
    assert int(polls[0]) >> 48 == select.POLLIN
