"""Checks during a simulation, and poisoned memory that makes wrong accesses visible.

A check that fails raises `Violation`. `CheckedLinks` and `CheckedRun` report slices to a `Checker`,
and `CheckedPool` checks landing places itself. Otherwise these classes behave like their base
classes, which are the library's own.
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

#: Byte that fills retired memory and free landing places.
_POISON = 0xA5


class Violation(AssertionError):
    """Error raised when the library breaks one of its promises in a simulation."""


class Checker:
    """Record of a run's slices, plans, and released or retired memory, with checks of them."""

    def __init__(self) -> None:
        #: Bytes posted, by (source, destination, channel, seq).
        self.sent: dict[tuple[int, int, int, int], bytes] = {}
        #: Slice to be delivered next, by (source, destination, channel).
        self.next_seq: dict[tuple[int, int, int], int] = {}
        #: Views given back to their owner, by id. They are kept alive so that ids stay unique.
        self.released: dict[int, memoryview] = {}
        #: Health with which the first rank planned each collective, by collective.
        self.plans: dict[int, Health] = {}
        #: Number of events before the first rank planned each collective, by collective.
        self.began: dict[int, int] = {}
        #: Function that returns the bytes of a view of a rank's memory.
        self.bytes_of: Callable[[int, memoryview | bytes], bytes] = lambda rank, view: bytes(view)
        self._retired: list[tuple[str, Array]] = []

    def posted(self, source: int, link: SendLink, view: memoryview) -> None:
        """Record the bytes of a slice that `source` is about to post on `link`."""
        key = (source, link.peer, link.channel, link.posted)
        self.sent[key] = self.bytes_of(source, view)

    def delivered(self, rank: int, peer: int, channel: int, landing: Landing, payload: Any) -> None:
        """Raise Violation unless a slice is the next one of its link and has the bytes posted."""
        key = (peer, rank, channel)
        expected = self.next_seq.get(key, 0)
        if landing.seq != expected:
            raise Violation(
                f"rank {rank}: the link of channel {channel} from rank {peer} delivered slice "
                f"{landing.seq} instead of {expected}"
            )
        self.next_seq[key] = expected + 1
        found = landing.region if payload is None else payload
        assert found is not None
        if self.bytes_of(rank, found) != self.sent[(*key, landing.seq)]:
            raise Violation(
                f"rank {rank}: the link of channel {channel} from rank {peer} delivered wrong "
                f"bytes as slice {landing.seq}"
            )

    def read(self, message: SimMessage) -> None:
        """Raise Violation if a NIC reads a cleared slice whose memory was released.

        This is the hook `SimNetwork.on_read`.
        """
        is_own_memory = message.kind is MessageKind.WRITE and not message.is_copied
        if is_own_memory and id(message.view) in self.released:
            frame = message.frame
            raise Violation(
                f"rank {message.end.rank}: the NIC reads slice {frame.seq} of channel "
                f"{frame.channel} on {message.end.path} after the slice's memory was released"
            )

    def planned(self, rank: int, op: int, health: Health, nevents: int) -> None:
        """Record the health with which a rank plans a collective.

        Parameters
        ----------
        rank : int
            Rank that plans the collective.
        op : int
            Number of the collective.
        health : Health
            The health that the rank uses.
        nevents : int
            Number of events of the simulation so far; `began` keeps the value given by the
            first rank that plans the collective.

        Raises
        ------
        Violation
            If another rank planned this collective with another health.
        """
        self.began.setdefault(op, nevents)
        first = self.plans.setdefault(op, health)
        if health != first:
            raise Violation(
                f"rank {rank} plans collective {op} with {health}, other ranks with {first}"
            )

    def result(self, rank: int, call: int, found: bytes, expected: bytes) -> None:
        """Raise Violation unless a result has exactly the expected bytes."""
        if found != expected:
            raise Violation(f"rank {rank}: call {call} returned a wrong result")

    def retire(self, what: str, *arrays: Array) -> None:
        """Poison memory that was given back to the caller, to detect later writes to it.

        `what` names the owner of the memory in the message of `check_retired`.
        """
        for array in arrays:
            raw = array.view(np.uint8)
            raw[:] = _POISON
            self._retired.append((what, raw))

    def check_retired(self) -> None:
        """Raise Violation if any retired memory was written."""
        for what, raw in self._retired:
            if not np.all(raw == _POISON):
                raise Violation(f"memory of {what} was written after it was given back")


class CheckedLinks(Links):
    """`Links` that report posted, delivered and released slices to a checker."""

    def __init__(self, checker: Checker, context: RankContext) -> None:
        super().__init__(context)
        self._rank = context.rank
        self._checker = checker

    def send(
        self, link: SendLink, view: memoryview, is_eager: bool, consumer: Consumer, index: int
    ) -> None:
        """Report a slice to the checker and post it."""
        self._checker.posted(self._rank, link, view)
        super().send(link, view, is_eager, consumer, index)

    def delivered(self, peer: int, channel: int, landing: Landing, payload: Any) -> None:
        """Report a delivered slice to the checker."""
        self._checker.delivered(self._rank, peer, channel, landing, payload)

    def release(self, slices: list[Slice]) -> None:
        """Report released slices to the checker, and handle them as `Links` does."""
        for item in slices:
            self._checker.released[id(item.view)] = item.view
        super().release(slices)


class CheckedRun(LaneRun):
    """`LaneRun` that reports each received slice to a checker before using it."""

    __slots__ = ("_shown",)

    def __init__(self, lane: Any, call: Any, links: CheckedLinks, pool: LandingPool) -> None:
        super().__init__(lane, call, links, pool)
        self._shown = links

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Report a received slice to the checker, and process it as `LaneRun` does."""
        peer = self._steps[landing.index].peer
        channel = self._receivers[peer].link.channel
        self._shown.delivered(peer, channel, landing, payload)
        super().on_slice(landing, payload)


class CheckedPool(LandingPool):
    """`LandingPool` that poisons free landing places and detects writes into them."""

    def __init__(self, rank: int, depth: int) -> None:
        super().__init__(lambda nbytes: np.empty(nbytes, np.uint8), depth)
        self._rank = rank

    def take(self, nbytes: int) -> Place:
        """Return a free landing place; raise Violation if it was written while it was free."""
        place = super().take(nbytes)
        assert isinstance(place, np.ndarray)
        if place.base is not None and not np.all(place == _POISON):
            raise Violation(f"rank {self._rank}: a free landing place was written")
        return place

    def give(self, place: Place) -> None:
        """Poison a landing place and put it back into the pool."""
        assert isinstance(place, np.ndarray)
        place[:] = _POISON
        # Put back a view: `take` checks only places with a base, and a new place has none.
        super().give(place if place.base is not None else place[:])


__all__ = ["CheckedLinks", "CheckedPool", "CheckedRun", "Checker", "Violation"]
