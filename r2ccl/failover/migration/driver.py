"""Migration driver: passes events to the state machine of a path and carries out its actions.

Events arrive from the transport (`on_failed`, `on_fenced`), from the control plane and the
connector (`on_opened`, `on_announced`) and from any module that finds evidence of a failure
(`fail`). Actions go to the transport, the control plane and the links. Not thread-safe; never
blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from r2ccl.errors import CompletionError, RailDown, TransportError
from r2ccl.failover.connector import Connector
from r2ccl.failover.context import RankContext
from r2ccl.failover.failback.driver import Failback
from r2ccl.failover.migration.bypass import Bypasses
from r2ccl.failover.migration.link import LinkReport
from r2ccl.failover.migration.links import Links
from r2ccl.failover.migration.path import (
    Announcement,
    ClosePaths,
    ConnectPaths,
    Path,
    PathAction,
    PathEvent,
    PathState,
    announced,
    ended,
    step,
)
from r2ccl.failover.migration.repairs import RepairLog
from r2ccl.failover.migration.routes import Routes
from r2ccl.failover.revocation import Revocation
from r2ccl.transport.base import Arrived, Failed, Fenced
from r2ccl.transport.verbs.status import is_completion_status
from r2ccl.types import PathKey, rail_name

_log = logging.getLogger(__name__)

#: Statuses of a local port that is down: no carrier (TCP), error of the RDMA port.
NO_CARRIER = "CARRIER_DOWN"
PORT_ERR = "PORT_ERR"
#: Status of a path that did not fail: an operator has excluded one of its ports.
EXCLUDED = "EXCLUDED"
_WITHDRAWN = f"{EXCLUDED}: the NIC at one end was excluded"


class Migration:
    """Migration of one rank: takes failed paths out of use and replays their slices elsewhere.

    Parameters
    ----------
    context : RankContext
    links : Links
    revocation : Revocation
        State of the communicator: in use, leaving or ended.
    connector : Connector
        Connects paths of rails whose ends exchange endpoint info (RDMA).
    failback : Failback
        Notified of each path that failed or was excluded, if this rank must bring it back, and of
        each path that came up.
    bypasses : Bypasses or None
        Notified of each path that failed or came up. None: bypasses are not used.
    share : callable
        ``share(rank, rail)``: share of its bandwidth that a port has left, as far as known: 0
        (down) to 16.
    look_into : callable
        ``look_into(path, epoch, cause, is_own=...)``: diagnoses a path that failed. ``is_own`` is
        True if this end found the evidence, False if the peer announced it.
    on_up : callable
        ``on_up(path)``: called when a path comes up, which shows that both of its ports work.
    is_excluded : callable
        ``is_excluded(path)``: returns whether a port of the path is excluded. Such a path is not
        connected. If the peer connects it, because the peer does not know of the exclusion yet, the
        path is fenced at once.
    """

    def __init__(
        self,
        context: RankContext,
        links: Links,
        *,
        revocation: Revocation,
        connector: Connector,
        failback: Failback,
        bypasses: Bypasses | None,
        share: Callable[[int, int], float],
        look_into: Callable[..., None],
        on_up: Callable[[PathKey], None],
        is_excluded: Callable[[PathKey], bool],
    ) -> None:
        self._rank = context.rank
        self._config = context.config
        self._clock = context.clock
        self._transport = context.transport
        self._control = context.control
        self._links = links
        self._paths = links.paths
        self._revocation = revocation
        self._connector = connector
        self._failback = failback
        self._bypasses = bypasses
        self._port_share = share
        self._look_into = look_into
        self._on_up = on_up
        self._is_excluded = is_excluded
        #: Paths being fenced here or at the peer; their slices wait for the announcement.
        self.repairing: set[PathKey] = set()
        self.log = RepairLog()
        #: Path of each channel.
        self.routes = Routes(links, homes=context.homes, share=self._share, log=self.log)
        links.on_added(self.routes.begin)
        #: Per path that is out of use and not yet resumed: the channels that used it.
        self._lost: dict[PathKey, tuple[int, ...]] = {}
        #: Peers to be connected again once all their paths, closed as idle, are fenced.
        self._reopening: set[int] = set()
        #: Peers to which no path is up, except those whose paths were closed as idle; and per peer,
        #: the time from which `NoHealthyRail.since_s` counts.
        self.cut_off = set(links.peers)
        self.cut_off_since = dict.fromkeys(links.peers, self._clock())

    @property
    def is_quiet(self) -> bool:
        """True if no path is up or being fenced; then no peer can write to this rank's memory."""
        busy = (PathState.UP, PathState.FENCING)
        return not any(path.state in busy for path in self._paths.values())

    @property
    def is_whole(self) -> bool:
        """True if all paths on rails, except excluded ones, are up; bypasses do not count."""
        return all(
            path.state is PathState.UP or self._is_excluded(path.key)
            for path in self._links.on_rails.values()
        )

    def start(self) -> None:
        """Begin to connect all paths on rails; the lower rank of each pair dials."""
        now = self._clock()
        for path in self._links.on_rails.values():
            path.since_s = now
            self.connect(path.key)

    def add_peer(self, peer: int) -> None:
        """Create the paths to `peer`, a new peer, and begin to connect them.

        A bypass is accepted if the peer, as the lower rank, dials one.
        """
        now = self._clock()
        self.cut_off.add(peer)
        self.cut_off_since[peer] = now
        for path in self._links.add_peer(peer):
            path.since_s = now
            self.connect(path.key)
        if self._bypasses is not None:
            self._bypasses.admit(peer)
            self._bypasses.connecting(peer)

    def close_idle(self, peer: int) -> None:
        """Ask `peer` to close the paths between it and this rank, because they are idle.

        The peer fences its ends, and this end follows; a path that is down here is closed at once.
        The steps are the same as after a failure, without diagnosis and failback. A slice that the
        peer has just sent is therefore not lost: it is replayed once the paths are connected again.
        """
        _log.info("rank %d: the paths to rank %d are idle and are closed", self._rank, peer)
        self._note_closed(peer)
        self._control.send(peer, ClosePaths())
        for path in self._on_rails(peer):
            if path.state is PathState.DOWN:  # the others follow the peer's end
                self._close(path)

    def on_close_paths(self, peer: int) -> None:
        """Close the paths to `peer`, which has asked for this because they are idle."""
        if peer in self._links.connected and peer not in self._reopening:
            self._note_closed(peer)
        for path in self._on_rails(peer):
            if path.state in (PathState.UP, PathState.DOWN):
                self._close(path)

    def _close(self, path: Path) -> None:
        path.is_idle = True
        path.cause = "closed because it was idle"
        self._apply(path, step(path, PathEvent.CLOSED))

    def reopen(self, peer: int) -> None:
        """Connect the paths to `peer` that were closed as idle, and tell the peer to do the same.

        The connection begins once all paths that are being closed are fenced at both ends.
        """
        self._links.note_connected(peer)
        self.cut_off.add(peer)
        self.cut_off_since[peer] = self._clock()
        self._reopening.add(peer)
        if self._bypasses is not None:
            self._bypasses.connecting(peer)
        self._reopen_fenced(peer)

    def _note_closed(self, peer: int) -> None:
        self._links.connected.discard(peer)
        self._reopening.discard(peer)
        self.cut_off.discard(peer)
        self.cut_off_since[peer] = self._clock()
        for path in self._on_rails(peer):
            if path.state is PathState.DOWN:
                self._stop_connecting(path.key)
            # The repair of a failed path ends as usual.
            path.is_idle = path.state in (PathState.UP, PathState.DOWN)

    def _reopen_fenced(self, peer: int) -> None:
        """Connect the paths to `peer` again if `reopen` was called and all of them are fenced."""
        paths = self._on_rails(peer)
        is_closing = any(
            path.key in self.repairing or (path.is_idle and path.state is PathState.UP)
            for path in paths
        )
        if peer in self._reopening and not is_closing:
            self._reopening.discard(peer)
            self._control.send(peer, ConnectPaths())
            for path in paths:
                if path.is_idle and path.state is PathState.DOWN:
                    self.connect(path.key)

    def _on_rails(self, peer: int) -> tuple[Path, ...]:
        return self._links.paths_to(peer)[: self._transport.nrails]

    def is_connected(self, peer: int, apart: Collection[int] = ()) -> bool:
        """Return whether the connection to `peer` is complete.

        At least one path to `peer` must be up; a bypass counts. Every path on a rail must be up,
        except paths on the rails in `apart` and paths with a port that is known to be down.
        """
        if peer in self.cut_off:
            return False
        return all(
            path.state is PathState.UP
            or path.key.rail in apart
            or not (self._port_share(self._rank, path.key.rail) and self._port_share(*path.key))
            for path in self._on_rails(peer)
        ) and bool(self.up(peer))

    def up(self, peer: int) -> list[PathKey]:
        """Return the paths to `peer` that are up, in the order of their rails, the bypass last."""
        return self.routes.up(peer)

    def fence_all(self) -> None:
        """Begin to fence every path that is up; `is_quiet` is True once all are fenced."""
        for key, path in self._paths.items():
            if path.state is PathState.UP:
                path.state = PathState.FENCING
                path.since_s = self._clock()
                path.cause = "the communicator ended"
                self._transport.fence(key)

    # Events

    def on_failed(self, event: Failed) -> None:
        """Handle a path failure that the transport reports."""
        self.fail(event.path, f"{event.status}: {event.detail}")

    def fail(self, key: PathKey, cause: str) -> None:
        """Fence path `key` because of `cause`, which this end found.

        Do nothing if the path is not up or the communicator has ended. In the fail-stop baseline,
        end the communicator instead, unless this rank is leaving.

        Parameters
        ----------
        key : PathKey
        cause : str
            Evidence of the failure, ``STATUS: detail``.
        """
        path = self._paths[key]
        if path.state is not PathState.UP or self._revocation.error is not None:
            return
        path.cause = cause
        # While all ranks leave, the ranks that finish first close their connections: no failure.
        if not self._config.is_resilient and not self._revocation.is_leaving:
            error = self._no_migration(key, cause)
            self._revocation.give_up(error, type(error).__name__, key.peer)
            return
        self._apply(path, step(path, PathEvent.FAILED))
        if not path.is_idle:
            self._look_into(key, path.epoch, cause, is_own=True)

    def exclude(self, rank: int, rail: int) -> None:
        """Take out of use all paths that use the excluded port of `rank` on `rail`.

        The paths are not diagnosed. Bypasses that begin or end at `rank` are fenced too, because
        this end does not know their ports; the next search avoids the excluded port.
        """
        for path in list(self._paths.values()):
            key = path.key
            is_of_rank = rank in (self._rank, key.peer)
            is_of_port = is_of_rank and key.rail == rail
            if path.state is PathState.UP and (is_of_port or (is_of_rank and key.is_bypass)):
                self._withdraw(path)
            elif path.state is PathState.DOWN and is_of_port and not path.is_idle:
                self._stop_connecting(key)
                self.connect(key)

    def _withdraw(self, path: Path) -> None:
        path.cause = _WITHDRAWN
        self._apply(path, step(path, PathEvent.FAILED))

    def _no_migration(self, key: PathKey, cause: str) -> TransportError:
        """Return the error that a failed path raises in the fail-stop baseline."""
        rank, (peer, rail) = self._rank, key
        status = cause.partition(":")[0]
        if status in (NO_CARRIER, PORT_ERR):
            return RailDown(
                f"rank {rank}: the local port of rail {rail}, used to reach rank {peer}, is down "
                f"({cause}); R2CC_MODE=failstop does not migrate slices to other rails, "
                "the default mode does",
                rank=rank, peer=peer, rail=rail, status=status,
            )  # fmt: skip
        if is_completion_status(status):
            return CompletionError(
                f"rank {rank}: a work request to rank {peer} on rail {rail} failed ({cause}); "
                "R2CC_MODE=failstop does not migrate slices to other rails, the default mode does",
                rank=rank, peer=peer, rail=rail, status=status,
            )  # fmt: skip
        return TransportError(
            f"rank {rank}: the path to rank {peer} on rail {rail} failed ({cause}); "
            "R2CC_MODE=failstop does not migrate slices to other rails, the default mode does",
            rank=rank, peer=peer, rail=rail, status=status,
        )  # fmt: skip

    def on_fenced(self, event: Fenced) -> None:
        """Handle the end of a fence: the local end of the path is drained.

        Unless the communicator has ended, retire the slices that were in flight on the path, and
        announce the fence to the peer.
        """
        path = self._paths[event.path]
        if self._revocation.error is not None:
            path.state = PathState.DOWN
        else:
            for link in self._links.senders_to(event.path.peer):
                released = link.fenced(event.path)
                self._links.note_retired(link)
                self._links.release(released)
            self.log.fenced(event.path, path.epoch, self._clock())
            self._apply(path, step(path, PathEvent.FENCED))

    def on_opened(self, peer: int, rail: int, epoch: int, endpoint: Any) -> None:
        """Open the path with an authenticated connection of `epoch`, or close the connection.

        The connection is closed if `epoch` is not the current epoch, if the path is not down, if
        the paths to `peer` are closed as idle, or if the communicator has ended. A second
        connection for the current epoch of a path that is up means that the peer does not use the
        first connection, so the path fails.

        Parameters
        ----------
        peer, rail, epoch : int
        endpoint : socket or Endpoint
            Connection of the type that the rail's transport opens. This method takes ownership.
        """
        path = self._paths[PathKey(peer, rail)]
        if (
            path.state is not PathState.DOWN
            or path.epoch != epoch
            or self._revocation.error is not None
            or (path.is_idle and peer not in self._links.connected)
        ):
            endpoint.close()
            if path.epoch == epoch:
                self.fail(path.key, "REDIALED: the peer dials again because its end is not in use")
            return
        self._transport.open(path.key, endpoint)
        self._apply(path, step(path, PathEvent.OPENED))
        if self._is_excluded(path.key):
            self._withdraw(path)

    def on_announced(self, peer: int, message: Announcement) -> None:
        """Handle the announcement of `peer` that its end of a path is fenced.

        Raises
        ------
        InternalError
            If the announcement is of an epoch that this end has not reached, or does not match the
            slices that this rank posted.
        """
        path = self._paths.get(PathKey(peer, message.rail))
        if path is None or self._revocation.error is not None:
            return
        is_news = message.epoch == path.epoch
        if is_news and message.cause.startswith(EXCLUDED):
            # This end may have seen its connection close before.
            path.cause = message.cause
            self.log.explained(path.key, message.epoch, message.cause)
        self._apply(path, announced(path, message))
        if is_news and not (message.is_idle or path.is_idle):
            self._look_into(path.key, message.epoch, message.cause, is_own=False)

    def note_arrival(self, event: Arrived) -> None:
        """Record the arrival of a slice in the repair records that wait for it."""
        self.log.arrived(event.path, event.frame.channel, event.frame.seq, event.began_s)

    # Actions of the path table

    def _apply(self, path: Path, actions: tuple[PathAction, ...]) -> None:
        if path.state in (PathState.FENCING, PathState.FENCED):
            self.repairing.add(path.key)
        else:
            self.repairing.discard(path.key)
        for action in actions:
            _ACTIONS[action](self, path)

    def _fence(self, path: Path) -> None:
        failed_s = path.since_s = self._clock()
        self._transport.fence(path.key)  # first: the NIC drains while the rest is done
        rail, peer = rail_name(path.key.rail), path.key.peer
        if not self.up(peer) and peer in self._links.connected:
            self.cut_off.add(peer)
            self.cut_off_since[peer] = failed_s
        self._lost[path.key] = self.routes.lose(path.key)
        if path.is_idle:
            return
        if not self._revocation.is_leaving:  # a path that ends meanwhile has not failed
            self.log.failed(path.key, path.epoch, path.cause, failed_s)
        _log.log(
            self._info, "rank %d: taking %s to rank %d out of use: %s",
            self._rank, rail, peer, path.cause,
        )  # fmt: skip
        if self._bypasses is not None and not self._revocation.is_leaving:
            self._bypasses.lost(path.key)
            if peer in self._links.awaited_peers():
                self._bypasses.seek(peer)

    def _announce(self, path: Path) -> None:
        key = path.key
        receivers = self._links.receivers_from(key.peer)
        reports = tuple(link.report() for link in receivers)
        if not path.is_idle:
            self.log.awaits(
                key, {link.channel: link.received for link in receivers if link.is_awaiting(key)}
            )
        routes = self.routes.proposal(key.peer) if self._rank < key.peer else {}
        self._control.send(
            key.peer,
            Announcement(key.rail, path.epoch, path.cause, reports, routes, path.is_idle),
        )

    def _resume(self, path: Path) -> None:
        key, announcement = path.key, path.announcement
        assert announcement is not None
        reports = {report.channel: report for report in announcement.links}
        for sender in self._links.senders_to(key.peer):
            none_yet = LinkReport(sender.channel, 0, 0)
            report = reports.get(sender.channel, none_yet)
            self._links.resume(sender, key, report)
        for receiver in self._links.receivers_from(key.peer):
            receiver.resume(key)
        proposed = announcement.routes if key.peer < self._rank else {}
        self.routes.reroute(key.peer, proposed)
        # Some may have got a route before, as another path was resumed or came up.
        moved = self.routes.rails(key.peer, self._lost.pop(key, ()))
        if not path.is_idle:
            self.log.resumed(key, moved, self._clock())
            self._say_repaired(path, moved)
        ended(path)

    @property
    def _info(self) -> int:
        """Log level of a path that goes out of use: DEBUG while this rank leaves, else INFO.

        While all ranks leave, the first ranks to finish close their connections, which is not a
        failure.
        """
        return logging.DEBUG if self._revocation.is_leaving else logging.INFO

    def _say_repaired(self, path: Path, moved: dict[int, int]) -> None:
        rails = ", ".join(map(rail_name, sorted(set(moved.values()))))
        outcome = f"moved channels {sorted(moved)} to {rails}" if rails else "no channels moved"
        # The verdict on the path is the warning, and a bypass gets none.
        is_warning = path.key.is_bypass and not self._revocation.is_leaving
        _log.log(
            logging.WARNING if is_warning else self._info,
            "rank %d: %s to rank %d is out of use (%s); %s",
            self._rank, rail_name(path.key.rail), path.key.peer, path.cause, outcome,
        )  # fmt: skip

    def _redial(self, path: Path) -> None:
        """Prepare the next connection of a path that is fenced at both ends.

        The higher rank accepts a connection; the lower rank passes a path on a rail to failback. A
        path that is closed as idle waits for `reopen`.
        """
        peer = path.key.peer
        is_closed = peer not in self._links.connected or peer in self._reopening
        if path.is_idle and is_closed:
            pass  # connected when its peer is needed again and all paths to it are fenced
        elif peer < self._rank:
            self.connect(path.key)
        elif not path.key.is_bypass:  # `Bypasses.seek` dials it when needed
            # A connection attempt that is still running belongs to the epoch that has just ended.
            self._stop_connecting(path.key)
            if self._is_excluded(path.key) or f"{EXCLUDED}:" in path.cause:
                self._failback.withdrawn(path.key)
            else:
                self._failback.failed(path.key)
        self._reopen_fenced(peer)

    def _stop_connecting(self, key: PathKey) -> None:
        if self._transport.joins(key.rail):
            self._connector.cancel(key)
        else:
            self._control.cancel_path(*key)

    def connect(self, key: PathKey) -> None:
        """Begin to connect path `key`, which is down, in its current epoch; retry until it is up.

        The lower rank dials, the higher rank accepts. If the paths to the peer were closed as idle,
        nothing is done until `reopen` is called. If the path is excluded, the lower rank does not
        dial before the exclusion ends.
        """
        peer, rail = key
        epoch = self._paths[key].epoch
        if peer not in self._links.connected and not key.is_bypass:
            self._paths[key].is_idle = True
            return
        if self._is_excluded(key):
            self._paths[key].cause = _WITHDRAWN
        if self._rank < peer and self._is_excluded(key):
            self._failback.withdrawn(key)
        elif not key.is_bypass and self._transport.joins(rail):
            self._connector.begin(key, epoch)
        elif self._rank < peer:
            self._control.dial_path(peer, rail, epoch)
        else:
            self._control.accept_path(peer, rail, epoch)

    def _use(self, path: Path) -> None:
        """Tell all parts that a path came up, and return channels to its peer to their home rails.

        See `Routes.go_home`.
        """
        peer = path.key.peer
        self.cut_off.discard(peer)
        self.cut_off_since[peer] = path.since_s = self._clock()
        self._failback.opened(path.key)
        if self._bypasses is not None:
            self._bypasses.found(path.key)
        self.routes.go_home(peer)
        self.log.opened(path.key, path.epoch, self._clock())
        self._on_up(path.key)
        if path.key.is_bypass:
            _log.warning("rank %d: a bypass to rank %d is up", self._rank, peer)
        elif path.epoch and not path.is_idle:
            rail = path.key.rail
            _log.info("rank %d: rail %d to rank %d is up again", self._rank, rail, peer)
            others = (other for key, other in self._paths.items() if key.rail == rail)
            if all(each is path or each.is_idle or each.state is PathState.UP for each in others):
                _log.warning("rank %d: rail %d is up again on all its paths", self._rank, rail)
        if path.is_idle:
            path.is_idle = False
            path.cause = ""  # it was closed, which is no failure

    def _share(self, key: PathKey) -> float:
        """Return the share of the path's worse port, 1 to 16; a port that is down counts as 1."""
        return max(1, min(self._port_share(self._rank, key.rail), self._port_share(*key)))


_ACTIONS: dict[PathAction, Callable[[Migration, Path], None]] = {
    PathAction.FENCE: Migration._fence,
    PathAction.ANNOUNCE: Migration._announce,
    PathAction.RESUME: Migration._resume,
    PathAction.REDIAL: Migration._redial,
    PathAction.USE: Migration._use,
}


#: Longest time that less urgent work waits until no path is in `Migration.repairing`, in seconds.
GIVE_WAY_S = 0.1

__all__ = ["EXCLUDED", "GIVE_WAY_S", "NO_CARRIER", "PORT_ERR", "Migration"]
