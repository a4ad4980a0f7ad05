"""Repetition of a call over TCP: the tables of a finished call become those of the next one.

When a call has ended in compiled code, its connections may stay lent, and its tables then *hold*
the state of its links. The next call of the same plan need not import and export that state. Eager
slices that peers have not confirmed yet must stay in memory, so successive calls use the slots of
the arena in rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.compiling import copy_bytes, inlined
from r2ccl.runtime.compiled.layout import (
    ARENA,
    ARRIVED,
    ASKED,
    BULK_ADDED,
    BULK_TAKEN,
    CLEARED,
    CONFIRMED,
    DELIVERED,
    DONE,
    EAGER_ADDED,
    EAGER_TAKEN,
    EARLY,
    FIRST_RECEIVED,
    FIRST_SENT,
    FIRST_SLOT,
    IDLE_SINCE,
    IS_DELAYING,
    IS_READABLE,
    IS_RESILIENT,
    IS_STALLED,
    LOOP,
    NCONNS,
    NFOREIGN,
    NLOGGED,
    NPAIRS,
    NRECEIVES,
    NREPEATS,
    NSENDS,
    NSLOTS,
    NSTEPS,
    OP,
    OP_STEP,
    PASSED,
    POSTED,
    RELEASED,
    REMAINING,
    RETIRED,
    SLOT_NBYTES,
    SLOT_ROWS,
    SPACES,
    TOTAL,
    USED,
)
from r2ccl.runtime.compiled.tables import conn_of, pair_of, step_of
from r2ccl.runtime.staged_call import AFTER, BEFORE, FORM, IN_OUTPUT, NOWHERE, OUTPUT, SOURCE
from r2ccl.shm.atomics import call_function, words_at
from r2ccl.shm.layout import CHANGED, FINISHED
from r2ccl.shm.rounds import fits


@inlined
def slot_row(state: Any, number: Any) -> Any:
    """Return a pointer to the row in `SLOT_ROWS` of the slot that repetition `number` uses."""
    slot = number % state[NSLOTS]
    return words_at(state[SLOT_ROWS] + 8 * (1 + state[NPAIRS]) * slot)


@inlined
def is_slot_free(state: Any) -> Any:
    """Return whether the next call may overwrite the copies of earlier slices in its slot.

    With `Config.is_resilient`, peers must have confirmed these slices.
    """
    if state[IS_RESILIENT]:
        row = slot_row(state, state[NREPEATS] + 1)
        for number in range(state[NPAIRS]):
            pair = pair_of(state, number)
            if pair[NSENDS] and pair[CONFIRMED] < row[1 + number] + pair[NSENDS]:
                return False
    return True


@inlined
def renew(state: Any) -> None:
    """Change the tables of a held call that has ended into those of the next call.

    The words that are not changed have their initial values or stay valid for the next call:
    nothing is queued, staged or read in part. If the next call uses other memory, the caller sets
    `SPACES`.
    """
    state[OP] += state[OP_STEP]
    state[NREPEATS] += 1
    state[REMAINING] = state[TOTAL]
    state[ARENA] = state[FIRST_SLOT] + state[NREPEATS] % state[NSLOTS] * state[SLOT_NBYTES]
    state[NLOGGED] = 0
    state[IDLE_SINCE] = state[IS_DELAYING] = state[NFOREIGN] = 0
    for number in range(state[NSTEPS]):
        step = step_of(state, number)
        step[DONE] = step[PASSED] = 0
    for number in range(state[NCONNS]):
        conn = conn_of(state, number)
        conn[IS_STALLED] = 0
        conn[IS_READABLE] = 1
        conn[BULK_TAKEN] = conn[BULK_ADDED] = conn[EAGER_TAKEN] = conn[EAGER_ADDED] = 0
    row = slot_row(state, state[NREPEATS])
    row[0] = state[OP]
    for number in range(state[NPAIRS]):
        pair = pair_of(state, number)
        pair[FIRST_SENT] += pair[NSENDS]
        row[1 + number] = pair[FIRST_SENT]
        pair[POSTED] = pair[CLEARED] = pair[RETIRED] = pair[RELEASED] = 0
        pair[FIRST_RECEIVED] += pair[NRECEIVES]
        pair[ASKED] = pair[DELIVERED] = pair[USED] = pair[EARLY] = 0
        arrived = words_at(pair[ARRIVED])
        for ordinal in range(pair[NRECEIVES]):
            arrived[ordinal] = 0


@inlined
def address_of(words: Any, place: Any, source_at: Any, target_at: Any) -> Any:
    """Return the address that two words describe, a *place* of `r2ccl.runtime.staged_call`.

    `place` is the index in `words` of the first of the two words.
    """
    offset = words[place + 1]
    if words[place] == NOWHERE:
        return offset
    return words_at(target_at if words[place] == IN_OUTPUT else source_at)[0] + offset


@inlined
def copy(words: Any, copy_at: Any, source_at: Any, target_at: Any) -> None:
    """Copy memory as described by the words from `copy_at` on; see `r2ccl.runtime.staged_call`."""
    nbytes = words[copy_at]
    if nbytes:
        target = address_of(words, copy_at + 1, source_at, target_at)
        copy_bytes(target, address_of(words, copy_at + 3, source_at, target_at), nbytes)


def make_repeated() -> Callable[[int, int, int, int, int], int]:
    """Return the loop of a repeated call, for compilation by `r2ccl.kernels.native`.

    Returns
    -------
    callable
        ``loop(address, source_at, target_at, call, is_resumed)``, an `r2ccl.shm.layout.Loop` whose
        state is that of a compiled call. `call` is the address of the words of
        `r2ccl.runtime.staged_call`. The loop always begins a new call and ignores `is_resumed`. It
        returns CHANGED if the arrays have another form or the call cannot be repeated now.
        Otherwise it returns a result of the loop of `r2ccl.runtime.compiled.loop.make_loop`; if
        this result is not FINISHED, the caller must make the copy after the call.
    """

    def loop(address: Any, source_at: Any, target_at: Any, call: Any, is_resumed: Any) -> Any:
        state, words = words_at(address), words_at(call)
        if not fits(words[FORM], source_at, target_at) or not is_slot_free(state):
            return CHANGED
        renew(state)
        state[SPACES] = address_of(words, SOURCE, source_at, target_at)
        state[SPACES + 1] = address_of(words, OUTPUT, source_at, target_at)
        copy(words, BEFORE, source_at, target_at)
        result = call_function(state[LOOP], address)
        if result == FINISHED:
            copy(words, AFTER, source_at, target_at)
        return result

    return loop


__all__ = ["is_slot_free", "make_repeated", "renew"]
