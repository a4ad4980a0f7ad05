"""Second round of the rendezvous on a rank other than 0: its parent and its children in the tree.

The tree is the binomial tree of `r2ccl.bootstrap.overlay`. A rank sends the addresses of its part
of the tree to its parent, receives the addresses of all ranks from its parent, and sends these to
its children. So rank 0 exchanges addresses with about log2(n) ranks only. Each rank keeps its
connection to rank 0 open until one of the two has finished. Rank 0 reports errors over this
connection. If the connection ends early, rank 0 concludes that the rank has exited.

Runs in the control thread. Invariant: bytes of a child are decoded only after both ends have proved
that they know the secret. The child's claim must name this communicator, this rank as the acceptor
and an awaited child as the dialer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial

from r2ccl.bootstrap import dialing, wire
from r2ccl.bootstrap.auth import Claim, HandshakeRejected, Purpose, Secret
from r2ccl.bootstrap.greetings import (
    MeetingFailed,
    Ready,
    Table,
    Welcome,
    decode,
    encode,
    expect,
)
from r2ccl.bootstrap.listener import Handover, Listener, Rejections, cannot_listen
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.bootstrap.overlay import children, parent
from r2ccl.bootstrap.wire import MessageReader
from r2ccl.errors import InvalidArgument

#: Time limit for sending a message to all children.
_SEND_S = 5.0
_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.5


class Branch:
    """Connections of a rank to its parent and its children in the tree, during the rendezvous.

    Parameters
    ----------
    rank, nranks : int
        ``rank`` is not 0.
    rejections : Rejections
    """

    def __init__(self, rank: int, nranks: int, rejections: Rejections) -> None:
        self._rank = rank
        self._parent = parent(rank)
        self._rejections = rejections
        self._listening: socket.socket | None = None
        self._listener: Listener | None = None
        self._communicator_id = b""
        #: Readers of the connections to the children and to rank 0, by rank.
        self._readers: dict[int, MessageReader] = {}
        self._children: dict[int, socket.socket] = {}
        #: Children that have not sent their part of the tree.
        self._awaited = set(children(rank, nranks))
        self._infos: list[PeerInfo] = []
        #: Set when all children have sent their parts, or one of them sent something else.
        self._is_collected = asyncio.Event()
        self._fault = ""
        self._has_passed_up = False
        self._is_leader_gone = False
        #: Message to rank 0 that the parent is lost; None if no loss was noticed.
        self._orphaned: bytes | None = None
        #: Result of the round, encoded: the `Table` or `MeetingFailed` that the parent or rank 0
        #: sent, or a `MeetingFailed` for the loss of one of them.
        self._outcome: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._obstacle = ""

    def listen(self, host: str) -> wire.Address:
        """Listen for the children at `host`; return the numeric address and the port.

        `host` is a name or an address. Return ``("", 0)`` if this rank has no children. Another
        call replaces the listening socket.

        Raises
        ------
        InvalidArgument
            If this rank cannot listen at `host`.
        """
        if not self._awaited:
            return ("", 0)
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        try:
            self._listening = wire.listen(host)
        except OSError as exc:
            raise cannot_listen(self._rank, host, "rendezvous", exc) from exc
        return wire.address_of(self._listening)

    async def exchange(
        self, own: PeerInfo, secret: Secret, leader: socket.socket, welcome: Welcome
    ) -> tuple[PeerInfo, ...]:
        """Send the addresses of this subtree to the parent; return the addresses of all ranks.

        `own` has the addresses of this rank. `leader`, which is borrowed, is the connection to
        rank 0, on which `welcome` arrived.

        Raises
        ------
        InvalidArgument
            If rank 0 or the parent reports that the rendezvous failed, or sends a message that
            cannot be decoded or is not expected.
        TransportTimeout
            If rank 0 or the parent reports that ranks or addresses did not arrive in time.
        PeerLost
            If rank 0 or the parent is lost, or one of them reports that another rank exited.
        """
        self._communicator_id = welcome.communicator_id
        self._leader = leader
        self._readers[0] = MessageReader(leader, self._settle, self._on_leader_end)
        if self._listening is not None:
            self._listener = Listener([self._listening], secret, self._admit, self._rejections)
            self._listener.start()
        climb = asyncio.get_running_loop().create_task(self._climb(own, secret, welcome.parent))
        try:
            body = await self._outcome
            await self._tell_children(body)
        finally:
            climb.cancel()
            await asyncio.gather(climb, return_exceptions=True)
        message = decode(body)
        if isinstance(message, MeetingFailed):
            raise message.error(self._rank, self.account() if message.is_timeout else "")
        return expect(Table, body).peers()

    def account(self) -> str:
        """Return what this rank waits for, as a clause for an error message.

        The result is empty unless this rank waits for a child in the tree, or has failed to connect
        to its parent.
        """
        if self._awaited and self._communicator_id:
            return f"waits for the addresses of ranks {sorted(self._awaited)}"
        if self._obstacle and not self._has_passed_up:
            return f"has not reached rank {self._parent}: {self._obstacle}"
        return ""

    async def close(self) -> None:
        """Close the listener and all connections except the one to rank 0; call it once."""
        for reader in self._readers.values():
            reader.stop()
        for sock in self._children.values():
            sock.close()
        if self._listener is not None:
            await self._listener.close()
        elif self._listening is not None:
            self._listening.close()

    # -- rank 0 -----------------------------------------------------------------------------

    def _settle(self, body: bytes) -> None:
        if not self._outcome.done():
            self._outcome.set_result(body)

    def _on_leader_end(self, exc: OSError) -> None:
        """Handle the end of the connection to rank 0: fail unless the parent may still answer.

        Rank 0 has exited or finished. It finishes when it has the addresses of all ranks and has
        sent them to its children in the tree. So it has exited if this rank is one of these
        children, or if this rank has not sent its addresses to its parent yet.
        """
        self._is_leader_gone = True
        if self._parent == 0 or not self._has_passed_up:
            self._settle(encode(MeetingFailed(str(exc), lost=0)))
        elif self._orphaned is not None:
            self._settle(self._orphaned)

    # -- children ---------------------------------------------------------------------------

    def _admit(self, claim: Claim, listener: int) -> Handover:
        if claim.purpose is not Purpose.RENDEZVOUS:
            raise HandshakeRejected("not a rendezvous")
        if claim.communicator != self._communicator_id or claim.dst != self._rank:
            raise HandshakeRejected("another rendezvous")
        if claim.src not in self._awaited:
            raise HandshakeRejected("not an awaited child")
        return partial(self._receive_child, claim.src)

    def _receive_child(self, child: int, sock: socket.socket) -> None:
        if child in self._children:  # the child has given up an earlier connection
            self._readers[child].stop()
            self._children[child].close()
        self._children[child] = sock
        self._readers[child] = MessageReader(
            sock, partial(self._on_child_message, child), lambda exc: None
        )

    def _on_child_message(self, child: int, body: bytes) -> None:
        try:
            self._infos += expect(Ready, body).infos
        except InvalidArgument as exc:
            self._fault = f"its child rank {child}: {exc}"
        self._awaited.discard(child)
        if self._fault or not self._awaited:
            self._is_collected.set()

    async def _tell_children(self, body: bytes) -> None:
        """Send `body` to all children within `_SEND_S`.

        A child that does not receive `body` fails when this rank closes the connection.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEND_S):
                await wire.send_messages((sock, body) for sock in self._children.values())

    # -- parent -----------------------------------------------------------------------------

    async def _climb(self, own: PeerInfo, secret: Secret, address: wire.Address) -> None:
        """Wait for the children's addresses; send the addresses of this subtree to the parent.

        A parent other than rank 0 answers with the addresses of all ranks, or with an error: wait
        for this answer. If a child sends anything but addresses, send the error to rank 0, and
        no addresses to the parent.
        """
        if self._awaited:
            await self._is_collected.wait()
        if self._fault:
            await self._tell_leader(encode(MeetingFailed(self._fault)))
            return
        body = encode(Ready((own, *self._infos)))
        if self._parent == 0:
            await self._tell_leader(body)
            return
        try:
            with await self._reach_parent(secret, address) as sock:
                await wire.send_message(sock, body)
                self._has_passed_up = True
                self._settle(await wire.receive_message(sock))
        except OSError as exc:
            await self._miss_parent(exc)

    async def _reach_parent(self, secret: Secret, address: wire.Address) -> socket.socket:
        """Connect to the parent; retry until it works.

        Raises
        ------
        ConnectionRefusedError
            If the connection is refused. The parent has ended then, because it began to listen
            before this rank learned its address.
        """
        claim = Claim(Purpose.RENDEZVOUS, self._communicator_id, self._rank, self._parent)
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await dialing.dial(secret, claim, address)
            except ConnectionRefusedError:
                raise
            except (OSError, HandshakeRejected) as exc:
                self._obstacle = dialing.describe_failure(exc, address, wire.HANDSHAKE_TIMEOUT_S)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    async def _miss_parent(self, exc: OSError) -> None:
        """Tell rank 0, which tells all ranks, that the parent is lost.

        If the connection to rank 0 has ended, only this rank and its subtree fail.
        """
        why = f"its connection to rank {self._rank} failed: {exc}"
        self._orphaned = encode(MeetingFailed(why, lost=self._parent))
        if self._is_leader_gone:
            self._settle(self._orphaned)
        else:
            await self._tell_leader(self._orphaned)

    async def _tell_leader(self, body: bytes) -> None:
        with contextlib.suppress(OSError):  # `_on_leader_end` handles the end of the connection
            await wire.send_message(self._leader, body)


__all__ = ["Branch"]
