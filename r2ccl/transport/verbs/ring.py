"""Credits of a ring of messages that one side writes into the other's memory.

The writer chooses every place and says it with the message; the reader only counts what it has
consumed and returns the count, modulo a power of two, as it finds the occasion. So nothing has to
be mirrored, and a lost or merged credit does no harm: counts are cumulative.

Pure: no I/O, no memory. Invariant: a place is given again only after its message was consumed.
"""

from __future__ import annotations

from collections import deque

from r2ccl.errors import InternalError


class SendRing:
    """The writer's view of the reader's ring.

    Parameters
    ----------
    nbytes : int
        Size of the ring, a multiple of ``align``.
    nmessages : int
        Messages that may be unconsumed, less than half of `COUNT_MODULUS`.
    align : int
        Every place begins at a multiple of it.
    """

    def __init__(self, nbytes: int, nmessages: int, align: int) -> None:
        self._nbytes = nbytes
        self._nmessages = nmessages
        self._align = align
        #: Cumulative bytes given out and given back, places skipped at the end included.
        self._head = 0
        self._tail = 0
        self._consumed = 0
        self._ends: deque[int] = deque()

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a place for `nbytes`, or None until credits come.

        Raises
        ------
        InternalError
            The message is larger than the ring.
        """
        if nbytes > self._nbytes:
            raise InternalError(f"message of {nbytes} bytes for a ring of {self._nbytes}")
        if len(self._ends) >= self._nmessages:
            return None
        if not self._ends:  # begin at the front: else a large message would not fit in two halves
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
        """Take the reader's count of consumed messages, modulo `COUNT_MODULUS`.

        Raises
        ------
        InternalError
            More was consumed than was written.
        """
        fresh = (count - self._consumed) % COUNT_MODULUS
        if fresh > COUNT_MODULUS // 2:
            return  # overtaken by a later count
        if fresh > len(self._ends):
            raise InternalError(f"{fresh} messages consumed, {len(self._ends)} were under way")
        for _ in range(fresh):
            self._tail = self._ends.popleft()
        self._consumed += fresh


#: Counts are told modulo this: they share 32 bits of immediate data with other things.
COUNT_MODULUS = 1 << 22
#: Messages begin at multiples of it, so that a ring of 256 MiB can be addressed with 22 bits.
ALIGN = 64

__all__ = ["ALIGN", "COUNT_MODULUS", "SendRing"]
