"""Simulated rank, which runs the library's `Progress`, `Failover` and `LaneRun`.

As in `r2ccl.runtime.engine`, a call runs the data loop while it waits; otherwise the control
plane's tick runs the data loop. A single thread replaces the engine's lock and threads. A `Checker`
observes all slices and the memory of all calls.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from r2ccl.bootstrap.messages import Codec
from r2ccl.config import Config
from r2ccl.errors import InternalError, R2cclError, TransportTimeout
from r2ccl.failover.context import RankContext
from r2ccl.failover.diagnosis.verdict import Finding, ProbeReply, ProbeRequest, Verdict
from r2ccl.failover.failover import Failover, PortUp
from r2ccl.failover.health.rounds import (
    Commit,
    ExcludeRails,
    Prepare,
    Promise,
    RailsExcluded,
    Report,
)
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.path import Announcement, ClosePaths, ConnectPaths
from r2ccl.failover.revocation import Leaving, Revoke, Spared
from r2ccl.runtime.engine import STANDBY_S
from r2ccl.runtime.executor import HostCall, LandingPool, LaneRun, Operands
from r2ccl.runtime.progress import Computer, Progress
from r2ccl.testing.simulation.checks import (
    CheckedLinks,
    CheckedPool,
    CheckedRun,
    Checker,
)
from r2ccl.testing.simulation.control import SimControl
from r2ccl.testing.simulation.data import Array
from r2ccl.testing.simulation.network import End, SimNetwork
from r2ccl.testing.simulation.transport import SimTransport
from r2ccl.testing.simulation.work import SimTask, SimWork
from r2ccl.transport.base import Transport

_BUSY_TICK_S = 0.02
_IDLE_TICK_S = 0.1
#: A tick that is late by more than this time in seconds means that the process was stopped.
_STALL_S = 0.05
#: Longest time in seconds from an event to the turn of the data loop that handles it.
_TURN_S = 10e-6


class RankPhase(enum.Enum):
    """State of the rank's user thread."""

    CONNECTING = "connecting"
    COMPUTING = "computing"
    #: The next call waits until the ranks agree on the health with which to plan it.
    ENTERING = "entering"
    #: Paths that the call needs are being connected.
    JOINING = "joining"
    CALLING = "calling"
    LEAVING = "leaving"
    #: An error occurred; the call ends once no peer can write to its memory.
    FENCING = "fencing"
    DONE = "done"


_MESSAGES: Any = (
    Announcement | ConnectPaths | ClosePaths | Revoke | PortUp | Leaving | Spared
    | ProbeRequest | ProbeReply | Finding
    | Report | Prepare | Promise | Commit | ExcludeRails | RailsExcluded
)  # fmt: skip

#: Phases in which the user thread waits and runs the data loop.
WAITING = (
    RankPhase.CONNECTING,
    RankPhase.ENTERING,
    RankPhase.JOINING,
    RankPhase.CALLING,
    RankPhase.LEAVING,
    RankPhase.FENCING,
)


class SimRank:
    """Rank with its transport, control plane, links and calls.

    Parameters
    ----------
    rank : int
        Number of this rank.
    network : SimNetwork
        Network of the job, shared by all ranks.
    config : Config
        Settings of the job.
    work : SimWork
        The calls of the job.
    checker : Checker
        Checker of the run, shared by all ranks.

    Attributes
    ----------
    phase : RankPhase
    error : R2cclError or None
        Error that ended the communicator at this rank; None if there was none.
    ncalls : int
        Number of calls that the rank has completed.
    """

    def __init__(
        self, rank: int, network: SimNetwork, config: Config, work: SimWork, checker: Checker
    ) -> None:
        self.rank = rank
        #: Number of stops (see `stop`) that are not over.
        self._nstops = 0
        self.is_dead = False
        self.phase = RankPhase.CONNECTING
        self.error: R2cclError | None = None
        self.ncalls = 0
        #: Answers to this rank's orders to exclude or include rails: the reason of a refusal, or an
        #: empty string if the order is in force.
        self.answers: list[str] = []
        self._network = network
        self._timeline = network.timeline
        self._config = config
        self._work = work
        self._checker = checker
        self.pool: LandingPool = CheckedPool(rank, config.landing_depth)
        #: Executes GPU work; None if the calls use host memory.
        self.computer: Computer | None = None
        self.transport = self.make_transport()
        self.control = SimControl(
            network,
            self,
            Codec(_MESSAGES),
            peer_timeout_s=config.peer_timeout_s,
        )
        context = RankContext(
            rank,
            network.nranks,
            self.transport,
            self.control,
            config,
            self._timeline,
            nwires=network.nrails,
            neighbors=() if work.workload.is_lazy else None,
            nodes=work.workload.nodes,
            excluded=frozenset(work.workload.excluded),
        )
        self.homes = context.homes
        self.links = CheckedLinks(checker, context)
        self.calls = self.links.calls_of(0)
        self.failover = Failover(context, self.links)
        self.migration = self.failover.migration
        self.revocation = self.failover.revocation
        self.progress = Progress(context, self.links, self.failover)
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_turn_planned = False
        self._ticked_at = 0.0
        self._next_look = 0.0
        self._deadline = 0.0
        self._enough_s = 0.0
        self._peers: frozenset[int] = frozenset()
        self._runs: list[LaneRun] = []
        self._task: SimTask | None = None
        #: Input, output and scratch memory of the call.
        self._arrays: tuple[Array, ...] = ()

    def make_transport(self) -> Transport:
        """Return a new transport for this rank; a subclass may override it."""
        return SimTransport(self._network, self.rank, self._wake)

    @property
    def must_look(self) -> bool:
        """True if the data loop must poll, because the end of some work causes no event."""
        return self.progress.is_computing

    def start(self) -> None:
        """Start connecting the paths; the rank then makes its calls on its own.

        The first call begins once all paths are up, except excluded ones. After the connect
        timeout, one path to each peer is enough. If the workload `is_lazy`, no path is connected
        before a call needs it.
        """
        self.failover.start()
        self._deadline = self._timeline.now + self._config.init_timeout_s
        self._tick_after(_BUSY_TICK_S)

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the rank's newest verdict on each path."""
        assert self.failover.diagnosis is not None
        return self.failover.diagnosis.verdicts()

    def known_health(self) -> Health:
        """Return the newest health that the rank knows."""
        assert self.failover.agreement is not None
        return self.failover.agreement.known.health

    def stop(self, duration_s: float) -> None:
        """Stop the process for `duration_s` seconds, as SIGSTOP and SIGCONT do.

        If stops overlap, the process continues after the last one ends. Do nothing if the process
        is dead.
        """
        if not self.is_dead:
            self._nstops += 1
            self._timeline.after(duration_s, self._go_on)

    def kill(self) -> None:
        """Kill the process; its kernel closes all connections."""
        self.is_dead = True
        self.transport.close()

    @property
    def is_stopped(self) -> bool:
        """True while the process is stopped."""
        return self._nstops > 0

    def _go_on(self) -> None:
        self._nstops -= 1
        if not self.is_stopped and not self.is_dead:
            self.control.resume()
            self._wake()
            self._tick(0)

    # Events of the control plane

    def on_message(self, peer: int, message: object) -> None:
        """Pass a message from `peer` to the failover."""
        self.submit(self.failover.on_message, peer, message)

    def on_path(self, peer: int, rail: int, epoch: int, endpoint: End) -> None:
        """Pass a new connection to the migration."""
        self.submit(self.migration.on_opened, peer, rail, epoch, endpoint)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """Report the loss of `peer` to the failover."""
        self.submit(self.failover.on_peer_lost, peer, why, last_heard_s)

    def on_carrier(self, rail: int, is_up: bool) -> None:
        """Report a carrier change of the local NIC of `rail` to the failover."""
        if not self.is_dead:
            self.submit(self.failover.on_carrier, rail, is_up)

    def exclude(self, rank: int, rail: int, *, is_excluded: bool) -> None:
        """Order all ranks to exclude a rail of `rank`, or to include it again, without waiting.

        The answer is appended to `answers`: a refusal, or an empty string once all ranks agree. If
        a rank is lost meanwhile, there is no answer.
        """
        agreement = self.failover.agreement
        assert agreement is not None
        order = partial(agreement.exclude, is_excluded=is_excluded)
        self.submit(order, ((rank, rail),), self.on_answer)

    def on_answer(self, refusal: str) -> None:
        """Append `refusal` to `answers`; an empty string means that the order is in force."""
        self.answers.append(refusal)

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Queue ``fn(*args)`` for the next turn of the data loop."""
        self._inbox.append((fn, args))
        self._wake(is_control=True)

    # Turns

    def _wake(self, *, is_control: bool = False) -> None:
        if self._is_turn_planned or not (is_control or self.phase in WAITING):
            return
        self._is_turn_planned = True
        self._timeline.after(_TURN_S * self._timeline.random.random(), self._turn)

    def _turn(self) -> None:
        self._is_turn_planned = False
        if self.is_stopped or self.is_dead:
            return
        try:
            self._drain()
            if self.phase in WAITING:
                self.progress.step()
                self._look()
                self._finish_if_done()
                if self.must_look:
                    self._wake()
        except InternalError:
            raise
        except R2cclError as exc:
            if self.revocation.error is None:
                text = str(exc)
                self.revocation.revoke(Revoke(type(exc).__name__, text, self.rank), error=exc)
        if self.revocation.error is not None:
            self._give_up()

    def _drain(self) -> None:
        if self._inbox:
            while self._inbox:
                fn, args = self._inbox.popleft()
                fn(*args)
            self.progress.advance()

    def _look(self) -> None:
        now = self._timeline.now
        if now >= self._next_look and self.revocation.error is None:
            self._next_look = now + _BUSY_TICK_S
            self.failover.tick(now, self._peers)
        if now >= self._deadline and self.revocation.error is None:
            raise TransportTimeout(
                f"rank {self.rank}: timed out while {self.phase.value}", rank=self.rank
            )

    def _tick_after(self, delay_s: float) -> None:
        self._timeline.after(delay_s, self._tick, delay_s)

    def _tick(self, delay_s: float) -> None:
        if self.is_stopped or self.is_dead:
            return
        now = self._timeline.now
        late_s = now - self._ticked_at - delay_s
        self._ticked_at = now
        self.control.tick(late_s if late_s > _STALL_S else 0.0)
        self.submit(self._background, now)
        self._tick_after(_BUSY_TICK_S if self.phase in WAITING else _IDLE_TICK_S)

    def _background(self, now: float) -> None:
        if self.revocation.error is None:
            self.progress.step()
            self.failover.tick(now, self._peers)
        elif self.phase is not RankPhase.DONE:
            self.progress.step()

    # The user thread

    def _finish_if_done(self) -> None:
        if self.revocation.error is not None:
            return
        if self.phase is RankPhase.CONNECTING:
            if self.migration.is_whole or (
                self._timeline.now >= self._config.connect_timeout_s
                and all(map(self.migration.up, self.links.peers - self.revocation.left))
            ):
                self._compute()
        elif self.phase is RankPhase.ENTERING:
            self._enter()
        elif self.phase is RankPhase.JOINING:
            assert self._task is not None
            peers = self._task.layout.peers
            if all(map(self.migration.is_connected, peers)) or (
                self._timeline.now >= self._enough_s and all(map(self.migration.up, peers))
            ):
                self.failover.joined(peers)
                self._begin(self._task)
        elif self.phase is RankPhase.CALLING:
            if not any(run.remaining for run in self._runs):
                self._return()
        elif self.phase is RankPhase.LEAVING:
            self._leave()

    def _compute(self) -> None:
        self.phase = RankPhase.COMPUTING
        self._peers = frozenset()
        busy_s = self._work.busy_s(self.rank)
        if busy_s:
            self._timeline.after(busy_s, self._call)
        else:
            self._call()

    def _call(self) -> None:
        if self.is_dead or self.revocation.error is not None:
            return
        if self.is_stopped:
            self._timeline.after(_IDLE_TICK_S, self._call)
            return
        if self.ncalls == len(self._work.calls):
            self.phase = RankPhase.LEAVING
            self._deadline = self._timeline.now + self._config.init_timeout_s
            self.links.confirm_all()
            self.progress.advance()
            self._wake()
            return
        self._drain()
        self.phase = RankPhase.ENTERING
        self._deadline = self._timeline.now + self._config.timeout_s
        self._enter()

    def _enter(self) -> None:
        op = self.calls.op + 1
        assert self.failover.agreement is not None
        health = self.failover.agreement.enter(op)
        if health is not None:
            self._checker.planned(self.rank, op, health, self._timeline.count)
            task = self._task = self._work.task(self.ncalls, self.rank, self.homes, health)
            if not task.layout.peers <= self.links.connected:
                self.failover.connect_peers(task.layout.peers)
                self.phase = RankPhase.JOINING
                self._enough_s = self._timeline.now + STANDBY_S
            else:
                self._begin(task)

    def _begin(self, task: SimTask) -> None:
        self.phase = RankPhase.CALLING
        call = self.operands(task)
        layout, progress = call.layout, self.progress
        self.links.begin(self.calls, task.signature.pack())
        runs = [CheckedRun(lane, call, self.links, self.pool) for lane in layout.lanes]
        self._runs = list(runs)
        self._peers = layout.peers
        self.calls.consumers = {at: run for run in runs for at in run.channels}
        progress.begin(self.calls, self.computer)
        for run in runs:
            run.advance()
        progress.advance()
        self._wake()

    # Memory of a call

    def operands(self, task: SimTask) -> Operands:
        """Allocate and fill the memory of the next call; return the memory and the call's plan."""
        source, output = self._work.memory(self.ncalls, self.rank, task.schedule)
        call = HostCall(task.layout, source, output, *self._work.arithmetic(task))
        self._arrays = call.spaces
        return call

    def output(self) -> Array:
        """Return the output array of the call."""
        return self._arrays[1]

    def retire(self, what: str) -> None:
        """Give the call's memory back to its caller; later writes to it are detected.

        `what` names the call in the message of a `Violation`.
        """
        self._checker.retire(what, *self._arrays)
        self._arrays = ()  # not again after an error, which would hide earlier writes

    def _return(self) -> None:
        self.progress.finish(self.calls)
        assert self._task is not None
        result = self._work.result(self.ncalls, self.rank, self._task, self.output())
        self._checker.result(self.rank, self.ncalls, *result)
        self.retire(f"rank {self.rank}, call {self.ncalls}")
        self._network.note("returned", self.rank, self.ncalls)
        self.ncalls += 1
        self._compute()

    def _leave(self) -> None:
        if self.links.is_drained():
            if not self.revocation.is_leaving:
                self.revocation.leave()
            if len(self.revocation.left) == self._network.nranks - 1:
                self.revocation.spread()
                self.phase = RankPhase.DONE

    def _give_up(self) -> None:
        """End the call with an error, once no peer can write to its memory."""
        if self.phase is RankPhase.DONE:
            return
        self.phase = RankPhase.FENCING
        if self.migration.is_quiet:
            self.phase = RankPhase.DONE
            self.error = self.revocation.error
            self._network.note("raised", self.rank, type(self.error).__name__)
            if self._task is not None:
                self.retire(f"rank {self.rank}, after its error")


__all__ = ["RankPhase", "SimRank"]
