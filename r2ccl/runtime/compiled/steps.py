"""Steps of a call in compiled code: dependencies, reductions, and the release of slices.

The rules are the same as in `r2ccl.runtime.executor` and `r2ccl.failover.migration.link`.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import copy_bytes, inlined
from r2ccl.runtime.compiled.layout import (
    ACKED,
    AFTER,
    ARENA,
    ARRIVED,
    ASKED,
    CONFIRM_AFTER,
    CONFIRMED,
    CONN,
    CONSUMED,
    DELIVERED,
    DESTINATION,
    DONE,
    FIRST_SENT,
    IS_EAGER,
    IS_LEFT,
    IS_MEASURED,
    IS_RESILIENT,
    IS_UNCONFIRMED,
    ITEMSIZE,
    KERNEL,
    KIND,
    LIMIT,
    LOCALS,
    NAFTER,
    NLOCALS,
    NSLICES,
    OPERANDS,
    PASSED,
    PLACES,
    POSTED,
    RECEIVES,
    RELEASED,
    RELEASED_EVENT,
    REMAINING,
    RETIRED,
    SENDS,
    SHIFT,
    SOURCE,
    SPACES,
    USED,
)
from r2ccl.runtime.compiled.tables import first_of, log_time, size_of, step_of
from r2ccl.shm.atomics import call_kernel, words_at

#: Values of `OpKind`.
_RECV, _RECV_REDUCE, _COPY = 1, 2, 3


@inlined
def is_ready(state: Any, step: Any, k: Any) -> Any:
    """Return whether all dependencies of slice `k` of a step are satisfied."""
    after = words_at(step[AFTER])
    for number in range(step[NAFTER]):
        other = step_of(state, after[number] >> 2)
        needed = k + 1 if after[number] & 1 else other[NSLICES]
        if (other[PASSED] if after[number] & 2 else other[DONE]) < needed:
            return False
    return True


@inlined
def finish_slice(state: Any, step: Any) -> None:
    """Count one more slice of a step as done."""
    step[DONE] += 1
    step[PASSED] = max(step[PASSED], step[DONE])
    state[REMAINING] -= 1


@inlined
def combine(state: Any, step: Any, offset: Any, nbytes: Any, received: Any) -> None:
    """Reduce the data at address `received` with data of this rank into the step's destination."""
    operands = words_at(state[OPERANDS])
    mine = state[SPACES + step[SOURCE]] + offset + step[SHIFT] * state[ITEMSIZE]
    operands[0] = received if step[IS_LEFT] else mine
    operands[1] = mine if step[IS_LEFT] else received
    target = state[SPACES + step[DESTINATION]] + offset
    call_kernel(state[KERNEL], state[OPERANDS], 2, target, nbytes)


@inlined
def use_slices(state: Any, pair: Any) -> Any:
    """Deliver the slices that have arrived on a pair, and copy or reduce those that are ready.

    Return whether any slice was completed.
    """
    arrived, receives = words_at(pair[ARRIVED]), words_at(pair[RECEIVES])
    while pair[DELIVERED] < pair[ASKED] and arrived[pair[DELIVERED]] == -1:
        if not step_of(state, receives[pair[DELIVERED]] >> 32)[IS_EAGER]:
            pair[CONSUMED] += 1
            pair[IS_UNCONFIRMED] = 1
        pair[DELIVERED] += 1
    has_moved = False
    while pair[USED] < pair[DELIVERED]:
        entry = receives[pair[USED]]
        step, k = step_of(state, entry >> 32), entry & 0xFFFFFFFF
        if not is_ready(state, step, k):
            break
        offset, nbytes = first_of(state, step, k), size_of(state, step, k)
        place = words_at(pair[PLACES])[pair[USED]]
        if nbytes and step[KIND] == _RECV_REDUCE:
            combine(state, step, offset, nbytes, state[ARENA] + place)
        elif nbytes and place >= 0:
            target = state[SPACES + step[DESTINATION]] + offset
            copy_bytes(target, state[ARENA] + place, nbytes)
        if step[IS_EAGER]:
            pair[CONSUMED] += 1
            if pair[CONSUMED] - pair[ACKED] >= state[CONFIRM_AFTER]:
                pair[IS_UNCONFIRMED] = 1
        pair[USED] += 1
        finish_slice(state, step)
        has_moved = True
    return has_moved


@inlined
def run_locals(state: Any) -> Any:
    """Run the local steps (copies and reductions) that are ready; return whether any was run.

    If a kernel returns a value other than 0, set `LIMIT` so that the call leaves compiled code.
    """
    has_moved = False
    numbers = words_at(state[LOCALS])
    for at in range(state[NLOCALS]):
        step = step_of(state, numbers[at])
        last = step[NSLICES] - 1
        if step[DONE] <= last and is_ready(state, step, last):
            offset = first_of(state, step, 0)
            nbytes = first_of(state, step, last + 1) - offset
            source = state[SPACES + step[SOURCE]] + offset + step[SHIFT] * state[ITEMSIZE]
            target = state[SPACES + step[DESTINATION]] + offset
            if step[KIND] == _COPY:
                if step[SOURCE] != step[DESTINATION] and nbytes and source != target:
                    copy_bytes(target, source, nbytes)
            elif nbytes:
                operands = words_at(state[OPERANDS])
                operands[0] = target
                operands[1] = source
                if call_kernel(state[KERNEL], state[OPERANDS], 2, target, nbytes):
                    state[LIMIT] = -1
            for _ in range(last + 1):
                finish_slice(state, step)
            has_moved = True
    return has_moved


@inlined
def retire(state: Any, pair: Any, below: Any) -> None:
    """Retire posted slices in order; stop before a cleared slice with ordinal `below` or more.

    Then release slices (`release`). The transport no longer reads the caller's memory of a retired
    slice, but a replay of a cleared slice may read it until the slice is released. An eager slice
    is retired once it is copied, even if the copy is not sent yet.
    """
    sends = words_at(pair[SENDS])
    while pair[RETIRED] < pair[POSTED]:
        step = step_of(state, sends[pair[RETIRED]] >> 32)
        if not step[IS_EAGER]:
            if pair[RETIRED] >= below:
                break
            step[PASSED] += 1
        pair[RETIRED] += 1
    release(state, pair)


@inlined
def release(state: Any, pair: Any) -> None:
    """Release the slices that are retired and, if `Config.is_resilient`, confirmed by the peer."""
    sends = words_at(pair[SENDS])
    while pair[RELEASED] < pair[RETIRED]:
        if state[IS_RESILIENT] and pair[FIRST_SENT] + pair[RELEASED] >= pair[CONFIRMED]:
            break
        entry = sends[pair[RELEASED]]
        step = step_of(state, entry >> 32)
        if not step[IS_EAGER]:
            finish_slice(state, step)
            if state[IS_MEASURED]:
                nbytes = size_of(state, step, entry & 0xFFFFFFFF)
                log_time(state, RELEASED_EVENT, pair[CONN], nbytes)
        pair[RELEASED] += 1


__all__ = ["finish_slice", "is_ready", "release", "retire", "run_locals", "use_slices"]
