"""Compiled loop that moves the data of messages to and from all peers, and waits for events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import (
    add,
    fence,
    load_acquire,
    load_ordered,
    pause,
    sched_yield,
    store_release,
    stream_fence,
    words_at,
)
from r2ccl.shm.frames import (
    begin_out,
    consume,
    has_frame,
    has_room,
    next_frame,
    peer_words,
    pull,
    push,
    put,
    ring_bell,
)
from r2ccl.shm.layout import RANK, WAITERS, YIELDS
from r2ccl.shm.message_layout import (
    ABANDONED,
    DATA_FRAME,
    FRAME,
    FRAME_KIND,
    IDLE,
    IN_ADDRESS,
    IN_LEFT,
    KIND_MASK,
    MOVED,
    OUT_LEFT,
    OUT_TAIL,
    OWN_BELL,
    PEER,
    RECEIVED_ALL,
    REQUEST,
    RING_READS,
    RING_TAIL,
    ROOM,
    SENT_ALL,
    START,
    TABLE_NRANKS,
    UNREADABLE,
    WANTED,
    WOKEN,
)
from r2ccl.shm.message_transfer import (
    begin_in,
    chosen_address,
    end_in,
    has_closed,
    read_piece,
    readable_address,
)
from r2ccl.shm.waiting import note_pauses, number_of_pauses, sleep

#: Maximum number of rounds that move data before the caller handles signals. They take a few
#: milliseconds, or about 10 ms for each peer from whose process messages are read.
MOST_ROUNDS = 256

#: Compiled ``pump``, see `make_pump`.
Pump = Callable[[int, int, int], int]


@inlined
def enter_sleep(bell: Any) -> Any:
    """Count this thread as sleeping; return the value of the bell, for `wait_for_bell`.

    After this call and before it sleeps, the caller must check once more whether there is work. A
    peer that stores new work after this check sees the count and rings the bell.
    """
    add(bell + WAITERS, 1)
    fence()
    return load_ordered(bell)


@inlined
def wait_for_bell(address: Any, table_at: Any, bell: Any, seen: Any) -> Any:
    """Sleep until a peer rings the bell, but not longer than the state allows (`SLEEP_S`).

    `seen` is the result of `enter_sleep`. Return True if a peer has rung the bell, or this thread
    was woken for an earlier ring, otherwise False. If a thread of this rank has set WOKEN, clear
    WOKEN and return False.
    """
    is_woken = sleep(words_at(address), address, bell, seen)
    if load_acquire(table_at + 8 * WOKEN) != 0:
        store_release(table_at + 8 * WOKEN, 0)
        return False
    return is_woken or load_acquire(bell) != seen


@inlined
def leave_sleep(bell: Any) -> None:
    """Stop counting this thread as sleeping; call it once after each `enter_sleep`."""
    add(bell + WAITERS, -1)


@inlined
def rest(state: Any, nidle: Any, limit: Any) -> Any:
    """Pause or yield after idle round number `nidle`, from 1, and return True.

    If the thread has paused and yielded often enough and has to sleep, return False at once.
    `limit` is the result of `number_of_pauses`.
    """
    if nidle <= limit:
        pause()
        return True
    if nidle == limit + 1:
        note_pauses(state, limit, False)
    if nidle <= limit + state[YIELDS]:
        sched_yield()
        return True
    return False


@inlined
def _is_abandoned(words: Any, is_reading: Any) -> Any:
    """Return whether a message that is being received from a peer will never be complete."""
    # The peer has put all its frames before it closed, so the frames are looked for second.
    return has_closed(words) and (is_reading or not has_frame(words))


@inlined
def _scan(state: Any, address: Any, table: Any, table_at: Any) -> Any:
    """Move one piece of a long message to and from each peer; return an event.

    Stop at the first peer with an event other than MOVED.
    """
    event = IDLE
    nranks = table[TABLE_NRANKS]
    for step in range(nranks):
        peer = table[START] + step
        if peer >= nranks:
            peer -= nranks
        if peer == state[RANK]:
            continue
        words = peer_words(table_at, peer)
        found = IDLE
        if words[OUT_LEFT] > 0 and push(table, words):
            event = MOVED
            if words[OUT_LEFT] == 0:
                found = SENT_ALL
        if (
            found == IDLE
            and words[WANTED] > 0
            and (has_room(table, words, words[WANTED] - 1) or has_closed(words))
        ):
            words[WANTED] = 0
            found = ROOM
        is_reading = words[IN_LEFT] > 0 and words[IN_ADDRESS] != 0
        if found == IDLE and is_reading:
            found = read_piece(state, address, peer, words)
            if found == UNREADABLE:
                words[IN_LEFT] = 0
            elif found == MOVED:
                event, found = MOVED, IDLE
                if words[IN_LEFT] == 0:
                    end_in(address, words)
                    found = RECEIVED_ALL
        if found == IDLE and has_frame(words):
            kind = next_frame(table, words)[FRAME_KIND] & KIND_MASK
            if kind != DATA_FRAME or words[IN_LEFT] <= 0:
                found = FRAME
            elif not is_reading:
                pull(table, words)
                event = MOVED
                if words[IN_LEFT] == 0:
                    stream_fence()
                    end_in(address, words)
                    found = RECEIVED_ALL
        if found == IDLE and words[IN_LEFT] > 0 and _is_abandoned(words, is_reading):
            words[IN_LEFT] = 0
            found = ABANDONED
        if found != IDLE:
            table[PEER] = peer
            table[START] = peer + 1 if peer + 1 < nranks else 0
            return found
    return event


def make_pump() -> Pump:
    """Return the function ``pump``, which `r2ccl.kernels.native` compiles.

    Returns
    -------
    callable
        ``pump(state, table, is_waiting)``; returns one of the events in `r2ccl.shm.message_layout`:
        an event of one peer, or MOVED, or IDLE if no data can move. `state` and `table` are
        addresses. With `is_waiting`, the function waits up to some milliseconds for an event before
        it returns IDLE.
    """

    def pump(address: Any, table_at: Any, is_waiting: Any) -> Any:
        state, table = words_at(address), words_at(table_at)
        bell = table[OWN_BELL]
        nidle, nrounds, limit, is_over = 0, 0, 0, False
        while True:
            event = _scan(state, address, table, table_at)
            if event == IDLE:
                if is_waiting == 0 or is_over:
                    return MOVED if nrounds > 0 else IDLE
                if nidle == 0:
                    limit = number_of_pauses(state, address)
                nidle += 1
                if rest(state, nidle, limit):
                    continue
                seen = enter_sleep(bell)
                event = _scan(state, address, table, table_at)
                if event == IDLE:
                    is_over = not wait_for_bell(address, table_at, bell, seen)
                leave_sleep(bell)
                if event == IDLE:
                    continue
            elif 0 < nidle <= limit:
                note_pauses(state, limit, True)
            if event != MOVED:
                return event
            nidle = 0
            nrounds += 1
            if nrounds >= MOST_ROUNDS:
                return MOVED

    return pump


def make_put() -> Callable[[int, int, int, int, int, int, int, int, int], int]:
    """Return the function that puts a frame; `r2ccl.kernels.native` compiles it.

    Returns
    -------
    callable
        ``put(state, table, peer, kind, tag, ident, size, source, nbytes)``; see
        `r2ccl.shm.frames.put`. `state` and `table` are addresses. For a REQUEST, `source` is the
        address of the data of the announced message, and `nbytes` is 0. Returns 1 if the frame was
        put, or is not needed because the peer has closed the communicator. Returns 0 if the ring
        has no room; ``pump`` then returns ROOM when it has room for this frame.
    """

    def put_frame(
        address: Any, table_at: Any, peer: Any, kind: Any, tag: Any, ident: Any, size: Any,
        source: Any, nbytes: Any,
    ) -> Any:  # fmt: skip
        table, words = words_at(table_at), peer_words(table_at, peer)
        if not has_room(table, words, nbytes):
            if has_closed(words):
                return 1
            words[WANTED] = nbytes + 1
            return 0
        readable_at = 0
        if kind & KIND_MASK == REQUEST:
            readable_at = readable_address(words_at(address), peer, source, size)
        put(table, words, kind, tag, ident, size, source, nbytes, readable_at)
        return 1

    return put_frame


def make_consume() -> Callable[[int, int, int], int]:
    """Return the function that takes the next frame of a peer; `r2ccl.kernels.native` compiles it.

    Returns
    -------
    callable
        ``consume(table, peer, nbytes)``; see `r2ccl.shm.frames.consume`. `table` is the address of
        the table. Returns 0.
    """

    def consume_frame(table_at: Any, peer: Any, nbytes: Any) -> Any:
        consume(words_at(table_at), peer_words(table_at, peer), nbytes)
        return 0

    return consume_frame


def make_count_reads() -> Callable[[int], int]:
    """Return the function that counts messages being read; `r2ccl.kernels.native` compiles it.

    Returns
    -------
    callable
        ``count_reads(table)`` returns the number of messages of this rank that peers read, or will
        read. Stores that a peer made before it changed its count are visible afterwards. `table` is
        the address of the table.
    """

    def count_reads(table_at: Any) -> Any:
        table, number = words_at(table_at), 0
        for peer in range(table[TABLE_NRANKS]):
            words = peer_words(table_at, peer)
            if words[OUT_TAIL] != 0:  # not this rank itself
                number += load_acquire(words[OUT_TAIL] + (RING_READS - RING_TAIL))
        return number

    return count_reads


def make_choose() -> Callable[[int, int, int, int], int]:
    """Return the function that chooses a message's transfer; `r2ccl.kernels.native` compiles it.

    Returns
    -------
    callable
        ``choose(table, peer, readable_at, nbytes)``; see
        `r2ccl.shm.message_transfer.chosen_address`. `table` is the address of the table.
    """

    def choose(table_at: Any, peer: Any, readable_at: Any, nbytes: Any) -> Any:
        return chosen_address(peer_words(table_at, peer), readable_at, nbytes)

    return choose


def make_begin() -> Callable[[int, int, int, int, int, int, int, int], int]:
    """Return the function that begins to move a long message; `r2ccl.kernels.native` compiles it.

    Returns
    -------
    callable
        ``begin(state, table, peer, data, nbytes, is_in, readable_at, is_timed)``; `state` and
        `table` are addresses, and `data` is the address of the data to send to the peer or, with
        `is_in`, of the memory into which to receive. For `readable_at` and `is_timed`, see
        `r2ccl.shm.message_transfer.begin_in`. Returns 0.
    """

    def begin(
        address: Any, table_at: Any, peer: Any, data: Any, nbytes: Any, is_in: Any,
        readable_at: Any, is_timed: Any,
    ) -> Any:  # fmt: skip
        words = peer_words(table_at, peer)
        if is_in:
            begin_in(words_at(address), address, words, data, nbytes, readable_at, is_timed)
        else:
            begin_out(words, data, nbytes)
        return 0

    return begin


def make_ring() -> Callable[[int], int]:
    """Return the function that rings the bell at an address; `r2ccl.kernels.native` compiles it."""

    def ring(bell: Any) -> int:
        ring_bell(bell)
        return 0

    return ring


__all__ = [
    "MOST_ROUNDS",
    "Pump",
    "enter_sleep",
    "leave_sleep",
    "make_begin",
    "make_choose",
    "make_consume",
    "make_count_reads",
    "make_pump",
    "make_put",
    "make_ring",
    "rest",
    "wait_for_bell",
]
