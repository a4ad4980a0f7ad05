"""Compiled loop of all collectives except large allreduces and scans.

Broadcast, allgather, gather, scatter, alltoall and their forms with parts of different sizes copy
elements. Reduce, reduce_scatter and small allreduces combine the parts of all ranks, in rank order,
with a kernel of `r2ccl.kernels.fold`. A barrier copies nothing.

In each round, a sender copies the next piece of each part into its stage slot and posts the round.
A receiver waits until each sender has posted the round, and takes its piece from the sender's slot.
Senders are one round ahead of the receivers, so copies into and out of slots overlap; a rank that
only sends is as many rounds and calls ahead as its slots and headers allow. A part that is copied
to another rank is read and written twice.

With the flag `REACHING`, if the inputs of all senders are in memory that all ranks map
(`r2ccl.shm.symmetric`), a receiver reads its parts from these inputs instead, and a sender waits
until the receivers have read them: each part is read and written once. In an allreduce, the outputs
must be in such memory, too; then each rank reduces one share of the data for all ranks. An alltoall
whose input and output overlap always uses the slots.
"""

from __future__ import annotations

from typing import Any

from r2ccl.shm.atomics import call_kernel, load_acquire, store_release, stream_fence, words_at
from r2ccl.shm.layout import (
    AWAITED,
    BASES,
    CHANGED,
    DIFFERS_IN_SIZE,
    DIRECT,
    DONE,
    FINISHED,
    FROM_ROOT,
    IS_PAST_CACHES,
    LAST_ROUND,
    LENGTHS,
    LOOP_FLAGS,
    LOOP_FORM,
    LOOP_KERNEL,
    LOOP_NBYTES,
    LOOP_ROOT,
    LOOP_SIGNATURE,
    LOOP_SOURCE_STEP,
    LOOP_TABLES,
    LOOP_TARGET_STEP,
    MODE,
    NCALLS,
    NHEADERS,
    NRANKS,
    POSTED,
    RANK,
    REACHING,
    ROUND,
    ROW_NBYTES,
    SHARED,
    SLOT_NBYTES,
    STEP,
    STREAM_NBYTES,
    TO_ROOT,
    TOTAL,
    UNDECIDED,
    WAITING,
    Loop,
)
from r2ccl.shm.places import begin_anew, has_input, have_stayed, place_of, publish_places
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
    wait_until_done,
    write_header,
)
from r2ccl.shm.single_copy import copy_inputs, reduce_inputs, reduce_share
from r2ccl.shm.storing import choose, note_begin, note_end
from r2ccl.shm.waiting import publish, wait

#: Steps of a round.
_DEPOSIT, _TAKE, _LINGER = 0, 1, 2


def make_exchange() -> Loop:
    """Return the function ``exchange``, which `r2ccl.kernels.native` compiles.

    Returns
    -------
    callable
        ``exchange(state, source_at, target_at, call, is_resumed)``, a `r2ccl.shm.layout.Loop`.
        `LOOP_ROOT` is the index of the root; it is used only with the flag `FROM_ROOT` or
        `TO_ROOT`.

        If all parts have the same size, `LOOP_TABLES` is 0. The part that rank s sends to rank d
        then has `LOOP_NBYTES` bytes at ``input + d * LOOP_SOURCE_STEP`` of rank s, and is copied to
        ``output + s * LOOP_TARGET_STEP`` of rank d.

        If parts differ in size, `LOOP_TABLES` is the address of four rows with one word per rank.
        The first two rows have the offset from ``input`` and the size, both in bytes, of each part
        that this rank sends; the last two have the offset from ``output`` and the size of each part
        that it receives. `LOOP_NBYTES` is then the mean size of the received parts.

        In both cases, if the call has a kernel, the parts of all ranks are reduced to ``output``
        instead of being copied.
    """

    def exchange(address: Any, source_at: Any, target_at: Any, call: Any, is_resumed: Any) -> Any:
        given = words_at(call)
        if is_resumed == 0 and not fits(given[LOOP_FORM], source_at, target_at):
            return CHANGED
        source_step, target_step = given[LOOP_SOURCE_STEP], given[LOOP_TARGET_STEP]
        nbytes, tables, root = given[LOOP_NBYTES], given[LOOP_TABLES], given[LOOP_ROOT]
        kernel, signature, flags = (
            given[LOOP_KERNEL],
            given[LOOP_SIGNATURE],
            given[LOOP_FLAGS],
        )
        state = words_at(address)
        source, target = words_at(source_at)[0], words_at(target_at)[0]
        rank, nranks = state[RANK], state[NRANKS]
        base = state[BASES + rank]
        sources = address + 8 * (BASES + nranks)
        kernel_sources = words_at(sources)
        sent_from, sent_nbytes = words_at(tables), words_at(tables + 8 * nranks)
        put_to, put_nbytes = words_at(tables + 16 * nranks), words_at(tables + 24 * nranks)
        is_shared, has_tables = (flags & SHARED) != 0, tables != 0
        is_sender = (flags & FROM_ROOT) == 0 or rank == root
        is_receiver = (flags & TO_ROOT) == 0 or rank == root
        # A rank with nothing to send uses no slots, so nobody waits until they are read.
        is_depositor = is_sender and (has_tables or nbytes > 0)
        if flags & TO_ROOT and rank == root:
            is_depositor = False
        senders = range(root, root + 1) if flags & FROM_ROOT else range(nranks)
        receivers = range(root, root + 1) if flags & TO_ROOT else range(nranks)
        # A slot is divided between the other ranks, unless they all get the same data or one rank
        # gets all data. The share of rank r + 1 comes first in the slot of rank r.
        is_whole = is_shared or (flags & TO_ROOT) != 0 or nranks == 1
        piece = SLOT_NBYTES if is_whole else (SLOT_NBYTES // (nranks - 1)) & -64
        portion = 0 if is_whole else piece
        is_streamed = nbytes * nranks >= state[STREAM_NBYTES]
        is_reaching, is_allreduce = (flags & REACHING) != 0, is_shared and kernel != 0
        # Ranks whose calls this rank compares with its own before it goes on. A rank that only
        # sends compares none, unless its next step depends on the arrays of other senders.
        is_rooted, compared = (flags & (FROM_ROOT | TO_ROOT)) != 0, range(nranks)
        if flags & FROM_ROOT:
            compared = senders
        elif is_rooted and rank != root and not is_reaching:
            compared = range(0)

        if is_resumed == 0:
            most = nbytes
            if has_tables:
                most = 0
                for peer in range(nranks):
                    most = max(most, sent_nbytes[peer], put_nbytes[peer])
            begin(state, (most + piece - 1) // piece)
            # With a root, the duration of a rank that only sends says nothing about the receivers.
            choose(state, given, 0 if is_rooted else nbytes)
            state[MODE] = UNDECIDED
            if is_rooted:
                announce_earlier_calls(state)
        first = first_round(state)
        row = LENGTHS + ROW_NBYTES * (state[NCALLS] & (NHEADERS - 1))

        # Before round 0, the round with index -1 deposits its pieces and compares the calls.
        while state[ROUND] < state[TOTAL]:
            index = state[ROUND]
            if state[MODE] == DIRECT:
                if state[STEP] == _TAKE:
                    offset = 0 if is_shared else rank * source_step
                    if is_allreduce:
                        reduce_share(state, sources, nbytes, kernel)
                    elif is_receiver and kernel != 0:
                        reduce_inputs(state, sources, offset, kernel, target, nbytes)
                    elif is_receiver:
                        copy_inputs(
                            state, senders, offset, target, target_step, nbytes, is_streamed
                        )
                    stream_fence()
                    publish(base + DONE, first + LAST_ROUND)
                    state[STEP] = _LINGER
                if is_sender:
                    result = wait_until_done(state, address, receivers, first)
                    if result != FINISHED:
                        return result
                if (is_receiver or is_allreduce) and not have_stayed(state, address, senders):
                    return WAITING
                break
            if state[STEP] == _DEPOSIT:
                ahead = index + 1
                is_reachable = False
                if ahead == 0:
                    result = write_header(state, address, signature)
                    if result != FINISHED:
                        return result
                    if has_tables:
                        for peer in range(nranks):
                            store_release(base + row + 8 * peer, sent_nbytes[peer])
                    if is_reaching:
                        place, to_place = 0, 0
                        if is_sender and state[MODE] == UNDECIDED:
                            sent = nbytes + (nranks - 1) * source_step
                            apart = target >= source + sent or source >= target + sent
                            # In an alltoall in place, peers would read what this rank overwrites.
                            if source_step == 0 or target_step == 0 or apart:
                                place = place_of(state, source, sent)
                            if is_allreduce:
                                to_place = place_of(state, target, nbytes)
                                place = 0 if to_place == 0 else place
                        is_reachable = place != 0
                        publish_places(state, place, to_place)
                if is_depositor and not is_reachable and ahead < state[TOTAL]:
                    result = claim_slot(state, address, ahead, receivers)
                    if result != FINISHED:
                        return result
                    slot, done = slot_of(state, rank, ahead), ahead * piece
                    for peer in range(rank, rank + 1) if is_shared else receivers:
                        length = sent_nbytes[peer] if has_tables else nbytes
                        if length > done and (is_shared or peer != rank):
                            first_byte = 0 if is_shared else peer * source_step
                            first_byte = sent_from[peer] if has_tables else first_byte
                            place = slot + (peer - rank - 1) % nranks * portion
                            at = source + first_byte + done
                            copy(place, at, min(length - done, piece), state[IS_PAST_CACHES])
                    if state[IS_PAST_CACHES]:
                        stream_fence()
                if ahead == 0:
                    publish_header(state)
                elif is_sender and ahead < state[TOTAL]:
                    publish(base + POSTED, first + ahead)
                state[STEP] = _TAKE
            if index < 0:
                result = compare_headers(state, address, compared)
                if result != FINISHED:
                    return result
                if has_tables and is_receiver:
                    for peer in senders:
                        to = peer if is_shared else rank
                        if load_acquire(state[BASES + peer] + row + 8 * to) != put_nbytes[peer]:
                            state[AWAITED] = peer
                            return DIFFERS_IN_SIZE
                if is_reaching:
                    nreachable, nsenders = 0, 0
                    for peer in senders:
                        nreachable += has_input(state, peer)
                        nsenders += 1
                    if nreachable == nsenders:
                        state[TOTAL] = 1
                        state[MODE] = DIRECT
                        continue
                    if nreachable > 0:
                        begin_anew(state, state[TOTAL])
                        first = first_round(state)
                        continue
                note_begin(state, address, given)
            elif is_receiver:
                done = index * piece
                for peer in senders:
                    length = put_nbytes[peer] if has_tables else nbytes
                    # The header announced round 0. A rank posts only rounds in which it has data.
                    if index > 0 and peer != rank and length > done:
                        word = state[BASES + peer] + POSTED
                        if not wait(state, address, word, first + index):
                            state[AWAITED] = peer
                            return WAITING
                own = 0 if is_shared else rank * source_step
                own = source + (sent_from[rank] if has_tables else own) + done
                if kernel != 0:
                    for peer in range(nranks):
                        place = (rank - peer - 1) % nranks * portion
                        kernel_sources[peer] = slot_of(state, peer, index) + place
                    if not is_shared:
                        kernel_sources[rank] = own
                    length = put_nbytes[rank] if has_tables else nbytes
                    length = max(0, min(length - done, piece))
                    call_kernel(kernel, sources, nranks, target + done, length)
                else:
                    for peer in senders:
                        place = (rank - peer - 1) % nranks * portion
                        at = own if peer == rank else slot_of(state, peer, index) + place
                        length = put_nbytes[peer] if has_tables else nbytes
                        to = target + (put_to[peer] if has_tables else peer * target_step) + done
                        if length > done and at != to:
                            copy(to, at, min(length - done, piece), is_streamed)
            if index + 1 == state[TOTAL] and (has_tables or (is_rooted and index > 0)):
                publish(base + DONE, first + LAST_ROUND)
            elif index >= 0 and state[TOTAL] > 1 and is_receiver:
                publish(base + DONE, first + index)
            state[STEP] = _DEPOSIT
            state[ROUND] = index + 1
        stream_fence()
        note_end(state, address, given)
        return finish(state)

    return exchange


__all__ = ["make_exchange"]
