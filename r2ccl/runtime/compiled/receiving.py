"""Frames and slices from peers, in compiled code.

A frame that compiled code does not handle stays in the receive buffer. After the call has left
compiled code, the transport parses it.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import copy_bytes, inlined
from r2ccl.runtime.compiled.layout import (
    ACKED,
    ARENA,
    ARRIVED,
    ARRIVED_CONFIRMED,
    ARRIVED_EAGER,
    ARRIVED_PLACED,
    ASKED,
    BUFFER,
    BUFFER_NBYTES,
    CALL_NBYTES,
    CHANNEL,
    CLEAR_FRAME,
    CLEARED,
    CLEARED_EVENT,
    CONFIRM_FRAME,
    CONFIRMED,
    CONFIRMED_EVENT,
    CONN,
    CONTEXT,
    DATA_FRAME,
    DELIVERED,
    DESTINATION,
    EARLY,
    FD,
    FILLED,
    FIRST_RECEIVED,
    FIRST_SENT,
    HEADER_NBYTES,
    IDLE_SINCE,
    IS_DELAYING,
    IS_EAGER,
    IS_READABLE,
    IS_RESILIENT,
    IS_STALLED,
    NFOREIGN,
    NPAIRS,
    NPLACES,
    NRECEIVES,
    NSENDS,
    OP,
    OPERANDS,
    OTHER,
    PAIR_PEER,
    PARSED,
    PEEK_NBYTES,
    PEER,
    PLACES,
    POSTED,
    RECEIVED_SIGNATURE,
    RECEIVES,
    RELEASED,
    SENDS,
    SENT_SIGNATURE,
    SPACES,
    TARGET,
    TARGET_LEFT,
    TARGET_ORDINAL,
    TARGET_PAIR,
)
from r2ccl.runtime.compiled.sending import has_room, stage_confirmation, write_conn
from r2ccl.runtime.compiled.steps import release
from r2ccl.runtime.compiled.system import count_unread, load32, load64, move_bytes, receive
from r2ccl.runtime.compiled.tables import first_of, log_event, pair_of, size_of, step_of
from r2ccl.shm.atomics import words_at

#: Results of the functions here, in this order: an event was logged; more bytes are needed; bytes
#: were read or handled, but no slice is complete yet; compiled code does not handle the frame.
EVENT, MORE, TAKEN, FOREIGN = 1, 0, 2, -1


@inlined
def confirm(state: Any, pair: Any, ack: Any) -> None:
    """Record that the peer has consumed the slices of a pair with numbers below `ack`."""
    if ack > pair[CONFIRMED]:
        pair[CONFIRMED] = ack
        release(state, pair)


@inlined
def is_awaited(state: Any, number: Any) -> Any:
    """Return whether the call needs further frames of connection `number`.

    The call needs frames until the connection has delivered all slices, and all slices to send on
    it are posted, because posting may require landing places or confirmations. If
    `Config.is_resilient`, the call also needs the final confirmation of each link whose last slice
    to send is cleared: it cannot end without this confirmation.
    """
    for each in range(state[NPAIRS]):
        pair = pair_of(state, each)
        if pair[CONN] != number:
            continue
        if pair[DELIVERED] < pair[NRECEIVES] or pair[POSTED] < pair[NSENDS]:
            return True
        if state[IS_RESILIENT] and pair[RELEASED] < pair[NSENDS]:
            last = words_at(pair[SENDS])[pair[NSENDS] - 1]
            if not step_of(state, last >> 32)[IS_EAGER]:
                return True
    return False


@inlined
def parse(state: Any, number: Any, conn: Any) -> Any:
    """Parse the next frame of a connection; its header must be complete in the buffer.

    Return EVENT if the frame was handled and an event was logged. Return TAKEN for a fragment of a
    slice that is not complete yet; only the fragment's confirmation may have been logged. Return
    MORE if bytes are missing, and FOREIGN if Python must handle the frame.

    A frame of a later call stays in the buffer: set IS_STALLED and return MORE. Do the same for a
    frame of a later message or of another communicator, unless the call waits for frames that may
    follow on this connection; in this case, return FOREIGN. A frame of another communicator that
    stays in the buffer also sets IS_DELAYING.
    """
    at = conn[BUFFER] + conn[PARSED]
    kind, channel, nbytes, seq = load64(at), load64(at + 8), load64(at + 16), load64(at + 24)
    ack, op, signature = load64(at + 32), load64(at + 40), load64(at + 48)
    found = -1
    for each in range(state[NPAIRS]):
        other = pair_of(state, each)
        if other[CHANNEL] == channel and other[PAIR_PEER] == conn[PEER]:
            found = each
            break
    if kind == CONFIRM_FRAME:
        # A confirmation may come on any connection of the peer, also for links of earlier calls.
        if found >= 0:
            pair = pair_of(state, found)
            if ack > pair[FIRST_SENT] + pair[POSTED]:
                return FOREIGN
            confirm(state, pair, ack)
        else:
            state[NFOREIGN] += 1
        log_event(state, CONFIRMED_EVENT, number, channel, 0, ack, 0, found)
        conn[PARSED] += HEADER_NBYTES
        return EVENT
    if channel >> 16 != state[CONTEXT]:
        if is_awaited(state, number):
            return FOREIGN  # a frame for which the call waits may follow
        conn[IS_STALLED], state[IS_DELAYING] = OTHER, 1
        return MORE
    if op > state[OP]:
        conn[IS_STALLED] = 1
        return MORE
    if op != state[OP] or found < 0:
        return FOREIGN
    pair = pair_of(state, found)
    if pair[CONN] != number:
        return FOREIGN
    if ack > pair[FIRST_SENT] + pair[POSTED]:
        return FOREIGN
    if kind == CLEAR_FRAME:
        ordinal = seq - pair[FIRST_SENT]
        if signature != pair[SENT_SIGNATURE] or ordinal < pair[CLEARED] or ordinal >= pair[NSENDS]:
            return FOREIGN
        place = words_at(pair[SENDS])[ordinal]
        step = step_of(state, place >> 32)
        if step[IS_EAGER] or ordinal < pair[POSTED]:
            return FOREIGN
        for each in range(pair[CLEARED], ordinal):
            if not step_of(state, words_at(pair[SENDS])[each] >> 32)[IS_EAGER]:
                return FOREIGN  # the landing place of that slice was announced on another path
        if size_of(state, step, place & 0xFFFFFFFF) != nbytes:
            return FOREIGN
        confirm(state, pair, ack)
        pair[CLEARED] = ordinal + 1
        log_event(state, CLEARED_EVENT, number, channel, seq, ack, nbytes, found)
        conn[PARSED] += HEADER_NBYTES
        return EVENT
    ordinal = seq - pair[FIRST_RECEIVED]
    is_expected = kind == DATA_FRAME and signature == pair[RECEIVED_SIGNATURE]
    if not is_expected or ordinal < 0:
        return FOREIGN
    if ordinal >= pair[NRECEIVES]:  # a later message
        if is_awaited(state, number):
            return FOREIGN  # a frame for which the call waits may follow
        conn[IS_STALLED] = 1
        return MORE
    arrived = words_at(pair[ARRIVED])
    if arrived[ordinal] < 0:
        return FOREIGN
    place = words_at(pair[RECEIVES])[ordinal]
    step, k = step_of(state, place >> 32), place & 0xFFFFFFFF
    size = size_of(state, step, k)
    here = min(conn[FILLED] - conn[PARSED] - HEADER_NBYTES, nbytes)
    offset = words_at(pair[PLACES])[ordinal]
    region = state[ARENA] + offset
    if step[IS_EAGER]:
        if nbytes != size:
            return FOREIGN
        if here < nbytes:
            return MORE
        copy_bytes(region, at + HEADER_NBYTES, nbytes)
        arrived[ordinal] = -1
        log_event(state, ARRIVED_EAGER, number, channel, seq, ack, nbytes, found)
        result = EVENT
    else:
        if ordinal >= pair[ASKED] or nbytes < 0 or nbytes > size - arrived[ordinal]:
            return FOREIGN
        if offset < 0:
            region = state[SPACES + step[DESTINATION]] + first_of(state, step, k)
        region += arrived[ordinal]
        copy_bytes(region, at + HEADER_NBYTES, here)
        arrived[ordinal] += nbytes
        if ack > pair[CONFIRMED]:
            log_event(state, CONFIRMED_EVENT, number, channel, 0, ack, 0, found)
        conn[TARGET], conn[TARGET_LEFT] = region + here, nbytes - here
        conn[TARGET_PAIR], conn[TARGET_ORDINAL] = found, ordinal
        result = TAKEN
        if here == nbytes:
            result = end_fragment(state, number, conn)
    confirm(state, pair, ack)
    conn[PARSED] += HEADER_NBYTES + here
    return result


@inlined
def end_fragment(state: Any, number: Any, conn: Any) -> Any:
    """Handle the end of a fragment; return EVENT if its slice is complete, otherwise TAKEN."""
    at, ordinal = conn[TARGET_PAIR], conn[TARGET_ORDINAL]
    conn[TARGET_PAIR] = -1
    pair = pair_of(state, at)
    arrived = words_at(pair[ARRIVED])
    place = words_at(pair[RECEIVES])[ordinal]
    size = size_of(state, step_of(state, place >> 32), place & 0xFFFFFFFF)
    if arrived[ordinal] < size:
        return TAKEN
    arrived[ordinal] = -1
    conn[NPLACES] -= 1
    seq, kind = pair[FIRST_RECEIVED] + ordinal, ARRIVED_PLACED
    if pair[EARLY] == ordinal + 1:
        kind = ARRIVED_CONFIRMED
        pair[ACKED] = max(pair[ACKED], seq + 1)
    log_event(state, kind, number, pair[CHANNEL], seq, 0, size, at)
    return EVENT


@inlined
def confirm_early(state: Any, number: Any, conn: Any) -> None:
    """Confirm a link's last slice in the call if the socket already holds all its missing bytes.

    This happens at most once per link in a call, only with `Config.is_resilient`, and only if all
    earlier slices of the link are delivered.
    """
    pair, ordinal = pair_of(state, conn[TARGET_PAIR]), conn[TARGET_ORDINAL]
    # The confirmation covers all earlier slices, too.
    is_last = ordinal + 1 == pair[NRECEIVES] and pair[DELIVERED] == ordinal
    if not is_last or pair[EARLY] or not state[IS_RESILIENT]:
        return
    arrived = words_at(pair[ARRIVED])
    place = words_at(pair[RECEIVES])[ordinal]
    size = size_of(state, step_of(state, place >> 32), place & 0xFFFFFFFF)
    if arrived[ordinal] != size or not has_room(conn, 0):
        return
    unread = state[OPERANDS]
    words_at(unread)[0] = 0
    count_unread(conn[FD], unread)
    if load32(unread) >= conn[TARGET_LEFT]:
        stage_confirmation(conn, pair, pair[FIRST_RECEIVED] + ordinal + 1)
        pair[EARLY] = ordinal + 1
        write_conn(state, number, conn)  # a failure shows again at the next write


@inlined
def read_target(state: Any, number: Any, conn: Any) -> Any:
    """Read into a landing place once; return EVENT if the slice is complete, otherwise TAKEN.

    Return -2 if the peer closed the connection. Return -3 if the system call failed, also because
    the socket is empty (EAGAIN).
    """
    confirm_early(state, number, conn)
    asked = min(conn[TARGET_LEFT], CALL_NBYTES)
    n = receive(conn[FD], conn[TARGET], asked)
    if n <= 0:
        return -2 if n == 0 else -3
    state[IDLE_SINCE] = 0
    conn[TARGET] += n
    conn[TARGET_LEFT] -= n
    if conn[TARGET_LEFT] == 0:
        return end_fragment(state, number, conn)
    conn[IS_READABLE] = n == asked
    return TAKEN


@inlined
def read_buffer(conn: Any) -> Any:
    """Read into the receive buffer once; return TAKEN.

    Return -2 if the peer closed the connection. Return -3 if the system call failed, also because
    the socket is empty (EAGAIN).
    """
    rest = conn[FILLED] - conn[PARSED]
    if conn[PARSED]:
        move_bytes(conn[BUFFER], conn[BUFFER] + conn[PARSED], rest)
        conn[PARSED], conn[FILLED] = 0, rest
    most = conn[BUFFER_NBYTES] - rest
    if conn[NPLACES]:
        most = min(most, PEEK_NBYTES)
    n = receive(conn[FD], conn[BUFFER] + rest, most)
    if n <= 0:
        return -2 if n == 0 else -3
    conn[FILLED] += n
    conn[IS_READABLE] = n == most
    return TAKEN


__all__ = ["EVENT", "FOREIGN", "MORE", "TAKEN", "parse", "read_buffer", "read_target"]
