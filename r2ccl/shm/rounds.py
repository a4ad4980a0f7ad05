"""Steps that all compiled collectives share: begin a call, compare it with the peers', copy."""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import copy_bytes, inlined
from r2ccl.shm.atomics import load_acquire, store_release, stream
from r2ccl.shm.layout import (
    AWAITED,
    BASES,
    DIFFERS,
    DONE,
    FINISHED,
    LAST,
    NCALLS,
    NRANKS,
    NROUNDS,
    NSLOTS,
    POSTED,
    RANK,
    ROUND,
    SAFE,
    SIGNATURES,
    STEP,
    TOTAL,
    WAITING,
)
from r2ccl.shm.waiting import wait


@inlined
def begin(state: Any, total: Any) -> None:
    """Set the state to the beginning of a call for which this rank needs `total` rounds."""
    state[ROUND] = -1
    state[STEP] = 0
    state[NCALLS] += 1
    state[TOTAL] = max(total, 1)


@inlined
def write_header(state: Any, address: Any, signature: Any) -> Any:
    """Write the header of the call and return True; the first stage slot is then free.

    Returns False, and writes nothing, if the slot is not free yet: AWAITED still reads it.
    """
    oldest = state[LAST] + 1 - NSLOTS
    if state[SAFE] < oldest:
        if not wait_for_all(state, address, DONE, oldest):
            return False
        state[SAFE] = oldest
    # The header of the call before the previous one is not read any more, because all ranks have
    # posted the previous one.
    base = state[BASES + state[RANK]] + 8 * (state[NCALLS] & 1)
    store_release(base + SIGNATURES, signature)
    store_release(base + NROUNDS, state[TOTAL])
    return True


@inlined
def compare_headers(state: Any, address: Any, signature: Any) -> Any:
    """Compare the headers of all ranks, and set the number of rounds to the largest in them.

    Returns FINISHED if all signatures are equal, DIFFERS if that of AWAITED is not this rank's, and
    WAITING if AWAITED has not posted its header yet.
    """
    first = state[LAST] + 1
    if not wait_for_all(state, address, POSTED, first):
        return WAITING
    state[SAFE] = max(
        state[SAFE], first - 1
    )  # a rank that begins a call has ended the previous one
    for peer in range(state[NRANKS]):
        base = state[BASES + peer] + 8 * (state[NCALLS] & 1)
        if load_acquire(base + SIGNATURES) != signature:
            state[AWAITED] = peer
            return DIFFERS
        state[TOTAL] = max(state[TOTAL], load_acquire(base + NROUNDS))
    return FINISHED


@inlined
def wait_for_all(state: Any, address: Any, offset: Any, value: Any) -> Any:
    """Wait until the word at `offset` of every peer is at least `value`; return whether it is."""
    for peer in range(state[NRANKS]):
        if peer != state[RANK] and not wait(state, address, state[BASES + peer] + offset, value):
            state[AWAITED] = peer
            return False
    return True


@inlined
def copy(target: Any, source: Any, nbytes: Any, is_streamed: Any) -> None:
    """Copy to a result; past the caches if `is_streamed`, as it is too large to stay there."""
    if not is_streamed or nbytes < 4096:
        copy_bytes(target, source, nbytes)
        return
    head = -target & 63
    copy_bytes(target, source, head)
    end = head + ((nbytes - head) & -64)
    for at in range(head, end, 64):
        stream(target + at, source + at)
    copy_bytes(target + end, source + end, nbytes - end)


__all__ = ["begin", "compare_headers", "copy", "wait_for_all", "write_header"]
