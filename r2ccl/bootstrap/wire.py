"""TCP in an asyncio loop: sockets, port probes and length-prefixed messages."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable

from r2ccl.bootstrap.readers import ReadLoop

Address = tuple[str, int]

#: Default time limit of a handshake in seconds, after which the acceptor closes the connection.
#: `r2ccl.bootstrap.dialing.dial` waits at least as long for a busy acceptor.
HANDSHAKE_TIMEOUT_S = 5.0
#: Backlog of listening sockets: connections that the kernel completes before they are accepted.
BACKLOG = 1024
#: Length prefix of `send_message`: number of bytes that follow it.
_LENGTH = struct.Struct("!I")
#: Maximum size of a message, enough for a `Table` of about 200,000 ranks, or a `Ready` of 50,000.
_MAX_MESSAGE_NBYTES = 16 << 20
_CLOSED = "the other side closed the connection"
#: Bytes that a `MessageReader` reads at once: more than a `Hello`, or the `Ready` of a few ranks.
_READ_NBYTES = 16 << 10


async def reach(target: Address, source: str = "") -> socket.socket:
    """Connect to the numeric address `target`, without authentication; return the socket.

    The local address is `source`; if it is empty, the kernel chooses one.

    Raises
    ------
    OSError
        If the connection fails.
    """
    sock = open_socket(target[0], source)
    try:
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


def open_socket(target_host: str, source: str = "") -> socket.socket:
    """Return a non-blocking TCP socket: IPv6 if `target_host` is an IPv6 address, else IPv4.

    The socket is bound to the address `source` unless `source` is empty.

    Raises
    ------
    OSError
        If the process can open no more files, `source` is not an address of this host, or no port
        is free.
    """
    family = socket.AF_INET6 if ":" in target_host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source:
            sock.bind((source, 0))
    except BaseException:
        sock.close()
        raise
    return sock


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on `host`; port 0 takes any free port.

    `host` is a numeric address or, for IPv4, a name; this call blocks while the name is resolved.

    Raises
    ------
    OSError
        If the process can open no more files, `host` is not an address of this host or cannot be
        resolved, or the port is in use or needs privileges.
    """
    sock = open_socket(host)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except TypeError as exc:  # of a name that cannot be encoded
            raise OSError(f"the name is malformed: {exc}") from exc
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def address_of(sock: socket.socket) -> Address:
    """Return the numeric local address and the port of `sock`."""
    host, port = sock.getsockname()[:2]
    return (str(host), int(port))


def local_host(sock: socket.socket) -> str:
    """Return the numeric local address of `sock`; an IPv4-mapped IPv6 address is returned as IPv4.

    A socket that listens at all IPv6 addresses also accepts IPv4 connections. Their local addresses
    are IPv4-mapped, such as ``::ffff:10.0.0.1``.
    """
    host = address_of(sock)[0]
    return host.removeprefix("::ffff:") if "." in host else host


def reserve_port(host: str) -> socket.socket:
    """Return a socket that reserves a port at the numeric address `host` without listening.

    The kernel refuses connections to the port. The refusal answers a probe, even if strangers have
    filled the backlog of this rank's listeners.

    Raises
    ------
    OSError
        If the process can open no more files, `host` is not an address of this host, or no port is
        free.
    """
    sock = open_socket(host)
    try:
        sock.bind((host, 0))
    except BaseException:
        sock.close()
        raise
    return sock


async def resolve(host: str, port: int) -> tuple[str, ...]:
    """Return the numeric addresses of `host`, which may be numeric already, best first.

    Raises
    ------
    OSError
        If `host` has no address, or cannot be resolved.
    UnicodeError
        If `host` is malformed.
    """
    with contextlib.suppress(ValueError):
        return (str(ipaddress.ip_address(host)),)  # needs no resolver thread
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def frame(body: bytes) -> bytes:
    """Return `body`, prefixed with its length, as `send_message` sends it."""
    return _LENGTH.pack(len(body)) + body


async def send_message(sock: socket.socket, body: bytes) -> None:
    """Send `body`, prefixed with its length.

    Raises
    ------
    OSError
        If the connection fails.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, frame(body))


async def send_messages(messages: Iterable[tuple[socket.socket, bytes]]) -> None:
    """Send each body, prefixed with its length, over its socket; ignore sockets that fail."""
    loop = asyncio.get_running_loop()
    rests = []
    for sock, body in messages:
        packet = memoryview(frame(body))
        # Make a coroutine only if the socket's buffer is too small: there are n - 1 sockets.
        with contextlib.suppress(OSError):
            if (nsent := _send_some(sock, packet)) < len(packet):
                rests.append(loop.sock_sendall(sock, packet[nsent:]))
    await asyncio.gather(*rests, return_exceptions=True)


def _send_some(sock: socket.socket, data: memoryview) -> int:
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0


async def receive_message(sock: socket.socket) -> bytes:
    """Receive a message that `send_message` sent.

    Raises
    ------
    ConnectionError
        If the stream ends or is reset, or the message is longer than 16 MiB.
    OSError
        If the connection fails otherwise.
    """
    nbytes = _unpack_length(await _receive_exactly(sock, _LENGTH.size))
    return await _receive_exactly(sock, nbytes)


async def _receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < nbytes:
        piece = await loop.sock_recv(sock, nbytes - len(data))
        if not piece:
            raise ConnectionResetError(_CLOSED)
        data += piece
    return data


def _unpack_length(prefix: bytes | bytearray) -> int:
    (nbytes,) = _LENGTH.unpack_from(prefix)
    if nbytes > _MAX_MESSAGE_NBYTES:
        raise ConnectionAbortedError(
            f"the peer announced a message of {nbytes} bytes; at most 16 MiB are allowed"
        )
    return int(nbytes)


class MessageReader:
    """Receiver of messages by callbacks, which cost less than a waiting task per connection.

    Parameters
    ----------
    sock : socket.socket
        Borrowed until `stop`.
    on_message : callable
        Called with the body of each message.
    on_end : callable
        Called with an OSError if the stream ends or fails, or a message is longer than 16 MiB; at
        most once, as the last call, and not after `stop`.
    readers : ReadLoop, optional
        Watches the socket; by default the running loop.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[bytes], None],
        on_end: Callable[[OSError], None],
        readers: ReadLoop | None = None,
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._is_stopped = False
        self._readers: ReadLoop = readers or asyncio.get_running_loop()
        self._readers.add_reader(sock.fileno(), self.read)

    def stop(self) -> None:
        """Stop receiving; must be called before the socket is closed. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self._readers.remove_reader(self._sock.fileno())

    def read(self) -> None:
        """Receive up to `_READ_NBYTES` that have arrived, and pass on the complete messages.

        The loop calls this method whenever the socket is readable.
        """
        try:
            piece = self._sock.recv(_READ_NBYTES)
            if not piece:
                raise ConnectionResetError(_CLOSED)
            self._received += piece
            self._deliver()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self.stop()
            self._on_end(exc)

    def _deliver(self) -> None:
        while len(self._received) >= _LENGTH.size and not self._is_stopped:
            end = _LENGTH.size + _unpack_length(self._received)
            if len(self._received) < end:
                return
            body = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            self._on_message(body)


def limit_silence(sock: socket.socket, timeout_s: float) -> None:
    """Make the kernel close a connection whose remote kernel is silent for `timeout_s` seconds.

    On an idle connection the kernel sends a keepalive every second, which the remote kernel answers
    even if its process is stopped. If the remote process does not read for `timeout_s` while its
    receive buffer is full, the connection is closed, too.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1e3))


def close_hard(sock: socket.socket) -> None:
    """Close a connection with a reset, so that neither side keeps its state (TIME_WAIT)."""
    with contextlib.suppress(OSError):  # not connected: no linger needed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def probe_port(target: Address, *, source: str = "", timeout_s: float) -> None:
    """Check that a process listens at `target`: connect and close at once.

    Raises
    ------
    ConnectionRefusedError
        If the host answers, but no process listens.
    OSError
        If the connection fails otherwise, or takes longer than `timeout_s` seconds (TimeoutError).
    """
    async with asyncio.timeout(timeout_s):
        sock = await reach(target, source)
    close_hard(sock)


__all__ = [
    "BACKLOG",
    "HANDSHAKE_TIMEOUT_S",
    "Address",
    "MessageReader",
    "address_of",
    "close_hard",
    "frame",
    "limit_silence",
    "listen",
    "local_host",
    "open_socket",
    "probe_port",
    "reach",
    "receive_message",
    "reserve_port",
    "resolve",
    "send_message",
    "send_messages",
]
