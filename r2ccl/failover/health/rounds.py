"""Rounds of the health agreement: the messages, and the state that they change.

Each rank keeps a `Member`, and a `Subtree` that collects promises. Rank 0 also keeps a
`Coordinator`. `r2ccl.failover.health.protocol` explains the protocol and proves that ranks never
disagree.

Invariant: a rank keeps its promise until the matching commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from r2ccl.bootstrap.overlay import children
from r2ccl.errors import InternalError, InvalidArgument
from r2ccl.failover.health.table import Findings, Health, RailShare


class Report(msgspec.Struct, frozen=True, tag="health.report"):
    """Control message: new shares of rails, of the sender or a peer, as the sender sees them.

    `number` counts the reports of the sender. A report may overtake the previous report, if the
    previous report travels through other ranks and the later one over a session opened in between.
    """

    news: tuple[RailShare, ...]
    number: int = 0


class ExcludeRails(msgspec.Struct, frozen=True, tag="health.exclude"):
    """Control message: asks the coordinator to exclude rails, or to end their exclusion.

    ``number`` identifies the request in the answer. ``ports`` lists the rails as (rank, rail).
    ``is_excluded`` is True to exclude them, False to end their exclusion.
    """

    number: int
    ports: tuple[tuple[int, int], ...]
    is_excluded: bool


class RailsExcluded(msgspec.Struct, frozen=True, tag="health.excluded"):
    """Control message: answer to the `ExcludeRails` with the same ``number``.

    ``refusal`` is the reason why nothing was changed; if it is empty, the request is in force from
    health ``version`` on.
    """

    number: int
    version: int
    refusal: str = ""


class Prepare(msgspec.Struct, frozen=True, tag="health.prepare"):
    """Control message: asks the receiver to hold `health` and to answer with a `Promise`."""

    health: Health


class Promise(msgspec.Struct, frozen=True, tag="health.promise"):
    """Control message: promise of all ranks in the sender's subtree, valid until the `Commit`.

    After its promise, each of these ranks starts at most `AgreementLimits.window` further
    collectives. `reached` is the highest number of a collective that any of these ranks had started
    when it promised.
    """

    version: int
    reached: int


class Commit(msgspec.Struct, frozen=True, tag="health.commit"):
    """Control message: all ranks plan collectives from `first_op` on with `version`."""

    version: int
    first_op: int


Message: TypeAlias = Report | Prepare | Promise | Commit | ExcludeRails | RailsExcluded


class AgreementLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an agreement.

    Attributes
    ----------
    window : int
        Maximum number of collectives that a rank starts between its promise and the commit; 1 or
        more, and equal on all ranks.
    rest_s : float
        Shortest time from a commit to the next round, in seconds.
    late_s : float
        Duration of a round after which a message is logged, and again after each further `late_s`.
        The default is well above the time for which a call holds the interpreter lock.

    Raises
    ------
    InvalidArgument
        If a limit is out of range.
    """

    window: int = 1
    rest_s: float = 0.02
    late_s: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1 or self.rest_s < 0 or self.late_s <= 0:
            raise InvalidArgument(
                f"{self}: window must be at least 1, rest_s at least 0, and late_s above 0"
            )


class Member:
    """State that each rank keeps: the health versions that it plans with, and its promise."""

    __slots__ = ("_plans", "_rank", "_window", "held", "limit", "started")

    def __init__(self, rank: int, health: Health, window: int) -> None:
        self._rank = rank
        self._window = window
        #: Newest health this rank has received.
        self.held = health
        #: Number of the last collective started.
        self.started = 0
        #: Last collective that the promise allows; None while there is no promise.
        self.limit: int | None = None
        #: (first collective, health) of the committed versions still needed, both in ascending
        #: order. The first entry is the one in use.
        self._plans: list[tuple[int, Health]] = [(0, health)]

    def may_start(self, op: int) -> bool:
        """Return whether the promise allows collective `op` to start."""
        return self.limit is None or op <= self.limit

    def start(self, op: int) -> Health:
        """Count collective `op` as started and return its health; see `Agreement.start`."""
        if op not in (self.started, self.started + 1) or not self.may_start(op):
            bound = "" if self.limit is None else f", and none after {self.limit} until the Commit"
            raise InternalError(
                f"rank {self._rank}: collective {op} started after {self.started}: the next one "
                f"must be {self.started} (again) or {self.started + 1}{bound}"
            )
        self.started = op
        while len(self._plans) > 1 and self._plans[1][0] <= op:
            del self._plans[0]
        return self._plans[0][1]

    @property
    def steady(self) -> Health | None:
        """Health of all collectives until the next promise; None: call `start` for each."""
        return self._plans[0][1] if self.limit is None and len(self._plans) == 1 else None

    def skip_to(self, op: int) -> None:
        """Count all collectives up to `op` as started; see `Agreement.skip_to`."""
        if self.steady is None or op < self.started:
            raise InternalError(
                f"rank {self._rank}: cannot count collectives up to {op} as started: the last one "
                f"started is {self.started}"
                + ("" if self.limit is None else f", the last one allowed now is {self.limit}")
            )
        self.started = op

    def prepare(self, message: Prepare) -> Promise | None:
        """Hold the health of `message` and return the promise; None if the version is not new.

        Raises
        ------
        InternalError
            If the version does not follow the held version, if the held version is not committed,
            or if the new table differs from the held table in size or configuration.
        """
        health, held = message.health, self.held
        if health.version <= held.version:
            return None
        if health.version != held.version + 1 or self.limit is not None:
            raise InternalError(
                f"health version {health.version} prepared, but version {held.version} is held"
                + (" and not committed" if self.limit is not None else "")
            )
        if (health.nranks, health.nrails, health.config) != (
            held.nranks, held.nrails, held.config,
        ):  # fmt: skip
            raise InternalError(
                f"health version {health.version} is a table of {health.nranks} ranks, "
                f"{health.nrails} rails, configuration {health.config!r}; expected {held.nranks} "
                f"ranks, {held.nrails} rails, configuration {held.config!r}"
            )
        self.held = health
        self.limit = self.started + self._window
        return Promise(health.version, self.started)

    def commit(self, message: Commit) -> bool:
        """Plan with the held version from its first collective on; return False if already done.

        Raises
        ------
        InternalError
            If the version is not held. Also if its first collective may be planned already, or
            precedes the first collective of the previous version.
        """
        version, first = message.version, message.first_op
        if version < self.held.version or (version == self.held.version and self.limit is None):
            return False
        # `first` must be beyond the promise, since collectives up to the limit may already be
        # planned, and not before the first collective of the preceding version.
        earliest = max(self.limit or 0, self._plans[-1][0] - 1) + 1
        if version > self.held.version or first < earliest:
            raise InternalError(
                f"health version {version} committed from collective {first} on, but the newest "
                f"version prepared is {self.held.version}, and no commit may take effect before "
                f"collective {earliest}"
            )
        self.limit = None
        # If several versions begin at the same collective, only the newest is ever used.
        if self._plans[-1][0] == first:
            self._plans.pop()
        self._plans.append((first, self.held))
        return True


class Subtree:
    """Promises of one rank and of the subtrees of its children, in the current round.

    Parameters
    ----------
    rank : int
    health : Health
        Initial health; defines the number of ranks.
    """

    __slots__ = ("_rank", "_reached", "_version", "children", "missing")

    def __init__(self, rank: int, health: Health) -> None:
        self._rank = rank
        self.children = children(rank, health.nranks)
        #: Version that promises are collected for.
        self._version = health.version
        self._reached = 0
        #: Ranks, among this one and its children, whose promises are missing; empty if none is.
        self.missing: frozenset[int] = frozenset()

    def begin(self, version: int) -> None:
        """Begin to collect the promises for `version`; drop promises for earlier versions."""
        self._version = version
        self._reached = 0
        self.missing = frozenset((self._rank, *self.children))

    def promise(self, rank: int, message: Promise) -> Promise | None:
        """Store the promise of `rank`; return the promise of the subtree once none is missing.

        Ignore a promise of an earlier version, and a repeated promise.

        Raises
        ------
        InternalError
            If the promise is for a version that was not prepared.
        """
        if message.version > self._version:
            raise InternalError(
                f"rank {rank} promised health version {message.version}, but the newest version "
                f"prepared is {self._version}"
            )
        if message.version < self._version or rank not in self.missing:
            return None
        self._reached = max(self._reached, message.reached)
        self.missing -= {rank}
        return None if self.missing else Promise(self._version, self._reached)


class Coordinator:
    """State of rank 0 as coordinator: reports of all ranks, excluded rails, and current round."""

    __slots__ = (
        "_excluded", "_excluded_from", "_findings", "_has_news", "_is_running", "_limits",
        "_newest", "_numbers", "_rest_until",
    )  # fmt: skip

    def __init__(self, health: Health, limits: AgreementLimits) -> None:
        self._limits = limits
        self._newest = health
        self._findings = Findings(health)
        #: Excluded rails of the next version, and the version from which on they are in force.
        self._excluded = frozenset(health.excluded)
        self._excluded_from = health.version
        self._has_news = False
        self._is_running = False
        self._rest_until = float("-inf")
        #: Number of the last report of each rank on each rail: (reporter, rank, rail) -> number.
        self._numbers: dict[tuple[int, int, int], int] = {}

    def unheard(self, reporter: int, report: Report) -> tuple[RailShare, ...]:
        """Return the shares in `report` that no later report of `reporter` has replaced.

        The number of the report is stored per rail, so that older reports can be recognized.
        """
        found = []
        for word in report.news:
            key = reporter, word.rank, word.rail
            if report.number >= self._numbers.get(key, 0):
                self._numbers[key] = report.number
                found.append(word)
        return tuple(found)

    def report(self, reporter: int, news: Sequence[RailShare]) -> None:
        """Store the shares in `news`, reported by rank `reporter`.

        Raises
        ------
        InvalidArgument
            If a rank or rail does not exist, or a share is not 0 to `WHOLE`.
        """
        self._newest.changed(news)  # checks the news
        self._findings.note(reporter, news)
        self._has_news = True

    def exclude(self, request: ExcludeRails) -> RailsExcluded:
        """Schedule `request` for the next round, or refuse `request`; return the answer.

        An exclusion that leaves a rank without a rail, or takes the last common rail from two
        ranks, is refused.

        Raises
        ------
        InvalidArgument
            If a rank or rail to exclude does not exist.
        """
        ports = frozenset(request.ports)
        wanted = self._excluded | ports if request.is_excluded else self._excluded - ports
        before = self._findings.merged(self._newest, self._excluded)
        after = self._findings.merged(self._newest, wanted)
        refusal = _without_rail(before, after, wanted - self._excluded)
        if not refusal:
            self.adopt_excluded(wanted)
        return RailsExcluded(request.number, self._excluded_from, refusal)

    def adopt_excluded(self, excluded: Iterable[tuple[int, int]]) -> None:
        """Exclude exactly these rails, each given as (rank, rail), from the next round on."""
        wanted = frozenset(excluded)
        if wanted != self._excluded:
            self._excluded, self._has_news = wanted, True
            self._excluded_from = self._newest.version + 1

    def begin(self, now: float) -> Prepare | None:
        """Begin a round if reports change the health, no round is running and the pause is over.

        Return the message that begins the round, or None. A round is also run if a later request
        undoes an earlier request, because the answers to both requests name the version of this
        round.
        """
        if not self._has_news or self._is_running or now < self._rest_until:
            return None
        self._has_news = False
        merged = self._findings.merged(self._newest, self._excluded)
        if merged is self._newest:
            if self._excluded_from <= merged.version:
                return None
            merged = msgspec.structs.replace(merged, version=merged.version + 1)
        self._newest = merged
        self._is_running = True
        return Prepare(merged)

    def end(self, now: float, promise: Promise) -> Commit:
        """End the round, given the joint promise of all ranks; return the message for all ranks."""
        self._is_running = False
        self._rest_until = now + self._limits.rest_s
        return Commit(promise.version, promise.reached + self._limits.window + 1)


def _without_rail(before: Health, after: Health, ports: Iterable[tuple[int, int]]) -> str:
    """Return the reason why `ports` must not be excluded; empty if they may be excluded.

    `before` is the health without the exclusion of `ports`, `after` the health with the exclusion.
    """
    for rank in sorted({rank for rank, _ in ports}):
        if not after.capacity(rank):
            return f"rank {rank} would have no rail left"
        for peer in range(after.nranks):
            if peer != rank and before.rails(rank, peer) and not after.rails(rank, peer):
                return f"ranks {rank} and {peer} would have no common rail left"
    return ""


__all__ = [
    "AgreementLimits",
    "Commit",
    "Coordinator",
    "ExcludeRails",
    "Member",
    "Message",
    "Prepare",
    "Promise",
    "RailsExcluded",
    "Report",
    "Subtree",
]
