"""Simulated network in virtual time, whose paths can break at any event.

The network models RDMA instead of sockets, because RDMA is the harder case. A cleared slice is a
one-sided write: the network moves the slice in two halves from the sender's memory into the landing
place, and neither process takes part. The network reads each half when it lands, so a sender that
overwrites its memory too early sends wrong bytes. If a path breaks between the halves, the second
half may never land. A write that is in flight when a path is cut may land long afterwards
(`Cut.late_s`), unless the receiver has fenced its end. Fencing takes time.

All events are scheduled on a `Timeline`. The state of wires, connections and messages is in
`r2ccl.testing.simulation.wire`; `r2ccl.testing.simulation.transport` implements `Transport` on top.
Equal seeds and equal calls give equal traces.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from r2ccl.testing.simulation.wire import (
    DELIVER,
    Act,
    Cut,
    End,
    EndState,
    Fate,
    MessageKind,
    SimMessage,
    Timeline,
    Wire,
    WirePiece,
)
from r2ccl.transport.base import Arrived, Cleared, Confirmed, Event, Failed, Frame, Sent
from r2ccl.types import BYPASS, BypassWay, ProbeKey


class SimNetwork:
    """Simulated network that connects each pair of `nranks` ranks on each of `nrails` rails.

    Parameters
    ----------
    timeline : Timeline
    nranks, nrails : int
    latency_s : float
        Minimum one-way delay in seconds.
    overhead_s : float
        Seconds for which each message occupies the wire, in addition to its transfer time.
    bandwidth : float
        Bytes per second that each end of a path sends.
    jitter : float
        Largest random increase of the latency, as a fraction of `latency_s`.
    fence_s : float
        Longest time in seconds that a fence takes.
    retry_s : float
        Seconds after which an end with an unacknowledged message reports a broken connection.
    probe_timeout_s : float
        Seconds after which an unanswered probe fails.
    is_loud : bool
        True if closing one end notifies the other end, as with TCP's FIN and RST; False if it does
        not, as with queue pairs.
    is_full : bool
        True if ports of different rails reach each other.
    """

    def __init__(
        self,
        timeline: Timeline,
        nranks: int,
        nrails: int,
        *,
        latency_s: float = 20e-6,
        overhead_s: float = 1e-6,
        bandwidth: float = 100e6,
        jitter: float = 0.5,
        fence_s: float = 100e-6,
        retry_s: float = 0.2,
        probe_timeout_s: float = 0.06,
        is_loud: bool = True,
        is_full: bool = True,
    ) -> None:
        self.timeline = timeline
        self.nranks = nranks
        self.nrails = nrails
        self.latency_s = latency_s
        self.overhead_s = overhead_s
        self.bandwidth = bandwidth
        self.jitter = jitter
        self.fence_s = fence_s
        self.retry_s = retry_s
        self.probe_timeout_s = probe_timeout_s
        self.is_loud = is_loud
        self.is_full = is_full
        #: True if NICs access device memory; a subclass must then override `move` and `copy_of`.
        self.reaches_devices = False
        #: Hook that decides the fate of every message, including control messages.
        self.route: Callable[[SimMessage], Fate] = lambda message: DELIVER
        #: Hook called when bytes of a sender's view land, and when a cleared slice is acknowledged,
        #: because a NIC may read the view until then.
        self.on_read: Callable[[SimMessage], None] = lambda message: None
        self.trace: list[tuple[Any, ...]] = []
        self.nmessages = 0
        #: Number of bypass connections made.
        self.nbypasses = 0
        self.wires = {
            (a, b, rail): Wire((a, b), rail)
            for a in range(nranks)
            for b in range(a + 1, nranks)
            for rail in range(nrails)
        }
        #: Number of disconnections in force at each port, by (rank, rail).
        self._ndisconnected: Counter[tuple[int, int]] = Counter()
        #: Newest bypass of each pair of ranks.
        self._bypasses: dict[tuple[int, int], Wire] = {}

    def wire(self, a: int, b: int, rail: int) -> Wire:
        """Return the wire between ranks `a` and `b` on `rail`."""
        return self.wires[min(a, b), max(a, b), rail]

    def bypass(self, rank: int, peer: int, way: BypassWay) -> Wire | None:
        """Return a new wire from `rank` to `peer` for the bypass `way`.

        Return None if the network lacks the bypass, or the bypass is not up now.
        """
        pair = (min(rank, peer), max(rank, peer))
        if way.to == peer:
            ports = frozenset({(rank, way.via), (peer, way.rail)})
            if not self.is_full or any(self._ndisconnected[port] for port in ports):
                return None
            wire = Wire(pair, BYPASS, ports=ports)
        else:
            near = self.wire(rank, way.to, way.via)
            beyond = [self.wire(way.to, peer, rail) for rail in range(self.nrails)]
            far = next((each for each in beyond if each.is_up), None)
            if far is None or not near.is_up:
                return None
            wire = Wire(pair, BYPASS, legs=(near, far))
        self._bypasses[pair] = wire
        return wire

    def connect(self, wire: Wire) -> tuple[End, End]:
        """Make a connection over `wire`; return the lower rank's end, then the higher rank's."""
        low, high = (End(self._abandon, wire, rank) for rank in wire.pair)
        low.other, high.other = high, low
        wire.ends = (low, high)
        self.nbypasses += wire.rail == BYPASS
        return low, high

    def delay(self) -> float:
        """Draw a one-way latency in seconds."""
        return self.latency_s * (1.0 + self.jitter * self.timeline.random.random())

    def note(self, *what: Any) -> None:
        """Add an entry with the current time to the trace."""
        self.trace.append((self.timeline.now, *what))

    def number(self, message: SimMessage) -> Fate:
        """Number a message and return the fate that the `route` hook decides for it."""
        message.number = self.nmessages
        self.nmessages += 1
        return self.route(message)

    # Cuts and repairs

    def cut(self, wire: Wire, cut: Cut) -> None:
        """Break `wire` as `cut` describes, and the bypasses over it.

        If ``cut.is_stall``, messages sent later wait for the repair of the wire; otherwise the
        connection is lost, and messages sent later on it never arrive. If the wire is broken
        already, the pieces that an earlier cut kept in flight still arrive.
        """
        self.note("cut", wire.pair, wire.rail)
        was_up = wire.is_up
        wire.ncuts += 1
        for end in wire.ends:
            if was_up:
                self._cut_flight(end, cut)
            if not cut.is_stall:
                self._break(end)
            if end.rank in cut.told:
                self.timeline.after(self.delay(), self.fail, end, "PORT_ERR", "the port went down")
        for bypass in self._bypasses.values():
            if wire in bypass.legs:
                # The ends of a bypass are not notified: they detect the cut by a timeout.
                self.cut(bypass, Cut((), cut.keep, cut.late_s))

    def restore(self, wire: Wire) -> None:
        """Undo one cut of `wire`, if any; when none is left, stalled connections continue."""
        if wire.is_up:
            return
        self.note("restore", wire.pair, wire.rail)
        wire.ncuts -= 1
        if wire.ncuts:
            return
        for end in wire.ends:
            held, end.held = end.held, deque()
            for piece in held:
                arrival = max(self.timeline.now + self.delay(), end.clear_at + self.overhead_s)
                self._fly(end, piece, arrival)
            acks, end.acks = end.acks, []
            for message in acks:
                self._acknowledge(message)
            if end.other.state >= EndState.DRAINING:
                self._reset(end)

    def fail(self, end: End, status: str, detail: str) -> None:
        """Report the failure of `end` to its transport, once, with the fields of a `Failed`.

        If no transport has opened `end` yet, the transport that opens `end` reports a failure with
        status ``EOF`` instead. Do nothing if `end` is being fenced or is fenced.
        """
        if end.state is EndState.NEW:
            end.is_dead = True
        elif end.state is EndState.LIVE:
            end.state = EndState.FAILED
            assert end.transport is not None
            end.transport.report(Failed(end.path, status, detail))

    def _cut_flight(self, end: End, cut: Cut) -> None:
        flight, end.flight = end.flight, deque()
        arrival = self.timeline.now + cut.late_s
        for number, piece in enumerate(flight):
            piece.is_lost = True
            again = WirePiece(piece.message, piece.is_last)
            if number < cut.keep:
                arrival += self.overhead_s
                self._launch(end, again, arrival)
            elif cut.is_stall:
                end.held.append(again)

    def _break(self, end: End) -> None:
        end.is_broken = True
        self._starve(end)

    def _starve(self, end: End) -> None:
        """Make `end` fail after the retry time if a message that it sent is unacknowledged now."""
        if end.unacked and not end.is_starving:
            end.is_starving = True
            detail = "transport retry counter exceeded"
            self.timeline.after(self.retry_s, self.fail, end, "RETRY_EXC_ERR", detail)

    def _reset(self, end: End) -> None:
        """Make `end` detect that the other end was closed.

        If the network `is_loud` and the wire is up, `end` fails after one latency. Otherwise it
        fails after the retry time, but only if a message that it sent is unacknowledged now.
        """
        if self.is_loud and end.wire.is_up:
            self.timeline.after(self.delay(), self.fail, end, "EOF", "the peer closed its end")
        else:
            self._starve(end)

    def set_port(self, rank: int, rail: int, is_up: bool) -> None:
        """Disconnect a port from the fabric, or undo one disconnection.

        A disconnected port answers no probes, its bypasses break, and new bypasses cannot use it.
        The caller must cut or restore the other wires of the port.
        """
        if is_up:
            self._ndisconnected[rank, rail] -= 1
        else:
            self._ndisconnected[rank, rail] += 1
            for bypass in self._bypasses.values():
                if (rank, rail) in bypass.ports:
                    self.cut(bypass, Cut())

    # Probes

    def has_way(self, rank: int, key: ProbeKey) -> bool:
        """Return True if the network connects the two ports of probe `key` of `rank`."""
        if key.rail != key.via and not self.is_full:
            return False
        is_peer = 0 <= key.peer < self.nranks and key.peer != rank
        return is_peer and 0 <= key.rail < self.nrails and 0 <= key.via < self.nrails

    def is_way_up(self, rank: int, key: ProbeKey) -> bool:
        """Return True if probe `key` of `rank` would arrive now."""
        if self._ndisconnected[rank, key.via] or self._ndisconnected[key.peer, key.rail]:
            return False
        return key.rail != key.via or self.wire(rank, key.peer, key.rail).is_up

    def probe(self, rank: int, key: ProbeKey, on_result: Callable[[bool], None]) -> None:
        """Probe a port; call `on_result` with True when it answers, or False at the probe timeout.

        A port answers even if its process is stopped or dead. Call this only if `has_way` is True.
        """
        if self.is_way_up(rank, key):
            delay_s = 2 * self.delay()
            self.timeline.after(delay_s, self._probed, rank, key, delay_s, on_result)
        else:
            self.timeline.after(self.probe_timeout_s, on_result, False)

    def _probed(
        self, rank: int, key: ProbeKey, spent_s: float, on_result: Callable[[bool], None]
    ) -> None:
        """Complete a probe when its answer is due; the probe fails if its way broke meanwhile."""
        if self.is_way_up(rank, key):
            on_result(True)
        else:
            rest_s = max(0.0, self.probe_timeout_s - spent_s)
            self.timeline.after(rest_s, on_result, False)

    # Fencing

    def _abandon(self, end: End) -> None:
        self.fence(end, lambda: None)

    def fence(self, end: End, on_drained: Callable[[], None]) -> None:
        """Fence `end`; call `on_drained` once the connection cannot write to ``end.rank``'s memory.

        Cleared slices that `end` has in flight are copied, so that they no longer depend on the
        sender's memory. If `end` is being fenced or is fenced, do nothing: this `on_drained` is
        never called.
        """
        if end.state >= EndState.DRAINING:
            return
        end.state = EndState.DRAINING
        for piece in end.flight:
            # The piece has left this NIC, so it must not read this rank's memory any more.
            message = piece.message
            if message.kind is MessageKind.WRITE and message.view is not None:
                message.view = self.copy_of(message)
                message.is_copied = True
        for queue in (end.queued, end.small, end.bulk, end.held, end.acks):
            queue.clear()
        delay_s = self.fence_s * self.timeline.random.random()
        self.timeline.after(delay_s, self._drained, end, on_drained)

    def _drained(self, end: End, on_drained: Callable[[], None]) -> None:
        end.state = EndState.FENCED
        end.unacked.clear()
        self._reset(end.other)
        on_drained()

    # Moving messages

    def pump(self, end: End) -> None:
        """Send the next flushed message of `end`; cleared slices are sent after all others.

        `end` sends one message at a time: when a message has left, the next one is sent.
        """
        queue = end.small or end.bulk
        end.is_busy = bool(queue) and end.state is EndState.LIVE
        if not end.is_busy:
            return
        message = queue.popleft()
        end.unacked.add(message)
        fate = self.number(message)
        self.note("send", message.kind.value, end.rank, end.path, message.frame.channel,
                  message.frame.seq, fate.act.value)  # fmt: skip
        if fate.act is Act.CUT:
            self.cut(end.wire, Cut())
        elif fate.act is Act.DROP:
            for either in (end, end.other):
                self._break(either)
        extra = fate.delay_s if fate.act is Act.DELAY else 0.0
        self._send(end, message, extra)

    def _send(self, end: End, message: SimMessage, extra_s: float) -> None:
        now = self.timeline.now
        duration = self.overhead_s + message.nbytes / self.bandwidth
        arrival = max(now + self.delay() + extra_s, end.clear_at)
        if message.kind is MessageKind.WRITE:
            self._fly(end, WirePiece(message, False), arrival + duration / 2)
        self._fly(end, WirePiece(message, True), arrival + duration)
        self.timeline.after(duration, self.pump, end)

    def _fly(self, end: End, piece: WirePiece, arrival: float) -> None:
        if end.is_broken:
            self._starve(end)
        elif not end.wire.is_up:
            end.held.append(piece)
        else:
            self._launch(end, piece, arrival)

    def _launch(self, end: End, piece: WirePiece, arrival: float) -> None:
        end.clear_at = arrival
        end.flight.append(piece)
        self.timeline.after(arrival - self.timeline.now, self._land, end, piece)

    def _land(self, end: End, piece: WirePiece) -> None:
        """Deliver a piece to the other end, unless it was lost."""
        if piece.is_lost:
            return
        first = end.flight.popleft()
        assert first is piece, "pieces arrived out of order on a path"
        other = end.other
        if other.state is EndState.NEW:
            other.backlog.append(piece)
        elif other.state is EndState.FENCED or other.transport is None:
            self.refuse(other, piece)
        else:
            self.take(other, piece)

    def refuse(self, end: End, piece: WirePiece) -> None:
        """Discard a piece that arrived at a closed end; make the sender's end detect the close."""
        self._reset(end.other)

    def take(self, end: End, piece: WirePiece) -> None:
        """Process a piece that arrived at `end`: write its bytes, and report its event if any."""
        message = piece.message
        assert end.transport is not None
        if message.kind is MessageKind.WRITE:
            self.write(message, piece.is_last)
            if not piece.is_last:
                return
            self.timeline.after(self.delay(), self._acknowledge, message)
        else:
            message.end.unacked.discard(message)
        self.note("land", message.kind.value, end.rank, end.path, message.frame.channel,
                  message.frame.seq)  # fmt: skip
        is_confirmed = message.kind is MessageKind.WRITE and self._confirm_early(end, message.frame)
        end.transport.report(self._event(end, message, is_confirmed))

    def _confirm_early(self, end: End, frame: Frame) -> bool:
        """Confirm a landed slice before the receiving rank polls it, if the ``irecv`` allows this.

        Return True if the slice was confirmed.
        """
        ack = end.early.pop((frame.channel, frame.seq), 0)
        if not ack or end.state is not EndState.LIVE:
            return False
        confirmation = Frame(frame.channel, 0, ack, 0, 0)
        end.small.append(SimMessage(MessageKind.CONFIRM, end, confirmation, None))
        if not end.is_busy:
            self.pump(end)
        return True

    def write(self, message: SimMessage, is_last: bool) -> None:
        """Copy one half of a slice from the sender's memory to the receiver's.

        The receiver has announced the address of the slice before (a clear). `is_last` selects the
        second half.
        """
        region, view = message.region, message.view
        assert region is not None
        assert view is not None
        self.on_read(message)
        half = len(view) // 2
        if is_last:
            self.move(message, half, len(view))
        else:
            message.began_s = self.timeline.now
            self.move(message, 0, half)

    def move(self, message: SimMessage, start: int, end: int) -> None:
        """Move bytes `start` up to `end` (exclusive) of a cleared slice.

        Override it for device memory.
        """
        assert message.region is not None
        assert message.view is not None
        message.region[start:end] = message.view[start:end]

    def copy_of(self, message: SimMessage) -> memoryview:
        """Return a copy of the bytes of a slice in flight; override it for device memory."""
        assert message.view is not None
        return memoryview(bytes(message.view))

    def _event(self, end: End, message: SimMessage, is_confirmed: bool) -> Event:
        frame = message.frame
        if message.kind is MessageKind.WRITE:
            return Arrived(end.path, frame, None, message.began_s, is_confirmed)
        if message.kind is MessageKind.EAGER:
            assert message.view is not None
            self.on_read(message)
            assert end.transport is not None
            return Arrived(end.path, frame, end.transport.lend(message.view), self.timeline.now)
        if message.kind is MessageKind.CLEAR:
            assert message.view is not None
            return Cleared(end.path, frame, len(message.view), message.view)
        return Confirmed(end.path, frame.channel, frame.ack)

    def _acknowledge(self, message: SimMessage) -> None:
        """Process the acknowledgment of a write: the sender's NIC no longer needs the view."""
        end = message.end
        if end.state is EndState.FENCED or end.is_broken:
            return
        if not end.wire.is_up:
            end.acks.append(message)
            return
        # Until now the NIC might have had to retransmit it, which would read the view.
        self.on_read(message)
        end.unacked.discard(message)
        if end.transport is not None:
            end.transport.report(Sent(end.path, message.frame.channel, message.frame.seq))


__all__ = [
    "DELIVER",
    "Act",
    "Cut",
    "End",
    "EndState",
    "Fate",
    "MessageKind",
    "SimMessage",
    "SimNetwork",
    "Timeline",
    "Wire",
]
