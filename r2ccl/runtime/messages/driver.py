"""Exchange of messages over the links: envelopes, landing places, data.

Each pair of ranks has one channel for *envelopes* and one per home rail for data; these channels
have a context id of their own. Envelopes are eager slices. A short message is in its envelope; it
is buffered at the receiver if no receive takes it. A long one is announced first::

    sender                                   receiver
    REQUEST(ident, tag, dtype, nbytes)  ->   finds the receive that takes it
                                        <-   GRANT(ident, bytes per channel), landing places
    slices on the data channels         ->   the receive is complete

Grants and landing places are posted in the same order, and a link keeps the order of its slices, so
both ends cut the data of several messages alike. If the short messages to a receiver that no
receive has taken exceed a limit in bytes, further short messages are announced too. This bounds the
memory of the receiver. A synchronous message is always announced: the grant tells its sender that a
receive has taken it.

All methods are called by the owner of the data loop. Invariant: the memory of a message is neither
read nor written once its request is done.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from r2ccl.dtypes import dtype_name, dtype_of
from r2ccl.errors import InternalError, InvalidArgument, R2cclError
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.calls import Calls, first_channel
from r2ccl.failover.migration.link import Landing, RecvLink, SendLink
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.runtime.messages.matching import Envelope, Matching, Message

#: kind, dtype, first call of the communicator (lower bits), tag, ident, nbytes
_HEADER = struct.Struct("<BBxxIqQQ")
_FIRST_OP_MASK = (1 << 32) - 1
_MESSAGE, _REQUEST, _GRANT, _REFUSE, _TAKEN = 1, 2, 3, 4, 5
_LENGTH = struct.Struct("<Q")
#: Most bytes of short messages to one peer that no receive has taken, and the number of bytes
#: taken after which the receiver reports them.
_MOST_UNTAKEN, _REPORT_EVERY = 1 << 20, 1 << 18
#: Data of a message is cut between channels at multiples of this.
_ALIGN = 64


class SendRequest:
    """Message that is being sent; a `Consumer` of its slices."""

    is_bandwidth_sample = False

    def __init__(self, driver: MessageDriver, peer: int, view: memoryview, ident: int) -> None:
        self.error: R2cclError | None = None
        self.is_done = False
        self.view = view
        self.ident = ident
        #: Peer in the job.
        self.peer = peer
        #: Slices that are not released yet; known once the receiver granted the message.
        self.nleft = 0
        self._driver = driver

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Raise InternalError: data channels of this direction carry no slices."""
        raise InternalError(f"rank {self.peer} answered message {self.ident} with a slice")

    def on_released(self, index: int) -> None:
        """Count one more slice that is released."""
        self.nleft -= 1
        self.is_done = self.nleft == 0
        if self.is_done:
            self._driver.note_busy(self.peer, -1)

    def on_retired(self, index: int) -> None:
        """Do nothing."""

    def advance(self) -> None:
        """Post the envelopes and slices for which there is room."""
        self._driver.advance()

    @property
    def result(self) -> None:
        """None, because a send has no result."""
        return


class ReceiveRequest:
    """Receive that waits for a message, or whose data is arriving; a `Consumer` of its slices."""

    is_bandwidth_sample = False

    def __init__(
        self, driver: MessageDriver, view: memoryview, dtype: int, source: int, tag: int
    ) -> None:
        self.error: R2cclError | None = None
        self.is_done = False
        self.view = view
        self.dtype = dtype
        self.source = source
        self.tag = tag
        #: The message taken; None until then.
        self.result: Message | None = None
        #: Slices that have not arrived yet.
        self.nleft = 0
        self._driver = driver

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Count one more slice, which is in its place."""
        self.nleft -= 1
        self.is_done = self.nleft == 0
        self._driver.on_data(self, landing)

    def on_released(self, index: int) -> None:
        """Do nothing."""

    def on_retired(self, index: int) -> None:
        """Do nothing."""

    def advance(self) -> None:
        """Post the envelopes and slices for which there is room."""
        self._driver.advance()


class MessageDriver:
    """Messages of one communicator at this rank; a `Consumer` of envelopes.

    Parameters
    ----------
    links : Links
    calls : Calls
        Calls with the context id of the messages.
    rank : int
        This rank in the communicator.
    members : sequence of int
        Rank in the job, by rank in the communicator.
    first_op : int
        Number of the communicator's first call; tells apart communicators that used the same id.
    nhomes : int
        Number of home rails.
    nwires : int
        Number of rails whose bandwidths add up.
    eager_nbytes, slice_nbytes, depth : int
        Largest envelope, largest slice, and most landing places announced ahead per link.
    health : callable
        Returns the newest known health.
    """

    is_bandwidth_sample = False

    def __init__(
        self,
        links: Links,
        calls: Calls[Consumer],
        *,
        rank: int,
        members: Sequence[int],
        first_op: int,
        nhomes: int,
        nwires: int,
        eager_nbytes: int,
        slice_nbytes: int,
        depth: int,
        health: Callable[[], Health],
    ) -> None:
        self._links = links
        self._rank = rank
        self._members = members
        self._first_op = first_op & _FIRST_OP_MASK
        self._rank_of = {peer: at for at, peer in enumerate(members)}
        self._nchannels = nhomes if nwires > 1 else 1
        self._eager_nbytes = eager_nbytes
        self._slice_nbytes = slice_nbytes
        self._depth = depth
        self._health = health
        self._matching = Matching()
        self._envelope_channel = first_channel(calls.context_id)
        # Channel c uses home rail c modulo the number of home rails.
        self._data_channel = self._envelope_channel + nhomes
        self._next_ident = 0
        #: Number of receives whose data is arriving.
        self.nreceiving = 0
        #: Envelopes that wait for a free slot, by peer in the job.
        self._envelopes: dict[int, deque[tuple[memoryview, SendRequest | None]]] = {}
        #: Announced messages by number, until they are granted.
        self._announced: dict[int, SendRequest] = {}
        #: Slices to post, in the order of the grants, by link.
        self._outgoing: dict[SendLink, deque[tuple[SendRequest, memoryview]]] = {}
        #: Landing places to name, in the order of the grants, by link, and how many are named.
        self._incoming: dict[RecvLink, deque[tuple[ReceiveRequest, memoryview]]] = {}
        self._named: dict[RecvLink, int] = {}
        #: Bytes of short messages sent to, and taken by, each peer; taken from it, and reported.
        self._sent: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._took: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        channels = (self._envelope_channel, *range(self._data_channel, self._data_channel + nhomes))
        self._calls = calls
        calls.consumers = dict.fromkeys(channels, self)
        calls.on_unposted = self._post_envelope
        for peer in members:
            link = links.receivers.get((peer, self._envelope_channel))
            if link is not None:
                links.deliver(link)  # what arrived before this driver was made

    def close(self) -> None:
        """Stop handling messages."""
        self._calls.consumers = {}
        self._calls.busy.clear()
        self._calls.on_unposted = None

    # Requests

    def send(
        self, view: memoryview, dtype: int, to: int, tag: int, *, is_synchronous: bool = False
    ) -> SendRequest:
        """Begin to send the bytes `view` to rank `to`; borrows them until the request is done.

        With `is_synchronous`, the request is not done before a receive has taken the message.
        """
        self._next_ident += 1
        self._links.ncalls += 1
        peer = self._members[to]
        request = SendRequest(self, peer, view, self._next_ident)
        if to == self._rank:
            request.is_done = not is_synchronous
            if is_synchronous:
                self._announced[request.ident] = request
            self._arrived(Envelope(to, tag, dtype, len(view), request.ident, view))
            return request
        untaken = self._sent.get(peer, 0) - self._taken.get(peer, 0)
        is_short = _HEADER.size + len(view) <= self._eager_nbytes
        is_bounded = not view or (is_short and untaken + len(view) <= _MOST_UNTAKEN)
        if is_bounded and not is_synchronous:
            self._sent[peer] = self._sent.get(peer, 0) + len(view)
            self._put(peer, _MESSAGE, dtype, tag, request.ident, len(view), view, request)
        else:
            self.note_busy(peer, 1)
            self._announced[request.ident] = request
            self._put(peer, _REQUEST, dtype, tag, request.ident, len(view))
        return request

    def receive(self, view: memoryview, dtype: int, source: int, tag: int) -> ReceiveRequest:
        """Begin to receive a message into `view`, borrowed until the request is done."""
        request = ReceiveRequest(self, view, dtype, source, tag)
        envelope = self._matching.post(request)
        if envelope is not None and self._take(request, envelope):
            self._matching.remove(envelope)
        return request

    def cancel(self, request: ReceiveRequest) -> bool:
        """Withdraw a receive, which is then done; return False if it has taken a message."""
        is_withdrawn = self._matching.cancel(request)
        request.is_done |= is_withdrawn
        return is_withdrawn

    def withdraw(self) -> None:
        """Withdraw all receives that have taken no message."""
        self._matching.forget_takers()

    def probe(self, source: int, tag: int) -> Message | None:
        """Return the first message that a receive with `source` and `tag` would take, or None."""
        found = self._matching.find(ReceiveRequest(self, memoryview(b""), 0, source, tag))
        return None if found is None else _described(found)

    # Envelopes

    def _put(
        self, peer: int, kind: int, dtype: int, tag: int, ident: int, nbytes: int,
        payload: memoryview | bytes = b"", request: SendRequest | None = None,
    ) -> None:  # fmt: skip
        header = _HEADER.pack(kind, dtype, self._first_op, tag, ident, nbytes)
        envelope = memoryview(b"".join((header, payload)))
        self._envelopes.setdefault(peer, deque()).append((envelope, request))
        self.advance()

    def _post_envelope(self, link: RecvLink) -> None:
        """Post a receive, with the peer as its index, for an envelope that has arrived."""
        self._links.expect(link, self)

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Handle an envelope; the index of its receive is the peer."""
        assert payload is not None
        peer = landing.index
        link = self._links.receiver(peer, self._envelope_channel)
        self._links.consume(link, True)
        kind, dtype, first_op, tag, ident, nbytes = _HEADER.unpack_from(payload)
        if first_op != self._first_op:  # to a communicator closed without receiving it
            return
        data = memoryview(payload)[_HEADER.size :]
        source = self._rank_of[peer]
        if kind == _MESSAGE:
            self._arrived(Envelope(source, tag, dtype, nbytes, ident, data))
        elif kind == _REQUEST:
            self.note_busy(peer, 1)
            self._arrived(Envelope(source, tag, dtype, nbytes, ident, None))
        elif kind == _GRANT:
            lengths = [length for (length,) in _LENGTH.iter_unpack(data)]
            self._granted(self._announced.pop(ident), lengths)
        elif kind == _REFUSE:
            request = self._announced.pop(ident)
            self.note_busy(peer, -1)
            request.error = InvalidArgument(bytes(data).decode())
            request.is_done = True
        else:
            self._taken[peer] = nbytes

    def on_released(self, index: int) -> None:
        """Do nothing: envelopes are eager."""

    def on_retired(self, index: int) -> None:
        """Do nothing: envelopes are eager."""

    def _arrived(self, envelope: Envelope) -> None:
        while (request := self._matching.taker_of(envelope)) is not None:
            if self._take(request, envelope):
                return
        self._matching.keep(envelope)

    def _take(self, request: ReceiveRequest, envelope: Envelope) -> bool:
        """Let `request` receive the message; return False if the message stays to be received."""
        source, _, dtype, nbytes, ident, payload = envelope
        if dtype != request.dtype or nbytes > len(request.view):
            self._refuse(request, envelope)
            return payload is None
        request.result = _described(envelope)
        peer = self._members[source]
        if payload is not None:
            request.view[:nbytes] = payload
            request.is_done = True
            if source != self._rank:
                self._note_taken(peer, nbytes)
            elif ident in self._announced:
                self._announced.pop(ident).is_done = True
            return True
        lengths = self._cut(source, nbytes)
        self._put(peer, _GRANT, 0, 0, ident, nbytes, b"".join(map(_LENGTH.pack, lengths)))
        if not nbytes:  # a synchronous message, which has no slices
            request.is_done = True
            self.note_busy(peer, -1)
            return True
        self.nreceiving += 1
        at = 0
        for number, length in enumerate(lengths):
            link = self._links.receiver(peer, self._data_channel + number)
            queue = self._incoming.setdefault(link, deque())
            for piece in _pieces(request.view[at : at + length], self._slice_nbytes):
                queue.append((request, piece))
                request.nleft += 1
            at += length
            self._name(link, number)
        return True

    def _refuse(self, request: ReceiveRequest, envelope: Envelope) -> None:
        """End a receive that the message does not fit, and the send of an announced message."""
        given = f"{len(request.view) // dtype_of(request.dtype).itemsize}"
        request.error = InvalidArgument(
            f"rank {envelope.source} sent {_described(envelope).count} elements of "
            f"{dtype_name(envelope.dtype)} with tag {envelope.tag}, but rank {self._rank} receives "
            f"up to {given} of {dtype_name(request.dtype)}: make the buffers fit, or look with "
            "probe() first"
        )
        request.is_done = True
        if envelope.payload is None:
            peer = self._members[envelope.source]
            self.note_busy(peer, -1)
            self._put(peer, _REFUSE, 0, 0, envelope.ident, 0, str(request.error).encode())

    def _note_taken(self, peer: int, nbytes: int) -> None:
        took = self._took[peer] = self._took.get(peer, 0) + nbytes
        if took - self._reported.get(peer, 0) >= _REPORT_EVERY:
            self._reported[peer] = took
            self._put(peer, _TAKEN, 0, 0, 0, took)

    def note_busy(self, peer: int, change: int) -> None:
        """Add `change` to the count of announced messages to and from `peer`, which need paths."""
        busy = self._calls.busy
        count = busy.pop(peer, 0) + change
        if count > 0:
            busy[peer] = count

    # Data

    def _cut(self, source: int, nbytes: int) -> list[int]:
        """Return how many bytes of a message travel on each data channel."""
        if self._nchannels == 1 or nbytes <= self._slice_nbytes:
            return [nbytes]
        health = self._health()
        shares = [
            min(health.share(self._rank, rail), health.share(source, rail))
            for rail in range(self._nchannels)
        ]
        if not any(shares):
            return [nbytes]
        bounds, total = [0], 0
        for share in shares:
            total += share
            bounds.append(nbytes * total // sum(shares) // _ALIGN * _ALIGN)
        bounds[-1] = nbytes
        return [hi - lo for lo, hi in pairwise(bounds)]

    def _granted(self, request: SendRequest, lengths: Sequence[int]) -> None:
        at = 0
        for number, length in enumerate(lengths):
            link = self._links.sender(request.peer, self._data_channel + number)
            queue = self._outgoing.setdefault(link, deque())
            for piece in _pieces(request.view[at : at + length], self._slice_nbytes):
                queue.append((request, piece))
                request.nleft += 1
            at += length
        if not request.nleft:  # an empty message has no slices
            request.is_done = True
            self.note_busy(request.peer, -1)
        self.advance()

    def advance(self) -> None:
        """Post the envelopes and slices for which there is room."""
        links = self._links
        for peer, envelopes in self._envelopes.items():
            link = links.sender(peer, self._envelope_channel)
            while envelopes and link.can_post(True):
                view, request = envelopes.popleft()
                links.send(link, view, True, self, 0)
                if request is not None:
                    request.is_done = True
        for link, slices in self._outgoing.items():
            while slices and link.can_post(False):
                owner, piece = slices.popleft()
                links.send(link, piece, False, owner, 0)

    def on_data(self, request: ReceiveRequest, landing: Landing) -> None:
        """Confirm a slice of `request`, which is in its place, and announce the next place."""
        assert request.result is not None
        peer = self._members[request.result.source]
        if request.is_done:
            self.nreceiving -= 1
            self.note_busy(peer, -1)
        link = self._links.receiver(peer, self._data_channel + landing.index)
        self._links.consume(link, False)
        self._named[link] -= 1
        self._name(link, landing.index)

    def _name(self, link: RecvLink, number: int) -> None:
        """Announce places on data channel `number`, as far as the depth allows."""
        queue = self._incoming[link]
        while queue and self._named.get(link, 0) < self._depth:
            request, piece = queue.popleft()
            self._named[link] = self._named.get(link, 0) + 1
            self._links.recv(link, piece, request, number, not queue)


def _pieces(view: memoryview, nbytes: int) -> list[memoryview]:
    return [view[at : at + nbytes] for at in range(0, len(view), nbytes)]


def _described(envelope: Envelope) -> Message:
    count = envelope.nbytes // dtype_of(envelope.dtype).itemsize
    return Message(envelope.source, envelope.tag, count)


__all__ = ["MessageDriver", "ReceiveRequest", "SendRequest"]
