"""Let proved connections in and keep strangers out.

Carries the accepting side of `r2ccl.bootstrap.auth`; what a connection is for, and whether it is
welcome now, is for the *gate* of a `Listener` to say. Invariant: a socket leaves this module only
after both sides have proved the secret; until then it costs bounded bytes, bounded time and one of
a bounded number of places, and what a stranger sent has been compared, not parsed.
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

#: Unproved connections of one listener at a time; the oldest makes room for the newest.
MAX_PENDING = 64
#: Unproved connections a second that all listeners of a rank take in the long run, and how many at
#: once: each takes the control thread some 0.3 ms. A full backlog is through in a second, before
#: those who dial give up.
_UNPROVED_PER_S, _UNPROVED_BURST = 1000.0, 1024.0
#: A full table of file descriptors empties when some other connection ends.
_ACCEPT_RETRY_S = 0.1
_LOG_INTERVAL_S = 5.0


class Rejections:
    """Count what was turned away, per reason; log each reason at most once in 5 s.

    Parameters
    ----------
    rank : int
        Named in the log lines.
    clock : Clock
    """

    def __init__(self, rank: int, clock: Clock = monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._rank = rank
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def add(self, reason: str, who: object) -> None:
        """Note one case of `reason` (short, fixed text) from `who`."""
        self.counts[reason] += 1
        now = self._clock()
        if now - self._logged_at.get(reason, float("-inf")) < _LOG_INTERVAL_S:
            return
        self._logged_at[reason] = now
        logger.warning(
            "rank %d: turned away %s: %s (%d so far)",
            self._rank,
            who,
            reason,
            self.counts[reason],
        )

    def summary(self) -> str:
        """Return what was turned away, and how often, in words; empty: nothing; any thread."""
        return ", ".join(f"{reason} ({n} times)" for reason, n in dict(self.counts).items())


class Unneeded(Exception):
    """A gate's answer to a proved connection that is not wanted any more: closed without a word."""


#: Takes over the socket of a proved connection; runs in the loop and must not block.
Handover = Callable[[socket.socket], None]
#: Says what to do with a proved claim that came in on listener i; may wait until it is welcome.
#: Raises HandshakeRejected if it is not, Unneeded if that is nobody's fault.
Gate = Callable[[Claim, int], Awaitable[Handover]]


class _Allowance:
    """Token bucket for connections that fail to authenticate.

    What is proved costs nothing: ranks may all come at once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left = _UNPROVED_BURST
        self._counted_s = clock()

    def spend(self) -> None:
        """Count a connection that proved nothing."""
        now = self._clock()
        earned = (now - self._counted_s) * _UNPROVED_PER_S
        self._left = min(_UNPROVED_BURST, self._left + earned) - 1.0
        self._counted_s = now

    def wait_s(self) -> float:
        """Return how long to take none."""
        earned = (self._clock() - self._counted_s) * _UNPROVED_PER_S
        return max(0.0, -(self._left + earned) / _UNPROVED_PER_S)


class Listener:
    """Accept on several sockets, authenticate, hand over.

    Parameters
    ----------
    sockets : sequence of socket.socket
        Listening, non-blocking. Owned: closed by `close`.
    secret : Secret
    gate : Gate
    rejections : Rejections
    timeout_s : float
        Bound of one handshake, the gate's waiting included.
    max_pending : int
        Unproved connections at a time.
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
        #: Unproved connections, oldest first (a dict keeps the order).
        self._pending: dict[socket.socket, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to accept; in the loop."""
        for index, sock in enumerate(self._sockets):
            self._spawn(self._accept(sock, index))

    def descriptors(self) -> list[int]:
        """Descriptors of the listening sockets, and of connections that have yet to prove."""
        return [sock.fileno() for sock in (*self._sockets, *self._pending)]

    async def close(self) -> None:
        """Stop, close every unfinished handshake and the listening sockets."""
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
        # A task cancelled before its first step closes nothing; and not now: the loop still
        # watches the descriptor until the cancellation has gone through.
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
            raise ConnectionResetError("left before its proof") from None
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
