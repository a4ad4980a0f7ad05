"""Keep the session with one other rank alive, and know when there is nobody left to talk to.

The lower rank dials: one carrier to the peer's management address and, where rails have other
addresses, one over a rail, so that losing either network delays no message by more than the
session's resend timer. A carrier that ends or falls silent is replaced, addresses in turn.

A peer is *lost* when the kernel of its host says that nobody listens any more at an address it had
listened on (only ECONNREFUSED says that) while no carrier speaks; when its session has been
silent for ``config.peer_timeout_s``; or when another rank says so. It has *left* when it said
Goodbye. All of it runs in the control thread.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from r2ccl.bootstrap import wire
from r2ccl.bootstrap.auth import Claim, HandshakeRejected, Purpose, Secret
from r2ccl.bootstrap.listener import Rejections
from r2ccl.bootstrap.messages import Codec, Goodbye, PeerDown, PeerInfo
from r2ccl.bootstrap.session import FrameError, FrameReader, Session, SessionLimits
from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.types import Nic

logger = logging.getLogger("r2ccl.bootstrap")

#: Heartbeats of one peer timeout; with fewer, one hold of the interpreter lock weighs too much.
_BEATS_PER_TIMEOUT = 5
_MAX_HEARTBEAT_S = 1.0
#: A carrier silent for this many heartbeats is replaced.
_STALE_BEATS = 2.5
#: Bytes a carrier may hold unsent; beyond it frames are dropped and the session resends them.
_MAX_UNSENT_NBYTES = 4 << 20
#: Carriers of one peer; the lower rank uses two, and two more while it replaces both.
_MAX_CARRIERS = 4
_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.5
#: A dial that meets a black hole gives way to the next address.
_DIAL_TIMEOUT_S = 1.0
#: A carrier that ended sooner is not replaced at once: something closes them on purpose.
_SHORT_LIFE_S = 1.0


class PeerState(enum.Enum):
    """OPEN, then LEFT (said Goodbye) or LOST, for good."""

    OPEN = enum.auto()
    LEFT = enum.auto()
    LOST = enum.auto()


class Setting(msgspec.Struct, frozen=True):
    """What all peers of one control plane share."""

    rank: int
    config: Config
    secret: Secret
    communicator_id: bytes
    nics: tuple[Nic, ...]
    codec: Codec
    rejections: Rejections
    clock: Clock


class PeerOwner(Protocol):
    """Whom a `Peer` tells; in the control thread."""

    def on_peer_message(self, peer: int, message: object) -> None:
        """Take a message, `Goodbye` included."""

    def on_peer_end(self, peer: int, why: str, last_heard_s: float, is_hearsay: bool) -> None:
        """`peer` is lost; hearsay: another rank found out and tells everyone."""


class Carrier(asyncio.Protocol):
    """One authenticated TCP connection of a session.

    Parameters
    ----------
    on_data : callable
        Takes the carrier and the bytes received.
    on_end : callable
        Takes the carrier; called once.
    """

    def __init__(
        self,
        number: int,
        on_data: Callable[[Carrier, bytes], None],
        on_end: Callable[[Carrier], None],
    ) -> None:
        self.number = number
        self.reader = FrameReader()
        #: Set when it ended or fell silent: time to replace it.
        self.is_spent = asyncio.Event()
        self._on_data = on_data
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (asyncio's callback)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass bytes on (asyncio's callback)."""
        self._on_data(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end (asyncio's callback)."""
        self._transport = None
        self.is_spent.set()
        self._on_end(self)

    def write(self, frame: bytes) -> None:
        """Send `frame`, or drop it when the connection is gone or does not drain."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() <= _MAX_UNSENT_NBYTES:
            self._transport.write(frame)

    def close(self) -> None:
        """End it after what is buffered."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it now; nobody reads what is buffered."""
        if self._transport is not None:
            self._transport.abort()

    def hang_up(self) -> None:
        """End it now, after what the kernel has taken."""
        if self._transport is not None and self._transport.get_write_buffer_size() == 0:
            self._transport.close()
        else:
            self.abort()


class Peer:
    """The session with rank ``info.rank`` and the connections under it.

    Parameters
    ----------
    info : PeerInfo
    setting : Setting
    owner : PeerOwner
    """

    def __init__(self, info: PeerInfo, setting: Setting, owner: PeerOwner) -> None:
        self.rank = info.rank
        self.state = PeerState.OPEN
        self._info = info
        self._setting = setting
        self._owner = owner
        beat = min(_MAX_HEARTBEAT_S, setting.config.peer_timeout_s / _BEATS_PER_TIMEOUT)
        self._stale_s = _STALE_BEATS * beat
        self._limits = SessionLimits(heartbeat_s=beat)
        self._session = Session(setting.clock(), self._limits)
        self._carriers: dict[int, Carrier] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        #: Set while every carrier is gone or silent.
        self._is_dark = asyncio.Event()
        self._is_leaving = False
        #: Why the last dial failed; empty: there was none, or it succeeded.
        self._obstacle = ""
        #: Set when nothing is left to wait for at close.
        self.is_settled = asyncio.Event()

    # -- for the control plane --------------------------------------------------------------

    def start(self) -> None:
        """Begin to dial, or to wait for the other side's dial."""
        self._session.excuse(self._session.silence_s(self._setting.clock()))
        if self._setting.rank > self.rank:
            self._is_dark.set()
            self._spawn(self._watch())
            return
        over_rails = self._targets_over_rails()
        self._spawn(self._keep_carrier([*self._targets_over_management(), *over_rails]))
        management = {host for host, _ in self._info.control_addresses}
        other_ways = [way for way in over_rails if way[0][0] not in management]
        if other_ways:
            self._spawn(self._keep_carrier(other_ways))

    def send(self, body: bytes) -> None:
        """Queue an encoded message; dropped when the peer has left or is lost."""
        if self.state is PeerState.OPEN:
            self._session.post(body)
            self._flush()

    def say_goodbye(self) -> None:
        """Queue Goodbye; `is_settled` is set once it is acknowledged or nobody is there."""
        if self.state is PeerState.OPEN:
            self._is_leaving = True
            self.send(self._setting.codec.encode(Goodbye()))

    def adopt(self, sock: socket.socket) -> None:
        """Use a connection the peer has dialed and proved."""
        if self.state is PeerState.OPEN:
            task = self._spawn(self._adopt_quietly(sock))
            task.add_done_callback(lambda done: sock.close() if done.cancelled() else None)
        else:
            sock.close()

    def tick(self, now: float, stalled_s: float) -> None:
        """Judge silence; `stalled_s` is how long this process itself did not run."""
        if self.state is not PeerState.OPEN:
            return
        if stalled_s > 0:
            self._session.excuse(stalled_s)
        self._note_darkness(now)
        silence = self._session.silence_s(now)
        if silence > self._setting.config.peer_timeout_s:
            why = f"; the last dial failed: {self._obstacle}" if self._obstacle else ""
            self.lose(f"silent for {silence:.1f} s{why}")

    def lose(self, why: str, is_hearsay: bool = False) -> None:
        """Give the peer up and report it; nothing happens when it has left or was lost before.

        Should it be alive after all, it is told, so that it need not find out by silence.
        """
        if self.state is not PeerState.OPEN:
            return
        self.send(self._setting.codec.encode(PeerDown(self.rank, why)))
        self._end(PeerState.LOST)
        for carrier in list(self._carriers.values()):
            carrier.hang_up()
        last_heard_s = self._setting.clock() - self._session.last_heard
        self._owner.on_peer_end(self.rank, why, last_heard_s, is_hearsay)

    def close(self) -> None:
        """Close every connection and stop every task."""
        self._stop_tasks()
        for carrier in list(self._carriers.values()):
            carrier.close()

    @property
    def last_heard(self) -> float:
        """Clock reading of the last frame."""
        return self._session.last_heard

    # -- carriers ---------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _targets_over_management(self) -> list[tuple[wire.Address, str]]:
        return [(address, "") for address in self._info.control_addresses]

    def _targets_over_rails(self) -> list[tuple[wire.Address, str]]:
        return [
            (address, nic.address)
            for address, nic in zip(self._info.rails, self._setting.nics, strict=True)
        ]

    async def _keep_carrier(self, targets: Sequence[tuple[wire.Address, str]]) -> None:
        old: Carrier | None = None
        while True:
            carrier = await self._dial_any(targets)
            born_at = self._setting.clock()
            if old is not None:
                old.abort()  # it may never drain; what it held leaves again on the new one
            await carrier.is_spent.wait()
            if self._setting.clock() - born_at < _SHORT_LIFE_S:
                await asyncio.sleep(_FIRST_PAUSE_S)
            old = carrier

    async def _dial_any(self, targets: Sequence[tuple[wire.Address, str]]) -> Carrier:
        pause = _FIRST_PAUSE_S
        claim = Claim(Purpose.CONTROL, self._setting.communicator_id, self._setting.rank, self.rank)
        for target, source in itertools.cycle(targets):
            try:
                sock = await wire.dial(
                    self._setting.secret, claim, target, source=source, timeout_s=_DIAL_TIMEOUT_S
                )
                return await self._adopt(sock)
            except ConnectionRefusedError as exc:
                self._obstacle = wire.describe_failure(exc, target, _DIAL_TIMEOUT_S)
                self._judge_refusal(target)
            except (OSError, HandshakeRejected) as exc:
                self._obstacle = wire.describe_failure(exc, target, _DIAL_TIMEOUT_S)
                logger.debug("rank %d: no carrier: %s", self._setting.rank, self._obstacle)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)
        raise AssertionError("a peer without addresses")

    async def _adopt(self, sock: socket.socket) -> Carrier:
        carrier = Carrier(next(self._numbers), self._on_data, self._on_carrier_end)
        await asyncio.get_running_loop().create_connection(lambda: carrier, sock=sock)
        if carrier.is_spent.is_set():
            raise ConnectionResetError("the new carrier ended at once")
        self._carriers[carrier.number] = carrier
        self._obstacle = ""
        self._session.carrier_up(carrier.number, self._setting.clock())
        self._is_dark.clear()
        if len(self._carriers) > _MAX_CARRIERS:
            self._carriers[min(self._carriers)].abort()
        self._flush()
        return carrier

    async def _adopt_quietly(self, sock: socket.socket) -> None:
        try:
            await self._adopt(sock)
        except OSError as exc:
            logger.debug("rank %d: lost a new carrier: %s", self._setting.rank, exc)

    def _on_data(self, carrier: Carrier, data: bytes) -> None:
        try:
            for frame in carrier.reader.feed(data):
                now = self._setting.clock()
                for body in self._session.receive(carrier.number, frame, now):
                    self._deliver(body)
        except FrameError as exc:
            self._setting.rejections.add(exc.reason, f"a connection of rank {self.rank}")
            carrier.close()
        self._flush()
        if self._is_leaving and self._session.unacknowledged == 0:
            self.is_settled.set()

    def _on_carrier_end(self, carrier: Carrier) -> None:
        self._carriers.pop(carrier.number, None)
        self._session.carrier_down(carrier.number)
        if self.state is PeerState.OPEN:
            self._note_darkness(self._setting.clock())
            self._flush()

    def _deliver(self, body: bytes) -> None:
        if self.state is not PeerState.OPEN:
            return
        try:
            message = self._setting.codec.decode(body)
        except msgspec.MsgspecError as exc:
            self.lose(f"it sent a message this rank cannot read: {exc}")
            return
        if isinstance(message, Goodbye):
            # Its connections stay until it closes them: it waits for this acknowledgement.
            self._session.ack_now()
            self._end(PeerState.LEFT)
        self._owner.on_peer_message(self.rank, message)

    def _flush(self) -> None:
        for number, frame in self._session.poll(self._setting.clock()):
            self._carriers[number].write(frame)
        self._arm(self._session.deadline())

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline < float("inf") and self.state is PeerState.OPEN:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._flush()

    # -- liveness ---------------------------------------------------------------------------

    def _note_darkness(self, now: float) -> None:
        is_dark = True
        for number, carrier in self._carriers.items():
            if self._session.carrier_silence_s(number, now) > self._stale_s:
                carrier.is_spent.set()
            else:
                is_dark = False
        if is_dark:
            self._is_dark.set()
        else:
            self._is_dark.clear()

    async def _watch(self) -> None:
        """Probe the peer's listening ports while all connections to it are silent.

        A refused connection means that its process is gone.
        """
        targets = [*self._targets_over_management(), *self._targets_over_rails()]
        pause = _FIRST_PAUSE_S
        for target, source in itertools.cycle(targets):
            if not self._is_dark.is_set():
                await self._is_dark.wait()
                pause = _FIRST_PAUSE_S
            try:
                await wire.probe_port(target, source=source, timeout_s=_DIAL_TIMEOUT_S)
            except ConnectionRefusedError:
                self._judge_refusal(target)
            except OSError as exc:
                logger.debug("rank %d: no answer from %s: %s", self._setting.rank, target, exc)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _judge_refusal(self, target: wire.Address) -> None:
        """Nobody listens at `target` any more: the process is gone, unless a carrier speaks."""
        self._note_darkness(self._setting.clock())
        if self._is_dark.is_set():
            self.lose(f"its process is gone: connection refused at {target[0]}:{target[1]}")

    def _end(self, state: PeerState) -> None:
        self.state = state
        self._stop_tasks()
        self.is_settled.set()

    def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


__all__ = ["Peer", "PeerOwner", "PeerState", "Setting"]
