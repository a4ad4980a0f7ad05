"""Dialing side of `r2ccl.bootstrap.auth`: connects TCP sockets and authenticates them.

Callbacks of the event loop make and authenticate a connection, and a coroutine only waits for the
result. Waking a task for each step would cost as much as the handshake itself, and the first call
that exchanges data with a rank waits for the connections to that rank. `r2ccl.bootstrap.listener`
runs the accepting side.

Invariant: the far end of a socket that `dial` returns has proved that it knows the secret.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from r2ccl.bootstrap import wire
from r2ccl.bootstrap.auth import (
    ANSWER_NBYTES,
    NONCE_NBYTES,
    OPENING_NBYTES,
    Claim,
    Dialer,
    HandshakeRejected,
    Secret,
)
from r2ccl.bootstrap.wire import HANDSHAKE_TIMEOUT_S, Address
from r2ccl.errors import decode_errno, exhaustion_advice

#: Function that returns the first bytes that a dialer sends over its connected socket. With the
#: proof, they must fit into the buffer of a new connection, which has at least 4 KiB.
FirstBytes = Callable[[socket.socket], bytes]


class HandshakeTimeout(TimeoutError):
    """Error: a connection was made, but not authenticated within ``limit_s`` seconds."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the connection was not authenticated within {limit_s:g} s")
        self.limit_s = limit_s


class _Dialing:
    """Connection that is being made and authenticated.

    Parameters
    ----------
    sock : socket.socket
        Non-blocking. Closed unless `wait` returns.
    dialer : Dialer
    limit_s : float
        Time limit in seconds for the handshake, including the time to connect.
    first_bytes : callable, optional
        As for `dial`.
    """

    def __init__(
        self,
        sock: socket.socket,
        dialer: Dialer,
        limit_s: float,
        first_bytes: FirstBytes | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._dialer = dialer
        self._limit_s = limit_s
        self._first_bytes = first_bytes
        self._has_proved = False
        #: Size in bytes of the acceptor's next message, and the part of it that has arrived.
        self._wanted, self._received = OPENING_NBYTES, b""
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[None] = self._loop.create_future()

    async def wait(self) -> socket.socket:
        """Return the socket once it is authenticated; for the errors see `dial`."""
        try:
            await self._end
        except BaseException:
            self._forget()
            # A reset, because TIME_WAIT would occupy a port at which a rank may be about to listen.
            wire.close_hard(self._sock)
            raise
        self._forget()
        return self._sock

    def connect(self, target: Address, timeout_s: float) -> None:
        """Begin to connect to `target`, within `timeout_s` seconds; the handshake follows."""
        until_s = self._loop.time() + self._limit_s
        self._timer = self._loop.call_later(timeout_s, self._expect_connected, until_s)
        try:
            self._sock.connect(target)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as exc:
            self._end.set_exception(exc)
            return
        if self._sock.getsockname()[:2] == target[:2]:
            # No process listens at that port, and the kernel has chosen it as this end's own port:
            # the socket is connected to itself, and keeps the other process from listening there.
            self._end.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, "own port"))
            return
        # The socket becomes readable when the acceptor's opening arrives or connecting fails.
        self._loop.add_reader(self._fd, self._read)

    def shake_hands(self) -> None:
        """Begin the handshake on the socket, which must be connected."""
        self._timer = self._loop.call_later(self._limit_s, self._expire)
        self._loop.add_reader(self._fd, self._read)

    def _read(self) -> None:
        if self._end.done():
            return
        try:
            self._take(self._sock.recv(self._wanted - len(self._received)))
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionRefusedError as exc:  # only while connecting
            self._end.set_exception(exc)
        except ConnectionError as exc:
            rejection = HandshakeRejected("closed during the handshake")
            rejection.__cause__ = exc
            self._end.set_exception(rejection)
        except (OSError, HandshakeRejected) as exc:
            self._end.set_exception(exc)

    def _take(self, piece: bytes) -> None:
        """Add `piece` to the acceptor's message; answer or check the message once complete."""
        if not piece:
            raise ConnectionResetError("the stream ended")
        self._received += piece
        if len(self._received) < self._wanted:
            return
        message, self._received = self._received, b""
        if self._has_proved:
            self._dialer.confirm(message)
            self._forget()
            self._end.set_result(None)
        else:
            proof = self._dialer.prove(message)
            if self._first_bytes is not None:
                proof += self._first_bytes(self._sock)
            self._sock.send(proof)  # always fits into the buffer of a new connection
            self._has_proved, self._wanted = True, ANSWER_NBYTES

    def _expect_connected(self, until_s: float) -> None:
        """Fail if the socket is not connected; otherwise let the handshake expire at `until_s`.

        `until_s` is a time of the event loop, in seconds.
        """
        try:
            self._sock.getpeername()
        except OSError:
            if not self._end.done():
                self._end.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_at(until_s, self._expire)

    def _expire(self) -> None:
        if not self._end.done():
            self._end.set_exception(HandshakeTimeout(self._limit_s))

    def _forget(self) -> None:
        """Stop the timer, and stop watching the socket; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._fd)
            self._timer = None


async def dial(
    secret: Secret,
    claim: Claim,
    target: Address,
    *,
    source: str = "",
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    first_bytes: FirstBytes | None = None,
) -> socket.socket:
    """Connect to `target`, a numeric address, and authenticate with `claim`; return the socket.

    The local address of the connection is `source`; if it is empty, the kernel chooses one.

    Connecting takes at most `timeout_s`: the peer's kernel answers, even if its process is busy.
    Authenticating needs that process, so both together take at most `timeout_s` or
    `HANDSHAKE_TIMEOUT_S`, whichever is longer.

    The result of `first_bytes` is sent together with the proof, so that the acceptor wakes up once
    for both. At that moment the far end has not yet proved that it knows the secret.

    Returns
    -------
    socket.socket
        Non-blocking, with TCP_NODELAY; no bytes beyond the handshake were read.

    Raises
    ------
    OSError
        If no socket can be opened, `source` is not an address of this host, connecting fails, or
        the connection fails later, other than by a close or a reset. ``ConnectionRefusedError``
        means that connecting was refused.
    TimeoutError
        If connecting takes too long.
    HandshakeTimeout
        If authenticating takes too long.
    HandshakeRejected
        If the far end does not know the secret, speaks another protocol or version, or closes or
        resets the connection.
    """
    dialer = Dialer(secret, claim, os.urandom(NONCE_NBYTES))
    sock = wire.open_socket(target[0], source)
    dialing = _Dialing(sock, dialer, max(timeout_s, HANDSHAKE_TIMEOUT_S), first_bytes)
    dialing.connect(target, timeout_s)
    return await dialing.wait()


async def prove(
    sock: socket.socket, secret: Secret, claim: Claim, limit_s: float = HANDSHAKE_TIMEOUT_S
) -> None:
    """Authenticate the connection `sock` as its dialer, with `claim`; close `sock` on failure.

    Raises
    ------
    OSError
        If the connection fails, other than by a close or a reset.
    HandshakeTimeout
        If authentication takes longer than `limit_s` seconds.
    HandshakeRejected
        If the other side does not know the secret, or speaks another protocol or version. Also if
        the other side closes or resets the connection, because it refuses the dialer or its process
        has ended.
    """
    dialing = _Dialing(sock, Dialer(secret, claim, os.urandom(NONCE_NBYTES)), limit_s)
    dialing.shake_hands()
    await dialing.wait()


def explain_failure(
    exc: OSError | HandshakeRejected, target: Address, timeout_s: float
) -> tuple[str, str]:
    """Return why a dial of `target` failed, and advice for the user, which may be empty.

    Parameters
    ----------
    exc : OSError or HandshakeRejected
        Raised by `dial`.
    target : Address
    timeout_s : float
        Timeout that was passed to `dial`.
    """
    where = f"{target[0]}:{target[1]}"
    if isinstance(exc, HandshakeRejected):
        return f"the handshake with {where} failed ({exc.reason})", "see the log of the rank there"
    if isinstance(exc, HandshakeTimeout):
        return (
            f"{where} accepted the connection but did not authenticate it within {exc.limit_s:g} s",
            "check whether the process there hangs, or is not a rank",
        )
    if isinstance(exc, TimeoutError) and exc.errno is None:
        return f"{where} did not answer within {timeout_s:g} s", "check firewalls and routes"
    code = exc.errno or 0
    return f"{where}: {decode_errno(code) if code else exc}", exhaustion_advice(code)


def describe_failure(exc: OSError | HandshakeRejected, target: Address, timeout_s: float) -> str:
    """Return the cause and the advice of `explain_failure` as one text."""
    return "; ".join(filter(None, explain_failure(exc, target, timeout_s)))


__all__ = ["FirstBytes", "HandshakeTimeout", "describe_failure", "dial", "explain_failure", "prove"]
