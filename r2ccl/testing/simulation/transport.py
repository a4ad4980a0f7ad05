"""`Transport` over a `SimNetwork`, with one-sided writes.

A poll returns all events since the previous poll, in order. After the `Fenced` of a path there are
no events of the path until it is opened again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from r2ccl.errors import InternalError
from r2ccl.testing.simulation.network import End, EndState, MessageKind, SimMessage, SimNetwork
from r2ccl.transport.base import Arrived, Event, Fenced, Frame, MemoryUse, Probed, Sent
from r2ccl.transport.preconnected import PreconnectedTransport, Unregistered
from r2ccl.types import PathKey, ProbeKey


class SimTransport(PreconnectedTransport):
    """Transport of one rank over a `SimNetwork`.

    Parameters
    ----------
    network : SimNetwork
    rank : int
    on_event : callable
        Called by `wake`, and whenever a new event waits for the next `poll`.

    Notes
    -----
    ``poll`` never sleeps. To detect mistakes of the caller, each poll overwrites the payloads that
    the previous poll returned, and these calls raise InternalError:

    - ``isend``, ``irecv`` and ``confirm`` on a path whose `Fenced` was returned by a poll before
      the last one, until the path is opened again
    - ``open`` of a path that was opened before and is not fenced yet
    - ``isend`` of a cleared slice whose size differs from its landing place
    """

    def __init__(
        self, network: SimNetwork, rank: int, on_event: Callable[[], None] = lambda: None
    ) -> None:
        self.nrails = network.nrails
        self._network = network
        self._rank = rank
        self._on_event = on_event
        self._ends: dict[PathKey, End] = {}
        #: Paths whose `Fenced` was returned by a poll before the last one.
        self._gone: set[PathKey] = set()
        #: Paths whose `Fenced` was returned by the last poll, which the caller may still process.
        self._going: set[PathKey] = set()
        self._dirty: list[End] = []
        self._events: list[Event] = []
        self._lent: list[bytearray] = []
        self._probing: set[ProbeKey] = set()

    def open(self, path: PathKey, endpoint: End) -> None:
        """Open `path` on one end of a connection, and process the messages that already arrived.

        If the connection is broken already, report `Failed`.
        """
        if path in self._ends:
            raise InternalError(f"rank {self._rank}: {path} opened again before it was fenced")
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
        """Accept device memory if the network's NICs reach it.

        Raises
        ------
        TransportError
            If the NICs do not reach device memory.
        """
        if self._network.reaches_devices:
            return Unregistered()
        return super().register_device(address, nbytes)

    def is_open(self, path: PathKey) -> bool:
        """Return True if `path` is open and has neither failed nor been fenced."""
        end = self._ends.get(path)
        return end is not None and end.state is EndState.LIVE

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: Any, is_replay: bool = False
    ) -> None:
        """Queue a slice for `flush`; `token` is its landing place, None for an eager slice."""
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
            raise InternalError(
                f"rank {self._rank}: {path}: slice of {len(view)} bytes for a landing place of "
                f"{len(token)} bytes"
            )
        self._queue(end, message, is_replay)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Announce `region` as landing place of slice ``frame.seq``, at the next `flush`."""
        end = self._live(path)
        if end is not None:
            if ack:
                end.early[frame.channel, frame.seq] = ack
            self._queue(end, SimMessage(MessageKind.CLEAR, end, frame, region), False)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Confirm the peer's slices of `channel` with numbers below `ack`, at the next `flush`."""
        end = self._live(path)
        if end is not None:
            frame = Frame(channel, 0, ack, 0, 0)
            self._queue(end, SimMessage(MessageKind.CONFIRM, end, frame, None), False)

    def flush(self) -> None:
        """Pass the queued messages to the network."""
        dirty, self._dirty = self._dirty, []
        for end in dirty:
            for message, is_replay in end.queued:
                if message.kind is not MessageKind.WRITE:
                    end.small.append(message)
                elif is_replay:  # it overtakes other replays too, which `Transport.isend` allows
                    end.bulk.appendleft(message)
                else:
                    end.bulk.append(message)
            end.queued.clear()
            if not end.is_busy:
                self._network.pump(end)

    def poll(self, timeout_s: float) -> list[Event]:
        """Return the events since the last poll, without sleeping; `timeout_s` has no effect."""
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
        """Call `on_event`, with which the rank schedules a turn of its data loop."""
        self._on_event()

    def fence(self, path: PathKey) -> None:
        """Start fencing the local end of `path`; `Fenced` follows once the end is drained."""
        end = self._ends.get(path)
        if end is not None:
            self._network.note("fence", self._rank, path)
            self._network.fence(end, lambda: self._on_drained(path, end))

    def memory_use(self) -> MemoryUse:
        """Return zeros: the network of the simulation needs no memory of its own."""
        return MemoryUse()

    def has_unsent(self) -> bool:
        """Return False: `flush` always passes everything to the network."""
        return False

    def is_stuck(self, path: PathKey) -> bool:
        """Return True if a message is unacknowledged on a broken connection or a cut wire."""
        end = self._ends.get(path)
        return end is not None and bool(end.unacked) and (end.is_broken or not end.wire.is_up)

    def probe(self, key: ProbeKey) -> None:
        """Probe a port, unless a probe with this key is in flight.

        If the network does not connect the two ports, report the outcome None at once.
        """
        if key in self._probing:
            return
        if not self._network.has_way(self._rank, key):
            self.report(Probed(key, None, "this network does not connect these ports"))
            return
        self._probing.add(key)
        self._network.probe(self._rank, key, partial(self._on_probed, key))

    def descriptors(self) -> list[int]:
        """Return no descriptors: the network is in memory."""
        return []

    def close(self) -> None:
        """Fence every path."""
        for path in list(self._ends):
            self.fence(path)

    def report(self, event: Event) -> None:
        """Add an event for the next poll; the network calls this."""
        self._events.append(event)
        self._on_event()

    def lend(self, view: memoryview) -> memoryview:
        """Return a copy of a payload; one poll returns the copy, the next poll overwrites it."""
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
