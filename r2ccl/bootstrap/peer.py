"""Control session with one other rank: its connections, and detection that the rank is lost.

A *carrier* is a TCP connection of the session. The lower of the two ranks dials one carrier to the
peer's control address and, if rails have other addresses, a second one over a rail. The loss of
either network then delays no message by more than the session's resend timer. A carrier that ends
or is silent for too long is replaced; the addresses are tried in turn.

A peer is *lost* when a connection to one of its listening addresses is refused (ECONNREFUSED: its
process is gone) while all carriers are silent; when shared memory shows that its process has ended
(`ControlPlane.report_exit`); when its session has been silent for ``config.peer_timeout_s``; when
it sends a message that cannot be decoded; when another rank reports its loss; when it has given
this rank up; or when lost ranks cut it off from this rank in the overlay network. A peer has *left*
when it sent Goodbye. The code runs in the control thread.
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

from r2ccl.bootstrap import dialing, wire
from r2ccl.bootstrap.auth import Claim, HandshakeRejected, Purpose, Secret
from r2ccl.bootstrap.listener import Rejections
from r2ccl.bootstrap.messages import Codec, Goodbye, PeerDown, PeerInfo
from r2ccl.bootstrap.session import FrameError, FrameReader, Session, SessionLimits
from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.types import Nic

logger = logging.getLogger("r2ccl.bootstrap")

#: Minimum number of heartbeats per peer timeout: a thread that holds the GIL may delay some.
_BEATS_PER_TIMEOUT = 5
_MAX_HEARTBEAT_S = 1.0
#: A carrier that is silent for this many heartbeat intervals is replaced.
_STALE_BEATS = 2.5
#: Maximum number of unsent bytes of a carrier; above it, frames are dropped and the session resends
#: them.
_MAX_UNSENT_NBYTES = 4 << 20
#: Maximum number of carriers of one peer: the lower rank uses two, and two more while it replaces
#: both. A further one evicts the oldest.
_MAX_CARRIERS = 4
_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.5
#: Time limit of one connect, in seconds; then the next address is tried.
_DIAL_TIMEOUT_S = 1.0
#: A session that is opened for data paths is dialed when a message is sent over it, at the latest
#: after this time: the paths, which a call waits for, are connected first.
_GIVE_WAY_S = 0.02
#: A carrier that ends sooner is replaced only after a pause, in case the next one ends as soon.
_SHORT_LIFE_S = 1.0


class PeerState(enum.Enum):
    """State of a peer: OPEN, then permanently LEFT (it sent Goodbye) or LOST."""

    OPEN = enum.auto()
    LEFT = enum.auto()
    LOST = enum.auto()


class Setting(msgspec.Struct, frozen=True):
    """Values shared by the sessions, paths and bypasses of one control plane."""

    rank: int
    config: Config
    secret: Secret
    communicator_id: bytes
    nics: tuple[Nic, ...]
    codec: Codec
    rejections: Rejections
    clock: Clock


class PeerOwner(Protocol):
    """Callbacks of a `Peer`, made in the control thread."""

    def on_peer_message(self, peer: int, message: object) -> None:
        """Handle a message from `peer`, including `Goodbye`."""

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float) -> None:
        """Handle the loss of `peer`, which this rank found for the reason `why`.

        `last_heard_s` is the time in seconds since the last frame from `peer` or, if there was
        none, since the session was made.
        """


class Carrier(asyncio.Protocol):
    """Authenticated TCP connection of a session.

    Parameters
    ----------
    number : int
        Identifies the carrier in its session.
    on_data : callable
        Called with the carrier and received bytes.
    on_end : callable
        Called with the carrier, once, when the connection has ended.
    """

    def __init__(
        self,
        number: int,
        on_data: Callable[[Carrier, bytes], None],
        on_end: Callable[[Carrier], None],
    ) -> None:
        self.number = number
        self.reader = FrameReader()
        #: Set when the carrier ended or is silent for too long, and must be replaced.
        self.is_spent = asyncio.Event()
        self._on_data = on_data
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport (callback of asyncio)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to `on_data` (callback of asyncio)."""
        self._on_data(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection to `on_end` (callback of asyncio)."""
        self._transport = None
        self.is_spent.set()
        self._on_end(self)

    def write(self, frame: bytes) -> None:
        """Send `frame`, or drop it if the connection has ended or holds too many unsent bytes."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() <= _MAX_UNSENT_NBYTES:
            self._transport.write(frame)

    def close(self) -> None:
        """Close the connection after its buffered bytes are sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection now and discard the bytes that the kernel has not buffered yet."""
        if self._transport is not None:
            self._transport.abort()

    def hang_up(self) -> None:
        """Close the connection now; only bytes that the kernel has buffered are still sent."""
        if self._transport is not None and self._transport.get_write_buffer_size() == 0:
            self._transport.close()
        else:
            self.abort()


class Peer:
    """Control session with one other rank, and the TCP connections (carriers) that it uses.

    Parameters
    ----------
    info : PeerInfo
        The other rank and its addresses.
    setting : Setting
    owner : PeerOwner
        Receives the messages of the other rank and the report of its loss.
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
        #: Calls `start`, if `start_soon` was called and the session is not started yet.
        self._starter: asyncio.TimerHandle | None = None
        #: Set while no carrier exists, or all are silent.
        self._is_dark = asyncio.Event()
        self._is_leaving = False
        #: Error of the last dial; empty if there was none, or it succeeded.
        self._obstacle = ""
        #: Set when `ControlPlane.close` need not wait for this peer any longer.
        self.is_settled = asyncio.Event()

    # -- for the control plane --------------------------------------------------------------

    def start_soon(self) -> None:
        """Call `start` when a message is sent or the peer has dialed, at the latest after 20 ms."""
        self._starter = asyncio.get_running_loop().call_later(_GIVE_WAY_S, self.start)

    def start(self) -> None:
        """Start dialing the peer, or, on the higher of the two ranks, watching for its loss.

        The silence of the peer before this call does not count as evidence of its loss.
        """
        self._cancel_starter()
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
        """Queue an encoded message, or drop it if the peer has left or is lost."""
        if self.state is PeerState.OPEN:
            if self._starter is not None:
                self.start()
            self._session.post(body)
            self._flush()

    def say_goodbye(self) -> None:
        """Queue Goodbye; `is_settled` is set when it is acknowledged or the peer is gone."""
        if self.state is PeerState.OPEN:
            self._is_leaving = True
            self.send(self._setting.codec.encode(Goodbye()))

    def adopt(self, sock: socket.socket) -> None:
        """Use an authenticated connection, which the peer dialed, as a carrier of the session.

        Takes ownership of `sock`, and closes it if the peer has left or is lost.
        """
        if self.state is PeerState.OPEN:
            if self._starter is not None:
                self.start()
            task = self._spawn(self._adopt_quietly(sock))
            task.add_done_callback(lambda done: sock.close() if done.cancelled() else None)
        else:
            sock.close()

    def tick(self, now: float, stalled_s: float) -> None:
        """Find silent carriers; report the peer as lost if it has been silent for too long.

        To be called often. The rank that dials replaces the silent carriers. `now` is the time of
        the clock in `Setting`. `stalled_s` is the time in seconds, since the last call, in which
        this process did not run; it does not count as silence.
        """
        if self.state is not PeerState.OPEN:
            return
        if stalled_s > 0:
            self._session.excuse(stalled_s)
        self._note_darkness(now)
        silence = self._session.silence_s(now)
        timeout_s = self._setting.config.peer_timeout_s
        if silence > timeout_s:
            why = f"; the last dial failed: {self._obstacle}" if self._obstacle else ""
            self.lose(f"silent for {silence:.1f} s, R2CC_PEER_TIMEOUT_S={timeout_s:g}{why}")

    def lose(self, why: str) -> None:
        """End the session and report the peer as lost because of `why`.

        Do nothing if the peer has left or is lost already.
        """
        if self.state is PeerState.OPEN:
            self.drop(why, self._setting.rank)
            self._owner.on_peer_lost(self.rank, why, self.silence_s)

    def drop(self, why: str, witness: int) -> None:
        """End the session because rank `witness` found the peer lost.

        Do nothing if the peer has left or is lost already.

        The peer is sent a `PeerDown` about itself, so that it learns, if it is alive, that it was
        given up.
        """
        if self.state is not PeerState.OPEN:
            return
        news = PeerDown(self.rank, why, witness, self.silence_s)
        self.send(self._setting.codec.encode(news))
        self._end(PeerState.LOST)
        for carrier in list(self._carriers.values()):
            carrier.hang_up()

    def close(self) -> None:
        """Close all carriers and stop all tasks."""
        self._stop_tasks()
        for carrier in list(self._carriers.values()):
            carrier.close()

    @property
    def silence_s(self) -> float:
        """Seconds since the last frame from the peer, if any, else since the session was made."""
        return self._setting.clock() - self._session.last_heard

    @property
    def last_heard(self) -> float:
        """Time of the last frame from the peer, in seconds of the clock in `Setting`.

        If there was no frame, the time at which the session was made.
        """
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
                old.abort()  # it may never drain; the session resends its bytes on the new carrier
            await carrier.is_spent.wait()
            if self._setting.clock() - born_at < _SHORT_LIFE_S:
                await asyncio.sleep(_FIRST_PAUSE_S)
            old = carrier

    async def _dial_any(self, targets: Sequence[tuple[wire.Address, str]]) -> Carrier:
        pause = _FIRST_PAUSE_S
        claim = Claim(Purpose.CONTROL, self._setting.communicator_id, self._setting.rank, self.rank)
        for target, source in itertools.cycle(targets):
            try:
                sock = await dialing.dial(
                    self._setting.secret, claim, target, source=source, timeout_s=_DIAL_TIMEOUT_S
                )
                return await self._adopt(sock)
            except ConnectionRefusedError as exc:
                self._obstacle = dialing.describe_failure(exc, target, _DIAL_TIMEOUT_S)
                self._judge_refusal(target)
            except (OSError, HandshakeRejected) as exc:
                self._obstacle = dialing.describe_failure(exc, target, _DIAL_TIMEOUT_S)
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
            self.lose(f"it sent a message that cannot be read: {exc}")
            return
        if isinstance(message, Goodbye):
            # The peer waits for the acknowledgement, so it is the peer that closes the carriers.
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
        """Probe the peer's listening ports while all carriers are silent.

        A refused connection means that the peer's process is gone.
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
        """After a refused connection, report the peer as lost if all carriers are silent."""
        self._note_darkness(self._setting.clock())
        if self._is_dark.is_set():
            self.lose(f"its process is gone: connection refused at {target[0]}:{target[1]}")

    def _end(self, state: PeerState) -> None:
        self.state = state
        self._stop_tasks()
        self.is_settled.set()

    def _cancel_starter(self) -> None:
        if self._starter is not None:
            self._starter.cancel()
            self._starter = None

    def _stop_tasks(self) -> None:
        self._cancel_starter()
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


__all__ = ["Peer", "PeerOwner", "PeerState", "Setting"]
