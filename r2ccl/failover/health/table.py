"""Health: the one table a planner reads, and how many ranks' findings become one table.

A *share* is what one rail of one rank can carry, in sixteenths of that rail's nominal rate: 0 is
down, `WHOLE` is all of it. Shares are coarse on purpose: two ranks that plan from equal tables
build equal schedules, and noise of a measurement is no reason for a new plan. When a share has
changed *enough* to be worth reporting is for whoever measures it to decide, with a threshold that
differs on the way down and up; this table has no memory of its own.

Pure values: no I/O, no clock. Invariants: a `Health` that exists is valid, on the wire too; equal
findings give equal tables, in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument

#: The share of a rail that carries all it should.
WHOLE = 16


class RailShare(NamedTuple):
    """What `rail` of `rank` can carry, in sixteenths of its nominal rate.

    ``toward`` is the rank that the measured slices were sent to, -1 if nothing was measured. A low
    share may be due to that rank's port.
    """

    rank: int
    rail: int
    share: int
    toward: int = -1


class Health(msgspec.Struct, frozen=True):
    """Version and content of what all ranks plan a collective from.

    Takes one byte a rail on the wire: 8 KiB for 1,024 ranks with eight rails.

    Parameters
    ----------
    version : int
        Counts agreed changes, from 0. Equal versions of one communicator have equal content.
    nrails : int
        Rails of each rank.
    shares : bytes, nranks x nrails
        Share of each rail, rank by rank.
    config : str
        Fingerprint of everything else a planner reads and no one may change: the settings
        (`r2ccl.config.Config.digest`) and what the shares are shares of.

    Raises
    ------
    InvalidArgument
        The table is empty or has a share above `WHOLE`; to a decoder it is a malformed message.
    """

    version: int
    nrails: int
    shares: bytes
    config: str = ""

    def __post_init__(self) -> None:
        if self.version < 0 or self.nrails < 1:
            raise InvalidArgument(
                f"version {self.version}, {self.nrails} rails; versions count from 0, and a rank "
                "has at least one rail"
            )
        if not self.shares or len(self.shares) % self.nrails:
            raise InvalidArgument(
                f"{len(self.shares)} shares; with {self.nrails} rails a rank, give that many for "
                "each of at least one rank"
            )
        if max(self.shares) > WHOLE:
            raise InvalidArgument(f"share {max(self.shares)}; allowed is 0 (down) to {WHOLE}")

    @classmethod
    def whole(cls, nranks: int, nrails: int, config: str = "") -> Health:
        """Version 0: nothing is broken."""
        return cls(0, nrails, bytes([WHOLE]) * (nranks * nrails), config)

    @property
    def nranks(self) -> int:
        """Number of ranks in the table."""
        return len(self.shares) // self.nrails

    def share(self, rank: int, rail: int) -> int:
        """Share of `rail` of `rank`, 0 to `WHOLE`.

        Raises
        ------
        InvalidArgument
            There is no such rank or rail.
        """
        return self.shares[self._index(rank, rail)]

    def capacity(self, rank: int) -> int:
        """Sum of the shares of a rank; ``nrails * WHOLE`` when it is whole."""
        start = self._index(rank, 0)
        return sum(self.shares[start : start + self.nrails])

    def rails(self, rank: int, peer: int) -> tuple[int, ...]:
        """Rails that are up at both ranks."""
        one, other = self._index(rank, 0), self._index(peer, 0)
        return tuple(
            rail
            for rail in range(self.nrails)
            if self.shares[one + rail] and self.shares[other + rail]
        )

    def degraded(self) -> tuple[int, ...]:
        """Ranks with a rail that is not whole."""
        full = self.nrails * WHOLE
        return tuple(rank for rank in range(self.nranks) if self.capacity(rank) < full)

    def changed(self, news: Iterable[RailShare]) -> Health:
        """Return the next version with `news` in it, or this one if they change nothing.

        Raises
        ------
        InvalidArgument
            `news` name a rank, rail or share that does not exist.
        """
        shares = bytearray(self.shares)
        for rank, rail, share, _ in news:
            _check_share(share)
            shares[self._index(rank, rail)] = share
        if shares == self.shares:
            return self
        return msgspec.structs.replace(self, version=self.version + 1, shares=bytes(shares))

    def of_ranks(self, ranks: Sequence[int]) -> Health:
        """Return the table of some ranks, renumbered in the order given; the version stays."""
        starts = [self._index(rank, 0) for rank in ranks]
        rows = (self.shares[start : start + self.nrails] for start in starts)
        return msgspec.structs.replace(self, shares=b"".join(rows))

    def _index(self, rank: int, rail: int) -> int:
        if not 0 <= rank < self.nranks or not 0 <= rail < self.nrails:
            raise InvalidArgument(
                f"rail {rail} of rank {rank}; there are ranks 0 to {self.nranks - 1} with rails "
                f"0 to {self.nrails - 1}"
            )
        return rank * self.nrails + rail


class Findings:
    """Every rank's last word on every rail; the worst one counts.

    So a rail that two ranks doubt is back only when both take it back, and what is merged does not
    depend on whose word came first. The shares of the initial table count as said by each rail's
    own rank. Memory: a word per rail and rank that doubts it.

    What a rank measures is an edge: its own port and the one it sends to, of which the slower
    counts. In a ring both edges at a slow port are slow, so where the next rank finds its own edge
    slow too, a port is as good as the better of its two::

        edge       0 -> 1   1 -> 2   2 -> 3   3 -> 0
        measured     16        4        4       16
        port            1: 16      2: 4     3: 16

    A slow edge between two good ones counts for the port that sends: one direction is slow, and
    nothing tells which port's.
    """

    def __init__(self, health: Health) -> None:
        self._words: dict[tuple[int, int], dict[int, RailShare]] = {}
        for rank in health.degraded():
            for rail in range(health.nrails):
                self.note(rank, [RailShare(rank, rail, health.share(rank, rail))])

    def note(self, reporter: int, news: Iterable[RailShare]) -> None:
        """Replace what `reporter` said before about the rails in `news`, which must exist."""
        for word in news:
            words = self._words.setdefault((word.rank, word.rail), {})
            if word.share == WHOLE:
                words.pop(reporter, None)
            else:
                words[reporter] = word

    def merged(self, health: Health) -> Health:
        """Return the version after `health` that says what is known now, or `health` itself."""
        edges = {
            key: word
            for key, words in self._words.items()
            for reporter, word in words.items()
            if reporter == key[0] and word.toward >= 0
        }
        before = {(edge.toward, edge.rail): edge for edge in edges.values()}

        def share(word: RailShare) -> int:
            key = (word.rank, word.rail)
            if edges.get(key) is not word or (word.toward, word.rail) not in edges:
                return word.share
            return max(word.share, before[key].share if key in before else WHOLE)

        return health.changed(
            RailShare(rank, rail, min(map(share, words.values()), default=WHOLE))
            for (rank, rail), words in self._words.items()
        )


def to_share(rate: float, nominal_rate: float) -> int:
    """Round a measured rate to a share; what still carries anything is never called down.

    Raises
    ------
    InvalidArgument
        A negative rate, or no nominal one.
    """
    if rate < 0 or nominal_rate <= 0:
        raise InvalidArgument(
            f"rate {rate} of nominal {nominal_rate}; give one of 0 or more, of one above 0"
        )
    if rate == 0:
        return 0
    return max(1, round(WHOLE * min(1.0, rate / nominal_rate)))


def _check_share(share: int) -> None:
    if not 0 <= share <= WHOLE:
        raise InvalidArgument(f"share {share}; allowed is 0 (down) to {WHOLE}")


__all__ = ["WHOLE", "Findings", "Health", "RailShare", "to_share"]
