"""Calls of one communicator as its links see them: their numbers, signatures and consumers.

The communicators of a job share the paths but not the links: each communicator has a *context id*,
as in MPI, and the channel number of each of its links (*link channel*) has this id in its upper
bits. Calls are numbered per communicator, in the order in which all its ranks make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

_C = TypeVar("_C")


class Calls(Generic[_C]):
    """Calls of one communicator at this rank: their numbers, signatures and consumers.

    The messages of the communicator (send and recv) have a `Calls` of their own, in which ``op``
    and ``signature`` stay 0.

    Parameters
    ----------
    context_id : int
        Number of the communicator, unique among the communicators that its ranks have open; 0 for
        the job's first communicator. For messages, see `message_context`.

    Attributes
    ----------
    op : int
        Number of the current call, or of the last one.
    signature : int
        Packed signature of call ``op``.
    signatures : dict of int to int
        Packed signatures of the last `HISTORY` calls, by number of the call. Calls that did not use
        the links are left out.
    pairs : mapping of (int, bool) to int, or None
        Packed signatures if they differ between pairs of ranks: key (peer, False) for the slices
        from a peer, (peer, True) for the slices to a peer. None: all slices have ``signature``.
    ahead : dict
        Signatures that peers sent for calls that this rank has not started, by number of the call.
        Each value is a dict used as an ordered set. Its keys are (signature, peer, is_sent);
        ``is_sent`` is True if the signature belongs to the slices that this rank sends to the peer.
    seen : dict of int to int
        Per peer, number of the last call for which a frame has arrived from that peer.
    consumers : mapping
        `Consumer` of each link channel of the current call.
    busy : dict of int to int
        Per peer, number of messages that need the paths to that peer though no slice is in flight.
    on_unposted : callable or None
        ``on_unposted(link)``: called if the next slice of ``link`` has arrived but has no posted
        receive; posts the receive. None: the slice waits until its receive is posted.
    """

    __slots__ = (
        "ahead", "busy", "consumers", "context_id", "on_unposted", "op", "pairs", "seen",
        "signature", "signatures",
    )  # fmt: skip

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self.op = 0
        self.signature = 0
        self.signatures: dict[int, int] = {}
        self.pairs: Mapping[tuple[int, bool], int] | None = None
        self.ahead: dict[int, dict[tuple[int, int, bool], None]] = {}
        self.seen: dict[int, int] = {}
        self.consumers: Mapping[int, _C] = {}
        self.busy: dict[int, int] = {}
        self.on_unposted: Callable[[Any], None] | None = None

    def finish(self) -> None:
        """End the current call, which is complete or has failed."""
        self.consumers = {}

    def pass_over(self, ncalls: int) -> None:
        """Count `ncalls` further calls, which did not use the links."""
        self.op += ncalls
        # `Links.begin` removes only the oldest signature, and there are gaps now.
        self._drop_old_signatures()

    def repeat_to(self, op: int, signature_of: Callable[[int], int]) -> None:
        """Count the calls up to number `op`, which compiled code has made without this object.

        ``signature_of(number)`` returns the packed signature of call `number`.
        """
        for number in range(max(self.op, op - HISTORY) + 1, op + 1):
            self.signatures[number] = self.signature = signature_of(number)
        self.op = op
        self._drop_old_signatures()

    def _drop_old_signatures(self) -> None:
        while self.signatures and next(iter(self.signatures)) <= self.op - HISTORY:
            del self.signatures[next(iter(self.signatures))]

    def skip_to(self, op: int) -> None:
        """Set the number of the next call to `op` + 1, for a new communicator with this context id.

        `op` must be at least the number of every call that the context id had before. The
        signatures of those calls are forgotten. Entries of ``ahead`` and ``seen`` for calls above
        `op` are kept: a peer may use the new communicator before this rank has made it.
        """
        assert op >= self.op
        self.op = op
        self.signatures.clear()  # of another communicator
        self.ahead = {number: seen for number, seen in self.ahead.items() if number > op}
        self.seen = {peer: number for peer, number in self.seen.items() if number > op}


def context_of(channel: int) -> int:
    """Return the context id in the upper bits of a link channel."""
    return channel >> CONTEXT_SHIFT


def message_context(context_id: int) -> int:
    """Return the context id of the messages (send and recv) of communicator `context_id`."""
    return context_id | _MESSAGES


def is_of_messages(context_id: int) -> bool:
    """Return whether `context_id` is one that `message_context` returns."""
    return bool(context_id & _MESSAGES)


def first_channel(context_id: int) -> int:
    """Return the lowest link channel of a communicator."""
    return context_id << CONTEXT_SHIFT


def local_channel(channel: int) -> int:
    """Return the channel number within the communicator: the lower bits of a link channel."""
    return channel & ((1 << CONTEXT_SHIFT) - 1)


#: Number of lower bits of a link channel, which have the channel within the communicator. The upper
#: bits have the context id; a link channel has 32 bits on the wire.
CONTEXT_SHIFT = 16
#: Number of calls whose signatures are kept to compare them with those of slower ranks.
HISTORY = 64
#: Bit of the context ids of messages between two ranks.
_MESSAGES = 1 << 15

__all__ = [
    "CONTEXT_SHIFT",
    "HISTORY",
    "Calls",
    "context_of",
    "first_channel",
    "is_of_messages",
    "local_channel",
    "message_context",
]
