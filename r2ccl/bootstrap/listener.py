"""Accept connections, authenticate them and hand over their sockets.

Runs the accepting side of `r2ccl.bootstrap.auth`. The *gate* of a `Listener` decides whether an
authenticated connection is accepted, and who takes it over.

Invariant: a socket leaves this module only after both sides have proved the secret. Until then its
bytes, its time and the number of such sockets are bounded, and bytes of strangers are compared but
never parsed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from r2ccl.bootstrap.auth import (
    NONCE_NBYTES,
    OPENING_NBYTES,
    PROOF_NBYTES,
    Acceptor,
    Claim,
    HandshakeRejected,
    Secret,
)
from r2ccl.bootstrap.wire import HANDSHAKE_TIMEOUT_S, Address, Visitor, receive_exactly
from r2ccl.clock import Clock, monotonic
from r2ccl.errors import describe_os_error

logger = logging.getLogger("r2ccl.bootstrap")

#: Default maximum number of unauthenticated connections of a listener at a time; a new one evicts
#: the oldest.
MAX_PENDING = 64
#: Rate and burst of accepted connections that fail to authenticate: above them, accepting pauses.
#: Each takes about 0.3 ms of the control thread. A full backlog is accepted within a second, before
#: dialers time out.
_UNPROVED_PER_S, _UNPROVED_BURST = 1000.0, 1024.0
#: Pause after a failed accept; if no descriptor was free, closing connections free some meanwhile.
_ACCEPT_RETRY_S = 0.1
_LOG_INTERVAL_S = 5.0


class Rejections:
    """Counters of rejected connections by reason; each reason is logged at most once in 5 s.

    Parameters
    ----------
    rank : int
        Rank named in the log lines.
    clock : Clock
    """

    def __init__(self, rank: int, clock: Clock = monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._rank = rank
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def add(self, reason: str, who: object) -> None:
        """Count a rejection of `who` for `reason`, a short, fixed text."""
        self.counts[reason] += 1
        now = self._clock()
        if now - self._logged_at.get(reason, float("-inf")) < _LOG_INTERVAL_S:
            return
        self._logged_at[reason] = now
        logger.warning(
            "rank %d: rejected %s: %s (%d so far)",
            self._rank,
            who,
            reason,
            self.counts[reason],
        )

    def summary(self) -> str:
        """Return the reasons and their counts as text; empty if there are none. Any thread."""
        return ", ".join(f"{reason} ({n} times)" for reason, n in dict(self.counts).items())


class Unneeded(Exception):
    """Raised by a gate for an authenticated connection no longer needed; not logged or counted."""


#: Function that takes over the socket of an authenticated connection; runs in the loop and must not
#: block.
Handover = Callable[[socket.socket], None]
#: Function that decides about a connection, given its proved claim and the index of the listening
#: socket; may wait until the connection is expected. Returns the function that takes over the
#: socket. Raises HandshakeRejected to refuse the connection, Unneeded if it is superseded.
Gate = Callable[[Claim, int], Awaitable[Handover]]


class _Allowance:
    """Token bucket for connections that fail to authenticate.

    Authenticated connections cost no token, since all ranks may connect at the same time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left = _UNPROVED_BURST
        self._counted_s = clock()

    def spend(self) -> None:
        """Take a token for a connection that did not authenticate."""
        now = self._clock()
        earned = (now - self._counted_s) * _UNPROVED_PER_S
        self._left = min(_UNPROVED_BURST, self._left + earned) - 1.0
        self._counted_s = now

    def wait_s(self) -> float:
        """Return the time in seconds until the next connection may be accepted."""
        earned = (self._clock() - self._counted_s) * _UNPROVED_PER_S
        return max(0.0, -(self._left + earned) / _UNPROVED_PER_S)


class Listener:
    """Accepts connections on several sockets, authenticates them and hands over their sockets.

    Parameters
    ----------
    sockets : sequence of socket.socket
        Listening, non-blocking sockets. Owned: closed by `close`.
    secret : Secret
    gate : Gate
    rejections : Rejections
    timeout_s : float
        Longest time of one handshake in seconds, including the wait of the gate.
    max_pending : int
        Maximum number of unauthenticated connections at a time; a new one evicts the oldest.
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
    ) -> None:
        self._sockets = tuple(sockets)
        self._secret = secret
        self._gate = gate
        self._rejections = rejections
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._allowance = _Allowance(monotonic)
        self._tasks: set[asyncio.Task[None]] = set()
        #: Unauthenticated connections, oldest first (a dict keeps the order).
        self._pending: dict[socket.socket, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Start accepting connections; call in the loop."""
        for index, sock in enumerate(self._sockets):
            self._spawn(self._accept(sock, index))

    def descriptors(self) -> list[int]:
        """Return the descriptors of the listening sockets and unauthenticated connections."""
        return [sock.fileno() for sock in (*self._sockets, *self._pending)]

    async def close(self) -> None:
        """Stop accepting; close the listening sockets and all unfinished handshakes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in (*self._pending, *self._sockets):
            sock.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket, index: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while (wait_s := self._allowance.wait_s()) > 0:
                await asyncio.sleep(wait_s)
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as exc:
                why = f"accept failed: {describe_os_error(exc)}"
                self._rejections.add(why, listener.getsockname())
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._pending) >= self._max_pending:
                self._evict_oldest()
            self._pending[sock] = self._spawn(self._serve(sock, address, index))

    def _evict_oldest(self) -> None:
        oldest = next(iter(self._pending))
        self._pending.pop(oldest).cancel()
        self._allowance.spend()
        # The task cannot close the socket: cancelled before its first step, it never runs. Close it
        # later, because the loop watches the descriptor until the cancellation takes effect.
        asyncio.get_running_loop().call_soon(oldest.close)
        self._rejections.add("too many unproved connections", "the oldest of them")

    async def _serve(self, sock: socket.socket, address: Address, index: int) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                handover = await self._authenticate(sock, index)
        except asyncio.CancelledError:
            sock.close()
            raise
        except Unneeded:
            sock.close()
        except Visitor:
            self._allowance.spend()
            sock.close()
        except (HandshakeRejected, OSError) as exc:
            self._allowance.spend()
            self._rejections.add(_reason(exc), f"{address[0]}:{address[1]}")
            sock.close()
        else:
            handover(sock)
        finally:
            self._pending.pop(sock, None)

    async def _authenticate(self, sock: socket.socket, index: int) -> Handover:
        loop = asyncio.get_running_loop()
        acceptor = Acceptor(self._secret, os.urandom(NONCE_NBYTES))
        opening = await receive_exactly(sock, OPENING_NBYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_sendall(sock, acceptor.challenge(opening))
        try:
            claim = acceptor.verify(await receive_exactly(sock, PROOF_NBYTES))
        except Visitor:
            raise ConnectionResetError("closed before its proof") from None
        self._pending.pop(sock, None)
        handover = await self._gate(claim, index)
        await loop.sock_sendall(sock, acceptor.answer())
        return handover


def _reason(exc: HandshakeRejected | OSError) -> str:
    if isinstance(exc, HandshakeRejected):
        return exc.reason
    if isinstance(exc, TimeoutError):
        return "handshake timed out"
    return "handshake broke off"


__all__ = ["MAX_PENDING", "Gate", "Handover", "Listener", "Rejections", "Unneeded"]
