"""Exchange of messages through rings in memory that the ranks of a host share.

Compiled code moves envelopes, and the data of granted messages, as frames of the rings; it reads
the data of other announced messages from the sender's process. A sender puts the data of several
messages into the ring in the order in which the receiver granted the messages. An envelope for
which a ring has no room waits in a queue.

Only one thread at a time may call the methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from r2ccl.dtypes import dtype_of
from r2ccl.errors import CommunicatorRevoked, InternalError
from r2ccl.runtime.messages.matching import ANY, Envelope, Message
from r2ccl.runtime.messages.protocol import MessageProtocol, ReceiveRequest, SendRequest
from r2ccl.shm import message_layout as layout
from r2ccl.types import EnvelopeKind

if TYPE_CHECKING:
    from r2ccl.shm.rings import DirectCall, Rings

#: Maximum number of events that one call of `advance` handles.
_MOST_EVENTS = 1000


class _Waiting(NamedTuple):
    """Envelope that waits for room in a ring.

    ``announced`` is the data of the message that a REQUEST announces; empty for other envelopes.
    Once the envelope is in the ring, ``request``, if any, is done; if ``ends_reading``, the number
    of the peer's messages that this rank is reading decreases by one.
    """

    kind: int
    dtype: int
    tag: int
    ident: int
    size: int
    payload: memoryview | bytes
    announced: memoryview | bytes
    request: SendRequest | ReceiveRequest | None
    ends_reading: bool


class _Arrival(NamedTuple):
    """Announced message that this rank is receiving.

    ``readable_at`` is the address in the sender's process from which the message is read; 0: the
    message was granted. ``is_timed`` is True if the duration of the transfer is to be recorded for
    `Rings.choose`: the sender has announced an address, and no earlier message of this sender is
    still arriving.
    """

    request: ReceiveRequest
    envelope: Envelope
    readable_at: int
    is_timed: bool


class LocalDriver(MessageProtocol):
    """Exchange of the messages of one communicator whose ranks share memory.

    Parameters
    ----------
    rings : Rings
        Rings of this rank; no other driver uses them.
    rank : int
        This rank in the communicator.
    members : sequence of int
        ``members[i]`` is the rank in the job of rank i of the communicator.
    eager_nbytes : int
        Maximum size in bytes of a short message, which must also fit (`Rings.fits`).
    """

    def __init__(
        self, rings: Rings, *, rank: int, members: Sequence[int], eager_nbytes: int
    ) -> None:
        super().__init__(rank, members)
        self.rings = rings
        self._eager_nbytes = eager_nbytes
        self._queues: dict[int, deque[_Waiting]] = {}
        #: Messages whose data has not all moved, by peer; granted ones in the order of the grants.
        self._outgoing: dict[int, deque[SendRequest]] = {}
        self._incoming: dict[int, deque[_Arrival]] = {}
        self._nmoving = 0
        self._nqueued = 0
        #: True after `forget` and `disown`: the rings may not be used any more.
        self._has_forgotten = False

    @property
    def nmoving(self) -> int:
        """Number of messages that receives have taken and whose data is arriving or leaving."""
        return 0 if self._has_forgotten else self._nmoving + self.rings.nreading

    @property
    def has_work(self) -> bool:
        """True if this rank moves data of announced messages, or its envelopes wait for room."""
        return bool(self._nmoving or self._nqueued)

    @property
    def is_quiet(self) -> bool:
        """True if at this rank no send or receive is unfinished, and no message is unreceived."""
        return not (self.has_work or self._announced) and self.matching.is_empty

    def withdraw(self) -> None:
        """Withdraw all receives that have taken no message, and handle frames that have arrived."""
        super().withdraw()
        self.advance(False)

    def release_announced(self) -> None:
        """Do nothing: `forget` follows."""

    def has_ring(self, peer: int) -> bool:
        """Return whether there is a ring to `peer`; False for this rank and for `ANY`."""
        return peer not in (ANY, self._rank)

    def is_short(self, nbytes: int) -> bool:
        """Return whether a message of `nbytes` is short: small enough to travel in its envelope."""
        return nbytes <= self._eager_nbytes and self.rings.fits(nbytes)

    def forget(self, *, is_closing: bool) -> None:
        """Drop all messages: the communicator is closed (`is_closing`), or has failed.

        Afterwards, this rank neither reads nor writes the memory of a message, `advance` does
        nothing, and no peer completes a receive that reads a message in this process. If
        `is_closing`, such a receive ends with an error at the peer.
        """
        self._has_forgotten = True
        self.rings.forget(is_closing=is_closing)
        for each in (self._queues, self._outgoing, self._incoming, self._announced):
            each.clear()
        self.matching.clear()
        self._nmoving = self._nqueued = 0

    def disown(self) -> None:
        """Stop using the rings, in a forked process, whose parent still uses them."""
        self._has_forgotten = True

    # Progress

    def advance(self, is_waiting: bool, is_done: Callable[[], bool] | None = None) -> bool:
        """Move data, and handle envelopes; return whether anything moved.

        This method may return while more data can move. If `is_waiting` and nothing can move, it
        first waits, up to some milliseconds, for a frame or for room in a ring. It returns as soon
        as ``is_done()`` and `is_quiet` are true after an event, so that later frames stay in the
        rings for direct calls.
        """
        has_moved = False
        for _ in range(_MOST_EVENTS):
            if self._has_forgotten:  # also by a signal handler
                break
            event = self.rings.pump(is_waiting and not has_moved)
            if event == layout.IDLE:
                break
            has_moved = True
            if event == layout.MOVED:
                break
            self._on_event(event, self.rings.peer)
            if is_done is not None and self.is_quiet and is_done():
                break
        return has_moved

    def _on_event(self, event: int, peer: int) -> None:
        if event == layout.FRAME:
            kind, dtype, tag, ident, size, data, readable_at = self.rings.frame()
            if kind == EnvelopeKind.DATA:
                raise InternalError(f"rank {self._members[peer]} sends data that was not granted")
            # The data is in the ring, so the frame is taken out only afterwards.
            self._on_envelope(peer, kind, dtype, tag, ident, size, data, readable_at)
            self.rings.consume(peer, len(data))
        elif event == layout.ROOM:
            self._flush(peer)
        elif event == layout.SENT_ALL:
            self._outgoing[peer].popleft().is_done = True
            self._nmoving -= 1
            self._send_next(peer)
        else:
            request, envelope, readable_at, _ = self._incoming[peer].popleft()
            self._receive_next(peer)
            if event == layout.RECEIVED_ALL and readable_at:
                self._tell(request, envelope)
                return
            self._nmoving -= 1
            if event == layout.ABANDONED:
                self._abandon(request, envelope, is_reading=readable_at != 0)
            elif event == layout.UNREADABLE:
                # The data of messages granted meanwhile comes first, so this one goes to the end.
                self._grant(request, envelope, ends_reading=True)
            else:
                request.is_done = True

    def _abandon(self, request: ReceiveRequest, envelope: Envelope, *, is_reading: bool) -> None:
        """End a receive whose sender has closed the communicator."""
        if is_reading:
            self.rings.count_read(envelope.source, -1)
        own, source = self._members[self._rank], self._members[envelope.source]
        request.error = CommunicatorRevoked(
            f"rank {own}: rank {source} closed the communicator before its message with tag "
            f"{envelope.tag} was received: wait for all sends before close()"
        )
        request.is_done = True

    def _send_next(self, peer: int) -> None:
        if self._outgoing[peer]:
            self.rings.send_data(peer, self._outgoing[peer][0].view)

    def _receive_next(self, peer: int) -> None:
        if self._incoming[peer]:
            request, _, readable_at, is_timed = self._incoming[peer][0]
            view = request.view[: request.nbytes]
            self.rings.receive_data(peer, view, readable_at, is_timed=is_timed)

    # Transfer

    def _new_send(self, peer: int, view: memoryview) -> SendRequest:
        return SendRequest(peer, view, self.rings.new_ident())

    def _new_receive(self, view: memoryview, dtype: int, source: int, tag: int) -> ReceiveRequest:
        return ReceiveRequest(view, dtype, source, tag)

    def _admits(self, to: int, nbytes: int) -> bool:
        return self.is_short(nbytes) and self.rings.admits(to, nbytes)

    def _put(
        self, to: int, kind: int, dtype: int, tag: int, ident: int, nbytes: int,
        payload: memoryview | bytes = b"", request: SendRequest | ReceiveRequest | None = None,
        announced: memoryview | bytes = b"", *, ends_reading: bool = False,
    ) -> None:  # fmt: skip
        queue = self._queues.setdefault(to, deque())
        given = kind, dtype, tag, ident, nbytes, payload, announced, request, ends_reading
        queue.append(_Waiting(*given))
        self._nqueued += 1
        if len(queue) == 1:
            self._flush(to)

    def _flush(self, peer: int) -> None:
        """Put waiting envelopes into the ring until it has no room."""
        queue = self._queues[peer]
        while queue and self.rings.put(peer, *queue[0][:-2]):
            sent = queue.popleft()
            self._nqueued -= 1
            if sent.ends_reading:
                self.rings.count_read(peer, -1)
            if sent.kind == EnvelopeKind.READ:
                self._nmoving -= 1
            if sent.request is not None:
                sent.request.is_done = True

    def _announce(self, request: SendRequest, to: int, dtype: int, tag: int) -> None:
        given = to, EnvelopeKind.REQUEST, dtype, tag, request.ident, len(request.view)
        self._put(*given, announced=request.view)

    def _tell(self, request: ReceiveRequest, envelope: Envelope) -> None:
        """Send a READ envelope, which tells the sender of a message that the message was read.

        The message counts as moving until the envelope is in the ring.
        """
        given = envelope.source, EnvelopeKind.READ, 0, 0, envelope.ident, envelope.nbytes
        self._put(*given, request=request, ends_reading=True)

    def _begin_receive(self, request: ReceiveRequest, envelope: Envelope) -> None:
        source, is_timed = envelope.source, bool(envelope.readable_at)
        readable_at = self.rings.choose(source, envelope.readable_at, envelope.nbytes)
        if readable_at:
            self.rings.count_read(source, 1)
            self._receive(_Arrival(request, envelope, readable_at, is_timed))
        else:
            self._grant(request, envelope, is_timed=is_timed)

    def _grant(
        self, request: ReceiveRequest, envelope: Envelope, *,
        is_timed: bool = False, ends_reading: bool = False,
    ) -> None:  # fmt: skip
        nbytes = envelope.nbytes
        # A synchronous message without data is received as soon as its grant is sent.
        completed = None if nbytes else request
        given = envelope.source, EnvelopeKind.GRANT, 0, 0, envelope.ident, nbytes
        self._put(*given, request=completed, ends_reading=ends_reading)
        if nbytes:
            self._receive(_Arrival(request, envelope, 0, is_timed))

    def _receive(self, arrival: _Arrival) -> None:
        """Receive the data of a message after the messages still arriving from its sender."""
        source = arrival.envelope.source
        if self._incoming.get(source):
            self._moves_in(source, arrival._replace(is_timed=False))
        else:
            self._moves_in(source, arrival)
            self._receive_next(source)

    def _granted(self, request: SendRequest, to: int, data: memoryview | bytes) -> None:
        if not request.view:
            request.is_done = True
            return
        self._moves_out(request, to)
        if len(self._outgoing[to]) == 1:
            self._send_next(to)

    def _moves_in(self, source: int, arrival: _Arrival) -> None:
        self._incoming.setdefault(source, deque()).append(arrival)
        self._nmoving += 1

    def _moves_out(self, request: SendRequest, to: int) -> None:
        self._outgoing.setdefault(to, deque()).append(request)
        self._nmoving += 1

    def _note_taken(self, source: int, nbytes: int) -> None:
        self.rings.took(source, nbytes)

    def _note_busy(self, peer: int, change: int) -> None:
        """Do nothing: messages in shared memory need no paths."""

    # Direct calls that compiled code has not finished

    def take_over_send(self, call: DirectCall, view: memoryview, dtype: int) -> SendRequest:
        """Return a request that continues the send of `view` where `call` has stopped."""
        words = call.words
        to, step = int(words[layout.CALL_TO]), int(words[layout.SEND_STEP])
        if step == layout.TO_PUT:
            return self.send(view, dtype, to, int(words[layout.CALL_TAG]))
        request = SendRequest(self._members[to], view, int(words[layout.CALL_IDENT]))
        if step == layout.AWAITS:
            self._announced[request.ident] = request
        elif step == layout.MOVES:
            self._moves_out(request, to)
        else:
            request.is_done = True
        return request

    def take_over_receive(self, call: DirectCall, view: memoryview, dtype: int) -> ReceiveRequest:
        """Return a request that continues the receive into `view` where `call` has stopped."""
        words = call.words
        source, step = int(words[layout.CALL_SOURCE]), int(words[layout.RECV_STEP])
        tag = int(words[layout.CALL_RECV_TAG])
        if step == layout.AWAITS:
            return self.receive(view, dtype, source, tag)
        request = ReceiveRequest(view, dtype, source, tag)
        nbytes, ident = int(words[layout.FOUND_NBYTES]), int(words[layout.FOUND_IDENT])
        request.result, request.nbytes = message_of(call, dtype), nbytes
        envelope = Envelope(source, tag, dtype, nbytes, ident, None)
        if step == layout.TO_PUT:
            self._grant(request, envelope, ends_reading=self.rings.is_reading(source))
        elif step == layout.TO_TELL:
            self._nmoving += 1
            self._tell(request, envelope)
        elif step in (layout.MOVES, layout.READS):
            # The rings have the address and the time; here, 1 stands for any address.
            readable_at = int(step == layout.READS)
            self._moves_in(source, _Arrival(request, envelope, readable_at, False))
        else:
            request.is_done = True
        return request


def message_of(call: DirectCall, dtype: int) -> Message:
    """Return the message that a direct call received; `dtype` is the number of its dtype."""
    words = call.words
    count = int(words[layout.FOUND_NBYTES]) // dtype_of(dtype).itemsize
    return Message(int(words[layout.CALL_SOURCE]), int(words[layout.FOUND_TAG]), count)


__all__ = ["LocalDriver", "message_of"]
