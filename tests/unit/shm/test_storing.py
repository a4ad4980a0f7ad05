"""`r2ccl.shm.storing`: which calls write slots past the caches."""

from __future__ import annotations

import numpy as np

from r2ccl.shm import layout
from r2ccl.shm.storing import LEAST_NBYTES, choose


def _choices(ncalls: int, nbytes: int = LEAST_NBYTES, **words: int) -> list[int]:
    """Return which of the next calls write slots past the caches."""
    state, given = (
        np.zeros(layout.state_size(2), np.int64),
        np.zeros(layout.LOOP_NWORDS, np.int64),
    )
    for name, value in words.items():
        given[getattr(layout, name)] = value
    found = []
    for number in range(ncalls):
        state[layout.NCALLS] = 1000 + number
        choose(state, given, nbytes)
        found.append(int(state[layout.IS_PAST_CACHES]))
    return found


def test_the_first_calls_try_both_ways() -> None:
    assert _choices(5) == [0, 1, 0, 1, 0]


def test_later_calls_use_the_faster_way_but_for_trials() -> None:
    for words in (
        {"LOOP_CACHED_NS": 3, "LOOP_PAST_NS": 5},
        {"LOOP_CACHED_NS": 5, "LOOP_PAST_NS": 3},
    ):
        is_past = words["LOOP_PAST_NS"] < words["LOOP_CACHED_NS"]
        found = _choices(6400, LOOP_NCALLS=5, **words)
        ntrials = found.count(not is_past)
        assert 50 < ntrials < 200


def test_trials_fall_on_the_same_calls_of_all_ranks() -> None:
    cached = _choices(640, LOOP_NCALLS=5, LOOP_CACHED_NS=3, LOOP_PAST_NS=5)
    past = _choices(640, LOOP_NCALLS=70, LOOP_CACHED_NS=5, LOOP_PAST_NS=3)
    assert [1 - each for each in past] == cached


def test_small_calls_use_the_caches() -> None:
    assert not any(_choices(640, LEAST_NBYTES - 1, LOOP_CACHED_NS=5, LOOP_PAST_NS=3))
