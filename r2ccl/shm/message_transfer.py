"""Compiled steps that choose the transfer of an announced message, and that read a message.

There are two transfers. In frames, the sender copies the data into a ring, and the receiver copies
it out at the same time. This is faster for two ranks whose cores share a cache, if each rank has a
core of its own. Otherwise it is often faster if the receiver alone copies the data, from the
sender's process (`r2ccl.shm.reading`).

A REQUEST contains the address of the data if the message is large enough and the peer may read it.
The receiver chooses: it remembers, for each peer and class of sizes, how long each transfer usually
takes, as `r2ccl.shm.transfer` does for collectives. If the receiver cannot read the data, it
*grants* the message: it answers with a GRANT, and the sender sends the data in frames.

In all functions, `state` is a pointer to the state (`r2ccl.shm.layout`), `address` the address of
the state, and `words` a pointer to the words of the peer in the table (`r2ccl.shm.message_layout`).
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import clock_ns, fence, load_acquire, store_release, words_at
from r2ccl.shm.layout import BASES, CAN_READ, SHARERS, STREAM_NBYTES, TIME
from r2ccl.shm.message_layout import (
    BELL,
    CLASS_NMESSAGES,
    CLASS_NS,
    CLASS_NWORDS,
    CLASSES,
    CLOSED,
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
    UNREADABLE,
)
from r2ccl.shm.reading import can_read, read_array
from r2ccl.shm.transfer import next_transfer, remember

_FRAMES, _READING, _NTRANSFERS = 0, 1, 2
#: Smallest size in bytes of a message that may be read. Class k of sizes begins at 2**k times this
#: size; the last class has no upper limit.
_LEAST_BITS = 16
_LEAST_NBYTES = 1 << _LEAST_BITS
#: A transfer is used 2**6 times in a row in the first class of sizes, half as often in each further
#: class, and at least 2**3 times. Half a row thus has at least 2 MiB, twice the size of the largest
#: ring. Only the second half counts: after messages that were read, the ring is not in the caches.
MOST_ROW_BITS, _LEAST_ROW_BITS = 6, 3
#: Maximum number of bytes that are read at a time, in some 40 us.
_PIECE_NBYTES = 1 << 18
_MIB_BITS = 20
#: The transfer that is slower in most cases (`_is_unlikely`) counts as slower than it is, by
#: 1 / 2**1 of its time. Each receiver chooses for itself, and its own times hardly tell which
#: transfer is faster if all ranks use it. Without this, some ranks read and others do not, and all
#: are slower. Measured with 4 ranks on 2 cores, sendrecv of 256 KiB and of 8 MiB: if all ranks read
#: 52 and 1,580 us, if none reads 34 and 1,920 us, with a free choice 49 and 2,030 us.
_DOUBT_SHIFT = 1


@inlined
def readable_address(state: Any, peer: Any, source: Any, nbytes: Any) -> Any:
    """Return `source`, the address of a message of `nbytes` bytes, if rank `peer` may read it.

    Return 0 if the message has less than `_LEAST_NBYTES`, or the peer has not published that it can
    read the memory of all other ranks. The memory of a device, mapped into the process, cannot be
    read: an attempt of the peer fails, and the peer then grants the message.
    """
    if nbytes < _LEAST_NBYTES or load_acquire(state[BASES + peer] + CAN_READ) == 0:
        return 0
    return source


@inlined
def _class_of(nbytes: Any) -> Any:
    """Return the number of the size class to which messages of `nbytes` bytes belong."""
    number, rest = 0, nbytes >> (_LEAST_BITS + 1)
    while rest > 0 and number < NCLASSES - 1:
        number += 1
        rest >>= 1
    return number


@inlined
def _row_bits(number: Any) -> Any:
    """Return log2 of the number of successive messages of class `number` that use one transfer."""
    return max(_LEAST_ROW_BITS, MOST_ROW_BITS - number)


@inlined
def _is_unlikely(state: Any, transfer: Any, nbytes: Any) -> Any:
    """Return whether a transfer is slower than the other one in most cases.

    Reading is faster for large messages if there are more ranks than cores, because the copies of
    sender and receiver do not overlap then.
    """
    is_read = state[SHARERS] > 1 and nbytes > state[STREAM_NBYTES]
    return (transfer == _READING) != is_read


@inlined
def chosen_address(words: Any, readable_at: Any, nbytes: Any) -> Any:
    """Choose the transfer of a message that a receive takes.

    Return `readable_at`, the address that the sender has announced, if this rank is to read the
    message, otherwise 0; also 0 if `readable_at` is 0.
    """
    if readable_at == 0:
        return 0
    number = _class_of(nbytes)
    at = CLASSES + number * CLASS_NWORDS
    given = at + CLASS_NMESSAGES, at + CLASS_NS, _NTRANSFERS, _row_bits(number)
    transfer = next_transfer(words, *given)
    return readable_at if transfer == _READING else 0


@inlined
def begin_in(
    state: Any, address: Any, words: Any, target: Any, nbytes: Any, readable_at: Any, is_timed: Any
) -> None:
    """Begin to receive a long message of `nbytes` bytes at address `target`.

    With `readable_at` 0, `pull` copies the message from frames; a message of at least
    ``state[STREAM_NBYTES]`` bytes is written without storing it in the caches. Otherwise,
    `read_piece` reads it from address `readable_at` of the peer's process. With `is_timed`,
    `end_in` remembers the duration, but only in the second half of each row of successive messages
    that use one transfer.
    """
    words[IN_AT] = target
    words[IN_ADDRESS] = readable_at
    words[IN_STREAMED] = 1 if nbytes >= state[STREAM_NBYTES] else 0
    words[IN_LEFT] = words[IN_SIZE] = nbytes
    words[IN_BEGUN_NS] = 0
    if is_timed:
        number = _class_of(nbytes)
        last = words[CLASSES + number * CLASS_NWORDS + CLASS_NMESSAGES] - 1
        if (last >> (_row_bits(number) - 1)) & 1:
            words[IN_BEGUN_NS] = clock_ns(address + 8 * TIME)


@inlined
def end_in(address: Any, words: Any) -> None:
    """Remember the time per MiB of a message that has arrived, if the message is timed."""
    if words[IN_BEGUN_NS] != 0:
        duration_ns = clock_ns(address + 8 * TIME) - words[IN_BEGUN_NS]
        words[IN_BEGUN_NS] = 0
        at = CLASSES + _class_of(words[IN_SIZE]) * CLASS_NWORDS
        transfer = _READING if words[IN_ADDRESS] != 0 else _FRAMES
        per_mib_ns = (duration_ns << _MIB_BITS) // words[IN_SIZE]
        if _is_unlikely(words_at(address), transfer, words[IN_SIZE]):
            per_mib_ns += per_mib_ns >> _DOUBT_SHIFT
        remember(words, at + CLASS_NS + transfer, per_mib_ns)


@inlined
def count_read(words: Any, change: Any) -> None:
    """Add `change` to the published number of messages that this rank reads from a peer."""
    word = words[IN_TAIL] + (RING_READS - RING_TAIL)
    store_release(word, load_acquire(word) + change)


@inlined
def has_closed(words: Any) -> Any:
    """Return whether a peer has closed the communicator; its earlier stores are then visible."""
    return load_acquire(words[PEER_BELL] + (DROPPED - BELL)) == CLOSED


@inlined
def read_piece(state: Any, address: Any, peer: Any, words: Any) -> Any:
    """Read the next piece of the long message that comes from rank `peer`; return an event.

    MOVED: a piece was read. UNREADABLE: the message cannot be read. IDLE: the peer has dropped its
    messages; its array may have changed, so the piece does not count.
    """
    nbytes = min(words[IN_LEFT], _PIECE_NBYTES)
    if not read_array(state, peer, words[IN_AT], words[IN_ADDRESS], nbytes):
        return UNREADABLE
    # After the last piece: if the peer's process has ended, another process may have its id.
    if nbytes == words[IN_LEFT] and not can_read(state, address, peer):
        return UNREADABLE
    fence()
    if load_acquire(words[PEER_BELL] + (DROPPED - BELL)) != 0:
        return IDLE
    words[IN_AT] += nbytes
    words[IN_ADDRESS] += nbytes
    words[IN_LEFT] -= nbytes
    return MOVED


__all__ = [
    "MOST_ROW_BITS",
    "begin_in",
    "chosen_address",
    "count_read",
    "end_in",
    "has_closed",
    "read_piece",
    "readable_address",
]
