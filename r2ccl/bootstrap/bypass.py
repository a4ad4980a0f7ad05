"""Bypasses: connections between two ranks that have no working rail in common.

A *way* is a connection from a NIC of the lower rank to a NIC of the higher rank, or a connection
through a third rank, the forwarder. The lower rank dials several ways, with a short pause between
them, and uses the first over which the higher rank authenticates. The forwarder accepts an
authenticated rank, connects to the target over the first rail that answers, and copies bytes in
both directions until either side closes. The two ranks authenticate each other end to end through
the forwarder. The code runs in the control thread.

Bypasses are not probed. The kernel closes a TCP connection after `SILENCE_S` without an answer from
the kernel at the other end. That closes the whole bypass, and the two ranks try other ways.

Invariants: a rank forwards at most `MAX_FORWARDED` connections at a time, and only between members
of its communicator; every socket is either handed over or closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from r2ccl.bootstrap import dialing, wire
from r2ccl.bootstrap.auth import Claim, HandshakeRejected, Purpose
from r2ccl.bootstrap.listener import Handover
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.bootstrap.peer import Setting
from r2ccl.types import BypassWay, PathKey

logger = logging.getLogger("r2ccl.bootstrap")

#: Maximum number of connections that a rank forwards at a time.
MAX_FORWARDED = 256
#: Time without an answer from the remote kernel after which a connection is closed: long enough for
#: several retransmissions.
SILENCE_S = 2.0
#: Pause before the next way is tried as well. A working way connects in a few round trips.
STAGGER_S = 0.02
#: Long enough for one retransmission of a SYN, which Linux sends after 1 s.
_CONNECT_TIMEOUT_S = 2.0
_COPY_NBYTES = 256 << 10

#: Maximum number of attempts that a rank makes at a time, for all its bypasses together.
MAX_ATTEMPTS = 64

Attempt = Callable[[], Coroutine[Any, Any, socket.socket]]


async def first_of(attempts: Sequence[Attempt], stagger_s: float = STAGGER_S) -> socket.socket:
    """Start the attempts one after another and return the socket of the first that succeeds.

    The next attempt starts `stagger_s` seconds after the previous one, or as soon as a running
    attempt fails. When an attempt succeeds, the others are cancelled, or their sockets closed.

    Raises
    ------
    OSError
        If all attempts fail, or `attempts` is empty. The message gives the number of attempts and
        the last error.
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
    last = "nothing was tried" if why is None else str(why) or type(why).__name__
    raise OSError(f"none of {len(attempts)} routes works; last error: {last}")


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
    """Connect to ``key.peer`` by the first of `ways` that works; return the authenticated socket.

    `room` bounds the number of attempts that this rank makes at a time, for all bypasses together.

    Raises
    ------
    OSError
        If no way works.
    """
    data = Claim(Purpose.DATA, setting.communicator_id, setting.rank, key.peer, key.rail, epoch)

    async def attempt(way: BypassWay) -> socket.socket:
        async with room, asyncio.timeout(_CONNECT_TIMEOUT_S):
            sock = await wire.reach(peers[way.to].rails[way.rail], setting.nics[way.via].address)
            if way.to != key.peer:
                forward = Claim(
                    Purpose.FORWARD, setting.communicator_id, setting.rank, way.to, beyond=key.peer
                )
                await dialing.prove(sock, setting.secret, forward)
            await dialing.prove(sock, setting.secret, data)
        return sock

    sock = await first_of([lambda way=way: attempt(way) for way in ways])  # type: ignore[misc]
    wire.limit_silence(sock, SILENCE_S)
    return sock


class Forwarder:
    """Forwarder of bypasses: copies bytes between connections of two other ranks.

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
        """Return the function that takes over the socket of an authenticated FORWARD connection.

        Raises
        ------
        HandshakeRejected
            If ``claim.beyond`` is this rank, does not exist or is not above the dialer's rank, or
            this rank forwards `MAX_FORWARDED` connections already.
        """
        if not claim.src < claim.beyond < len(self._peers) or claim.beyond == self._setting.rank:
            raise HandshakeRejected("nobody to forward to")
        if len(self._tasks) >= MAX_FORWARDED:
            raise HandshakeRejected("too many connections to forward")
        return lambda sock: self._begin(claim, sock)

    def close(self) -> None:
        """Close all forwarded connections."""
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
                "rank %d: cannot forward a connection of rank %d to rank %d: %s",
                rank, claim.src, claim.beyond, exc,
            )  # fmt: skip
            return
        logger.info(
            "rank %d: forwarding a connection of rank %d to rank %d",
            rank, claim.src, claim.beyond,
        )  # fmt: skip
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
    """Copy bytes from `source` to `target` until either socket closes or fails."""
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(_COPY_NBYTES))
    with contextlib.suppress(OSError):  # the other direction and both ranks see the error, too
        while nbytes := await loop.sock_recv_into(source, buffer):
            await loop.sock_sendall(target, buffer[:nbytes])
            # Neither call yields to other tasks while there is data to read and space to write.
            await asyncio.sleep(0)


__all__ = ["MAX_FORWARDED", "SILENCE_S", "Forwarder", "dial", "first_of"]
