"""Data path of one rank, assembled as the engine does it, without threads."""

from __future__ import annotations

from typing import Any

from r2ccl.failover.context import RankContext
from r2ccl.failover.failover import Failover
from r2ccl.failover.migration.links import Links
from r2ccl.runtime.progress import Progress


class DataPath:
    """Links, failover and loop of one rank; `parts` are fields of `RankContext`."""

    def __init__(self, rank: int, nranks: int, **parts: Any) -> None:
        context = RankContext(rank, nranks, **parts)
        self.links = Links(context)
        self.failover = Failover(context, self.links)
        self.migration = self.failover.migration
        self.revocation = self.failover.revocation
        self.progress = Progress(context, self.links, self.failover)
