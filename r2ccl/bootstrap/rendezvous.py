"""Rendezvous: the other ranks connect to rank 0, and all ranks receive the addresses of all ranks.

Each other rank has one authenticated connection to rank 0. The exchange has two rounds, because the
choice of rails depends on whether all ranks share a host::

    rank r                                         rank 0
    Hello(rank, nranks, host, pid,
          digest, address)                     ->  waits for all, compares
                                               <-  Welcome(communicator_id, is_on_one_host, parent)

    rank r                                         its parent in the binomial tree of all ranks
    opens its listeners, waits for its children
    Ready(PeerInfo of its part of the tree)    ->  rank 0: waits for all
                                               <-  Table(peers), all with the same number of rails

A rank sends its Hello together with its proof of the secret, so that rank 0 wakes up once for both;
rank 0 reads the Hello only after it has verified the proof.

The second round goes through the tree, so that rank 0 exchanges addresses with about log2(n) ranks
only. Rank 0's children use the connection that they have. An error on any rank becomes a
``MeetingFailed``, which rank 0 sends to all ranks that have arrived, so that they raise an error
with its text.

Runs in the control thread. Invariant: every wait has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from functools import partial
from typing import TypeVar

import msgspec

from r2ccl.bootstrap import dialing, naming, wire
from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, Claim, HandshakeRejected, Purpose, Secret
from r2ccl.bootstrap.branch import Branch
from r2ccl.bootstrap.greetings import (
    Hello,
    Meeting,
    MeetingFailed,
    Prepare,
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
from r2ccl.errors import InvalidArgument, PeerLost, R2cclError, TransportTimeout

logger = logging.getLogger("r2ccl.bootstrap")

#: Communicator id in claims that are made before rank 0 has chosen the id.
_NO_COMMUNICATOR = bytes(COMMUNICATOR_ID_NBYTES)
_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.5
#: Time after which a rank reports that it has not reached rank 0 yet, in seconds.
_REPORT_AFTER_S = 2.0

_T = TypeVar("_T")


async def meet(
    identity: Identity,
    hello: Hello,
    prepare: Prepare,
    rejections: Rejections,
    timeout_s: float,
    control_address: str = "",
) -> Meeting:
    """Run the rendezvous and return its result.

    *Collective*: every rank of the job must call it.

    Parameters
    ----------
    identity : Identity
    hello : Hello
        First message to rank 0, without the address for children in the tree.
    prepare : callable
        Opens this rank's listeners (`Prepare`); called once, when all ranks have arrived.
    rejections : Rejections
        Counts rejected connections.
    timeout_s : float
        Time limit in seconds, first for reaching rank 0, then again for the two rounds. For the
        rounds, ranks other than 0 wait 5 s longer.
    control_address : str, optional
        Address at which this rank's children in the tree reach it; by default the local address of
        its connection to rank 0. Not used on rank 0.

    Raises
    ------
    InvalidArgument
        If ranks, their versions or their settings are inconsistent, a rank could not open its
        listeners (the message names the ranks), rank 0's name cannot be resolved, or the file of
        the secret cannot be used.
    TransportTimeout
        If rank 0 is not reached, or not all ranks and addresses arrive in time. The ranks that
        reached rank 0 get its report, which names the missing ranks.
    TransportError
        If `prepare` raises it on this rank. The other ranks then raise InvalidArgument.
    PeerLost
        If rank 0 or another rank exits.
    """
    if identity.rank == 0:
        leader = Leader(identity, hello, prepare, rejections, timeout_s)
        return await leader.run()
    member = _Member(identity, hello, prepare, rejections, timeout_s, control_address)
    return await member.run()


class _Member:
    def __init__(
        self,
        identity: Identity,
        hello: Hello,
        prepare: Prepare,
        rejections: Rejections,
        timeout_s: float,
        control_address: str,
    ) -> None:
        self._identity = identity
        self._hello = hello
        self._prepare = prepare
        self._rejections = rejections
        self._timeout_s = timeout_s
        self._control_address = control_address
        self._last_failure = "rank 0 has not published the secret yet"
        #: Error of this rank's listener for its children in the tree, if it could not be opened.
        self._unlistenable: InvalidArgument | None = None
        #: Error of the last attempt if it could not resolve the name of rank 0, else None.
        self._unresolved: OSError | None = None
        self._leader = LeaderName(identity.rank, identity.address, identity.port)
        #: Number of attempts to connect to rank 0, whose name may have several addresses.
        self._ndials = 0

    async def run(self) -> Meeting:
        """Join the rendezvous at rank 0, return its result and close all connections."""
        branch = Branch(self._hello.rank, self._hello.nranks, self._rejections)
        try:
            sock, secret = await self._reach_leader(branch)
        except BaseException:
            await branch.close()
            raise
        try:
            async with asyncio.timeout(self._timeout_s + VERDICT_MARGIN_S):
                return await self._join(sock, secret, branch)
        except TimeoutError:
            waits = f"; this rank {account}" if (account := branch.account()) else ""
            raise TransportTimeout(
                f"rank {self._hello.rank}: rank 0 at {self._where()} accepted this rank, but the "
                f"rendezvous did not end within {self._timeout_s + VERDICT_MARGIN_S:g} s{waits}: "
                "look at the log of rank 0",
                rank=self._hello.rank,
                peer=0,
            ) from None
        except OSError as exc:
            raise PeerLost(
                rank=self._hello.rank, peer=0, last_heard_s=0.0, why=str(exc), is_met=False
            ) from exc
        finally:
            await branch.close()
            sock.close()

    async def _join(self, sock: socket.socket, secret: Secret, branch: Branch) -> Meeting:
        if self._unlistenable is not None:
            await self._report(sock, self._unlistenable)
            raise self._unlistenable
        welcome = self._take(Welcome, await wire.receive_message(sock))
        try:
            own = self._prepare(welcome.is_on_one_host, wire.local_host(sock))
        except R2cclError as exc:
            await self._report(sock, exc)
            raise
        peers = await branch.exchange(own, secret, sock, welcome)
        return Meeting(welcome.communicator_id, secret, peers)

    def _first_message(self, branch: Branch, sock: socket.socket) -> bytes:
        """Listen for this rank's children; return the framed `Hello` with the listener's address.

        Listen at the control address or, if there is none, at the local address of `sock`.
        """
        try:
            address = branch.listen(self._control_address or wire.local_host(sock))
        except InvalidArgument as exc:
            self._unlistenable = exc
            address = self._hello.address
        else:
            self._unlistenable = None
        return wire.frame(encode(msgspec.structs.replace(self._hello, address=address)))

    async def _reach_leader(self, branch: Branch) -> tuple[socket.socket, Secret]:
        pause = _FIRST_PAUSE_S
        began_s = monotonic()
        give_up_at, is_said = began_s + self._timeout_s, False
        while (left_s := give_up_at - monotonic()) > 0:
            found = await self._try_leader(left_s, branch)
            if found is not None:
                return found
            if not is_said and monotonic() > began_s + _REPORT_AFTER_S:
                is_said = True
                logger.info(
                    "rank %d: rank 0 was not reached yet at %s (%s); trying for %g s in total",
                    self._hello.rank, self._where(), self._last_failure, self._timeout_s,
                )  # fmt: skip
            await asyncio.sleep(min(pause, left_s))
            pause = min(2 * pause, _MAX_PAUSE_S)
        if self._unresolved is not None:
            name = self._identity.address
            raise naming.unresolvable(self._hello.rank, name, self._unresolved)
        raise TransportTimeout(
            f"rank {self._hello.rank}: rank 0 was not reached at {self._where()} within "
            f"{self._timeout_s:g} s (last attempt: {self._last_failure}): check that rank 0 is "
            "running and that MASTER_ADDR, the port and the secret are the same on all ranks, or "
            "raise R2CC_INIT_TIMEOUT_S to wait longer",
            rank=self._hello.rank,
            peer=0,
        )

    async def _try_leader(
        self, timeout_s: float, branch: Branch
    ) -> tuple[socket.socket, Secret] | None:
        secret = self._identity.secret.current()
        if secret is None:
            return None
        claim = Claim(Purpose.RENDEZVOUS, _NO_COMMUNICATOR, self._hello.rank, 0)
        try:
            addresses = await self._leader.find()
        except OSError as exc:
            self._unresolved = exc
            self._last_failure = f"its name cannot be resolved: {naming.describe(exc)}"
            return None
        self._unresolved = None
        # Rank 0 listens at one address of its name; which of them this host can reach is unknown.
        target = (addresses[self._ndials % len(addresses)], self._identity.port)
        self._ndials += 1
        timeout_s /= len(addresses)
        try:
            sock = await dialing.dial(
                secret, claim, target, timeout_s=timeout_s,
                first_bytes=partial(self._first_message, branch),
            )  # fmt: skip
            return sock, secret
        except (OSError, HandshakeRejected) as exc:
            self._last_failure = dialing.describe_failure(exc, target, timeout_s)
        return None

    def _take(self, kind: type[_T], body: bytes) -> _T:
        message = decode(body)
        if isinstance(message, MeetingFailed):
            raise message.error(self._hello.rank)
        return expect(kind, body)

    async def _report(self, sock: socket.socket, failure: R2cclError) -> None:
        with contextlib.suppress(OSError):  # rank 0 is lost: this rank still raises its own error
            await wire.send_message(sock, encode(MeetingFailed(str(failure))))

    def _where(self) -> str:
        return f"{self._identity.address}:{self._identity.port}"


__all__ = ["meet"]
