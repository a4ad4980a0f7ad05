"""Listener that authenticates connections and hands over their sockets.

Runs the accepting side of `r2ccl.bootstrap.auth`. The *gate* of a `Listener` is a function that
decides whether an authenticated connection is accepted, and who takes over its socket.

Invariant: a socket leaves this module only after both sides have proved that they know the secret.
Until the dialer has proved this, the received bytes, the time and the number of such sockets are
bounded, and only the magic and the version in the bytes are interpreted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from r2ccl.bootstrap.auth import (
    NONCE_NBYTES,
    PROOF_NBYTES,
    Acceptor,
    Claim,
    HandshakeRejected,
    Secret,
)
from r2ccl.bootstrap.readers import ReadLoop
from r2ccl.bootstrap.wire import HANDSHAKE_TIMEOUT_S, Address
from r2ccl.clock import Clock, monotonic
from r2ccl.errors import InvalidArgument, describe_os_error

logger = logging.getLogger("r2ccl.bootstrap")

#: Default maximum number of unauthenticated connections of a listener at a time; a new one evicts
#: the oldest.
MAX_PENDING = 64
#: Rate per second and burst of connections that fail to authenticate or are refused; above them,
#: accepting pauses. Such a connection takes about 0.2 ms of the control thread. With these values,
#: a full backlog is accepted within a second, before dialers time out.
_UNPROVED_PER_S, _UNPROVED_BURST = 1000.0, 1024.0
#: Pause after a failed accept. If no descriptor was free, other connections may close meanwhile.
_ACCEPT_RETRY_S = 0.1
#: Maximum number of connections that are accepted before the event loop runs other callbacks.
_MAX_ACCEPTED = 16
_LOG_INTERVAL_S = 5.0
_BROKEN_OFF = "handshake broke off"


class Rejections:
    """Counters of rejected connections, frames and messages, by reason.

    Each reason is logged at most once in 5 s.

    Parameters
    ----------
    rank : int
        This rank, for the log.
    clock : Clock
    """

    def __init__(self, rank: int, clock: Clock = monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._rank = rank
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def add(self, reason: str, who: object) -> None:
        """Count a rejection, and log it unless the same reason was logged in the last 5 s.

        Parameters
        ----------
        reason : str
            Short, fixed text.
        who : object
            Appears in the log: the address of the peer, or a text such as ``a message of rank 3``.
        """
        if self._count(reason):
            logger.warning(
                "rank %d: rejected %s: %s (%d so far)",
                self._rank,
                who,
                reason,
                self.counts[reason],
            )

    def add_failed_accept(self, why: str, address: Address) -> None:
        """Count a connection that could not be accepted at `address`; log it as `add` does."""
        reason = f"accept failed: {why}"
        if self._count(reason):
            logger.warning(
                "rank %d: cannot accept a connection at %s:%d: %s (%d so far)",
                self._rank,
                *address[:2],
                why,
                self.counts[reason],
            )

    def _count(self, reason: str) -> bool:
        """Count a rejection; return True unless `reason` was logged in the last 5 s."""
        self.counts[reason] += 1
        now = self._clock()
        if now - self._logged_at.get(reason, float("-inf")) < _LOG_INTERVAL_S:
            return False
        self._logged_at[reason] = now
        return True

    def summary(self) -> str:
        """Return the reasons and their counts as text; empty if there are none.

        Any thread may call this.
        """
        return ", ".join(f"{reason} ({n} times)" for reason, n in dict(self.counts).items())


def cannot_listen(rank: int, address: str, what: str, exc: OSError) -> InvalidArgument:
    """Return the error of `rank`, which cannot listen at `address`.

    `what` is the purpose of the address: the name of a NIC, ``control`` or ``rendezvous``.
    """
    return InvalidArgument(
        f"rank {rank}: cannot listen at {address} ({what}): {describe_os_error(exc)}; choose other "
        "interfaces with R2CC_SOCKET_IFNAME, or another address with R2CC_CONTROL_ADDRESS"
    )


class Unneeded(Exception):
    """Raised by a gate to refuse an authenticated connection that is no longer needed.

    The refusal is neither logged nor counted as a rejection.
    """


#: Function that takes over the socket of an authenticated connection; runs in the loop and must not
#: block.
Handover = Callable[[socket.socket], None]
#: Function that decides whether to accept a connection, given its proved claim and the index of the
#: listening socket. It returns the function that takes over the socket. If the connection is not
#: expected yet, it returns a coroutine that waits briefly until it is, and then returns that
#: function. The gate and the coroutine raise HandshakeRejected to refuse the connection, and
#: Unneeded if another connection has replaced it.
Gate = Callable[[Claim, int], Handover | Coroutine[Any, Any, Handover]]


class _Allowance:
    """Token bucket for connections that fail to authenticate or that the gate rejects.

    Connections that are handed over cost no token, since all ranks may connect at the same time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left = _UNPROVED_BURST
        self._counted_s = clock()

    def spend(self) -> None:
        now = self._clock()
        earned = (now - self._counted_s) * _UNPROVED_PER_S
        self._left = min(_UNPROVED_BURST, self._left + earned) - 1.0
        self._counted_s = now

    def wait_s(self) -> float:
        """Return the time in seconds until the next connection may be accepted."""
        earned = (self._clock() - self._counted_s) * _UNPROVED_PER_S
        return max(0.0, -(self._left + earned) / _UNPROVED_PER_S)


class _Handshake:
    """Unauthenticated connection, and the time by which its handshake must end."""

    __slots__ = ("acceptor", "address", "expires_s", "index", "received", "sock")

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        index: int,
        acceptor: Acceptor,
        expires_s: float,
    ) -> None:
        self.sock = sock
        self.address = address
        self.index = index
        self.acceptor = acceptor
        self.expires_s = expires_s
        #: First bytes of the dialer's message.
        self.received = b""


class Listener:
    """Listening sockets whose connections are authenticated and then handed over.

    Parameters
    ----------
    sockets : sequence of socket.socket
        Listening, non-blocking sockets. Owned: closed by `close`.
    secret : Secret
    gate : Gate
        Decides whether an authenticated connection is accepted, and who takes over its socket.
    rejections : Rejections
        Counts rejected connections.
    timeout_s : float
        Longest time of one handshake in seconds; the time that a gate's coroutine takes does not
        count.
    max_pending : int
        Maximum number of unauthenticated connections at a time; a new one evicts the oldest.
    readers : ReadLoop, optional
        Watches the sockets; by default the running loop.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        secret: Secret,
        gate: Gate,
        rejections: Rejections,
        *,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        max_pending: int = MAX_PENDING,
        readers: ReadLoop | None = None,
    ) -> None:
        self._sockets = tuple(sockets)
        self._secret = secret
        self._gate = gate
        self._rejections = rejections
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._given_readers = readers
        self._allowance = _Allowance(monotonic)
        #: Connections that wait for the gate.
        self._tasks: dict[asyncio.Task[Handover], socket.socket] = {}
        #: Unauthenticated connections, oldest first (a dict keeps the order).
        self._pending: dict[socket.socket, _Handshake] = {}
        #: Ends the oldest unauthenticated connection when its time is over.
        self._expiry: asyncio.TimerHandle | None = None
        #: Resumes accepting after a pause, by index of the listening socket.
        self._pauses: dict[int, asyncio.TimerHandle] = {}

    @property
    def _readers(self) -> ReadLoop:
        return self._given_readers or asyncio.get_running_loop()

    def start(self) -> None:
        """Start accepting connections; must be called in the event loop."""
        for index in range(len(self._sockets)):
            self._resume(index)

    @property
    def npending(self) -> int:
        """Number of connections whose dialers have not proved the secret yet."""
        return len(self._pending)

    def descriptors(self) -> list[int]:
        """Return the descriptors of the listening sockets and of connections not handed over."""
        socks = (*self._sockets, *self._pending, *self._tasks.values())
        return [sock.fileno() for sock in socks]

    async def close(self) -> None:
        """Stop accepting; close the listening sockets and the connections not handed over."""
        for timer in (self._expiry, *self._pauses.values()):
            if timer is not None:
                timer.cancel()
        for sock in (*self._pending, *self._sockets):
            self._readers.remove_reader(sock.fileno())
            sock.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Callbacks, not coroutines: all ranks connect to rank 0, and waking a task costs as much as
    # reading a message. `add_reader` gets descriptors: it would format a socket that it does not
    # watch yet into the text of an error, which costs two system calls.

    def _resume(self, index: int) -> None:
        sock = self._sockets[index]
        self._readers.add_reader(sock.fileno(), self._accept, sock, index)

    def _pause(self, index: int, pause_s: float) -> None:
        self._readers.remove_reader(self._sockets[index].fileno())
        loop = asyncio.get_running_loop()
        self._pauses[index] = loop.call_later(pause_s, self._resume, index)

    def _accept(self, listener: socket.socket, index: int) -> None:
        for _ in range(_MAX_ACCEPTED):
            wait_s = self._allowance.wait_s()
            if wait_s > 0:
                self._pause(index, wait_s)
                return
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return  # no more
            except OSError as exc:
                why = describe_os_error(exc)
                self._rejections.add_failed_accept(why, listener.getsockname())
                self._pause(index, _ACCEPT_RETRY_S)
                return
            self._begin(sock, address, index)

    def _begin(self, sock: socket.socket, address: Address, index: int) -> None:
        sock.setblocking(False)
        if len(self._pending) >= self._max_pending:
            oldest = next(iter(self._pending.values()))
            self._reject(oldest, "too many unproved connections", "the oldest connection")
        loop = asyncio.get_running_loop()
        acceptor = Acceptor(self._secret, os.urandom(NONCE_NBYTES))
        made = _Handshake(sock, address, index, acceptor, loop.time() + self._timeout_s)
        self._pending[sock] = made
        if self._expiry is None:
            self._expiry = loop.call_at(made.expires_s, self._expire)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.send(acceptor.opening())  # always fits into the buffer of a new connection
        except OSError:
            self._end(made)
        else:
            self._readers.add_reader(sock.fileno(), self._read, made)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self._expiry = None
        while self._pending:
            oldest = next(iter(self._pending.values()))
            if oldest.expires_s > loop.time():
                self._expiry = loop.call_at(oldest.expires_s, self._expire)
                break
            self._reject(oldest, "handshake timed out")

    def _read(self, made: _Handshake) -> None:
        try:
            piece = made.sock.recv(PROOF_NBYTES - len(made.received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        made.received += piece
        if not piece:
            self._end(made)
        elif len(made.received) == PROOF_NBYTES:
            self._run(made, partial(self._verify, made))
        else:
            self._run(made, partial(made.acceptor.check, made.received))

    def _end(self, made: _Handshake) -> None:
        """Close a connection that its dialer ended, or that failed.

        Count it as rejected, unless the dialer sent nothing: then it was only a probe.
        """
        if made.received:
            self._reject(made, _BROKEN_OFF)
        else:
            self._allowance.spend()
            self._close(made)

    def _run(self, made: _Handshake, step: Callable[[], Handover | None]) -> None:
        """Run a step of a handshake; hand over the socket once accepted, close it if refused."""
        try:
            handover = step()
        except (Unneeded, asyncio.CancelledError):
            self._close(made)
        except HandshakeRejected as exc:
            self._reject(made, exc.reason)
        except OSError:
            self._reject(made, _BROKEN_OFF)
        else:
            if handover is not None:
                handover(made.sock)

    def _verify(self, made: _Handshake) -> Handover | None:
        claim = made.acceptor.verify(made.received)
        self._forget(made)
        admitted = self._gate(claim, made.index)
        if not isinstance(admitted, Coroutine):
            return self._answer(made, admitted)
        task = asyncio.get_running_loop().create_task(admitted)
        self._tasks[task] = made.sock
        task.add_done_callback(partial(self._on_admitted, made))
        return None

    def _on_admitted(self, made: _Handshake, task: asyncio.Task[Handover]) -> None:
        del self._tasks[task]
        self._run(made, lambda: self._answer(made, task.result()))

    def _answer(self, made: _Handshake, handover: Handover) -> Handover:
        made.sock.send(made.acceptor.answer())
        return handover

    def _reject(self, made: _Handshake, reason: str, who: str = "") -> None:
        self._allowance.spend()
        self._rejections.add(reason, who or f"{made.address[0]}:{made.address[1]}")
        self._close(made)

    def _close(self, made: _Handshake) -> None:
        self._forget(made)
        made.sock.close()

    def _forget(self, made: _Handshake) -> None:
        """Stop reading a connection that ends, or whose dialer has proved the secret."""
        if self._pending.pop(made.sock, None) is not None:
            self._readers.remove_reader(made.sock.fileno())


__all__ = ["MAX_PENDING", "Gate", "Handover", "Listener", "Rejections", "Unneeded", "cannot_listen"]
