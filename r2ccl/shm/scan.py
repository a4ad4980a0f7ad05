"""Compiled pipeline of scan and exscan: each rank passes the reduction so far to the next rank.

In each round, a rank takes the next piece of the reduction of all ranks below it from the stage
slot of the rank below, combines it with its own input, and puts the result into its own stage slot.
A rank puts a piece into its slot, for the rank above, one round before it writes this piece to its
own output. For each byte of its input, it reads at most three bytes and writes at most two, for any
number of ranks.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import copy_bytes
from r2ccl.shm.atomics import call_kernel, stream_fence, words_at
from r2ccl.shm.layout import (
    AWAITED,
    BASES,
    CHANGED,
    DONE,
    EXCLUSIVE,
    FINISHED,
    LAST,
    LOOP_FLAGS,
    LOOP_FORM,
    LOOP_KERNEL,
    LOOP_MOST,
    LOOP_NBYTES,
    LOOP_SIGNATURE,
    NRANKS,
    NSLOTS,
    POSTED,
    RANK,
    ROUND,
    SLOT_NBYTES,
    SLOTS,
    STEP,
    STREAM_NBYTES,
    TOTAL,
    WAITING,
    Loop,
)
from r2ccl.shm.rounds import begin, compare_headers, copy, fits, write_header
from r2ccl.shm.waiting import publish, wait

#: Steps of a round.
_DEPOSIT, _TAKE = 0, 1


def make_scan() -> Loop:
    """Return the function ``scan``, which `r2ccl.kernels.native` compiles.

    Returns
    -------
    callable
        ``scan(state, source_at, target_at, call, is_resumed)``, a `r2ccl.shm.layout.Loop`. The
        input and the output, which have `LOOP_NBYTES` bytes each, may be the same array. Pieces
        have at most `LOOP_MOST` bytes; `LOOP_MOST` is a multiple of 64 and at most `SLOT_NBYTES`.
        With the flag `EXCLUSIVE`, the call is an exscan: a rank's input is not part of its output,
        and the output of rank 0 keeps its values.
    """

    def scan(address: Any, source_at: Any, target_at: Any, call: Any, is_resumed: Any) -> Any:
        given = words_at(call)
        if is_resumed == 0 and not fits(given[LOOP_FORM], source_at, target_at):
            return CHANGED
        nbytes, piece = given[LOOP_NBYTES], given[LOOP_MOST]
        kernel, signature = given[LOOP_KERNEL], given[LOOP_SIGNATURE]
        is_exclusive = (given[LOOP_FLAGS] & EXCLUSIVE) != 0
        state = words_at(address)
        source, target = words_at(source_at)[0], words_at(target_at)[0]
        rank, nranks = state[RANK], state[NRANKS]
        is_first, is_last = rank == 0, rank == nranks - 1
        base = state[BASES + rank]
        before, after = state[BASES + max(0, rank - 1)], state[BASES + min(rank + 1, nranks - 1)]
        sources = address + 8 * (BASES + nranks)
        kernel_sources = words_at(sources)
        is_streamed = nbytes >= state[STREAM_NBYTES]

        first = state[LAST] + 1
        if is_resumed == 0:
            begin(state, 1 + (nbytes + piece - 1) // piece)
        # The first round of the call only compares the calls: a rank can post no piece before the
        # rank below has begun the call. The pass of the loop with number `index`, from -1, deposits
        # round first + 1 + index.
        while state[ROUND] < state[TOTAL]:
            index = state[ROUND]
            this = first + 1 + index
            if state[STEP] == _DEPOSIT:
                if index < 0:
                    if not write_header(state, address, signature):
                        return WAITING
                elif index + 1 < state[TOTAL] and not is_last:
                    # Only the rank above reads the slot; in the first rounds of a call it is free.
                    if index >= NSLOTS and not wait(state, address, after + DONE, this - NSLOTS):
                        state[AWAITED] = rank + 1
                        return WAITING
                    if not is_first and not wait(state, address, before + POSTED, this):
                        state[AWAITED] = rank - 1
                        return WAITING
                    done = index * piece
                    length = min(nbytes - done, piece)
                    slot = SLOTS + (this % NSLOTS) * SLOT_NBYTES
                    if is_first:
                        copy_bytes(base + slot, source + done, length)
                    else:
                        kernel_sources[0], kernel_sources[1] = before + slot, source + done
                        call_kernel(kernel, sources, 2, base + slot, length)
                if index + 1 < state[TOTAL]:
                    publish(base + POSTED, this)
                state[STEP] = _TAKE
            if index < 0:
                result = compare_headers(state, address, signature)
                if result != FINISHED:
                    return result
            elif index > 0:
                if not is_first and not wait(state, address, before + POSTED, this - 1):
                    state[AWAITED] = rank - 1
                    return WAITING
                done = (index - 1) * piece
                length = min(nbytes - done, piece)
                slot = SLOTS + ((this - 1) % NSLOTS) * SLOT_NBYTES
                at, to = before + slot, target + done
                if is_first:
                    at = to if is_exclusive else source + done
                elif is_last and not is_exclusive:
                    kernel_sources[0], kernel_sources[1] = at, source + done
                    call_kernel(kernel, sources, 2, to, length)
                    at = to
                elif not is_exclusive:
                    at = base + slot
                if at != to:
                    copy(to, at, length, is_streamed)
                publish(base + DONE, this - 1)
            state[STEP] = _DEPOSIT
            state[ROUND] = index + 1
        stream_fence()
        state[LAST] = first + state[TOTAL] - 1
        return FINISHED

    return scan


__all__ = ["make_scan"]
