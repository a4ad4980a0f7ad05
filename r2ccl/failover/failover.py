"""Failover of one rank: creates the parts that handle failures, and dispatches events to them.

Events arrive from the transport, the control plane, the carrier monitor and the clock (`tick`). Not
thread-safe; never blocks.

Invariant: an error that ends the communicator fences all paths, so no peer can write into the
memory of a call that raised.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import partial

import msgspec

from r2ccl.bootstrap.messages import Goodbye
from r2ccl.errors import NoHealthyRail
from r2ccl.failover.bandwidth.protocol import Balance
from r2ccl.failover.connector import Answer, Connector, EndpointReady, Offer, probe_keys
from r2ccl.failover.context import RankContext
from r2ccl.failover.diagnosis.driver import Diagnosis
from r2ccl.failover.diagnosis.verdict import Finding, ProbeReply, ProbeRequest, Verdict, VerdictKind
from r2ccl.failover.failback.driver import Failback
from r2ccl.failover.health.driver import HealthAgreement
from r2ccl.failover.health.rounds import (
    Commit,
    ExcludeRails,
    Prepare,
    Promise,
    RailsExcluded,
    Report,
)
from r2ccl.failover.migration.bypass import Bypasses
from r2ccl.failover.migration.driver import (
    EXCLUDED,
    GIVE_WAY_S,
    NO_CARRIER,
    PORT_ERR,
    Migration,
)
from r2ccl.failover.migration.links import Links
from r2ccl.failover.migration.path import (
    Announcement,
    ClosePaths,
    ConnectPaths,
    Path,
    PathState,
)
from r2ccl.failover.probes import Probes, Watch
from r2ccl.failover.revocation import Leaving, Revocation, Revoke, Spared
from r2ccl.transport.base import Joined, Probed, RailChanged
from r2ccl.types import PathKey, ProbeKey

_log = logging.getLogger(__name__)


class PortUp(msgspec.Struct, frozen=True, tag="port_up"):
    """Control message: the sender's port of `rail` is up again; the receiver retries the path."""

    rail: int


class Failover:
    """Failure handling of one rank: creates its parts and passes events to them.

    Parameters
    ----------
    context : RankContext
    links : Links
    """

    def __init__(self, context: RankContext, links: Links) -> None:
        self._context = context
        self._links = links
        self._rank = context.rank
        self._config = context.config
        self._clock = context.clock
        self._transport = context.transport
        self._control = context.control
        self._balance = links.balance
        #: Rank and rail of the excluded rails, as far as this rank knows.
        self.excluded = context.excluded
        self.revocation = Revocation(
            context,
            links,
            fence_all=self.fence_all,
            no_rail=lambda peer: self._no_rail(peer, self._clock()),
        )
        self._connector = Connector(
            context.rank, context.transport, context.control.send, self._on_joined_path, self._clock
        )
        self._joined = context.joined if self._config.is_resilient else []
        needed = probe_keys(context.first_peers, self._joined)
        #: Probes of ports, shared by diagnosis, failback and the detection of silent paths.
        self.probes = Probes(context.transport, self._connector, needed)
        #: Paths between ranks without a common rail; None if `RankContext.has_bypasses` is False.
        self._bypasses = self._make_bypasses() if context.has_bypasses else None
        #: Probes failed paths and connects them again.
        self.failback = Failback(
            self._config,
            self._clock,
            ask=self.probes.ask,
            connect=self._connect,
            is_alone=lambda peer: not self.migration.up(peer),
            is_excluded=self._is_excluded,
        )
        #: Moves slices from failed paths to others.
        self.migration = Migration(
            context,
            links,
            revocation=self.revocation,
            connector=self._connector,
            failback=self.failback,
            bypasses=self._bypasses,
            share=self._port_share,
            look_into=self._look_into,
            on_up=self._report_up,
            is_excluded=self._is_excluded,
        )
        #: Own ports that went down, while some of their paths are not failed yet (`_port_down`):
        #: rail -> (evidence, clock reading at which the port went down).
        self._ports_down: dict[int, tuple[str, float]] = {}
        self._watch = Watch(self._config.suspicion_timeout_s)
        #: Clock reading at which the time for connecting the paths at the start is over.
        self._join_by_s = 0.0
        #: Number of calls that wait for paths to each rank.
        self._joining: Counter[int] = Counter()
        #: Ranks that the running calls exchange data with, as of the last tick.
        self._calling: frozenset[int] = frozenset()
        #: Determines what failed; None in the fail-stop baseline.
        self.diagnosis = self._make_diagnosis() if self._config.is_resilient else None
        if self.diagnosis is not None:
            self.revocation.on_end.append(self.diagnosis.stop)
        #: Agrees with all ranks on the health that plans use; None in the fail-stop baseline.
        self.agreement = self._make_agreement() if self._config.is_resilient else None

    def _make_bypasses(self) -> Bypasses:
        context = self._context
        return Bypasses(
            context.rank,
            context.nranks,
            paths=self._links.paths,
            homes=context.homes,
            sockets=[rail for rail in range(context.nrails) if rail not in context.joined],
            last_resorts=context.last_resorts,
            fabric=self._config.fabric,
            share=self._port_share,
            is_excluded=lambda rank, rail: (rank, rail) in self.excluded,
            control=self._control,
            clock=self._clock,
        )

    def _make_agreement(self) -> HealthAgreement:
        health = self._context.whole_health()
        return HealthAgreement(
            self._rank,
            health,
            control=self._control,
            clock=self._clock,
            on_excluded=self._on_excluded,
        )

    def _make_diagnosis(self) -> Diagnosis:
        return Diagnosis(
            self._rank,
            self._context.nranks,
            paths=self._links.on_rails,
            transport=self._transport,
            control=self._control,
            ask=self.probes.ask,
            config=self._config,
            clock=self._clock,
            sequel=self.migration.log.sequel,
            on_verdict=self._on_verdict,
            port_map=self._context.port_map,
            excluded=lambda: self.excluded,
        )

    @property
    def is_over(self) -> bool:
        """True if the communicator has ended with an error."""
        return self.revocation.error is not None

    def start(self) -> None:
        """Begin to connect the paths to `RankContext.first_peers`; probes are connected later."""
        self._join_by_s = self._clock() + self._config.connect_timeout_s
        for peer in self._links.peers:
            self._control.open_session(peer)
        self.migration.start()
        if self._bypasses is not None:
            for peer in self._links.peers:
                self._bypasses.admit(peer)

    def connect_peers(self, peers: frozenset[int]) -> None:
        """Begin to connect data paths to `peers`, and ask them to do the same.

        The caller then waits for the paths, and calls `joined` with the same ranks when it no
        longer waits. Until then, paths that a peer closes as idle are connected again.

        If more than ``R2CC_MAX_CONNECTIONS`` (0: no limit) peers would be connected, first begin to
        close the paths to the surplus peers, least recently used first. Only idle paths are closed.
        Paths that `start` made, and paths that a running call uses or waits for, stay open, so the
        limit may be exceeded. In the fail-stop baseline, no path is closed.
        """
        self._joining.update(peers)
        self._make_room(peers)
        for peer in sorted(peers - self._links.connected):
            self.add_peer(peer)

    def joined(self, peers: frozenset[int]) -> None:
        """Record that a call no longer waits for the paths to `peers`; see `connect_peers`."""
        self._joining.subtract(peers)
        self._joining = +self._joining

    def _make_room(self, peers: frozenset[int]) -> None:
        """Close idle paths if connecting `peers` would exceed ``R2CC_MAX_CONNECTIONS``."""
        config = self._config
        surplus = len(self._links.connected | peers) - config.max_connections
        if surplus > 0 and config.max_connections and config.is_resilient:
            kept = peers.union(self._context.first_peers, self._joining, self._calling)
            idle = [peer for peer in self._links.idle_peers() if peer not in kept]
            for peer in idle[:surplus]:
                self.migration.close_idle(peer)
                self._withdraw_reports(peer)

    def add_peer(self, peer: int, *, is_own: bool = True) -> None:
        """Begin to connect data paths to `peer`, unless they are connected or being connected.

        Parameters
        ----------
        peer : int
        is_own : bool
            True if this rank needs the paths; `peer` is then told to connect them too. False if
            `peer` has asked for the paths; idle paths to other ranks may then be closed first, as
            in `connect_peers`.
        """
        if peer in self._links.connected:
            return
        if not is_own:
            self._make_room(frozenset({peer}))
        if peer in self._links.peers:
            self.migration.reopen(peer)
            return
        if is_own:
            # Before the session: the lower rank dials it, and must first learn that it is needed.
            self._control.send(peer, ConnectPaths())
        self._control.open_session(peer)
        self.probes.unjoined += probe_keys([peer], self._joined)
        self.migration.add_peer(peer)

    def fence_all(self) -> None:
        """Stop connecting RDMA paths and probes, and begin to fence every path that is up.

        ``migration.is_quiet`` is True once all are fenced.
        """
        self._connector.close()
        self.migration.fence_all()

    def obstacles(self, peer: int) -> list[str]:
        """Describe why paths to `peer` are not connected, as far as this rank knows.

        Any thread may call this method.
        """
        return [*self._control.obstacles(peer), *self._connector.obstacles(peer)]

    def set_nominal_rate(self, rate: int) -> None:
        """Set the nominal bandwidth of each rail, in bytes per second; 0 means unknown.

        Do nothing if bandwidth is not measured.
        """
        if self._balance is not None:
            self._balance.set_nominal_rate(rate)

    # Events of ports and probes

    def on_carrier(self, rail: int, is_up: bool) -> None:
        """Handle a change of the carrier of the local NIC of `rail`."""
        if is_up:
            self._control.kick(rail)
            self._port_up(rail)
        else:
            self._port_down(rail, f"{NO_CARRIER}: the local NIC of the rail has no carrier")

    def on_rail(self, event: RailChanged) -> None:
        """Handle a change of a local RDMA port: it came up, went down or became unusable."""
        if event.is_up:
            self._connector.kick(event.rail)
            self._port_up(event.rail)
        else:
            why = event.why or "the port of the RDMA NIC is down"
            self._port_down(event.rail, f"{PORT_ERR}: {why}")

    def on_joined(self, event: Joined) -> None:
        """Handle the result of the test of an RDMA connection; see `Connector.on_joined`.

        If the connection for probes between the two ports of a path is ready, and the path is in
        quarantine, a probe of the path becomes due (`Failback.hurry`).
        """
        self._connector.on_joined(event)
        key = event.key
        if isinstance(key, ProbeKey) and key.via == key.rail and not event.error:
            self.failback.hurry(PathKey(key.peer, key.rail))

    def on_probed(self, event: Probed) -> None:
        """Pass the result of a probe to all callers that wait for it; see `Probes.on_probed`."""
        self.probes.on_probed(event, is_over=self.is_over)

    def _port_down(self, rail: int, cause: str) -> None:
        """Fail the paths of a local port that is down, first the paths that a call waits for.

        The other paths follow once no repair is in progress, at the latest after `GIVE_WAY_S`. A
        job with many nodes has many idle paths. To repair these paths and to run the agreement of
        all ranks would take processor time from the repair that a call waits for.
        """
        for peer in sorted(self._links.awaited_peers() & self._links.peers):
            self.migration.fail(PathKey(peer, rail), cause)
        now = self._clock()
        self._ports_down[rail] = (cause, now)
        self._end_ports_down(now)

    def _end_ports_down(self, now: float) -> None:
        """Fail the remaining paths of ports that are down, if they are due: see `_port_down`."""
        for rail, (_, since_s) in list(self._ports_down.items()):
            if not self.migration.repairing or now >= since_s + GIVE_WAY_S:
                self._end_port_down(rail)

    def _end_port_down(self, rail: int) -> None:
        cause, _ = self._ports_down.pop(rail)
        for peer in self._links.peers:
            self.migration.fail(PathKey(peer, rail), cause)
        if self.diagnosis is not None and not self.revocation.is_leaving:
            self.diagnosis.port_down(rail, cause)
        self._report_down(self._rank, rail)

    def _port_up(self, rail: int) -> None:
        """Handle the report that this rank's port of `rail` came up.

        Each path on `rail` that is in quarantine is probed soon, by the lower rank of the path. If
        no path will show that the port works, and the port is not excluded, report to the health
        agreement at once that it works.
        """
        self._ports_down.pop(rail, None)
        for peer in self._links.peers:
            key = PathKey(peer, rail)
            if self._links.paths[key].state is PathState.UP:
                continue
            if self._rank < peer:
                self.failback.port_up(key)
            else:
                self._control.send(peer, PortUp(rail))
        if (self._rank, rail) not in self.excluded:
            self._report_unproved(rail)

    # Control messages

    def on_message(self, peer: int, message: object) -> None:
        """Pass a control message from `peer` to the part that handles it.

        Once the communicator has ended, only messages about its end are handled.

        Raises
        ------
        InternalError
            If the message breaks the protocol of that part.
        """
        if isinstance(message, Announcement):
            self.migration.on_announced(peer, message)
            self._end_ports_down(self._clock())
        elif isinstance(message, Leaving):
            self.revocation.on_leaving(message)
        elif isinstance(message, Goodbye):
            self.revocation.on_goodbye(peer)
        elif isinstance(message, Revoke):
            self.revocation.on_revoke(peer, message)
        elif isinstance(message, Spared):
            self.revocation.on_spared(peer, message.rank)
        elif self.is_over:
            return
        elif isinstance(message, Offer | Answer | EndpointReady):
            self._connector.on_message(peer, message)
        elif isinstance(message, ConnectPaths):
            self.add_peer(peer, is_own=False)
        elif isinstance(message, ClosePaths):
            self.migration.on_close_paths(peer)
            if peer not in self._links.connected:
                self._withdraw_reports(peer)
        elif isinstance(message, PortUp):
            self.failback.port_up(PathKey(peer, message.rail))
            self._connector.kick(message.rail, peer)
        elif self.diagnosis is not None and isinstance(
            message, ProbeRequest | ProbeReply | Finding
        ):
            self.diagnosis.on_message(peer, message)
        elif self.agreement is not None and isinstance(
            message, Report | Prepare | Promise | Commit | ExcludeRails | RailsExcluded
        ):
            self.agreement.on_message(peer, message)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """End the communicator because the control plane lost `peer`.

        If `peer` was leaving and has confirmed all slices of this rank, only send `Spared` (see
        `Revocation.spares`).

        Parameters
        ----------
        peer : int
        why : str
            Evidence of the loss.
        last_heard_s : float or None
            Seconds since the last sign of life of `peer`; None: not known.
        """
        if self.revocation.spares(peer):
            return
        if self.agreement is not None:
            self.agreement.peer_lost(peer)
        self.revocation.lose(peer, why, last_heard_s)

    # Time

    def tick(self, now: float, peers: frozenset[int]) -> None:
        """Do the periodic work of all parts; do nothing if the communicator has ended.

        Detect silent paths, advance the connector, failback, diagnoses and the health agreement,
        and search for bypasses. End the communicator with `NoHealthyRail` if a rank of `peers` has
        been cut off (no path to it is up) for longer than ``config.no_rail_timeout_s``.

        Parameters
        ----------
        now : float
            Time in seconds.
        peers : frozenset of int
            Ranks that the running calls exchange data with. Ranks that this rank never had paths to
            are ignored: this rank only receives from them, and the sender connects the paths.
        """
        if self.is_over:
            return
        self._calling = peers = peers & self._links.peers
        self._end_ports_down(now)
        is_calm, is_leaving = not self.migration.repairing, self.revocation.is_leaving
        self.revocation.spread()
        closed = self._links.peers - self._links.connected
        # The peer may have closed paths as idle that this rank was about to use.
        wanted = closed and peers.union(self._joining, self._links.awaited_peers())
        for peer in sorted(closed.intersection(wanted)):
            self.migration.reopen(peer)
        # Otherwise a sender would wait for ever for the confirmation of its last eager slices.
        self._links.confirm_all()
        self._transport.flush()
        if self.probes.unjoined and (self.migration.is_whole or now >= self._join_by_s):
            # All paths on rails are up, or the time for connecting them is over.
            self.probes.join()
        self._connector.tick(now, is_calm=is_calm)
        self.failback.tick(now)
        for key in self._watch.look(now, self._watched()):
            # A broken queue pair reports itself, so only TCP paths are probed here. For an RDMA
            # path, the diagnosis still finds out whether the peer is slow.
            if not self._transport.joins(key.rail):
                self._probe(key)
            # A path that carries no slices is silent although its peer sends on other paths. The
            # peer is slow only if all paths to it are silent.
            if self.diagnosis is not None and self._is_silent(key.peer):
                self.diagnosis.suspect(key)
        if self.diagnosis is not None:
            self.diagnosis.tick(now, is_calm=not self.migration.repairing)
        if self.agreement is not None:
            # Also while this rank leaves: others may still exclude rails, or lose some.
            self.agreement.tick(now)
            if not is_leaving and self._balance is not None and self._balance.update(now):
                self._report_bandwidth(self.agreement, self._balance)
        if self._bypasses is not None and not is_leaving:
            self._seek(self._bypasses, peers, now)
        for peer in peers:
            error = self._no_rail(peer, now)
            if error is not None and error.since_s > self._config.no_rail_timeout_s:
                self.revocation.give_up(error, "NoHealthyRail", peer)
                return

    def _watched(self) -> Iterator[tuple[PathKey, tuple[int, int], bool]]:
        awaited = self._links.awaited_peers()
        # Bypasses are left out: they are not probed, so only the kernel's TCP timeouts detect that
        # a silent bypass has failed.
        for key, path in self._links.on_rails.items():
            if path.state is PathState.UP:
                # A confirmation that this end sent may be lost although this end expects nothing.
                # Only the peer misses it, and the peer cannot detect the loss if its end of the
                # path never came up, so this end also checks `is_stuck`.
                is_due = key.peer in awaited or self._transport.is_stuck(key)
                yield key, (path.epoch, path.activity), is_due

    def _is_silent(self, peer: int) -> bool:
        """Return whether no path to `peer` on a rail has made progress for the suspicion time."""
        up = self.migration.up(peer)
        return self._watch.are_silent(key for key in up if not key.is_bypass)

    def _seek(self, bypasses: Bypasses, peers: frozenset[int], now: float) -> None:
        """Begin at most `_MOST_SEEKS` rounds of the search for bypasses, each to one peer.

        Bypasses to `peers`, and to ranks that this rank waits for, are sought at once. Bypasses to
        other ranks that are cut off are sought only when `connect_timeout_s` has passed since the
        start.
        """
        wanted = peers | self._links.awaited_peers()
        if now >= self._join_by_s:
            wanted |= self.migration.cut_off
        nbegun = 0
        for peer in wanted:
            nbegun += bypasses.seek(peer)
            if nbegun == _MOST_SEEKS:
                break

    def _probe(self, key: PathKey) -> None:
        path = self._links.paths[key]
        self.probes.ask(
            ProbeKey(key.peer, key.rail, key.rail),
            partial(self._probed, path, path.epoch, path.activity),
        )

    def _probed(self, path: Path, epoch: int, activity: int, event: Probed) -> None:
        """Fail the path if its probe is unanswered, or if its connection only retransmits.

        Do nothing if the path made progress or failed since the probe was sent, or if the outcome
        of the probe proves nothing.
        """
        if path.epoch != epoch or path.activity != activity or event.is_answered is None:
            return
        if not event.is_answered:
            cause = f"no progress, and the peer's kernel does not answer a probe ({event.detail})"
            self.migration.fail(path.key, f"PROBE_UNANSWERED: {cause}")
        elif self._transport.is_stuck(path.key):
            self.migration.fail(
                path.key,
                "FLOW_STUCK: the peer's port answers a probe, but this connection only retransmits",
            )

    # Excluded rails

    def _on_excluded(
        self, excluded: AbstractSet[tuple[int, int]], included: AbstractSet[tuple[int, int]]
    ) -> None:
        """Take the paths of `excluded` rails out of use; probe those of `included` rails soon.

        Both sets contain rails as (rank, rail): rails that are newly excluded, and rails that are
        no longer excluded. Also report this rank's own rails: the `excluded` ones as down, and the
        `included` ones as up if no path will show that they work.
        """
        self.excluded = (self.excluded | excluded) - included
        if self.is_over or self.agreement is None:
            return
        for rank, rail in sorted(excluded):
            _log.warning("rank %d: rail %d of rank %d is excluded", self._rank, rail, rank)
            self.migration.exclude(rank, rail)
            if rank == self._rank:
                self.agreement.report_down(rank, rail)
        if excluded and self.diagnosis is not None:
            for key in filter(self._is_excluded, self._links.on_rails):
                self.diagnosis.withdrawn(key)
        for rank, rail in sorted(included):
            _log.warning("rank %d: rail %d of rank %d is included again", self._rank, rail, rank)
            peers = sorted(self._links.peers)
            for peer in peers if rank == self._rank else {rank} & set(peers):
                self.failback.port_up(PathKey(peer, rail))
            if rank == self._rank:
                self._report_unproved(rail)

    def _is_excluded(self, key: PathKey) -> bool:
        """Return whether a port of path `key` is excluded; False for a bypass."""
        return bool(self.excluded) and (
            (self._rank, key.rail) in self.excluded or tuple(key) in self.excluded
        )

    # Calls between the parts

    def _connect(self, key: PathKey) -> None:
        self.migration.connect(key)

    def _on_joined_path(self, peer: int, rail: int, epoch: int, endpoint: object) -> None:
        self.migration.on_opened(peer, rail, epoch, endpoint)

    def _look_into(self, key: PathKey, epoch: int, cause: str, *, is_own: bool) -> None:
        # While all ranks leave, the ranks that finish first close their connections: no failure.
        if self.diagnosis is None or self.revocation.is_leaving or key.is_bypass:
            return
        if self._is_excluded(key) or cause.partition(":")[0] == EXCLUDED:
            self.diagnosis.withdrawn(key)
        else:
            self.diagnosis.failed(key, epoch, cause, is_own=is_own)

    def _no_rail(self, peer: int, now: float) -> NoHealthyRail | None:
        """Return the error `NoHealthyRail` for `peer`, or None if a path to it is up."""
        if self.migration.up(peer):
            return None
        on_rails = self._links.on_rails
        causes = {key.rail: path.cause for key, path in on_rails.items() if key.peer == peer}
        since_s = now - self.migration.cut_off_since[peer]
        return NoHealthyRail(rank=self._rank, peer=peer, since_s=since_s, causes=causes)

    def _report_bandwidth(self, agreement: HealthAgreement, balance: Balance) -> None:
        rates = {rail: round(rate / 1e6, 1) for rail, rate in balance.rates().items()}
        _log.info(
            "rank %d: bandwidth of rails in sixteenths of the full rate: %s; measured: %s MB/s",
            self._rank, balance.weights, rates,
        )  # fmt: skip
        agreement.report_bandwidth(balance.weights, balance.toward)

    def _on_verdict(self, verdict: Verdict) -> None:
        """Report to the health agreement the NIC that a verdict names as failed.

        A peer's port is reported only if the verdict contains results of probes. Otherwise the
        verdict repeats the peer's own evidence, and the peer reports its port itself.
        """
        peer, rail = verdict.path
        if verdict.kind is VerdictKind.LOCAL_NIC:
            self._report_down(self._rank, rail)
        elif verdict.kind is VerdictKind.REMOTE_NIC and verdict.readings:
            self._report_down(peer, rail)

    def _report_down(self, rank: int, rail: int) -> None:
        """Report a failed port to the health agreement, unless a path over the port is up.

        For this rank's own port, paths to other nodes count; paths inside a node count only if
        there is one node, because they do not show that the port works. For a peer's port, only the
        path from this rank counts; a peer's port is also not reported if the paths to the peer are
        closed as idle (see `_withdraw_reports`).
        """
        if self.agreement is None or self.revocation.is_leaving or self.is_over:
            return
        if rank == self._rank:
            peers = {peer for peer in self._links.peers if not self._is_inside(peer)}
        elif rank in self._links.connected:
            peers = {rank}
        else:
            return
        paths = self._links.paths
        if not any(paths[PathKey(peer, rail)].state is PathState.UP for peer in peers):
            self.agreement.report_down(rank, rail)

    def _withdraw_reports(self, peer: int) -> None:
        """Withdraw this rank's reports on ports of `peer`, whose paths were closed as idle.

        Closed paths are not probed, so this rank would not notice that a port works again. If the
        port is down, `peer` has reported it itself, or the next failed path shows it.
        """
        if self.agreement is not None and not self.revocation.is_leaving and not self.is_over:
            self.agreement.withdraw(peer)

    def _report_up(self, key: PathKey) -> None:
        """Report that both ports of path `key` work.

        Ignore bypasses and excluded paths. If there are several nodes, a path inside a node does
        not show that a port works. It only disproves this rank's report on the peer's port, because
        the path was down when this rank made that report; the peer's own report stays.
        """
        if self.agreement is None or self.revocation.is_leaving or key.is_bypass:
            return
        if self._is_excluded(key):  # the other end did not know; the path is fenced next
            return
        if not self._is_inside(key.peer):
            self.agreement.report_up(self._rank, key.rail)
        self.agreement.report_up(*key)

    def _report_unproved(self, rail: int) -> None:
        """Report that this rank's port of `rail` works, if no path will show it.

        Paths inside a node do not show it, so the report is made at once if this rank has no other
        paths. Otherwise the first path to another node shows it.
        """
        if self.agreement is None or self.revocation.is_leaving or self.is_over:
            return
        if all(map(self._is_inside, self._links.peers)):
            self.agreement.report_up(self._rank, rail)

    def _is_inside(self, peer: int) -> bool:
        nodes = self._context.nodes
        return bool(nodes) and nodes[peer] == nodes[self._rank]

    def _port_share(self, rank: int, rail: int) -> float:
        """Return the share of its bandwidth that a port has left, 0 (down) to 16.

        Only ratios of shares matter: without an agreement, every port has 1.
        """
        return 1.0 if self.agreement is None else self.agreement.known.health.share(rank, rail)


#: Maximum number of bypass rounds begun per tick: each costs file descriptors and loop time.
_MOST_SEEKS = 4

__all__ = ["Failover", "PortUp"]
