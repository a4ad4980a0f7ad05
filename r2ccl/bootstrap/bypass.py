"""Bypasses: connections of two ranks that have no rail in common, dialed and forwarded.

The lower rank tries several ways at once and takes the first over which the higher rank proves
itself: from any of its NICs to any of the other's, or through a third rank. That one forwards
bytes: it lets in a rank that proved itself, connects to the other over whichever rail gets there
first, and copies both ways until either side ends. It cannot read a proof that is not its own, and
the two ranks prove themselves to each other through it as they would without. Runs in the control
thread.

No probe watches a bypass. The kernel ends each connection it consists of once the far end's kernel
said nothing for `SILENCE_S`, which ends all of it, and the two ranks try other ways.

Invariants: a rank forwards at most `MAX_FORWARDED` connections at a time, and between members of
its communicator only; a socket that is not handed over is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from r2ccl.bootstrap import wire
from r2ccl.bootstrap.auth import Claim, HandshakeRejected, Purpose
from r2ccl.bootstrap.listener import Handover
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.bootstrap.peer import Setting
from r2ccl.types import BypassWay, PathKey

logger = logging.getLogger("r2ccl.bootstrap")

#: Connections a rank forwards at a time.
MAX_FORWARDED = 256
#: Silence of a far kernel that ends a connection: several retransmissions on any sane network.
SILENCE_S = 2.0
#: One more way is tried after this long without success; a good one takes a few round trips.
STAGGER_S = 0.02
#: Covers two retransmissions of a SYN (Linux sends the first after 1 s).
_CONNECT_TIMEOUT_S = 2.0
_COPY_NBYTES = 256 << 10

#: Attempts a rank makes at a time, for all its peers together.
MAX_ATTEMPTS = 64

Attempt = Callable[[], Coroutine[Any, Any, socket.socket]]


async def first_of(attempts: Sequence[Attempt], stagger_s: float = STAGGER_S) -> socket.socket:
    """Try one after another, `stagger_s` apart or as soon as one fails; return the first success.

    The others are cancelled, or closed if they succeeded too.

    Raises
    ------
    OSError
        None succeeded; says how many were tried and why the last one failed.
    """
    waiting = list(reversed(attempts))
    running: set[asyncio.Task[socket.socket]] = set()
    why: BaseException | None = None
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(waiting.pop()()))
            done, _ = await asyncio.wait(
                running,
                timeout=stagger_s if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                running.discard(task)
                why = task.exception()
                if why is None:
                    return task.result()
                if not isinstance(why, OSError | HandshakeRejected):
                    raise why
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_close_result)
    raise OSError(f"none of {len(attempts)} ways works; the last one: {why or 'there is none'}")


def _close_result(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def dial(
    peers: Sequence[PeerInfo],
    setting: Setting,
    key: PathKey,
    epoch: int,
    ways: Sequence[BypassWay],
    room: asyncio.Semaphore,
) -> socket.socket:
    """Connect to ``key.peer`` by the first of `ways` that works; attempts wait for `room`.

    Raises
    ------
    OSError
        None does.
    """
    data = Claim(Purpose.DATA, setting.communicator_id, setting.rank, key.peer, key.rail, epoch)

    async def attempt(way: BypassWay) -> socket.socket:
        async with room, asyncio.timeout(_CONNECT_TIMEOUT_S):
            sock = await wire.reach(peers[way.to].rails[way.rail], setting.nics[way.via].address)
            if way.to != key.peer:
                forward = Claim(
                    Purpose.FORWARD, setting.communicator_id, setting.rank, way.to, beyond=key.peer
                )
                await wire.prove(sock, setting.secret, forward)
            await wire.prove(sock, setting.secret, data)
        return sock

    sock = await first_of([lambda way=way: attempt(way) for way in ways])  # type: ignore[misc]
    wire.limit_silence(sock, SILENCE_S)
    return sock


class Forwarder:
    """The connections this rank forwards for others.

    Parameters
    ----------
    peers : sequence of PeerInfo
        One per rank.
    setting : Setting
    """

    def __init__(self, peers: Sequence[PeerInfo], setting: Setting) -> None:
        self._peers = peers
        self._setting = setting
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, claim: Claim) -> Handover:
        """Say what becomes of a proved FORWARD connection.

        Raises
        ------
        HandshakeRejected
            There is nobody to forward to, or no room.
        """
        if not claim.src < claim.beyond < len(self._peers) or claim.beyond == self._setting.rank:
            raise HandshakeRejected("nobody to forward to")
        if len(self._tasks) >= MAX_FORWARDED:
            raise HandshakeRejected("too many connections to forward")
        return lambda sock: self._begin(claim, sock)

    def close(self) -> None:
        """End all of them."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, claim: Claim, near: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._forward(claim, near))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step closes nothing.
        task.add_done_callback(lambda done: near.close())

    async def _forward(self, claim: Claim, near: socket.socket) -> None:
        rank = self._setting.rank
        try:
            far = await first_of(self._ways_to(claim.beyond))
        except OSError as exc:
            logger.info(
                "rank %d: rank %d is not forwarded to rank %d: %s",
                rank, claim.src, claim.beyond, exc,
            )  # fmt: skip
            return
        logger.info("rank %d: forwards rank %d to rank %d", rank, claim.src, claim.beyond)
        with far:
            for sock in (near, far):
                wire.limit_silence(sock, SILENCE_S)
            copies = [asyncio.create_task(_copy(near, far)), asyncio.create_task(_copy(far, near))]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)

    def _ways_to(self, peer: int) -> list[Attempt]:
        async def attempt(target: wire.Address, source: str) -> socket.socket:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await wire.reach(target, source)

        return [
            lambda target=target, nic=nic: attempt(target, nic.address)  # type: ignore[misc]
            for target, nic in zip(self._peers[peer].rails, self._setting.nics, strict=True)
        ]


async def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until either end closes or breaks."""
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(_COPY_NBYTES))
    with contextlib.suppress(OSError):  # the other direction, and both ranks, see it too
        while nbytes := await loop.sock_recv_into(source, buffer):
            await loop.sock_sendall(target, buffer[:nbytes])
            # Neither call gives way to others while there is data and room.
            await asyncio.sleep(0)


__all__ = ["MAX_FORWARDED", "SILENCE_S", "Forwarder", "dial", "first_of"]
