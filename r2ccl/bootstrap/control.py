"""Control plane: one thread that runs the control sessions, opens data sockets and monitors peers.

A rank has sessions with its neighbors in the overlay network of `r2ccl.bootstrap.overlay`, and with
the ranks that it exchanges data with. Messages to other ranks pass through neighbors.

A rank that is busy in user code must still answer its peers, so the control thread always runs.
The data plane calls the methods of `ControlPlane`; the control plane calls the methods of its
`ControlHandler`, in the control thread. The control plane does not interpret the messages of the
data plane, and does not use the sockets that it hands over.

Invariants: until one of two ranks is lost or leaves, each message over their session is delivered
exactly once and in order, even if connections fail; a socket is handed over only after both ends
proved the secret, and only if its (peer, rail, epoch) is the expected one; a peer is reported lost
at most once. A message that passes through neighbors may be lost if one of them is lost or leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from r2ccl.bootstrap.auth import Claim, HandshakeRejected, Purpose, Secret
from r2ccl.bootstrap.bypass import Forwarder
from r2ccl.bootstrap.listener import MAX_PENDING, Handover, Listener, Rejections
from r2ccl.bootstrap.loop import ControlLoop
from r2ccl.bootstrap.messages import Codec, Flooded, Goodbye, PeerDown, PeerInfo, Routed
from r2ccl.bootstrap.overlay import Overlay
from r2ccl.bootstrap.paths import Paths
from r2ccl.bootstrap.peer import Peer, Setting
from r2ccl.clock import Clock, monotonic
from r2ccl.config import Config
from r2ccl.errors import InternalError, InvalidArgument
from r2ccl.types import BYPASS, BypassWay, Nic, PathKey

logger = logging.getLogger("r2ccl.bootstrap")

_BUSY_TICK_S = 0.02
_IDLE_TICK_S = 0.1
#: If a tick is late by more than this, the process was stopped or blocked meanwhile.
_STALL_S = 0.05
#: Time that `close` gives the thread to end, after its deadline for Goodbyes.
_STOP_S = 1.0


class ControlHandler(Protocol):
    """Callbacks of a `ControlPlane`, all made in the control thread.

    Every method must return quickly (well under a millisecond) and must not raise: an exception is
    logged and ends only that callback.
    """

    def on_message(self, peer: int, message: object) -> None:
        """Handle a message from `peer`.

        Over a session, each message arrives exactly once, in the order sent. A message that passes
        through other ranks arrives at most once. `message` has one of the registered types, or is
        `Goodbye` when a peer that this rank has a session with closes normally.
        """

    def on_path(self, peer: int, rail: int, epoch: int, sock: socket.socket) -> None:
        """Take ownership of the socket of a new path.

        The socket is connected, authenticated and non-blocking, with TCP_NODELAY; the first byte
        to read is from the peer's transport. Called at both ends, once per successful
        `accept_path`, `dial_path` or `dial_bypass`.
        """

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """Handle the loss of `peer`; called at most once per peer, as the last callback about it.

        Parameters
        ----------
        peer : int
        why : str
            Evidence of the loss.
        last_heard_s : float or None
            Seconds from the last sign of life of `peer` until its loss was found, measured by the
            rank that found the loss. If `peer` has given this rank up: seconds since this rank
            received the last sign of life of `peer`, or None if it has no session with `peer`. Also
            None if `peer` counts as lost because every route to it contains a lost rank.
        """

    def on_tick(self, now: float) -> None:
        """Advance timers: called about every 20 ms while `ControlPlane.is_busy`, else every 100 ms.

        `now` is the time in seconds of the control plane's clock.
        """


class ControlPlane:
    """Control plane of a rank: control sessions, messages to other ranks, data sockets, liveness.

    Made by `r2ccl.bootstrap.connect` and, for a shrink, by `r2ccl.bootstrap.succession`. All
    methods except `close` return without blocking and, unless they say otherwise, may be called
    from any thread. Requests before `start` take effect at `start`. The callbacks that methods take
    (`on_failed`, `fn`) run in the control thread. Except `obstacles`, methods raise InvalidArgument
    if `peer` is not another rank, or `rail` is not the number of a TCP rail; only `accept_path` and
    `cancel_path` also take rail `BYPASS`. Methods that take a message raise InvalidArgument if
    `Codec.encode` refuses it: its type was not registered, or it is too long.

    Parameters
    ----------
    loop : ControlLoop
        Loop of the control thread. Owned: `close` ends it.
    config : Config
    secret : Secret
    communicator_id : bytes
        16 unpredictable bytes, equal on all ranks, different after every rendezvous and shrink.
    rank : int
    peers : tuple of PeerInfo
        One entry per rank, including this one.
    nics : tuple of Nic
        This rank's NICs of the TCP rails: ``nics[i]`` is the local end of rail i. RDMA rails, which
        the transport connects, have higher numbers.
    listeners : sequence of socket.socket
        Listener of rail i at index i, then the control listeners. Owned.
    probe_sockets : sequence of socket.socket
        Bound sockets that do not listen and reserve this rank's probe ports. Owned.
    codec : Codec
        Encoder and decoder of the messages of the control sessions.
    rejections : Rejections, optional
        Counters of rejected connections, which already include those of the rendezvous.
    clock : Clock, optional
        Must be the clock of asyncio.

    Attributes
    ----------
    rank, peers, nics, communicator_id
        As given.
    nranks : int
        Number of ranks.
    neighbors : frozenset of int
        Ranks that this rank has a session with from the start, and that `gossip` sends to.
    is_busy : bool
        True while a call waits in the data loop or runs in compiled code; the data loop sets it.
        The control thread reads it at every tick; setting it wakes no thread.
    is_on_one_host : bool
        True if all ranks have equal `PeerInfo.host`, and thus share one network stack.
    is_loopback : bool
        True if there are no RDMA rails, and all TCP rails are loopback. Equal on all ranks.
    nwires : int
        Number of rails whose bandwidths add up; equal on all ranks. With RDMA, the number of RDMA
        ports. Without RDMA, 1 if all rails are loopback, because they share the memory bandwidth;
        otherwise the number of rails that are not last resorts, or of all rails if all are last
        resorts.
    last_resorts : frozenset of int
        TCP rails that carry slices only between two ranks that have no other rail left; see `Nic`.
        Empty if all TCP rails are last resorts. Also empty if there are RDMA rails, because all TCP
        rails are then used only as last resorts.
    nhcas : int
        Number of RDMA ports that every rank uses.
    setting : Setting
        Values from which `r2ccl.bootstrap.succession` makes the next control plane.
    """

    def __init__(
        self,
        *,
        loop: ControlLoop,
        config: Config,
        secret: Secret,
        communicator_id: bytes,
        rank: int,
        peers: tuple[PeerInfo, ...],
        nics: tuple[Nic, ...],
        listeners: Sequence[socket.socket],
        probe_sockets: Sequence[socket.socket] = (),
        codec: Codec,
        rejections: Rejections | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.rank = rank
        self.nranks = len(peers)
        self.peers = peers
        self._everyone = frozenset(range(self.nranks)) - {rank}
        self.nics = nics
        self.communicator_id = communicator_id
        self.is_on_one_host = len({info.host for info in peers}) == 1
        self.nhcas = len(peers[rank].hcas)
        nhomes = len(nics) - peers[rank].nlast_resorts
        self.last_resorts = frozenset(range(nhomes, len(nics))) if nhomes else frozenset()
        self.is_loopback = not self.nhcas and _is_loopback(peers)
        self.nwires = self.nhcas or (1 if self.is_loopback else nhomes or len(nics))
        self.is_busy = False
        self._loop = loop
        self._clock = clock
        self._codec = codec
        self._rejections = rejections or Rejections(rank, clock)
        self.setting = setting = Setting(
            rank, config, secret, communicator_id, nics, self._codec, self._rejections, clock
        )
        self._overlay = Overlay(rank, len(peers))
        self.neighbors = self._overlay.neighbors
        self._sessions = {peer: Peer(peers[peer], setting, self) for peer in self.neighbors}
        #: Number of the last broadcast of each rank.
        self._nflooded: dict[int, int] = {}
        self._paths = Paths(peers, setting, self._on_path)
        self._forwarder = Forwarder(peers, setting)
        self._probe_sockets = tuple(probe_sockets)
        # All neighbors may connect at once, on every rail and for a session.
        most = max(MAX_PENDING, len(self._sessions) * (len(nics) + 2))
        self._listener = Listener(
            listeners, secret, self._admit, self._rejections, max_pending=most
        )
        self._handler: ControlHandler | None = None
        self._inbox: deque[Callable[[], object]] = deque()
        self._is_woken = True  # no wake-up before `start`: work waits in the inbox
        self._is_closing = False
        self._close_lock = threading.Lock()
        self._ticked_at = 0.0
        self._tick_s = _IDLE_TICK_S

    # -- life -------------------------------------------------------------------------------

    def start(self, handler: ControlHandler) -> None:
        """Connect the sessions, accept connections, and report all events to `handler`.

        This method may be called only once.

        Raises
        ------
        InternalError
            If `start` was called before.
        """
        if self._handler is not None:
            raise InternalError(f"rank {self.rank}: the control plane was started before")
        self._handler = handler
        self._loop.loop.call_soon_threadsafe(self._start)

    def close(self, deadline_s: float) -> None:
        """Send Goodbye on all sessions, wait for the acknowledgements, and end the thread.

        The acknowledgement of Goodbye covers all earlier messages. Sockets that were handed over
        stay open, because the transport owns them. Idempotent. The control thread must not call it.

        Parameters
        ----------
        deadline_s : float
            Longest wait for the acknowledgements, in seconds. If 0, no Goodbye is sent, and the
            peers report this rank as lost.
        """
        with self._close_lock:
            if self._is_closing:
                return
            self._is_closing = True
            try:
                self._loop.run(self._shut_down(deadline_s))
            finally:
                self._loop.close(_STOP_S)

    def descriptors(self) -> list[int]:
        """Return the open file descriptors; only a forked child may call this."""
        held = (sock.fileno() for sock in self._probe_sockets)
        return [*self._loop.descriptors(), *self._listener.descriptors(), *held]

    def disable(self) -> None:
        """Make the methods that need the control thread no-ops; for the child of a fork."""
        self._is_closing = True

    def _start(self) -> None:
        self._listener.start()
        for peer in list(self._sessions.values()):
            peer.start()
        self._ticked_at = self._clock()
        self._loop.loop.call_later(self._tick_s, self._tick)
        self._drain()

    async def _shut_down(self, deadline_s: float) -> None:
        self._drain()
        if deadline_s > 0 and self._handler is not None:
            for peer in self._sessions.values():
                peer.say_goodbye()
            settled = (peer.is_settled.wait() for peer in self._sessions.values())
            try:
                async with asyncio.timeout(deadline_s):
                    await asyncio.gather(*settled)
            except TimeoutError:
                silent = [r for r, peer in self._sessions.items() if not peer.is_settled.is_set()]
                logger.warning(
                    "rank %d: ranks %s did not acknowledge close() within %.1f s; they may report "
                    "this rank as lost",
                    self.rank,
                    silent,
                    deadline_s,
                )
        self._paths.close()
        self._forwarder.close()
        for peer in self._sessions.values():
            peer.close()
        await self._listener.close()
        for sock in self._probe_sockets:
            sock.close()

    def _tick(self) -> None:
        now = self._clock()
        late_s = now - self._ticked_at - self._tick_s
        self._ticked_at = now
        self._tick_s = _BUSY_TICK_S if self.is_busy else _IDLE_TICK_S
        self._loop.loop.call_later(self._tick_s, self._tick)
        for peer in list(self._sessions.values()):
            peer.tick(now, late_s if late_s > _STALL_S else 0.0)
        for rank in self._overlay.cut_off():
            self._lose(rank, "every route to it contains a lost rank", None)
        if self._handler is not None:
            self._guard(self._handler.on_tick, now)

    # -- messages ---------------------------------------------------------------------------

    def send(self, peer: int, message: object) -> None:
        """Queue `message` for `peer`; `message` is encoded now and may be changed afterwards.

        If this rank has no session with `peer`, the message passes through other ranks. It is
        dropped if `peer` is lost or has left, or if `close` was called.
        """
        self._check(peer)
        self._do(functools.partial(self._send, peer, self._codec.encode(message)))

    def gossip(self, message: object, source: int = -1) -> None:
        """Queue `message` for every rank in ``neighbors`` except `source`; -1 excludes none.

        The content reaches all ranks if every rank passes on the content that is new to it.
        """
        self._do(functools.partial(self._gossip, self._codec.encode(message), source))

    def broadcast(self, message: object) -> None:
        """Queue `message` for every other rank.

        Each rank passes the message on to its neighbors, so it arrives even if ranks are lost
        meanwhile, as long as the overlay network connects the others. All ranks together send about
        2 n log2(n) messages.
        """
        self._do(functools.partial(self._broadcast, self._codec.encode(message)))

    def tell_contacts(self, message: object) -> None:
        """Queue `message` for every rank with which this rank has a session, except neighbors.

        Call it after the last `broadcast` before `close`, with the same message. Otherwise
        `Goodbye` may reach these ranks, over the session, before the broadcast does, and ranks drop
        broadcasts of a rank that has left.
        """
        self._do(functools.partial(self._tell_contacts, self._codec.encode(message)))

    def open_session(self, peer: int) -> None:
        """Connect a session with `peer`, which must also call this method.

        The lower rank dials when a message is sent over the session, at the latest after 20 ms.
        Does nothing if there is a session already.
        """
        self._check(peer)
        self._do(functools.partial(self._open_session, peer))

    def last_heard(self, peer: int) -> float | None:
        """Return the time of the last sign of life from `peer`, by the control plane's clock.

        Before the first sign of life, return the time at which the session was made. Return None if
        this rank has no session with `peer`.
        """
        self._check(peer)
        session = self._sessions.get(peer)
        return None if session is None else session.last_heard

    def rejections(self) -> Mapping[str, int]:
        """Return the number of rejected connections, frames and messages, by reason."""
        return dict(self._rejections.counts)

    # -- paths ------------------------------------------------------------------------------

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        """Accept one data connection with exactly this (peer, rail, epoch).

        To be called by the higher of the two ranks. Replaces an earlier `accept_path` of the same
        (peer, rail). A connection that arrives up to 1 s before this call waits for it; a
        connection of an older epoch is rejected.
        """
        key = self._path_key(peer, rail)
        self._do(lambda: self._paths.accept(key, epoch))

    def dial_path(
        self, peer: int, rail: int, epoch: int, on_failed: Callable[[str], None] | None = None
    ) -> None:
        """Connect the path to `peer` on `rail`, from ``nics[rail].address``.

        To be called by the lower of the two ranks. Retries until it succeeds
        (`ControlHandler.on_path`), `cancel_path` is called, or `peer` is lost or leaves; the pause
        between attempts is 0.05 s and doubles up to 1 s. Replaces an earlier dial of the same
        (peer, rail). `on_failed` is called with the reason after each failed attempt. Does nothing
        if `peer` is already lost or has left.
        """
        self._check_rail(rail)
        key = self._path_key(peer, rail)
        guarded = None if on_failed is None else functools.partial(self._guard, on_failed)
        self._do(lambda: self._paths.dial(key, epoch, guarded) if self._is_open(peer) else None)

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        """Connect the path of rail `BYPASS` to `peer` by the first of `ways` that works.

        To be called by the lower of the two ranks. Tries each way once; a failure of all ways is
        only logged. Replaces an earlier `dial_bypass` of the same peer. Does nothing if `peer` is
        lost or has left.
        """
        self._check(peer)
        self._do(
            lambda: self._paths.dial_bypass(peer, epoch, ways) if self._is_open(peer) else None
        )

    def cancel_path(self, peer: int, rail: int) -> None:
        """Cancel `accept_path`, `dial_path` and `dial_bypass` of this path.

        After a call in the control thread, no `on_path` for the path follows. After a call in
        another thread, `on_path` may be called until the control thread has carried out the call.
        """
        key = self._path_key(peer, rail)
        self._do(lambda: self._paths.cancel(key))

    def kick(self, rail: int) -> None:
        """Try to connect the pending paths of `rail` now, without waiting for their next retry.

        Useful when the local NIC works again.
        """
        self._check_rail(rail)
        self._do(lambda: self._paths.kick(rail))

    def obstacles(self, peer: int) -> list[str]:
        """Return the reasons known to this rank why paths to `peer` are not connected.

        If `peer` is the rank that dials, this rank knows only the connections that it rejected,
        which may come from any host. Any thread may call this.
        """
        found = self._paths.obstacles(peer)
        turned_away = self._rejections.summary() if peer < self.rank else ""
        told = [f"rank {self.rank} rejected connections: {turned_away}"] if turned_away else []
        return [*found, *told]

    def report_exit(self, peer: int) -> None:
        """Report the loss of `peer`, whose process has ended, after delivering its last messages.

        Without a session with `peer`, do nothing: messages of `peer`, such as the reason of a
        revocation, may still arrive through other ranks, and a rank that has a session with `peer`
        reports the loss.
        """
        self._check(peer)
        soon = self._loop.loop.call_soon
        # Between the two callbacks, the loop reads what the sockets of the session have received.
        self._do(lambda: soon(soon, self._guard, self._on_exit, peer))

    # -- access to the loop -----------------------------------------------------------------

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread as soon as possible."""
        if self._loop.is_current():
            self._loop.loop.call_soon(self._guard, fn)
        else:
            self._do(functools.partial(self._guard, fn))

    def call_later(self, delay_s: float, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread after `delay_s` seconds."""
        self._do(lambda: self._loop.loop.call_later(delay_s, self._guard, fn))

    def add_reader(self, fd: int, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread whenever `fd` is readable."""
        self._do(lambda: self._loop.loop.add_reader(fd, self._guard, fn))

    def remove_reader(self, fd: int) -> None:
        """Stop watching `fd`; must be called before `fd` is closed."""
        self._do(lambda: self._loop.loop.remove_reader(fd))

    # -- callbacks of the sessions, the listener and the paths -------------------------------

    def on_peer_message(self, peer: int, message: object) -> None:
        """Handle a message from `peer` (called by the session)."""
        if isinstance(message, PeerDown):
            self._on_peer_down(peer, message)
            return
        if isinstance(message, Routed):
            self._on_routed(peer, message)
            return
        if isinstance(message, Flooded):
            self._on_flooded(peer, message)
            return
        if isinstance(message, Goodbye):
            self._overlay.leave(peer)
            self._paths.forget_peer(peer)
        self._pass_on(peer, message)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float) -> None:
        """Report the loss of `peer`, which this rank found, to the handler and all other ranks."""
        if self._lose(peer, why, last_heard_s):
            news = PeerDown(peer, why, self.rank, last_heard_s)
            self._gossip(self._codec.encode(news), -1)

    def _on_exit(self, peer: int) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            session.lose("its process is gone: the kernel has released its mutex in shared memory")

    def _on_peer_down(self, sender: int, news: PeerDown) -> None:
        if news.rank == self.rank:
            # The other ranks are not told of these losses: the witness has told them that this rank
            # is lost.
            for peer in {sender, news.witness} & self._everyone:
                # Not `news.last_heard_s`, which is the silence of this rank.
                session = self._sessions.get(peer)
                silence_s = None if session is None else session.silence_s
                self._lose(peer, f"it counts rank {self.rank} as lost: {news.why}", silence_s)
        elif news.rank in self._everyone:
            why = f"{news.why}, says rank {news.witness}"
            if self._lose(news.rank, why, news.last_heard_s, news.witness):
                self._gossip(self._codec.encode(news), sender)

    def _lose(
        self, peer: int, why: str, last_heard_s: float | None, witness: int | None = None
    ) -> bool:
        """Report the loss of `peer` to the handler; return True if other ranks must be told.

        Return False if `peer` is lost or has left already, or this control plane is not started or
        is closing. `witness` is the rank that found the loss; None means this rank.
        """
        if self._overlay.is_closed(peer):
            return False
        self._overlay.lose(peer)
        if peer in self._sessions:
            self._sessions[peer].drop(why, self.rank if witness is None else witness)
        self._paths.forget_peer(peer)
        if self._handler is None or self._is_closing:
            return False
        logger.info("rank %d: lost rank %d: %s", self.rank, peer, why)
        self._guard(self._handler.on_peer_lost, peer, why, last_heard_s)
        return True

    def _on_routed(self, sender: int, message: Routed) -> None:
        is_rank = 0 <= message.destination < self.nranks
        if message.source not in self._everyone or not is_rank:
            self._rejections.add("malformed route", f"a message of rank {sender}")
        elif message.destination != self.rank:
            self._route(message)
        else:
            self._open_up(sender, message)

    def _on_flooded(self, sender: int, message: Flooded) -> None:
        source = message.source
        if source == self.rank or message.number <= self._nflooded.get(source, 0):
            return
        if source not in self._everyone:
            self._rejections.add("malformed route", f"a message of rank {sender}")
            return
        self._nflooded[source] = message.number
        self._gossip(self._codec.encode(message), sender)
        self._open_up(sender, message)

    def _open_up(self, sender: int, message: Routed | Flooded) -> None:
        if self._overlay.is_closed(message.source):
            return  # the handler gets no message of a rank after its loss
        try:
            inner = self._codec.decode(message.body)
        except msgspec.MsgspecError as exc:
            self._rejections.add("unreadable message", f"a message of rank {sender}: {exc}")
        else:
            self._pass_on(message.source, inner)

    def _pass_on(self, peer: int, message: object) -> None:
        if self._handler is not None and not self._is_closing:
            self._guard(self._handler.on_message, peer, message)

    def _on_path(self, peer: int, rail: int, epoch: int, sock: socket.socket) -> None:
        if self._handler is None or self._is_closing:
            sock.close()
        else:
            self._guard(self._handler.on_path, peer, rail, epoch, sock)

    def _admit(self, claim: Claim, listener: int) -> Handover | Coroutine[Any, Any, Handover]:
        if claim.communicator != self.communicator_id:
            raise HandshakeRejected("another communicator")
        is_forward = claim.purpose is Purpose.FORWARD
        if claim.dst != self.rank or not (claim.src < self.rank or is_forward):
            raise HandshakeRejected("wrong pair of ranks")
        if claim.src not in self._everyone:
            raise HandshakeRejected("no rank of this communicator")
        if not self._is_open(claim.src):
            raise HandshakeRejected("a rank that is lost or has left")
        if claim.purpose is Purpose.CONTROL:
            return self._open_session(claim.src).adopt
        if claim.purpose is Purpose.DATA:
            return self._paths.admit(claim, listener)
        if is_forward:
            return self._forwarder.admit(claim)
        raise HandshakeRejected("rendezvous is over")

    # -- helpers ----------------------------------------------------------------------------

    def _send(self, peer: int, body: bytes) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            session.send(body)
        else:
            self._route(Routed(self.rank, peer, self._overlay.max_hops, body))

    def _broadcast(self, body: bytes) -> None:
        number = self._nflooded[self.rank] = self._nflooded.get(self.rank, 0) + 1
        self._gossip(self._codec.encode(Flooded(self.rank, number, body)), -1)

    def _tell_contacts(self, body: bytes) -> None:
        for peer, session in self._sessions.items():
            if peer not in self.neighbors:
                session.send(body)

    def _gossip(self, body: bytes, source: int) -> None:
        for peer in self._overlay.open_neighbors():
            if peer != source:
                self._sessions[peer].send(body)

    def _route(self, message: Routed) -> None:
        if self._overlay.is_closed(message.destination):
            return
        hop = self._overlay.next_hop(message.destination)
        if hop is not None and message.nhops > 0:
            message = msgspec.structs.replace(message, nhops=message.nhops - 1)
            self._sessions[hop].send(self._codec.encode(message))

    def _open_session(self, peer: int) -> Peer:
        session = self._sessions.get(peer)
        if session is None:
            session = self._sessions[peer] = Peer(self.peers[peer], self.setting, self)
            if self._overlay.is_closed(peer):
                session.drop("it is lost or has left", self.rank)
            else:
                session.start_soon()
        return session

    def _check(self, peer: int) -> None:
        if peer not in self._everyone:
            raise InvalidArgument(
                f"rank {self.rank}: peer {peer} was given; it must be a rank from 0 to "
                f"{self.nranks - 1} other than {self.rank}"
            )

    def _is_open(self, peer: int) -> bool:
        return not self._overlay.is_closed(peer)

    def _path_key(self, peer: int, rail: int) -> PathKey:
        self._check(peer)
        if rail != BYPASS:
            self._check_rail(rail)
        return PathKey(peer, rail)

    def _check_rail(self, rail: int) -> None:
        if not 0 <= rail < len(self.nics):
            raise InvalidArgument(
                f"rank {self.rank}: rail {rail} was given; the number of rails is {len(self.nics)}"
            )

    def _guard(self, fn: Callable[..., object], *args: object) -> None:
        try:
            fn(*args)
        except Exception:
            logger.exception("rank %d: a callback failed", self.rank)

    def _do(self, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread, after earlier requests; drop it if `close` was called."""
        if self._is_closing:
            return
        self._inbox.append(fn)
        if self._loop.is_current() and self._handler is not None:
            self._drain()
        elif not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # another thread just closed the loop
                self._loop.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._is_woken = False  # first, so that work added from now on wakes the thread again
        while self._inbox:
            self._guard(self._inbox.popleft())


def _is_loopback(peers: Iterable[PeerInfo]) -> bool:
    hosts = {host for info in peers for host, _ in info.rails}
    return all(ipaddress.ip_address(host).is_loopback for host in hosts)


__all__ = ["ControlHandler", "ControlPlane", "Goodbye", "PeerDown", "PeerInfo"]
