"""Health: the table of rail bandwidths that planners read, and how reports are merged into it.

A *share* is the bandwidth that one rail of one rank has left, in sixteenths of the full rate: 0 is
down, `WHOLE` is the full rate. The full rate is the rate of the rank's best rail or, if all its
rails are slow and the nominal rate is known, the nominal rate
(`r2ccl.failover.bandwidth.protocol`). Shares are coarse on purpose: measurement noise must not
cause a new plan. Ranks that plan from equal tables build equal schedules. The code that measures a
share decides when a change is large enough to report; this table keeps no history.

An *excluded* rail of a rank is one that an operator has taken out of use (``R2CC_FAILED_NICS``,
`Communicator.exclude`). Its share is 0 whatever is reported, and its paths are not connected.

Invariants: every `Health` is valid, including one decoded from a message; equal findings give equal
tables, whatever the order of the reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument

#: Share of a rail that has its full rate.
WHOLE = 16


class RailShare(NamedTuple):
    """Share of one rail of one rank, as reported by a rank.

    Attributes
    ----------
    rank, rail : int
        Rail whose share is reported.
    share : int
        Bandwidth left, 0 (down) to `WHOLE`.
    toward : int
        Rank that the measured slices were sent to; -1 if nothing was measured. The port of that
        rank may be the cause of a low share.
    """

    rank: int
    rail: int
    share: int
    toward: int = -1


class Health(msgspec.Struct, frozen=True):
    """Table from which all ranks plan a collective: the share of every rail, with a version.

    On the wire, the shares take one byte per rank and rail: 8 KiB for 1,024 ranks with 8 rails.

    Parameters
    ----------
    version : int
        0 at first; each round of the agreement adds 1. Within a communicator, equal versions have
        equal content.
    nrails : int
        Number of rails per rank.
    shares : bytes, nranks x nrails
        Share of each rail, ordered by rank, then by rail.
    config : str
        Fingerprint of the settings that all ranks must share (`r2ccl.config.Config.digest`); equal
        in all versions.
    excluded : tuple of (int, int)
        Rank and rail of each excluded rail, in ascending order; their shares are 0.

    Raises
    ------
    InvalidArgument
        If the table is empty or incomplete, a share exceeds `WHOLE`, the version is negative, or an
        excluded rail does not exist or its share is not 0. For a table in a message, msgspec raises
        `ValidationError` instead. Also raised by every method except `excluded_rails` for a rank or
        rail that does not exist.
    """

    version: int
    nrails: int
    shares: bytes
    config: str = ""
    excluded: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.version < 0 or self.nrails < 1:
            raise InvalidArgument(
                f"a health table of version {self.version} with {self.nrails} rails; allowed are a "
                "version of 0 or more and at least one rail"
            )
        if not self.shares or len(self.shares) % self.nrails:
            raise InvalidArgument(
                f"{len(self.shares)} shares given for {self.nrails} rails per rank: the number of "
                "shares must be a positive multiple of the number of rails"
            )
        if max(self.shares) > WHOLE:
            raise InvalidArgument(f"share {max(self.shares)}; allowed is 0 (down) to {WHOLE}")
        for rank, rail in self.excluded:
            if self.share(rank, rail):
                raise InvalidArgument(
                    f"rail {rail} of rank {rank} is excluded, but its share is "
                    f"{self.share(rank, rail)}; allowed is 0"
                )

    @classmethod
    def whole(
        cls,
        nranks: int,
        nrails: int,
        config: str = "",
        excluded: Iterable[tuple[int, int]] = (),
    ) -> Health:
        """Return the table of version 0: every rail that is not excluded has its full rate."""
        whole = cls(0, nrails, bytes([WHOLE]) * (nranks * nrails), config)
        return msgspec.structs.replace(whole.changed((), excluded), version=0)

    @property
    def nranks(self) -> int:
        """Number of ranks in the table."""
        return len(self.shares) // self.nrails

    def share(self, rank: int, rail: int) -> int:
        """Return the share of `rail` of `rank`, 0 to `WHOLE`."""
        return self.shares[self._index(rank, rail)]

    def shares_of(self, rank: int) -> bytes:
        """Return the shares of all rails of `rank`."""
        start = self._index(rank, 0)
        return self.shares[start : start + self.nrails]

    def capacity(self, rank: int) -> int:
        """Return the sum of the shares of all rails of `rank`, at most ``nrails * WHOLE``."""
        return sum(self.shares_of(rank))

    def rails(self, rank: int, peer: int) -> tuple[int, ...]:
        """Return the rails that are up at both `rank` and `peer`."""
        one, other = self._index(rank, 0), self._index(peer, 0)
        return tuple(
            rail
            for rail in range(self.nrails)
            if self.shares[one + rail] and self.shares[other + rail]
        )

    def degraded(self) -> tuple[int, ...]:
        """Return the ranks that have a rail with less than its full rate."""
        full = self.nrails * WHOLE
        return tuple(rank for rank in range(self.nranks) if self.capacity(rank) < full)

    def changed(
        self, news: Iterable[RailShare], excluded: Iterable[tuple[int, int]] | None = None
    ) -> Health:
        """Return the next version, with `news` applied, or this table if nothing changes.

        Parameters
        ----------
        news : iterable of RailShare
        excluded : iterable of (int, int), optional
            The excluded rails of the next version. Default: those of this table. A rail that is no
            longer excluded needs a share in `news`.

        Raises
        ------
        InvalidArgument
            If a share in `news` is not 0 to `WHOLE`.
        """
        out = self.excluded if excluded is None else tuple(sorted(excluded))
        shares = bytearray(self.shares)
        for rank, rail, share, _ in news:
            _check_share(share)
            shares[self._index(rank, rail)] = share
        for rank, rail in out:
            shares[self._index(rank, rail)] = 0
        if shares == self.shares and out == self.excluded:
            return self
        return msgspec.structs.replace(
            self, version=self.version + 1, shares=bytes(shares), excluded=out
        )

    def of_ranks(self, ranks: Sequence[int]) -> Health:
        """Return the table of `ranks` only, renumbered in that order, with the same version.

        Raises
        ------
        InvalidArgument
            If `ranks` is empty.
        """
        starts = [self._index(rank, 0) for rank in ranks]
        rows = (self.shares[start : start + self.nrails] for start in starts)
        excluded = tuple(
            (new, rail) for new, old in enumerate(ranks) for rail in self.excluded_rails(old)
        )
        return msgspec.structs.replace(self, shares=b"".join(rows), excluded=excluded)

    def excluded_rails(self, rank: int) -> tuple[int, ...]:
        """Return the excluded rails of `rank`, in ascending order."""
        return tuple(rail for of, rail in self.excluded if of == rank)

    def _index(self, rank: int, rail: int) -> int:
        if not 0 <= rank < self.nranks or not 0 <= rail < self.nrails:
            raise InvalidArgument(
                f"rail {rail} of rank {rank} does not exist; allowed are ranks 0 to "
                f"{self.nranks - 1} with rails 0 to {self.nrails - 1}"
            )
        return rank * self.nrails + rail


class Findings:
    """Last report of every rank on every rail; the lowest share reported for a rail counts.

    A rail that two ranks reported as degraded is therefore whole again only after both withdraw
    their reports, and the merged table does not depend on the order of the reports. Shares below
    `WHOLE` in the initial table count as reported by the rank that owns the rail.

    A rank measures an edge, which consists of its own port and the port it sends to; the slower
    port limits the edge. In a ring, both edges at a slow port are slow. Suppose that port A sends
    over a slow edge to port B, and that B also sends over a slow edge. A then gets the share of the
    faster of its own two edges, outgoing and incoming::

        edge       0 -> 1   1 -> 2   2 -> 3   3 -> 0
        measured     16        4        4       16
        port            1: 16      2: 4     3: 16

    A slow edge between two good edges is attributed to the sending port: one direction of one of
    its two ports is slow, and the measurements do not show which port.
    """

    def __init__(self, health: Health) -> None:
        self._words: dict[tuple[int, int], dict[int, RailShare]] = {}
        for rank in health.degraded():
            for rail in range(health.nrails):
                self.note(rank, [RailShare(rank, rail, health.share(rank, rail))])

    def note(self, reporter: int, news: Iterable[RailShare]) -> None:
        """Store each share in `news` as the last report of rank `reporter` on that rail.

        A share of `WHOLE` withdraws the report. The ranks and rails in `news` must exist; this is
        not checked.
        """
        for word in news:
            words = self._words.setdefault((word.rank, word.rail), {})
            if word.share == WHOLE:
                words.pop(reporter, None)
            else:
                words[reporter] = word

    def merged(self, health: Health, excluded: Iterable[tuple[int, int]] | None = None) -> Health:
        """Return the version after `health`, with all findings, or `health` if nothing changes.

        `excluded` lists, as (rank, rail), the excluded rails of the new version; default: those of
        `health`.
        """
        edges = {
            key: word
            for key, words in self._words.items()
            for reporter, word in words.items()
            if reporter == key[0] and word.toward >= 0
        }
        #: Highest share of the slow edges that lead to each port.
        before: dict[tuple[int, int], int] = {}
        for edge in edges.values():
            port = edge.toward, edge.rail
            before[port] = max(edge.share, before.get(port, 0))

        def share(word: RailShare) -> int:
            key = (word.rank, word.rail)
            if edges.get(key) is not word or (word.toward, word.rail) not in edges:
                return word.share
            return max(word.share, before.get(key, WHOLE))

        # A rail that was excluded may have no report, so its share is computed too.
        keys = dict.fromkeys((*self._words, *health.excluded))
        return health.changed(
            (
                RailShare(*key, min(map(share, self._words.get(key, {}).values()), default=WHOLE))
                for key in keys
            ),
            excluded,
        )


def _check_share(share: int) -> None:
    if not 0 <= share <= WHOLE:
        raise InvalidArgument(f"share {share}; allowed is 0 (down) to {WHOLE}")


__all__ = ["WHOLE", "Findings", "Health", "RailShare"]
