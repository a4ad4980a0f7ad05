"""Matching of messages with receives, by source and tag.

The order is that of MPI: if a receive matches several messages of one source, the receive takes the
message that was sent first; if several receives match a message, the receive that was posted first
takes it. No I/O. Cost: linear in the number of unmatched messages or receives.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import msgspec

#: Source or tag of a receive that matches every source or tag.
ANY = -1


class Message(msgspec.Struct, frozen=True):
    """Message that a receive has taken, or that `probe` found.

    Attributes
    ----------
    source, tag : int
        Rank of the sender in the communicator, and tag of the message.
    count : int
        Number of elements.
    """

    source: int
    tag: int
    count: int


class Envelope(NamedTuple):
    """Description of a message that has arrived or was announced.

    ``ident`` is the number that the sender gave to the message, ``dtype`` the number of its dtype.
    ``payload`` has the data of a short message, or of one that this rank sends to itself. It is
    None for an announced message, whose data is transferred once a receive has taken the message.
    ``readable_at`` is the address of this data in the sender's process if this rank may read it
    there, otherwise 0.
    """

    source: int
    tag: int
    dtype: int
    nbytes: int
    ident: int
    payload: bytes | memoryview | None
    readable_at: int = 0


class Taker(Protocol):
    """Receive that waits for a message.

    Attributes
    ----------
    source, tag : int
        Source and tag that match; `ANY` matches all.
    """

    source: int
    tag: int


class Matching:
    """Queues of the unmatched messages and receives of one communicator at this rank."""

    def __init__(self) -> None:
        self._envelopes: deque[Envelope] = deque()
        self._takers: deque[Any] = deque()

    def taker_of(self, envelope: Envelope) -> Any:
        """Remove and return the first queued receive that matches a new message, or return None."""
        for taker in self._takers:
            if _fits(taker, envelope):
                self._takers.remove(taker)
                return taker
        return None

    def keep(self, envelope: Envelope) -> None:
        """Queue a message that no receive has taken, with a copy of its data."""
        payload = envelope.payload
        kept = envelope if payload is None else envelope._replace(payload=bytes(payload))
        self._envelopes.append(kept)

    def remove(self, envelope: Envelope) -> None:
        """Remove a queued message that a receive has taken."""
        self._envelopes.remove(envelope)

    def post(self, taker: Taker) -> Envelope | None:
        """Return the first queued message that matches a new receive.

        If no message matches, queue the receive and return None. A returned message stays queued
        until `remove` is called.
        """
        found = self.find(taker)
        if found is None:
            self._takers.append(taker)
        return found

    def find(self, taker: Taker) -> Envelope | None:
        """Return the first queued message that matches a receive; None if no message does."""
        return next((each for each in self._envelopes if _fits(taker, each)), None)

    def cancel(self, taker: Taker) -> bool:
        """Remove a receive from the queue; return False if it is not queued."""
        if taker not in self._takers:
            return False
        self._takers.remove(taker)
        return True

    def forget_takers(self) -> None:
        """Remove all queued receives."""
        self._takers.clear()

    def clear(self) -> None:
        """Remove all queued messages and receives."""
        self._envelopes.clear()
        self._takers.clear()

    @property
    def is_empty(self) -> bool:
        """True if no message and no receive is queued."""
        return not self._envelopes and not self._takers

    @property
    def has_takers(self) -> bool:
        """True if a receive is queued."""
        return bool(self._takers)

    @property
    def kept_nbytes(self) -> int:
        """Size in bytes of the data in the queue, which has no data of announced messages."""
        return sum(len(each.payload or b"") for each in self._envelopes)


def _fits(taker: Taker, envelope: Envelope) -> bool:
    return taker.source in (ANY, envelope.source) and taker.tag in (ANY, envelope.tag)


__all__ = ["ANY", "Envelope", "Matching", "Message", "Taker"]
