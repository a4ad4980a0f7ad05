"""TCP in an asyncio loop: listen, dial and prove, probe a port; exact reads and framed messages.

Carries the dialing side of `r2ccl.bootstrap.auth` (`r2ccl.bootstrap.listener` has the other) and
nothing above it. Invariant: a socket that `dial` returns belongs to someone who proved the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct

from r2ccl.bootstrap.auth import (
    ANSWER_NBYTES,
    NONCE_NBYTES,
    OPENING_NBYTES,
    Claim,
    Dialer,
    HandshakeRejected,
    Secret,
)
from r2ccl.errors import decode_errno, exhaustion_advice

Address = tuple[str, int]

#: A connection that has not proved itself by then is closed.
HANDSHAKE_TIMEOUT_S = 5.0
#: Connections the kernel completes for a process that is stopped.
BACKLOG = 1024
#: Length in front of a message of `send_message`; the bound is a table of about 50,000 ranks.
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_NBYTES = 16 << 20


class Visitor(Exception):
    """The other side closed without sending a byte."""


async def dial(
    secret: Secret,
    claim: Claim,
    target: Address,
    *,
    source: str = "",
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> socket.socket:
    """Connect to `target` (numeric) from local address `source` and prove `claim`.

    Returns
    -------
    socket.socket
        Non-blocking, TCP_NODELAY, nothing read beyond the handshake.

    Raises
    ------
    OSError
        The connection failed (``ConnectionRefusedError`` only while connecting).
    TimeoutError
        Not done within `timeout_s`.
    HandshakeRejected
        The other side does not know the secret, or does not want this connection now.
    """
    async with asyncio.timeout(timeout_s):
        sock = await reach(target, source)
        await prove(sock, secret, claim)
    return sock


def explain_failure(
    exc: OSError | HandshakeRejected, target: Address, timeout_s: float
) -> tuple[str, str]:
    """Say why a dial of `target` failed, and what to do about it; the latter may be empty.

    Parameters
    ----------
    exc : OSError or HandshakeRejected
        Raised by `dial`.
    target : Address
    timeout_s : float
        As `dial` was given it.
    """
    where = f"{target[0]}:{target[1]}"
    if isinstance(exc, HandshakeRejected):
        return f"{where} turned this rank away ({exc.reason})", "see the log of the rank there"
    if isinstance(exc, TimeoutError) and exc.errno is None:
        return f"{where} gave no answer within {timeout_s:g} s", "look for a filter or a lost route"
    code = exc.errno or 0
    return f"{where}: {decode_errno(code) if code else exc}", exhaustion_advice(code)


def describe_failure(exc: OSError | HandshakeRejected, target: Address, timeout_s: float) -> str:
    """Say in one text what `explain_failure` says."""
    return "; ".join(filter(None, explain_failure(exc, target, timeout_s)))


async def reach(target: Address, source: str = "") -> socket.socket:
    """Connect to `target` (numeric) from local address `source`, and prove nothing yet.

    Raises
    ------
    OSError
        The connection failed.
    """
    sock = open_socket(target[0], source)
    try:
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def prove(sock: socket.socket, secret: Secret, claim: Claim) -> None:
    """Prove `claim` to whoever is at the far end of `sock`, which is closed if that fails.

    Raises
    ------
    OSError
        The connection broke.
    HandshakeRejected
        As `dial`.
    """
    try:
        await _shake_hands(sock, Dialer(secret, claim, os.urandom(NONCE_NBYTES)))
    except BaseException:
        sock.close()
        raise


async def _shake_hands(sock: socket.socket, dialer: Dialer) -> None:
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, dialer.opening())
        proof = dialer.prove(await receive_exactly(sock, OPENING_NBYTES))
        await loop.sock_sendall(sock, proof)
        dialer.confirm(await receive_exactly(sock, ANSWER_NBYTES))
    except (Visitor, ConnectionError) as exc:
        raise HandshakeRejected("closed during the handshake") from exc


def open_socket(target_host: str, source: str = "") -> socket.socket:
    """Make a non-blocking TCP socket for `target_host`, bound to `source` unless empty."""
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
    """Listen on a numeric `host`; port 0: any free one."""
    sock = open_socket(host)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def reserve_port(host: str) -> socket.socket:
    """Take a port of a numeric `host` on which nobody listens, so that its kernel refuses.

    That is an answer too, and one that needs no room in a listener's queue, which strangers may
    have filled.
    """
    sock = open_socket(host)
    try:
        sock.bind((host, 0))
    except BaseException:
        sock.close()
        raise
    return sock


async def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Read `nbytes`.

    Raises
    ------
    Visitor
        The stream ended, or was reset, before the first byte.
    ConnectionError
        It ended after some.
    """
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < nbytes:
        try:
            piece = await loop.sock_recv(sock, nbytes - len(data))
        except ConnectionResetError:
            piece = b""
        if not piece:
            if not data:
                raise Visitor
            raise ConnectionResetError(f"the stream ended after {len(data)} of {nbytes} bytes")
        data += piece
    return bytes(data)


async def resolve(host: str, port: int) -> str:
    """Return the first numeric address of `host`.

    Raises
    ------
    OSError
        It has none.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))  # no resolver, and no thread for it
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


async def send_message(sock: socket.socket, body: bytes) -> None:
    """Send `body` behind its length."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, _LENGTH.pack(len(body)) + body)


async def receive_message(sock: socket.socket) -> bytes:
    """Receive what `send_message` sent.

    Raises
    ------
    ConnectionError
        The stream ended, or the length is above 16 MiB.
    """
    try:
        (nbytes,) = _LENGTH.unpack(await receive_exactly(sock, _LENGTH.size))
        if nbytes > _MAX_MESSAGE_NBYTES:
            raise ConnectionAbortedError(f"a message of {nbytes} bytes was announced")
        return await receive_exactly(sock, nbytes)
    except Visitor:
        raise ConnectionResetError("the other side closed the connection") from None


def limit_silence(sock: socket.socket, timeout_s: float) -> None:
    """Have the kernel end a connection whose far kernel says nothing for about `timeout_s`.

    Asked every second while nothing is under way, it answers whatever its process does; a process
    that reads nothing for that long, with its window full, ends the connection too.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1e3))


def close_hard(sock: socket.socket) -> None:
    """Close with a reset, so that neither side keeps the connection's state (TIME_WAIT)."""
    with contextlib.suppress(OSError):  # no connection, hence nothing to linger
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def probe_port(target: Address, *, source: str = "", timeout_s: float) -> None:
    """Ask the kernel at `target` whether anyone listens there, and hang up.

    Raises
    ------
    ConnectionRefusedError
        The host answers, nobody listens.
    OSError
        No answer within `timeout_s` (TimeoutError), or no route.
    """
    async with asyncio.timeout(timeout_s):
        sock = await reach(target, source)
    close_hard(sock)


__all__ = [
    "BACKLOG",
    "HANDSHAKE_TIMEOUT_S",
    "Address",
    "Visitor",
    "close_hard",
    "describe_failure",
    "dial",
    "explain_failure",
    "limit_silence",
    "listen",
    "open_socket",
    "probe_port",
    "prove",
    "reach",
    "receive_exactly",
    "receive_message",
    "reserve_port",
    "resolve",
    "send_message",
]
