"""Exchange of messages over links or in shared memory: envelopes, matching, refusals.

Each message has an envelope: a frame with its tag, dtype and size. A short message travels in its
envelope; the peer buffers it until a receive takes it. A long message is announced first::

    sender                                   receiver
    REQUEST(ident, tag, dtype, nbytes)  ->   finds the receive that takes it
                                        <-   GRANT(ident)
    data                                ->   the receive is complete

In shared memory, a REQUEST may contain the address of the data. The receiver may then read the data
from the sender's process instead of granting the message. When it has read all data, it answers
READ(ident); if it cannot read the data, it grants the message.

A peer buffers at most `MOST_UNTAKEN` bytes (over links `MOST_UNTAKEN_ON_LINKS`) of short messages
from this rank that no receive has taken. A short message that would exceed this limit is announced
like a long one. A synchronous message is always announced: the GRANT or READ tells its sender that
a receive has taken the message.

If a message does not fit the receive that matches it, the receive ends with an error. The receiver
answers an announced message with REFUSE and the reason, which its sender then raises as an error. A
message that was not announced stays at the receiver for another receive.

Invariant: the memory of a message is neither read nor written once its request is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from r2ccl.dtypes import dtype_name, dtype_of
from r2ccl.errors import InvalidArgument, R2cclError
from r2ccl.runtime.messages.matching import Envelope, Matching, Message
from r2ccl.types import EnvelopeKind


class SendRequest:
    """Message that is being sent to `peer`, a rank of the job.

    ``view`` is the data of the message, ``ident`` the number of the message at this rank, and
    ``error`` the error to raise if the peer refused the message, otherwise None.
    """

    def __init__(self, peer: int, view: memoryview, ident: int) -> None:
        self.error: R2cclError | None = None
        self.is_done = False
        self.view = view
        self.ident = ident
        self.peer = peer

    @property
    def result(self) -> None:
        """None, because a send has no result."""
        return


class ReceiveRequest:
    """Receive of a message from rank `source` with `tag`; both may be `ANY`.

    ``view`` is the memory into which the message is received, and ``dtype`` the number of the dtype
    that the message must have. ``error`` is the error with which the receive has ended, or None:
    a message did not fit or, in shared memory, its sender closed the communicator first.
    """

    def __init__(self, view: memoryview, dtype: int, source: int, tag: int) -> None:
        self.error: R2cclError | None = None
        self.is_done = False
        self.view = view
        self.dtype = dtype
        self.source = source
        self.tag = tag
        #: Message that the receive has taken, and the size of this message in bytes; None and 0
        #: before.
        self.result: Message | None = None
        self.nbytes = 0


class MessageProtocol(ABC):
    """Exchange of the messages of one communicator; subclasses implement the transfer.

    Ranks are numbered as in the communicator, unless stated otherwise.

    Parameters
    ----------
    rank : int
        This rank.
    members : sequence of int
        ``members[i]`` is the rank in the job of rank i of the communicator.
    """

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self._rank = rank
        self._members = members
        self.matching = Matching()
        #: Messages that this rank has announced, by number, until the peer answers.
        self._announced: dict[int, SendRequest] = {}

    # Requests

    def send(
        self, view: memoryview, dtype: int, to: int, tag: int, *, is_synchronous: bool = False
    ) -> SendRequest:
        """Begin to send `view` to rank `to`; `view` is borrowed until the request is done.

        `dtype` is the number of the dtype. `to` may be this rank. If `is_synchronous`, the request
        is done only after a receive has taken the message, or the peer has refused it.
        """
        request = self._new_send(self._members[to], view)
        if to == self._rank:
            request.is_done = not is_synchronous
            if is_synchronous:
                self._announced[request.ident] = request
            self._arrived(Envelope(to, tag, dtype, len(view), request.ident, view))
        elif not is_synchronous and self._admits(to, len(view)):
            self._put(to, EnvelopeKind.MESSAGE, dtype, tag, request.ident, len(view), view, request)
        else:
            self._note_busy(to, 1)
            self._announced[request.ident] = request
            self._announce(request, to, dtype, tag)
        return request

    def receive(self, view: memoryview, dtype: int, source: int, tag: int) -> ReceiveRequest:
        """Begin to receive a message into `view`, which is borrowed until the request is done.

        `dtype` is the number of the dtype; `source` and `tag` may be `ANY`.
        """
        request = self._new_receive(view, dtype, source, tag)
        envelope = self.matching.post(request)
        if envelope is not None and self._take(request, envelope):
            self.matching.remove(envelope)
        return request

    def cancel(self, request: ReceiveRequest) -> bool:
        """Withdraw a receive that has taken no message; its request is then done.

        Return False, and do nothing, if the receive has taken a message or has ended.
        """
        is_withdrawn = self.matching.cancel(request)
        request.is_done |= is_withdrawn
        return is_withdrawn

    def withdraw(self) -> None:
        """Withdraw all receives that have taken no message; their requests do not become done."""
        self.matching.forget_takers()

    @abstractmethod
    def release_announced(self) -> None:
        """Stop using the arrays of announced messages; the communicator is being closed.

        A receive that takes such a message later gets a copy or, in shared memory, an error.
        """

    def probe(self, source: int, tag: int) -> Message | None:
        """Return the message that a receive with `source` and `tag` would take now, or None."""
        found = self.matching.find(ReceiveRequest(memoryview(b""), 0, source, tag))
        return None if found is None else _described(found)

    @property
    @abstractmethod
    def nmoving(self) -> int:
        """Number of messages that receives have taken and whose data is arriving or leaving."""

    # Envelopes

    def _on_envelope(
        self, source: int, kind: int, dtype: int, tag: int, ident: int, nbytes: int,
        data: memoryview | bytes, readable_at: int = 0,
    ) -> None:  # fmt: skip
        """Handle an envelope of rank `source`: a MESSAGE, REQUEST, GRANT, READ or REFUSE.

        `data`, the payload of the envelope, is borrowed until this method returns. For
        `readable_at`, see `Envelope`.
        """
        if kind == EnvelopeKind.MESSAGE:
            self._arrived(Envelope(source, tag, dtype, nbytes, ident, data))
        elif kind == EnvelopeKind.REQUEST:
            self._note_busy(source, 1)
            self._arrived(Envelope(source, tag, dtype, nbytes, ident, None, readable_at))
        elif kind == EnvelopeKind.GRANT:
            self._granted(self._announced.pop(ident), source, data)
        elif kind == EnvelopeKind.READ:
            self._note_busy(source, -1)
            self._announced.pop(ident).is_done = True
        else:
            request = self._announced.pop(ident)
            self._note_busy(source, -1)
            request.error = InvalidArgument(bytes(data).decode())
            request.is_done = True

    def _announce(self, request: SendRequest, to: int, dtype: int, tag: int) -> None:
        nbytes = len(request.view)
        self._put(to, EnvelopeKind.REQUEST, dtype, tag, request.ident, nbytes)

    def _arrived(self, envelope: Envelope) -> None:
        while (request := self.matching.taker_of(envelope)) is not None:
            if self._take(request, envelope):
                return
        self.matching.keep(envelope)

    def _take(self, request: ReceiveRequest, envelope: Envelope) -> bool:
        """Give the message to `request`, or end `request` with an error if it does not fit.

        Return False if another receive may still take the message.
        """
        source, _, dtype, nbytes, ident, payload, _ = envelope
        if dtype != request.dtype or nbytes > len(request.view):
            self._refuse(request, envelope)
            return payload is None
        request.result, request.nbytes = _described(envelope), nbytes
        if payload is None:
            self._begin_receive(request, envelope)
            return True
        request.view[:nbytes] = payload
        request.is_done = True
        if source != self._rank:
            self._note_taken(source, nbytes)
        elif ident in self._announced:
            self._announced.pop(ident).is_done = True
        return True

    def _refuse(self, request: ReceiveRequest, envelope: Envelope) -> None:
        """End a receive that the message does not fit; if the message was announced, refuse it."""
        given = f"{len(request.view) // dtype_of(request.dtype).itemsize}"
        source, own = self._members[envelope.source], self._members[self._rank]
        request.error = InvalidArgument(
            f"rank {source} sent {_described(envelope).count} elements of "
            f"{dtype_name(envelope.dtype)} with tag {envelope.tag}, but rank {own} receives "
            f"up to {given} of {dtype_name(request.dtype)}: pass arrays of the same dtype, and a "
            "large enough one to recv(); probe() tells the number of elements"
        )
        if envelope.payload is not None:
            request.is_done = True
            return
        text = str(request.error).encode()
        self._note_busy(envelope.source, -1)
        self._put(envelope.source, EnvelopeKind.REFUSE, 0, 0, envelope.ident, 0, text, request)

    # Transfer

    @abstractmethod
    def _new_send(self, peer: int, view: memoryview) -> SendRequest:
        """Return a request to send `view`, with a new number; `peer` is a rank of the job."""

    @abstractmethod
    def _new_receive(self, view: memoryview, dtype: int, source: int, tag: int) -> ReceiveRequest:
        """Return a request to receive into `view`."""

    @abstractmethod
    def _admits(self, to: int, nbytes: int) -> bool:
        """Return whether a message of `nbytes` may now travel in its envelope.

        If so, count the bytes as sent to rank `to`.
        """

    @abstractmethod
    def _put(
        self, to: int, kind: int, dtype: int, tag: int, ident: int, nbytes: int,
        payload: memoryview | bytes = b"", request: SendRequest | ReceiveRequest | None = None,
    ) -> None:  # fmt: skip
        """Send an envelope as soon as there is room for it; then `request`, if given, is done.

        Pass as `request` a receive that ends with this answer to the sender. If the receive were
        done earlier, the communicator could be closed, which drops envelopes that wait for room.
        """

    @abstractmethod
    def _begin_receive(self, request: ReceiveRequest, envelope: Envelope) -> None:
        """Begin to receive an announced message, which `request` has taken.

        Grant it or, in shared memory, begin to read it.
        """

    @abstractmethod
    def _granted(self, request: SendRequest, to: int, data: memoryview | bytes) -> None:
        """Begin to send the data of a message that rank `to` has granted."""

    @abstractmethod
    def _note_taken(self, source: int, nbytes: int) -> None:
        """Count the `nbytes` of a short message from rank `source` that a receive has taken."""

    @abstractmethod
    def _note_busy(self, peer: int, change: int) -> None:
        """Add `change` to the number of unfinished announced messages to and from rank `peer`."""


def _described(envelope: Envelope) -> Message:
    count = envelope.nbytes // dtype_of(envelope.dtype).itemsize
    return Message(envelope.source, envelope.tag, count)


__all__ = ["MessageProtocol", "ReceiveRequest", "SendRequest"]
