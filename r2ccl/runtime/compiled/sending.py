"""Frames and slices to peers, in compiled code.

Each connection writes *units*: staged small frames, followed by at most one fragment of a slice.
Frames that are staged while a unit is being written belong to the next unit.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import copy_bytes, inlined
from r2ccl.runtime.compiled.layout import (
    ACKED,
    ARENA,
    ASKED,
    BULK,
    BULK_ADDED,
    BULK_TAKEN,
    CALL_NBYTES,
    CHANNEL,
    CLEAR_FRAME,
    CLEARED,
    CONFIRM_FRAME,
    CONFIRMED,
    CONN,
    CONSUMED,
    COPIES,
    DATA_FRAME,
    DEPTH,
    EAGER,
    EAGER_ADDED,
    EAGER_TAKEN,
    ERRNO,
    FAILED_CONN,
    FD,
    FIRST_RECEIVED,
    FIRST_SENT,
    FRAGMENT,
    FRAGMENT_MOST,
    FRAGMENT_NBYTES,
    HEADER_NBYTES,
    IDLE_SINCE,
    IS_CLEARED,
    IS_EAGER,
    IS_FULL,
    IS_MEASURED,
    IS_UNCONFIRMED,
    KIND,
    MESSAGE,
    NEXT,
    NEXT_NBYTES,
    NOW,
    NOW_DONE,
    NOW_NBYTES,
    NPAIRS,
    NPLACES,
    NRECEIVES,
    NSENDS,
    NUMBER,
    OP,
    POSTED,
    POSTED_EVENT,
    RECEIVED_SIGNATURE,
    RECEIVES,
    REST,
    REST_NBYTES,
    SENDING_ORDINAL,
    SENDING_PAIR,
    SENDS,
    SENT_EVENT,
    SENT_SIGNATURE,
    SLOTS,
    SMALL_NBYTES,
    SOURCE,
    SPACES,
    STAGE_NBYTES,
    USED,
)
from r2ccl.runtime.compiled.steps import finish_slice, is_ready, retire
from r2ccl.runtime.compiled.system import EAGAIN, EINTR, errno, send_message, store64
from r2ccl.runtime.compiled.tables import (
    conn_of,
    first_of,
    log_event,
    log_time,
    pair_of,
    size_of,
    step_of,
)
from r2ccl.shm.atomics import words_at

#: Value of `OpKind.RECV`.
_RECV = 1


@inlined
def put_header(
    at: Any, kind: Any, channel: Any, nbytes: Any, seq: Any, ack: Any, op: Any, signature: Any
) -> None:
    """Write a frame header, see `r2ccl.transport.tcp.connection.HEADER`, to address `at`."""
    store64(at, kind)
    store64(at + 8, channel)
    store64(at + 16, nbytes)
    store64(at + 24, seq)
    store64(at + 32, ack)
    store64(at + 40, op)
    store64(at + 48, signature)
    store64(at + 56, 0)


@inlined
def has_room(conn: Any, nbytes: Any) -> Any:
    """Return whether a frame with a payload of `nbytes` can be staged."""
    # Space for the header of a fragment is always kept free.
    return conn[NEXT_NBYTES] + 2 * HEADER_NBYTES + nbytes <= STAGE_NBYTES


@inlined
def stage(
    state: Any, conn: Any, pair: Any, kind: Any, nbytes: Any, seq: Any, signature: Any
) -> Any:
    """Stage a frame header, which also confirms the pair's consumed slices; return its address.

    There must be room (`has_room`). The caller stages a payload, if any, behind the header.
    """
    at = conn[NEXT] + conn[NEXT_NBYTES]
    put_header(at, kind, pair[CHANNEL], nbytes, seq, pair[CONSUMED], state[OP], signature)
    conn[NEXT_NBYTES] += HEADER_NBYTES
    pair[ACKED] = pair[CONSUMED]
    pair[IS_UNCONFIRMED] = 0
    return at


@inlined
def stage_confirmation(conn: Any, pair: Any, ack: Any) -> None:
    """Stage a frame that confirms the slices of a link with numbers below `ack`.

    There must be room (`has_room`). The caller updates `ACKED`.
    """
    at = conn[NEXT] + conn[NEXT_NBYTES]
    put_header(at, CONFIRM_FRAME, pair[CHANNEL], 0, 0, ack, 0, 0)
    conn[NEXT_NBYTES] += HEADER_NBYTES


@inlined
def post_sends(state: Any, pair: Any) -> Any:
    """Post the slices of a pair that can be sent now; return whether any was posted."""
    has_moved = False
    sends, conn = words_at(pair[SENDS]), conn_of(state, pair[CONN])
    while pair[POSTED] < pair[NSENDS]:
        ordinal = pair[POSTED]
        step, k = step_of(state, sends[ordinal] >> 32), sends[ordinal] & 0xFFFFFFFF
        nbytes = size_of(state, step, k)
        if step[IS_EAGER]:
            is_free = pair[FIRST_SENT] + ordinal - pair[CONFIRMED] < state[SLOTS]
            is_free = is_free and has_room(conn, SMALL_NBYTES)
        else:
            is_free = pair[CLEARED] > ordinal
        if not is_free or not is_ready(state, step, k):
            break
        pair[POSTED] = ordinal + 1
        has_moved = True
        if not step[IS_EAGER]:
            number = conn[BULK_ADDED]
            words_at(conn[BULK])[number] = pair[NUMBER] << 32 | ordinal
            conn[BULK_ADDED] = number + 1
            if state[IS_MEASURED]:
                log_time(state, POSTED_EVENT, pair[CONN], nbytes)
            continue
        copy = state[ARENA] + words_at(pair[COPIES])[ordinal]
        copy_bytes(copy, state[SPACES + step[SOURCE]] + first_of(state, step, k), nbytes)
        if nbytes <= SMALL_NBYTES:
            seq = pair[FIRST_SENT] + ordinal
            at = stage(state, conn, pair, DATA_FRAME, nbytes, seq, pair[SENT_SIGNATURE])
            copy_bytes(at + HEADER_NBYTES, copy, nbytes)
            conn[NEXT_NBYTES] += nbytes
        else:
            number = conn[EAGER_ADDED]
            words_at(conn[EAGER])[number] = pair[NUMBER] << 32 | ordinal
            conn[EAGER_ADDED] = number + 1
        finish_slice(state, step)
        retire(state, pair, 0)
    return has_moved


@inlined
def ask(state: Any, pair: Any) -> None:
    """Expect the next slices of a pair, and announce landing places for the cleared ones."""
    receives, conn = words_at(pair[RECEIVES]), conn_of(state, pair[CONN])
    while pair[ASKED] < pair[NRECEIVES]:
        ordinal = pair[ASKED]
        step, k = step_of(state, receives[ordinal] >> 32), receives[ordinal] & 0xFFFFFFFF
        if not step[IS_EAGER]:
            if ordinal - pair[USED] >= pair[DEPTH] or not has_room(conn, 0):
                return
            if step[KIND] == _RECV and not is_ready(state, step, k):
                return
            seq = pair[FIRST_RECEIVED] + ordinal
            nbytes = size_of(state, step, k)
            stage(state, conn, pair, CLEAR_FRAME, nbytes, seq, pair[RECEIVED_SIGNATURE])
            conn[NPLACES] += 1
        pair[ASKED] = ordinal + 1


@inlined
def confirm_consumed(state: Any) -> None:
    """Stage a confirmation for each pair with `IS_UNCONFIRMED`, while there is room."""
    for number in range(state[NPAIRS]):
        pair = pair_of(state, number)
        if pair[IS_UNCONFIRMED]:
            conn = conn_of(state, pair[CONN])
            if pair[ACKED] < pair[CONSUMED] and has_room(conn, 0):
                stage_confirmation(conn, pair, pair[CONSUMED])
                pair[ACKED] = pair[CONSUMED]
            pair[IS_UNCONFIRMED] = pair[ACKED] < pair[CONSUMED]


@inlined
def begin_unit(state: Any, conn: Any) -> Any:
    """Prepare the next unit of a connection; return False if there is nothing to write."""
    if conn[REST_NBYTES] == 0:
        entry = -1
        if conn[EAGER_TAKEN] < conn[EAGER_ADDED]:
            entry = words_at(conn[EAGER])[conn[EAGER_TAKEN]]
            conn[EAGER_TAKEN] += 1
            conn[IS_CLEARED] = 0
        elif conn[BULK_TAKEN] < conn[BULK_ADDED]:
            entry = words_at(conn[BULK])[conn[BULK_TAKEN]]
            conn[BULK_TAKEN] += 1
            conn[IS_CLEARED] = 1
        if entry >= 0:
            conn[SENDING_PAIR], conn[SENDING_ORDINAL] = entry >> 32, entry & 0xFFFFFFFF
            pair, ordinal = pair_of(state, entry >> 32), entry & 0xFFFFFFFF
            place = words_at(pair[SENDS])[ordinal]
            step, k = step_of(state, place >> 32), place & 0xFFFFFFFF
            conn[REST] = state[SPACES + step[SOURCE]] + first_of(state, step, k)
            if not conn[IS_CLEARED]:
                conn[REST] = state[ARENA] + words_at(pair[COPIES])[ordinal]
            conn[REST_NBYTES] = size_of(state, step, k)
    if conn[REST_NBYTES]:
        pair = pair_of(state, conn[SENDING_PAIR])
        nbytes = conn[REST_NBYTES]
        if conn[IS_CLEARED]:
            nbytes = min(nbytes, conn[FRAGMENT_MOST])
        seq = pair[FIRST_SENT] + conn[SENDING_ORDINAL]
        stage(state, conn, pair, DATA_FRAME, nbytes, seq, pair[SENT_SIGNATURE])
        conn[FRAGMENT], conn[FRAGMENT_NBYTES] = conn[REST], nbytes
        conn[REST] += nbytes
        conn[REST_NBYTES] -= nbytes
    if conn[NEXT_NBYTES] == 0:
        return False
    conn[NOW], conn[NEXT] = conn[NEXT], conn[NOW]
    conn[NOW_NBYTES], conn[NOW_DONE], conn[NEXT_NBYTES] = conn[NEXT_NBYTES], 0, 0
    return True


@inlined
def write_some(state: Any, conn: Any) -> Any:
    """Write to the socket once; return 1 if the unit is then completely written, 0 if it is not.

    Return -1 if the system call failed and wrote nothing. ``errno()`` is then EAGAIN (the socket is
    full), EINTR, or the error of the connection.
    """
    message = words_at(state[MESSAGE])
    parts = words_at(message[2])
    head = conn[NOW_NBYTES] - conn[NOW_DONE]
    tail = min(conn[FRAGMENT_NBYTES], CALL_NBYTES)
    count = 0
    if head:
        parts[0] = conn[NOW] + conn[NOW_DONE]
        parts[1] = head
        count = 1
    if tail:
        parts[2 * count] = conn[FRAGMENT]
        parts[2 * count + 1] = tail
        count += 1
    message[3] = count
    n = send_message(conn[FD], state[MESSAGE])
    if n < 0:
        return -1
    conn[IS_FULL] = n < head + tail
    state[IDLE_SINCE] = 0
    of_head = min(n, head)
    conn[NOW_DONE] += of_head
    conn[FRAGMENT] += n - of_head
    conn[FRAGMENT_NBYTES] -= n - of_head
    return 1 if conn[NOW_DONE] == conn[NOW_NBYTES] and conn[FRAGMENT_NBYTES] == 0 else 0


@inlined
def end_unit(state: Any, number: Any, conn: Any) -> Any:
    """Finish a unit; return whether it had the last fragment of a cleared slice.

    If it had, log the slice as sent, and retire it.
    """
    if conn[SENDING_PAIR] < 0 or conn[REST_NBYTES]:
        return False
    at = conn[SENDING_PAIR]
    conn[SENDING_PAIR] = -1
    if not conn[IS_CLEARED]:
        return False
    pair, ordinal = pair_of(state, at), conn[SENDING_ORDINAL]
    log_event(state, SENT_EVENT, number, pair[CHANNEL], pair[FIRST_SENT] + ordinal, 0, 0, at)
    retire(state, pair, ordinal + 1)
    return True


@inlined
def write_conn(state: Any, number: Any, conn: Any) -> Any:
    """Write as much as the socket accepts.

    Return 1 if a cleared slice was written completely, 0 if not, -1 if the connection failed.
    """
    has_sent = 0
    while not conn[IS_FULL]:
        is_over = conn[NOW_DONE] == conn[NOW_NBYTES] and conn[FRAGMENT_NBYTES] == 0
        if is_over and not begin_unit(state, conn):
            break
        result = write_some(state, conn)
        if result < 0:
            code = errno()
            if code != EAGAIN and code != EINTR:
                state[FAILED_CONN] = number
                state[ERRNO] = code
                return -1
            conn[IS_FULL] = 1
        elif result and end_unit(state, number, conn):
            has_sent = 1
    return has_sent


__all__ = [
    "ask",
    "confirm_consumed",
    "has_room",
    "post_sends",
    "stage_confirmation",
    "write_conn",
]
