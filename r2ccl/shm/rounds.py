"""Steps that all compiled collectives share: begin a call, compare the calls of all ranks, copy."""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.arrays import DTYPE, FLAGS, NDIM, SIZES
from r2ccl.kernels.compiling import copy_bytes, inlined
from r2ccl.shm.arrays import ARRAY_NWORDS, CHECKED_FLAGS, DISTANCE, IS_APART
from r2ccl.shm.atomics import load_acquire, store_release, stream, words_at
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
def fits(form: Any, source_at: Any, target_at: Any) -> Any:
    """Return whether two arrays have a form that `r2ccl.shm.arrays.form_of` returned.

    Their addresses may differ from those of the arrays that the form describes. The distance
    between the two arrays may differ only if neither they nor the described arrays overlap.

    Parameters
    ----------
    form : int64
        Address of the form; 0: return True for all arrays.
    source_at, target_at : int64
        Addresses of the pointers to the data in two array objects.
    """
    if form == 0:
        return True
    words = words_at(form)
    for number in range(2):
        at = target_at if number else source_at
        wanted = words_at(form + 8 * ARRAY_NWORDS * number)
        sizes = words_at(words_at(at + SIZES)[0])
        nbytes = wanted[2]
        for axis in range(words_at(at + NDIM)[0] & 0xFFFFFFFF):
            nbytes *= sizes[axis]
        is_like = words_at(at + DTYPE)[0] == wanted[0] and nbytes == wanted[3]
        if not is_like or words_at(at + FLAGS)[0] & CHECKED_FLAGS != wanted[1]:
            return False
    distance = words_at(target_at)[0] - words_at(source_at)[0]
    if distance == words[DISTANCE]:
        return True
    is_apart = distance >= words[3] or -distance >= words[ARRAY_NWORDS + 3]
    return is_apart and words[IS_APART] != 0


@inlined
def begin(state: Any, total: Any) -> None:
    """Set the state to the beginning of a call for which this rank needs `total` rounds."""
    state[ROUND] = -1
    state[STEP] = 0
    state[NCALLS] += 1
    state[TOTAL] = max(total, 1)


@inlined
def write_header(state: Any, address: Any, signature: Any) -> Any:
    """Wait until the first stage slot of the call is free, write the header and return True.

    If the wait for a peer that still reads the slot ends earlier (see `wait`), write nothing and
    return False; AWAITED is this peer.
    """
    oldest = state[LAST] + 1 - NSLOTS
    if state[SAFE] < oldest:
        if not wait_for_all(state, address, DONE, oldest):
            return False
        state[SAFE] = oldest
    # This overwrites the header of the call before the previous one. No rank reads it any more,
    # because all ranks have posted the header of the previous call.
    base = state[BASES + state[RANK]] + 8 * (state[NCALLS] & 1)
    store_release(base + SIGNATURES, signature)
    store_release(base + NROUNDS, state[TOTAL])
    return True


@inlined
def compare_headers(state: Any, address: Any, signature: Any) -> Any:
    """Wait for the headers of all ranks, and set the number of rounds to the largest in them.

    Return FINISHED if all signatures are equal, DIFFERS if the signature of the peer AWAITED is not
    that of this rank, and WAITING if the wait for the header of the peer AWAITED ended earlier (see
    `wait`).
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
    """Wait until the word at `offset` of every peer's segment is at least `value`; return True.

    If the wait for a peer ends earlier (see `wait`), return False; AWAITED is this peer.
    """
    for peer in range(state[NRANKS]):
        if peer != state[RANK] and not wait(state, address, state[BASES + peer] + offset, value):
            state[AWAITED] = peer
            return False
    return True


@inlined
def copy(target: Any, source: Any, nbytes: Any, is_streamed: Any) -> None:
    """Copy `nbytes` bytes from address `source` to address `target`.

    With `is_streamed`, copies of at least 4096 bytes bypass the caches; the caller must then call
    `stream_fence` before another thread may read the bytes.
    """
    if not is_streamed or nbytes < 4096:
        copy_bytes(target, source, nbytes)
        return
    head = -target & 63
    copy_bytes(target, source, head)
    end = head + ((nbytes - head) & -64)
    for at in range(head, end, 64):
        stream(target + at, source + at)
    copy_bytes(target + end, source + end, nbytes - end)


__all__ = ["begin", "compare_headers", "copy", "fits", "wait_for_all", "write_header"]
