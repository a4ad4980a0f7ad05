"""Compiled pipeline of scan and exscan: each rank passes the reduction so far to the next rank.

In each round, a rank takes the next piece of the reduction of all ranks below it from the stage
slot of the rank below, combines it with its own input, and puts the result into its own stage slot.
A rank puts a piece into its slot, for the rank above, one pass of its loop before it writes this
piece to its own output. For each byte of its input, a rank reads at most three bytes and writes at
most two, for any number of ranks.
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
    LAST_ROUND,
    LOOP_FLAGS,
    LOOP_FORM,
    LOOP_KERNEL,
    LOOP_MOST,
    LOOP_NBYTES,
    LOOP_SIGNATURE,
    NRANKS,
    POSTED,
    RANK,
    ROUND,
    STEP,
    STREAM_NBYTES,
    TOTAL,
    WAITING,
    Loop,
)
from r2ccl.shm.rounds import (
    announce_earlier_calls,
    begin,
    claim_slot,
    compare_headers,
    copy,
    finish,
    first_round,
    fits,
    publish_header,
    slot_of,
    write_header,
)
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
        base, before = state[BASES + rank], max(0, rank - 1)
        readers = range(rank + 1, min(rank + 2, nranks))
        sources = address + 8 * (BASES + nranks)
        kernel_sources = words_at(sources)
        is_streamed = nbytes >= state[STREAM_NBYTES]

        if is_resumed == 0:
            begin(state, (nbytes + piece - 1) // piece)
            announce_earlier_calls(state)
        first = first_round(state)
        # The header is announced before any piece: a rank can post none before the rank below has
        # begun the call. The pass of the loop with number `index`, from -1, deposits piece `index`,
        # for which POSTED has the number of the next round, and takes piece `index` - 1.
        while state[ROUND] <= state[TOTAL]:
            index = state[ROUND]
            posted, word = first + 1 + index, state[BASES + before] + POSTED
            if state[STEP] == _DEPOSIT:
                if index < 0:
                    result = write_header(state, address, signature)
                    if result != FINISHED:
                        return result
                    publish_header(state)
                elif index < state[TOTAL] and not is_last:
                    result = claim_slot(state, address, index, readers)
                    if result != FINISHED:
                        return result
                    if not is_first and not wait(state, address, word, posted):
                        state[AWAITED] = before
                        return WAITING
                    done, slot = index * piece, slot_of(state, rank, index)
                    length = min(nbytes - done, piece)
                    if is_first:
                        copy_bytes(slot, source + done, length)
                    else:
                        kernel_sources[0] = slot_of(state, before, index)
                        kernel_sources[1] = source + done
                        call_kernel(kernel, sources, 2, slot, length)
                    publish(base + POSTED, posted)
                state[STEP] = _TAKE
            if index < 0:
                result = compare_headers(state, address, range(before, rank))
                if result != FINISHED:
                    return result
            elif index > 0:
                if not is_first and not wait(state, address, word, posted - 1):
                    state[AWAITED] = before
                    return WAITING
                done = (index - 1) * piece
                length = min(nbytes - done, piece)
                at, to = slot_of(state, before, index - 1), target + done
                if is_first:
                    at = to if is_exclusive else source + done
                elif is_last and not is_exclusive:
                    kernel_sources[0], kernel_sources[1] = at, source + done
                    call_kernel(kernel, sources, 2, to, length)
                    at = to
                elif not is_exclusive:
                    at = slot_of(state, rank, index - 1)
                if at != to:
                    copy(to, at, length, is_streamed)
                if state[TOTAL] > 1:
                    is_end = index == state[TOTAL]
                    publish(base + DONE, first + (LAST_ROUND if is_end else index - 1))
            state[STEP] = _DEPOSIT
            state[ROUND] = index + 1
        stream_fence()
        return finish(state)

    return scan


__all__ = ["make_scan"]
