"""Reports of a rank on its rails, its memory, its repairs and its calls.

The rails, memory and repairs are those of this rank in the job, for all its communicators. The
calls, their plans and the agreed health are those of one communicator. Any thread may make a
report, without waiting for a call; see `r2ccl.runtime.status`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.errors import R2cclError
from r2ccl.failover.context import RankContext
from r2ccl.failover.diagnosis.verdict import Verdict
from r2ccl.failover.health.driver import Known
from r2ccl.failover.migration.repairs import Repair
from r2ccl.planning.plan_cache import Planning
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.exclusion import Exclusions
from r2ccl.runtime.status import (
    HeldPath,
    MemoryReport,
    Operation,
    Pending,
    RailHealth,
    RankStatus,
    agreed,
    link_entries,
    path_entries,
    peer_entries,
    rails,
    spelled,
)
from r2ccl.runtime.waits import Waits
from r2ccl.types import Nic


class ReportedCalls(Protocol):
    """Interface through which the reports of a communicator read the state of its calls.

    Attributes
    ----------
    nconnects : int
        Number of calls and messages that connected data paths before their first slice.
    """

    nconnects: int

    @property
    def error(self) -> R2cclError | None:
        """Error that ended the job's communicators at this rank; None while they are in use."""
        ...

    def operation(self) -> Operation | None:
        """Return the collective in the data loop; None if there is none."""
        ...

    def known_health(self) -> Known | None:
        """Return the newest health that this rank has received; None in mode failstop."""
        ...

    def pending(self) -> Pending:
        """Return a description of the call that blocks this rank, and of its wait."""
        ...


class Reports:
    """Reports of a rank; some of them cover the calls of one communicator.

    Parameters
    ----------
    job : RankContext
        This rank in the job.
    loop : DataLoop
        Data loop of the job.
    calls : ReportedCalls
        Calls of the communicator.
    waits : Waits
        Waits of these calls.
    exclusions : Exclusions
    """

    def __init__(
        self,
        job: RankContext,
        loop: DataLoop,
        calls: ReportedCalls,
        waits: Waits,
        exclusions: Exclusions,
    ) -> None:
        self._job = job
        self._loop = loop
        self._links = loop.links
        self._failover = loop.failover
        self._calls = calls
        self._waits = waits
        self._exclusions = exclusions

    def repairs(self) -> tuple[Repair, ...]:
        """Return the latest repairs of this rank's paths, oldest first."""
        return tuple(self._failover.migration.log.repairs.copy())

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the last verdict on each diagnosed path; empty if failures are not diagnosed."""
        diagnosis = self._failover.diagnosis
        return () if diagnosis is None else diagnosis.verdicts()

    def rails(self, nics: Sequence[Nic]) -> tuple[RailHealth, ...]:
        """Return the state of every rail; ``nics[i]`` is the local NIC of rail i."""
        self._loop.settle_if_free()
        return rails(self._links, self.repairs(), nics, self._exclusions.rails())

    def memory(self, landing_nbytes: int) -> MemoryReport:
        """Return the memory in use.

        `landing_nbytes` is the size of the landing places of calls that run in Python.
        """
        self._loop.settle_if_free()
        compiled = self._loop.compiled
        arena_nbytes = 0 if compiled is None else compiled.arena_nbytes
        return MemoryReport(
            landing_nbytes + arena_nbytes,
            self._links.eager_nbytes(),
            *self._job.transport.memory_use(),
        )

    def status(
        self,
        peers: Iterable[PeerInfo],
        last_heard: Callable[[int], float | None],
        planning: Planning,
        memory: MemoryReport,
    ) -> RankStatus:
        """Return the full status of this rank, including the communicator's collective in progress.

        Parameters
        ----------
        peers : iterable of PeerInfo
            Every other rank of the job.
        last_heard : callable
            Maps a rank to the time of its last sign of life, in seconds of the engine's clock; to
            None if this rank has no session with that rank.
        planning : Planning
        memory : MemoryReport
        """
        calls = self._calls
        pending, running = calls.pending(), calls.operation()
        return RankStatus(
            rank=self._job.rank,
            nranks=self._job.nranks,
            now_s=pending.now_s,
            error="" if calls.error is None else str(calls.error),
            nconnects=calls.nconnects,
            planning=planning,
            memory=memory,
            pending=pending,
            operations=() if running is None else (running,),
            paths=path_entries(self._links),
            links=link_entries(self._links),
            peers=peer_entries(peers, last_heard, self._waits.last_ops()),
            repairs=self.repairs(),
            health=agreed(calls.known_health()),
            verdicts=spelled(self.verdicts()),
            held=tuple(
                HeldPath(*key, hold_s) for key, hold_s in self._failover.failback.held().items()
            ),
        )


__all__ = ["ReportedCalls", "Reports"]
