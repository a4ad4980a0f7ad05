"""`r2ccl.shm.transfer`: which calls use slots in the caches, slots past them, or none."""

from __future__ import annotations

import numpy as np
import pytest

from r2ccl.shm import layout
from r2ccl.shm.transfer import CACHED, PAST_CACHES, READ, choose


def _choices(
    ncalls: int,
    durations_ns: tuple[int, ...] = (),
    *,
    nbefore: int = 0,
    is_choosing: bool = True,
    may_read: bool = False,
) -> list[int]:
    """Return the transfers of the next calls, after `nbefore` calls with these durations."""
    state, given = (
        np.zeros(layout.state_size(2), np.int64),
        np.zeros(layout.LOOP_NWORDS, np.int64),
    )
    given[layout.LOOP_NCALLS] = nbefore
    for transfer, duration_ns in enumerate(durations_ns):
        given[layout.LOOP_TRANSFERS_NS + transfer] = duration_ns
    found = []
    for number in range(ncalls):
        state[layout.NCALLS] = 1000 + number
        choose(state, given, is_choosing, may_read)
        found.append(int(state[layout.TRANSFER]))
    return found


def _rows(choices: list[int]) -> list[int]:
    """Return the transfer of each row of four calls."""
    rows = [choices[at : at + 4] for at in range(0, len(choices), 4)]
    assert all(len(set(row)) == 1 for row in rows)
    return [row[0] for row in rows]


def test_the_first_calls_use_each_transfer_in_turn():
    assert _rows(_choices(4 * 11, (5, 4, 3))) == [0, 1, *[1] * 6, 0, 1, 1]
    rows = _rows(_choices(4 * 140, (5, 4, 3), may_read=True))
    assert rows[:12] == [0, 1, 2, *[2] * 5, 0, 1, 2, 2]
    assert rows[126:132] == [2, 2, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("durations_ns", "may_read", "best"),
    [
        ((3, 5, 4), False, CACHED),
        ((5, 3, 2), False, PAST_CACHES),
        ((3, 5, 4), True, CACHED),
        ((5, 3, 4), True, PAST_CACHES),
        ((5, 4, 3), True, READ),
        ((5, 4, 0), True, PAST_CACHES),
    ],
)
def test_later_calls_use_the_fastest_but_for_trials(durations_ns, may_read, best):
    found = _choices(64000, durations_ns, nbefore=2000, may_read=may_read)
    others = {CACHED, PAST_CACHES, READ} - {best} - ({READ} if not may_read else set())
    for other in others:
        assert 200 < found.count(other) < 800
    assert set(found) == {best, *others}


def test_trials_are_the_same_on_all_ranks():
    cached, past = (_choices(64000, each, nbefore=2000) for each in ((3, 5), (5, 3)))
    trials = [pair for pair in zip(cached, past, strict=True) if pair != (CACHED, PAST_CACHES)]
    assert 500 < len(trials) < 2000
    assert set(trials) == {(CACHED, CACHED), (PAST_CACHES, PAST_CACHES)}


def test_calls_that_do_not_choose_use_the_caches():
    assert not any(_choices(640, (5, 3, 2), is_choosing=False, may_read=True))
