"""Exchange of messages over the links: envelopes, landing places, data.

An *envelope* is an eager slice. It carries a short message, or announces, grants or refuses a
message. Every envelope from rank A to rank B also reports how many bytes of short messages from B
the receives of A have taken; some envelopes contain only this report. All long messages and some
short messages (`MessageProtocol.send`) are announced. Each pair of ranks has one channel for
envelopes, and one channel per home rail for the data of announced messages; these channels have
their own context id. An announced message is sent as follows::

    sender                                   receiver
    REQUEST(ident, tag, dtype, nbytes)  ->   finds the receive that takes it
                                        <-   GRANT(ident, bytes per channel), landing places
    slices on the data channels         ->   the receive is complete

Grants and landing places are posted in the same order, and a link keeps the order of its slices, so
both ends agree on which slice belongs to which message.

Only the thread that owns the data loop may call the methods, unless a method says otherwise.
Invariant: the memory of a message is neither read nor written once its request is done.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from r2ccl.config import ENVELOPE_NBYTES
from r2ccl.dtypes import dtype_of
from r2ccl.errors import InternalError
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.calls import Calls, first_channel
from r2ccl.failover.migration.link import Landing, RecvLink, SendLink
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.runtime.compiled.layout import (
    IDENT,
    INCOMING_TAKEN,
    NBYTES_REPORTED,
    NBYTES_SENT,
    NBYTES_TAKEN,
    NBYTES_TOOK,
)
from r2ccl.runtime.messages.matching import ANY, Envelope, Message
from r2ccl.runtime.messages.protocol import MessageProtocol, ReceiveRequest, SendRequest
from r2ccl.types import MOST_UNREPORTED, MOST_UNTAKEN_ON_LINKS, EnvelopeKind, signed_word

#: kind, dtype, number of the communicator's first call (lower 32 bits), tag, ident, nbytes, number
#: of bytes of the peer's short messages that this rank has taken; `ENVELOPE_NBYTES` in all
_HEADER = struct.Struct("<BBxxIqQQQ")
_FIRST_OP_MASK = (1 << 32) - 1
_LENGTH = struct.Struct("<Q")
#: Size of a grant of a message whose data uses one channel.
GRANT_NBYTES = ENVELOPE_NBYTES + _LENGTH.size
#: Maximum number of slices of a message in compiled code, whose tables grow with the number of
#: slices.
_MOST_SLICES = 1024
#: The data of a message is divided among the channels at multiples of this number of bytes.
_ALIGN = 64


class LinkSend(SendRequest):
    """Message that is being sent over links, and the `Consumer` of its slices."""

    is_bandwidth_sample = False

    def __init__(self, driver: MessageDriver, peer: int, view: memoryview, ident: int) -> None:
        super().__init__(peer, view, ident)
        #: Number of slices that are not released yet; 0 until the receiver grants the message.
        self.nleft = 0
        self._driver = driver

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Raise InternalError: this rank posts no receives for a message that it sends."""
        raise InternalError(
            f"rank {self.peer} answered message {self.ident}, which was sent to it, with a slice "
            "of data"
        )

    def on_released(self, index: int) -> None:
        """Count one released slice; the message is sent when all are released."""
        self.nleft -= 1
        self.is_done = self.nleft == 0
        if self.is_done:
            self._driver.note_sent(self.peer)

    def on_retired(self, index: int) -> None:
        """Do nothing: the slice is counted when it is released."""

    def advance(self) -> None:
        """Post the waiting envelopes and slices; see `MessageDriver.advance`."""
        self._driver.advance()


class LinkReceive(ReceiveRequest):
    """Receive over links, and the `Consumer` of the slices of its message."""

    is_bandwidth_sample = False

    def __init__(
        self, driver: MessageDriver, view: memoryview, dtype: int, source: int, tag: int
    ) -> None:
        super().__init__(view, dtype, source, tag)
        #: Number of slices that have not arrived yet; 0 until this rank grants the message.
        self.nleft = 0
        self._driver = driver

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Count a slice that has arrived in its landing place; the last one ends the receive."""
        self.nleft -= 1
        self.is_done = self.nleft == 0
        self._driver.on_data(self, landing)

    def on_released(self, index: int) -> None:
        """Do nothing: this request sends no slices."""

    def on_retired(self, index: int) -> None:
        """Do nothing: this request sends no slices."""

    def advance(self) -> None:
        """Post the waiting envelopes and slices; see `MessageDriver.advance`."""
        self._driver.advance()


class MessageDriver(MessageProtocol):
    """Exchange of the messages of one communicator over links; the `Consumer` of its envelopes.

    Parameters
    ----------
    links : Links
    calls : Calls
        Calls with the context id of the communicator's messages.
    rank : int
        This rank in the communicator.
    members : sequence of int
        ``members[i]`` is the rank in the job of rank i of the communicator.
    first_op : int
        Number of the communicator's first call, which every envelope carries: it distinguishes this
        communicator from earlier ones with the same context id.
    homes : sequence of int
        Home rails.
    nwires : int
        Number of rails whose bandwidths add up; if it is 1, each message uses one data channel.
    eager_nbytes, slice_nbytes : int
        Maximum sizes of a short message and of a slice of data, in bytes.
    depth : int
        Maximum number of landing places announced ahead per link.
    health : callable
        ``health()`` returns the newest known health.
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
        homes: Sequence[int],
        nwires: int,
        eager_nbytes: int,
        slice_nbytes: int,
        depth: int,
        health: Callable[[], Health],
    ) -> None:
        super().__init__(rank, members)
        self._links = links
        self._first_op = first_op & _FIRST_OP_MASK
        self._rank_of = {peer: at for at, peer in enumerate(members)}
        #: Home rails of the data channels in use.
        self._rails = tuple(homes) if nwires > 1 else tuple(homes[:1])
        self._eager_nbytes = eager_nbytes
        self._slice_nbytes = slice_nbytes
        self._depth = depth
        self._health = health
        #: Channel of the envelopes.
        self.channel = first_channel(calls.context_id)
        # Channel c uses home rail c modulo the number of home rails.
        nhomes = len(homes)
        #: First channel of data.
        self.data_channel = self.channel + nhomes
        #: True after `release_announced`.
        self.is_closing = False
        self._next_ident = 0
        #: Number of receives and of sends whose data is moving.
        self._nreceiving = self._nsending = 0
        #: Envelopes that wait for a free slot, by peer in the job.
        self._envelopes: dict[
            int, deque[tuple[memoryview, SendRequest | ReceiveRequest | None]]
        ] = {}
        #: Slices to post, in the order of the grants, by link.
        self._outgoing: dict[SendLink, deque[tuple[LinkSend, memoryview]]] = {}
        #: By link: landing places to announce, in the order of the grants; and number of announced
        #: landing places whose slices have not arrived.
        self._incoming: dict[RecvLink, deque[tuple[LinkReceive, memoryview]]] = {}
        self._named: dict[RecvLink, int] = {}
        #: Number of bytes of short messages, by peer: sent to the peer; reported by the peer as
        #: taken; taken by this rank; reported by this rank as taken.
        self._sent: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._took: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        channels = (self.channel, *range(self.data_channel, self.data_channel + nhomes))
        self.calls = calls
        calls.consumers = dict.fromkeys(channels, self)
        calls.on_unposted = self._post_envelope
        for peer in members:
            link = links.receivers.get((peer, self.channel))
            if link is not None:
                links.deliver(link)  # slices that arrived before this driver was made

    def close(self) -> None:
        """Stop handling messages: envelopes that arrive later are not used.

        `nmoving` must be 0 before the call.
        """
        self.calls.consumers = {}
        self.calls.busy.clear()
        self.calls.on_unposted = None

    # Requests

    @property
    def nmoving(self) -> int:
        """Number of messages that receives have taken and whose data is arriving or leaving."""
        return self._nreceiving + self._nsending

    def release_announced(self) -> None:
        """Copy the data of announced messages, so that the callers' arrays are free.

        Peers may grant these messages until all ranks have closed the communicator. From now on,
        `DirectCalls` begins no direct call, because the array of such a call would not be copied.
        """
        self.is_closing = True
        for request in self._announced.values():
            if request.peer != self._members[self._rank]:
                # NumPy copies without the GIL, so that the control thread answers the peers.
                request.view = np.frombuffer(request.view, np.uint8).copy().data

    def _new_send(self, peer: int, view: memoryview) -> SendRequest:
        self._next_ident += 1
        self._links.ncalls += 1
        return LinkSend(self, peer, view, self._next_ident)

    def _new_receive(self, view: memoryview, dtype: int, source: int, tag: int) -> ReceiveRequest:
        return LinkReceive(self, view, dtype, source, tag)

    def _admits(self, to: int, nbytes: int) -> bool:
        peer = self._members[to]
        if nbytes and not (self.is_short(nbytes) and self.has_room(to, nbytes)):
            return False
        self._sent[peer] = self._sent.get(peer, 0) + nbytes
        return True

    def has_room(self, to: int, nbytes: int) -> bool:
        """Return whether rank `to` may buffer a message of `nbytes`; True for a long message.

        A rank may buffer `MOST_UNTAKEN_ON_LINKS` bytes of short messages from this rank that no
        receive has taken, as far as this rank knows from the envelopes of that rank.
        """
        peer = self._members[to]
        untaken = self._sent.get(peer, 0) - self._taken.get(peer, 0)
        return untaken + nbytes <= MOST_UNTAKEN_ON_LINKS or not self.is_short(nbytes)

    # Messages in compiled code, see `r2ccl.runtime.messages.direct_calls`

    def is_short(self, nbytes: int) -> bool:
        """Return whether a message of `nbytes` is short; any thread may call this."""
        return nbytes <= self._eager_nbytes

    def in_job(self, peer: int) -> int:
        """Return the rank in the job of `peer`, a rank of the communicator."""
        return self._members[peer]

    def has_links(self, peer: int) -> bool:
        """Return whether paths to `peer` were made and not closed as idle; the paths may be down.

        False for this rank and for `ANY`.
        """
        return peer not in (ANY, self._rank) and self._members[peer] in self._links.connected

    @property
    def has_long(self) -> bool:
        """True if a message that was announced by or to this rank is unfinished."""
        return bool(self.calls.busy)

    @property
    def has_waiting(self) -> bool:
        """True if a message or receive is unmatched, or an envelope waits for a free slot."""
        return not self.matching.is_empty or any(self._envelopes.values())

    def may_send(self, to: int, nbytes: int) -> bool:
        """Return whether a direct call may send a message of `nbytes` to rank `to` now.

        Return False if an earlier envelope to rank `to` waits for a free slot, or if that rank may
        not buffer the message (`has_room`).
        """
        return not self._envelopes.get(self._members[to]) and self.has_room(to, nbytes)

    def may_receive(self, source: int, tag: int) -> bool:
        """Return whether a direct call may receive a message with `tag` from `source` now.

        The call would take the next message that arrives and matches. Return False if another
        receive waits, whatever its source and tag; if a message that matches the call has arrived
        already; or if envelopes from `source` have arrived and are not handled yet.
        """
        link, matching = self._links.receiver(self._members[source], self.channel), self.matching
        if link.arrivals:  # slices not delivered yet; only `Links.deliver` passes them on
            return False
        if matching.is_empty:
            return True
        return not matching.has_takers and self.probe(source, tag) is None

    def pack(
        self, envelope: memoryview, kind: int, dtype: int, to: int, tag: int, nbytes: int
    ) -> None:
        """Write the header of the next message to rank `to`, or of its request, into `envelope`."""
        took, ident = self._took.get(self._members[to], 0), self._next_ident + 1
        _HEADER.pack_into(envelope, 0, kind, dtype, self._first_op, tag, ident, nbytes, took)

    def is_undivided(self, nbytes: int) -> bool:
        """Return whether compiled code can move a long message of `nbytes`.

        The message must use only one data channel, with any health, and have at most `_MOST_SLICES`
        slices. Any thread may call this method.
        """
        is_small = nbytes <= self._slice_nbytes * _MOST_SLICES
        return is_small and (len(self._rails) == 1 or nbytes <= self._slice_nbytes)

    def cuts_of(self, nbytes: int) -> tuple[int, ...]:
        """Return the boundaries of the slices of an undivided message."""
        return (*range(0, nbytes, self._slice_nbytes), nbytes)

    def pack_grant(self, envelope: memoryview, to: int, nbytes: int) -> None:
        """Write the grant of an undivided message of `nbytes` from rank `to` into `envelope`.

        The number of the message (``ident``) stays 0: compiled code copies it from the request that
        the grant answers.
        """
        took = self._took.get(self._members[to], 0)
        _HEADER.pack_into(envelope, 0, EnvelopeKind.GRANT, 0, self._first_op, 0, 0, nbytes, took)
        _LENGTH.pack_into(envelope, ENVELOPE_NBYTES, nbytes)

    def expected(
        self, dtype: int, tag: int, nbytes: int, *, is_any: bool
    ) -> tuple[int, int, int, int]:
        """Return the words that the request of a long message must have.

        See `r2ccl.runtime.compiled.layout`. If `is_any`, the message may have any tag.
        """
        return self._kind_word(EnvelopeKind.REQUEST, dtype), tag, nbytes, int(is_any)

    def expected_grant(self, nbytes: int) -> tuple[int, int, int, int]:
        """Return the words that the grant of a long message must have; see `expected`."""
        return self._kind_word(EnvelopeKind.GRANT, 0), 0, nbytes, 0

    def _kind_word(self, kind: int, dtype: int) -> int:
        packed = struct.pack("<BBxxI", kind, dtype, self._first_op)
        return signed_word(int.from_bytes(packed, "little"))

    def note_long(self, to: int, grant: memoryview) -> None:
        """Count a long message that compiled code has sent to rank `to`.

        `grant`, the answer of `to`, reports how many bytes `to` has taken. The request of the
        message has reported to `to` how many bytes this rank has taken; this is noted, too.
        """
        self._next_ident += 1
        self._report(self._members[to])
        self.note_taken(to, grant)

    def take_long(self, request: memoryview, source: int) -> Message:
        """Return the message announced by `request`, which compiled code has granted and received.

        Note the bytes that `request` reports as taken, and those that the grant has reported.
        """
        _, dtype, _, tag, _, nbytes, _ = _HEADER.unpack_from(request)
        self._report(self._members[source])
        self.note_taken(source, request)
        return Message(source, tag, nbytes // dtype_of(dtype).itemsize)

    def note_taken(self, source: int, envelope: memoryview) -> None:
        """Note the bytes that `envelope`, from rank `source`, reports as taken.

        Envelopes need not be passed in order: the largest number is kept. Do nothing if the
        envelope is of an earlier communicator with the same context id.
        """
        _, _, first_op, _, _, _, taken = _HEADER.unpack_from(envelope)
        if first_op == self._first_op:
            peer = self._members[source]
            self._taken[peer] = max(self._taken.get(peer, 0), taken)

    def note_short(self, to: int, nbytes: int) -> None:
        """Count a short message to rank `to`, which compiled code has sent.

        Its envelope has reported to `to` how many bytes this rank has taken; this is noted, too.
        """
        peer = self._members[to]
        self._next_ident += 1
        self._report(peer)
        self._sent[peer] = self._sent.get(peer, 0) + nbytes

    def take_short(
        self, envelope: memoryview, view: memoryview, dtype: int, source: int, tag: int
    ) -> Message | None:
        """Receive the message in `envelope`, which compiled code has received, into `view`.

        `source` is the rank that has sent the envelope. The data in the envelope must be as long as
        `view`. Count the message as taken, and note the bytes that the envelope reports as taken;
        if `is_report_due`, the caller must then call `report`. If the envelope is not a short
        message of this communicator with `dtype` and `tag`, do nothing and return None; the caller
        must then call `pass_on`.
        """
        kind, given, first_op, number, _, nbytes, taken = _HEADER.unpack_from(envelope)
        if kind != EnvelopeKind.MESSAGE or first_op != self._first_op:
            return None
        if given != dtype or tag not in (ANY, number):
            return None
        peer = self._members[source]
        view[:] = envelope[ENVELOPE_NBYTES:]
        self._took[peer] = self._took.get(peer, 0) + nbytes
        self._taken[peer] = taken
        return Message(source, number, nbytes // dtype_of(dtype).itemsize)

    def export_counts(self, words: memoryview, to: int | None, source: int | None) -> None:
        """Copy the counts of messages to rank `to` and from rank `source` into `words`.

        These are the words of a repeated exchange, see `r2ccl.runtime.compiled.layout`.
        """
        words[IDENT] = self._next_ident
        if to is not None:
            peer = self._members[to]
            words[NBYTES_SENT] = self._sent.get(peer, 0)
            words[NBYTES_TAKEN] = self._taken.get(peer, 0)
        if source is not None:
            peer = self._members[source]
            words[NBYTES_TOOK] = self._took.get(peer, 0)
            words[NBYTES_REPORTED] = self._reported.get(peer, 0)
            words[INCOMING_TAKEN] = self._taken.get(peer, 0)

    def import_counts(self, words: memoryview, to: int | None, source: int | None) -> None:
        """Read the counts back from `words`, which repetitions have updated.

        The words and ranks are those of `export_counts`.
        """
        self._next_ident = words[IDENT]
        if to is not None:
            self._sent[self._members[to]] = words[NBYTES_SENT]
        if source is not None:
            peer = self._members[source]
            self._took[peer] = words[NBYTES_TOOK]
            self._reported[peer] = words[NBYTES_REPORTED]
            self._taken[peer] = words[INCOMING_TAKEN]

    def is_report_due(self, source: int) -> bool:
        """Return whether this rank must call `report` for rank `source`.

        True if this rank has taken, but not reported, at least `MOST_UNREPORTED` bytes of short
        messages from `source`.
        """
        peer = self._members[source]
        return self._took.get(peer, 0) - self._reported.get(peer, 0) >= MOST_UNREPORTED

    def report(self, source: int) -> None:
        """Tell rank `source` how many bytes of its short messages this rank has taken."""
        self._put(source, EnvelopeKind.TAKEN, 0, 0, 0, 0)

    def pass_on(
        self, envelope: memoryview, view: memoryview, dtype: int, source: int, tag: int
    ) -> ReceiveRequest:
        """Post a receive, then handle an envelope from `source` that `take_short` did not take.

        Return the request of the receive, which the envelope may have completed.
        """
        request = self.receive(view, dtype, source, tag)
        self._handle(self._members[source], envelope)
        return request

    # Envelopes

    def _put(
        self, to: int, kind: int, dtype: int, tag: int, ident: int, nbytes: int,
        payload: memoryview | bytes = b"", request: SendRequest | ReceiveRequest | None = None,
    ) -> None:  # fmt: skip
        peer = self._members[to]
        took = self._report(peer)
        header = _HEADER.pack(kind, dtype, self._first_op, tag, ident, nbytes, took)
        envelope = memoryview(b"".join((header, payload)))
        self._envelopes.setdefault(peer, deque()).append((envelope, request))
        self.advance()

    def _report(self, peer: int) -> int:
        """Return the number of bytes to report to `peer` as taken; record them as reported.

        `peer` is a rank of the job.
        """
        took = self._reported[peer] = self._took.get(peer, 0)
        return took

    def _post_envelope(self, link: RecvLink) -> None:
        """Post a receive on `link` for an envelope that has arrived there."""
        self._links.expect(link, self)

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Handle the envelope in `payload`; ``landing.index`` is its sender's rank in the job."""
        assert payload is not None
        peer = landing.index
        link = self._links.receiver(peer, self.channel)
        self._links.consume(link, True)
        self._handle(peer, payload)

    def _handle(self, peer: int, payload: memoryview | bytes) -> None:
        """Handle an envelope of `peer`, a rank of the job."""
        kind, dtype, first_op, tag, ident, nbytes, taken = _HEADER.unpack_from(payload)
        if first_op != self._first_op:  # of a communicator that this rank closed before
            return
        self._taken[peer] = taken
        if kind != EnvelopeKind.TAKEN:
            data = memoryview(payload)[ENVELOPE_NBYTES:]
            self._on_envelope(self._rank_of[peer], kind, dtype, tag, ident, nbytes, data)

    def on_released(self, index: int) -> None:
        """Do nothing: envelopes are eager, and this is called for cleared slices only."""

    def on_retired(self, index: int) -> None:
        """Do nothing: envelopes are eager, and this is called for cleared slices only."""

    def _note_taken(self, source: int, nbytes: int) -> None:
        peer = self._members[source]
        self._took[peer] = self._took.get(peer, 0) + nbytes
        if self.is_report_due(source):
            self.report(source)

    def note_sent(self, peer: int) -> None:
        """Record that a granted message to `peer`, a rank of the job, is sent and released."""
        self._nsending -= 1
        self._note_busy(self._rank_of[peer], -1)

    def _note_busy(self, peer: int, change: int) -> None:
        # Paths with a count in `busy` are not closed as idle: an announced message needs them.
        busy, of_job = self.calls.busy, self._members[peer]
        count = busy.pop(of_job, 0) + change
        if count > 0:
            busy[of_job] = count

    # Data

    def _cut(self, source: int, nbytes: int) -> list[int]:
        """Divide the bytes of a message from rank `source` among the data channels.

        Return the number of bytes on each channel, in proportion to the share of the bandwidth of
        its rail that both ranks still have (`Health.share`). Return one number if the first channel
        carries all bytes.
        """
        if len(self._rails) == 1 or nbytes <= self._slice_nbytes:
            return [nbytes]
        health = self._health()
        shares = [
            min(health.share(self._rank, rail), health.share(source, rail)) for rail in self._rails
        ]
        if not any(shares):
            return [nbytes]
        bounds, total = [0], 0
        for share in shares:
            total += share
            bounds.append(nbytes * total // sum(shares) // _ALIGN * _ALIGN)
        bounds[-1] = nbytes
        return [hi - lo for lo, hi in pairwise(bounds)]

    def _begin_receive(self, request: ReceiveRequest, envelope: Envelope) -> None:
        assert isinstance(request, LinkReceive)
        source, nbytes = envelope.source, envelope.nbytes
        peer, lengths = self._members[source], self._cut(source, nbytes)
        packed = b"".join(map(_LENGTH.pack, lengths))
        # A synchronous message without data is received as soon as its grant is sent.
        completed = None if nbytes else request
        self._put(source, EnvelopeKind.GRANT, 0, 0, envelope.ident, nbytes, packed, completed)
        if not nbytes:
            self._note_busy(source, -1)
            return
        self._nreceiving += 1
        at = 0
        for number, length in enumerate(lengths):
            link = self._links.receiver(peer, self.data_channel + number)
            queue = self._incoming.setdefault(link, deque())
            for piece in _pieces(request.view[at : at + length], self._slice_nbytes):
                queue.append((request, piece))
                request.nleft += 1
            at += length
            self._name(link, number)

    def _granted(self, request: SendRequest, to: int, data: memoryview | bytes) -> None:
        assert isinstance(request, LinkSend)
        at = 0
        for number, (length,) in enumerate(_LENGTH.iter_unpack(data)):
            link = self._links.sender(request.peer, self.data_channel + number)
            queue = self._outgoing.setdefault(link, deque())
            for piece in _pieces(request.view[at : at + length], self._slice_nbytes):
                queue.append((request, piece))
                request.nleft += 1
            at += length
        if request.nleft:
            self._nsending += 1
        else:  # an empty message has no slices
            request.is_done = True
            self._note_busy(to, -1)
        self.advance()

    def advance(self) -> None:
        """Post waiting envelopes while slots are free, and slices that have a landing place."""
        links = self._links
        for peer, envelopes in self._envelopes.items():
            link = links.sender(peer, self.channel)
            while envelopes and link.can_post(True):
                view, request = envelopes.popleft()
                links.send(link, view, True, self, 0)
                if request is not None:
                    request.is_done = True
        for link, slices in self._outgoing.items():
            while slices and link.can_post(False):
                owner, piece = slices.popleft()
                links.send(link, piece, False, owner, 0)

    def on_data(self, request: LinkReceive, landing: Landing) -> None:
        """Confirm a slice of `request` that has arrived, and announce the next landing place."""
        assert request.result is not None
        peer = self._members[request.result.source]
        if request.is_done:
            self._nreceiving -= 1
            self._note_busy(request.result.source, -1)
        link = self._links.receiver(peer, self.data_channel + landing.index)
        self._links.consume(link, False)
        self._named[link] -= 1
        self._name(link, landing.index)

    def _name(self, link: RecvLink, number: int) -> None:
        """Announce landing places on `link` as long as fewer than `depth` are announced.

        `number` is the index of the link's data channel, and becomes ``landing.index``.
        """
        queue = self._incoming[link]
        while queue and self._named.get(link, 0) < self._depth:
            request, piece = queue.popleft()
            self._named[link] = self._named.get(link, 0) + 1
            self._links.recv(link, piece, request, number, not queue)


def _pieces(view: memoryview, nbytes: int) -> list[memoryview]:
    return [view[at : at + nbytes] for at in range(0, len(view), nbytes)]


__all__ = ["ENVELOPE_NBYTES", "GRANT_NBYTES", "LinkReceive", "LinkSend", "MessageDriver"]
