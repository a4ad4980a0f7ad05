"""What a simulated network is made of: time, messages, ends of connections, ways to break.

State without behaviour, but for the clock; `r2ccl.testing.simulation.network` moves it. Imports no
socket, no thread and no real clock. Invariant: equal seeds and equal calls give equal orders of
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


class MessageKind(enum.Enum):
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


class SimMessage:
    """One thing on the wire; ``number`` counts all of a network's messages."""

    __slots__ = (
        "began_s", "end", "frame", "is_copied", "kind", "nbytes", "number", "region", "view",
    )  # fmt: skip

    def __init__(self, kind: MessageKind, end: End, frame: Frame, view: memoryview | None) -> None:
        self.kind = kind
        self.end = end
        self.frame = frame
        self.view = view
        self.region: memoryview | None = None
        #: It has left the sender's memory: ``view`` is the network's own.
        self.is_copied = False
        self.nbytes = len(view) if view is not None and kind is not MessageKind.CLEAR else 0
        self.number = -1
        self.began_s = 0.0


class WirePiece:
    """Half of a write, or a whole small message, on its way."""

    __slots__ = ("is_last", "is_lost", "message")

    def __init__(self, message: SimMessage, is_last: bool) -> None:
        self.message = message
        self.is_last = is_last
        #: It will not arrive, at least not as this.
        self.is_lost = False


class EndOwner(Protocol):
    """The transport an end was given to."""

    def report(self, event: Event) -> None:
        """Add an event for its next poll."""
        ...

    def lend(self, view: memoryview) -> memoryview:
        """Copy an eager payload into memory of its own."""
        ...


class EndState(enum.IntEnum):
    """Life of one end of a connection."""

    NEW = 0  #: dialed, not taken into use by its transport
    LIVE = 1
    FAILED = 2  #: told its owner; still lets in what the network brings
    DRAINING = 3  #: being fenced
    FENCED = 4


class Wire:
    """Cable between two ranks on one rail; outlives its connections.

    A bypass has one of its own: ``legs`` are the wires it goes over, and ``ports`` the ports
    (rank, rail) of a cross way. It breaks with any of them, and does not come back.
    """

    __slots__ = ("ends", "is_up", "legs", "pair", "ports", "rail")

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
        self.is_up = True
        #: Both ends of the newest connection.
        self.ends: tuple[End, ...] = ()


class End:
    """One end of one connection; what `SimTransport.open` takes."""

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
        #: The connection lost something for good.
        self.is_broken = False
        #: Failed before its transport took it.
        self.is_dead = False
        self.is_starving = False
        self.is_busy = False
        #: Earliest time the next message may arrive at the other end: order is kept.
        self.clear_at = 0.0
        self.queued: list[tuple[SimMessage, bool]] = []
        self.small: deque[SimMessage] = deque()
        self.bulk: deque[SimMessage] = deque()
        self.flight: deque[WirePiece] = deque()
        self.held: deque[WirePiece] = deque()
        self.acks: list[SimMessage] = []
        self.backlog: list[WirePiece] = []
        self.unacked: set[SimMessage] = set()
        #: What may be confirmed once a slice (channel, seq) has landed, before its owner knows.
        self.early: dict[tuple[int, int], int] = {}

    def close(self) -> None:
        """Give up an end that was never taken into use."""
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
