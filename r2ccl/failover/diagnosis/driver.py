"""Diagnosis driver: probes every failed or suspected path until there is a verdict on the path.

`r2ccl.failover.diagnosis.protocol` decides which probes to make. This module makes the probes that
start at this rank, asks other ranks by control message to make the others, and carries out such
requests of other ranks. It keeps the last verdict on each path. It never moves slices: a path that
failed was taken out of use already (`r2ccl.failover.migration.driver`), and the path to a slow peer
stays in use.

Repairs have priority: the diagnosis of a failure waits until no repair is running, but at most
`GIVE_WAY_S`. It waits longer while `MAX_DIAGNOSES` are running. Requests of other ranks are
checked: a request for a rank or rail that does not exist, for a probe of the rank that receives it,
or beyond `MAX_SERVED`, is refused.

Invariants: at most one diagnosis per path and `MAX_DIAGNOSES` in all; every probe gets an answer,
or counts as not made when its time is over.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from r2ccl.bootstrap.base import Post
from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.failover.diagnosis.port_map import PortMap, own_ports
from r2ccl.failover.diagnosis.protocol import Action, Ask, PathDiagnosis, choose_auxiliaries
from r2ccl.failover.diagnosis.verdict import (
    MIRRORED,
    Finding,
    Port,
    ProbeReply,
    ProbeRequest,
    Verdict,
    VerdictKind,
)
from r2ccl.failover.migration.driver import GIVE_WAY_S
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.transport.base import Probed, Transport
from r2ccl.types import PathKey, ProbeKey

_log = logging.getLogger(__name__)


class _News:
    """Failure whose diagnosis has not begun."""

    __slots__ = ("epoch", "own_cause", "peers_cause", "since_s")

    def __init__(self, epoch: int, since_s: float) -> None:
        self.epoch = epoch
        self.since_s = since_s
        self.own_cause = self.peers_cause = ""


class _Case:
    """Diagnosis of a path in `epoch`; `has_failed` is False while the path is only suspected."""

    __slots__ = ("activity", "epoch", "has_failed", "numbers", "path_diagnosis", "said")

    def __init__(
        self, path_diagnosis: PathDiagnosis, path: Path, epoch: int, has_failed: bool
    ) -> None:
        self.path_diagnosis = path_diagnosis
        self.epoch = epoch
        self.has_failed = has_failed
        self.activity = path.activity
        #: Numbers of the requests to other ranks that are not answered yet.
        self.numbers: set[int] = set()
        #: Verdict that was last published.
        self.said: Verdict | None = None


class _Asked(NamedTuple):
    """Unanswered request to `rank` to probe `key`."""

    rank: int
    key: ProbeKey
    case: _Case


class SlowRecords:
    """Log levels of records about slow peers: INFO once per peer and `SAY_AGAIN_S`, else DEBUG."""

    def __init__(self) -> None:
        #: Time of the last INFO record, by peer.
        self._said_s: dict[int, float] = {}

    def level(self, peer: int, when_s: float) -> int:
        """Return the level of a record about `peer`, which the caller must then log.

        The level is DEBUG if the last call that returned INFO for `peer` is less than `SAY_AGAIN_S`
        ago, else INFO. `when_s` is the time of the record, a clock reading in seconds.
        """
        if when_s < self._said_s.get(peer, float("-inf")) + SAY_AGAIN_S:
            return logging.DEBUG
        self._said_s[peer] = when_s
        return logging.INFO


class Diagnosis:
    """Diagnoses and verdicts of one rank; not thread-safe.

    Parameters
    ----------
    rank, nranks : int
    paths : mapping of PathKey to Path
        Paths on rails of this rank, without bypasses; read only.
    transport : Transport
        Queried for its rails, for the kind of each (RDMA or TCP), and for stuck paths.
    control : Post
        Sends control messages.
    ask : callable
        ``ask(key, on_answer)``: probe `key` from this rank and later call ``on_answer(probed)``
        once.
    config : Config
    clock : Clock
    sequel : callable
        ``sequel(path, epoch)``: returns a description of the repair of a failure; empty if the
        repair is not done.
    on_verdict : callable
        ``on_verdict(verdict)``: called with every verdict, including one that revises an earlier
        verdict.
    port_map : PortMap, optional
        Default: no two ranks share a NIC.
    excluded : callable, optional
        Returns the excluded rails as (rank, rail). They are not used as auxiliaries. Default: no
        rail is excluded.
    """

    def __init__(
        self,
        rank: int,
        nranks: int,
        *,
        paths: Mapping[PathKey, Path],
        transport: Transport,
        control: Post,
        ask: Callable[[ProbeKey, Callable[[Probed], None]], None],
        config: Config,
        clock: Clock,
        sequel: Callable[[PathKey, int], str],
        on_verdict: Callable[[Verdict], None],
        port_map: PortMap | None = None,
        excluded: Callable[[], Iterable[tuple[int, int]]] = tuple,
    ) -> None:
        self._rank = rank
        self._nranks = nranks
        self._paths = paths
        self._transport = transport
        self._control = control
        self._ask = ask
        self._clock = clock
        self._sequel = sequel
        self._on_verdict = on_verdict
        self._patience_s = config.probe_timeout_s + _REPLY_S
        self._port_map = port_map or own_ports(nranks)
        self._excluded = excluded
        self._news: dict[PathKey, _News] = {}
        self._open: dict[PathKey, _Case] = {}
        self._settled: dict[PathKey, _Case] = {}
        self._verdicts: dict[PathKey, Verdict] = {}
        #: Findings of peers about failures that this end has not learned of yet.
        self._early: dict[PathKey, Finding] = {}
        self._asked: dict[int, _Asked] = {}
        self._nasked = 0
        self._serving: Counter[int] = Counter()
        self._slow = SlowRecords()

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the last verdict on each path that has one; any thread may call this."""
        return tuple(self._verdicts.copy().values())

    def slow_since(self, when_s: float) -> tuple[int, ...]:
        """Return, in ascending order, the peers with a path whose last verdict is PEER_SLOW.

        Verdicts made before `when_s`, a clock reading, are left out. Any thread may call this.
        """
        slow = VerdictKind.PEER_SLOW
        verdicts = self._verdicts.copy().values()
        return tuple(
            sorted({v.path.peer for v in verdicts if v.kind is slow and v.when_s >= when_s})
        )

    # Evidence

    def failed(self, key: PathKey, epoch: int, cause: str, *, is_own: bool) -> None:
        """Handle the failure of path `key` in `epoch`, found by this end (`is_own`) or by the peer.

        Add `cause` (``STATUS: detail``) to a diagnosis of that epoch, or queue the failure for a
        new diagnosis. Ignore a cause of the peer that only repeats the announcement of this end.
        """
        if cause.startswith(_ECHO):
            return
        case = self._open.get(key) or self._settled.get(key)
        is_known = case is not None and case.epoch == epoch
        if case is not None and is_known and (case.has_failed or key in self._open):
            case.has_failed = True
            case.path_diagnosis.on_cause(self._clock(), cause, is_own=is_own)
            self._go_on(case)
            self._take_early(case)
            return
        news = self._news.get(key)
        if news is None or news.epoch < epoch:
            news = self._news[key] = _News(epoch, self._clock())
        if is_own:
            news.own_cause = news.own_cause or cause
        else:
            news.peers_cause = news.peers_cause or cause

    def port_down(self, rail: int, cause: str) -> None:
        """Handle the report that this rank's port of `rail` is down.

        Add `cause` (``STATUS: detail``) to the diagnoses of all paths on the rail that are not up.
        This includes diagnoses that have not begun, and ended ones, whose verdict may then change.
        """
        now = self._clock()
        for key in self._paths:
            if key.rail != rail or self._is_up(key):
                continue
            case = self._open.get(key) or self._settled.get(key)
            if key in self._news:
                self._news[key].own_cause = cause
            elif case is not None:
                case.path_diagnosis.on_cause(now, cause, is_own=True)
                self._go_on(case)

    def withdrawn(self, key: PathKey) -> None:
        """Drop a diagnosis of path `key` that runs or is queued: a port of the path is excluded.

        The path has not failed. A diagnosis may have begun because the peer learned of the
        exclusion first and closed the connection, and this end saw only the closed connection.
        """
        self._news.pop(key, None)
        case = self._open.pop(key, None)
        if case is not None:
            self._forget_questions(case)

    def stop(self) -> None:
        """End all diagnoses, because the communicator has ended; they give no further verdict.

        When the communicator ends, the peers close their connections; this is no evidence of a
        failure. `verdicts` still returns the verdicts made earlier.
        """
        for case in self._open.values():
            self._forget_questions(case)
        self._news.clear()
        self._open.clear()
        self._settled.clear()

    def suspect(self, key: PathKey) -> None:
        """Begin to diagnose a silent path that is in use.

        Do nothing if `MAX_DIAGNOSES` run, or if a diagnosis of the path runs or is queued. The path
        is suspected again if the silence continues.
        """
        if key not in self._open and key not in self._news and len(self._open) < MAX_DIAGNOSES:
            self._begin(key, self._paths[key].epoch)

    def tick(self, now: float, *, is_calm: bool) -> None:
        """End overdue probes; begin queued diagnoses while fewer than `MAX_DIAGNOSES` run.

        Parameters
        ----------
        now : float
            Time in seconds.
        is_calm : bool
            True if no path is being repaired. Otherwise a diagnosis stays queued until
            `GIVE_WAY_S` after the failure.
        """
        for case in list(self._open.values()):
            self._go_on(case, case.path_diagnosis.tick(now))
        for key, news in list(self._news.items()):
            if len(self._open) >= MAX_DIAGNOSES:
                break
            if is_calm or now >= news.since_s + GIVE_WAY_S:
                self._news.pop(key, None)
                self._begin(key, news.epoch, news)

    # Control messages

    def on_message(self, peer: int, message: ProbeRequest | ProbeReply | Finding) -> None:
        """Handle a control message from `peer`; ignore a stale or unexpected one."""
        match message:
            case ProbeRequest():
                self._on_request(peer, message)
            case ProbeReply():
                self._on_reply(peer, message)
            case Finding():
                self._on_finding(PathKey(peer, message.rail), message)

    def _on_request(self, peer: int, request: ProbeRequest) -> None:
        key = request.key
        refusal = "" if self._has(key) else "no such port"
        if self._serving[peer] >= MAX_SERVED:
            refusal = f"too many probes for rank {peer} are running"
        if refusal:
            self._control.send(peer, ProbeReply(request.number, key, None, refusal))
        else:
            self._serving[peer] += 1
            self._ask(key, partial(self._on_served, peer, request))

    def _has(self, key: ProbeKey) -> bool:
        rails = range(self._transport.nrails)
        is_peer = key.peer != self._rank and 0 <= key.peer < self._nranks
        return is_peer and key.rail in rails and key.via in rails

    def _on_served(self, peer: int, request: ProbeRequest, event: Probed) -> None:
        self._serving[peer] -= 1
        detail = event.detail[:_TEXT_NCHARS]
        self._control.send(peer, ProbeReply(request.number, request.key, event.is_answered, detail))

    def _on_reply(self, peer: int, reply: ProbeReply) -> None:
        asked = self._asked.get(reply.number)
        if asked is None or (asked.rank, asked.key) != (peer, reply.key):
            return
        del self._asked[reply.number]
        case = asked.case
        case.numbers.discard(reply.number)
        detail = reply.detail[:_TEXT_NCHARS]
        actions = case.path_diagnosis.take(
            self._clock(), peer, reply.key, reply.is_answered, detail
        )
        self._go_on(case, actions)

    def _on_finding(self, key: PathKey, finding: Finding) -> None:
        if key not in self._paths or finding.epoch < self._paths[key].epoch - 1:
            return
        finding = Finding(finding.rail, finding.epoch, finding.kind, finding.text[:_TEXT_NCHARS])
        case = self._open.get(key) or self._settled.get(key)
        if case is not None and case.epoch == finding.epoch and case.has_failed:
            case.path_diagnosis.on_finding(self._clock(), finding)
            self._go_on(case, is_told=True)
        elif case is None or case.epoch < finding.epoch or not case.has_failed:
            self._early[key] = finding

    # Diagnoses

    def _begin(self, key: PathKey, epoch: int, news: _News | None = None) -> None:
        stale = self._open.pop(key, None)
        if stale is not None:
            self._forget_questions(stale)
        joins = self._transport.joins
        rails = range(self._transport.nrails)
        path_diagnosis = PathDiagnosis(
            self._rank,
            key,
            auxiliaries=choose_auxiliaries(
                self._rank,
                key,
                nics=self._port_map.nics(key.rail),
                rails=[rail for rail in rails if joins(rail) == joins(key.rail)],
                is_up=self._is_up,
                bad=self._bad(),
            ),
            rails=rails,
            name=self._port_map.name,
            patience_s=self._patience_s,
        )
        case = _Case(path_diagnosis, self._paths[key], epoch, news is not None)
        self._settled.pop(key, None)
        self._open[key] = case
        now = self._clock()
        if news is None:
            self._go_on(case, path_diagnosis.begin(now))
            return
        actions = path_diagnosis.begin(now, news.own_cause, news.peers_cause)
        self._take_early(case)
        self._go_on(case, actions)

    def _take_early(self, case: _Case) -> None:
        """Pass a finding of the peer that arrived early to `case`, whose path has failed.

        A finding of a later epoch is kept for the diagnosis of that epoch. A finding of an earlier
        epoch is dropped. A finding of the same epoch is dropped if the case has a verdict already.
        """
        key = case.path_diagnosis.path
        finding = self._early.get(key)
        if finding is None or finding.epoch > case.epoch:
            return
        del self._early[key]
        if finding.epoch == case.epoch and case.path_diagnosis.verdict is None:
            case.path_diagnosis.on_finding(self._clock(), finding)
            self._go_on(case, is_told=True)

    def _go_on(self, case: _Case, actions: Sequence[Action] = (), *, is_told: bool = False) -> None:
        """Publish the verdict if it is new; if there is no verdict, carry out `actions`.

        `is_told` is True if the peer's finding gave the verdict.
        """
        verdict = case.path_diagnosis.verdict
        if verdict is None:
            for action in actions:
                self._put(case, action)
        elif verdict is not case.said:
            case.said = verdict
            self._settle(case, verdict, is_told=is_told)

    def _put(self, case: _Case, action: Action) -> None:
        if isinstance(action, Ask):
            self._ask(action.key, partial(self._on_probed, case))
            return
        self._nasked += 1
        case.numbers.add(self._nasked)
        self._asked[self._nasked] = _Asked(action.rank, action.key, case)
        self._control.send(action.rank, ProbeRequest(self._nasked, action.key))

    def _on_probed(self, case: _Case, event: Probed) -> None:
        key = case.path_diagnosis.path
        if self._open.get(key) is not case:
            return
        path = self._paths[key]
        if event.is_answered and not case.has_failed and path.activity != case.activity:
            # The path makes progress again: drop the suspicion.
            del self._open[key]
            self._forget_questions(case)
            return
        is_stuck = self._is_up(key) and self._transport.is_stuck(key)
        actions = case.path_diagnosis.take(
            self._clock(), self._rank, event.key, event.is_answered, event.detail, is_stuck=is_stuck
        )
        self._go_on(case, actions)

    def _settle(self, case: _Case, verdict: Verdict, *, is_told: bool) -> None:
        key = verdict.path
        if verdict.is_down:
            sequel = self._sequel(key, case.epoch)
            verdict = msgspec.structs.replace(verdict, sequel=sequel)
        self._forget_questions(case)
        self._open.pop(key, None)
        self._settled[key] = case
        self._verdicts[key] = verdict
        self._say(verdict)
        if verdict.kind in MIRRORED and not is_told:
            text = "; ".join(verdict.evidence)[:_TEXT_NCHARS]
            self._control.send(key.peer, Finding(key.rail, case.epoch, verdict.kind, text))
        self._on_verdict(verdict)

    def _say(self, verdict: Verdict) -> None:
        peer = verdict.path.peer
        level = logging.INFO if self._is_repeated(verdict) else logging.WARNING
        if not verdict.is_down:
            # A process that computes for long is suspected on every rail, repeatedly.
            level = self._slow.level(peer, verdict.when_s)
        _log.log(
            level, "rank %d: rail %d to rank %d: %s", self._rank, verdict.path.rail, peer, verdict
        )

    def _is_repeated(self, verdict: Verdict) -> bool:
        """Return whether another path that is down has a recent verdict of equal kind and part.

        Recent: within the last `SAY_AGAIN_S` seconds.
        """
        return any(
            other.where == verdict.where
            and other.path != verdict.path
            and not self._is_up(other.path)
            and verdict.when_s < other.when_s + SAY_AGAIN_S
            for other in self._verdicts.values()
            if other.kind is verdict.kind
        )

    def _forget_questions(self, case: _Case) -> None:
        for number in case.numbers:
            del self._asked[number]
        case.numbers.clear()

    def _is_up(self, key: PathKey) -> bool:
        path = self._paths.get(key)
        return path is not None and path.state is PathState.UP

    def _bad(self) -> set[Port]:
        """Return the excluded ports, and the ports that verdicts blame for paths that are down."""
        bad = {Port(*port) for port in self._excluded()}
        for key, verdict in self._verdicts.items():
            if verdict.kind is VerdictKind.LOCAL_NIC and not self._is_up(key):
                bad.add(Port(self._rank, key.rail))
            elif verdict.kind is VerdictKind.REMOTE_NIC and not self._is_up(key):
                bad.add(Port(*key))
        return bad


#: Maximum number of diagnoses at once. Further failures wait; suspicions are dropped and recur.
MAX_DIAGNOSES = 32
#: Maximum number of probes in progress on behalf of one rank: two for each of its diagnoses.
MAX_SERVED = 64
#: Time allowed, besides the probe timeout, for a control message and its reply, in seconds. A rank
#: in user code polls its transport ten times per second.
_REPLY_S = 0.3
#: Minimum interval between two INFO records about the same slow or late peer, and time for which a
#: verdict on the same part as an earlier one is logged as INFO instead of WARNING, in seconds.
SAY_AGAIN_S = 60.0
#: Prefix that `path.announced` gives to the cause of a failure that the peer announced.
_ECHO = "reported by rank "
#: Maximum length of a detail text, sent or received, in characters.
_TEXT_NCHARS = 500

__all__ = ["MAX_DIAGNOSES", "MAX_SERVED", "SAY_AGAIN_S", "Diagnosis", "SlowRecords"]
