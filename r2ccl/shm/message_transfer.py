"""Compiled choice of the transfer of announced messages: in frames, or by reading; and the reading.

In frames, the sender copies the data into a ring, and the receiver copies it out at the same time.
This is the faster transfer for two ranks whose cores share a cache, if both have a core. Otherwise
it is often faster if the receiver alone copies the data, from the sender's process
(`r2ccl.shm.reading`).

A sender announces the address of each message of at least `LEAST_NBYTES` that its peer may read.
The receiver chooses. It remembers, for each peer and class of sizes, how long each transfer usually
takes, as `r2ccl.shm.transfer` does for collectives.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import clock_ns, fence, load_acquire, store_release
from r2ccl.shm.layout import BASES, CAN_READ, STREAM_NBYTES, TIME
from r2ccl.shm.message_layout import (
    BELL,
    CLASS_LAST,
    CLASS_NMESSAGES,
    CLASS_NS,
    CLASS_NWORDS,
    CLASSES,
    DROPPED,
    IDLE,
    IN_ADDRESS,
    IN_AT,
    IN_BEGUN_NS,
    IN_LEFT,
    IN_SIZE,
    IN_STREAMED,
    IN_TAIL,
    MOVED,
    NCLASSES,
    PEER_BELL,
    RING_READS,
    RING_TAIL,
    UNREAD,
)
from r2ccl.shm.reading import can_read, read_array
from r2ccl.shm.transfer import next_transfer, remember

#: Smallest message that may be read, in bytes; the first class of sizes has at most twice as many.
_LEAST_BITS = 16
LEAST_NBYTES = 1 << _LEAST_BITS
#: A transfer is used 2**5 times in a row in the first class of sizes, and half as often in each
#: further class, but at least 2**2 times. The messages thus go around the ring, whose parts are not
#: in the caches after other messages were read.
_MOST_ROW_BITS, _LEAST_ROW_BITS = 5, 2
#: Number of bytes that are read at a time.
_PIECE_NBYTES = 1 << 18
_MIB_BITS = 20


@inlined
def readable_address(state: Any, peer: Any, source: Any, nbytes: Any) -> Any:
    """Return `source`, the address of a message of `nbytes` bytes, if rank `peer` may read it.

    Return 0 if the message is small, or the peer cannot read this process. The memory of a device
    cannot be read so; the peer then finds that out, and grants the message.
    """
    if nbytes < LEAST_NBYTES or load_acquire(state[BASES + peer] + CAN_READ) == 0:
        return 0
    return source


@inlined
def _class_of(nbytes: Any) -> Any:
    """Return the number of the class of messages of `nbytes` bytes."""
    number, rest = 0, nbytes >> (_LEAST_BITS + 1)
    while rest > 0 and number < NCLASSES - 1:
        number += 1
        rest >>= 1
    return number


@inlined
def chosen_address(words: Any, readable: Any, nbytes: Any) -> Any:
    """Choose the transfer of a message that a receive takes; return `readable` to read it, else 0.

    `readable` is the address that the sender has announced, or 0.
    """
    if readable == 0:
        return 0
    number = _class_of(nbytes)
    at, row_bits = CLASSES + number * CLASS_NWORDS, max(_LEAST_ROW_BITS, _MOST_ROW_BITS - number)
    transfer = next_transfer(words, at + CLASS_NMESSAGES, at + CLASS_NS, 2, row_bits)
    return readable if transfer == 1 else 0


@inlined
def begin_in(
    state: Any, address: Any, words: Any, target: Any, nbytes: Any, readable: Any, is_timed: Any
) -> None:
    """Begin to receive a long message of `nbytes` bytes at address `target`.

    With `readable` 0, `pull` copies the message from frames; a large message is then written
    without storing it in the caches. Otherwise `read_piece` reads it from address `readable` of the
    peer's process. With `is_timed`, the duration of the transfer is remembered. `address` is that
    of the state.
    """
    words[IN_AT] = target
    words[IN_ADDRESS] = readable
    words[IN_STREAMED] = 1 if nbytes >= state[STREAM_NBYTES] else 0
    words[IN_LEFT] = words[IN_SIZE] = nbytes
    words[IN_BEGUN_NS] = clock_ns(address + 8 * TIME) if is_timed else 0


@inlined
def end_in(address: Any, words: Any) -> None:
    """Remember the duration of the transfer of a message that has arrived, if it is timed.

    The first message after one with the other transfer does not count, because it finds other data
    in the caches.
    """
    if words[IN_BEGUN_NS] == 0:
        return
    duration_ns = clock_ns(address + 8 * TIME) - words[IN_BEGUN_NS]
    at = CLASSES + _class_of(words[IN_SIZE]) * CLASS_NWORDS
    transfer = 1 if words[IN_ADDRESS] != 0 else 0
    if words[at + CLASS_LAST] == transfer:
        speed_ns = (duration_ns << _MIB_BITS) // words[IN_SIZE]
        remember(words, at + CLASS_NS + transfer, speed_ns)
    words[at + CLASS_LAST] = transfer


@inlined
def count_read(words: Any, change: Any) -> None:
    """Add `change` to the published number of messages that this rank reads from a peer."""
    word = words[IN_TAIL] + (RING_READS - RING_TAIL)
    store_release(word, load_acquire(word) + change)


@inlined
def read_piece(state: Any, address: Any, peer: Any, words: Any) -> Any:
    """Read the next piece of the long message that comes from rank `peer`; return an event.

    MOVED: a piece was read; UNREAD: it cannot be read. IDLE: the peer has dropped its messages, so
    that what was read may not be the message. `address` is that of the state.
    """
    nbytes = min(words[IN_LEFT], _PIECE_NBYTES)
    if not read_array(state, peer, words[IN_AT], words[IN_ADDRESS], nbytes):
        return UNREAD
    # Another process may have the number of the process by now.
    if nbytes == words[IN_LEFT] and not can_read(state, address, peer):
        return UNREAD
    fence()
    if load_acquire(words[PEER_BELL] + (DROPPED - BELL)) != 0:
        return IDLE
    words[IN_AT] += nbytes
    words[IN_ADDRESS] += nbytes
    words[IN_LEFT] -= nbytes
    return MOVED


__all__ = [
    "LEAST_NBYTES",
    "begin_in",
    "chosen_address",
    "count_read",
    "end_in",
    "read_piece",
    "readable_address",
]
