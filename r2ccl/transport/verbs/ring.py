"""Flow control of a message ring: one rank writes messages into a ring in the peer's memory.

The writer chooses the offset of every message and sends the offset with the message. The reader
only counts the messages it has consumed. From time to time it returns a *credit*: the count modulo
`COUNT_MODULUS`. Counts are cumulative, so credits may be merged or lost.

Invariant: ring space is reused only after the message in it was consumed.
"""

from __future__ import annotations

from collections import deque

from r2ccl.errors import InternalError


class SendRing:
    """Writer's bookkeeping of the free space in the reader's ring.

    Parameters
    ----------
    nbytes : int
        Size of the ring, a multiple of ``align``.
    nmessages : int
        Maximum number of unconsumed messages; less than half of `COUNT_MODULUS`.
    align : int
        Every message begins at a multiple of this number of bytes.
    """

    def __init__(self, nbytes: int, nmessages: int, align: int) -> None:
        self._nbytes = nbytes
        self._nmessages = nmessages
        self._align = align
        #: Bytes taken and freed since the ring was last empty, including space skipped at its end.
        self._head = 0
        self._tail = 0
        self._consumed = 0
        self._ends: deque[int] = deque()

    def take(self, nbytes: int) -> int | None:
        """Reserve space for a message of `nbytes` bytes; return its offset in the ring.

        Return None if the reader must first consume earlier messages.

        Raises
        ------
        InternalError
            If the message is larger than the ring.
        """
        if nbytes > self._nbytes:
            raise InternalError(
                f"a message of {nbytes} bytes does not fit into a ring of {self._nbytes} bytes"
            )
        if len(self._ends) >= self._nmessages:
            return None
        if not self._ends:  # begin at offset 0: a large message fits only there
            self._head = self._tail = 0
        size = -(-nbytes // self._align) * self._align
        offset = self._head % self._nbytes
        start = self._head
        if offset + size > self._nbytes:
            start, offset = start + self._nbytes - offset, 0
        if start + size - self._tail > self._nbytes:
            return None
        self._head = start + size
        self._ends.append(self._head)
        return offset

    def credit(self, count: int) -> None:
        """Free the space of the first `count` messages, which the reader has consumed.

        `count` includes all messages since the beginning, modulo `COUNT_MODULUS`. Does nothing if a
        higher count arrived before.

        Raises
        ------
        InternalError
            If the reader consumed more messages than were written.
        """
        fresh = (count - self._consumed) % COUNT_MODULUS
        if fresh > COUNT_MODULUS // 2:
            return  # a later count arrived before this one
        if fresh > len(self._ends):
            raise InternalError(
                f"{fresh} messages were consumed, but only {len(self._ends)} were in flight"
            )
        for _ in range(fresh):
            self._tail = self._ends.popleft()
        self._consumed += fresh


#: Credits are counts modulo this number, so that they fit into 22 of the 32 bits of immediate data.
COUNT_MODULUS = 1 << 22
#: Messages begin at multiples of this number of bytes, so 22 bits can address a ring of 256 MiB.
ALIGN = 64

__all__ = ["ALIGN", "COUNT_MODULUS", "SendRing"]
