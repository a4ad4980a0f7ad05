"""Compiled loop of all collectives except large allreduces and scans.

Broadcast, allgather, gather, scatter, alltoall and their forms with parts of different sizes copy
elements. Reduce, reduce_scatter and small allreduces combine the parts of all ranks, in rank order,
with a kernel of `r2ccl.kernels.fold`. A barrier copies nothing.

In each round, a sender copies the next piece of each part into its stage slot and posts the round.
A receiver waits until each sender has posted the round, and takes its piece from the sender's slot.
Senders are one round ahead of the receivers, so copies into and out of slots overlap. A rank that
only sends may be several rounds and calls ahead; its slots and headers set the limit. A part that
is copied to another rank is read and written twice.

If peers can access the input of a sender directly (`r2ccl.shm.places`), the sender uses no slots. A
receiver copies its part from this input in round 0, or reduces it from there in each round, and the
sender waits until the receivers have finished: each part is read and written once. Each sender
decides for itself whether it uses slots. In a small allreduce whose outputs peers can also access
directly, each rank reduces one share of the data for all ranks. An alltoall whose input and output
overlap always uses slots, because a rank would otherwise overwrite data that its peers still read.
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
    LAST_ROUND,
    LOOP_FLAGS,
    LOOP_FORM,
    LOOP_KERNEL,
    LOOP_LEAST_REACHED,
    LOOP_LEAST_READ,
    LOOP_NBYTES,
    LOOP_ROOT,
    LOOP_SIGNATURE,
    LOOP_SOURCE_STEP,
    LOOP_TABLES,
    LOOP_TARGET_STEP,
    MODE,
    NCALLS,
    NEVER,
    NHEADERS,
    NRANKS,
    PARTS,
    POSTED,
    RANK,
    ROUND,
    ROW_NBYTES,
    SHARED,
    SLOT_NBYTES,
    STAGED,
    STEP,
    STREAM_NBYTES,
    TO_ROOT,
    TOTAL,
    TRANSFER,
    UNDECIDED,
    UNREADABLE,
    WAITING,
    Loop,
)
from r2ccl.shm.places import (
    UNMAPPED,
    begin_anew,
    has_any_input,
    has_input,
    have_stayed,
    input_of,
    place_of,
    publish_places,
    sleep_for,
)
from r2ccl.shm.reading import can_all_read, is_readable, refuse_to_read
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
from r2ccl.shm.single_copy import copy_input, reduce_share
from r2ccl.shm.transfer import (
    LEAST_NBYTES,
    PAST_CACHES,
    READ,
    choose,
    learn,
    note_begin,
    note_end,
    tell,
)
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
        is_allreduce = is_shared and kernel != 0
        # Ranks whose calls this rank compares with its own before it goes on. A rank that only
        # sends compares none.
        is_rooted, compared = (flags & (FROM_ROOT | TO_ROOT)) != 0, range(nranks)
        if flags & FROM_ROOT:
            compared = senders
        elif is_rooted and rank != root:
            compared = range(0)
        # Largest parts that this rank sends and receives, and ends of all such parts in its arrays.
        most_sent, most_put = nbytes, nbytes
        sent, put = nbytes + (nranks - 1) * source_step, nbytes + (nranks - 1) * target_step
        if has_tables:
            most_sent, most_put, sent, put = 0, 0, 0, 0
            for peer in range(nranks):
                most_sent = max(most_sent, sent_nbytes[peer])
                most_put = max(most_put, put_nbytes[peer])
                if sent_nbytes[peer] > 0:
                    sent = max(sent, sent_from[peer] + sent_nbytes[peer])
                put = max(put, put_to[peer] + put_nbytes[peer])

        # True if headers have the words of places (0: no place). All ranks decide alike if parts
        # have the same size; otherwise it is always True.
        least = min(given[LOOP_LEAST_REACHED], given[LOOP_LEAST_READ])
        is_reaching = has_tables or nbytes >= least
        # With a root, the duration of a rank that only sends says nothing about the receivers.
        is_choosing = not is_rooted and nbytes >= LEAST_NBYTES
        # In an alltoall in place, this rank overwrites its input, piece by piece.
        is_in_place = False
        if not is_whole and not is_rooted and kernel == 0:
            is_in_place = source < target + put and target < source + sent

        if is_resumed == 0:
            begin(state, (max(most_sent, most_put) + piece - 1) // piece)
            # If parts differ in size, other ranks may have parts that are large enough to be read.
            largest = given[LOOP_LEAST_READ] if has_tables else nbytes
            may_read = NEVER > largest >= given[LOOP_LEAST_READ] and can_all_read(state)
            choose(state, given, is_choosing, may_read)
            if is_rooted and may_read:
                state[TRANSFER] = READ
            state[MODE] = UNDECIDED
            if is_rooted:
                announce_earlier_calls(state)
        first = first_round(state)
        row = PARTS + 2 * ROW_NBYTES * (state[NCALLS] & (NHEADERS - 1))

        # Before round 0, the round with index -1 deposits its pieces and compares the calls.
        while state[ROUND] < state[TOTAL]:
            index = state[ROUND]
            if is_allreduce and state[MODE] == DIRECT:
                if state[STEP] == _TAKE:
                    reduce_share(state, sources, nbytes, kernel)
                    stream_fence()
                    publish(base + DONE, first + LAST_ROUND)
                    state[STEP] = _LINGER
                break
            if state[STEP] == _DEPOSIT:
                ahead = index + 1
                if ahead == 0:
                    result = write_header(state, address, signature)
                    if result != FINISHED:
                        return result
                    place, to_place = 0, 0
                    can_be_direct = is_reaching and is_depositor and sent > 0
                    if is_in_place or state[MODE] == STAGED:
                        can_be_direct = False
                    if can_be_direct and most_sent >= given[LOOP_LEAST_REACHED]:
                        place = place_of(state, source, sent)
                        if is_allreduce:
                            to_place = place_of(state, target, nbytes)
                            place = 0 if to_place == 0 else place
                    is_mapped = place != 0
                    if place == 0 and can_be_direct and state[TRANSFER] == READ:
                        is_large = most_sent >= given[LOOP_LEAST_READ]
                        if is_large and is_readable(state, address, source, sent):
                            place = source | UNMAPPED
                    if is_reaching:
                        publish_places(state, place, to_place)
                        # A rank whose array all ranks map uses none of the transfers.
                        tell(state, given, is_choosing and not is_mapped)
                    if not is_allreduce:
                        state[MODE] = UNDECIDED if place == 0 else DIRECT
                    if has_tables:
                        for peer in range(nranks):
                            at = base + row + 8 * peer
                            store_release(at, sent_nbytes[peer])
                            store_release(at + ROW_NBYTES, sent_from[peer])
                is_direct = is_reaching and has_input(state, rank)
                if is_depositor and not is_direct and ahead < state[TOTAL]:
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
                            length = min(length - done, piece)
                            copy(place, at, length, state[TRANSFER] == PAST_CACHES)
                    if state[TRANSFER] == PAST_CACHES:
                        stream_fence()
                if ahead == 0:
                    publish_header(state)
                elif is_sender and not is_direct and ahead < state[TOTAL]:
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
                if is_reaching and not is_rooted:
                    learn(state, given)
                if is_reaching and is_allreduce:
                    ndirect = 0
                    for peer in senders:
                        ndirect += has_input(state, peer)
                    if ndirect == nranks:
                        state[TOTAL] = 1
                        state[MODE] = DIRECT
                        continue
                    if ndirect > 0:
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
                        if is_reaching and has_input(state, peer):
                            continue
                        word = state[BASES + peer] + POSTED
                        if not wait(state, address, word, first + index):
                            state[AWAITED] = peer
                            return WAITING
                own = 0 if is_shared else rank * source_step
                own = source + (sent_from[rank] if has_tables else own) + done
                length = put_nbytes[rank] if has_tables else nbytes
                length = max(0, min(length - done, piece))
                # Ranks that begin with different peers do not all read the same memory.
                for number in range(nranks):
                    peer, place = rank + number, (nranks - 1 - number) * portion
                    if peer >= nranks:
                        peer -= nranks
                    if not senders.start <= peer < senders.stop:
                        continue
                    is_direct, offset = is_reaching and peer != rank and has_input(state, peer), 0
                    if is_direct:
                        offset = 0 if is_shared else rank * source_step
                        if has_tables:
                            at = state[BASES + peer] + row + ROW_NBYTES
                            offset = load_acquire(at + 8 * (peer if is_shared else rank))
                    if kernel != 0:
                        if is_direct:
                            kernel_sources[peer] = input_of(state, peer) + offset + done
                        elif peer == rank and not is_shared:
                            kernel_sources[peer] = own
                        else:
                            kernel_sources[peer] = slot_of(state, peer, index) + place
                        continue
                    length = put_nbytes[peer] if has_tables else nbytes
                    to = target + (put_to[peer] if has_tables else peer * target_step) + done
                    left = length - done
                    if is_direct and (is_in_place or index == 0):
                        length = min(left, piece) if is_in_place else left
                        if length > 0 and not copy_input(
                            state, address, peer, offset + done, to, length, is_streamed
                        ):
                            refuse_to_read(state)
                            sleep_for(state, address, peer)
                            return UNREADABLE
                    elif not is_direct and left > 0:
                        at = own if peer == rank else slot_of(state, peer, index) + place
                        if at != to:
                            copy(to, at, min(left, piece), is_streamed)
                if kernel != 0:
                    call_kernel(kernel, sources, nranks, target + done, length)
            if index + 1 == state[TOTAL] and (
                has_tables
                or (is_rooted and index > 0)
                or (is_reaching and is_receiver and has_any_input(state, senders))
            ):
                publish(base + DONE, first + LAST_ROUND)
            elif index >= 0 and state[TOTAL] > 1 and is_receiver:
                publish(base + DONE, first + index)
            state[STEP] = _DEPOSIT
            state[ROUND] = index + 1
        if state[MODE] == DIRECT:
            result = wait_until_done(state, address, receivers, first + LAST_ROUND)
            if result != FINISHED:
                return result
        has_reached = is_reaching and is_receiver and has_any_input(state, senders)
        if has_reached and not have_stayed(state, address, senders):
            return WAITING
        stream_fence()
        note_end(state, address, given)
        return finish(state)

    return exchange


__all__ = ["make_exchange"]
