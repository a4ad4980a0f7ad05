"""Compiled pipeline of large allreduces: reduce-scatter and allgather of one chunk after another.

Each chunk is divided into one share per rank. Rounds are numbered from -1. In round k, a rank

- copies its peers' shares of chunk k + 1 from its input to its stage slot,
- reduces its own share of chunk k from its input and the stage slots of its peers to its result
  slot and its output,
- copies its peers' shares of chunk k - 1 from their result slots to its output.

For each byte of its input, a rank reads less than three bytes and writes two, for any number of
ranks.

If the inputs and outputs of all ranks are in memory that all ranks map (`r2ccl.shm.symmetric`), a
rank reduces its share from all inputs to all outputs instead: for each byte of its input, it reads
one byte and writes one, for any number of ranks.
"""

from __future__ import annotations

from typing import Any

from r2ccl.shm.atomics import call_kernel, stream_fence, words_at
from r2ccl.shm.layout import (
    BASES,
    CHANGED,
    DIRECT,
    DONE,
    FINISHED,
    LOOP_FORM,
    LOOP_KERNEL,
    LOOP_MOST,
    LOOP_NBYTES,
    LOOP_SIGNATURE,
    MODE,
    NRANKS,
    NRESULTS,
    POSTED,
    RANK,
    RESULTS,
    ROUND,
    SCRATCH,
    SCRATCH_NBYTES,
    SLOT_NBYTES,
    STEP,
    STREAM_NBYTES,
    TRANSFER,
    UNDECIDED,
    WAITING,
    Loop,
)
from r2ccl.shm.places import begin_anew, has_input, have_stayed, place_of, publish_places
from r2ccl.shm.rounds import (
    begin,
    claim_slot,
    compare_headers,
    copy,
    finish,
    first_round,
    fits,
    note_safe,
    publish_header,
    slot_of,
    wait_for_all,
    write_header,
)
from r2ccl.shm.single_copy import reduce_share
from r2ccl.shm.transfer import LEAST_NBYTES, PAST_CACHES, choose, learn, note_begin, note_end, tell
from r2ccl.shm.waiting import publish

#: Steps of a round.
_DEPOSIT, _REDUCE, _COLLECT = 0, 1, 2


def make_allreduce() -> Loop:
    """Return the function ``allreduce``, which `r2ccl.kernels.native` compiles.

    Returns
    -------
    callable
        ``allreduce(state, source_at, target_at, call, is_resumed)``, a `r2ccl.shm.layout.Loop`.
        The input and the output, which have `LOOP_NBYTES` bytes each, may be the same array. Chunks
        have at most `LOOP_MOST` bytes; `LOOP_MOST` is a multiple of 64 and at most `SLOT_NBYTES`.
    """

    def allreduce(address: Any, source_at: Any, target_at: Any, call: Any, is_resumed: Any) -> Any:
        given = words_at(call)
        if is_resumed == 0 and not fits(given[LOOP_FORM], source_at, target_at):
            return CHANGED
        nbytes, most = given[LOOP_NBYTES], given[LOOP_MOST]
        kernel, signature = given[LOOP_KERNEL], given[LOOP_SIGNATURE]
        state = words_at(address)
        source, target = words_at(source_at)[0], words_at(target_at)[0]
        rank, nranks = state[RANK], state[NRANKS]
        base = state[BASES + rank]
        sources = address + 8 * (BASES + nranks)
        kernel_sources = words_at(sources)
        # In place, the output is in the caches already, as long as it fits in.
        least = 2 * state[STREAM_NBYTES] + 1 if source == target else state[STREAM_NBYTES]
        is_streamed = nbytes >= least
        total = max(1, (nbytes + most - 1) // most)
        chunk = ((nbytes + total - 1) // total + 63) & -64

        is_choosing = nbytes >= LEAST_NBYTES

        if is_resumed == 0:
            begin(state, total)
            choose(state, given, is_choosing, False)
            state[MODE] = UNDECIDED
        first, is_past_caches = first_round(state), state[TRANSFER] == PAST_CACHES
        # Before round 0, the round with index -1 deposits the first chunk and compares the calls.
        while state[ROUND] <= total:
            index = state[ROUND]
            this = first + index
            if state[MODE] == DIRECT:
                if state[STEP] == _REDUCE:
                    reduce_share(state, sources, nbytes, kernel)
                    stream_fence()
                    publish(base + DONE, first)
                    state[STEP] = _COLLECT
                # Other ranks read this rank's input and write its output until they are done.
                if not wait_for_all(state, address, DONE, first):
                    return WAITING
                if not have_stayed(state, address, range(nranks)):
                    return WAITING
                return finish(state)
            if state[STEP] == _DEPOSIT:
                ahead = index + 1
                is_reachable = False
                if ahead == 0:
                    result = write_header(state, address, signature)
                    if result != FINISHED:
                        return result
                    from_place, to_place = 0, 0
                    if state[MODE] == UNDECIDED:
                        from_place = place_of(state, source, nbytes)
                        to_place = place_of(state, target, nbytes)
                    is_reachable = from_place != 0 and to_place != 0
                    if not is_reachable:
                        from_place, to_place = 0, 0
                    publish_places(state, from_place, to_place)
                    tell(state, given, is_choosing)
                if ahead < total:
                    result = claim_slot(state, address, ahead, range(nranks))
                    if result != FINISHED:
                        return result
                    slot, at = slot_of(state, rank, ahead), source + ahead * chunk
                    length = max(0, min(chunk, nbytes - ahead * chunk))
                    share = ((length + nranks - 1) // nranks + 63) & -64
                    before = min(length, rank * share)
                    after = min(length, before + share)
                    if not is_reachable:
                        copy(slot, at, before, is_past_caches)
                        copy(slot + after, at + after, length - after, is_past_caches)
                        if is_past_caches:
                            stream_fence()
                    if ahead == 0:
                        publish_header(state)
                    else:
                        publish(base + POSTED, first + ahead)
                state[STEP] = _REDUCE
            if state[STEP] == _REDUCE:
                if index < 0:
                    result = compare_headers(state, address, range(nranks))
                    if result != FINISHED:
                        return result
                    learn(state, given)
                    nreachable = 0
                    for peer in range(nranks):
                        nreachable += has_input(state, peer)
                    if nreachable == nranks:
                        state[MODE] = DIRECT
                        continue
                    if nreachable > 0:
                        begin_anew(state, total)
                        first = first_round(state)
                        continue
                    note_begin(state, address, given)
                elif index < total:
                    if index > 0 and not wait_for_all(state, address, POSTED, this):
                        return WAITING
                    length = max(0, min(chunk, nbytes - index * chunk))
                    share = ((length + nranks - 1) // nranks + 63) & -64
                    before = min(length, rank * share)
                    after = min(length, before + share)
                    # The result slot is free: all ranks have posted `this`, so they have collected
                    # the results of round `this - 3`; there are at least 3 result slots.
                    result = base + RESULTS + (index % NRESULTS) * SLOT_NBYTES
                    for at in range(before, after, SCRATCH_NBYTES):
                        length = min(SCRATCH_NBYTES, after - at)
                        for peer in range(nranks):
                            kernel_sources[peer] = slot_of(state, peer, index) + at
                        kernel_sources[rank] = source + index * chunk + at
                        # Both copies find the block in the first-level cache.
                        block = base + SCRATCH if is_past_caches else result + at
                        call_kernel(kernel, sources, nranks, block, length)
                        copy(target + index * chunk + at, block, length, is_streamed)
                        if is_past_caches:
                            copy(result + at, block, length, True)
                    if is_past_caches:
                        stream_fence()
                    publish(base + DONE, this)
                state[STEP] = _COLLECT
            if index >= 1:
                if not wait_for_all(state, address, DONE, this - 1):
                    return WAITING
                note_safe(state, this - 1)
                at = (index - 1) * chunk
                length = max(0, min(chunk, nbytes - at))
                share = ((length + nranks - 1) // nranks + 63) & -64
                place = RESULTS + ((index - 1) % NRESULTS) * SLOT_NBYTES
                for peer in range(nranks):
                    if peer != rank:
                        before = min(length, peer * share)
                        after = min(length, before + share)
                        found = state[BASES + peer] + place + before
                        copy(target + at + before, found, after - before, is_streamed)
            state[STEP] = _DEPOSIT
            state[ROUND] = index + 1
        stream_fence()
        note_end(state, address, given)
        return finish(state)

    return allreduce


__all__ = ["make_allreduce"]
