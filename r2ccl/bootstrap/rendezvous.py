"""Rendezvous: all ranks connect to rank 0 once and receive the addresses of all ranks.

Each rank has one authenticated connection to rank 0. The exchange has two rounds, because the
choice of rails depends on whether all ranks share a host::

    rank r                                rank 0
    Hello(rank, nranks, host, digest) ->  waits for all, compares
                                      <-  Welcome(communicator_id, is_on_one_host)
    opens its listeners
    Ready(PeerInfo)                   ->  waits for all
                                      <-  Table(peers), all with the same number of rails

An error on any rank becomes a ``MeetingFailed``, which rank 0 sends to all ranks, so that all raise
the same error. Runs in the control thread. Invariant: the rendezvous ends by its deadline.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TypeVar

from r2ccl.bootstrap import naming, wire
from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, Claim, HandshakeRejected, Purpose, Secret
from r2ccl.bootstrap.greetings import (
    Greeting,
    Hello,
    Meeting,
    MeetingFailed,
    Prepare,
    Ready,
    Table,
    Welcome,
    decode,
    encode,
    expect,
)
from r2ccl.bootstrap.identity import Identity
from r2ccl.bootstrap.leader import VERDICT_MARGIN_S, Leader
from r2ccl.bootstrap.listener import Rejections
from r2ccl.bootstrap.naming import LeaderName
from r2ccl.clock import monotonic
from r2ccl.errors import PeerLost, R2cclError, TransportTimeout

#: Communicator id in claims that are made before rank 0 has chosen the id.
_NO_COMMUNICATOR = bytes(COMMUNICATOR_ID_NBYTES)
_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.5

_T = TypeVar("_T")


async def meet(
    identity: Identity,
    hello: Hello,
    prepare: Prepare,
    rejections: Rejections,
    timeout_s: float,
) -> Meeting:
    """Run the rendezvous and return its result.

    Parameters
    ----------
    identity : Identity
    hello : Hello
    prepare : callable
        Opens this rank's listeners; called once, when all ranks have arrived.
    rejections : Rejections
    timeout_s : float
        Limit for the arrival of all ranks, in seconds.

    Raises
    ------
    InvalidArgument
        If ranks or their settings do not fit together, a rank could not open its listeners (the
        message names the ranks), or rank 0's name cannot be resolved.
    TransportTimeout
        If not all ranks arrive in time; on all ranks that did, the message names the missing ones.
    PeerLost
        If rank 0 exits, or another rank does.
    """
    if identity.rank == 0:
        leader = Leader(identity, hello, prepare, rejections, timeout_s)
        return await leader.run()
    member = _Member(identity, hello, prepare, timeout_s)
    return await member.run()


class _Member:
    def __init__(
        self, identity: Identity, hello: Hello, prepare: Prepare, timeout_s: float
    ) -> None:
        self._identity = identity
        self._hello = hello
        self._prepare = prepare
        self._timeout_s = timeout_s
        self._last_failure = "rank 0 has not published the secret yet"
        self._leader = LeaderName(identity.rank, identity.address, identity.port)

    async def run(self) -> Meeting:
        """Join the rendezvous of rank 0 and return its result; close the connection."""
        sock, secret = await self._reach_leader()
        try:
            async with asyncio.timeout(self._timeout_s + VERDICT_MARGIN_S):
                return await self._join(sock, secret)
        except TimeoutError:
            raise TransportTimeout(
                f"rank {self._hello.rank}: rank 0 at {self._where()} accepted this rank but then "
                f"sent nothing for {self._timeout_s + VERDICT_MARGIN_S:g} s: look at its log",
                rank=self._hello.rank,
                peer=0,
            ) from None
        except OSError as exc:
            raise PeerLost(
                rank=self._hello.rank, peer=0, last_heard_s=0.0, why=str(exc), is_met=False
            ) from exc
        finally:
            sock.close()

    async def _join(self, sock: socket.socket, secret: Secret) -> Meeting:
        await self._say(sock, self._hello)
        welcome = self._take(Welcome, await wire.receive_message(sock))
        try:
            info = self._prepare(welcome.is_on_one_host, str(sock.getsockname()[0]))
        except R2cclError as exc:
            await self._say(sock, MeetingFailed(str(exc)))
            raise
        await self._say(sock, Ready(info))
        table = self._take(Table, await wire.receive_message(sock))
        return Meeting(welcome.communicator_id, secret, table.peers())

    async def _reach_leader(self) -> tuple[socket.socket, Secret]:
        pause = _FIRST_PAUSE_S
        give_up_at = monotonic() + self._timeout_s
        while (left_s := give_up_at - monotonic()) > 0:
            found = await self._try_leader(left_s)
            if found is not None:
                return found
            await asyncio.sleep(min(pause, left_s))
            pause = min(2 * pause, _MAX_PAUSE_S)
        raise TransportTimeout(
            f"rank {self._hello.rank}: rank 0 was not reached at {self._where()} within "
            f"{self._timeout_s:g} s (last attempt: {self._last_failure}): check that it is running "
            "and that MASTER_ADDR, the port and the secret are the same on all ranks, or raise "
            "R2CC_INIT_TIMEOUT_S to wait longer",
            rank=self._hello.rank,
            peer=0,
        )

    async def _try_leader(self, timeout_s: float) -> tuple[socket.socket, Secret] | None:
        secret = self._identity.secret.current()
        if secret is None:
            return None
        claim = Claim(Purpose.RENDEZVOUS, _NO_COMMUNICATOR, self._hello.rank, 0)
        try:
            target = (await self._leader.find(), self._identity.port)
        except OSError as exc:
            self._last_failure = f"its name cannot be resolved: {naming.describe(exc)}"
            return None
        try:
            return await wire.dial(secret, claim, target, timeout_s=timeout_s), secret
        except (OSError, HandshakeRejected) as exc:
            self._last_failure = wire.describe_failure(exc, target, timeout_s)
        return None

    def _take(self, kind: type[_T], body: bytes) -> _T:
        message = decode(body)
        if isinstance(message, MeetingFailed):
            raise message.error(self._hello.rank)
        return expect(kind, body)

    async def _say(self, sock: socket.socket, message: Greeting) -> None:
        await wire.send_message(sock, encode(message))

    def _where(self) -> str:
        return f"{self._identity.address}:{self._identity.port}"


__all__ = ["meet"]
