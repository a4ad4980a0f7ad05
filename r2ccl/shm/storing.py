"""Compiled choice between two ways to write slots: to the caches, or past them to memory.

Which way is faster depends on the cores of the ranks. If they share a last-level cache, the peer
finds the data there. If not, it fetches each line from the other core's cache, which takes several
times as long as reading memory. The scheduler, or a hypervisor, may move a rank to another core at
any time. Each prepared call therefore uses the two ways in turn at first, remembers the shortest
recent duration with each, and then uses the faster way, except in some calls, which try the slower
one. All ranks make these trials in the same calls, because a way makes a difference only if all
ranks use it.

Small calls (see `LEAST_NBYTES`), calls with a root, and scans do not choose: they write to the
caches.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import clock_ns
from r2ccl.shm.layout import (
    BEGUN_NS,
    IS_PAST_CACHES,
    LOOP_CACHED_NS,
    LOOP_NCALLS,
    LOOP_PAST_NS,
    NCALLS,
    TIME,
)

#: Smallest size in bytes of a part, or of the input of an allreduce, for which a call chooses.
LEAST_NBYTES = 1 << 14
#: One of 2**6 calls is a trial, at irregular intervals, which no loop of a program can match.
_TRIAL_MASK = (1 << 6) - 1
_MULTIPLIER, _SHIFT = 0x9E3779B1, 20
_AGEING_SHIFT = 3
#: Number of first calls that take turns between the two ways.
_NFIRST = 5


@inlined
def choose(state: Any, given: Any, nbytes: Any) -> None:
    """Choose how this rank writes its slots in a call that begins.

    `given` is a pointer to the words of the prepared call. `nbytes` is the size of a part (the mean
    size, if parts differ in size) or, in an allreduce, of the whole input. With less than
    `LEAST_NBYTES`, for example 0, the rank writes to the caches.
    """
    state[BEGUN_NS] = 0
    state[IS_PAST_CACHES] = 0
    if nbytes >= LEAST_NBYTES:
        ncalls = given[LOOP_NCALLS]
        given[LOOP_NCALLS] = ncalls + 1
        if ncalls < _NFIRST:
            state[IS_PAST_CACHES] = ncalls & 1
        else:
            is_better = given[LOOP_PAST_NS] < given[LOOP_CACHED_NS]
            is_trial = (state[NCALLS] * _MULTIPLIER >> _SHIFT) & _TRIAL_MASK == 0
            state[IS_PAST_CACHES] = is_better != is_trial


@inlined
def note_begin(state: Any, address: Any, given: Any) -> None:
    """Store the time at which all ranks have begun the call, if `note_end` is to learn from it."""
    if given[LOOP_NCALLS] > 1:  # in its first call, an array may get its memory
        state[BEGUN_NS] = clock_ns(address + 8 * TIME)


@inlined
def note_end(state: Any, address: Any, given: Any) -> None:
    """Remember the duration of a call that has finished, if `note_begin` stored its beginning.

    A shorter duration replaces the one remembered for this way of writing. A longer duration raises
    the remembered one by at most an eighth, because the call may have been slow only because ranks
    were late.
    """
    if state[BEGUN_NS]:
        duration_ns = clock_ns(address + 8 * TIME) - state[BEGUN_NS]
        at = LOOP_PAST_NS if state[IS_PAST_CACHES] else LOOP_CACHED_NS
        shortest = given[at]
        if shortest:
            duration_ns = min(duration_ns, shortest + (shortest >> _AGEING_SHIFT) + 1)
        given[at] = duration_ns


__all__ = ["LEAST_NBYTES", "choose", "note_begin", "note_end"]
