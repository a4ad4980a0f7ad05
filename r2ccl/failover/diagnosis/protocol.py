"""Diagnosis of one path: which questions to ask, until they give a `Verdict`.

Theory of operation
-------------------
::

    begin        -> ask local -> remote                a port that says it is down settles it
    it answers   -> PEER_SLOW, or FLOW
    it does not  -> round 1: two auxiliaries, the peer itself, the other rails to it
    round over   -> settled, or round 2 with two more auxiliaries if it is PATH or RAIL so far
    round over   -> settled

A slow peer, by far the most frequent suspect, so costs one probe. A round ends with its last
answer or at its deadline; what is missing then counts as one that could not be asked. An
*auxiliary* is one of:

* a third rank on the same rail, asked by control message to probe the remote port, while its own
  port is probed from here. It shares nothing with the suspects but the switch, so it comes first.
  Two of them probe each other too: that they answer vouches for both, and for the switch.
* another NIC of this node and of the peer's, on a fabric with a way between rails. It needs no
  third host and no message, but it shares both hosts with the suspects, and a fabric without such
  a way only says so after the time of a probe.

The peer is asked to probe back. That answer counts for little: what counts is that the session
brings one, for a peer is dead or cut off only if it does not and no rail reaches it either.

Pure: events in, questions out; times are passed in. Invariants: at most two rounds; a question is
put once, and an answer taken once; a verdict that is there changes only by a port's own word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from r2ccl.failover.diagnosis.verdict import (
    HARD,
    MIRRORED,
    Finding,
    Naming,
    Port,
    Reading,
    Verdict,
    VerdictKind,
    arrange,
    describe,
    is_port_status,
    judge,
    place,
    working,
)
from r2ccl.types import PathKey, ProbeKey


class Ask(NamedTuple):
    """Action: probe `key` from this rank."""

    key: ProbeKey


class AskRank(NamedTuple):
    """Action: have `rank` probe `key`, by control message."""

    rank: int
    key: ProbeKey


class ThirdRank(NamedTuple):
    """Auxiliary: `rank`'s port of the suspect rail."""

    rank: int


class OtherRail(NamedTuple):
    """Auxiliary: both nodes' ports of `rail`."""

    rail: int


class _Question(NamedTuple):
    """`asker` probes `key`."""

    asker: int
    key: ProbeKey


Action = Ask | AskRank
Auxiliary = ThirdRank | OtherRail


class PathDiagnosis:
    """One suspicion, or one failure, being looked into.

    Parameters
    ----------
    me : int
        This rank.
    path : PathKey
    auxiliaries : sequence of Auxiliary
        Best first, as `choose_auxiliaries` returns them; the first `MAX_AUXILIARIES` are used.
    rails : collection of int
        All rails there are to the peer.
    name : callable
        ``name(rank, rail)``: the port as a user knows it.
    patience_s : float
        How long a round waits: a probe's time, and that of a control message there and back.
    """

    def __init__(
        self,
        me: int,
        path: PathKey,
        *,
        auxiliaries: Sequence[Auxiliary],
        rails: Collection[int],
        name: Naming,
        patience_s: float,
    ) -> None:
        self.path = path
        self.verdict: Verdict | None = None
        #: When `tick` has something to do.
        self.deadline_s = float("inf")
        self._me = me
        self._name = name
        self._patience_s = patience_s
        self._rails = rails
        self._auxiliaries = list(auxiliaries[:MAX_AUXILIARIES])
        self._local, self._remote = Port(me, path.rail), Port(*path)
        self._direct = _Question(me, ProbeKey(*path, path.rail))
        self._back = _Question(path.peer, ProbeKey(me, path.rail, path.rail))
        self._put: set[_Question] = set()
        self._open: set[_Question] = set()
        self._readings: list[Reading] = []
        self._causes: list[str] = []
        self._says_down = {True: False, False: False}
        self._is_stuck = self._has_round = self._has_replied = False

    def begin(self, now: float, own_cause: str = "", peers_cause: str = "") -> list[Action]:
        """Begin; returns the first questions, none if a port settled it.

        Without a cause this is a suspicion only: the path is in use. ``own_cause`` is what this
        end found (``STATUS: detail``), ``peers_cause`` what the peer's announcement says.
        """
        for cause, is_own in ((own_cause, True), (peers_cause, False)):
            if cause:
                self._note(cause, is_own)
        if self._settled_by_port(now):
            return []
        return self._ask([self._direct], now)

    def on_cause(self, now: float, cause: str, *, is_own: bool) -> None:
        """Take hard evidence that came meanwhile; a port's word settles, or revises, the verdict.

        Any other makes of a suspicion a failure; it is of no interest any more once settled.
        """
        if self.verdict is None or is_port_status(cause):
            self._note(cause, is_own)
            self._settled_by_port(now)

    def on_finding(self, now: float, finding: Finding) -> None:
        """Take the other end's verdict on the same path, unless this end told more apart."""
        kind = MIRRORED.get(finding.kind)
        if kind is not None and (self.verdict is None or self.verdict.kind is VerdictKind.PATH):
            self._causes.append(f"found by rank {self.path.peer}: {finding.text}")
            self._settle(kind, now)

    def take(
        self,
        now: float,
        asker: int,
        key: ProbeKey,
        is_answered: bool | None,
        detail: str = "",
        *,
        is_stuck: bool = False,
    ) -> list[Action]:
        """Take an answer to a question that `asker` put; returns further questions.

        ``is_stuck`` is whether the path only retransmits, by the transport's own evidence. Of the
        peer and of third ranks, what counts as an answer is a reply of theirs. One that nobody
        waits for (any more) changes nothing.
        """
        question = _Question(asker, key)
        if question not in self._open or self.verdict is not None:
            return []
        self._open.remove(question)
        self._is_stuck |= is_stuck
        self._has_replied |= question == self._back
        self._read(question, is_answered, detail)
        return self._advance(now)

    def tick(self, now: float) -> list[Action]:
        """End a round that is overdue; returns further questions."""
        if self.verdict is not None or now < self.deadline_s:
            return []
        for question in sorted(self._open):
            self._read(question, None, "no reply in time")
        self._open.clear()
        return self._advance(now)

    def _read(self, question: _Question, is_answered: bool | None, detail: str) -> None:
        key = question.key
        asking, target = Port(question.asker, key.via), Port(key.peer, key.rail)
        self._readings.append(Reading(asking, target, is_answered, detail))

    def _advance(self, now: float) -> list[Action]:
        kind = self._judge()
        if not self._has_round:
            if kind is not None:
                self._settle(kind, now)
                return []
            self._has_round = True
            return self._ask([*self._next_auxiliaries(), *self._about_peer()], now)
        assert kind is not None
        # That the link between two working ports is at fault cannot be unsaid by further answers.
        if kind is not VerdictKind.LINK and self._waits():
            return []
        if kind in (VerdictKind.PATH, VerdictKind.RAIL) and self._auxiliaries:
            more = self._ask(self._next_auxiliaries(), now)
            if more:
                return more
        self._settle(kind, now)
        return []

    def _judge(self) -> VerdictKind | None:
        """What the answers say so far; None: the first one asks for more."""
        columns = arrange(self._readings, self._local, self._remote)
        if columns.direct:
            return VerdictKind.FLOW if self._causes or self._is_stuck else VerdictKind.PEER_SLOW
        if columns.direct is None and not self._causes:
            return VerdictKind.PATH
        if not self._has_round:
            return None
        if not self._has_replied and not self._is_peer_reached():
            return VerdictKind.PEER
        # A path that broke counts as one that does not answer, also if it could not be asked.
        return judge(columns._replace(direct=False))

    def _is_peer_reached(self) -> bool:
        return any(port.rank == self.path.peer for port in working(self._readings))

    def _waits(self) -> bool:
        needless = {self._back} if self._is_peer_reached() else set()
        return bool(self._open - needless)

    # Questions

    def _ask(self, questions: Sequence[_Question], now: float) -> list[Action]:
        new = [q for q in dict.fromkeys(questions) if q not in self._put]
        self._put.update(new)
        self._open.update(new)
        self.deadline_s = now + self._patience_s
        return [Ask(q.key) if q.asker == self._me else AskRank(q.asker, q.key) for q in new]

    def _about_peer(self) -> list[_Question]:
        straight = [_Question(self._me, ProbeKey(self.path.peer, v, v)) for v in self._rails]
        return [self._back, *straight]

    def _next_auxiliaries(self) -> list[_Question]:
        batch, self._auxiliaries = self._auxiliaries[:_PER_ROUND], self._auxiliaries[_PER_ROUND:]
        peer, rail = self.path
        questions = []
        for auxiliary in batch:
            if isinstance(auxiliary, ThirdRank):
                questions.append(_Question(auxiliary.rank, ProbeKey(peer, rail, rail)))
                questions.append(_Question(self._me, ProbeKey(auxiliary.rank, rail, rail)))
            else:
                questions.append(_Question(self._me, ProbeKey(peer, rail, auxiliary.rail)))
                questions.append(_Question(self._me, ProbeKey(peer, auxiliary.rail, rail)))
        thirds = [each.rank for each in batch if isinstance(each, ThirdRank)]
        if len(thirds) == _PER_ROUND:
            questions.append(_Question(thirds[0], ProbeKey(thirds[1], rail, rail)))
        return questions

    # The end

    def _note(self, cause: str, is_own: bool) -> None:
        self._causes.append(cause if is_own else f"reported by rank {self.path.peer}: {cause}")
        self._says_down[is_own] |= is_port_status(cause)

    def _settled_by_port(self, now: float) -> bool:
        kind = HARD.get((self._says_down[True], self._says_down[False]))
        if kind is None:
            return False
        if self.verdict is None or self.verdict.kind is not kind:
            self._settle(kind, now)
        return True

    def _settle(self, kind: VerdictKind, now: float) -> None:
        is_asked_in_vain = kind is VerdictKind.PATH and not self._has_round and not self._causes
        self.verdict = Verdict(
            kind=kind,
            path=self.path,
            where=place(kind, self._me, self.path, self._name),
            evidence=(*self._causes, *describe(self._readings, self._name)),
            readings=tuple(self._readings),
            when_s=now,
            is_down=kind is not VerdictKind.PEER_SLOW and not is_asked_in_vain,
        )
        self._open.clear()
        self.deadline_s = float("inf")


def choose_auxiliaries(
    me: int,
    path: PathKey,
    *,
    nics: Sequence[str],
    rails: Collection[int],
    is_up: Callable[[PathKey], bool],
    bad: Collection[Port] = (),
) -> list[Auxiliary]:
    """List auxiliaries for a diagnosis of rank `me`, best first.

    Third ranks before other rails, those in use before those that are not. One rank a NIC, and none
    of the two NICs in question, which ranks of one host may share. Ranks above `me` come first, so
    that not all ranks ask the same one. Of other rails the neighbours come first:
    where probes need connections, only those between neighbours are joined.

    Parameters
    ----------
    me : int
    path : PathKey
    nics : sequence of str
        Of every rank, its end of this rail; equal strings are one NIC.
    rails : collection of int
        All rails there are.
    is_up : callable
        Whether a path of this rank is in use.
    bad : collection of Port
        Ports known to be down: they are not worth asking.
    """
    taken = {nics[me], nics[path.peer]}
    thirds: list[Auxiliary] = []
    for step in range(1, len(nics)):
        rank = (me + step) % len(nics)
        if nics[rank] not in taken and Port(rank, path.rail) not in bad:
            taken.add(nics[rank])
            thirds.append(ThirdRank(rank))
    others: list[Auxiliary] = [
        OtherRail(rail)
        for rail in _neighbours(path.rail, rails)
        if Port(me, rail) not in bad and Port(path.peer, rail) not in bad
    ]

    def is_in_use(each: Auxiliary) -> bool:
        if isinstance(each, ThirdRank):
            return is_up(PathKey(each.rank, path.rail))
        return is_up(PathKey(path.peer, each.rail))

    return sorted(thirds + others, key=lambda each: not is_in_use(each))


def _neighbours(rail: int, rails: Collection[int]) -> list[int]:
    """All others of `rails`, the nearest first, both ways round."""
    ring = sorted(rails)
    at = ring.index(rail)
    near = [ring[(at + step * way) % len(ring)] for step in range(1, len(ring)) for way in (1, -1)]
    return [other for other in dict.fromkeys(near) if other != rail]


#: Auxiliaries of one path_diagnosis, and of one round.
MAX_AUXILIARIES = 4
_PER_ROUND = 2

__all__ = [
    "MAX_AUXILIARIES",
    "Action",
    "Ask",
    "AskRank",
    "Auxiliary",
    "OtherRail",
    "PathDiagnosis",
    "ThirdRank",
    "choose_auxiliaries",
]
