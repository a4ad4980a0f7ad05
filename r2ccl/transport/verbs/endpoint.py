"""One end of a path over verbs: its queue pair, its send queues, and its requests in flight.

`r2ccl.transport.verbs.transport` posts the queued items and handles the completions. Invariant: the
memory of a request is released only when the request has completed, or the queue pair was reset or
destroyed.
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

#: A credit is sent by itself once this many consumed messages are not yet acknowledged to the peer,
#: or once their bytes reach 1 / `_CREDIT_PART` of the ring: the largest message must always fit in
#: the rest of the ring. Until then, the credit waits for the next message to the peer.
_CREDIT_EVERY = NMESSAGES // 4
_CREDIT_PART = 4


class EndpointState(enum.Enum):
    """State of an end of a path.

    An end is JOINING until the transport opens it, and then LIVE. After an error it is FAILED, even
    if it was never opened. Once its path is fenced, it is DRAINING.
    """

    JOINING = "joining"
    LIVE = "live"
    FAILED = "failed"
    DRAINING = "draining"


class LandingPlace:
    """Landing place that was announced to the peer.

    ``frame`` is the header of the expected slice, ``region`` its destination. ``reach`` is the
    memory that the NIC writes: ``region`` itself, or a staging buffer that is copied to it.
    """

    __slots__ = ("frame", "reach", "region")

    def __init__(self, frame: Frame, region: memoryview, reach: Reach) -> None:
        self.frame = frame
        self.region = region
        self.reach = reach


class Outgoing:
    """Cleared slice that is posted once no message waits and the queue pair has room."""

    __slots__ = ("frame", "token", "view")

    def __init__(self, frame: Frame, view: memoryview, token: Token) -> None:
        self.frame = frame
        self.view = view
        self.token = token


class VerbsEndpoint:
    """End of a path: a queue pair with its send queues and requests in flight.

    Implements `Endpoint`.

    Parameters
    ----------
    path : PathKey
    nic : int
        Index of the NIC within its transport.
    qp : QueuePair
        Owned until ``discard`` is called.
    discard : callable
        Called by `close` with this end, to return the queue pair to the transport.
    """

    def __init__(
        self, path: PathKey, nic: int, qp: QueuePair, discard: Callable[[VerbsEndpoint], None]
    ) -> None:
        self.path = path
        self.nic = nic
        self.qp = qp
        self.info = qp.info
        self.state = EndpointState.JOINING
        #: True once the transport has opened this end, whatever its state became afterwards.
        self.is_opened = False
        #: Landing places by number, and the numbers that are free.
        self.places: dict[int, LandingPlace] = {}
        self.numbers = deque(range(NLANDINGS))
        #: Send queues: messages (header, payload), landing places without a number yet, replays,
        #: other cleared slices.
        self.small: deque[tuple[bytearray, bytes | memoryview]] = deque()
        self.unnamed: deque[tuple[Frame, memoryview]] = deque()
        self.replays: deque[Outgoing] = deque()
        self.bulk: deque[Outgoing] = deque()
        #: Slices being written by the NIC, by the count of their request (`QueuePair.retire`).
        self.writing: dict[int, tuple[Frame, Reach]] = {}
        #: Messages consumed since the connection began; messages whose ring memory is borrowed by
        #: events until the next poll.
        self.consumed = 0
        self.lent = 0
        #: True while the transport's list of ends with something to post contains this end.
        self.is_dirty = False
        #: Highest confirmation queued so far, by channel.
        self.acked: dict[int, int] = {}
        #: Events to report once the end is opened; until then nothing but `Joined` is reported.
        self.held: list[Event] = []
        #: Number of markers completed since the fence, and the clock's time when the fence stops
        #: waiting for them; 0 if it does not wait, because the device refused the flush.
        self.markers = 0
        self.give_up_s = 0.0
        #: Value of `consumed` in the last credit sent, ring bytes consumed since then, and ring
        #: bytes of the lent messages.
        self._told = 0
        self._untold_nbytes = 0
        self._lent_nbytes = 0
        self._discard = discard

    def join(self, info: bytes, is_caller: bool) -> None:
        """Connect to the end that `info` describes, as `Endpoint.join` does.

        The caller tests the connection by an RDMA write of 0 bytes.
        """
        self.qp.join(info)
        if is_caller:
            self.qp.hello()

    def close(self) -> None:
        """Return the queue pair to the transport, which resets it for reuse or destroys it."""
        self._discard(self)

    @property
    def has_waiting(self) -> bool:
        """True while a send queue is not empty."""
        return bool(self.small or self.replays or self.bulk or self.unnamed)

    def lend(self, nbytes: int) -> bool:
        """Count a message of `nbytes` ring bytes as lent: events borrow it until the next poll.

        Return True if it is the only lent message.
        """
        self.lent += 1
        self._lent_nbytes += nbytes
        return self.lent == 1

    def consume_lent(self) -> None:
        """Count all lent messages as consumed."""
        self.consumed += self.lent
        self._untold_nbytes += self._lent_nbytes
        self.lent = self._lent_nbytes = 0

    def told(self) -> None:
        """Record that a credit for all messages consumed so far was sent to the peer."""
        self._told = self.consumed
        self._untold_nbytes = 0

    @property
    def is_credit_due(self) -> bool:
        """True if consumed messages must be acknowledged now, by a credit without a message."""
        is_many = self.consumed - self._told >= _CREDIT_EVERY
        return is_many or self._untold_nbytes * _CREDIT_PART >= len(self.qp.inbox)

    def forget_waiting(self) -> None:
        """Discard the messages, announcements and slices that wait in the send queues."""
        for queue in (self.small, self.unnamed, self.replays, self.bulk):
            queue.clear()

    def take_back(self) -> Iterator[Reach]:
        """Forget the announced landing places and the slices being written; yield their memory.

        The caller releases the memory. The queue pair must have been reset or destroyed, so that no
        NIC accesses the memory.
        """
        for place in self.places.values():
            yield place.reach
        for _, reach in self.writing.values():
            yield reach
        self.places.clear()
        self.writing.clear()


__all__ = ["EndpointState", "LandingPlace", "Outgoing", "VerbsEndpoint"]
