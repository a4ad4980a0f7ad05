"""The diagnosis: looks into every failed or suspect path until it has a verdict, and keeps it.

`r2ccl.failover.diagnosis.protocol` says which questions to put; this module puts them: its own
through the transport's probes, other ranks' by control message, and it answers theirs. It never
decides that a path moves: hard evidence has moved it already (`r2ccl.failover.migration.driver`),
and a slow peer's stays.

A failure is looked into at the next tick, when repairs under way are done: they come first. What
another rank says is checked before it is used: a question about a rail there is none of, or about
the very rank it is put to, is answered with "could not be asked".

Must not import sockets, verbs or threads. Invariants: one diagnosis a path at a time and at
most `MAX_DIAGNOSES` in all; every question a rank puts is answered, or counts as unanswerable in
time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.transport.base import Probed, Transport
from r2ccl.types import PathKey, ProbeKey

_log = logging.getLogger(__name__)


class _News:
    """A failure that waits to be looked into."""

    __slots__ = ("epoch", "own_cause", "peers_cause", "since_s")

    def __init__(self, epoch: int, since_s: float) -> None:
        self.epoch = epoch
        self.since_s = since_s
        self.own_cause = self.peers_cause = ""


class _Case:
    """A diagnosis about `epoch` of its path; `has_failed`: it is more than a suspicion."""

    __slots__ = ("activity", "epoch", "has_failed", "numbers", "path_diagnosis", "said")

    def __init__(
        self, path_diagnosis: PathDiagnosis, path: Path, epoch: int, has_failed: bool
    ) -> None:
        self.path_diagnosis = path_diagnosis
        self.epoch = epoch
        self.has_failed = has_failed
        self.activity = path.activity
        #: Requests to other ranks that are not answered yet.
        self.numbers: set[int] = set()
        #: The verdict as it was last given out.
        self.said: Verdict | None = None


class _Asked(NamedTuple):
    """A request on its way: to whom, what, and for which case."""

    rank: int
    key: ProbeKey
    case: _Case


class Diagnosis:
    """Verdicts of one rank; owned by one caller at a time, like `Recovery`.

    Parameters
    ----------
    rank, nranks : int
    paths : mapping of PathKey to Path
        Read, never changed.
    transport : Transport
        Only asked what it knows: which rails join, which paths are stuck.
    control : Post
    ask : callable
        ``ask(key, on_answer)``: probe `key` from this rank; `on_answer` gets the `Probed`.
    config : Config
    clock : Clock
    sequel : callable
        ``sequel(path, epoch)``: what was done about a failure, in words.
    on_verdict : callable
        Told of every verdict, also one that revises another.
    port_map : PortMap, optional
        Default: every rank has NICs of its own.
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
        self._news: dict[PathKey, _News] = {}
        self._open: dict[PathKey, _Case] = {}
        self._settled: dict[PathKey, _Case] = {}
        self._verdicts: dict[PathKey, Verdict] = {}
        #: Findings that came before the failure they are about.
        self._early: dict[PathKey, Finding] = {}
        self._asked: dict[int, _Asked] = {}
        self._nasked = 0
        self._serving: Counter[int] = Counter()
        self._said_slow_s: dict[int, float] = {}

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the last verdict on each path that ever had one."""
        return tuple(self._verdicts.copy().values())

    def slow_since(self, when_s: float) -> tuple[int, ...]:
        """Ranks that were found slow, not cut off, at `when_s` or later."""
        verdicts = self._verdicts.copy().values()
        return tuple(
            sorted({v.path.peer for v in verdicts if not v.is_down and v.when_s >= when_s})
        )

    # Evidence

    def failed(self, key: PathKey, epoch: int, cause: str, *, is_own: bool) -> None:
        """Take note that `epoch` of a path failed, for a cause found here or by the peer."""
        if cause.startswith(_ECHO):
            return
        case = self._open.get(key) or self._settled.get(key)
        is_known = case is not None and case.epoch == epoch
        if case is not None and is_known and (case.has_failed or key in self._open):
            case.has_failed = True
            case.path_diagnosis.on_cause(self._clock(), cause, is_own=is_own)
            self._go_on(case)
            return
        news = self._news.get(key)
        if news is None or news.epoch < epoch:
            news = self._news[key] = _News(epoch, self._clock())
        if is_own:
            news.own_cause = news.own_cause or cause
        else:
            news.peers_cause = news.peers_cause or cause

    def port_down(self, rail: int, cause: str) -> None:
        """Take the word of this rank's port, also about paths that failed just before it came."""
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

    def suspect(self, key: PathKey) -> None:
        """Look into the silence of a path in use; it is suspected again if there is no room now."""
        if key not in self._open and key not in self._news and len(self._open) < MAX_DIAGNOSES:
            self._begin(key, self._paths[key].epoch)

    def tick(self, now: float, *, is_calm: bool) -> None:
        """End rounds that are overdue, and begin to look into failures; `is_calm`: none repairs."""
        for case in list(self._open.values()):
            self._go_on(case, case.path_diagnosis.tick(now))
        for key, news in list(self._news.items()):
            if len(self._open) >= MAX_DIAGNOSES:
                break
            if is_calm or now >= news.since_s + _GIVE_WAY_S:
                del self._news[key]
                self._begin(key, news.epoch, news)

    # Control messages

    def on_message(self, peer: int, message: ProbeRequest | ProbeReply | Finding) -> None:
        """Take a message of `peer`; one that makes no sense here changes nothing."""
        match message:
            case ProbeRequest():
                self._on_request(peer, message)
            case ProbeReply():
                self._on_reply(peer, message)
            case Finding():
                self._on_finding(PathKey(peer, message.rail), message)

    def _on_request(self, peer: int, request: ProbeRequest) -> None:
        key = request.key
        refusal = "" if self._has(key) else "there is no such port to ask"
        if self._serving[peer] >= MAX_SERVED:
            refusal = "busy with other questions of this rank"
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

    # Inquiries

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
        finding = self._early.pop(key, None)
        if finding is not None and finding.epoch == epoch and path_diagnosis.verdict is None:
            path_diagnosis.on_finding(now, finding)
            self._go_on(case, is_told=True)
        self._go_on(case, actions)

    def _go_on(self, case: _Case, actions: Sequence[Action] = (), *, is_told: bool = False) -> None:
        """Put further questions, or give the verdict out; `is_told`: the peer found it."""
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
            # It moves again: there is nothing to find out.
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
        level = logging.WARNING
        if not verdict.is_down:
            # One process that computes for long is suspected on every rail, again and again.
            said_s = self._said_slow_s.get(peer, float("-inf"))
            if verdict.when_s < said_s + _SAY_AGAIN_S:
                level = logging.DEBUG
            else:
                self._said_slow_s[peer] = verdict.when_s
        _log.log(
            level, "rank %d: rail %d to rank %d: %s", self._rank, verdict.path.rail, peer, verdict
        )

    def _forget_questions(self, case: _Case) -> None:
        for number in case.numbers:
            del self._asked[number]
        case.numbers.clear()

    def _is_up(self, key: PathKey) -> bool:
        path = self._paths.get(key)
        return path is not None and path.state is PathState.UP

    def _bad(self) -> set[Port]:
        """Ports that verdicts call down, as long as their path is not back."""
        bad = set()
        for key, verdict in self._verdicts.items():
            if verdict.kind is VerdictKind.LOCAL_NIC and not self._is_up(key):
                bad.add(Port(self._rank, key.rail))
            elif verdict.kind is VerdictKind.REMOTE_NIC and not self._is_up(key):
                bad.add(Port(*key))
        return bad


#: Inquiries at once; failures beyond wait, suspicions come again.
MAX_DIAGNOSES = 32
#: Questions of one rank that are being answered at once: two diagnoses' worth from each of its
#: rails, with eight of them.
MAX_SERVED = 64
#: Beside a probe's time: a control message to a rank in user code, which looks at its transport
#: ten times a second, and the reply.
_REPLY_S = 0.3
#: A failure is not looked into for this long while paths are being repaired.
_GIVE_WAY_S = 0.1
#: A peer that is slow is mentioned again after this long.
_SAY_AGAIN_S = 60.0
#: How the path table begins the cause of a failure that the peer reported.
_ECHO = "reported by rank "
#: Characters of another rank's text that are kept, and of one's own that are sent.
_TEXT_NCHARS = 500

__all__ = ["MAX_DIAGNOSES", "MAX_SERVED", "Diagnosis"]
