"""Rounds: the messages of the health agreement, and the two tables that give and take them.

`Member` is what every rank keeps, `Coordinator` what rank 0 keeps beside. How they play together,
and why no two ranks ever differ, is told in `r2ccl.failover.health.protocol`.

Pure tables: no I/O, no clock. Invariant: a promise given is kept until its commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from r2ccl.errors import InternalError, InvalidArgument
from r2ccl.failover.health.table import Findings, Health, RailShare


class Report(msgspec.Struct, frozen=True, tag="health.report"):
    """Control message: what the sender now finds of these rails, its own or a peer's."""

    news: tuple[RailShare, ...]


class Prepare(msgspec.Struct, frozen=True, tag="health.prepare"):
    """Control message: hold this; promise to start nothing that may have to be planned with it."""

    health: Health


class Promise(msgspec.Struct, frozen=True, tag="health.promise"):
    """Control message: the last collective started; not beyond the window until the commit."""

    version: int
    reached: int


class Commit(msgspec.Struct, frozen=True, tag="health.commit"):
    """Control message: plan every collective from `first_op` on with this version."""

    version: int
    first_op: int


Message: TypeAlias = Report | Prepare | Promise | Commit

#: The messages only the coordinator takes; it alone sends the others.
TO_COORDINATOR = (Report, Promise)


class AgreementLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of an agreement; ``window`` must be equal on all ranks.

    ``window``: collectives a rank may start between its promise and the commit. ``rest_s``: time
    from a commit to the next round. ``late_s``: a round that takes longer is reported, again after
    each further ``late_s``; default well above what a call that holds the interpreter costs.

    Raises
    ------
    InvalidArgument
        One is out of range.
    """

    window: int = 1
    rest_s: float = 0.02
    late_s: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1 or self.rest_s < 0 or self.late_s <= 0:
            raise InvalidArgument(
                f"{self}; allowed are window of 1 or more, rest_s of 0 or more, late_s above 0"
            )


class Member:
    """What every rank keeps: the versions it plans with, and its promise."""

    __slots__ = ("_plans", "_rank", "_window", "held", "limit", "started")

    def __init__(self, rank: int, health: Health, window: int) -> None:
        self._rank = rank
        self._window = window
        #: The newest version known here.
        self.held = health
        #: Number of the last collective started.
        self.started = 0
        #: The last collective the promise allows; None while nothing is promised.
        self.limit: int | None = None
        #: (first collective, version), both ascending: those still needed, the oldest in force.
        self._plans: list[tuple[int, Health]] = [(0, health)]

    def may_start(self, op: int) -> bool:
        """Whether the promise allows collective `op`."""
        return self.limit is None or op <= self.limit

    def start(self, op: int) -> Health:
        """Count collective `op` as started; once more is harmless. Returns what to plan it with."""
        if op not in (self.started, self.started + 1) or not self.may_start(op):
            raise InternalError(
                f"rank {self._rank}: collective {op} started after {self.started}, "
                f"promised not to pass {self.limit}"
            )
        self.started = op
        while len(self._plans) > 1 and self._plans[1][0] <= op:
            del self._plans[0]
        return self._plans[0][1]

    @property
    def steady(self) -> Health | None:
        """What all collectives are planned with until a promise is given; None: it depends."""
        return self._plans[0][1] if self.limit is None and len(self._plans) == 1 else None

    def skip_to(self, op: int) -> None:
        """Count all collectives up to `op` as started, planned with what was `steady`."""
        if self.steady is None or op < self.started:
            raise InternalError(
                f"rank {self._rank}: collectives up to {op} started unseen after {self.started}, "
                f"promised not to pass {self.limit}"
            )
        self.started = op

    def health_of(self, op: int) -> Health:
        """Return what to plan `op` with, the last collective started or one still to come."""
        final = self.started + self._window if self.limit is None else self.limit
        if not self.started <= op <= final:
            raise InternalError(
                f"rank {self._rank}: health of collective {op} asked; known is that of "
                f"{self.started} to {final}"
            )
        return next(health for first, health in reversed(self._plans) if first <= op)

    def prepare(self, message: Prepare) -> Promise | None:
        """Hold a version and promise; None for an old one."""
        health, held = message.health, self.held
        if health.version <= held.version:
            return None
        if health.version != held.version + 1 or self.limit is not None:
            raise InternalError(
                f"version {health.version} prepared, {held.version} is held"
                + (" and not committed" if self.limit is not None else "")
            )
        if (health.nranks, health.nrails, health.config) != (
            held.nranks, held.nrails, held.config,
        ):  # fmt: skip
            raise InternalError(
                f"version {health.version} is of {health.nranks} ranks, {health.nrails} rails, "
                f"configuration {health.config!r}; here it is {held.nranks}, {held.nrails}, "
                f"{held.config!r}"
            )
        self.held = health
        self.limit = self.started + self._window
        return Promise(health.version, self.started)

    def commit(self, message: Commit) -> bool:
        """Plan with the version held from its collective on; False for an old commit."""
        version, first = message.version, message.first_op
        if version < self.held.version or (version == self.held.version and self.limit is None):
            return False
        # Beyond the promise, or it may be planned already; not before the last version's first.
        earliest = max(self.limit or 0, self._plans[-1][0] - 1) + 1
        if version > self.held.version or first < earliest:
            raise InternalError(
                f"version {version} committed from collective {first} on; held is "
                f"{self.held.version}, which cannot begin before {earliest}"
            )
        self.limit = None
        # Of versions that begin at one collective only the newest is ever planned with.
        if self._plans[-1][0] == first:
            self._plans.pop()
        self._plans.append((first, self.held))
        return True


class Coordinator:
    """What rank 0 keeps beside: the findings of all ranks, and the round under way."""

    __slots__ = (
        "_findings",
        "_has_news",
        "_limits",
        "_newest",
        "_reached",
        "_rest_until",
        "missing",
    )

    def __init__(self, health: Health, limits: AgreementLimits) -> None:
        self._limits = limits
        self._newest = health
        self._findings = Findings(health)
        self._has_news = False
        self._reached: dict[int, int] = {}
        self._rest_until = float("-inf")
        #: Ranks whose promise the round under way waits for; empty: there is none.
        self.missing: frozenset[int] = frozenset()

    def report(self, reporter: int, news: Sequence[RailShare]) -> None:
        """Note what `reporter` found."""
        self._newest.changed(news)  # refuses what does not exist
        self._findings.note(reporter, news)
        self._has_news = True

    def begin(self, now: float) -> Prepare | None:
        """Begin a round if there is reason to, and it is time."""
        if not self._has_news or self.missing or now < self._rest_until:
            return None
        self._has_news = False
        merged = self._findings.merged(self._newest)
        if merged is self._newest:
            return None
        self._newest = merged
        self._reached = {}
        self.missing = frozenset(range(merged.nranks))
        return Prepare(merged)

    def promise(self, now: float, rank: int, message: Promise) -> Commit | None:
        """Note a promise; with the last one, commit."""
        version = self._newest.version
        if message.version > version:
            raise InternalError(
                f"rank {rank} promised version {message.version}, prepared is {version}"
            )
        if message.version < version or rank not in self.missing:
            return None
        self._reached[rank] = message.reached
        self.missing -= {rank}
        if self.missing:
            return None
        self._rest_until = now + self._limits.rest_s
        return Commit(version, max(self._reached.values()) + self._limits.window + 1)


__all__ = [
    "TO_COORDINATOR",
    "AgreementLimits",
    "Commit",
    "Coordinator",
    "Member",
    "Message",
    "Prepare",
    "Promise",
    "Report",
]
