"""Diagnosis of one path: decides which ports to probe until the answers give a `Verdict`.

Theory of operation
-------------------
::

    begin        -> probe local -> remote   (a port that reports itself down gives the verdict)
    answered     -> PEER_SLOW; FLOW if the path failed or only retransmits
    not made     -> PATH, if the path is only suspected; else as unanswered
    unanswered   -> round 1: two auxiliaries, the peer itself, the other rails to the peer
    round over   -> verdict, or round 2 with two more auxiliaries if the kind is PATH or RAIL
    round over   -> verdict

A slow peer, by far the most frequent cause of a suspicion, therefore costs one probe. A round ends
with its last answer or at its deadline; probes without an answer by then count as not made. A round
does not wait for the probe by the peer once another answer shows a working port of the peer, and it
ends as soon as the verdict is LINK, which further answers cannot change. An *auxiliary* is one of:

* a third rank on the same rail. A control message asks the third rank to probe the remote port,
  while this rank probes the third rank's port. A third rank shares only the switch with the
  suspected ports, so third ranks are preferred. If there are two, one also probes the other: an
  answer shows that both of their ports and the switch work.
* another rail of this rank and the peer, on a fabric that connects different rails. This needs no
  third host and no message. But the other rail shares both hosts with the suspected ports, and on a
  fabric that does not connect rails the probe fails only after its timeout.

The peer is also asked to probe this rank's port. A reply, whatever the result of the probe, shows
that the peer's process can be reached. The verdict is PEER (dead or cut off) only if there is no
reply and no port of the peer answers either.

Times are passed in as clock readings. Invariants: at most two rounds; each probe is made once, and
its answer used once; a verdict is changed only by a port that reports itself down or, if its kind
is PATH, by the peer's finding.
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
    """Action: ask `rank`, by control message, to probe `key`."""

    rank: int
    key: ProbeKey


class ThirdRank(NamedTuple):
    """Auxiliary: the port of third rank `rank` on the suspected rail."""

    rank: int


class OtherRail(NamedTuple):
    """Auxiliary: the two ports that this rank and the peer have on another `rail`."""

    rail: int


class _Question(NamedTuple):
    """Probe of `key` by rank `asker`."""

    asker: int
    key: ProbeKey


Action = Ask | AskRank
Auxiliary = ThirdRank | OtherRail


class PathDiagnosis:
    """State of the diagnosis of one path that failed or is suspected.

    Parameters
    ----------
    me : int
        This rank.
    path : PathKey
    auxiliaries : sequence of Auxiliary
        Best first, as `choose_auxiliaries` returns them; the first `MAX_AUXILIARIES` are used.
    rails : collection of int
        All rails to the peer.
    name : callable
        ``name(rank, rail)``: name of a port for users.
    patience_s : float
        Timeout of a round in seconds: the timeout of a probe, plus the time for a control message
        and its reply.
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
        #: Time when the first probe or the current round is overdue; infinite if none runs.
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
        """Begin the diagnosis; return the first probe, or none if a port reports itself down.

        Without a cause the path is only suspected, and still in use.

        Parameters
        ----------
        now : float
            Time in seconds, as in all methods.
        own_cause : str
            Evidence that this end found, ``STATUS: detail``; empty: none.
        peers_cause : str
            Evidence in the peer's announcement, in the same form; empty: none.
        """
        for cause, is_own in ((own_cause, True), (peers_cause, False)):
            if cause:
                self._note(cause, is_own)
        if self._settled_by_port(now):
            return []
        return self._ask([self._direct], now)

    def on_cause(self, now: float, cause: str, *, is_own: bool) -> None:
        """Add `cause` (``STATUS: detail``), evidence of a failure that was found after `begin`.

        A port that reports itself down gives, or revises, the verdict. Other evidence turns a
        suspicion into a failure, and is ignored once there is a verdict.
        """
        if self.verdict is None or is_port_status(cause):
            self._note(cause, is_own)
            self._settled_by_port(now)

    def on_finding(self, now: float, finding: Finding) -> None:
        """Adopt the peer's verdict on the same path if this end has none, or only PATH.

        Ignore kinds that are not in `MIRRORED`.
        """
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
        """Handle the answer to the probe of `key` by `asker`; return further actions.

        An answer that was not asked for, or that is no longer awaited, is ignored.

        Parameters
        ----------
        now : float
        asker : int
            Rank that made the probe: this one, or the sender of the reply.
        key : ProbeKey
        is_answered : bool or None
            As in `r2ccl.transport.base.Probed`; None: the outcome proves nothing.
        detail : str
            Human-readable description of the answer; may be empty.
        is_stuck : bool
            True if the transport reports that the path only retransmits.
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
        """End the first probe or the round if it is overdue; return further actions."""
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
        # Further answers cannot change the verdict LINK, so do not wait for them.
        if kind is not VerdictKind.LINK and self._waits():
            return []
        if kind in (VerdictKind.PATH, VerdictKind.RAIL) and self._auxiliaries:
            more = self._ask(self._next_auxiliaries(), now)
            if more:
                return more
        self._settle(kind, now)
        return []

    def _judge(self) -> VerdictKind | None:
        """Return the kind of verdict that the answers give so far; None: more probes are needed."""
        columns = arrange(self._readings, self._local, self._remote)
        if columns.direct:
            return VerdictKind.FLOW if self._causes or self._is_stuck else VerdictKind.PEER_SLOW
        if columns.direct is None and not self._causes:
            return VerdictKind.PATH
        if not self._has_round:
            return None
        if not self._has_replied and not self._is_peer_reached():
            return VerdictKind.PEER
        # A path that failed counts as unanswered, even if the probe could not be made.
        return judge(columns._replace(direct=False))

    def _is_peer_reached(self) -> bool:
        return any(port.rank == self.path.peer for port in working(self._readings))

    def _waits(self) -> bool:
        needless = {self._back} if self._is_peer_reached() else set()
        return bool(self._open - needless)

    # Probes to make

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

    # Verdict

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
    """Return the auxiliaries for a diagnosis by rank `me`, best first.

    Auxiliaries whose path is up come first, then all others. In both groups, third ranks come
    before other rails. Ranks of one host may share a NIC, so at most one third rank per NIC is
    used, and none on the two NICs of the path. Third ranks are ordered from ``me + 1`` upwards, so
    that different ranks ask different third ranks. Other rails are ordered by their distance from
    the rail of the path, because RDMA probes are connected only from the same rail and the next
    one.

    Parameters
    ----------
    me : int
    path : PathKey
    nics : sequence of str
        NIC identifier of every rank on this rail; ranks with equal identifiers share a NIC.
    rails : collection of int
        Rails that auxiliaries may use, including the rail of the path.
    is_up : callable
        ``is_up(path)``: returns True if this path of rank `me` is up.
    bad : collection of Port
        Ports that are down or excluded, which are not used.
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
    """Return the other rails by distance from `rail` on the ring of `rails`, upwards first."""
    ring = sorted(rails)
    at = ring.index(rail)
    near = [ring[(at + step * way) % len(ring)] for step in range(1, len(ring)) for way in (1, -1)]
    return [other for other in dict.fromkeys(near) if other != rail]


#: Maximum number of auxiliaries of a diagnosis, and of one round.
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
