"""Rank 0's side of the rendezvous: accept all ranks, compare their settings, collect addresses.

`r2ccl.bootstrap.rendezvous` describes the messages. Runs in the control thread.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec

from r2ccl.bootstrap import logs, naming, wire
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
from r2ccl.bootstrap.listener import MAX_PENDING, Handover, Listener, Rejections
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.bootstrap.naming import LeaderName
from r2ccl.bootstrap.overlay import children, parent
from r2ccl.bootstrap.readers import ReaderSet
from r2ccl.bootstrap.wire import MessageReader
from r2ccl.clock import monotonic
from r2ccl.config import AGREED
from r2ccl.errors import (
    InvalidArgument,
    R2cclError,
    decode_errno,
    exhaustion_advice,
    format_ranks,
    is_exhaustion,
)

logger = logging.getLogger("r2ccl.bootstrap")

_T = TypeVar("_T")

#: Time in seconds that rank 0 waits for more ranks after an error, to send them the error, too.
_FAULT_GRACE_S = 0.5
#: Extra time in seconds that the other ranks wait to receive rank 0's report of a timeout. Also the
#: time limit for rank 0 to send a message to all ranks.
VERDICT_MARGIN_S = 5.0
#: Longest wait of rank 0 for its port in seconds; a previous job may be about to close the port.
_BIND_PATIENCE_S = 3.0
_BIND_PAUSE_S = 0.25
_RESOLVE_PAUSE_S = 0.5
#: Advice if other hosts cannot reach the address of a control listener, or of a rail.
_CONTROL_ADVICE = "set R2CC_CONTROL_ADDRESS on that host to an address that they reach"
_RAILS_ADVICE = "select other interfaces on that host with R2CC_SOCKET_IFNAME"
#: First and longest interval between two messages about missing ranks, in seconds.
_FIRST_REPORT_S = 2.0
_LAST_REPORT_S = 30.0
#: While at least this number of ranks are missing, rank 0 handles connections in batches.
_MANY_MISSING = 16
#: Pause between two batches, as a share of the time since the rendezvous began, and the maximum
#: pause in seconds. Until the pause reaches the maximum, the number of batches grows with the
#: logarithm of the time since the rendezvous began.
_PAUSE_SHARE, _MAX_PAUSE_S = 0.1, 0.25
#: Maximum pause between two batches, in seconds, while a dialer has not proved the secret yet.
_PROOF_PAUSE_S = 0.05


class _Member:
    """Connection of another rank to rank 0."""

    __slots__ = ("rank", "reader", "sock")

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[_Member, bytes], None],
        on_end: Callable[[_Member, OSError], None],
        readers: ReaderSet,
    ) -> None:
        self.sock = sock
        self.reader = MessageReader(sock, partial(on_message, self), partial(on_end, self), readers)
        #: -1 until its Hello is accepted.
        self.rank = -1


class _FoundFaults(R2cclError):
    """Faults of other ranks, or of their settings, which rank 0 has found."""


class Leader:
    """Rank 0's part of a rendezvous; see `r2ccl.bootstrap.rendezvous.meet` for the parameters."""

    def __init__(
        self,
        identity: Identity,
        hello: Hello,
        prepare: Prepare,
        rejections: Rejections,
        timeout_s: float,
    ) -> None:
        self._identity = identity
        self._hello = hello
        self._prepare = prepare
        self._rejections = rejections
        self._timeout_s = timeout_s
        #: First message of each rank that has arrived, and of this one.
        self._hellos = {0: hello}
        #: All connections, also those whose Hello was not accepted.
        self._members: list[_Member] = []
        #: Addresses that have arrived, by rank.
        self._infos: dict[int, PeerInfo] = {}
        #: Ranks whose addresses are still expected.
        self._awaited = set(range(1, identity.nranks))
        self._faults: list[str] = []
        #: Ranks that exited during the rendezvous, and how that was noticed.
        self._left: dict[int, str] = {}
        #: Ranks that exited, or sent an error.
        self._failed: set[int] = set()
        self._progress = asyncio.Event()
        self._began_s = monotonic()
        #: Numeric address of the listening socket, which this rank may have inherited.
        self._host = ""

    async def run(self) -> Meeting:
        """Run the rendezvous and return its result; close all sockets.

        Raises
        ------
        R2cclError
            As for `r2ccl.bootstrap.rendezvous.meet`. The ranks that have arrived get the error,
            too.
        """
        secret = self._identity.secret.current()
        assert secret is not None, "rank 0 generates the secret or was given it"
        sock = await self._listen()
        self._host = str(sock.getsockname()[0])
        # The backlog must have room for all ranks, also on a socket of the launcher: connections
        # wait in the backlog while rank 0 pauses.
        sock.listen(max(wire.BACKLOG, self._identity.nranks))
        most = max(MAX_PENDING, self._identity.nranks)
        self._readers = ReaderSet(self._pause_s)
        self._listener = Listener(
            [sock], secret, self._admit, self._rejections, max_pending=most, readers=self._readers
        )
        try:
            self._identity.secret.publish()
            self._listener.start()
            async with asyncio.timeout(self._timeout_s):
                return await self._lead(secret, sock)
        except TimeoutError:
            failed = self._account_of_timeout()
            await self._tell_everyone(failed)
            raise failed.error(0) from None
        except _FoundFaults as exc:
            failed = self._account_of(exc)
            await self._tell_everyone(failed)
            raise failed.error(0) from exc
        except R2cclError as exc:  # of this rank itself
            await self._tell_everyone(MeetingFailed(str(exc)))
            raise
        finally:
            await self._listener.close()
            self._readers.close()
            for member in self._members:
                member.sock.close()
            self._identity.secret.retract()

    async def _lead(self, secret: Secret, sock: socket.socket) -> Meeting:
        await self._gather_hellos()
        hosts = {hello.host for hello in self._hellos.values()}
        is_on_one_host = len(hosts) == 1
        communicator_id = secrets.token_bytes(COMMUNICATOR_ID_NBYTES)
        await self._welcome(communicator_id, is_on_one_host)
        self._infos[0] = self._prepare(is_on_one_host, self._own_address(sock))
        while self._awaited and not self._faults:
            await self._await_progress(
                lambda: f"the addresses of ranks {format_ranks(self._awaited)}"
            )
        if self._faults:
            await self._await_others(lambda: not self._awaited)
        else:
            for info in self._infos.values():
                self._refuse_unreachable(info.rank, info.control_addresses, _CONTROL_ADVICE)
                self._refuse_unreachable(info.rank, info.rails, _RAILS_ADVICE)
        if self._faults:
            raise _FoundFaults("; ".join(self._faults))
        peers = _with_common_rails(self._infos.values())
        near = set(children(0, self._identity.nranks))
        table = encode(Table.of(peers))
        await self._send((member.sock, table) for member in self._members if member.rank in near)
        return Meeting(communicator_id, secret, peers)

    async def _listen(self) -> socket.socket:
        identity = self._identity
        if identity.listener is not None:
            identity.listener.setblocking(False)
            return identity.listener
        host = await self._find_own_address()
        give_up_at = monotonic() + min(_BIND_PATIENCE_S, self._timeout_s)
        while True:
            try:
                return wire.listen(host, identity.port)
            except OSError as exc:
                if exc.errno == errno.EADDRNOTAVAIL and host not in ("0.0.0.0", "::"):
                    # MASTER_ADDR may reach this host by address translation (containers).
                    host = "::" if ":" in host else "0.0.0.0"
                    continue
                if exc.errno != errno.EADDRINUSE or monotonic() > give_up_at:
                    raise _cannot_listen(host, identity.port, exc) from exc
            await asyncio.sleep(_BIND_PAUSE_S)

    async def _find_own_address(self) -> str:
        identity = self._identity
        name = LeaderName(0, identity.address, identity.port)
        give_up_at = monotonic() + self._timeout_s
        while True:
            try:
                return (await name.find())[0]
            except OSError as exc:
                if monotonic() > give_up_at:
                    raise naming.unresolvable(0, identity.address, exc) from exc
            await asyncio.sleep(_RESOLVE_PAUSE_S)

    def _own_address(self, listening: socket.socket) -> str:
        """Return a local address at which a member has reached rank 0.

        The listening socket itself may have the address of all interfaces.
        """
        for member in self._members:
            return wire.local_host(member.sock)
        return wire.local_host(listening)

    # -- first round ------------------------------------------------------------------------

    def _pause_s(self) -> float:
        """Return the pause in seconds before the next batch; see `_PAUSE_SHARE`."""
        if self._faults or len(self._hellos) > self._identity.nranks - _MANY_MISSING:
            return 0.0
        most_s = _PROOF_PAUSE_S if self._listener.npending else _MAX_PAUSE_S
        return min(_PAUSE_SHARE * (monotonic() - self._began_s), most_s)

    def _admit(self, claim: Claim, listener: int) -> Handover:
        if claim.purpose is not Purpose.RENDEZVOUS:
            raise HandshakeRejected("not a rendezvous")
        return self._receive_member

    def _receive_member(self, sock: socket.socket) -> None:
        member = _Member(sock, self._on_message, self._on_end, self._readers)
        self._members.append(member)
        member.reader.read()  # its Hello, which has arrived with its proof

    def _on_message(self, member: _Member, body: bytes) -> None:
        if member.rank < 0:
            self._greet(member, body)
        else:
            self._conclude(member, body)

    def _greet(self, member: _Member, body: bytes) -> None:
        try:
            hello = expect(Hello, body)
        except InvalidArgument as exc:
            self._rejections.add("no Hello", f"a connection ({exc})")
            member.reader.stop()
            return
        nranks = self._identity.nranks
        if hello.nranks != nranks:
            self._fault(
                f"rank {hello.rank} was started for {hello.nranks} ranks, rank 0 for {nranks}: "
                "set the same WORLD_SIZE on every rank"
            )
        elif not 0 <= hello.rank < nranks:
            self._fault(
                f"RANK={hello.rank} with WORLD_SIZE={nranks}; allowed is 0 to WORLD_SIZE - 1"
            )
        elif hello.rank in self._hellos:
            first = self._hellos[hello.rank]
            self._fault(
                f"rank {hello.rank} was started twice: pid {first.pid} on {_name(first)} and "
                f"pid {hello.pid} on {_name(hello)}: give each process its own RANK"
            )
        else:
            member.rank = hello.rank
            self._hellos[hello.rank] = hello
            if len(self._hellos) == nranks:
                self._announce()
            return
        member.reader.stop()

    def _on_end(self, member: _Member, exc: OSError) -> None:
        """Record as an error that a member ended its connection during the rendezvous.

        Before its `Hello` was accepted, this only counts as a rejected connection.
        """
        if member.rank < 0:
            self._rejections.add("no Hello", f"a connection ({exc})")
            return
        self._lose(member.rank, f"its connection to rank 0 ended: {exc}")

    def _lose(self, rank: int, why: str) -> None:
        """Record that `rank` exited, unless its failure is known already."""
        if rank in self._failed:
            return
        hello = self._hellos[rank]
        self._left[rank] = f"pid {hello.pid}: {why}"
        self._give_up(rank)
        self._fault(
            f"rank {rank} (pid {hello.pid} on {_name(hello)}) left during init ({why}): "
            "look at the log of that rank"
        )

    def _give_up(self, rank: int) -> None:
        self._failed.add(rank)
        self._awaited.discard(rank)

    def _fault(self, text: str) -> None:
        self._faults.append(text)
        self._announce()

    def _announce(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def _gather_hellos(self) -> None:
        while len(self._hellos) < self._identity.nranks and not self._faults:
            await self._await_progress(lambda: f"ranks {format_ranks(self._missing())}")
        if self._faults:
            await self._await_others(lambda: len(self._hellos) == self._identity.nranks)
        odd = [hello.rank for hello in self._hellos.values() if hello.digest != self._hello.digest]
        if odd:
            names = ", ".join(f"R2CC_{name.upper()}" for name in AGREED)
            self._faults.append(
                f"ranks {format_ranks(odd)} have settings that differ from rank 0's: "
                f"these must be equal on all ranks: {names}"
            )
        for hello in self._hellos.values():
            self._refuse_unreachable(hello.rank, [hello.address], _CONTROL_ADVICE)
        if self._faults:
            raise _FoundFaults("; ".join(self._faults))

    def _refuse_unreachable(
        self, rank: int, addresses: Iterable[wire.Address], advice: str
    ) -> None:
        """Record an error if ranks of other hosts cannot reach `rank` at one of `addresses`.

        They cannot reach a loopback address, or the address of all interfaces. If all ranks are in
        one network namespace, they can use any address, even if their host names differ.
        """
        if len({hello.host.partition("/")[2] for hello in self._hellos.values()}) == 1:
            return
        for host in (host for host, _ in addresses if host):
            address = ipaddress.ip_address(host)
            if address.is_loopback or address.is_unspecified:
                kind = "loopback address" if address.is_loopback else "address of all interfaces"
                self._faults.append(
                    f"rank {rank} on {_name(self._hellos[rank])} gave the other ranks the {kind} "
                    f"{host}, which other hosts cannot reach: {advice}"
                )
                return

    async def _await_progress(self, awaited: Callable[[], str]) -> None:
        """Wait until `_progress` is set; report at growing intervals what rank 0 waits for.

        ``awaited()`` is called for each report, and returns what rank 0 waits for, as text.
        """
        pause_s, waited_s = _FIRST_REPORT_S, 0.0
        waiting = asyncio.ensure_future(self._progress.wait())
        try:
            while not (await asyncio.wait({waiting}, timeout=pause_s))[0]:
                waited_s += pause_s
                pause_s = min(2 * pause_s, _LAST_REPORT_S)
                logs.progress(
                    logger,
                    f"rank 0: init has waited {waited_s:g} s (of {self._timeout_s:g} s) for "
                    f"{awaited()}",
                )
        finally:
            waiting.cancel()

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._identity.nranks) if rank not in self._hellos]

    async def _await_others(self, is_complete: Callable[[], bool]) -> None:
        """After an error, wait until ``is_complete()``, but at most `_FAULT_GRACE_S`.

        Ranks that arrive meanwhile receive the error, too, and errors of other ranks are collected.
        """
        try:
            async with asyncio.timeout(_FAULT_GRACE_S):
                while not is_complete():
                    await self._progress.wait()
        except TimeoutError:
            logger.debug("rank 0: after an error, stopped waiting for the remaining ranks")

    async def _welcome(self, communicator_id: bytes, is_on_one_host: bool) -> None:
        def body(member: _Member) -> bytes:
            address = self._hellos[parent(member.rank)].address
            return encode(Welcome(communicator_id, is_on_one_host, address))

        await self._send((each.sock, body(each)) for each in self._members if each.rank > 0)

    # -- second round -----------------------------------------------------------------------

    def _conclude(self, member: _Member, body: bytes) -> None:
        try:
            message = decode(body)
        except InvalidArgument as exc:
            message = MeetingFailed(str(exc))
        if isinstance(message, Ready):
            self._infos.update((info.rank, info) for info in message.infos)
            self._awaited -= self._infos.keys()
            if not self._awaited:
                self._announce()
        elif isinstance(message, MeetingFailed) and message.lost in self._hellos:
            self._lose(message.lost, message.text)
        else:
            text = message.text if isinstance(message, MeetingFailed) else "unexpected message"
            self._give_up(member.rank)
            if text.startswith(f"rank {member.rank}:"):
                self._fault(text)
            else:
                self._fault(f"rank {member.rank} failed: {text}")

    async def _tell_everyone(self, message: Greeting) -> None:
        body = encode(message)
        await self._send((member.sock, body) for member in self._members)

    async def _send(self, messages: Iterable[tuple[socket.socket, bytes]]) -> None:
        """Send each message over its socket; give up `VERDICT_MARGIN_S` after the start.

        A member that does not receive its message fails by its own timeout, or when rank 0 closes
        the connection.
        """
        try:
            async with asyncio.timeout(VERDICT_MARGIN_S):
                await wire.send_messages(messages)
        except TimeoutError:
            logger.debug("rank 0 could not send its message to all ranks in time")

    def _account_of(self, error: _FoundFaults) -> MeetingFailed:
        if len(self._faults) == len(self._left) > 0:
            first, why = next(iter(self._left.items()))
            return MeetingFailed(why, lost=first, host=_name(self._hellos[first]))
        return MeetingFailed(str(error))

    def _account_of_timeout(self) -> MeetingFailed:
        if self._faults:
            return MeetingFailed("; ".join(self._faults))
        missing = self._missing()
        where = f"{self._identity.address}:{self._identity.port}"
        if not missing:
            return MeetingFailed(
                f"ranks {format_ranks(self._awaited)} arrived at rank 0 ({where}), but their "
                f"addresses did not arrive within {self._timeout_s:g} s: one of these ranks is the "
                "cause, look at their logs",
                is_timeout=True,
            )
        return MeetingFailed(
            f"ranks {format_ranks(missing)} have not arrived at rank 0 ({where}) within "
            f"{self._timeout_s:g} s: {self._turned_away()}{self._secluded()}look at the logs of "
            "the missing ranks, or raise R2CC_INIT_TIMEOUT_S to wait longer",
            is_timeout=True,
        )

    def _turned_away(self) -> str:
        summary = self._rejections.summary()
        return f"rank 0 rejected connections meanwhile: {summary}; " if summary else ""

    def _secluded(self) -> str:
        """Return advice if MASTER_ADDR is a name that resolves to loopback here, else ""."""
        name = self._identity.address
        if self._host == name or not ipaddress.ip_address(self._host).is_loopback:
            return ""
        return (
            f"rank 0 listens at {self._host}, the address of {name} on its host, which other hosts "
            "cannot reach: if the missing ranks are on other hosts, set MASTER_ADDR to an address "
            "that they reach; "
        )


def _with_common_rails(infos: Iterable[PeerInfo]) -> tuple[PeerInfo, ...]:
    """Return `infos` in rank order, each limited to the rails and RDMA ports that every rank has.

    Last-resort rails and other rails are counted separately.
    """
    ordered = sorted(infos, key=lambda info: info.rank)
    nhomes = min(len(info.rails) - info.nlast_resorts for info in ordered)
    nlast = min(info.nlast_resorts for info in ordered)
    nhcas = min(len(info.hcas) for info in ordered)

    def kept(info: PeerInfo, given: tuple[_T, ...]) -> tuple[_T, ...]:
        return (*given[:nhomes], *given[len(given) - info.nlast_resorts :][:nlast])

    return tuple(
        msgspec.structs.replace(
            info,
            rails=kept(info, info.rails),
            probe_ports=kept(info, info.probe_ports),
            interfaces=kept(info, info.interfaces),
            nlast_resorts=nlast,
            hcas=info.hcas[:nhcas],
        )
        for info in ordered
    )


def _name(hello: Hello) -> str:
    return hello.host.split("/", 1)[0]


def _cannot_listen(host: str, port: int, exc: OSError) -> InvalidArgument:
    code = exc.errno or 0
    advice = "check MASTER_ADDR and R2CC_PORT"
    if code == errno.EADDRINUSE:
        advice = (
            "another process uses the port (another job, or a second rank 0): set R2CC_PORT to a "
            "free one"
        )
    elif code != errno.EADDRNOTAVAIL and is_exhaustion(code):
        advice = exhaustion_advice(code)
    return InvalidArgument(
        f"rank 0: cannot listen at {host}:{port}: {decode_errno(code)}; {advice}"
    )


__all__ = ["VERDICT_MARGIN_S", "Leader"]
