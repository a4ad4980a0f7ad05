"""TCP transport: one non-blocking socket per path, one epoll per transport.

Wire format: a stream of frames, each a fixed header (`HEADER`, 64 bytes, little endian) and, for
DATA, its payload. A cleared slice travels as one or more fragments in order. It is written from the
caller's view and read into the landing place; only the first bytes of a fragment, if they are read
together with a header, are copied from the receiver's buffer. An eager slice stays in that buffer.
Small frames (clear-to-send, confirmations, eager slices) are sent first, then replays, then other
cleared slices; the order is decided again after each fragment.

The sockets are connected and authenticated before `TcpTransport.open`; from then on they carry only
these frames. A malformed frame fails the path.

Invariants: TCP_NOTSENT_LOWAT bounds the unsent bytes in the kernel. Only these bytes, small frames,
earlier replays and the rest of the current fragment are sent before a replay. Only this process
writes to a landing place, so closing the socket is a fence.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import logging
import os
import select
import socket
import struct
import termios
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from r2ccl.clock import Clock, monotonic
from r2ccl.errors import InternalError, errno_name
from r2ccl.transport.base import (
    Arrived,
    Cleared,
    Confirmed,
    Event,
    Failed,
    Fenced,
    Frame,
    MemoryUse,
    Sent,
)
from r2ccl.transport.preconnected import PreconnectedTransport
from r2ccl.transport.tcp.connection import (
    CLEAR,
    CONFIRM,
    DATA,
    HEADER,
    HEADER_NBYTES,
    Connection,
    NamedPlace,
    QueuedSlice,
    buffer_nbytes,
    pack,
)
from r2ccl.transport.tcp.probe import Address, TcpProber
from r2ccl.transport.wakeup import Wakeup
from r2ccl.types import Nic, PathKey, ProbeKey, rail_name

_log = logging.getLogger(__name__)

#: Unsent bytes that a socket may hold in the kernel. Measured on 4 rails of 200 Mbit/s: a replay
#: reaches the wire in 8 ms with this value, in 24 to 57 ms with the default.
_NOTSENT_LOWAT = 64 << 10
#: On loopback no line rate delays the bytes, and more unsent bytes mean fewer wake-ups. The socket
#: buffers are large enough that two ranks seldom wait for each other and small enough to stay in
#: the cache. Measured for 64 MiB with buffers of 512 KiB, of 1 MiB, and of a size that the kernel
#: chooses: 33, 26 and 33 ms for 2 ranks; 93, 86 and 99 ms for 4 ranks on 2 cores.
_LOOPBACK_NOTSENT_LOWAT = 256 << 10
_LOOPBACK_BUFFER_NBYTES = 1 << 20
#: Congestion control of ``auto``. On loopback, which loses nothing, Reno opens its window at once
#: (64 MiB, 4 ranks: Reno 88 ms, cubic 105 ms). On shaped rails cubic reaches 96 to 99 % of the line
#: rate, BBR 80 to 94 %.
_LOOPBACK_CONGESTION, _CONGESTION = "reno", "cubic"
#: Maximum number of bytes per send, and per read into a landing place of an open path: large enough
#: to amortize the call, small enough that data which the peer wrote is still in the cache when it
#: is read.
_CALL_NBYTES = 256 << 10
#: Maximum number of bytes of one read into the buffer while landing places are announced: payload
#: that is read together with a header is copied once more, into its landing place.
_PEEK_NBYTES = 1024

_IN = select.EPOLLIN
_OUT = select.EPOLLOUT
_BROKEN = select.EPOLLERR | select.EPOLLHUP


class TcpTransport(PreconnectedTransport):
    """`Transport` over TCP sockets.

    Parameters
    ----------
    rank : int
        This rank, for errors and the log.
    nrails : int
    eager_nbytes : int
        Largest eager payload accepted from a peer, in bytes.
    congestion : str
        TCP congestion control of the sockets: the kernel's name of an algorithm, ``auto`` for reno
        on loopback and cubic elsewhere, or empty for the system's default. If the algorithm cannot
        be set, the system's default is used.
    sources : mapping of int to Nic
        Local NIC of each rail, for probes.
    targets : mapping of PathKey to (str, int)
        Address and port that probes of each path connect to; nobody listens on the port.
    probe_timeout_s : float
        Time in which a probe must be answered, in seconds.
    clock : Clock
    """

    def __init__(
        self,
        rank: int,
        nrails: int,
        *,
        eager_nbytes: int,
        congestion: str = "",
        sources: Mapping[int, Nic],
        targets: Mapping[PathKey, Address],
        probe_timeout_s: float,
        clock: Clock = monotonic,
    ) -> None:
        self.nrails = nrails
        self._rank = rank
        self._eager_nbytes = eager_nbytes
        self._congestion = congestion
        #: Congestion controls that could not be set; each is logged once.
        self._unset: set[str] = set()
        self._clock = clock
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.number, _IN)
        self._by_fd: dict[int, Connection] = {}
        self._by_path: dict[PathKey, Connection] = {}
        self._dirty: list[Connection] = []
        #: Connections that wait until their sockets accept more data.
        self._waiting: set[Connection] = set()
        #: Connections that may have complete frames in their buffers, which epoll does not report.
        self._unparsed: set[Connection] = set()
        self._events: list[Event] = []
        self._prober = TcpProber(self._epoll, sources, targets, probe_timeout_s, clock, rank=rank)
        #: Result of the ioctl FIONREAD: unread bytes of a socket.
        self._unread = array("i", [0])

    def open(self, path: PathKey, endpoint: socket.socket) -> None:
        """Begin to use a connected, authenticated socket as `path`; the transport now owns it."""
        self._discard(path)
        self._tune(endpoint)
        nbytes = buffer_nbytes(self._eager_nbytes)
        conn = Connection(path, endpoint, nbytes, is_loopback=_is_loopback(endpoint))
        self._by_path[path] = conn
        self._by_fd[conn.fd] = conn
        self._epoll.register(conn.fd, _IN)

    def is_open(self, path: PathKey) -> bool:
        """Return True if `path` was opened and has neither failed nor been fenced since."""
        return path in self._by_path

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Queue a slice; queued replays are sent before other queued cleared slices."""
        conn = self._by_path.get(path)
        if conn is None:
            return
        if token is None:
            conn.small.append(pack(DATA, frame, len(view)))
            if len(view):
                conn.small.append(view)
            self._events.append(Sent(path, frame.channel, frame.seq))
        else:
            (conn.replays if is_replay else conn.bulk).append(QueuedSlice(frame, view))
        self._mark(conn)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Queue a clear-to-send frame that announces `region` for slice ``frame.seq``."""
        conn = self._by_path.get(path)
        if conn is None:
            return
        conn.ask(frame, region, ack)
        self._mark(conn)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Queue a frame that confirms the peer's slices of `channel` numbered below `ack`."""
        conn = self._by_path.get(path)
        if conn is None:
            return
        conn.small.append(_pack_confirmation(channel, ack))
        self._mark(conn)

    def flush(self) -> None:
        """Write queued frames, as far as the sockets accept them now."""
        if self._dirty:
            dirty, self._dirty = self._dirty, []
            for conn in dirty:
                conn.is_dirty = False
                if not conn.is_waiting and self._by_path.get(conn.path) is conn:
                    self._write(conn)

    def poll(self, timeout_s: float) -> list[Event]:
        """Read and write ready sockets and return events; wait up to `timeout_s` seconds for one.

        The list may be empty earlier: after `wake`, when a probe must be continued, or if the ready
        sockets gave no event.
        """
        if self._prober.is_busy:
            timeout_s = self._prober.limit_s(timeout_s)
        if self._unparsed:
            self._parse_rest()
            if self._events:
                # The events borrow the buffers, so return them before reading into the buffers.
                events, self._events = self._events, []
                return events
        for fd, mask in self._epoll.poll(0 if self._events else timeout_s):
            conn = self._by_fd.get(fd)
            if conn is None:
                if fd == self._wakeup.number:
                    self._wakeup.clear()
                else:
                    self._prober.on_ready(fd)
                continue
            if mask & (_IN | _BROKEN):
                self._read(conn)
            if mask & _OUT and self._by_path.get(conn.path) is conn:
                self._write(conn)
        if self._prober.is_busy:
            self._events += self._prober.advance()
        events, self._events = self._events, []
        return events

    # Connections that compiled code uses, see `r2ccl.runtime.compiled`

    @property
    def wakeup_number(self) -> int:
        """Descriptor that is readable after `wake`."""
        return self._wakeup.number

    @property
    def has_events(self) -> bool:
        """True if events are waiting for `poll`."""
        return bool(self._events)

    def lend(self, paths: Sequence[PathKey]) -> list[Connection] | None:
        """Lend the connections of `paths` to compiled code, which reads and writes their sockets.

        The borrower may change the fields of the connections. Until `take_back` has been called for
        each connection, the only other methods of the transport that may be called are `wake`,
        `memory_use`, `has_unsent`, `has_other_events`, and `lend` for further paths.

        Returns
        -------
        list of Connection or None
            In the order of `paths`. None (nothing is lent) if events are waiting for `poll`, or if
            one of the paths is not open, has announced landing places, has queued data, or has read
            only a part of a cleared slice.
        """
        if self._events:
            return None
        conns = []
        for path in paths:
            conn = self._by_path.get(path)
            if conn is None or conn.places or conn.sending or conn.small or conn.is_waiting:
                return None
            if conn.bulk or conn.replays or conn.target is not None:
                return None
            conns.append(conn)
        if self._unparsed:
            self._unparsed.difference_update(conns)
        return conns

    def take_back(self, conn: Connection, error: int | None = None) -> None:
        """End the loan of `conn`, whose fields must describe its partly read and written frames.

        `error` is the errno of the borrower's failed system call, or 0 if the peer closed the
        connection; in both cases the path fails. None means that there was no error.
        """
        if error is not None:
            status = errno_name(OSError(error, "")) if error else "EOF"
            detail = os.strerror(error) if error else "the peer closed the connection"
            self._fail(conn, status, detail)
            return
        if conn.filled - conn.parsed >= HEADER_NBYTES:
            self._unparsed.add(conn)
        if conn.sending or conn.small or conn.bulk or conn.replays:
            self._mark(conn)

    def has_other_events(self, lent: Collection[Connection]) -> bool:
        """Return True if `poll` must be called for a reason other than the connections `lent`.

        Such a reason is a probe that is in flight or not yet reported, or a connection that is not
        lent and has either a ready socket or unparsed frames. The borrower must give back all
        connections before it calls `poll`. A `wake` before this call does not make a later `poll`
        return.
        """
        fds = [conn.fd for conn in lent]
        ready = [fd for fd, _ in self._epoll.poll(0)]
        if self._wakeup.number in ready:
            self._wakeup.clear()
        is_other = any(fd not in fds and fd != self._wakeup.number for fd in ready)
        return is_other or self._prober.is_busy or not self._unparsed.issubset(lent)

    def _parse_rest(self) -> None:
        """Parse the frames in the connections' buffers that a borrower read but did not parse."""
        unparsed, self._unparsed = self._unparsed, set()
        for conn in unparsed:
            if self._by_path.get(conn.path) is conn:
                self._parse_all(conn)

    def limit_s(self, timeout_s: float) -> float:
        """Return the time until `poll` must be called, at most `timeout_s`, in seconds."""
        return self._prober.limit_s(timeout_s)

    def fileno(self) -> int:
        """Return the descriptor of epoll: readable while a socket is ready, and after `wake`."""
        return self._epoll.fileno()

    def arm(self) -> None:
        """Do nothing: epoll keeps `fileno` readable while a socket is ready."""

    def wake(self) -> None:
        """Make a waiting `poll` return; any thread may call this."""
        self._wakeup.wake()

    def fence(self, path: PathKey) -> None:
        """Close the socket of `path`; `poll` reports `Fenced` even if the path was not open.

        If a slice was confirmed before all of it was read, the rest is read first.

        Raises
        ------
        InternalError
            If the kernel lost bytes that it had reported as received.
        """
        self._discard(path)
        self._events.append(Fenced(path))

    def memory_use(self) -> MemoryUse:
        """Return zeros: the transport has no message rings, and registers no memory."""
        return MemoryUse()

    def has_unsent(self) -> bool:
        """Return True if data waits because a socket buffer is full."""
        return bool(self._waiting)

    def is_stuck(self, path: PathKey) -> bool:
        """Return True if the kernel has retransmitted unacknowledged data at least twice in a row.

        This is evidence against the path, not the peer: the kernel of a stopped peer still
        acknowledges.
        """
        conn = self._by_path.get(path)
        if conn is None:
            return False
        info = conn.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        retransmits = info[2]
        unacked = struct.unpack_from("I", info, 24)[0]
        return bool(unacked and retransmits >= 2)

    def probe(self, key: ProbeKey) -> None:
        """Start a probe of a port by connects on separate sockets, see `TcpProber`."""
        self._prober.probe(key)

    def descriptors(self) -> list[int]:
        """Return the descriptors of epoll, wakeup, paths and probes; empty after `close`."""
        if self._epoll.closed:
            return []
        own = (self._epoll.fileno(), self._wakeup.number)
        return [*own, *self._by_fd, *self._prober.descriptors()]

    def close(self) -> None:
        """Close every socket. Idempotent.

        If an error occurs for one socket, the others are still closed.

        Raises
        ------
        InternalError
            If the kernel lost bytes that it had reported as received.
        """
        with ExitStack() as steps:  # callbacks run last to first
            steps.callback(self._close_descriptors)
            for path in self._by_path:
                steps.callback(self._discard, path)
            steps.callback(self._prober.close)

    def _close_descriptors(self) -> None:
        # Both are idempotent: a close that Ctrl-C interrupted between them is repeated.
        self._epoll.close()
        self._wakeup.close()

    def _tune(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lowat, congestion = _NOTSENT_LOWAT, _CONGESTION
        if _is_loopback(sock):
            lowat, congestion = _LOOPBACK_NOTSENT_LOWAT, _LOOPBACK_CONGESTION
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER_NBYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER_NBYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, lowat)
        if self._congestion != "auto":
            congestion = self._congestion
        if congestion:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
            except OSError as exc:
                self._log_unset(congestion, exc)

    def _log_unset(self, congestion: str, exc: OSError) -> None:
        """Log once that `congestion` cannot be set; as a warning if the user has chosen it."""
        if congestion in self._unset:
            return
        self._unset.add(congestion)
        _log.log(
            logging.INFO if self._congestion == "auto" else logging.WARNING,
            "rank %d: TCP congestion control %s cannot be set (%s), so the default of the system "
            "is used: load or allow it in the kernel, or set another R2CC_TCP_CONGESTION",
            self._rank, congestion, exc,
        )  # fmt: skip

    def _mark(self, conn: Connection) -> None:
        if not conn.is_dirty:
            conn.is_dirty = True
            self._dirty.append(conn)

    def _discard(self, path: PathKey) -> None:
        conn = self._by_path.get(path)
        if conn is None:
            return
        self._waiting.discard(conn)
        self._unparsed.discard(conn)
        try:
            # The socket is closed already if Ctrl-C interrupted an earlier call.
            if conn.sock.fileno() >= 0:
                self._unwatch(conn)
                self._read_confirmed(conn)
        finally:
            conn.sock.close()
            self._by_fd.pop(conn.fd, None)
            del self._by_path[path]

    def _unwatch(self, conn: Connection) -> None:
        # The kernel may have removed the descriptor from the set already.
        with contextlib.suppress(FileNotFoundError):
            if not self._epoll.closed:
                self._epoll.unregister(conn.fd)

    def _read_confirmed(self, conn: Connection) -> None:
        """Read the rest of a slice that has been confirmed already.

        Raises
        ------
        InternalError
            If the socket does not have the rest.
        """
        if conn.place is None or not conn.place.is_confirmed:
            return
        while conn.target is not None:
            try:
                n = conn.sock.recv_into(conn.target)
            except OSError as exc:
                raise self._lost(conn) from exc
            if n == 0:
                raise self._lost(conn)
            conn.target = conn.target[n:]
            if not conn.target:
                self._landed(conn)

    def _lost(self, conn: Connection) -> InternalError:
        path = conn.path
        return InternalError(
            f"rank {self._rank}: the kernel lost bytes of a slice from rank {path.peer} on "
            f"{rail_name(path.rail)} that it had reported as received (FIONREAD)"
        )

    def _fail(self, conn: Connection, status: str, detail: str) -> None:
        self._discard(conn.path)
        self._events.append(Failed(conn.path, status, detail))

    def _fail_os(self, conn: Connection, exc: OSError) -> None:
        self._fail(conn, errno_name(exc), str(exc))

    # Reading

    def _read(self, conn: Connection) -> None:
        try:
            while conn.target is not None:
                if not self._read_landing(conn):
                    return
            self._read_buffer(conn)
        except BlockingIOError:
            return
        except OSError as exc:
            self._fail_os(conn, exc)

    def _read_landing(self, conn: Connection) -> bool:
        """Read into the landing place; return False if the socket is empty or the path failed."""
        target, place = conn.target, conn.place
        assert target is not None
        assert place is not None
        if place.ack and not place.rest and not self._confirm_early(conn, place, len(target)):
            return False
        n = conn.sock.recv_into(target[:_CALL_NBYTES])
        if n == 0:
            self._fail(conn, "EOF", "the peer closed the connection inside a slice")
            return False
        if n < len(target):
            conn.target = target[n:]
            return n == _CALL_NBYTES
        self._landed(conn)
        return True

    def _landed(self, conn: Connection) -> None:
        """Handle the end of a fragment; after the last one, report the slice as arrived."""
        frame, place = conn.frame, conn.place
        assert frame is not None
        assert place is not None
        conn.target = None
        if not place.rest:
            conn.place = None  # it refers to the memory of the receiver
            del conn.places[frame.channel, frame.seq]
            self._events.append(Arrived(conn.path, frame, None, place.began_s, place.is_confirmed))

    def _confirm_early(self, conn: Connection, place: NamedPlace, missing: int) -> bool:
        """Confirm the current slice if the local kernel already holds all its missing bytes.

        The sender then need not wait until the bytes are copied to the landing place. They cannot
        be lost: `_discard` reads them before it closes the socket, even after a reset by the peer.

        Returns
        -------
        bool
            False if the path failed while the confirmation was sent.
        """
        fcntl.ioctl(conn.fd, termios.FIONREAD, self._unread)
        if self._unread[0] >= missing:
            assert conn.frame is not None
            conn.small.append(_pack_confirmation(conn.frame.channel, place.ack))
            place.ack = 0
            place.is_confirmed = True
            if not conn.is_waiting:
                self._write(conn)
        return self._by_path.get(conn.path) is conn

    def _read_buffer(self, conn: Connection) -> None:
        """Receive into the buffer once and parse it; events of eager slices borrow its memory."""
        if conn.parsed:
            rest = conn.filled - conn.parsed
            if rest:
                conn.buffer[:rest] = bytes(conn.buffer[conn.parsed : conn.filled])
            conn.parsed, conn.filled = 0, rest
        end = conn.filled + _PEEK_NBYTES if conn.places else len(conn.buffer)
        n = conn.sock.recv_into(conn.buffer[conn.filled : end])
        if n == 0:
            self._fail(conn, "EOF", "the peer closed the connection")
            return
        conn.filled += n
        self._parse_all(conn)

    def _parse_all(self, conn: Connection) -> None:
        while conn.filled - conn.parsed >= HEADER_NBYTES and conn.target is None:
            if not self._parse(conn):
                break

    def _parse(self, conn: Connection) -> bool:
        """Parse one frame of the buffer, whose header is complete.

        If a fragment of a cleared slice is incomplete, set ``conn.target`` to the part of the
        landing place that is still missing. Return False if an eager slice is incomplete or the
        frame is malformed.
        """
        start = conn.parsed + HEADER_NBYTES
        kind, channel, nbytes, seq, ack, op, signature = HEADER.unpack_from(
            conn.buffer, conn.parsed
        )
        if kind == CONFIRM:
            self._events.append(Confirmed(conn.path, channel, ack))
            conn.parsed = start
            return True
        frame = Frame(channel, seq, ack, op, signature)
        if kind == CLEAR:
            self._events.append(Cleared(conn.path, frame, nbytes, True))
            conn.parsed = start
            return True
        if kind != DATA:
            self._fail(conn, "EBADMSG", f"frame of unknown kind {kind}")
            return False
        place = conn.places.get((channel, seq))
        if place is not None:
            return self._begin_fragment(conn, frame, place, start, nbytes)
        if nbytes > self._eager_nbytes:
            self._fail(conn, "EBADMSG", f"slice of {nbytes} bytes has no landing place")
            return False
        if conn.filled - start < nbytes:
            return False
        conn.parsed = start + nbytes
        payload = conn.buffer[start : conn.parsed]
        self._events.append(Arrived(conn.path, frame, payload, self._clock()))
        return True

    def _begin_fragment(
        self, conn: Connection, frame: Frame, place: NamedPlace, start: int, nbytes: int
    ) -> bool:
        if nbytes > len(place.rest):
            self._fail(
                conn,
                "EBADMSG",
                f"fragment of {nbytes} bytes, but only {len(place.rest)} bytes are missing",
            )
            return False
        target, place.rest = place.rest[:nbytes], place.rest[nbytes:]
        place.began_s = place.began_s or self._clock()
        here = min(conn.filled - start, nbytes)
        target[:here] = conn.buffer[start : start + here]
        conn.parsed = start + here
        conn.frame = frame
        conn.place = place
        if here == nbytes:
            self._landed(conn)
        else:
            conn.target = target[here:]
        return True

    # Writing

    def _write(self, conn: Connection) -> None:
        try:
            while self._next_frame(conn):
                if not self._write_some(conn):
                    self._wait_writable(conn, True)
                    return
            self._wait_writable(conn, False)
        except BlockingIOError:
            self._wait_writable(conn, True)
        except OSError as exc:
            self._fail_os(conn, exc)

    def _wait_writable(self, conn: Connection, is_waiting: bool) -> None:
        if conn.is_waiting != is_waiting:
            conn.is_waiting = is_waiting
            if is_waiting:
                self._waiting.add(conn)
            else:
                self._waiting.discard(conn)
            self._epoll.modify(conn.fd, _IN | _OUT if is_waiting else _IN)

    def _next_frame(self, conn: Connection) -> bool:
        """Fill ``sending``, if empty, from the send queues; return False if these are empty too."""
        if conn.sending:
            return True
        if conn.small:
            conn.sending, conn.small = conn.small, conn.sending
            return True
        queue = conn.replays or conn.bulk
        if queue:
            item = queue[0]
            fragment = item.rest[: conn.fragment_nbytes]
            item.rest = item.rest[len(fragment) :]
            if not item.rest:
                queue.popleft()
                conn.sent = item.frame
            conn.sending.append(pack(DATA, item.frame, len(fragment)))
            conn.sending.append(fragment)
            return True
        return False

    def _write_some(self, conn: Connection) -> bool:
        """Offer up to `_CALL_NBYTES` bytes of ``sending`` to the socket, in one system call.

        Return False if the socket accepted only a part of the offered bytes. Raise BlockingIOError
        if it accepted none. If the connection is broken, raise another OSError; SIGPIPE, which
        could end the user's process, is suppressed.
        """
        sending = conn.sending
        if len(sending) == 1:
            given = sending[0][:_CALL_NBYTES]
            asked = len(given)
            n = conn.sock.send(given, socket.MSG_NOSIGNAL)
        else:
            parts = []
            asked = 0
            for part in sending:
                room = _CALL_NBYTES - asked
                parts.append(part if len(part) <= room else memoryview(part)[:room])
                asked += len(parts[-1])
                if asked >= _CALL_NBYTES or len(parts) == 64:
                    break
            n = conn.sock.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        left = n
        while sending and left >= len(sending[0]):
            left -= len(sending.popleft())
        if left:
            sending[0] = memoryview(sending[0])[left:]
        if not sending and conn.sent is not None:
            self._events.append(Sent(conn.path, conn.sent.channel, conn.sent.seq))
            conn.sent = None
        return n == asked


def _is_loopback(sock: socket.socket) -> bool:
    return _is_loopback_address(sock.getsockname()[0])


@functools.lru_cache(maxsize=64)  # a rank has few addresses, and parsing one takes 15 us
def _is_loopback_address(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _pack_confirmation(channel: int, ack: int) -> bytes:
    return HEADER.pack(CONFIRM, channel, 0, 0, ack, 0, 0)


__all__ = ["TcpTransport"]
