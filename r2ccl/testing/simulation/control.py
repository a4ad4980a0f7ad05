"""Simulated control plane: the library's control sessions over connections that lose frames.

`Session` and `Overlay` are the library's own. This module simulates the rest: it dials paths,
forwards messages and reports of lost ranks, and carries the frames of the sessions. Each session
has two carriers (connections), which may lose, repeat, delay and reorder frames. The session still
delivers each message exactly once and in order, unless all frames are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from r2ccl.bootstrap.messages import Codec, Flooded, PeerDown, Routed
from r2ccl.bootstrap.overlay import Overlay
from r2ccl.bootstrap.session import FrameReader, Session, SessionLimits
from r2ccl.testing.simulation.network import Act, End, MessageKind, SimMessage, SimNetwork, Wire
from r2ccl.transport.base import Frame
from r2ccl.types import BYPASS, BypassWay, PathKey

#: Heartbeats per peer timeout, as in the real control plane.
_BEATS_PER_TIMEOUT = 5
_CARRIERS = (0, 1)
#: Longest time in seconds that a dialed connection waits for the peer to accept its epoch.
_EARLY_S = 1.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_CONNECT_TIMEOUT_S = 2.0
#: Seconds after which the next way of a bypass is tried if a way is not up.
_STAGGER_S = 0.02
#: Seconds before the kernel retransmits an unanswered connection request (SYN).
_SYN_AGAIN_S = 1.0


class ControlHost(Protocol):
    """Rank that owns a control plane and receives its events."""

    rank: int
    is_dead: bool

    @property
    def is_stopped(self) -> bool:
        """True while the process is stopped."""
        ...

    def on_message(self, peer: int, message: object) -> None:
        """Handle a message from `peer`; messages sent over one session arrive in the order sent."""
        ...

    def on_path(self, peer: int, rail: int, epoch: int, endpoint: End) -> None:
        """Handle a new connection of a path; the rank now owns `endpoint`, its local end."""
        ...

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """Handle the loss of `peer`, for example because it was silent for the peer timeout.

        Parameters
        ----------
        peer : int
            The lost rank.
        why : str
            Reason, for messages.
        last_heard_s : float or None
            Seconds since the last sign of life from `peer`; None if unknown.
        """
        ...


class SimControl:
    """Simulated `ControlPort` of one rank.

    Parameters
    ----------
    network : SimNetwork
        Its `route` hook gets every frame, as a message of `MessageKind.CONTROL`.
    host : ControlHost
        The rank, which gets the events.
    codec : Codec
        Encodes and decodes messages.
    peer_timeout_s : float
        Seconds of silence after which a peer counts as lost.
    """

    def __init__(
        self,
        network: SimNetwork,
        host: ControlHost,
        codec: Codec,
        *,
        peer_timeout_s: float,
    ) -> None:
        self._network = network
        self._timeline = network.timeline
        self._host = host
        self._codec = codec
        self._peer_timeout_s = peer_timeout_s
        self.peers: dict[int, SimControl] = {}
        self._overlay = Overlay(host.rank, network.nranks)
        self.neighbors = self._overlay.neighbors
        self._sessions: dict[int, Session] = {}
        self._nflooded: dict[int, int] = {}
        #: Time of the scheduled flush of each session, to avoid scheduling a second one.
        self._due: dict[int, float] = {}
        #: Epoch that this rank accepts, per path.
        self._expected: dict[PathKey, int] = {}
        #: Number and epoch of the current dial, per path.
        self._dials: dict[PathKey, tuple[int, int]] = {}
        self._ndials = 0
        #: Frames that arrived while the process was stopped.
        self._kept: list[tuple[int, int, bytes]] = []

    def connect(self, controls: dict[int, SimControl]) -> None:
        """Start the sessions with the neighbors; `controls` has the control plane of each rank."""
        self.peers = {peer: each for peer, each in controls.items() if peer != self._host.rank}
        for peer in self.neighbors:
            self.open_session(peer)

    def open_session(self, peer: int) -> None:
        """Start a session with `peer`; the peer starts its end when the first frame arrives.

        Do nothing if there is a session with `peer`, or `peer` is lost.
        """
        if peer in self._sessions or self._overlay.is_closed(peer):
            return
        now = self._timeline.now
        limits = SessionLimits(heartbeat_s=self._peer_timeout_s / _BEATS_PER_TIMEOUT)
        session = self._sessions[peer] = Session(now, limits)
        for carrier in _CARRIERS:
            session.carrier_up(carrier, now)
        self._flush(peer)

    # Messages

    def send(self, peer: int, message: object) -> None:
        """Send `message` to `peer` over their session or, if there is none, through other ranks.

        Do nothing if `peer` is lost, or no route to it is left.
        """
        body = self._codec.encode(message)
        if peer in self._sessions:
            self._post(peer, body)
        else:
            self._route(Routed(self._host.rank, peer, self._overlay.max_hops, body))

    def gossip(self, message: object, source: int = -1) -> None:
        """Send `message` to every neighbor that is not lost, except `source`."""
        body = self._codec.encode(message)
        for peer in self._overlay.open_neighbors():
            if peer != source:
                self._post(peer, body)

    def broadcast(self, message: object) -> None:
        """Send `message` to every other rank; neighbors pass it on."""
        rank = self._host.rank
        number = self._nflooded[rank] = self._nflooded.get(rank, 0) + 1
        self.gossip(Flooded(rank, number, self._codec.encode(message)))

    def tick(self, excused_s: float) -> None:
        """Report a peer as lost if it is cut off, or silent for longer than the peer timeout.

        Report the loss to the host and, for a silent peer, to the neighbors too. A peer is cut off
        if every route to it passes through a lost rank. `excused_s` is the time in seconds for
        which this process did not run; this time does not count as silence.
        """
        now = self._timeline.now
        for peer, session in list(self._sessions.items()):
            if excused_s:
                session.excuse(excused_s)
            silence = session.silence_s(now)
            if silence > self._peer_timeout_s and not self._overlay.is_closed(peer):
                news = PeerDown(peer, f"silent for {silence:.1f} s", self._host.rank, silence)
                self._lose(peer, news.why, silence)
                self.gossip(news)
        for peer in self._overlay.cut_off():
            self._lose(peer, "every route to it contains a lost rank", None)

    def resume(self) -> None:
        """Process the frames that arrived while the process was stopped."""
        kept, self._kept = self._kept, []
        for peer, carrier, data in kept:
            self._receive(peer, carrier, data)
        for peer in self._sessions:
            self._due.pop(peer, None)
            self._flush(peer)

    def _post(self, peer: int, body: bytes) -> None:
        if not self._overlay.is_closed(peer):
            self._sessions[peer].post(body)
            self._flush(peer)

    def _route(self, message: Routed) -> None:
        if self._overlay.is_closed(message.destination) or not message.nhops:
            return
        hop = self._overlay.next_hop(message.destination)
        if hop is not None:
            message = msgspec.structs.replace(message, nhops=message.nhops - 1)
            self._post(hop, self._codec.encode(message))

    def _flush(self, peer: int) -> None:
        if self._host.is_dead or self._host.is_stopped or self._overlay.is_closed(peer):
            return
        session = self._sessions[peer]
        for carrier, data in session.poll(self._timeline.now):
            self._carry(peer, carrier, data)
        deadline = session.deadline()
        if deadline < self._due.get(peer, float("inf")):
            self._due[peer] = deadline
            self._timeline.after(deadline - self._timeline.now, self._on_timer, peer, deadline)

    def _on_timer(self, peer: int, deadline: float) -> None:
        if self._due.get(peer) == deadline:
            del self._due[peer]
            self._flush(peer)

    def _carry(self, peer: int, carrier: int, data: bytes) -> None:
        network = self._network
        end = _ControlEnd(self._host.rank, peer)
        frame = Frame(carrier, 0, 0, 0, 0)
        message = SimMessage(MessageKind.CONTROL, end, frame, None)  # type: ignore[arg-type]
        fate = network.number(message)
        network.note("control", self._host.rank, peer, carrier, len(data), fate.act.value)
        if fate.act in (Act.DROP, Act.CUT):
            return
        delay = network.delay()
        late = delay + fate.delay_s
        receive = self.peers[peer]._receive
        self._timeline.after(
            late if fate.act is Act.DELAY else delay, receive, self._host.rank, carrier, data
        )
        if fate.act is Act.DUPLICATE:
            self._timeline.after(late, receive, self._host.rank, carrier, data)

    def _receive(self, peer: int, carrier: int, data: bytes) -> None:
        if self._host.is_dead or self._overlay.is_closed(peer):
            return
        if self._host.is_stopped:
            self._kept.append((peer, carrier, data))
            return
        self.open_session(peer)
        for frame in FrameReader().feed(data):
            for body in self._sessions[peer].receive(carrier, frame, self._timeline.now):
                self._deliver(peer, self._codec.decode(body))
        self._flush(peer)

    def _deliver(self, peer: int, message: object) -> None:
        match message:
            case PeerDown(rank=rank) if rank == self._host.rank:
                why = f"it counts rank {rank} as lost: {message.why}"
                for each in sorted({peer, message.witness}):
                    session = self._sessions.get(each)
                    now = self._timeline.now
                    self._lose(each, why, None if session is None else session.silence_s(now))
            case PeerDown():
                why = f"{message.why}, says rank {message.witness}"
                if self._lose(message.rank, why, message.last_heard_s, message.witness):
                    self.gossip(message, peer)
            case Routed(destination=destination) if destination != self._host.rank:
                self._route(message)
            case Flooded():
                if self._nflooded.get(message.source, 0) < message.number:
                    self._nflooded[message.source] = message.number
                    self.gossip(message, peer)
                    self._open_up(message)
            case Routed():
                self._open_up(message)
            case _:
                self._host.on_message(peer, message)

    def _open_up(self, message: Routed | Flooded) -> None:
        is_own = message.source == self._host.rank
        if not is_own and not self._overlay.is_closed(message.source):
            self._host.on_message(message.source, self._codec.decode(message.body))

    def _lose(
        self, peer: int, why: str, last_heard_s: float | None, witness: int | None = None
    ) -> bool:
        """Report the loss of `peer` to the host and, over their session if any, to `peer` itself.

        Also cancel the dials to `peer`. Do nothing and return False if `peer` was lost before.
        `witness` is the rank that found the loss; None: this rank.
        """
        if self._overlay.is_closed(peer):
            return False
        if peer in self._sessions:
            found_by = self._host.rank if witness is None else witness
            self._post(peer, self._codec.encode(PeerDown(peer, why, found_by, 0.0)))
        self._overlay.lose(peer)
        for key in [key for key in self._dials if key.peer == peer]:
            del self._dials[key]
        self._host.on_peer_lost(peer, why, last_heard_s)
        return True

    # Paths

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        """Accept a connection of `peer` on `rail` with exactly this `epoch`."""
        self._expected[PathKey(peer, rail)] = epoch

    def dial_path(self, peer: int, rail: int, epoch: int) -> None:
        """Dial a path, and redial it until it connects.

        Stop if the dial is cancelled or replaced, or `peer` is lost.
        """
        self._start_dial(PathKey(peer, rail), epoch)

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        """Dial a bypass by the first of `ways` that is up.

        Give up if none is up, or if the dial fails.
        """
        key = PathKey(peer, BYPASS)
        self._ndials += 1
        self._dials[key] = (self._ndials, epoch)
        self._try_ways(key, self._ndials, tuple(ways))

    def cancel_path(self, peer: int, rail: int) -> None:
        """Cancel `accept_path`, `dial_path` and `dial_bypass` of a path."""
        self._dials.pop(PathKey(peer, rail), None)
        self._expected.pop(PathKey(peer, rail), None)

    def kick(self, rail: int) -> None:
        """Restart the pending dials of `rail` at once."""
        for key, (_, epoch) in list(self._dials.items()):
            if key.rail == rail:
                self._start_dial(key, epoch)

    def is_connecting(self, peer: int, rail: int, epoch: int) -> bool:
        """Return True if this rank dials or accepts the path with exactly this `epoch`."""
        key = PathKey(peer, rail)
        return epoch in (self._dials.get(key, (0, -1))[1], self._expected.get(key))

    def obstacles(self, peer: int) -> list[str]:
        """Return an empty list: only faults of the plan keep a path to `peer` from connecting."""
        return []

    def _try_ways(self, key: PathKey, number: int, ways: tuple[BypassWay, ...]) -> None:
        if not ways:
            self._dials.pop(key, None)
            return
        wire = self._network.bypass(self._host.rank, key.peer, ways[0])
        if wire is None:
            self._timeline.after(_STAGGER_S, self._if_current, key, number, ways[1:])
            return
        patience = self._timeline.now + _EARLY_S
        delay = 3 * self._network.delay()
        self._timeline.after(delay, self._try_dial, key, number, _FIRST_PAUSE_S, wire, patience)

    def _if_current(self, key: PathKey, number: int, ways: tuple[BypassWay, ...]) -> None:
        if self._is_current(key, number):
            self._try_ways(key, number, ways)

    def _start_dial(self, key: PathKey, epoch: int) -> None:
        self._ndials += 1
        self._dials[key] = (self._ndials, epoch)
        self._dial(key, self._ndials, _FIRST_PAUSE_S)

    def _is_current(self, key: PathKey, number: int) -> bool:
        return self._dials.get(key, (0, 0))[0] == number and not self._host.is_dead

    def _dial(self, key: PathKey, number: int, pause_s: float, is_again: bool = False) -> None:
        if not self._is_current(key, number):
            return
        wire = self._network.wire(self._host.rank, key.peer, key.rail)
        if wire.is_up:
            patience = self._timeline.now + _EARLY_S
            delay = 3 * self._network.delay()
            self._timeline.after(delay, self._try_dial, key, number, pause_s, wire, patience)
        elif not is_again:
            self._timeline.after(_SYN_AGAIN_S, self._dial, key, number, pause_s, True)
        else:
            self._again(key, number, pause_s, _CONNECT_TIMEOUT_S - _SYN_AGAIN_S)

    def _again(self, key: PathKey, number: int, pause_s: float, spent_s: float) -> None:
        if key.is_bypass:
            del self._dials[key]  # the caller of `dial_bypass` tries again with new ways
            return
        doubled = min(2 * pause_s, _MAX_PAUSE_S)
        self._timeline.after(spent_s + pause_s, self._dial, key, number, doubled)

    def _try_dial(
        self, key: PathKey, number: int, pause_s: float, wire: Wire, patience: float
    ) -> None:
        """Repeat the handshake until the peer accepts the epoch, or until time `patience`."""
        if not self._is_current(key, number):
            return
        epoch = self._dials[key][1]
        if not wire.is_up:
            self._again(key, number, pause_s, _CONNECT_TIMEOUT_S)
        elif self.peers[key.peer].admits(self._host.rank, key.rail, epoch):
            low, high = self._network.connect(wire)
            self.peers[key.peer].let_in(self._host.rank, key.rail, epoch, high)
            self._timeline.after(
                self._network.delay(), self._answered, key, number, pause_s, wire, low
            )
        elif self._timeline.now < patience:
            retry = self._network.delay()
            self._timeline.after(20 * retry, self._try_dial, key, number, pause_s, wire, patience)
        else:
            self._again(key, number, pause_s, 0.0)

    def admits(self, peer: int, rail: int, epoch: int) -> bool:
        """Return True if this rank accepts a connection of `peer` with this epoch now."""
        is_running = not self._host.is_dead and not self._host.is_stopped
        return is_running and self._expected.get(PathKey(peer, rail)) == epoch

    def let_in(self, peer: int, rail: int, epoch: int, end: End) -> None:
        """Pass a connection from `peer` to the rank.

        The rank goes on accepting connections with this epoch, until `accept_path` or `cancel_path`
        is called.
        """
        self._host.on_path(peer, rail, epoch, end)

    def _answered(self, key: PathKey, number: int, pause_s: float, wire: Wire, end: End) -> None:
        """Complete a dial when the peer's answer arrives.

        If the dial was cancelled or replaced meanwhile, close this rank's end. If the path broke
        meanwhile, close this rank's end and dial again, or give up a bypass. The peer already uses
        its end by then.
        """
        if not self._is_current(key, number):
            end.close()
        elif not wire.is_up or end.is_broken:
            end.close()
            self._again(key, number, pause_s, _CONNECT_TIMEOUT_S)
        else:
            epoch = self._dials.pop(key)[1]
            self._host.on_path(key.peer, key.rail, epoch, end)


class _ControlEnd:
    """Sender and receiver of a control frame; the `route` hook gets it in place of an `End`."""

    __slots__ = ("path", "rank")

    def __init__(self, rank: int, peer: int) -> None:
        self.rank = rank
        self.path = PathKey(peer, -1)


__all__ = ["ControlHost", "SimControl"]
