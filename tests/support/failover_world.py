"""Failover of one rank, with a transport and a control plane that only take notes."""

from collections.abc import Sequence
from typing import Any

from support.datapaths import DataPath

from r2ccl.config import Config
from r2ccl.failover.connector import Offer
from r2ccl.failover.migration.link import LinkReport
from r2ccl.failover.migration.path import Announcement
from r2ccl.transport.base import Event, Failed, Fenced, Probed
from r2ccl.types import BypassWay, PathKey, ProbeKey

A, B = PathKey(1, 0), PathKey(1, 1)


class Endpoint:
    info = b"info"
    is_closed = False

    def join(self, info: bytes, is_caller: bool) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Notes:
    """A transport that does nothing and remembers being asked."""

    nrails = 2

    def __init__(self) -> None:
        self.joined: set[int] = set()
        self.ends: dict[PathKey | ProbeKey, Endpoint] = {}
        self.opened: set[PathKey] = set()
        self.fenced: list[PathKey] = []
        self.stuck: set[PathKey] = set()
        self.confirmed: list[tuple[PathKey, int, int]] = []
        self.probed: list[ProbeKey] = []
        self.events: list[Event] = []

    def probe(self, key: ProbeKey) -> None:
        self.probed.append(key)

    def joins(self, rail: int) -> bool:
        return rail in self.joined

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        self.ends[key] = Endpoint()
        return self.ends[key]

    def open(self, path: PathKey, endpoint: object) -> None:
        self.opened.add(path)

    def is_open(self, path: PathKey) -> bool:
        return path in self.opened

    def fence(self, path: PathKey) -> None:
        self.opened.discard(path)
        self.fenced.append(path)

    def is_stuck(self, path: PathKey) -> bool:
        return path in self.stuck

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        self.confirmed.append((path, channel, ack))

    def poll(self, timeout_s: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def flush(self) -> None: ...

    def isend(self, *args: Any, **more: Any) -> None: ...

    def irecv(self, *args: Any) -> None: ...


class Control:
    """A control plane that remembers; messages to all neighbors are sent to rank -1."""

    def __init__(self) -> None:
        self.neighbors = frozenset(range(1, 4))
        self.sent: list[tuple[int, object]] = []
        self.dialed: list[tuple[int, int, int]] = []
        self.accepted: list[tuple[int, int, int]] = []
        self.kicked: list[int] = []
        self.cancelled: list[tuple[int, int]] = []
        self.bypassed: list[tuple[int, int, list[BypassWay]]] = []

    def send(self, peer: int, message: object) -> None:
        self.sent.append((peer, message))

    def gossip(self, message: object, source: int = -1) -> None:
        self.sent.append((-1, message))

    def open_session(self, peer: int) -> None: ...

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        self.accepted.append((peer, rail, epoch))

    def obstacles(self, peer: int) -> list[str]:
        return []

    def dial_path(self, peer: int, rail: int, epoch: int) -> None:
        self.dialed.append((peer, rail, epoch))

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        self.bypassed.append((peer, epoch, list(ways)))

    def cancel_path(self, peer: int, rail: int) -> None:
        self.cancelled.append((peer, rail))

    def kick(self, rail: int) -> None:
        self.kicked.append(rail)


def straight(key: PathKey) -> ProbeKey:
    return ProbeKey(key.peer, key.rail, key.rail)


class World:
    """Rank 0 of two, or more; both rails to rank 1 up.

    With a `limit` of connections, no rank is connected at the start.
    """

    def __init__(
        self,
        *,
        mode: str = "auto",
        joined: set[int] | None = None,
        is_open: bool = True,
        nranks: int = 2,
        limit: int | None = None,
        **more: Any,
    ) -> None:
        self.now = 0.0
        self.transport = Notes()
        self.transport.joined = joined or set()
        self.control = Control()
        path = DataPath(
            0,
            nranks,
            transport=self.transport,
            control=self.control,
            config=Config(
                mode=mode, no_rail_timeout_s=5.0, eager_slots=4, max_connections=limit or 128
            ),
            clock=lambda: self.now,
            **{"neighbors": None if limit is None else (), **more},
        )
        self.progress, self.links, self.failover = path.progress, path.links, path.failover
        self.migration, self.revocation = path.migration, path.revocation
        self.failover.start()
        for rail in (0, 1):
            if is_open:
                self.open(rail, 0)

    def open(self, rail: int, epoch: int) -> Endpoint:
        endpoint = Endpoint()
        self.migration.on_opened(1, rail, epoch, endpoint)
        return endpoint

    def fail(self, key: PathKey) -> None:
        self.migration.on_failed(Failed(key, "EIO", "gone"))

    def repair(self, key: PathKey, *reports: LinkReport) -> None:
        self.migration.on_fenced(Fenced(key))
        epoch = self.links.paths[key].epoch
        self.failover.on_message(1, Announcement(key.rail, epoch, "EIO", reports))

    def answer(self, key: PathKey, is_answered: bool | None) -> None:
        """Have the transport report what became of the probe of a path."""
        self.failover.on_probed(Probed(straight(key), is_answered, "because"))

    def heal(self, key: PathKey, nprobes: int = 3) -> None:
        """Answer the probes of a path that failed."""
        for _ in range(nprobes):
            self.look(0.1)
            assert self.transport.probed[-1] == straight(key)
            self.answer(key, True)
        self.look(0.1)

    def offers(self) -> list[Offer]:
        return [message for _, message in self.control.sent if isinstance(message, Offer)]

    def announcements(self) -> list[Announcement]:
        return [message for _, message in self.control.sent if isinstance(message, Announcement)]

    def look(self, seconds: float, peers: frozenset[int] = frozenset({1})) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.failover.tick(self.now, peers)
