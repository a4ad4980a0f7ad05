"""What must hold at every event of a simulation, and the poison that makes mistakes visible.

Each check raises `Violation`. The classes here are the library's own with an eye in them: they
change nothing it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.failover.context import RankContext
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.link import Landing, SendLink, Slice
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.runtime.executor import LandingPool, LaneRun, Place
from r2ccl.testing.simulation.network import MessageKind, SimMessage

Array = npt.NDArray[Any]

#: Written over memory nobody may use any more.
_POISON = 0xA5


class Violation(AssertionError):
    """The library broke one of its promises."""


class Checker:
    """Remembers what was sent, released and retired in one run, and compares."""

    def __init__(self) -> None:
        #: (source, destination, channel, seq) to the bytes posted, and to be delivered next.
        self.sent: dict[tuple[int, int, int, int], bytes] = {}
        self.next_seq: dict[tuple[int, int, int], int] = {}
        #: Views given back to their owner; kept alive, so that an id names one view.
        self.released: dict[int, memoryview] = {}
        #: What the first rank that started a collective planned it with.
        self.plans: dict[int, Health] = {}
        #: When it did so, in events.
        self.began: dict[int, int] = {}
        #: Returns what a view of a rank's memory holds.
        self.bytes_of: Callable[[int, memoryview | bytes], bytes] = lambda rank, view: bytes(view)
        self._retired: list[tuple[str, Array]] = []

    def posted(self, source: int, link: SendLink, view: memoryview) -> None:
        """Note a slice before it gets its number."""
        key = (source, link.peer, link.channel, link.posted)
        self.sent[key] = self.bytes_of(source, view)

    def delivered(self, rank: int, peer: int, channel: int, landing: Landing, payload: Any) -> None:
        """Hold a delivered slice against what was posted: in order, once, whole."""
        key = (peer, rank, channel)
        expected = self.next_seq.get(key, 0)
        if landing.seq != expected:
            raise Violation(f"link {key} delivered slice {landing.seq}, expected {expected}")
        self.next_seq[key] = expected + 1
        found = landing.region if payload is None else payload
        assert found is not None
        if self.bytes_of(rank, found) != self.sent[(*key, landing.seq)]:
            raise Violation(f"link {key} delivered wrong bytes as slice {landing.seq}")

    def read(self, message: SimMessage) -> None:
        """Refuse a read of memory that was given back; a `SimNetwork.on_read`."""
        is_own_memory = message.kind is MessageKind.WRITE and not message.is_copied
        if is_own_memory and id(message.view) in self.released:
            frame = message.frame
            raise Violation(
                f"rank {message.end.rank}: {message.end.path} reads slice {frame.seq} of "
                f"channel {frame.channel} after its memory was released"
            )

    def planned(self, rank: int, op: int, health: Health, nevents: int) -> None:
        """Refuse two ranks that plan one collective with different healths."""
        self.began.setdefault(op, nevents)
        first = self.plans.setdefault(op, health)
        if health != first:
            raise Violation(f"rank {rank} plans collective {op} with {health}, others with {first}")

    def result(self, rank: int, call: int, found: bytes, expected: bytes) -> None:
        """Compare a result bit for bit."""
        if found != expected:
            raise Violation(f"rank {rank}: call {call} returned a wrong result")

    def retire(self, what: str, *arrays: Array) -> None:
        """The caller has its memory back: nothing may write there any more."""
        for array in arrays:
            raw = array.view(np.uint8)
            raw[:] = _POISON
            self._retired.append((what, raw))

    def check_retired(self) -> None:
        """Look at all retired memory."""
        for what, raw in self._retired:
            if not np.all(raw == _POISON):
                raise Violation(f"memory of {what} was written after it was given back")


class CheckedLinks(Links):
    """`Links` that show their checker what is posted, delivered and released."""

    def __init__(self, checker: Checker, context: RankContext) -> None:
        super().__init__(context)
        self._rank = context.rank
        self._checker = checker

    def send(
        self, link: SendLink, view: memoryview, is_eager: bool, consumer: Consumer, index: int
    ) -> None:
        """Post a slice."""
        self._checker.posted(self._rank, link, view)
        super().send(link, view, is_eager, consumer, index)

    def delivered(self, peer: int, channel: int, landing: Landing, payload: Any) -> None:
        """Show a delivered slice."""
        self._checker.delivered(self._rank, peer, channel, landing, payload)

    def release(self, slices: list[Slice]) -> None:
        """Give slices back."""
        for item in slices:
            self._checker.released[id(item.view)] = item.view
        super().release(slices)


class CheckedRun(LaneRun):
    """`LaneRun` that shows each slice before it is used."""

    __slots__ = ("_shown",)

    def __init__(self, lane: Any, call: Any, links: CheckedLinks, pool: LandingPool) -> None:
        super().__init__(lane, call, links, pool)
        self._shown = links

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Take a slice."""
        peer = self._steps[landing.index].peer
        channel = self._receivers[peer].link.channel
        self._shown.delivered(peer, channel, landing, payload)
        super().on_slice(landing, payload)


class CheckedPool(LandingPool):
    """`LandingPool` that poisons free places and finds writes into them."""

    def __init__(self, rank: int, depth: int) -> None:
        super().__init__(lambda nbytes: np.empty(nbytes, np.uint8), depth)
        self._rank = rank

    def take(self, nbytes: int) -> Place:
        """Return a place nobody wrote to since it was given back."""
        place = super().take(nbytes)
        assert isinstance(place, np.ndarray)
        if place.base is not None and not np.all(place == _POISON):
            raise Violation(f"rank {self._rank}: a free landing place was written")
        return place

    def give(self, place: Place) -> None:
        """Poison a place and return it."""
        assert isinstance(place, np.ndarray)
        place[:] = _POISON
        # A view marks a place that was used before; a new one owns its memory.
        super().give(place if place.base is not None else place[:])


__all__ = ["CheckedLinks", "CheckedPool", "CheckedRun", "Checker", "Violation"]
