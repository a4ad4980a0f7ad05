"""`Transport` over a simulated network (`network`), where writes are one-sided.

Imports no socket, no thread and no real clock. Invariant: an event is reported at the first poll
after it happened, in order, and nothing of a path after its `Fenced`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from r2ccl.errors import InternalError
from r2ccl.testing.simulation.network import End, EndState, MessageKind, SimMessage, SimNetwork
from r2ccl.transport.base import Arrived, Event, Fenced, Frame, Probed, Sent
from r2ccl.transport.preconnected import PreconnectedTransport, Unregistered
from r2ccl.types import PathKey, ProbeKey


class SimTransport(PreconnectedTransport):
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
        self._probing: set[ProbeKey] = set()

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

    def register_device(self, address: int, nbytes: int) -> Unregistered:
        """Refuse, unless the network's NICs reach device memory."""
        if self._network.reaches_devices:
            return Unregistered()
        return super().register_device(address, nbytes)

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
        message = SimMessage(
            MessageKind.EAGER if token is None else MessageKind.WRITE, end, frame, view
        )
        message.region = token
        if token is None:
            self.report(Sent(path, frame.channel, frame.seq))
        elif len(token) != len(view):
            raise InternalError(f"slice of {len(view)} bytes for a place of {len(token)}")
        self._queue(end, message, is_replay)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Name where slice ``frame.seq`` lands."""
        end = self._live(path)
        if end is not None:
            if ack:
                end.early[frame.channel, frame.seq] = ack
            self._queue(end, SimMessage(MessageKind.CLEAR, end, frame, region), False)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Confirm the peer's slices of `channel` below `ack`."""
        end = self._live(path)
        if end is not None:
            frame = Frame(channel, 0, ack, 0, 0)
            self._queue(end, SimMessage(MessageKind.CONFIRM, end, frame, None), False)

    def flush(self) -> None:
        """Hand what was queued to the network; nothing leaves before."""
        dirty, self._dirty = self._dirty, []
        for end in dirty:
            for message, is_replay in end.queued:
                if message.kind is not MessageKind.WRITE:
                    end.small.append(message)
                elif is_replay:  # the interface lets it overtake other replays too
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

    def has_unsent(self) -> bool:
        """See `Transport.has_unsent`: the network takes all at once."""
        return False

    def is_stuck(self, path: PathKey) -> bool:
        """Whether something is unacknowledged on a connection that lost something."""
        end = self._ends.get(path)
        return end is not None and bool(end.unacked) and (end.is_broken or not end.wire.is_up)

    def probe(self, key: ProbeKey) -> None:
        """Ask the port itself; see `Transport.probe`."""
        if key in self._probing:
            return
        if not self._network.has_way(self._rank, key):
            self.report(Probed(key, None, "this network has no such rail or rank"))
            return
        self._probing.add(key)
        self._network.probe(self._rank, key, partial(self._on_probed, key))

    def descriptors(self) -> list[int]:
        """See `Transport.descriptors`: the network is memory."""
        return []

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

    def _on_probed(self, key: ProbeKey, is_answered: bool) -> None:
        self._probing.discard(key)
        self._network.note("probed", self._rank, key, is_answered)
        self.report(Probed(key, is_answered, "answered" if is_answered else "no answer"))

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

    def _queue(self, end: End, message: SimMessage, is_replay: bool) -> None:
        if not end.queued:
            self._dirty.append(end)
        end.queued.append((message, is_replay))


__all__ = ["SimTransport"]
