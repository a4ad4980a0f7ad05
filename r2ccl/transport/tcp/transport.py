"""TCP transport: one non-blocking socket a path, one epoll a process, zero-copy both ways.

Wire format: a stream of frames, each a fixed header (`_HEADER`, 40 bytes, little endian) and, for
DATA, its payload. A cleared slice is written from the caller's view and read straight into the
landing place, in fragments that follow one another in its place; an eager one passes through the
connection's buffer. Small frames (clear-to-send, confirmations, eager slices) and replays overtake
queued slices at fragment boundaries, so neither waits behind bulk data.

The socket arrives connected and authenticated (`r2ccl.bootstrap`); nothing else is ever read here,
and a frame that makes no sense breaks the path instead of being guessed at. Only this file and
bootstrap see sockets and errno.

Invariants: what is unsent in the kernel is bounded (TCP_NOTSENT_LOWAT), so a replay reaches the
wire at once; a landing place is written by this process alone, so closing the socket is a fence.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import select
import socket
import struct
import termios
from array import array
from collections import deque
from collections.abc import Mapping

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
    Sent,
)
from r2ccl.transport.preconnected import PreconnectedTransport
from r2ccl.transport.tcp.probe import Address, TcpProber
from r2ccl.transport.wakeup import Wakeup
from r2ccl.types import Nic, PathKey, ProbeKey

_log = logging.getLogger(__name__)

#: kind, flags, channel, nbytes, seq, ack, op, signature
_HEADER = struct.Struct("<BBHIQQQQ")
_HEADER_NBYTES = _HEADER.size
_DATA, _CLEAR, _CONFIRM = 1, 2, 3

#: Bytes a socket may hold unsent in the kernel: measured, a replay reaches the wire in 8 ms
#: instead of 24 to 57 with the default (4 x 200 Mbit/s rails).
_NOTSENT_LOWAT = 64 << 10
#: On loopback nothing waits for a line: more unsent bytes mean fewer wake-ups. Socket buffers are
#: large enough to keep two cores apart and small enough to stay in the cache (measured, 64 MiB:
#: 512 KiB, 1 MiB, left to grow: 33, 26, 33 ms for 2 ranks; 93, 86, 99 for 4 on 2 cores).
_LOOPBACK_NOTSENT_LOWAT = 256 << 10
_LOOPBACK_BUFFER_NBYTES = 1 << 20
#: What ``auto`` asks for. Reno fills a lossless loopback at once (64 MiB, 4 ranks: 88 ms, cubic
#: 105); on shaped rails cubic keeps 96 to 99 % of the line, where BBR gets 80 to 94 %.
_LOOPBACK_CONGESTION, _CONGESTION = "reno", "cubic"
#: Bytes given to one sendmsg or recv_into: large enough to amortise the call, small enough that
#: what the peer wrote is still in the cache when it is read.
_CALL_NBYTES = 256 << 10
#: Largest fragment of a cleared slice. On loopback there is no line rate to wait for, and a header
#: more is a header more; elsewhere a replay waits for at most one fragment.
_FRAGMENT_NBYTES = 64 << 10
_WHOLE = 1 << 62
#: Read this much while a header is expected and cleared slices are under way: what is read beyond
#: the header has to be copied once more.
_PEEK_NBYTES = 1024

_IN = select.EPOLLIN
_OUT = select.EPOLLOUT
_BROKEN = select.EPOLLERR | select.EPOLLHUP


class _Outgoing:
    """A cleared slice on its way out: what is left of it."""

    __slots__ = ("frame", "rest")

    def __init__(self, frame: Frame, view: memoryview) -> None:
        self.frame = frame
        self.rest = view


class _Place:
    """A landing place: what is still empty of it, and when its first byte came."""

    __slots__ = ("ack", "began_s", "is_confirmed", "rest")

    def __init__(self, region: memoryview, ack: int) -> None:
        self.rest = region
        self.began_s = 0.0
        #: What may be confirmed before the slice is read, 0: nothing; and whether it was.
        self.ack = ack
        self.is_confirmed = False


class _Connection:
    """One path's socket, with what is half read and half written."""

    __slots__ = (
        "buffer", "bulk", "fd", "filled", "fragment_nbytes", "frame", "is_dirty", "is_waiting",
        "parsed", "path", "place", "places", "replays", "sending", "sent", "small", "sock",
        "target",
    )  # fmt: skip

    def __init__(self, path: PathKey, sock: socket.socket, buffer_nbytes: int) -> None:
        self.fragment_nbytes = _WHOLE if _is_loopback(sock) else _FRAGMENT_NBYTES
        self.path = path
        self.sock = sock
        self.fd = sock.fileno()
        self.buffer = memoryview(bytearray(buffer_nbytes))
        #: Bytes ``parsed .. filled`` of the buffer are read but not understood yet.
        self.parsed = 0
        self.filled = 0
        #: Rest of the fragment being read, with its slice and landing place.
        self.target: memoryview | None = None
        self.frame: Frame | None = None
        self.place: _Place | None = None
        self.places: dict[tuple[int, int], _Place] = {}
        #: Whole frames that overtake, then cleared slices: those sent again go first.
        self.small: deque[bytes | memoryview] = deque()
        self.replays: deque[_Outgoing] = deque()
        self.bulk: deque[_Outgoing] = deque()
        #: Buffers of the frame being written.
        self.sending: deque[bytes | memoryview] = deque()
        #: The slice that is sent once ``sending`` is empty.
        self.sent: Frame | None = None
        self.is_waiting = False
        self.is_dirty = False


class TcpTransport(PreconnectedTransport):
    """`Transport` over TCP sockets.

    Parameters
    ----------
    rank : int
        This rank, for error messages.
    nrails : int
    eager_nbytes : int
        Largest eager payload accepted from a peer.
    congestion : str
        Congestion control asked for on each socket; ``auto``: what was measured best for loopback
        and for everything else; empty: the system's default.
    sources : mapping of int to Nic
        This rank's end of each rail, for probes.
    targets : mapping of PathKey to (str, int)
        Where probes of each path go: a port at its far end on which nobody listens.
    probe_timeout_s : float
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
        self._clock = clock
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.number, _IN)
        self._by_fd: dict[int, _Connection] = {}
        self._by_path: dict[PathKey, _Connection] = {}
        self._dirty: list[_Connection] = []
        #: Those whose sockets took no more.
        self._waiting: set[_Connection] = set()
        self._events: list[Event] = []
        self._prober = TcpProber(self._epoll, sources, targets, probe_timeout_s, clock, rank=rank)
        #: Where FIONREAD writes its answer.
        self._unread = array("i", [0])

    def open(self, path: PathKey, endpoint: socket.socket) -> None:
        """Take a connected, authenticated, non-blocking socket into use as `path`."""
        self._discard(path)
        self._tune(endpoint)
        conn = _Connection(path, endpoint, 2 * (_HEADER_NBYTES + self._eager_nbytes))
        self._by_path[path] = conn
        self._by_fd[conn.fd] = conn
        self._epoll.register(conn.fd, _IN)

    def is_open(self, path: PathKey) -> bool:
        """Whether `path` was opened and not yet failed or fenced."""
        return path in self._by_path

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Queue a slice; a replay goes ahead of the slices queued before it."""
        conn = self._by_path.get(path)
        if conn is None:
            return
        if token is None:
            conn.small.append(_pack(_DATA, frame, len(view)))
            if len(view):
                conn.small.append(view)
            self._events.append(Sent(path, frame.channel, frame.seq))
        else:
            (conn.replays if is_replay else conn.bulk).append(_Outgoing(frame, view))
        self._mark(conn)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Name where slice ``frame.seq`` lands."""
        conn = self._by_path.get(path)
        if conn is None:
            return
        conn.places[frame.channel, frame.seq] = _Place(region, ack)
        conn.small.append(_pack(_CLEAR, frame, len(region)))
        self._mark(conn)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Confirm the peer's slices of `channel` below `ack`."""
        conn = self._by_path.get(path)
        if conn is None:
            return
        conn.small.append(_pack_confirmation(channel, ack))
        self._mark(conn)

    def flush(self) -> None:
        """Write what is queued, as far as the sockets take it."""
        if self._dirty:
            dirty, self._dirty = self._dirty, []
            for conn in dirty:
                conn.is_dirty = False
                if not conn.is_waiting and conn.path in self._by_path:
                    self._write(conn)

    def poll(self, timeout_s: float) -> list[Event]:
        """Read and write what is ready; sleeps up to `timeout_s` if nothing is."""
        if self._prober.is_busy:
            timeout_s = self._prober.limit_s(timeout_s)
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
            if mask & _OUT and conn.path in self._by_path:
                self._write(conn)
        if self._prober.is_busy:
            self._events += self._prober.advance()
        events, self._events = self._events, []
        return events

    def limit_s(self, timeout_s: float) -> float:
        """See `Part.limit_s`: probes have deadlines."""
        return self._prober.limit_s(timeout_s)

    def fileno(self) -> int:
        """Descriptor of all the sockets' events."""
        return self._epoll.fileno()

    def arm(self) -> None:
        """Nothing to do: the descriptor is readable as long as a socket is."""

    def wake(self) -> None:
        """End a sleeping `poll`, from any thread."""
        self._wakeup.wake()

    def fence(self, path: PathKey) -> None:
        """Close the socket: nothing of it is read or written any more."""
        self._discard(path)
        self._events.append(Fenced(path))

    def has_unsent(self) -> bool:
        """See `Transport.has_unsent`."""
        return bool(self._waiting)

    def is_stuck(self, path: PathKey) -> bool:
        """Whether data is unacknowledged and the kernel already sent it again at least twice.

        TCP's evidence against the path, not the peer: a stopped peer's kernel still acknowledges.
        """
        conn = self._by_path.get(path)
        if conn is None:
            return False
        info = conn.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        retransmits = info[2]
        unacked = struct.unpack_from("I", info, 24)[0]
        return bool(unacked and retransmits >= 2)

    def probe(self, key: ProbeKey) -> None:
        """Begin to connect, on sockets of their own; see `Transport.probe`."""
        self._prober.probe(key)

    def descriptors(self) -> list[int]:
        """See `Transport.descriptors`."""
        if self._epoll.closed:
            return []
        own = (self._epoll.fileno(), self._wakeup.number)
        return [*own, *self._by_fd, *self._prober.descriptors()]

    def close(self) -> None:
        """Close every socket."""
        self._prober.close()
        for path in list(self._by_path):
            self._discard(path)
        if not self._epoll.closed:
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
                _log.info(
                    "rank %d: TCP congestion control %s cannot be set (%s); the system's is used: "
                    "load or allow it in the kernel, or choose another with R2CC_TCP_CONGESTION",
                    self._rank, congestion, exc,
                )  # fmt: skip

    def _mark(self, conn: _Connection) -> None:
        if not conn.is_dirty:
            conn.is_dirty = True
            self._dirty.append(conn)

    def _discard(self, path: PathKey) -> None:
        conn = self._by_path.pop(path, None)
        if conn is None:
            return
        del self._by_fd[conn.fd]
        self._waiting.discard(conn)
        # A descriptor the kernel has already dropped from the set is what is wanted here.
        with contextlib.suppress(FileNotFoundError):
            self._epoll.unregister(conn.fd)
        self._read_confirmed(conn)
        conn.sock.close()

    def _read_confirmed(self, conn: _Connection) -> None:
        """Read what is missing of a slice that was confirmed before it was read."""
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

    def _lost(self, conn: _Connection) -> InternalError:
        path = conn.path
        return InternalError(
            f"rank {self._rank}: the kernel no longer has bytes of a slice from rank {path.peer} "
            f"on rail {path.rail} that it had counted as received"
        )

    def _fail(self, conn: _Connection, status: str, detail: str) -> None:
        self._discard(conn.path)
        self._events.append(Failed(conn.path, status, detail))

    def _fail_os(self, conn: _Connection, exc: OSError) -> None:
        self._fail(conn, errno_name(exc), str(exc))

    # Reading

    def _read(self, conn: _Connection) -> None:
        try:
            while conn.target is not None:
                if not self._read_landing(conn):
                    return
            self._read_buffer(conn)
        except BlockingIOError:
            return
        except OSError as exc:
            self._fail_os(conn, exc)

    def _read_landing(self, conn: _Connection) -> bool:
        """Read on into the landing place; False when the socket is empty or broken."""
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

    def _landed(self, conn: _Connection) -> None:
        """A fragment is whole; with the last one, the slice is here."""
        frame, place = conn.frame, conn.place
        assert frame is not None
        assert place is not None
        conn.target = None
        if not place.rest:
            del conn.places[frame.channel, frame.seq]
            self._events.append(Arrived(conn.path, frame, None, place.began_s, place.is_confirmed))

    def _confirm_early(self, conn: _Connection, place: _Place, missing: int) -> bool:
        """Confirm the slice under way if this kernel holds all that is missing of it.

        Its sender then waits for no copying here. Nothing can take these bytes away any more:
        `_discard` reads them before it closes the socket, also one that was reset. Returns False
        if that has happened.
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

    def _read_buffer(self, conn: _Connection) -> None:
        """Read headers (and eager payloads) once; their events borrow the buffer."""
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
        while conn.filled - conn.parsed >= _HEADER_NBYTES and conn.target is None:
            if not self._parse(conn):
                break

    def _parse(self, conn: _Connection) -> bool:
        """Understand one frame of the buffer; False when it is not whole yet, or broken."""
        start = conn.parsed + _HEADER_NBYTES
        kind, _, channel, nbytes, seq, ack, op, signature = _HEADER.unpack_from(
            conn.buffer, conn.parsed
        )
        if kind == _CONFIRM:
            self._events.append(Confirmed(conn.path, channel, ack))
            conn.parsed = start
            return True
        frame = Frame(channel, seq, ack, op, signature)
        if kind == _CLEAR:
            self._events.append(Cleared(conn.path, frame, nbytes, True))
            conn.parsed = start
            return True
        if kind != _DATA:
            self._fail(conn, "EBADMSG", f"frame of unknown kind {kind}")
            return False
        place = conn.places.get((channel, seq))
        if place is not None:
            return self._begin_fragment(conn, frame, place, start, nbytes)
        if nbytes > self._eager_nbytes:
            self._fail(conn, "EBADMSG", f"slice of {nbytes} bytes without a landing place")
            return False
        if conn.filled - start < nbytes:
            return False
        conn.parsed = start + nbytes
        payload = conn.buffer[start : conn.parsed]
        self._events.append(Arrived(conn.path, frame, payload, self._clock()))
        return True

    def _begin_fragment(
        self, conn: _Connection, frame: Frame, place: _Place, start: int, nbytes: int
    ) -> bool:
        if nbytes > len(place.rest):
            self._fail(
                conn, "EBADMSG", f"fragment of {nbytes} bytes where {len(place.rest)} are missing"
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

    def _write(self, conn: _Connection) -> None:
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

    def _wait_writable(self, conn: _Connection, is_waiting: bool) -> None:
        if conn.is_waiting != is_waiting:
            conn.is_waiting = is_waiting
            if is_waiting:
                self._waiting.add(conn)
            else:
                self._waiting.discard(conn)
            self._epoll.modify(conn.fd, _IN | _OUT if is_waiting else _IN)

    def _next_frame(self, conn: _Connection) -> bool:
        """Have something in ``sending``: what is begun, small frames, then one fragment."""
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
            conn.sending.append(_pack(_DATA, item.frame, len(fragment)))
            conn.sending.append(fragment)
            return True
        return False

    def _write_some(self, conn: _Connection) -> bool:
        """One system call; False when the socket took less than it was given."""
        sending = conn.sending
        if len(sending) == 1:
            given = sending[0][:_CALL_NBYTES]
            asked = len(given)
            n = conn.sock.send(given)
        else:
            parts = []
            asked = 0
            for part in sending:
                room = _CALL_NBYTES - asked
                parts.append(part if len(part) <= room else memoryview(part)[:room])
                asked += len(parts[-1])
                if asked >= _CALL_NBYTES or len(parts) == 64:
                    break
            n = conn.sock.sendmsg(parts)
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
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def _pack_confirmation(channel: int, ack: int) -> bytes:
    return _HEADER.pack(_CONFIRM, 0, channel, 0, 0, ack, 0, 0)


def _pack(kind: int, frame: Frame, nbytes: int) -> bytes:
    return _HEADER.pack(
        kind, 0, frame.channel, nbytes, frame.seq, frame.ack, frame.op, frame.signature
    )


__all__ = ["TcpTransport"]
