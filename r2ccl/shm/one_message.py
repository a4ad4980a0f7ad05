"""Compiled send, receive, or both at once, with one peer each: a *direct call*.

A direct call may run only if this rank has no other message of the communicator in progress. A loop
performs the steps of the send and of the receive (see `r2ccl.runtime.messages.protocol`).
The loop returns OPEN if a peer is late, if a peer sends a frame that the call does not expect, or
after `MOST_ROUNDS` rounds that moved data. Python then continues the call from the steps that are
stored in the call's words. The functions for single steps return an event: MOVED, IDLE if nothing
could be done, or OPEN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import load_acquire, stream_fence, words_at
from r2ccl.shm.frames import (
    begin_out,
    consume,
    copy_data,
    has_frame,
    has_room,
    next_frame,
    peer_words,
    pull,
    push,
    put,
)
from r2ccl.shm.layout import CHANGED, FINISHED
from r2ccl.shm.message_layout import (
    AWAITS,
    CALL_CAPACITY,
    CALL_DTYPE,
    CALL_FORM,
    CALL_IDENT,
    CALL_IS_SHORT,
    CALL_NBYTES,
    CALL_RECV_DTYPE,
    CALL_RECV_TAG,
    CALL_SOURCE,
    CALL_TAG,
    CALL_TO,
    DATA_FRAME,
    DONE,
    FINISHED_OTHER,
    FOUND_IDENT,
    FOUND_NBYTES,
    FOUND_TAG,
    FRAME_ADDRESS,
    FRAME_IDENT,
    FRAME_KIND,
    FRAME_SIZE,
    FRAME_TAG,
    GRANT,
    IDENT,
    IDLE,
    IN_ADDRESS,
    IN_BEGUN_NS,
    IN_LEFT,
    KIND_BITS,
    KIND_MASK,
    LAST_NBYTES,
    LAST_TAG,
    MESSAGE,
    MOVED,
    MOVES,
    OPEN,
    OUT_LEFT,
    OUT_TAIL,
    OWN_BELL,
    READ_FRAME,
    READS,
    RECV_STEP,
    REQUEST,
    RING_TAIL,
    RING_TAKEN,
    SEND_STEP,
    SENT,
    TAKEN,
    TO_PUT,
    TO_TELL,
    UNREADABLE,
)
from r2ccl.shm.message_transfer import (
    begin_in,
    chosen_address,
    count_read,
    end_in,
    read_piece,
    readable_address,
)
from r2ccl.shm.pump import MOST_ROUNDS, enter_sleep, leave_sleep, rest, wait_for_bell
from r2ccl.shm.rounds import fits
from r2ccl.shm.waiting import note_pauses, number_of_pauses
from r2ccl.types import MOST_UNTAKEN

#: Compiled ``direct``, see `make_direct`.
Direct = Callable[[int, int, int, int, int], int]


@inlined
def _put_message(state: Any, table: Any, words: Any, call: Any, source: Any) -> Any:
    """Put the message into the ring, or only announce it; return an event.

    A message is announced if it is long, or if the short messages that wait for receives of the
    peer would otherwise have more than `MOST_UNTAKEN` bytes. If the ring has no room, put nothing
    and return IDLE.
    """
    nbytes = call[CALL_NBYTES]
    is_short = nbytes == 0
    if call[CALL_IS_SHORT] != 0:
        taken = load_acquire(words[OUT_TAIL] + (RING_TAKEN - RING_TAIL))
        is_short = words[SENT] - taken + nbytes <= MOST_UNTAKEN
    data = nbytes if is_short else 0
    if not has_room(table, words, data):
        return IDLE
    table[IDENT] += 1
    call[CALL_IDENT] = table[IDENT]
    kind, readable_at = MESSAGE, 0
    if not is_short:
        kind = REQUEST
        readable_at = readable_address(state, call[CALL_TO], source, nbytes)
    kind |= call[CALL_DTYPE] << KIND_BITS
    put(table, words, kind, call[CALL_TAG], call[CALL_IDENT], nbytes, source, data, readable_at)
    words[SENT] += data
    call[SEND_STEP] = DONE if is_short else AWAITS
    return MOVED


@inlined
def _advance_send(state: Any, table: Any, words: Any, call: Any, source: Any) -> Any:
    """Perform the next step of the send; return an event."""
    step = call[SEND_STEP]
    if step == TO_PUT:
        return _put_message(state, table, words, call, source)
    if step == MOVES:
        if not push(table, words):
            return IDLE
        if words[OUT_LEFT] == 0:
            call[SEND_STEP] = DONE
        return MOVED
    if step == AWAITS and has_frame(words):
        header = next_frame(table, words)
        kind = header[FRAME_KIND] & KIND_MASK
        if kind in (GRANT, READ_FRAME) and header[FRAME_IDENT] == call[CALL_IDENT]:
            consume(table, words, 0)
            if kind == READ_FRAME:
                call[SEND_STEP] = DONE
            else:
                begin_out(words, source, call[CALL_NBYTES])
                call[SEND_STEP] = MOVES
            return MOVED
        # A receive from the same peer handles all other frames.
        if call[CALL_SOURCE] != call[CALL_TO] or call[RECV_STEP] == DONE:
            return OPEN
    return IDLE


@inlined
def _take_frame(state: Any, address: Any, table: Any, words: Any, call: Any, target: Any) -> Any:
    """Take the next frame, which begins the message to receive, and return MOVED.

    Return OPEN, and leave the frame in the ring, if it does not begin a message with the wanted tag
    and dtype, or the message is larger than the array.
    """
    header = next_frame(table, words)
    kind, tag = header[FRAME_KIND] & KIND_MASK, call[CALL_RECV_TAG]
    nbytes = header[FRAME_SIZE]
    is_message = kind in (MESSAGE, REQUEST)
    if not is_message or (tag >= 0 and tag != header[FRAME_TAG]):
        return OPEN
    if header[FRAME_KIND] >> KIND_BITS != call[CALL_RECV_DTYPE] or nbytes > call[CALL_CAPACITY]:
        return OPEN
    call[FOUND_TAG], call[FOUND_NBYTES] = header[FRAME_TAG], nbytes
    call[FOUND_IDENT] = header[FRAME_IDENT]
    if kind == MESSAGE:
        copy_data(table, words, target, nbytes, False)
        words[TAKEN] += nbytes
        consume(table, words, nbytes)
        call[RECV_STEP] = DONE
    else:
        readable_at = chosen_address(words, header[FRAME_ADDRESS], nbytes)
        begin_in(state, address, words, target, nbytes, readable_at, header[FRAME_ADDRESS] != 0)
        call[RECV_STEP] = TO_PUT
        if readable_at != 0:
            count_read(words, 1)
            call[RECV_STEP] = READS
        consume(table, words, 0)
    return MOVED


@inlined
def _read(state: Any, address: Any, words: Any, call: Any) -> Any:
    """Read the next piece of the message to receive; return an event.

    If the message cannot be read, the next step puts a GRANT, so that the data comes in frames.
    """
    event = read_piece(state, address, call[CALL_SOURCE], words)
    if event == UNREADABLE:
        call[RECV_STEP] = TO_PUT
        return MOVED
    if words[IN_LEFT] == 0:
        call[RECV_STEP] = TO_TELL
    return event


@inlined
def _advance_receive(
    state: Any, address: Any, table: Any, words: Any, call: Any, target: Any
) -> Any:
    """Perform the next step of the receive; return an event."""
    step = call[RECV_STEP]
    if step in (TO_PUT, TO_TELL):
        if not has_room(table, words, 0):
            return IDLE
        nbytes = call[FOUND_NBYTES]
        answer = GRANT if step == TO_PUT else READ_FRAME
        put(table, words, answer, 0, call[FOUND_IDENT], nbytes, 0, 0)
        if words[IN_ADDRESS] != 0:  # the message was read, or could not be read
            count_read(words, -1)
            if step == TO_PUT:
                begin_in(state, address, words, target, nbytes, 0, False)
        call[RECV_STEP] = MOVES if step == TO_PUT and nbytes > 0 else DONE
        return MOVED
    if step == READS:
        return _read(state, address, words, call)
    if step == DONE or not has_frame(words):
        return IDLE
    kind = next_frame(table, words)[FRAME_KIND] & KIND_MASK
    is_answer = kind in (GRANT, READ_FRAME)
    if is_answer and call[CALL_TO] == call[CALL_SOURCE] and call[SEND_STEP] == AWAITS:
        return IDLE  # the send handles this frame
    if step == AWAITS:
        return _take_frame(state, address, table, words, call, target)
    if kind != DATA_FRAME:
        return OPEN
    pull(table, words)
    if words[IN_LEFT] == 0:
        stream_fence()
        call[RECV_STEP] = DONE
    return MOVED


@inlined
def _advance(
    state: Any, address: Any, table: Any, table_at: Any, call: Any, source: Any, target: Any
) -> Any:
    """Perform the next step of the send and of the receive; return OPEN, MOVED or IDLE."""
    event = IDLE
    if call[SEND_STEP] != DONE:
        words = peer_words(table_at, call[CALL_TO])
        event = _advance_send(state, table, words, call, source)
        if event == OPEN:
            return OPEN
    if call[RECV_STEP] != DONE:
        words = peer_words(table_at, call[CALL_SOURCE])
        found = _advance_receive(state, address, table, words, call, target)
        if found != IDLE:
            event = found
    return event


def make_direct() -> Direct:
    """Return the function ``direct``, which `r2ccl.kernels.native` compiles.

    Returns
    -------
    callable
        ``direct(state, table, call, source_at, target_at)``; returns FINISHED, FINISHED_OTHER, OPEN
        or CHANGED (the arrays do not have the form of the call; nothing was done). `state`, `table`
        and `call` are the addresses of the state (`r2ccl.shm.layout`), of the table and of the
        words of the call (`r2ccl.shm.message_layout`). `source_at` and `target_at` are the
        addresses of pointers to the data to send and to the memory into which to receive.
    """

    def direct(address: Any, table_at: Any, call_at: Any, source_at: Any, target_at: Any) -> Any:
        call = words_at(call_at)
        if not fits(call[CALL_FORM], source_at, target_at):
            return CHANGED
        state, table = words_at(address), words_at(table_at)
        source, target = words_at(source_at)[0], words_at(target_at)[0]
        call[SEND_STEP] = TO_PUT if call[CALL_TO] >= 0 else DONE
        call[RECV_STEP] = AWAITS if call[CALL_SOURCE] >= 0 else DONE
        if call[CALL_SOURCE] >= 0:  # may have the time of an earlier call whose send ended last
            peer_words(table_at, call[CALL_SOURCE])[IN_BEGUN_NS] = 0
        bell = table[OWN_BELL]
        nidle, nrounds, limit, is_over = 0, 0, 0, False
        while call[SEND_STEP] != DONE or call[RECV_STEP] != DONE:
            event = _advance(state, address, table, table_at, call, source, target)
            if event == IDLE:
                if is_over:
                    return OPEN
                if nidle == 0:
                    limit = number_of_pauses(state, address)
                nidle += 1
                if rest(state, nidle, limit):
                    continue
                seen = enter_sleep(bell)
                event = _advance(state, address, table, table_at, call, source, target)
                if event == IDLE:
                    is_over = not wait_for_bell(address, table_at, bell, seen)
                leave_sleep(bell)
                if event == IDLE:
                    continue
            elif 0 < nidle <= limit:
                note_pauses(state, limit, True)
            if event == OPEN:
                return OPEN
            nidle = 0
            nrounds += 1
            if nrounds >= MOST_ROUNDS:
                return OPEN
        if call[CALL_SOURCE] < 0:
            return FINISHED
        # The end of the send counts, too: a rank that reads also waits until its peer has read.
        end_in(address, peer_words(table_at, call[CALL_SOURCE]))
        if call[FOUND_TAG] == call[LAST_TAG] and call[FOUND_NBYTES] == call[LAST_NBYTES]:
            return FINISHED
        call[LAST_TAG], call[LAST_NBYTES] = call[FOUND_TAG], call[FOUND_NBYTES]
        return FINISHED_OTHER

    return direct


__all__ = ["Direct", "make_direct"]
