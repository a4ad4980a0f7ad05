"""A simulated network: virtual time, paths that break at any event, and a `Transport` on top.

It is modelled on RDMA rather than on sockets, because that is the harder contract. A cleared
slice is a one-sided write: the network moves it, in two halves, from the sender's memory into the
landing place, without either process taking part. The sender's view is read at the moment a half
lands, so memory given back too early shows as wrong bytes; a path that dies between the halves
leaves a torn slice; and a write that was under way when a path was cut may land long afterwards
(`Cut.late_s`) unless the receiver has fenced its end. Fencing takes time.

Everything happens on a `Timeline`: one seeded heap of timed events. Imports no socket, no thread
and no real clock. Invariant: equal seeds and equal calls give equal traces, event for event.
"""

from __future__ import annotations

import enum
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from r2ccl.errors import InternalError
from r2ccl.transport.base import Arrived, Cleared, Confirmed, Event, Failed, Fenced, Frame, Sent
from r2ccl.types import PathKey


class Timeline:
    """Virtual clock and the events to come; calling it reads the clock (`r2ccl.clock.Clock`).

    Events of one instant happen in an order the seed decides.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        #: Events that have happened; what fault plans count.
        self.count = 0
        self._heap: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def __call__(self) -> float:
        """Read the clock."""
        return self.now

    def after(self, delay_s: float, fn: Callable[..., None], *args: Any) -> None:
        """Have ``fn(*args)`` happen `delay_s` from now."""
        self._serial += 1
        entry = (self.now + delay_s, self.random.random(), self._serial, fn, args)
        heapq.heappush(self._heap, entry)

    def step(self) -> bool:
        """Jump to the next event and let it happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, _, fn, args = heapq.heappop(self._heap)
        self.count += 1
        fn(*args)
        return True


class Kind(enum.Enum):
    """What a message is; all but CONTROL travel on a path."""

    EAGER = "eager"
    WRITE = "write"
    CLEAR = "clear"
    CONFIRM = "confirm"
    CONTROL = "control"


class Act(enum.Enum):
    """What the network does to a message.

    On a path, which is reliable and ordered while it lives, DROP means that it is broken from
    this message on, and DELAY holds up what follows; DUPLICATE is for control messages.
    """

    DELIVER = "deliver"
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    CUT = "cut"


class Fate(msgspec.Struct, frozen=True):
    """Answer of the `route` hook; ``delay_s`` is added to the latency (DELAY, DUPLICATE's copy)."""

    act: Act
    delay_s: float = 0.0


DELIVER = Fate(Act.DELIVER)


class Cut(msgspec.Struct, frozen=True):
    """How a path breaks.

    Parameters
    ----------
    told : tuple of int
        Ranks whose end reports `Failed` at once; the others must find out.
    keep : int
        Halves under way in each direction that still arrive, ``late_s`` after the cut. The ones
        behind them do not: an odd number tears a slice.
    late_s : float
    is_stall : bool
        What is lost waits and goes on if the path is restored (TCP); otherwise the connection is
        dead and an end with something unacknowledged reports it after the retry time (verbs).
    """

    told: tuple[int, ...] = ()
    keep: int = 0
    late_s: float = 0.0
    is_stall: bool = False


class Message:
    """One thing on the wire; ``number`` counts all of a network's messages."""

    __slots__ = (
        "began_s", "end", "frame", "is_copied", "kind", "nbytes", "number", "region", "view",
    )  # fmt: skip

    def __init__(self, kind: Kind, end: End, frame: Frame, view: memoryview | None) -> None:
        self.kind = kind
        self.end = end
        self.frame = frame
        self.view = view
        self.region: memoryview | None = None
        #: It has left the sender's memory: ``view`` is the network's own.
        self.is_copied = False
        self.nbytes = len(view) if view is not None and kind is not Kind.CLEAR else 0
        self.number = -1
        self.began_s = 0.0


class _Piece:
    """Half of a write, or a whole small message, on its way."""

    __slots__ = ("is_last", "is_lost", "message")

    def __init__(self, message: Message, is_last: bool) -> None:
        self.message = message
        self.is_last = is_last
        #: It will not arrive, at least not as this.
        self.is_lost = False


class EndState(enum.IntEnum):
    """Life of one end of a connection."""

    NEW = 0  #: dialed, not taken into use by its transport
    LIVE = 1
    FAILED = 2  #: told its owner; still lets in what the network brings
    DRAINING = 3  #: being fenced
    FENCED = 4


class Wire:
    """What connects two ranks on one rail; outlives its connections."""

    __slots__ = ("ends", "is_up", "pair", "rail")

    def __init__(self, pair: tuple[int, int], rail: int) -> None:
        self.pair = pair
        self.rail = rail
        self.is_up = True
        #: Both ends of the newest connection.
        self.ends: tuple[End, ...] = ()


class End:
    """One end of one connection; what `SimTransport.open` takes."""

    __slots__ = (
        "acks", "backlog", "bulk", "clear_at", "flight", "held", "is_broken", "is_busy", "is_dead",
        "is_starving", "network", "other", "path", "queued", "rank", "small", "state",
        "transport", "unacked", "wire",
    )  # fmt: skip

    def __init__(self, network: SimNetwork, wire: Wire, rank: int) -> None:
        self.network = network
        self.wire = wire
        self.rank = rank
        self.path = PathKey(sum(wire.pair) - rank, wire.rail)
        self.other: End = self
        self.transport: SimTransport | None = None
        self.state = EndState.NEW
        #: The connection lost something for good.
        self.is_broken = False
        #: Failed before its transport took it.
        self.is_dead = False
        self.is_starving = False
        self.is_busy = False
        #: Earliest time the next message may arrive at the other end: order is kept.
        self.clear_at = 0.0
        self.queued: list[tuple[Message, bool]] = []
        self.small: deque[Message] = deque()
        self.bulk: deque[Message] = deque()
        self.flight: deque[_Piece] = deque()
        self.held: deque[_Piece] = deque()
        self.acks: list[Message] = []
        self.backlog: list[_Piece] = []
        self.unacked: set[Message] = set()

    def close(self) -> None:
        """Give up an end that was never taken into use."""
        self.network.fence(self, lambda: None)


class SimNetwork:
    """Full mesh of `nranks` ranks over `nrails` rails.

    Parameters
    ----------
    timeline : Timeline
    nranks, nrails : int
    latency_s, overhead_s, bandwidth : float
        One way delay, time a message occupies the wire whatever its size, bytes per second.
    jitter : float
        Latencies vary by up to this fraction.
    fence_s : float
        Longest time a fence takes.
    retry_s : float
        How long a dead connection's unacknowledged message takes to be reported.
    is_loud : bool
        Closing one end tells the other (TCP's FIN and RST); a queue pair's does not.
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
        is_loud: bool = True,
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
        self.is_loud = is_loud
        #: The one hook through which every message goes, control messages included.
        self.route: Callable[[Message], Fate] = lambda message: DELIVER
        #: Told of every read of a sender's view, before it happens.
        self.on_read: Callable[[Message], None] = lambda message: None
        self.on_restored: Callable[[Wire], None] = lambda wire: None
        self.trace: list[tuple[Any, ...]] = []
        self.nmessages = 0
        self.wires = {
            (a, b, rail): Wire((a, b), rail)
            for a in range(nranks)
            for b in range(a + 1, nranks)
            for rail in range(nrails)
        }

    def wire(self, a: int, b: int, rail: int) -> Wire:
        """Return what connects ranks `a` and `b` on `rail`."""
        return self.wires[min(a, b), max(a, b), rail]

    def connect(self, wire: Wire) -> tuple[End, End]:
        """Make a connection; returns the lower rank's end, then the higher rank's."""
        low, high = (End(self, wire, rank) for rank in wire.pair)
        low.other, high.other = high, low
        wire.ends = (low, high)
        return low, high

    def delay(self) -> float:
        """Draw a one way latency."""
        return self.latency_s * (1.0 + self.jitter * self.timeline.random.random())

    def note(self, *what: Any) -> None:
        """Add a line to the trace."""
        self.trace.append((self.timeline.now, *what))

    def number(self, message: Message) -> Fate:
        """Count a message and ask the hook what becomes of it."""
        message.number = self.nmessages
        self.nmessages += 1
        return self.route(message)

    # Breaking and mending

    def cut(self, wire: Wire, cut: Cut) -> None:
        """Break `wire`; until `restore` nothing sent on it arrives."""
        if not wire.is_up:
            return
        self.note("cut", wire.pair, wire.rail)
        wire.is_up = False
        for end in wire.ends:
            self._cut_flight(end, cut)
            if not cut.is_stall:
                self._break(end)
            if end.rank in cut.told:
                self.timeline.after(self.delay(), self.fail, end, "PORT_ERR", "the port went down")

    def restore(self, wire: Wire) -> None:
        """Mend `wire`; connections that only stalled go on."""
        if wire.is_up:
            return
        self.note("restore", wire.pair, wire.rail)
        wire.is_up = True
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
        self.on_restored(wire)

    def fail(self, end: End, status: str, detail: str) -> None:
        """Have `end` report its failure to its owner, once."""
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
            again = _Piece(piece.message, piece.is_last)
            if number < cut.keep:
                arrival += self.overhead_s
                self._launch(end, again, arrival)
            elif cut.is_stall:
                end.held.append(again)

    def _break(self, end: End) -> None:
        end.is_broken = True
        self._starve(end)

    def _starve(self, end: End) -> None:
        """Report a dead connection once something on it stayed unacknowledged long enough."""
        if end.unacked and not end.is_starving:
            end.is_starving = True
            detail = "transport retry counter exceeded"
            self.timeline.after(self.retry_s, self.fail, end, "RETRY_EXC_ERR", detail)

    def _reset(self, end: End) -> None:
        """The other end is closed: a loud network says so, a quiet one only when written to."""
        if self.is_loud and end.wire.is_up:
            self.timeline.after(self.delay(), self.fail, end, "EOF", "the peer closed its end")
        else:
            self._starve(end)

    # Fencing

    def fence(self, end: End, on_drained: Callable[[], None]) -> None:
        """Take `end` out of use; nothing of the connection touches its memory afterwards."""
        if end.state >= EndState.DRAINING:
            return
        end.state = EndState.DRAINING
        for piece in end.flight:
            # It has left this NIC: from here on it no longer depends on this rank's memory.
            message = piece.message
            if message.kind is Kind.WRITE and message.view is not None:
                message.view = memoryview(bytes(message.view))
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
        """Put the next queued message of `end` on the wire; small ones overtake."""
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

    def _send(self, end: End, message: Message, extra_s: float) -> None:
        now = self.timeline.now
        duration = self.overhead_s + message.nbytes / self.bandwidth
        arrival = max(now + self.delay() + extra_s, end.clear_at)
        if message.kind is Kind.WRITE:
            self._fly(end, _Piece(message, False), arrival + duration / 2)
        self._fly(end, _Piece(message, True), arrival + duration)
        self.timeline.after(duration, self.pump, end)

    def _fly(self, end: End, piece: _Piece, arrival: float) -> None:
        if end.is_broken:
            self._starve(end)
        elif not end.wire.is_up:
            end.held.append(piece)
        else:
            self._launch(end, piece, arrival)

    def _launch(self, end: End, piece: _Piece, arrival: float) -> None:
        end.clear_at = arrival
        end.flight.append(piece)
        self.timeline.after(arrival - self.timeline.now, self._land, end, piece)

    def _land(self, end: End, piece: _Piece) -> None:
        """A piece reaches the other end."""
        if piece.is_lost:
            return
        first = end.flight.popleft()
        assert first is piece, "a path keeps the order"
        other = end.other
        if other.state is EndState.NEW:
            other.backlog.append(piece)
        elif other.state is EndState.FENCED or other.transport is None:
            self.refuse(other, piece)
        else:
            self.take(other, piece)

    def refuse(self, end: End, piece: _Piece) -> None:
        """A piece for a fenced end changes nothing there."""
        self._reset(end.other)

    def take(self, end: End, piece: _Piece) -> None:
        """Do what a piece says, at the end it arrived at."""
        message = piece.message
        assert end.transport is not None
        if message.kind is Kind.WRITE:
            self.write(message, piece.is_last)
            if not piece.is_last:
                return
            self.timeline.after(self.delay(), self._acknowledge, message)
        else:
            message.end.unacked.discard(message)
        self.note("land", message.kind.value, end.rank, end.path, message.frame.channel,
                  message.frame.seq)  # fmt: skip
        end.transport.report(self._event(end, message))

    def write(self, message: Message, is_last: bool) -> None:
        """Move half a cleared slice from the sender's memory to its landing place."""
        region, view = message.region, message.view
        assert region is not None
        assert view is not None
        self.on_read(message)
        half = len(view) // 2
        if is_last:
            region[half:] = view[half:]
        else:
            message.began_s = self.timeline.now
            region[:half] = view[:half]

    def _event(self, end: End, message: Message) -> Event:
        frame = message.frame
        if message.kind is Kind.WRITE:
            return Arrived(end.path, frame, None, message.began_s)
        if message.kind is Kind.EAGER:
            assert message.view is not None
            self.on_read(message)
            assert end.transport is not None
            return Arrived(end.path, frame, end.transport.lend(message.view), self.timeline.now)
        if message.kind is Kind.CLEAR:
            assert message.view is not None
            return Cleared(end.path, frame, len(message.view), message.view)
        return Confirmed(end.path, frame.channel, frame.ack)

    def _acknowledge(self, message: Message) -> None:
        """The sender's NIC learns that a write arrived, and reads its view no more."""
        end = message.end
        if end.state is EndState.FENCED or end.is_broken:
            return
        if not end.wire.is_up:
            end.acks.append(message)
            return
        # Until now the NIC might have had to send it again.
        self.on_read(message)
        end.unacked.discard(message)
        if end.transport is not None:
            end.transport.report(Sent(end.path, message.frame.channel, message.frame.seq))


class SimTransport:
    """`Transport` of one rank over a `SimNetwork`.

    Parameters
    ----------
    network : SimNetwork
    rank : int
    on_event : callable
        Called when something was added for the next `poll`.

    Notes
    -----
    ``poll`` never sleeps: whoever drives the `Timeline` decides when it is called. The payloads
    of one poll are overwritten at the next, and what is used on a path that was reported fenced
    raises InternalError, so that neither mistake passes unseen.
    """

    def __init__(
        self, network: SimNetwork, rank: int, on_event: Callable[[], None] = lambda: None
    ) -> None:
        self.nrails = network.nrails
        self._network = network
        self._rank = rank
        self._on_event = on_event
        self._ends: dict[PathKey, End] = {}
        #: Paths whose `Fenced` the owner has handled, and those in its hands now.
        self._gone: set[PathKey] = set()
        self._going: set[PathKey] = set()
        self._dirty: list[End] = []
        self._events: list[Event] = []
        self._lent: list[bytearray] = []

    def open(self, path: PathKey, endpoint: End) -> None:
        """Take one end of a connection into use."""
        if path in self._ends:
            raise InternalError(f"rank {self._rank}: {path} opened before it was fenced")
        self._gone.discard(path)
        self._going.discard(path)
        self._ends[path] = endpoint
        endpoint.transport = self
        endpoint.state = EndState.LIVE
        backlog, endpoint.backlog = endpoint.backlog, []
        for piece in backlog:
            self._network.take(endpoint, piece)
        if endpoint.is_dead or endpoint.other.state is EndState.FENCED:
            self._network.fail(endpoint, "EOF", "the connection broke before it was in use")

    def is_open(self, path: PathKey) -> bool:
        """Whether `path` was opened and not yet failed or fenced."""
        end = self._ends.get(path)
        return end is not None and end.state is EndState.LIVE

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: Any, is_replay: bool = False
    ) -> None:
        """Queue a slice; cleared ones go where `token`, the landing place, says."""
        end = self._live(path)
        if end is None:
            return
        message = Message(Kind.EAGER if token is None else Kind.WRITE, end, frame, view)
        message.region = token
        if token is None:
            self.report(Sent(path, frame.channel, frame.seq))
        elif len(token) != len(view):
            raise InternalError(f"slice of {len(view)} bytes for a place of {len(token)}")
        self._queue(end, message, is_replay)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview) -> None:
        """Name where slice ``frame.seq`` lands."""
        end = self._live(path)
        if end is not None:
            self._queue(end, Message(Kind.CLEAR, end, frame, region), False)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Confirm the peer's slices of `channel` below `ack`."""
        end = self._live(path)
        if end is not None:
            frame = Frame(channel, 0, ack, 0, 0)
            self._queue(end, Message(Kind.CONFIRM, end, frame, None), False)

    def flush(self) -> None:
        """Hand what was queued to the network; nothing leaves before."""
        dirty, self._dirty = self._dirty, []
        for end in dirty:
            for message, is_replay in end.queued:
                if message.kind is not Kind.WRITE:
                    end.small.append(message)
                elif is_replay:
                    end.bulk.appendleft(message)
                else:
                    end.bulk.append(message)
            end.queued.clear()
            if not end.is_busy:
                self._network.pump(end)

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what happened since the last poll."""
        for payload in self._lent:
            payload[:] = b"\xee" * len(payload)
        self._lent.clear()
        self._gone |= self._going
        self._going.clear()
        events, self._events = self._events, []
        for event in events:
            if type(event) is Arrived and event.payload is not None:
                assert isinstance(event.payload.obj, bytearray)
                self._lent.append(event.payload.obj)
            elif type(event) is Fenced:
                self._going.add(event.path)
        return events

    def wake(self) -> None:
        """Have the rank's loop run."""
        self._on_event()

    def fence(self, path: PathKey) -> None:
        """Begin to take the local end of `path` out of use."""
        end = self._ends.get(path)
        if end is not None:
            self._network.note("fence", self._rank, path)
            self._network.fence(end, lambda: self._on_drained(path, end))

    def is_stuck(self, path: PathKey) -> bool:
        """Whether something is unacknowledged on a connection that lost something."""
        end = self._ends.get(path)
        return end is not None and bool(end.unacked) and (end.is_broken or not end.wire.is_up)

    def close(self) -> None:
        """Fence every path."""
        for path in list(self._ends):
            self.fence(path)

    def report(self, event: Event) -> None:
        """Add an event for the next poll; called by the network."""
        self._events.append(event)
        self._on_event()

    def lend(self, view: memoryview) -> memoryview:
        """Copy a payload into memory that is good until the poll after its own."""
        return memoryview(bytearray(view))

    def _on_drained(self, path: PathKey, end: End) -> None:
        if self._ends.get(path) is end:
            del self._ends[path]
        self._network.note("fenced", self._rank, path)
        self.report(Fenced(path))

    def _live(self, path: PathKey) -> End | None:
        end = self._ends.get(path)
        if end is None and path in self._gone:
            raise InternalError(f"rank {self._rank}: {path} used after it was fenced")
        return end if end is not None and end.state is EndState.LIVE else None

    def _queue(self, end: End, message: Message, is_replay: bool) -> None:
        if not end.queued:
            self._dirty.append(end)
        end.queued.append((message, is_replay))


__all__ = [
    "DELIVER",
    "Act",
    "Cut",
    "End",
    "EndState",
    "Fate",
    "Kind",
    "Message",
    "SimNetwork",
    "SimTransport",
    "Timeline",
    "Wire",
]
