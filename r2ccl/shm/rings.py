"""Rings of frames between the ranks of one host: the class `Rings`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.kernels.native import callable_of
from r2ccl.shm import message_layout as layout
from r2ccl.shm.arrays import form_of
from r2ccl.shm.message_layout import (
    FIRST_PEER,
    KIND_BITS,
    KIND_MASK,
    PEER_NBYTES,
    PEER_NWORDS,
    PEERS,
)
from r2ccl.shm.repeat_message import preload_message
from r2ccl.shm.robust_mutex import ExitWatch
from r2ccl.shm.segment import Segment
from r2ccl.types import MOST_UNTAKEN

#: Makers of the compiled functions, for `callable_of`.
_PUMP = "r2ccl.shm.pump:make_pump"
_PUT = "r2ccl.shm.pump:make_put"
_CONSUME = "r2ccl.shm.pump:make_consume"
_RING = "r2ccl.shm.pump:make_ring"
_BEGIN = "r2ccl.shm.pump:make_begin"
_CHOOSE = "r2ccl.shm.pump:make_choose"
_COUNT_READS = "r2ccl.shm.pump:make_count_reads"
_DIRECT = "r2ccl.shm.one_message:make_direct"

Words = npt.NDArray[np.int64]


class RingFrame(NamedTuple):
    """Frame that a peer has put into its ring to this rank.

    ``kind`` is a number of `EnvelopeKind`, ``dtype`` a dtype code. ``ident`` is the number of the
    message, and ``size`` the size of the whole message in bytes; in a DATA frame, ``ident`` is 0
    and ``size`` is the size of ``data``. ``data`` has the bytes in this frame; it is borrowed from
    the ring until `Rings.consume`. ``readable_at`` is the address of the data of an announced
    message in the process of the peer, or 0 if this rank may not read it there.
    """

    kind: int
    dtype: int
    tag: int
    ident: int
    size: int
    data: memoryview | bytes
    readable_at: int


class Operand(NamedTuple):
    """Array that a direct call sends or receives into, with its peer, dtype code and tag.

    In a receive, the tag -1 stands for any tag.
    """

    array: npt.NDArray[Any]
    peer: int
    dtype: int
    tag: int


class Rings:
    """Rings of one rank to and from all other ranks of its host.

    Only one thread at a time may call the methods, except `wake`. `rank` and `peer` are indices of
    ranks in the group. The memory that is passed to `send_data` or `receive_data` is borrowed until
    `pump` returns SENT_ALL, RECEIVED_ALL, UNREADABLE or ABANDONED for its peer, or until `forget`.
    For the memory of an announced message, see `put`.

    Parameters
    ----------
    rank : int
    own : Segment
        Segment of this rank; borrowed until `close`.
    peers : mapping of int to Segment
        Segments of the other ranks; borrowed until `close`.
    state : array of int64
        State of this rank for waits in the rings, see `r2ccl.shm.layout`. No other object may use
        it.
    exits : ExitWatch
        Asked for ended peers when `pump` has waited without an event.

    Attributes
    ----------
    ring_nbytes : int
        Size of each ring in bytes. A frame takes at most half of it.
    state, table : int
        Addresses of the state and of the table, for `direct`.
    direct : callable
        Compiled function of `r2ccl.shm.one_message.make_direct`.
    """

    def __init__(
        self,
        rank: int,
        own: Segment,
        peers: Mapping[int, Segment],
        state: Words,
        exits: ExitWatch,
    ) -> None:
        nranks = len(peers) + 1
        self.ring_nbytes = layout.ring_nbytes(nranks)
        self._own = own
        self._pid = os.getpid()
        self._allocated: set[int] = set()
        self._waits = state
        self._exits = exits
        self.state = int(state.ctypes.data)
        self._table = np.zeros(layout.table_size(nranks), np.int64)
        #: Address of the table.
        self.table = int(self._table.ctypes.data)
        self._table[layout.RING], self._table[layout.TABLE_NRANKS] = self.ring_nbytes, nranks
        self._table[layout.OWN_BELL] = self._bell = own.messages_address + layout.BELL
        #: Held by `wake`, so that `close` waits for it; re-entrant for signal handlers.
        self._wakes = RLock()
        # By peer: words of the peer in the table; ring of the peer, as bytes; number of bytes of
        # short messages that the peer has taken from this rank; and that this rank has taken from
        # the peer; number of messages that this rank reads from the peer.
        self._words: dict[int, Words] = {}
        self._data: dict[int, npt.NDArray[np.uint8]] = {}
        self._taken_by: dict[int, Words] = {}
        self._taken_from: dict[int, Words] = {}
        self._reads_from: dict[int, Words] = {}
        for peer, segment in peers.items():
            self._add(rank, peer, segment)
        self._pump, self._put = callable_of(_PUMP), callable_of(_PUT)
        self._consume, self._ring = callable_of(_CONSUME), callable_of(_RING)
        self._begin, self._choose = callable_of(_BEGIN), callable_of(_CHOOSE)
        self._count_reads = callable_of(_COUNT_READS)
        self.direct = callable_of(_DIRECT)

    def _add(self, rank: int, peer: int, segment: Segment) -> None:
        first, nbytes = layout.rings_at(segment.nranks), self.ring_nbytes
        own, other = self._own.messages_address, segment.messages_address
        mine, theirs = own + PEERS + peer * PEER_NBYTES, other + PEERS + rank * PEER_NBYTES
        at = FIRST_PEER + peer * PEER_NWORDS
        words = self._words[peer] = self._table[at : at + PEER_NWORDS]
        words[layout.OUT_RING] = own + first + peer * nbytes
        words[layout.OUT_HEAD] = mine + layout.RING_HEAD
        words[layout.OUT_TAIL] = theirs + layout.RING_TAIL
        words[layout.IN_RING] = other + first + rank * nbytes
        words[layout.IN_HEAD] = theirs + layout.RING_HEAD
        words[layout.IN_TAIL] = mine + layout.RING_TAIL
        words[layout.PEER_BELL] = other + layout.BELL
        self._data[peer] = segment.messages[first + rank * nbytes :][:nbytes]
        self._taken_by[peer] = _count(segment, rank, layout.RING_TAKEN)
        self._taken_from[peer] = _count(self._own, peer, layout.RING_TAKEN)
        self._reads_from[peer] = _count(self._own, peer, layout.RING_READS)

    def allocate(self, peer: int) -> None:
        """Allocate the memory of the ring to `peer`; idempotent. See `Segment.allocate_ring`.

        Raises
        ------
        TransportError
            If memory is exhausted.
        """
        if peer not in self._allocated:
            self._own.allocate_ring(peer)
            self._allocated.add(peer)

    # Frames

    def new_ident(self) -> int:
        """Return a number that no earlier message of this rank has."""
        self._table[layout.IDENT] += 1
        return int(self._table[layout.IDENT])

    def admits(self, peer: int, nbytes: int) -> bool:
        """Return whether a short message of `nbytes` bytes may be sent to `peer` now.

        True if the message fits (`fits`) and, together with the short messages that receives of the
        peer have not taken, has at most `MOST_UNTAKEN` bytes. The message is then counted as sent.
        """
        words = self._words[peer]
        untaken = int(words[layout.SENT]) - int(self._taken_by[peer][0])
        if not self.fits(nbytes) or untaken + nbytes > MOST_UNTAKEN:
            return False
        words[layout.SENT] += nbytes
        return True

    def fits(self, nbytes: int) -> bool:
        """Return whether a frame with `nbytes` bytes of data takes at most half of a ring."""
        return layout.FRAME_NBYTES + nbytes <= self.ring_nbytes // 2

    def put(
        self, peer: int, kind: int, dtype: int, tag: int, ident: int, size: int,
        data: memoryview | bytes = b"", announced: memoryview | bytes = b"",
    ) -> bool:  # fmt: skip
        """Put a frame into the ring to `peer`; see `RingFrame` for the parameters.

        `announced` is the data of the message that a REQUEST announces. It is borrowed until `peer`
        answers, or until `forget`: `peer` may read it in this process.

        Returns
        -------
        bool
            True if the frame was put, or is not needed because `peer` has closed the communicator.
            False if the ring has no room; `pump` then returns ROOM when it has room for this frame.

        Raises
        ------
        TransportError
            If memory is exhausted for the ring.
        """
        self.allocate(peer)
        word = kind | dtype << KIND_BITS
        source = _address(data or announced)
        given = word, tag, ident, size, source, len(data)
        return bool(self._put(self.state, self.table, peer, *given))

    def frame(self) -> RingFrame:
        """Return the frame for which `pump` has returned FRAME; `consume` removes it later."""
        data, words = self._data[self.peer], self._words[self.peer]
        at = int(words[layout.TAIL]) % self.ring_nbytes
        header = data[at : at + 8 * (layout.FRAME_ADDRESS + 1)].view(np.int64)
        word, tag, ident, size, nbytes, readable_at = header.tolist()
        first = (at + layout.FRAME_NBYTES) % self.ring_nbytes
        piece: memoryview | bytes = memoryview(data[first : first + nbytes])  # type: ignore[arg-type]
        if len(piece) < nbytes:
            piece = bytes(piece) + data[: nbytes - len(piece)].tobytes()
        return RingFrame(word & KIND_MASK, word >> KIND_BITS, tag, ident, size, piece, readable_at)

    def consume(self, peer: int, nbytes: int) -> None:
        """Remove from the ring of `peer` the frame that `frame` returned.

        `nbytes` is the length of the frame's data.
        """
        self._consume(self.table, peer, nbytes)

    def took(self, peer: int, nbytes: int) -> None:
        """Tell `peer` that a receive has taken one of its short messages, of `nbytes` bytes."""
        self._words[peer][layout.TAKEN] += nbytes
        self._taken_from[peer][0] = self._words[peer][layout.TAKEN]

    # Long messages

    def is_reading(self, peer: int) -> bool:
        """Return whether this rank reads, or will read, messages from the process of `peer`."""
        return bool(self._reads_from[peer][0])

    def count_read(self, peer: int, change: int) -> None:
        """Add `change` to the published number of messages of `peer` that this rank reads."""
        self._reads_from[peer][0] += change

    @property
    def nreading(self) -> int:
        """Number of messages of this rank that peers read, or will read, for a receive.

        A message counts until the peer has put its answer into the ring.
        """
        return self._count_reads(self.table)

    def send_data(self, peer: int, view: memoryview) -> None:
        """Begin to send the bytes of `view`, which is not empty, to `peer`; `pump` moves them."""
        self._begin(self.state, self.table, peer, _address(view), len(view), 0, 0, 0)

    def choose(self, peer: int, readable_at: int, nbytes: int) -> int:
        """Choose a transfer for a message of `peer`; return `readable_at` to read it, else 0.

        Call this method once per message: each call counts as a use of the transfer.
        """
        return self._choose(self.table, peer, readable_at, nbytes)

    def receive_data(
        self, peer: int, view: memoryview, readable_at: int = 0, *, is_timed: bool = False
    ) -> None:
        """Begin to receive from `peer` into `view`, which is not empty; `pump` moves the bytes.

        If `readable_at` is not 0, read the bytes from this address of the peer's process; `pump`
        returns UNREADABLE if that fails. If `is_timed`, later calls of `choose` take the duration
        into account.
        """
        given = _address(view), len(view), 1, readable_at, is_timed
        self._begin(self.state, self.table, peer, *given)

    def forget(self, *, is_closing: bool) -> None:
        """Stop moving the data of all long messages, whose memory is then no longer borrowed.

        After this method, `pump` returns no ROOM for frames that were refused before. A peer that
        is still receiving a message of this rank never completes its receive. If `is_closing`, the
        `pump` of that peer returns ABANDONED for this rank; otherwise the communicator has failed.
        """
        for words in self._words.values():
            words[layout.OUT_LEFT] = words[layout.IN_LEFT] = words[layout.WANTED] = 0
        with self._wakes:
            # A forked process has no messages; its parent has.
            if self._bell and os.getpid() == self._pid:
                dropped = layout.CLOSED if is_closing else layout.FAILED
                self._own.messages[layout.DROPPED : layout.DROPPED + 8].view(np.int64)[0] = dropped
                self._ring(self._bell)  # orders this store before later ones of the caller

    # Progress

    def pump(self, is_waiting: bool) -> int:
        """Move data until an event occurs; return the event, see `r2ccl.shm.message_layout`.

        The property `peer` is the peer of the event, unless the event is MOVED or IDLE. Return
        MOVED if data has moved and there is no event of a peer. If there is no event and no data
        can move, return IDLE; with `is_waiting`, first wait up to some milliseconds for an event,
        without the GIL.
        """
        event = self._pump(self.state, self.table, is_waiting)
        if is_waiting and event == layout.IDLE:
            self._exits.look(self._waits)
        return event

    @property
    def peer(self) -> int:
        """Peer of the last event that `pump` returned; IDLE and MOVED do not count."""
        return int(self._table[layout.PEER])

    def wake(self) -> None:
        """Make the thread of this rank that waits in compiled code return to Python.

        Any thread may call this method. Does nothing after `close`.
        """
        with self._wakes:
            if self._bell:
                self._table[layout.WOKEN] = 1
                self._ring(self._bell)

    def close(self) -> None:
        """Drop the views of the segments, so that these can be freed; only `wake` may follow."""
        with self._wakes:
            self._bell = 0
        for views in (self._data, self._taken_by, self._taken_from, self._reads_from):
            views.clear()


class DirectCall:
    """Send, receive, or both at once, prepared for `Rings.direct`.

    Parameters
    ----------
    rings : Rings
    sent, received : Operand or None
        Array that the call sends, and array into which it receives; None if it does not send, or
        does not receive.
    is_short : bool
        True if the message to send is short, so that one frame can carry it.
    has_form : bool
        True: each call may pass other arrays, and checks that they have the form of the arrays
        given here. False: each call must pass the arrays given here.

    Attributes
    ----------
    words : ndarray of int64
        Words of the call, see `r2ccl.shm.message_layout`.
    at : int
        Address of `words`.

    Raises
    ------
    TransportError
        If memory is exhausted for a ring.
    """

    def __init__(
        self,
        rings: Rings,
        sent: Operand | None,
        received: Operand | None,
        *,
        is_short: bool,
        has_form: bool,
    ) -> None:
        nothing = Operand(_NOTHING, -1, 0, 0)
        x, out = sent or nothing, received or nothing
        for each in (x, out):
            if each.peer >= 0:
                rings.allocate(each.peer)
        self._form = form_of(x.array, out.array) if has_form else None
        self._dtypes = x.array.dtype, out.array.dtype  # the form has their addresses
        form = 0 if self._form is None else int(self._form.ctypes.data)
        self.words = np.array(
            [
                form, x.peer, x.dtype, x.tag, x.array.nbytes, is_short,
                out.peer, out.dtype, out.tag, out.array.nbytes, *[0] * 6, -1, -1, 0,
            ],
            np.int64,
        )  # fmt: skip
        self.at = int(self.words.ctypes.data)


def preload_rings() -> None:
    """Load the compiled code of all rings; compile it if it is not cached.

    Raises
    ------
    ImportError, TransportError
        If `r2ccl.kernels.native.callable_of` raises it.
    """
    for maker in (_PUMP, _PUT, _CONSUME, _RING, _BEGIN, _CHOOSE, _COUNT_READS, _DIRECT):
        callable_of(maker)
    preload_message()


def _count(segment: Segment, peer: int, offset: int) -> Words:
    at = PEERS + peer * PEER_NBYTES + offset
    return segment.messages[at : at + 8].view(np.int64)


def _address(data: memoryview | bytes) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


_NOTHING = np.empty(0, np.uint8)

__all__ = ["DirectCall", "Operand", "RingFrame", "Rings", "preload_rings"]
