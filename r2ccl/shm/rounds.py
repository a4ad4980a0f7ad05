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
    BATCH,
    CALL_STEP,
    DIFFERS,
    DONE,
    FINISHED,
    FIRST_SLOT,
    HEADERS,
    LINE_NBYTES,
    NAHEAD,
    NCALLS,
    NHEADERS,
    NRANKS,
    NSLOTS,
    NUSED,
    RANK,
    ROUND,
    ROUND_BITS,
    SAFE,
    SIGNATURE,
    SLOT_NBYTES,
    SLOTS,
    STEP,
    TOTAL,
    USES,
    WAITING,
)
from r2ccl.shm.waiting import publish, wait


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
    """Set the state to the beginning of a call in which this rank has `total` rounds with data."""
    state[ROUND] = -1
    state[STEP] = 0
    state[NCALLS] += 1
    state[TOTAL] = max(total, 1)


@inlined
def first_round(state: Any) -> Any:
    """Return the number of the first round of the call that has begun."""
    return state[NCALLS] << ROUND_BITS


@inlined
def finish(state: Any) -> Any:
    """Add the stage slots that the finished call has used to NUSED; return FINISHED."""
    state[NUSED] += state[TOTAL]
    return FINISHED


@inlined
def announce_earlier_calls(state: Any) -> None:
    """Announce that this rank has finished all calls before the current call.

    Call this function at the beginning of each call in which a rank may not wait for all others.
    Such a rank may wait until the others have read its slots of earlier calls, and not every call
    announces this. In a call with one round, do nothing if fewer than `BATCH` calls are
    unannounced. In a call with several rounds, always announce: two ranks that both only send
    would otherwise wait for each other.
    """
    done, last = state[BASES + state[RANK]] + DONE, first_round(state) - 1
    if last - load_acquire(done) >= (BATCH if state[TOTAL] == 1 else 1) * CALL_STEP:
        publish(done, last)


@inlined
def header_of(state: Any, peer: Any, first: Any) -> Any:
    """Return the address of the header of rank `peer` for the call whose first round is `first`."""
    number = (first >> ROUND_BITS) & (NHEADERS - 1)
    return state[BASES + peer] + HEADERS + LINE_NBYTES * number


@inlined
def write_header(state: Any, address: Any, signature: Any) -> Any:
    """Write the header of the call that has begun, except the places of arrays.

    First make sure that the headers of all ranks up to the call `NAHEAD` calls earlier have been
    compared: in every call with a number that is a multiple of `BATCH`, wait for the headers that
    this call and the next ``BATCH - 1`` calls need, and compare them. If a result of `meet` is not
    FINISHED, return it and write nothing; otherwise return FINISHED. `publish_header` announces the
    header later.
    """
    rank, first = state[RANK], first_round(state)
    if state[NCALLS] % BATCH == 0:  # compares enough for the next calls, too
        until = first - (NAHEAD + 1 - BATCH) * CALL_STEP
        result = meet_all(state, address, range(state[NRANKS]), until)
        if result != FINISHED:
            return result
    header = header_of(state, rank, first)
    store_release(header + SIGNATURE, signature)
    store_release(header + FIRST_SLOT, state[NUSED])
    return FINISHED


@inlined
def publish_header(state: Any) -> None:
    """Announce the header of the call, and the data of its first round."""
    first = first_round(state)
    publish(header_of(state, state[RANK], first), first)


@inlined
def meet(state: Any, address: Any, peer: Any, number: Any) -> Any:
    """Wait until rank `peer` has begun the call of the round `number`; compare its headers.

    The headers of earlier calls that have not been compared yet are compared, too. Return FINISHED
    if the signatures are equal to those of this rank. Otherwise, set AWAITED to `peer` and return
    DIFFERS, or WAITING if the wait ended earlier (see `wait`).
    """
    met = BASES + 2 * state[NRANKS] + peer
    while number - state[met] >= CALL_STEP:
        first = state[met] + CALL_STEP
        theirs, own = header_of(state, peer, first), header_of(state, state[RANK], first)
        if not wait(state, address, theirs, first):
            state[AWAITED] = peer
            return WAITING
        if load_acquire(theirs + SIGNATURE) != load_acquire(own + SIGNATURE):
            state[AWAITED] = peer
            return DIFFERS
        state[met] = first
    return FINISHED


@inlined
def meet_all(state: Any, address: Any, peers: Any, number: Any) -> Any:
    """Call `meet` for each other rank in the range `peers`, until a result is not FINISHED.

    Return the last result.
    """
    for peer in peers:
        if peer != state[RANK]:
            result = meet(state, address, peer, number)
            if result != FINISHED:
                return result
    return FINISHED


@inlined
def compare_headers(state: Any, address: Any, peers: Any) -> Any:
    """Wait until all ranks in the range `peers` have begun the call; return a result of `meet`.

    Compare their headers. If `peers` has all ranks and the result is FINISHED, note that no peer
    will read the stage slots of earlier calls again (`note_safe`).
    """
    first = first_round(state)
    result = meet_all(state, address, peers, first)
    if result == FINISHED and peers.stop - peers.start == state[NRANKS]:
        note_safe(state, first - 1)  # a rank that begins a call has finished the previous one
    return result


@inlined
def note_safe(state: Any, number: Any) -> None:
    """Note that no peer will read the stage slots of rounds up to `number` again."""
    if number - state[SAFE] > 0:
        state[SAFE] = number


@inlined
def wait_until_done(state: Any, address: Any, peers: Any, number: Any) -> Any:
    """Wait until all ranks in the range `peers` have announced the round `number` as done.

    Return FINISHED, or a result of `meet`. The headers are compared first, because the word DONE is
    meaningless if the rank made another call.
    """
    for peer in peers:
        if peer != state[RANK]:
            result = meet(state, address, peer, number)
            if result != FINISHED:
                return result
            if not wait(state, address, state[BASES + peer] + DONE, number):
                state[AWAITED] = peer
                return WAITING
    return FINISHED


@inlined
def claim_slot(state: Any, address: Any, index: Any, readers: Any) -> Any:
    """Wait until this rank may write the stage slot of round `index` of the call.

    May be called again for the same round. The range `readers` has all ranks that read slots of
    this rank in this call. Return FINISHED, or a result of `meet`.
    """
    first = first_round(state)
    use = USES + (state[NUSED] + index) % NSLOTS
    before = state[use]  # the round that used the slot last
    if before != first + index and before - state[SAFE] > 0:
        is_earlier = before - first < 0  # the readers in that call may have been others
        result = wait_until_done(
            state, address, range(state[NRANKS]) if is_earlier else readers, before
        )
        if result != FINISHED:
            return result
        least = before + CALL_STEP
        if is_earlier:
            for peer in range(state[NRANKS]):
                done = load_acquire(state[BASES + peer] + DONE)
                if peer != state[RANK] and done - least < 0:
                    least = done
        note_safe(state, least if is_earlier else before)
    state[use] = first + index
    return FINISHED


@inlined
def slot_of(state: Any, peer: Any, index: Any) -> Any:
    """Return the address of the stage slot of rank `peer` in round `index` of the call.

    The rank must have begun the call.
    """
    header = header_of(state, peer, first_round(state))
    number = (load_acquire(header + FIRST_SLOT) + index) % NSLOTS
    return state[BASES + peer] + SLOTS + number * SLOT_NBYTES


@inlined
def wait_for_all(state: Any, address: Any, offset: Any, value: Any) -> Any:
    """Wait until the word at `offset` of every peer's segment is at least `value`; return True.

    If the wait for a peer ends earlier (see `wait`), set AWAITED to this peer and return False.
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


__all__ = [
    "announce_earlier_calls",
    "begin",
    "claim_slot",
    "compare_headers",
    "copy",
    "finish",
    "first_round",
    "fits",
    "header_of",
    "note_safe",
    "publish_header",
    "slot_of",
    "wait_for_all",
    "wait_until_done",
    "write_header",
]
