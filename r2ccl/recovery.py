"""Recovery: what a rank does about its paths; the tables of `r2ccl.resilience`, applied.

Events come from the transport (`on_failed`, `on_fenced`), the control plane (`on_message`,
`on_opened`, `on_peer_lost`), the link monitor (`on_carrier`) and the clock (`tick`). The answers
go to the transport, the control plane and, through `Progress`, to the links. Like `Progress` it is
owned by one caller at a time and never blocks.

Invariant: after `revoke` no path is open, so no peer can write into memory of a call that raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from r2ccl.council import Council
from r2ccl.detector import Detector
from r2ccl.errors import (
    CommunicatorRevoked,
    InvalidArgument,
    NoHealthyRail,
    PeerLost,
    R2cclError,
    TransportError,
)
from r2ccl.joining import Answer, Joiner, Offer, Ready, probe_keys
from r2ccl.repair import Repair, RepairLog
from r2ccl.resilience.health import Health
from r2ccl.resilience.link import LinkReport
from r2ccl.resilience.path import (
    Action,
    Announcement,
    Path,
    PathEvent,
    PathState,
    announced,
    choose_routes,
    ended,
    step,
)
from r2ccl.resilience.rounds import Commit, Prepare, Promise, Report
from r2ccl.resilience.verdict import Finding, Kind, ProbeReply, ProbeRequest, Verdict
from r2ccl.resilience.watch import Watch
from r2ccl.transport.base import Arrived, Failed, Fenced, Joined, Probed, RailChanged
from r2ccl.types import PathKey, ProbeKey

if TYPE_CHECKING:
    from r2ccl.progress import Progress

_log = logging.getLogger(__name__)


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """Control message: the communicator is of no use any more, and why.

    ``kind`` is the name of the error, ``rank`` who found it, ``peer`` whom it concerns (-1: all).
    """

    kind: str
    text: str
    rank: int
    peer: int = -1


class ControlPort(Protocol):
    """What recovery needs of the control plane; nothing here blocks."""

    def send(self, peer: int, message: object) -> None:
        """Queue `message`; it arrives exactly once, in order."""
        ...

    def broadcast(self, message: object) -> None:
        """`send` to every other rank."""
        ...

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        """Let in one connection of exactly (peer, rail, epoch)."""
        ...

    def dial_path(self, peer: int, rail: int, epoch: int) -> None:
        """Connect until it succeeds; both report to the handler's ``on_path``."""
        ...

    def kick(self, rail: int) -> None:
        """Dial the pending paths of `rail` now."""
        ...


class Recovery:
    """Paths of one rank and their repair."""

    def __init__(self, progress: Progress, control: ControlPort) -> None:
        self._progress = progress
        self._control = control
        self._rank = progress.rank
        self._config = progress.config
        self._clock = progress.clock
        self.nrails = progress.transport.nrails
        self.peers = [peer for peer in range(progress.nranks) if peer != progress.rank]
        self.paths = {
            key: Path(key)
            for key in (PathKey(peer, rail) for peer in self.peers for rail in range(self.nrails))
        }
        #: Paths being fenced here or at the peer: slices wait for the control plane.
        self.repairing: set[PathKey] = set()
        #: First error that ended the communicator.
        self.error: R2cclError | None = None
        #: Every slice of this rank is confirmed, and it says so.
        self.is_leaving = False
        self.log = RepairLog()
        #: Rails channels are at home on; the others, TCP beside RDMA, are the last resort.
        joined = [rail for rail in range(self.nrails) if progress.transport.joins(rail)]
        self._homes = joined or list(range(self.nrails))
        self._joiner = Joiner(
            self._rank, progress.transport, control.send, self.on_opened, self._clock
        )
        self._watch = Watch(self._config.suspicion_timeout_s)
        #: Who is to be told what became of a probe.
        self._asking: dict[ProbeKey, list[Callable[[Probed], None]]] = {}
        #: Probes whose connections wait for the paths.
        self._unjoined = probe_keys(self.peers, joined) if self._config.is_resilient else []
        self._join_by_s = 0.0
        self._alone_since = dict.fromkeys(self.peers, self._clock())
        #: Finds out what broke; the fail-stop baseline has none.
        self.detector = self._make_detector() if self._config.is_resilient else None
        #: Agrees with the others on what to plan with; nor has it that.
        self.council = self._make_council() if self._config.is_resilient else None

    def _make_council(self) -> Council:
        health = Health.whole(len(self.peers) + 1, self.nrails, self._config.digest())
        return Council(self._rank, health, control=self._control, clock=self._clock)

    def _make_detector(self) -> Detector:
        return Detector(
            self._rank,
            len(self.peers) + 1,
            paths=self.paths,
            transport=self._progress.transport,
            control=self._control,
            ask=self.ask,
            config=self._config,
            clock=self._clock,
            on_verdict=self._on_verdict,
        )

    @property
    def open_repairs(self) -> list[Repair]:
        """Repairs whose first replayed slice has not arrived here yet."""
        return self.log.open

    @property
    def is_quiet(self) -> bool:
        """Whether no path is in use or being fenced: after an error, memory is the caller's."""
        busy = (PathState.UP, PathState.FENCING)
        return not any(path.state in busy for path in self.paths.values())

    def start(self) -> None:
        """Have every path connected: the lower rank dials. Connections of probes come after."""
        now = self._clock()
        self._join_by_s = now + self._config.connect_timeout_s
        for path in self.paths.values():
            path.since_s = now
            self._redial(path)

    def up(self, peer: int) -> list[PathKey]:
        """Paths to `peer` that may be used, by rail."""
        keys = (PathKey(peer, rail) for rail in range(self.nrails))
        return [key for key in keys if self.paths[key].state is PathState.UP]

    # Events of paths

    def on_failed(self, event: Failed) -> None:
        """Hard evidence from the data path."""
        self.fail(event.path, f"{event.status}: {event.detail}")

    def fail(self, key: PathKey, cause: str) -> None:
        """Take `key` out of use for `cause`, found at this end."""
        path = self.paths[key]
        if path.state is not PathState.UP or self.error is not None:
            return
        path.cause = cause
        # While all ranks leave, those that are done first close their ends.
        if not self._config.is_resilient and not self.is_leaving:
            status = cause.partition(":")[0]
            self._give_up(
                TransportError(
                    f"rank {self._rank}: path to rank {key.peer} on rail {key.rail} broke "
                    f"({cause}); R2CC_MODE=0 does not migrate, the default does",
                    rank=self._rank, peer=key.peer, rail=key.rail, status=status,
                ),
                "TransportError", key.peer,
            )  # fmt: skip
            return
        self._apply(path, step(path, PathEvent.FAILED))
        self._look_into(key, path.epoch, cause, is_own=True)

    def on_fenced(self, event: Fenced) -> None:
        """The local end is drained."""
        path = self.paths[event.path]
        if self.error is not None:
            path.state = PathState.DOWN
        else:
            for link in self._senders(event.path.peer):
                released = link.fenced(event.path)
                self._progress.note_retired(link)
                self._progress.release(released)
            self.log.fenced(event.path, self._clock())
            self._apply(path, step(path, PathEvent.FENCED))

    def on_opened(self, peer: int, rail: int, epoch: int, endpoint: Any) -> None:
        """Take an authenticated connection of `epoch` into use, or close a stale one.

        A second one of an epoch in use means that the peer never got hold of the first.
        """
        path = self.paths[PathKey(peer, rail)]
        if path.state is not PathState.DOWN or path.epoch != epoch or self.error is not None:
            endpoint.close()
            if path.epoch == epoch:
                self.fail(path.key, "REDIALED: the peer dials again, its end is not in use")
            return
        self._progress.transport.open(path.key, endpoint)
        self._apply(path, step(path, PathEvent.OPENED))

    def on_carrier(self, rail: int, is_up: bool) -> None:
        """The local NIC of `rail` lost or found its carrier."""
        if is_up:
            self._control.kick(rail)
            return
        for peer in self.peers:
            self.fail(PathKey(peer, rail), "CARRIER_DOWN: the local NIC of the rail has no carrier")
        self._doubt(self._rank, rail)

    def on_rail(self, event: RailChanged) -> None:
        """The device of a rail says that its port changed."""
        if event.is_up:
            self._joiner.kick(event.rail)
            return
        for peer in self.peers:
            self.fail(PathKey(peer, event.rail), "PORT_ERR: the port of the RDMA NIC is down")
        self._doubt(self._rank, event.rail)

    def on_joined(self, event: Joined) -> None:
        """An end this rank called with has proved itself, or not."""
        self._joiner.on_joined(event)

    # Probes

    def ask(self, key: ProbeKey, on_answer: Callable[[Probed], None]) -> None:
        """Ask for a sign of life; `on_answer` is told within the probe timeout."""
        waiting = self._asking.setdefault(key, [])
        waiting.append(on_answer)
        if len(waiting) == 1:
            self._progress.transport.probe(key)

    def on_probed(self, event: Probed) -> None:
        """Tell who asked; a connection of its own that brought no answer is joined anew."""
        is_over = event.is_answered is False and self.error is None
        if is_over and self._progress.transport.joins(event.key.rail):
            self._joiner.begin_probe(event.key)
        for on_answer in self._asking.pop(event.key, ()):
            on_answer(event)

    def _join_probes(self, now: float) -> None:
        """Begin once the paths are up, or as many as will be."""
        is_whole = all(path.state is PathState.UP for path in self.paths.values())
        if is_whole or now >= self._join_by_s:
            unjoined, self._unjoined = self._unjoined, []
            for key in unjoined:
                self._joiner.begin_probe(key)

    # Control messages

    def on_message(self, peer: int, message: object) -> None:
        """Take a message of `peer`."""
        if isinstance(message, Announcement):
            path = self.paths.get(PathKey(peer, message.rail))
            if path is not None and self.error is None:
                is_news = message.epoch == path.epoch
                self._apply(path, announced(path, message))
                if is_news:
                    self._look_into(path.key, message.epoch, message.cause, is_own=False)
        elif isinstance(message, Revoke):
            self._on_revoke(message)
        elif self.error is not None:
            return
        elif isinstance(message, Offer | Answer | Ready):
            self._joiner.on_message(peer, message)
        elif self.detector is not None and isinstance(message, ProbeRequest | ProbeReply | Finding):
            self.detector.on_message(peer, message)
        elif self.council is not None and isinstance(message, Report | Prepare | Promise | Commit):
            self.council.on_message(peer, message)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float) -> None:
        """The control plane gave `peer` up."""
        if self.council is not None:
            self.council.peer_lost(peer)
        self._give_up(PeerLost(rank=self._rank, peer=peer, last_heard_s=last_heard_s, why=why))

    def revoke(self, message: Revoke, error: R2cclError | None = None) -> None:
        """End the communicator on every rank, here with `error` if given.

        One that has ended already was ended everywhere: its first reason must not be overtaken.
        """
        if self.error is not None:
            return
        self._control.broadcast(message)
        if error is None:
            self._on_revoke(message)
        else:
            self._end(error)

    # Time

    def tick(self, now: float, peers: frozenset[int]) -> None:
        """Look for silence; `peers` are those the running call talks to."""
        if self.error is not None:
            return
        # Else an eager slice that no other one follows would be waited for without end.
        self._progress.confirm_all()
        self._progress.transport.flush()
        if self._unjoined:
            self._join_probes(now)
        self._joiner.tick(now, is_calm=not self.repairing)
        for key in self._watch.look(now, self._watched()):
            self._probe(key)
            if self.detector is not None:
                self.detector.suspect(key)
        if self.detector is not None:
            self.detector.tick(now, is_calm=not self.repairing)
        if self.council is not None and not self.is_leaving:
            self.council.tick(now)
        for peer in peers:
            alone_s = now - self._alone_since[peer]
            if not self.up(peer) and alone_s > self._config.no_rail_timeout_s:
                self._no_rail(peer, now)
                return

    def _watched(self) -> Iterator[tuple[PathKey, int, bool]]:
        waited_for = self._waited_for()
        for key, path in self.paths.items():
            # A queue pair finds out by itself, and says so with an error.
            if path.state is PathState.UP and not self._progress.transport.joins(key.rail):
                # A confirmation that does not get through is missed by the peer alone, which
                # cannot tell if its own end of the path never came up.
                is_due = key.peer in waited_for or self._progress.transport.is_stuck(key)
                yield key, path.activity, is_due

    def _waited_for(self) -> set[int]:
        """Peers from which a slice or a confirmation should come.

        It may come on any path: the ends choose their routes on their own, so this end cannot
        know which of them is the one that went silent.
        """
        senders, receivers = self._progress.senders, self._progress.receivers
        waited_for = {peer for (peer, _), link in senders.items() if link.outstanding}
        waited_for.update(peer for (peer, _), link in receivers.items() if link.landings)
        return waited_for

    def _probe(self, key: PathKey) -> None:
        path = self.paths[key]
        self.ask(
            ProbeKey(key.peer, key.rail, key.rail),
            partial(self._probed, path, path.epoch, path.activity),
        )

    def _probed(self, path: Path, epoch: int, activity: int, event: Probed) -> None:
        """Act on a probe: unanswered, the path is gone; answered, only a stuck flow moves."""
        if path.epoch != epoch or path.activity != activity or event.is_answered is None:
            return
        if not event.is_answered:
            cause = f"no progress, and the peer's kernel does not answer ({event.detail})"
            self.fail(path.key, f"PROBE_UNANSWERED: {cause}")
        elif self._progress.transport.is_stuck(path.key):
            self.fail(path.key, "FLOW_STUCK: the rail answers, this flow only retransmits")

    def _look_into(self, key: PathKey, epoch: int, cause: str, *, is_own: bool) -> None:
        # While all ranks leave, those that are done first close their ends.
        if self.detector is not None and not self.is_leaving:
            self.detector.failed(key, epoch, cause, is_own=is_own)

    def _on_verdict(self, verdict: Verdict) -> None:
        """Doubt the port a verdict names; a peer's only if the peer itself did not name it."""
        peer, rail = verdict.path
        if verdict.kind is Kind.LOCAL_NIC:
            self._doubt(self._rank, rail)
        elif verdict.kind is Kind.REMOTE_NIC and verdict.readings:
            self._doubt(peer, rail)

    def _doubt(self, rank: int, rail: int) -> None:
        """Tell the others of a dead port, unless a path that is up shows that it carries."""
        if self.council is None or self.is_leaving or self.error is not None:
            return
        peers = self.peers if rank == self._rank else [rank]
        if not any(self.paths[PathKey(peer, rail)].state is PathState.UP for peer in peers):
            self.council.doubt(rank, rail)

    def _trust(self, key: PathKey) -> None:
        """A path is up, so both its ports carry."""
        if self.council is not None and not self.is_leaving:
            self.council.trust(self._rank, key.rail)
            self.council.trust(*key)

    # Actions of the path table

    def _apply(self, path: Path, actions: tuple[Action, ...]) -> None:
        if path.state in (PathState.FENCING, PathState.FENCED):
            self.repairing.add(path.key)
        else:
            self.repairing.discard(path.key)
        for action in actions:
            _ACTIONS[action](self, path)

    def _fence(self, path: Path) -> None:
        failed_s = path.since_s = self._clock()
        self._progress.transport.fence(path.key)  # the NIC works while the rest is done
        self.log.failed(path.key, path.epoch, path.cause, failed_s)
        _log.info(
            "rank %d: rail %d to rank %d: %s", self._rank, path.key.rail, path.key.peer, path.cause
        )
        if not self.up(path.key.peer):
            self._alone_since[path.key.peer] = self._clock()
        for channel in self._channels(path.key):
            self._set_route(path.key.peer, channel, None)

    def _announce(self, path: Path) -> None:
        key = path.key
        reports = tuple(
            link.report()
            for (peer, _), link in self._progress.receivers.items()
            if peer == key.peer
        )
        self.log.awaits(
            key,
            {
                link.channel: link.received
                for (peer, _), link in self._progress.receivers.items()
                if peer == key.peer and link.is_awaiting(key)
            },
        )
        routes: dict[int, int] = {}
        if self._rank < key.peer:
            chosen = self._choose(key.peer, self._unrouted(key.peer))
            routes = {channel: to.rail for channel, to in chosen.items()}
        self._control.send(
            key.peer, Announcement(key.rail, path.epoch, path.cause, reports, routes)
        )

    def _resume(self, path: Path) -> None:
        key, announcement = path.key, path.announcement
        assert announcement is not None
        reports = {report.channel: report for report in announcement.links}
        for sender in self._senders(key.peer):
            none_yet = LinkReport(sender.channel, 0, 0)
            report = reports.get(sender.channel, none_yet)
            self._progress.release(sender.resume(key, report))
            # The report is a confirmation too, and credits let a call post.
            self._progress.touch_channel(sender.channel)
        for (peer, _), receiver in self._progress.receivers.items():
            if peer == key.peer:
                receiver.resume(key)
        proposed = announcement.routes if key.peer < self._rank else {}
        moved = self._reroute(key.peer, proposed)
        self.log.resumed(key, moved, self._clock())
        self._say_repaired(path, moved)
        ended(path)

    def _say_repaired(self, path: Path, moved: dict[int, int]) -> None:
        """Tell the user, now that the slices are on their way."""
        rails = sorted(set(moved.values()))
        # While all ranks leave, those that are done first close their ends: nothing to worry about.
        _log.log(
            logging.INFO if self.is_leaving else logging.WARNING,
            "rank %d: rail %d to rank %d is out of use (%s); channels %s go on over rails %s",
            self._rank, path.key.rail, path.key.peer, path.cause, sorted(moved) or "-",
            rails or "-",
        )  # fmt: skip

    def _redial(self, path: Path) -> None:
        peer, rail = path.key
        if self._progress.transport.joins(rail):
            self._joiner.begin(path.key, path.epoch)
        elif self._rank < peer:
            self._control.dial_path(peer, rail, path.epoch)
        else:
            self._control.accept_path(peer, rail, path.epoch)

    def _use(self, path: Path) -> None:
        """A path is up: the channels at home on it come home, without any fence."""
        peer = path.key.peer
        self._alone_since[peer] = path.since_s = self._clock()
        for channel in self._channels(None, peer):
            self._set_route(peer, channel, self._home(peer, channel))
        self._reroute(peer, {})
        self.log.opened(path.key, path.epoch, self._clock())
        self._trust(path.key)
        if path.epoch:
            _log.warning("rank %d: rail %d to rank %d is back", self._rank, path.key.rail, peer)

    # Routes

    def route_home(self, peer: int, channel: int) -> None:
        """Give the new links of (peer, channel) their route."""
        self._set_route(peer, channel, self._home(peer, channel))
        self._reroute(peer, {})

    def _home(self, peer: int, channel: int) -> PathKey | None:
        key = PathKey(peer, self._homes[channel % len(self._homes)])
        return key if self.paths[key].state is PathState.UP else None

    def _reroute(self, peer: int, proposed: dict[int, int]) -> dict[int, int]:
        """Give every channel without a route one, and set its waiting slices going."""
        unrouted = self._unrouted(peer)
        up = self.up(peer)
        routes = self._choose(peer, unrouted)
        for channel in routes:
            wanted = PathKey(peer, proposed.get(channel, -1))
            if wanted in up:
                routes[channel] = wanted
        for channel, key in routes.items():
            self._set_route(peer, channel, key)
        for channel in self._channels(None, peer):
            self._set_going(peer, channel)
        return {channel: key.rail for channel, key in routes.items()}

    def _set_going(self, peer: int, channel: int) -> None:
        sender = self._progress.senders[peer, channel]
        receiver = self._progress.receivers[peer, channel]
        if sender.route is None:
            return
        # What was consumed while there was no route could not be confirmed then.
        self._progress.confirm_all((receiver,))
        for landing in receiver.unnamed():
            self._progress.name(receiver, landing)
        for item in sender.waiting():
            self.log.replayed(item.lost_on, len(item.view))
            self._progress.write_again(sender, item, None)

    def _choose(self, peer: int, channels: list[int]) -> dict[int, PathKey]:
        load: dict[PathKey, int] = {}
        for (other, _), link in self._progress.senders.items():
            if other == peer and link.route is not None:
                load[link.route] = load.get(link.route, 0) + 1
        return choose_routes(channels, self.up(peer), load, self._weight)

    def _weight(self, key: PathKey) -> float:
        """Share of a path among those that are up."""
        return 1.0 if key.rail in self._homes else _LAST_RESORT_WEIGHT

    def _set_route(self, peer: int, channel: int, key: PathKey | None) -> None:
        self._progress.senders[peer, channel].route = key
        self._progress.receivers[peer, channel].route = key

    def _senders(self, peer: int) -> list[Any]:
        return [link for (to, _), link in self._progress.senders.items() if to == peer]

    def _channels(self, key: PathKey | None, peer: int = -1) -> list[int]:
        """Channels to `peer`, or those that ride `key`."""
        return [
            channel
            for (to, channel), link in self._progress.senders.items()
            if (to == peer if key is None else link.route == key)
        ]

    def _unrouted(self, peer: int) -> list[int]:
        return [
            channel
            for (to, channel), link in self._progress.senders.items()
            if to == peer and link.route is None
        ]

    # Reports

    def note_arrival(self, event: Arrived) -> None:
        """See whether a slice is the first one a repair waits for."""
        self.log.arrived(event.path, event.frame.channel, event.frame.seq, event.began_s)

    # The end

    def _no_rail(self, peer: int, now: float) -> None:
        causes = {key.rail: path.cause for key, path in self.paths.items() if key.peer == peer}
        since = now - self._alone_since[peer]
        error = NoHealthyRail(rank=self._rank, peer=peer, since_s=since, causes=causes)
        self._give_up(error, "NoHealthyRail", peer)

    def _give_up(self, error: R2cclError, kind: str = "", peer: int = -1) -> None:
        if self.error is None and kind:
            self._control.broadcast(Revoke(kind, str(error), self._rank, peer))
        self._end(error)

    def _on_revoke(self, message: Revoke) -> None:
        if message.kind == "InvalidArgument":
            self._end(InvalidArgument(message.text))
        elif message.kind == "NoHealthyRail" and message.peer == self._rank and self.error is None:
            if self.up(message.rank):
                self._end(CommunicatorRevoked(f"rank {message.rank} gave up: {message.text}"))
            else:
                self._no_rail(message.rank, self._clock())
        else:
            self._end(CommunicatorRevoked(f"rank {message.rank} gave up: {message.text}"))

    def _end(self, error: R2cclError) -> None:
        """Keep the first reason, and leave no path over which a peer could still write."""
        if self.error is not None:
            return
        self.error = error
        self._joiner.close()
        for key, path in self.paths.items():
            if path.state is PathState.UP:
                path.state = PathState.FENCING
                path.since_s = self._clock()
                path.cause = "the communicator ended"
                self._progress.transport.fence(key)


_ACTIONS: dict[Action, Callable[[Recovery, Path], None]] = {
    Action.FENCE: Recovery._fence,
    Action.ANNOUNCE: Recovery._announce,
    Action.RESUME: Recovery._resume,
    Action.REDIAL: Recovery._redial,
    Action.USE: Recovery._use,
}

#: So small that every RDMA path is fuller before a channel goes to a TCP one.
_LAST_RESORT_WEIGHT = 1e-6

__all__ = ["ControlPort", "Recovery", "Revoke"]
