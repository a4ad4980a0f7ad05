"""Recovery: what a rank does about its paths; the tables of `r2ccl.resilience`, applied.

Events come from the transport (`on_failed`, `on_fenced`), the control plane (`on_message`,
`on_opened`, `on_peer_lost`), the link monitor (`on_carrier`) and the clock (`tick`). The answers
go to the transport, the control plane and, through `Progress`, to the links. Like `Progress` it is
owned by one caller at a time and never blocks.

Invariant: after `revoke` no path is open, so no peer can write into memory of a call that raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from r2ccl.bootstrap.base import ControlPort
from r2ccl.bootstrap.messages import Goodbye
from r2ccl.errors import (
    CommunicatorRevoked,
    CompletionError,
    InvalidArgument,
    NoHealthyRail,
    PeerLost,
    R2cclError,
    RailDown,
    TransportError,
)
from r2ccl.failover.bandwidth.protocol import Balance
from r2ccl.failover.connector import Answer, Joiner, Offer, Ready, probe_keys
from r2ccl.failover.diagnosis.driver import Detector
from r2ccl.failover.diagnosis.verdict import Finding, Kind, ProbeReply, ProbeRequest, Verdict
from r2ccl.failover.failback.driver import Failback
from r2ccl.failover.health.driver import Council
from r2ccl.failover.health.rounds import Commit, Prepare, Promise, Report
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.bypass import Bypasses
from r2ccl.failover.migration.link import LinkReport, SendLink
from r2ccl.failover.migration.path import (
    Action,
    Announcement,
    Path,
    PathEvent,
    PathState,
    announced,
    ended,
    step,
)
from r2ccl.failover.migration.repairs import Repair, RepairLog
from r2ccl.failover.migration.routes import Routes
from r2ccl.failover.migration.watch import Watch
from r2ccl.failover.probes import Probing
from r2ccl.transport.base import Arrived, Failed, Fenced, Joined, Probed, RailChanged
from r2ccl.transport.verbs.status import is_completion_status
from r2ccl.types import BYPASS, PathKey, ProbeKey, rail_name

if TYPE_CHECKING:
    from r2ccl.runtime.progress import Progress

_log = logging.getLogger(__name__)


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """Control message: the communicator is of no use any more, and why.

    ``kind`` is the name of the error, ``rank`` who found it, ``peer`` whom it concerns (-1: all).
    ``text`` is the error's, or of a `PeerLost` why: whoever hears of it makes the same error.
    """

    kind: str
    text: str
    rank: int
    peer: int = -1


class PortUp(msgspec.Struct, frozen=True, tag="port_up"):
    """Control message: the sender's port of `rail` came up; its paths are worth a probe."""

    rail: int


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Control message: the sender has all its data and may go once everybody says so."""


class Spared(msgspec.Struct, frozen=True, tag="spared"):
    """Control message: `rank` is lost, but it had left the sender in order, which lives on."""

    rank: int


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
        #: Paths on rails; and all, with the bypasses.
        self.on_rails = {
            key: Path(key)
            for key in (PathKey(peer, rail) for peer in self.peers for rail in range(self.nrails))
        }
        self.paths = dict(self.on_rails)
        #: Paths being fenced here or at the peer: slices wait for the control plane.
        self.repairing: set[PathKey] = set()
        #: Where the ranks run, by rank, for people; empty: not known.
        self.hosts = [""] * progress.nranks
        #: Of every rank its node, where several share one; else empty.
        self.nodes: Sequence[int] = ()
        #: First error that ended the communicator, and what tells others of it.
        self.error: R2cclError | None = None
        self.reason: Revoke | None = None
        #: Every slice of this rank is confirmed, and it says so.
        self.is_leaving = False
        #: Ranks that said that they leave.
        self.left: set[int] = set()
        #: Ranks whose loss others live on with.
        self._spared: set[int] = set()
        self.log = RepairLog()
        joined = [rail for rail in range(self.nrails) if progress.transport.joins(rail)]
        #: Rails channels are at home on: not those of TCP beside RDMA, nor the last resort.
        self.homes = joined or [
            rail for rail in range(self.nrails) if rail not in progress.last_resorts
        ]
        #: What this rank's rails are measured at, where there are several.
        self.balance = Balance(self.homes) if self._is_measured() else None
        #: Ways round where rails do not lead; the fail-stop baseline has none.
        self.bypasses = self._make_bypasses() if self._has_bypasses() else None
        #: Which path each channel rides.
        self.routes = Routes(
            progress,
            self.paths,
            nrails=self.nrails,
            homes=self.homes,
            share=self._share,
            log=self.log,
        )
        self._joiner = Joiner(
            self._rank, progress.transport, control.send, self.on_opened, self._clock
        )
        self._watch = Watch(self._config.suspicion_timeout_s)
        needed = probe_keys(self.peers, joined) if self._config.is_resilient else ()
        #: Signs of life, for whoever asks.
        self.probing = Probing(progress.transport, self._joiner, needed)
        self._join_by_s = 0.0
        #: Peers no path leads to.
        self._alone = set(self.peers)
        self._alone_since = dict.fromkeys(self.peers, self._clock())
        #: Brings back what failed.
        self.failback = Failback(
            self._config,
            self._clock,
            ask=self.probing.ask,
            connect=self._connect,
            is_alone=lambda peer: not self.up(peer),
        )
        #: Finds out what broke; the fail-stop baseline has none.
        self.detector = self._make_detector() if self._config.is_resilient else None
        #: Agrees with the others on what to plan with; nor has it that.
        self.council = self._make_council() if self._config.is_resilient else None

    def _is_measured(self) -> bool:
        wanted = self._config.balance
        is_several = self._progress.nwires > 1 if wanted == "auto" else wanted == "1"
        return is_several and self._config.is_balanced

    def _has_bypasses(self) -> bool:
        return self._config.is_resilient and self._config.fabric != "none"

    def _make_bypasses(self) -> Bypasses:
        self.paths.update(
            {key: Path(key) for key in (PathKey(peer, BYPASS) for peer in self.peers)}
        )
        return Bypasses(
            self._rank,
            len(self.peers) + 1,
            paths=self.paths,
            homes=self.homes,
            sockets=[
                rail for rail in range(self.nrails) if not self._progress.transport.joins(rail)
            ],
            last_resorts=self._progress.last_resorts,
            fabric=self._config.fabric,
            share=self._port_share,
            control=self._control,
            clock=self._clock,
        )

    def _make_council(self) -> Council:
        health = Health.whole(len(self.peers) + 1, self.nrails, self._config.digest())
        return Council(self._rank, health, control=self._control, clock=self._clock)

    def _make_detector(self) -> Detector:
        return Detector(
            self._rank,
            len(self.peers) + 1,
            paths=self.on_rails,
            transport=self._progress.transport,
            control=self._control,
            ask=self.probing.ask,
            config=self._config,
            clock=self._clock,
            sequel=self.log.sequel,
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

    @property
    def is_whole(self) -> bool:
        """Whether every rail leads to every peer."""
        return all(path.state is PathState.UP for path in self.on_rails.values())

    def start(self) -> None:
        """Have every path connected: the lower rank dials. Connections of probes come after."""
        now = self._clock()
        self._join_by_s = now + self._config.connect_timeout_s
        for path in self.on_rails.values():
            path.since_s = now
            self._connect(path.key)
        if self.bypasses is not None:
            self.bypasses.start()

    def up(self, peer: int) -> list[PathKey]:
        """Paths to `peer` that may be used, by rail; the bypass comes last."""
        return self.routes.up(peer)

    def obstacles(self, peer: int) -> list[str]:
        """Say why paths to `peer` are not up, as far as this end knows; any thread."""
        return [*self._control.obstacles(peer), *self._joiner.obstacles(peer)]

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
            error = self._no_migration(key, cause)
            self._give_up(error, type(error).__name__, key.peer)
            return
        self._apply(path, step(path, PathEvent.FAILED))
        self._look_into(key, path.epoch, cause, is_own=True)

    def _no_migration(self, key: PathKey, cause: str) -> TransportError:
        """Make the error of a path that failed in the fail-stop baseline."""
        rank, (peer, rail) = self._rank, key
        status = cause.partition(":")[0]
        if status in _PORT_IS_DOWN:
            return RailDown(
                f"rank {rank}: its port of rail {rail}, on the way to rank {peer}, is down "
                f"({cause}); R2CC_MODE=0 does not migrate, the default does",
                rank=rank, peer=peer, rail=rail, status=status,
            )  # fmt: skip
        if is_completion_status(status):
            return CompletionError(
                f"rank {rank}: a work request to rank {peer} on rail {rail} failed ({cause}); "
                "R2CC_MODE=0 does not migrate, the default does",
                rank=rank, peer=peer, rail=rail, status=status,
            )  # fmt: skip
        return TransportError(
            f"rank {rank}: path to rank {peer} on rail {rail} broke ({cause}); R2CC_MODE=0 does "
            "not migrate, the default does",
            rank=rank, peer=peer, rail=rail, status=status,
        )  # fmt: skip

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
            self._port_up(rail)
            return
        cause = f"{_NO_CARRIER}: the local NIC of the rail has no carrier"
        for peer in self.peers:
            self.fail(PathKey(peer, rail), cause)
        self._port_down(rail, cause)

    def on_rail(self, event: RailChanged) -> None:
        """The device of a rail says that its port changed."""
        if event.is_up:
            self._joiner.kick(event.rail)
            self._port_up(event.rail)
            return
        cause = f"{_PORT_ERR}: {event.why or 'the port of the RDMA NIC is down'}"
        for peer in self.peers:
            self.fail(PathKey(peer, event.rail), cause)
        self._port_down(event.rail, cause)

    def on_joined(self, event: Joined) -> None:
        """An end this rank called with has proved itself, or not."""
        self._joiner.on_joined(event)
        if isinstance(event.key, ProbeKey) and not event.error:
            self.failback.hurry(PathKey(event.key.peer, event.key.rail))

    def _port_down(self, rail: int, cause: str) -> None:
        """Say why the paths of a local port are down, also those that failed before it said so."""
        if self.detector is not None and not self.is_leaving:
            self.detector.port_down(rail, cause)
        self._doubt(self._rank, rail)

    def _port_up(self, rail: int) -> None:
        """Have the paths of a local port that came up probed soon, by whichever end does that."""
        for peer in self.peers:
            key = PathKey(peer, rail)
            if self.paths[key].state is PathState.UP:
                continue
            if self._rank < peer:
                self.failback.port_up(key)
            else:
                self._control.send(peer, PortUp(rail))

    def _join_probes(self, now: float) -> None:
        """Begin once the paths are up, or as many as will be."""
        if self.is_whole or now >= self._join_by_s:
            self.probing.join()

    def on_probed(self, event: Probed) -> None:
        """Tell who asked for a sign of life."""
        self.probing.on_probed(event, is_over=self.error is not None)

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
        elif isinstance(message, Leaving):
            self.left.add(peer)
        elif isinstance(message, Goodbye):
            if peer not in self.left:
                self._end_by(Revoke("", _LEFT, peer))
        elif isinstance(message, Revoke):
            self._on_revoke(message)
        elif isinstance(message, Spared):
            self._on_spared(peer, message.rank)
        elif self.error is not None:
            return
        elif isinstance(message, Offer | Answer | Ready):
            self._joiner.on_message(peer, message)
        elif isinstance(message, PortUp):
            self.failback.port_up(PathKey(peer, message.rail))
            self._joiner.kick(message.rail, peer)
        elif self.detector is not None and isinstance(message, ProbeRequest | ProbeReply | Finding):
            self.detector.on_message(peer, message)
        elif self.council is not None and isinstance(message, Report | Prepare | Promise | Commit):
            self.council.on_message(peer, message)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float) -> None:
        """The control plane gave `peer` up: the end, unless it left in order and has all it needs.

        What it did not confirm then it never will. Ranks that have not left may still want
        something of it, and end; then this rank, which waits for them, has to hear of it.
        """
        if peer in self.left and self._progress.is_drained_to(peer):
            for other in self.peers:
                if other != peer and other not in self.left:
                    self._control.send(other, Spared(peer))
            return
        if self.council is not None:
            self.council.peer_lost(peer)
        error = self._lost(peer, why, last_heard_s)
        # Else every rank gives it up by itself, and says so with the same error.
        is_news = peer in self.left or peer in self._spared
        self._give_up(error, "PeerLost" if is_news else "", peer)

    def _on_spared(self, peer: int, rank: int) -> None:
        self._spared.add(rank)
        if self.reason is not None:
            self._control.send(peer, self.reason)

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
            self.end(error, message)

    # Time

    def tick(self, now: float, peers: frozenset[int]) -> None:
        """Look for silence; `peers` are those the running call talks to."""
        if self.error is not None:
            return
        # Else an eager slice that no other one follows would be waited for without end.
        self._progress.confirm_all()
        self._progress.transport.flush()
        if self.probing.unjoined:
            self._join_probes(now)
        self._joiner.tick(now, is_calm=not self.repairing)
        self.failback.tick(now)
        for key in self._watch.look(now, self._watched()):
            # A queue pair that is broken says so itself, but not that its peer is only slow.
            if not self._progress.transport.joins(key.rail):
                self._probe(key)
            if self.detector is not None:
                self.detector.suspect(key)
        if self.detector is not None:
            self.detector.tick(now, is_calm=not self.repairing)
        if self.council is not None and not self.is_leaving:
            self.council.tick(now)
            if self.balance is not None and self.balance.update(now):
                self._weigh(self.council, self.balance)
        if self.bypasses is not None and not self.is_leaving:
            self._seek(self.bypasses, peers, now)
        for peer in peers:
            alone_s = now - self._alone_since[peer]
            if not self.up(peer) and alone_s > self._config.no_rail_timeout_s:
                self._no_rail(peer, now)
                return

    def _watched(self) -> Iterator[tuple[PathKey, int, bool]]:
        waited_for = self._waited_for()
        # The kernel alone watches a bypass.
        for key, path in self.on_rails.items():
            if path.state is PathState.UP:
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

    def _seek(self, bypasses: Bypasses, peers: frozenset[int], now: float) -> None:
        """Look for ways round to peers no path leads to, once all rails that will come up are."""
        wanted = peers | self._waited_for()
        if now >= self._join_by_s:
            wanted |= self._alone
        nbegun = 0
        for peer in wanted:
            nbegun += bypasses.seek(peer)
            if nbegun == _MOST_SEEKS:
                break

    def _probe(self, key: PathKey) -> None:
        path = self.paths[key]
        self.probing.ask(
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

    def set_nominal_rate(self, rate: int) -> None:
        """Set the rate of a whole rail, in bytes/s."""
        if self.balance is not None:
            self.balance.set_nominal_rate(rate)

    def _weigh(self, council: Council, balance: Balance) -> None:
        rates = {rail: round(rate / 1e6, 1) for rail, rate in balance.rates().items()}
        _log.info(
            "rank %d: rails carry %s sixteenths, measured at %s MB/s",
            self._rank, balance.weights, rates,
        )  # fmt: skip
        council.weigh(balance.weights, balance.toward)

    def _look_into(self, key: PathKey, epoch: int, cause: str, *, is_own: bool) -> None:
        # While all ranks leave, those that are done first close their ends.
        if self.detector is not None and not self.is_leaving and not key.is_bypass:
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
        if not any(
            self.paths[PathKey(peer, rail)].state is PathState.UP
            for peer in peers
            if not self._is_inside(peer)
        ):
            self.council.doubt(rank, rail)

    def _trust(self, key: PathKey) -> None:
        """A path is up, so both its ports carry, unless it does not leave the node."""
        if self.council is None or self.is_leaving or key.is_bypass:
            return
        if not self._is_inside(key.peer):
            self.council.trust(self._rank, key.rail)
            self.council.trust(*key)

    def _is_inside(self, peer: int) -> bool:
        return bool(self.nodes) and self.nodes[peer] == self.nodes[self._rank]

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
        rail, peer = rail_name(path.key.rail), path.key.peer
        _log.info("rank %d: %s to rank %d: %s", self._rank, rail, peer, path.cause)
        if not self.up(peer):
            self._alone.add(peer)
            self._alone_since[peer] = self._clock()
        self.routes.lose(path.key)
        if self.bypasses is not None and not self.is_leaving:
            self.bypasses.lost(path.key)
            if peer in self._waited_for():
                self.bypasses.seek(peer)

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
        routes = self.routes.proposal(key.peer) if self._rank < key.peer else {}
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
            self._progress.resume(sender, key, report)
        for (peer, _), receiver in self._progress.receivers.items():
            if peer == key.peer:
                receiver.resume(key)
        proposed = announcement.routes if key.peer < self._rank else {}
        moved = self.routes.reroute(key.peer, proposed)
        self.log.resumed(key, moved, self._clock())
        self._say_repaired(path, moved)
        ended(path)

    def _say_repaired(self, path: Path, moved: dict[int, int]) -> None:
        """Tell the user, now that the slices are on their way."""
        rails = ", ".join(map(rail_name, sorted(set(moved.values()))))
        # While all ranks leave, those that are done first close their ends: nothing to worry about.
        _log.log(
            logging.INFO if self.is_leaving else logging.WARNING,
            "rank %d: %s to rank %d is out of use (%s); channels %s go on over %s",
            self._rank, rail_name(path.key.rail), path.key.peer, path.cause, sorted(moved) or "-",
            rails or "-",
        )  # fmt: skip

    def _redial(self, path: Path) -> None:
        """Let a path back in; the lower rank's end connects it when it has earned it."""
        peer, rail = path.key
        if peer < self._rank:
            self._connect(path.key)
            return
        if path.key.is_bypass:
            return  # dialed again when it is needed
        # What may still be connecting is of the epoch that has just ended.
        if self._progress.transport.joins(rail):
            self._joiner.cancel(path.key)
        else:
            self._control.cancel_path(peer, rail)
        self.failback.failed(path.key)

    def _connect(self, key: PathKey) -> None:
        peer, rail = key
        epoch = self.paths[key].epoch
        if not key.is_bypass and self._progress.transport.joins(rail):
            self._joiner.begin(key, epoch)
        elif self._rank < peer:
            self._control.dial_path(peer, rail, epoch)
        else:
            self._control.accept_path(peer, rail, epoch)

    def _use(self, path: Path) -> None:
        """A path is up: the channels at home on it come home, without any fence."""
        peer = path.key.peer
        self._alone.discard(peer)
        self._alone_since[peer] = path.since_s = self._clock()
        self.failback.opened(path.key)
        if self.bypasses is not None:
            self.bypasses.found(path.key)
        self.routes.go_home(peer)
        self.log.opened(path.key, path.epoch, self._clock())
        self._trust(path.key)
        if path.key.is_bypass:
            _log.warning("rank %d: a bypass leads to rank %d", self._rank, peer)
        elif path.epoch:
            _log.warning("rank %d: rail %d to rank %d is back", self._rank, path.key.rail, peer)

    def _senders(self, peer: int) -> list[SendLink]:
        return [link for (to, _), link in self._progress.senders.items() if to == peer]

    def _share(self, key: PathKey) -> float:
        """What a path carries, as far as this rank has heard: the worse of its two ports."""
        return max(1, min(self._port_share(self._rank, key.rail), self._port_share(*key)))

    def _port_share(self, rank: int, rail: int) -> float:
        """Share of its rate that a port carries, as far as this rank has heard."""
        return 1.0 if self.council is None else self.council.known.health.share(rank, rail)

    # Reports

    def note_arrival(self, event: Arrived) -> None:
        """See whether a slice is the first one a repair waits for."""
        self.log.arrived(event.path, event.frame.channel, event.frame.seq, event.began_s)

    # The end

    def _no_rail(self, peer: int, now: float) -> None:
        causes = {key.rail: path.cause for key, path in self.on_rails.items() if key.peer == peer}
        since = now - self._alone_since[peer]
        error = NoHealthyRail(rank=self._rank, peer=peer, since_s=since, causes=causes)
        self._give_up(error, "NoHealthyRail", peer)

    def _give_up(self, error: R2cclError, kind: str = "", peer: int = -1) -> None:
        text = error.why if isinstance(error, PeerLost) else str(error)
        message = Revoke(kind or type(error).__name__, text, self._rank, peer)
        if self.error is None and kind:
            self._control.broadcast(message)
        self.end(error, message)

    def _on_revoke(self, message: Revoke) -> None:
        if message.kind == "InvalidArgument":
            self.end(InvalidArgument(message.text), message)
        elif message.kind == "NoHealthyRail" and message.peer == self._rank and self.error is None:
            if self.up(message.rank):
                self._end_by(message)
            else:
                self._no_rail(message.rank, self._clock())
        elif message.kind == "PeerLost" and message.peer in self.peers:
            why = f"rank {message.rank} says: {message.text}"
            self.end(self._lost(message.peer, why, None), message)
        else:
            self._end_by(message)

    def _lost(self, peer: int, why: str, last_heard_s: float | None) -> PeerLost:
        return PeerLost(
            rank=self._rank,
            peer=peer,
            last_heard_s=last_heard_s,
            why=why,
            host=self.hosts[peer],
            last_op=max(path.op for key, path in self.paths.items() if key.peer == peer),
        )

    def _end_by(self, message: Revoke) -> None:
        error = CommunicatorRevoked(f"rank {message.rank} gave up: {message.text}")
        self.end(error, message)

    def end(self, error: R2cclError, message: Revoke) -> None:
        """Keep the first reason, and leave no path over which a peer could still write."""
        if self.error is None:
            self.error, self.reason = error, message
            self.fence_all()

    def fence_all(self) -> None:
        """Begin to take every path out of use; whoever steps the loop sees when they are."""
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

#: Reason given for a rank that said Goodbye without Leaving.
_LEFT = "it left, and other ranks had not"
_NO_CARRIER = "CARRIER_DOWN"
_PORT_ERR = "PORT_ERR"
#: Rounds of ways begun in one look: each takes file descriptors, and some of the loop's time.
_MOST_SEEKS = 4
#: Statuses of a local port that is down.
_PORT_IS_DOWN = (_NO_CARRIER, _PORT_ERR)

__all__ = ["Leaving", "PortUp", "Recovery", "Revoke", "Spared"]
