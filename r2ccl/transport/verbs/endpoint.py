"""One end of a path over verbs: its queue pair and everything under way on it.

Moves nothing by itself: `r2ccl.transport.verbs.transport` posts what waits here and takes what
completes. Invariant: what is under way is released by `take_back`, and only once the NIC is done
with it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator

from r2ccl.transport.base import Event, Frame
from r2ccl.transport.verbs.messages import Token
from r2ccl.transport.verbs.queue_depths import NLANDINGS, NMESSAGES
from r2ccl.transport.verbs.queuepair import QueuePair
from r2ccl.transport.verbs.staging import Reach
from r2ccl.types import PathKey

#: Consumed messages, and the part of the ring they take, that are told at once, without a message
#: of this end's to carry it: the largest message must always find room in what is left.
_CREDIT_EVERY = NMESSAGES // 4
_CREDIT_PART = 4


class EndpointState(enum.Enum):
    """Where an end is in its life."""

    JOINING = "joining"
    LIVE = "live"
    FAILED = "failed"
    DRAINING = "draining"


class LandingPlace:
    """A landing place: what the slice in it will be, and where."""

    __slots__ = ("frame", "reach", "region")

    def __init__(self, frame: Frame, region: memoryview, reach: Reach) -> None:
        self.frame = frame
        self.region = region
        self.reach = reach


class Outgoing:
    """A slice that waits for room in the send queue."""

    __slots__ = ("frame", "token", "view")

    def __init__(self, frame: Frame, view: memoryview, token: Token) -> None:
        self.frame = frame
        self.view = view
        self.token = token


class VerbsEndpoint:
    """One end of a path; `Endpoint`.

    Parameters
    ----------
    path : PathKey
    nic : int
        Number of the NIC within its transport.
    qp : QueuePair
        Owned; ``discard`` closes it.
    discard : callable
        Gives the end back to its transport.
    """

    def __init__(
        self, path: PathKey, nic: int, qp: QueuePair, discard: Callable[[VerbsEndpoint], None]
    ) -> None:
        self.path = path
        self.nic = nic
        self.qp = qp
        self.info = qp.info
        self.state = EndpointState.JOINING
        #: Landing places by number; numbers not in use.
        self.places: dict[int, LandingPlace] = {}
        self.numbers = deque(range(NLANDINGS))
        #: What waits for room: messages (header and payload), landing places for a number, slices.
        self.small: deque[tuple[bytearray, bytes | memoryview]] = deque()
        self.unnamed: deque[tuple[Frame, memoryview]] = deque()
        self.bulk: deque[Outgoing] = deque()
        #: Slices being written, by the count of their request.
        self.writing: dict[int, tuple[Frame, Reach]] = {}
        #: Messages consumed, and lent until the next poll with their payload.
        self.consumed = 0
        self.lent = 0
        #: It is in the list of those that have something to post.
        self.is_dirty = False
        #: Confirmation last told, by channel.
        self.acked: dict[int, int] = {}
        #: Events of an end that is not in use yet.
        self.held: list[Event] = []
        #: Markers a fence has seen come back, and when it stops waiting for them.
        self.markers = 0
        self.give_up_s = 0.0
        #: Of the messages consumed those not told yet; bytes of the ring they take, and the lent.
        self._told = 0
        self._untold_nbytes = 0
        self._lent_nbytes = 0
        self._discard = discard

    def join(self, info: bytes, is_caller: bool) -> None:
        """See `Endpoint.join`."""
        self.qp.join(info)
        if is_caller:
            self.qp.hello()

    def close(self) -> None:
        """See `Endpoint.close`."""
        self._discard(self)

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits for room."""
        return bool(self.small or self.bulk or self.unnamed)

    def lend(self, nbytes: int) -> bool:
        """Another message is read until the next poll; True if it is the first one."""
        self.lent += 1
        self._lent_nbytes += nbytes
        return self.lent == 1

    def consume_lent(self) -> None:
        """What was lent is read."""
        self.consumed += self.lent
        self._untold_nbytes += self._lent_nbytes
        self.lent = self._lent_nbytes = 0

    def told(self) -> None:
        """Note that the peer is told how many messages were consumed: it is on its way."""
        self._told = self.consumed
        self._untold_nbytes = 0

    @property
    def is_credit_due(self) -> bool:
        """Whether the peer should be told now what was consumed."""
        is_many = self.consumed - self._told >= _CREDIT_EVERY
        return is_many or self._untold_nbytes * _CREDIT_PART >= len(self.qp.inbox)

    def forget_waiting(self) -> None:
        """Nothing more is posted."""
        for queue in (self.small, self.unnamed, self.bulk):
            queue.clear()

    def take_back(self) -> Iterator[Reach]:
        """Empty what is under way: the queue pair is gone."""
        for place in self.places.values():
            yield place.reach
        for _, reach in self.writing.values():
            yield reach
        self.places.clear()
        self.writing.clear()


__all__ = ["EndpointState", "LandingPlace", "Outgoing", "VerbsEndpoint"]
