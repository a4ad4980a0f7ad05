"""The function `simulate`, which runs a job on simulated ranks with the faults of a plan.

A run uses one thread and a virtual clock that jumps to the next event. The number of events is
limited, so each run ends: with a `SimOutcome`, or with a `Violation`.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

import msgspec

from r2ccl.errors import R2cclError
from r2ccl.failover.diagnosis.verdict import Verdict
from r2ccl.failover.health.table import Health
from r2ccl.testing.simulation.checks import Checker, Violation
from r2ccl.testing.simulation.network import (
    DELIVER,
    Act,
    Cut,
    Fate,
    MessageKind,
    SimMessage,
    SimNetwork,
    Timeline,
    Wire,
)
from r2ccl.testing.simulation.plan import (
    CutPath,
    Exclude,
    FailurePlan,
    Fault,
    Hold,
    Kill,
    Lose,
    NicDown,
    Noise,
    Stop,
    Workload,
)
from r2ccl.testing.simulation.rank import RankPhase, SimRank
from r2ccl.testing.simulation.work import SimWork

MAX_EVENTS = 200_000
#: To detect late writes, a simulation with faults continues after the last rank is done: for this
#: time in seconds, plus the longest `late_us` of the faults.
_AFTERMATH_S = 0.05


class SimOutcome(msgspec.Struct, frozen=True):
    """Result of a run.

    Attributes
    ----------
    errors : tuple of R2cclError or None
        Error that ended the communicator at each rank; None if there was none, or the rank was
        killed.
    ncalls : tuple of int
        Number of calls that each rank completed.
    nevents, nmessages : int
        Number of events of the timeline, and number of messages sent, including control frames.
    time_s : float
        Virtual time at the end of the run, in seconds.
    trace : list of tuple
        Actions of the network and the ranks; each tuple begins with the virtual time in seconds.
    repairs : int
        Number of `Repair` records of all ranks. Each end of a path adds one when the path fails or
        is excluded, even if the path is never restored.
    interruption_s : float
        Time in seconds from the earliest `failed_s` to the earliest `first_byte_s` of all `Repair`
        records: from the first failure or exclusion of a path until a missing slice began to
        arrive. 0 if no record has a `first_byte_s`.
    nbypasses : int
        Number of bypass connections made.
    verdicts : tuple of tuple of Verdict
        Each rank's newest verdict on each of its paths.
    known : tuple of Health
        Newest health that each rank knows.
    plans : dict of int to Health
        Health with which each collective was planned, by collective number, from 1.
    began : dict of int to int
        Number of events before the first rank planned each collective, by collective number.
    """

    errors: tuple[R2cclError | None, ...]
    ncalls: tuple[int, ...]
    nevents: int
    nmessages: int
    time_s: float
    trace: list[tuple[Any, ...]]
    repairs: int
    interruption_s: float
    nbypasses: int
    verdicts: tuple[tuple[Verdict, ...], ...]
    known: tuple[Health, ...]
    plans: dict[int, Health]
    began: dict[int, int]

    @property
    def is_clean(self) -> bool:
        """True if no rank raised an error and all completed the same number of calls."""
        return not any(self.errors) and len(set(self.ncalls)) == 1

    def digest(self) -> str:
        """Return a hash of the trace, 16 hexadecimal digits; equal runs have equal hashes."""
        return hashlib.sha256(repr(self.trace).encode()).hexdigest()[:16]


def simulate(
    workload: Workload,
    plan: FailurePlan | None = None,
    seed: int = 0,
    *,
    network_type: type[SimNetwork] = SimNetwork,
    rank_type: type[SimRank] = SimRank,
    max_events: int = MAX_EVENTS,
) -> SimOutcome:
    """Run `workload` under `plan` and return its outcome.

    Parameters
    ----------
    workload : Workload
    plan : FailurePlan, optional
        Faults and noise. By default nothing fails.
    seed : int
        Seed of the order of simultaneous events, the latencies and the noise.
    network_type, rank_type : type
        Classes of the network and of the ranks, for example `gpus.GpuNetwork` and `gpus.GpuRank`.
    max_events : int
        Number of events after which a run counts as making no progress.

    Raises
    ------
    Violation
        If the library breaks a promise or the run makes no progress. The message contains the seed,
        the workload, the plan and the end of the trace.
    """
    world = World(workload, plan or FailurePlan(), seed, network_type, rank_type)
    return world.run(max_events)


class World:
    """Network, ranks and faults of one run."""

    def __init__(
        self,
        workload: Workload,
        plan: FailurePlan,
        seed: int,
        network_type: type[SimNetwork],
        rank_type: type[SimRank],
    ) -> None:
        self.plan = plan
        self.seed = seed
        self.work = SimWork(workload)
        self.checker = Checker()
        self.timeline = Timeline(seed)
        config = self.work.config
        self.network = network_type(
            self.timeline, workload.nranks, workload.nrails,
            probe_timeout_s=config.probe_timeout_s, is_loud=workload.is_loud,
            is_full=workload.fabric == "full",
        )  # fmt: skip
        self.network.on_read = self.checker.read
        self.network.route = self._route
        self.ranks = [
            rank_type(rank, self.network, config, self.work, self.checker)
            for rank in range(workload.nranks)
        ]
        self._noise = random.Random(seed ^ 0x5EED)
        self._lost = {fault.number for fault in plan.faults if isinstance(fault, Lose)}
        self._held = {
            fault.number: fault.ms / 1e3 for fault in plan.faults if isinstance(fault, Hold)
        }
        #: Number of faults in force that deprive each NIC of its carrier, by (rank, rail).
        self._ncarrier_faults: Counter[tuple[int, int]] = Counter()
        timed = [fault for fault in plan.faults if not isinstance(fault, Lose | Hold)]
        self._faults = sorted(timed, key=lambda fault: -fault.at)

    def run(self, max_events: int) -> SimOutcome:
        """Run all ranks to their end; see `simulate`."""
        controls = {rank.rank: rank.control for rank in self.ranks}
        try:
            for rank in self.ranks:
                rank.control.connect(controls)
            for rank in self.ranks:
                rank.start()
            self._run(max_events)
            self.checker.check_retired()
        except (AssertionError, R2cclError, LookupError, ValueError, AttributeError) as exc:
            raise Violation(self._describe(exc)) from exc
        return self._outcome()

    def _run(self, max_events: int) -> None:
        timeline = self.timeline
        living = list(self.ranks)
        while living:
            while self._faults and timeline.count >= self._faults[-1].at:
                self._apply(self._faults.pop())
            if not timeline.step() or timeline.count > max_events:
                raise Violation(f"no progress after {timeline.count} events: {self._phases()}")
            if living[-1].phase is RankPhase.DONE or living[-1].is_dead:
                living.pop()
        end = timeline.now + self._aftermath_s()
        while timeline.now < end and timeline.step():
            pass

    def _aftermath_s(self) -> float:
        late = [f.late_us for f in self.plan.faults if isinstance(f, CutPath | NicDown)]
        return max(late, default=0) / 1e6 + _AFTERMATH_S if self.plan.faults else 0.0

    def _outcome(self) -> SimOutcome:
        return SimOutcome(
            tuple(None if rank.is_dead else rank.error for rank in self.ranks),
            tuple(rank.ncalls for rank in self.ranks),
            self.timeline.count,
            self.network.nmessages,
            self.timeline.now,
            self.network.trace,
            sum(len(rank.migration.log.repairs) for rank in self.ranks),
            self._interruption_s(),
            self.network.nbypasses,
            tuple(rank.verdicts() for rank in self.ranks),
            tuple(rank.known_health() for rank in self.ranks),
            self.checker.plans,
            self.checker.began,
        )

    def _interruption_s(self) -> float:
        repairs = [each for rank in self.ranks for each in rank.migration.log.repairs]
        replayed_s = [each.first_byte_s for each in repairs if each.first_byte_s]
        return min(replayed_s) - min(each.failed_s for each in repairs) if replayed_s else 0.0

    # Faults

    def _apply(self, fault: Fault) -> None:
        network = self.network
        if isinstance(fault, CutPath):
            wire = network.wire(fault.a, fault.b, fault.rail)
            network.cut(wire, _cut(fault, fault.told))
            self._restore_later(fault.restore_us, [wire])
        elif isinstance(fault, NicDown):
            wires = self._wires_of(fault.rank, fault.rail)
            for wire in wires:
                network.cut(wire, _cut(fault, ()))
            network.set_port(fault.rank, fault.rail, is_up=False)
            if fault.is_seen:
                self._count_carrier_fault(fault, 1)
            self._restore_later(fault.restore_us, wires, fault)
        elif isinstance(fault, Exclude):
            by = self.ranks[fault.by]
            if not by.is_dead:
                by.exclude(fault.rank, fault.rail, is_excluded=fault.is_excluded)
        elif isinstance(fault, Stop):
            self.ranks[fault.rank].stop(fault.ms / 1e3)
        elif isinstance(fault, Kill):
            network.note("kill", fault.rank)
            self.ranks[fault.rank].kill()

    def _wires_of(self, rank: int, rail: int) -> list[Wire]:
        return [
            wire for wire in self.network.wires.values() if wire.rail == rail and rank in wire.pair
        ]

    def _restore_later(self, after_us: int, wires: list[Wire], nic: NicDown | None = None) -> None:
        if not after_us:
            return

        def restore() -> None:
            for wire in wires:
                self.network.restore(wire)
            if nic is not None:
                self.network.set_port(nic.rank, nic.rail, is_up=True)
                if nic.is_seen:
                    self._count_carrier_fault(nic, -1)

        self.timeline.after(after_us / 1e6, restore)

    def _count_carrier_fault(self, nic: NicDown, step: int) -> None:
        """Count a fault that begins (`step` 1) or ends (-1); notify its rank of a carrier change.

        The kernel keeps the notification for a process that is stopped.
        """
        port = nic.rank, nic.rail
        had_carrier = not self._ncarrier_faults[port]
        self._ncarrier_faults[port] += step
        has_carrier = not self._ncarrier_faults[port]
        if has_carrier is not had_carrier:
            self.ranks[nic.rank].on_carrier(nic.rail, has_carrier)

    def _route(self, message: SimMessage) -> Fate:
        number = message.number
        if number in self._lost:
            return Fate(Act.DROP)
        if number in self._held:
            return Fate(Act.DELAY, self._held[number])
        noise = self.plan.noise
        if message.kind is MessageKind.CONTROL and noise is not _SILENCE:
            return self._disturb(noise)
        return DELIVER

    def _disturb(self, noise: Noise) -> Fate:
        draw = self._noise.random() * 100
        late_s = self._noise.random() * noise.late_ms / 1e3
        if draw < noise.lose:
            return Fate(Act.DROP)
        if draw < noise.lose + noise.repeat:
            return Fate(Act.DUPLICATE, late_s)
        if draw < noise.lose + noise.repeat + noise.late:
            return Fate(Act.DELAY, late_s)
        return DELIVER

    # Messages

    def _phases(self) -> str:
        return ", ".join(
            f"rank {r.rank} {r.phase.value} (call {r.ncalls}, "
            + " ".join(
                f"{key.peer}/{key.rail}:{path.state.value}:{path.epoch}"
                for key, path in r.links.paths.items()
            )
            + ")"
            for r in self.ranks
        )

    def _describe(self, exc: BaseException) -> str:
        tail = "\n".join(map(str, self.network.trace[-_TAIL:]))
        return (
            f"{type(exc).__name__}: {exc}\nseed={self.seed}\nworkload={self.work.workload}\n"
            f"plan={self.plan}\nat event {self.timeline.count}, {self.timeline.now:.6f} s; "
            f"the trace ends\n{tail}"
        )


def _cut(fault: CutPath | NicDown, told: tuple[int, ...]) -> Cut:
    return Cut(told, fault.keep, fault.late_us / 1e6, fault.is_stall)


_SILENCE = FailurePlan().noise
_TAIL = 25

__all__ = ["MAX_EVENTS", "SimOutcome", "World", "simulate"]
