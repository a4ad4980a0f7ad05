"""Parts of a simulated network: virtual clock, messages, wires, connection ends, and cuts.

The clock runs events. The other classes hold state, which `r2ccl.testing.simulation.network` and
`r2ccl.testing.simulation.transport` change. Equal seeds and equal calls give equal orders of
events.
"""

from __future__ import annotations

import enum
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from r2ccl.transport.base import Event, Frame
from r2ccl.types import PathKey


class Timeline:
    """Virtual clock with a queue of scheduled events.

    Calling the object returns the virtual time in seconds, as `r2ccl.clock.Clock` requires. The
    seed decides the order of events that are scheduled for the same time.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        #: Number of events that have happened; failure plans refer to it.
        self.count = 0
        self._heap: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def __call__(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def after(self, delay_s: float, fn: Callable[..., None], *args: Any) -> None:
        """Schedule ``fn(*args)`` for `delay_s` seconds from now."""
        self._serial += 1
        entry = (self.now + delay_s, self.random.random(), self._serial, fn, args)
        heapq.heappush(self._heap, entry)

    def step(self) -> bool:
        """Advance the clock to the next event and run it; return False if there is none."""
        if not self._heap:
            return False
        self.now, _, _, fn, args = heapq.heappop(self._heap)
        self.count += 1
        fn(*args)
        return True


class MessageKind(enum.Enum):
    """Kind of a message; messages of all kinds except CONTROL travel on a path."""

    #: An eager slice.
    EAGER = "eager"
    #: A cleared slice, written into its landing place.
    WRITE = "write"
    #: The announcement of a landing place.
    CLEAR = "clear"
    #: A confirmation of slices.
    CONFIRM = "confirm"
    #: A frame of a control session.
    CONTROL = "control"


class Act(enum.Enum):
    """Action of the network on a message.

    A path is reliable and ordered. For a message of a path, DROP therefore breaks the connection,
    and later messages of the same sender do not overtake a delayed message. CUT breaks the wire
    before the message arrives. For a control message, DROP and CUT lose only the message. DUPLICATE
    delivers a control message twice; a message of a path is then delivered once.
    """

    DELIVER = "deliver"
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    CUT = "cut"


class Fate(msgspec.Struct, frozen=True):
    """Fate of a message, which the hook `SimNetwork.route` decides.

    `delay_s`, in seconds, is added to the latency of the message (DELAY) or its copy (DUPLICATE).
    """

    act: Act
    delay_s: float = 0.0


DELIVER = Fate(Act.DELIVER)


class Cut(msgspec.Struct, frozen=True):
    """Break of a wire.

    Parameters
    ----------
    told : tuple of int
        Ranks whose end reports `Failed` after one network latency; the other ranks must detect the
        failure.
    keep : int
        Number of pieces in flight in each direction that still arrive. A piece is half of a cleared
        slice, or another message. The pieces after them are lost, or wait for a repair if
        `is_stall`, so an odd number can leave half a slice written.
    late_s : float
        Least time in seconds from the cut to the arrival of the pieces that `keep` counts.
    is_stall : bool
        True if the messages in flight wait and continue after a repair, as with TCP. False if the
        connection is lost, as with verbs; an end with unacknowledged messages then reports the
        failure after `SimNetwork.retry_s`.
    """

    told: tuple[int, ...] = ()
    keep: int = 0
    late_s: float = 0.0
    is_stall: bool = False


class SimMessage:
    """Message of a simulated network, sent from `end`.

    `view` is the payload in the sender's memory; for CLEAR it is the announced landing place, and
    for CONFIRM and CONTROL it is None. `region` is the landing place of a cleared slice. `number`
    is the position among all messages of the run, and -1 until the message is sent.
    """

    __slots__ = (
        "began_s", "end", "frame", "is_copied", "kind", "nbytes", "number", "region", "view",
    )  # fmt: skip

    def __init__(self, kind: MessageKind, end: End, frame: Frame, view: memoryview | None) -> None:
        self.kind = kind
        self.end = end
        self.frame = frame
        self.view = view
        self.region: memoryview | None = None
        #: True once `view` is a copy owned by the network instead of the sender's memory.
        self.is_copied = False
        self.nbytes = len(view) if view is not None and kind is not MessageKind.CLEAR else 0
        self.number = -1
        self.began_s = 0.0


class WirePiece:
    """Half of a write, or a whole message of another kind, in flight."""

    __slots__ = ("is_last", "is_lost", "message")

    def __init__(self, message: SimMessage, is_last: bool) -> None:
        self.message = message
        self.is_last = is_last
        #: True if a cut lost this piece or replaced it by a copy: its scheduled arrival is ignored.
        self.is_lost = False


class EndOwner(Protocol):
    """Transport that owns a connection end."""

    def report(self, event: Event) -> None:
        """Add an event that the transport's next poll returns."""
        ...

    def lend(self, view: memoryview) -> memoryview:
        """Return a copy of an eager payload, in memory of the transport."""
        ...


class EndState(enum.IntEnum):
    """State of one end of a connection."""

    NEW = 0  #: connected, but not taken into use by its transport
    LIVE = 1  #: opened by its transport
    FAILED = 2  #: failure reported to its owner; arriving messages are still processed
    DRAINING = 3  #: fence in progress
    FENCED = 4  #: fence complete: arriving messages are discarded


class Wire:
    """Wire between two ranks on one rail; after a failure a new connection uses the same wire.

    Each bypass has its own wire. It either passes through a third rank, over the two wires `legs`,
    or crosses rails, between the two `ports`, which are (rank, rail) pairs. The wire of a bypass
    breaks if one of these wires or ports breaks, and is never repaired.
    """

    __slots__ = ("ends", "legs", "ncuts", "pair", "ports", "rail")

    def __init__(
        self,
        pair: tuple[int, int],
        rail: int,
        legs: tuple[Wire, ...] = (),
        ports: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        self.pair = pair
        self.rail = rail
        self.legs = legs
        self.ports = ports
        #: Number of cuts that are not repaired.
        self.ncuts = 0
        #: Both ends of the newest connection; empty before the first.
        self.ends: tuple[End, ...] = ()

    @property
    def is_up(self) -> bool:
        """True if the wire is not cut."""
        return self.ncuts == 0


class End:
    """One end of one connection: the endpoint for `SimTransport.open`."""

    __slots__ = (
        "_abandon", "acks", "backlog", "bulk", "clear_at", "early", "flight", "held", "is_broken",
        "is_busy", "is_dead", "is_starving", "other", "path", "queued", "rank", "small",
        "state", "transport", "unacked", "wire",
    )  # fmt: skip

    def __init__(self, abandon: Callable[[End], None], wire: Wire, rank: int) -> None:
        self._abandon = abandon
        self.wire = wire
        self.rank = rank
        self.path = PathKey(sum(wire.pair) - rank, wire.rail)
        self.other: End = self
        self.transport: EndOwner | None = None
        self.state = EndState.NEW
        #: True once the connection is lost: messages sent later do not arrive.
        self.is_broken = False
        #: True if the connection failed before a transport opened this end.
        self.is_dead = False
        #: True once it is scheduled that this end fails after the retry time.
        self.is_starving = False
        #: True while a message occupies the wire.
        self.is_busy = False
        #: Earliest time at which the next message may arrive at the other end, to keep the order.
        self.clear_at = 0.0
        #: Messages that wait for `flush`, each with its `is_replay`.
        self.queued: list[tuple[SimMessage, bool]] = []
        #: Flushed messages that wait for the wire: cleared slices in `bulk`, all others in `small`.
        self.small: deque[SimMessage] = deque()
        self.bulk: deque[SimMessage] = deque()
        #: Pieces on the wire, in order of arrival.
        self.flight: deque[WirePiece] = deque()
        #: Pieces that wait for the repair of the wire.
        self.held: deque[WirePiece] = deque()
        #: Cleared slices whose acknowledgment waits for the repair of the wire.
        self.acks: list[SimMessage] = []
        #: Pieces that arrived before the transport took this end into use.
        self.backlog: list[WirePiece] = []
        #: Messages that were sent and not acknowledged.
        self.unacked: set[SimMessage] = set()
        #: ``ack`` to send at once when slice (channel, seq) lands, as allowed by ``irecv``.
        self.early: dict[tuple[int, int], int] = {}

    def close(self) -> None:
        """Close an end that no transport has opened; the other end is notified as by a fence."""
        self._abandon(self)


__all__ = [
    "DELIVER",
    "Act",
    "Cut",
    "End",
    "EndOwner",
    "EndState",
    "Fate",
    "MessageKind",
    "SimMessage",
    "Timeline",
    "Wire",
    "WirePiece",
]
