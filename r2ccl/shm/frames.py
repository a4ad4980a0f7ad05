"""Compiled steps on the rings of frames: put a frame, take a frame, move the data of long messages.

In all functions, `table` is a pointer to the table of this rank (`r2ccl.shm.message_layout`), and
`words` a pointer to the words of one peer in this table. Sizes are in bytes.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import copy_bytes, inlined
from r2ccl.shm.atomics import add, fence, load_acquire, store_release, words_at
from r2ccl.shm.layout import WAITERS
from r2ccl.shm.message_layout import (
    DATA_FRAME,
    FIRST_PEER,
    FRAME_ADDRESS,
    FRAME_DATA,
    FRAME_IDENT,
    FRAME_KIND,
    FRAME_NBYTES,
    FRAME_SIZE,
    FRAME_TAG,
    HEAD,
    IN_AT,
    IN_HEAD,
    IN_LEFT,
    IN_RING,
    IN_STREAMED,
    IN_TAIL,
    OUT_AT,
    OUT_HEAD,
    OUT_LEFT,
    OUT_PIECE,
    OUT_RING,
    OUT_TAIL,
    PEER_BELL,
    PEER_NWORDS,
    PUBLISHED_TAIL,
    RING,
    RING_TAIL,
    RING_TAKEN,
    SEEN_TAIL,
    TAIL,
    TAKEN,
)
from r2ccl.shm.rounds import copy
from r2ccl.shm.waiting import wake

#: A long message is cut into about `_NPIECES` pieces, so that the copies of sender and receiver
#: overlap, but all pieces except the last have `_LEAST_PIECE` to `_MOST_PIECE` bytes.
_NPIECES = 4
_LEAST_PIECE, _MOST_PIECE = 1 << 13, 1 << 15
#: A receiver publishes its position in a ring after it has taken 1 / 2**3 of the ring.
_LAZY_SHIFT = 3
#: Offset from the published position to the count of bytes taken.
_TO_TAKEN = RING_TAKEN - RING_TAIL


@inlined
def peer_words(table_at: Any, peer: Any) -> Any:
    """Return a pointer to the words of a peer in the table at address `table_at`."""
    return words_at(table_at + 8 * (FIRST_PEER + peer * PEER_NWORDS))


@inlined
def ring_bell(bell: Any) -> None:
    """Wake the threads of a rank that sleep on its bell, a word at address `bell`.

    The caller must have stored the value for which these threads wait.
    """
    fence()
    if load_acquire(bell + WAITERS) > 0:
        add(bell, 1)
        wake(bell)


@inlined
def has_room(table: Any, words: Any, nbytes: Any) -> Any:
    """Return whether the ring to a peer has room for a frame with `nbytes` bytes of data."""
    needed = FRAME_NBYTES + ((nbytes + 63) & -64)
    if table[RING] - (words[HEAD] - words[SEEN_TAIL]) >= needed:
        return True
    words[SEEN_TAIL] = load_acquire(words[OUT_TAIL])
    return table[RING] - (words[HEAD] - words[SEEN_TAIL]) >= needed


@inlined
def put(
    table: Any, words: Any, kind: Any, tag: Any, ident: Any, size: Any, source: Any, nbytes: Any,
    readable_at: Any = 0,
) -> None:  # fmt: skip
    """Put a frame with `nbytes` bytes of data from address `source` into the ring to a peer.

    The ring must have room for the frame. `kind` is the first word of the header: the kind and the
    dtype. `ident` is the number of the message, and `size` the size of the whole message in bytes;
    in a DATA frame, `ident` is 0 and `size` is `nbytes`. `readable_at` is the address of an
    announced message that the peer may read (`r2ccl.shm.message_transfer`), otherwise 0.
    """
    ring, at = table[RING], words[HEAD] & (table[RING] - 1)
    header = words_at(words[OUT_RING] + at)
    header[FRAME_KIND] = kind
    header[FRAME_TAG] = tag
    header[FRAME_IDENT] = ident
    header[FRAME_SIZE] = size
    header[FRAME_DATA] = nbytes
    header[FRAME_ADDRESS] = readable_at
    if nbytes > 0:
        at = (at + FRAME_NBYTES) & (ring - 1)
        first = min(nbytes, ring - at)
        copy_bytes(words[OUT_RING] + at, source, first)
        if nbytes > first:
            copy_bytes(words[OUT_RING], source + first, nbytes - first)
    words[HEAD] += FRAME_NBYTES + ((nbytes + 63) & -64)
    store_release(words[OUT_HEAD], words[HEAD])
    ring_bell(words[PEER_BELL])


@inlined
def has_frame(words: Any) -> Any:
    """Return whether the ring of a peer has a frame."""
    return load_acquire(words[IN_HEAD]) != words[TAIL]


@inlined
def next_frame(table: Any, words: Any) -> Any:
    """Return a pointer to the header of the next frame in the ring of a peer."""
    return words_at(words[IN_RING] + (words[TAIL] & (table[RING] - 1)))


@inlined
def copy_data(table: Any, words: Any, target: Any, nbytes: Any, is_streamed: Any) -> None:
    """Copy the `nbytes` bytes of data of the next frame to address `target`.

    With `is_streamed`, the target is written without storing it in the caches.
    """
    ring = table[RING]
    at = (words[TAIL] + FRAME_NBYTES) & (ring - 1)
    first = min(nbytes, ring - at)
    copy(target, words[IN_RING] + at, first, is_streamed)
    if nbytes > first:
        copy(target + first, words[IN_RING], nbytes - first, is_streamed)


@inlined
def consume(table: Any, words: Any, nbytes: Any) -> None:
    """Take the next frame, which has `nbytes` bytes of data, out of the ring of a peer.

    The new position is published to the peer only after 1/8 of the ring was taken; for most
    messages, this saves the transfer of a cache line. The peer can put any frame nevertheless,
    because a frame takes at most half of the ring.
    """
    words[TAIL] += FRAME_NBYTES + ((nbytes + 63) & -64)
    if words[TAIL] - words[PUBLISHED_TAIL] >= table[RING] >> _LAZY_SHIFT:
        words[PUBLISHED_TAIL] = words[TAIL]
        store_release(words[IN_TAIL] + _TO_TAKEN, words[TAKEN])
        store_release(words[IN_TAIL], words[TAIL])
        ring_bell(words[PEER_BELL])


@inlined
def begin_out(words: Any, source: Any, nbytes: Any) -> None:
    """Begin to send the `nbytes` bytes at address `source`, which `push` puts into the ring."""
    words[OUT_AT] = source
    words[OUT_PIECE] = (min(max(nbytes // _NPIECES, _LEAST_PIECE), _MOST_PIECE) + 63) & -64
    words[OUT_LEFT] = nbytes


@inlined
def push(table: Any, words: Any) -> Any:
    """Put the next piece of the long message that is sent to a peer; return whether it was put.

    Return False if there is no room, or no data left to send.
    """
    nbytes = min(words[OUT_LEFT], words[OUT_PIECE])
    if nbytes <= 0 or not has_room(table, words, nbytes):
        return False
    put(table, words, DATA_FRAME, 0, 0, nbytes, words[OUT_AT], nbytes)
    words[OUT_AT] += nbytes
    words[OUT_LEFT] -= nbytes
    return True


@inlined
def pull(table: Any, words: Any) -> None:
    """Take the next frame of a peer, which is data of a long message, and copy the data."""
    nbytes = next_frame(table, words)[FRAME_DATA]
    copy_data(table, words, words[IN_AT], nbytes, words[IN_STREAMED] != 0)
    consume(table, words, nbytes)
    words[IN_AT] += nbytes
    words[IN_LEFT] -= nbytes


__all__ = [
    "begin_out",
    "consume",
    "copy_data",
    "has_frame",
    "has_room",
    "next_frame",
    "peer_words",
    "pull",
    "push",
    "put",
    "ring_bell",
]
