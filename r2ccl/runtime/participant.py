"""Participant: resources of one communicator at this rank.

A participant owns the communicator's plan cache, its worker thread, and its collectives on host
memory and on device memory. The job, which owns the connections, closes the participant.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex

import msgspec

from r2ccl.bootstrap.control import ControlPlane
from r2ccl.clock import monotonic
from r2ccl.errors import InvalidArgument, R2cclError, TransportError, TransportTimeout
from r2ccl.failover.exclusion import describe_nics, ports_of
from r2ccl.failover.health.driver import Known
from r2ccl.failover.migration.calls import first_channel
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.plan_cache import CheckedSchedules, PlanCache, in_job
from r2ccl.planning.planner import Explanation
from r2ccl.runtime.arguments import Request, integer_of, rank_of
from r2ccl.runtime.async_work import Worker
from r2ccl.runtime.collectives import collectives_class
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import LandingPool
from r2ccl.runtime.host_collectives import HostCollectives
from r2ccl.runtime.local import MOST_GROUPS
from r2ccl.runtime.status import HealthReport
from r2ccl.runtime.turn import Turn
from r2ccl.types import Nic

_log = logging.getLogger(__name__)


class DeviceCalls(Protocol):
    """Collectives on device memory of one communicator; `r2ccl.gpu.collectives` implements them."""

    def start(self, request: Request, stream: Any, is_async: bool) -> Any:
        """Begin a collective; return its result, or a `Work` if `is_async`.

        See `r2ccl.gpu.collectives.DeviceCollectives.start` for the errors.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Wait until no call uses the device, then free all resources on the device.

        `timeout_s` limits the wait for each backend (`r2ccl.gpu.backends`).

        Raises
        ------
        TransportError
            If the wait took too long, or not everything could be freed.
        """
        ...


class Participant:
    """Plan cache, worker thread and collectives of one communicator at this rank.

    Parameters
    ----------
    engine : Engine
    control : ControlPlane
        Control plane of the job.
    rails : sequence of Nic
        Local NIC of each rail.
    pool : LandingPool
        Landing places of all communicators of the job.
    fabric : Fabric
    checked : CheckedSchedules
        Schedules that were checked, for all communicators of the job.
    make_device_calls : callable
        A `MakeDeviceCalls`.

    Attributes
    ----------
    engine : Engine
    rails : sequence of Nic
    plans : PlanCache
    worker : Worker
        Runs asynchronous calls.
    on_host : HostCollectives
        Runs collectives on host memory, for `collectives`.
    collectives : Collectives
    hosts : list of str
        `PeerInfo.host` of each rank of the communicator.
    closing : RLock
        Held by `Job.close` while it closes the communicator. A signal handler that interrupts
        `Job.close` may acquire it again.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        control: ControlPlane,
        rails: Sequence[Nic],
        pool: LandingPool,
        fabric: Fabric,
        checked: CheckedSchedules,
        make_device_calls: MakeDeviceCalls,
    ) -> None:
        self.engine = engine
        self.rails = rails
        self._control = control
        self._pool = pool
        self._config = engine.config
        self._reports = engine.reports
        context_id, _, members = engine.context
        self.hosts = [control.peers[rank].host for rank in members]
        place = in_job(members, first_channel(context_id)) if context_id else None
        self.plans = PlanCache(
            engine.rank, engine.nranks, fabric, engine.config, place=place, checked=checked
        )
        self.closing = threading.RLock()
        turn = Turn()
        self.worker = Worker(f"r2ccl-worker-{engine.rank}", turn, engine.fail_call)
        self.on_host = HostCollectives(engine, self.plans, pool)
        self.collectives = collectives_class()(
            engine,
            self.plans,
            self.on_host,
            worker=self.worker,
            turn=turn,
            start_on_device=self._start_on_device,
        )
        self._on_device = make_device_calls(self)

    def _start_on_device(self, request: Request, stream: Any, is_async: bool) -> Any:
        return self._on_device.start(request, stream, is_async)

    def calibrate(self) -> None:
        """Measure latency and bandwidth of the network, if the choice of schedules needs them.

        If each rank has its own host, the bandwidth becomes the nominal rate of the rails.

        Notes
        -----
        *Collective*: all ranks.
        """
        fabric, nranks = self.plans.fabric, self.engine.nranks
        nnodes = len(set(fabric.nodes)) or nranks
        if not fabric.is_loopback and nnodes > 1 and self._config.is_planned:
            rates = self.on_host.calibrate()
            self.plans.measured(rates)
            if len(set(self.hosts)) == nranks:
                self.engine.set_nominal_rate(rates.beta)

    def share_memory(self, nshared: int, obstacle: str) -> None:
        """Use shared memory within each host, if ``R2CC_SHM`` allows it.

        With several hosts, shared memory is used only if all hosts have the same number of ranks,
        at least two. Otherwise the network is used, even if ``R2CC_SHM=1``. Unless ``R2CC_SHM=1``,
        the network is also used if ``R2CC_ALGO`` fixes the schedules (`Config.fixed_family`), if a
        rank has an `obstacle`, if ranks of a host cannot share memory, or if `MOST_GROUPS`
        communicators of the job share memory already.

        Parameters
        ----------
        nshared : int
            Number of the job's communicators at this rank that share memory already.
        obstacle : str
            Reason why this rank must not use shared memory; empty if it may. Ignored if
            ``R2CC_SHM=1``.

        Raises
        ------
        TransportError
            If ``R2CC_SHM=1`` requires shared memory and ranks of a host cannot share it, or
            `MOST_GROUPS` communicators of the job share memory already.
        R2cclError
            If the communicator has ended.

        Notes
        -----
        *Collective*: all ranks.
        """
        if self._config.shm == "0" or self.engine.nranks == 1:
            return
        is_first = self.engine.rank == 0
        teams: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            teams.setdefault(host, []).append(rank)
        sizes = {len(team) for team in teams.values()}
        if len(teams) > 1 and sizes == {1}:
            return
        if len(sizes) > 1:
            if is_first:
                _log.info(
                    "rank %d: no shared memory: the hosts have between %d and %d ranks; the "
                    "network is used instead; to share memory, start equally many ranks on all "
                    "hosts",
                    self._control.rank, min(sizes), max(sizes),
                )  # fmt: skip
            return
        if self._config.shm == "1":
            obstacle = ""
        elif self._config.fixed_family:
            obstacle = f"R2CC_ALGO={self._config.fixed_family} is a schedule of the network"
        if nshared >= MOST_GROUPS:
            obstacle = f"{nshared} communicators share memory already"
        try:
            if len(teams) == 1:
                self.collectives.share_memory(self._control, obstacle)
            else:
                self.collectives.share_memory_in_nodes(
                    self._control, obstacle, tuple(teams.values())
                )
        except TransportError as exc:
            # If the communicator has ended, raise the error that ended it. Not if R2CC_SHM=1 and
            # ranks cannot share memory: another rank may then have ended it for this reason, which
            # the error below names. Errors of failures, such as a timeout, are of subclasses.
            if self._config.shm != "1" or type(exc) is not TransportError:
                self.engine.check()
            if self._config.shm == "1":
                raise TransportError(
                    f"{exc}; R2CC_SHM=1 requires shared memory: remove this cause, or set "
                    "R2CC_SHM=auto to use the network instead",
                    status="NO_SHARED_MEMORY",
                ) from exc
            if is_first:
                _log.info("rank %d: %s; the network is used instead", self._control.rank, exc)
            return
        except BaseException as exc:  # the other ranks wait for this one
            self.engine.fail_call(exc)
            raise
        if is_first:
            nranks, where = self.engine.nranks, "" if len(teams) == 1 else f" on {len(teams)} hosts"
            _log.info("rank %d: %d ranks share memory%s", self._control.rank, nranks, where)

    def exclude(self, rank: SupportsIndex, nic: str | SupportsIndex, *, is_excluded: bool) -> None:
        """Exclude a NIC, or end its exclusion; see `Communicator.exclude` for the errors."""
        self.collectives.require_free()
        own = rank_of(rank, self.engine.nranks, "rank")
        of_job = self.engine.context.members[own]
        peers = self._control.peers
        try:
            self.engine.exclusions.change(
                ports_of(peers, of_job, nic),
                is_excluded=is_excluded,
                nics=describe_nics(peers[of_job]),
            )
        except InvalidArgument as exc:
            if not self.engine.context.context_id:
                raise
            raise InvalidArgument(
                f"{exc} (rank numbers are those of the job, in which rank {own} of this "
                f"communicator is rank {of_job})"
            ) from None

    # State; any thread may read it, without waiting

    def explain(self, nbytes: int) -> Explanation:
        """Return a comparison of the schedules that an allreduce of `nbytes` could use.

        Raises
        ------
        InvalidArgument
            If `nbytes` is not an integer, or is negative.
        """
        size = integer_of(nbytes)
        if size is None or size < 0:
            raise InvalidArgument(f"nbytes={nbytes!r}; allowed are integers of 0 or more")
        health = self.known_health().health
        found = self.plans.explain(size, health)
        nchunks = self.on_host.count_chunks(size, health)
        return found._replace(nchunks=nchunks, is_local=self.on_host.is_local)

    def known_health(self) -> Known:
        """Return the newest health that this rank has received, and the time of its arrival.

        With ``R2CC_MODE=failstop``: the initial health, and 0.
        """
        return self.engine.known_health() or Known(self.engine.whole_health, 0.0)

    def health(self) -> HealthReport:
        """Return the state of this rank's rails, their paths to other ranks, and its memory use."""
        rails = self._reports.rails(self.rails)
        memory = self._reports.memory(self._pool.nbytes)
        return HealthReport(self._control.rank, monotonic(), rails, memory)

    def dump(self) -> str:
        """Return the full status of this rank as one line of JSON."""
        peers = [info for info in self._control.peers if info.rank != self._control.rank]
        memory = self._reports.memory(self._pool.nbytes)
        read = self._reports.status(peers, self._control.last_heard, self.plans.planning, memory)
        return msgspec.json.encode(read).decode()

    @property
    def is_closed(self) -> bool:
        """True if the communicator refuses all calls (see `refuse`)."""
        return self.collectives.is_closed

    @property
    def is_blocking(self) -> bool:
        """True if a blocking collective runs in any thread, and no asynchronous one is pending."""
        return self.collectives.is_blocking

    @property
    def is_below(self) -> bool:
        """True if the caller is a signal handler that interrupted a blocking call of its thread.

        Also True if the caller is a `user_op` function that a collective calls. False if the worker
        runs the collective of the interrupted call, and this thread only waits for the worker.
        """
        return self.collectives.is_below or self.engine.messenger.is_below

    # End

    def revoke(self, why: str) -> None:
        """End all communicators of the job on all ranks, unless this communicator is closed."""
        if not self.is_closed:
            self.engine.note_end_known()
            self.engine.revoke(why)

    def refuse(self, refusal: Callable[[], R2cclError]) -> None:
        """Refuse all calls from now on, each with a new error from `refusal`."""
        self.collectives.close(refusal)
        self.engine.messenger.refuse(refusal)

    def drain(self) -> None:
        """Wait until the asynchronous calls have ended.

        Raises
        ------
        TransportTimeout
            If the calls do not end within ``R2CC_INIT_TIMEOUT_S``.
        """
        if not self.worker.drain(self._config.init_timeout_s):
            raise TransportTimeout(
                f"rank {self._control.rank}: close() waited {self._config.init_timeout_s:g} s for "
                f"asynchronous calls: {self.engine.pending()}; wait for the calls before "
                "close(), or raise R2CC_INIT_TIMEOUT_S",
                rank=self._control.rank,
                status="TIMEOUT",
            )

    def leave(self) -> None:
        """Wait until every rank of the communicator has all its data; see `Engine.leave`."""
        self.collectives.in_turn(self.engine.leave, is_last=True)

    def require_same(self, *, is_last: bool) -> None:
        """Check that the other ranks made the same calls in shared memory, as far as known.

        See `LocalCalls.require_same` for `is_last` and the error.
        """
        if self.on_host.local is not None:
            self.on_host.local.require_same(is_last=is_last)

    def free_memory(self, timeout_s: float) -> None:
        """Free shared memory, and end the remaining waits for messages.

        If the memory stays in use (see `Collectives.free_memory`), only log an error.
        """
        if self.collectives.free_memory(timeout_s):
            self.engine.messenger.let_go()
        else:
            _log.error(
                "rank %d: after a wait of %g s, a call or message still uses the shared memory of "
                "the closed communicator, so this memory is not freed; end the process to free it",
                self._control.rank, timeout_s,
            )  # fmt: skip

    def end_calls(self, deadline_s: float) -> None:
        """End the asynchronous calls, and close the collectives on device memory.

        If asynchronous calls are queued or running, revoke the communicator to end them. If a call
        does not end within `deadline_s` seconds, log an error and free nothing.

        Raises
        ------
        TransportError
            As `DeviceCalls.close`.
        """
        if not self.worker.is_idle and self.engine.error is None:
            self.engine.revoke("the communicator was closed while asynchronous calls were running")
        if not self.worker.close(deadline_s):
            _log.error(
                "rank %d: an asynchronous call did not end, so its memory was not freed; end the "
                "process to free it",
                self._control.rank,
            )
            return
        self._on_device.close(deadline_s)

    def require_seen(self) -> None:
        """Raise an error if an asynchronous call failed and no caller saw its error.

        See `Collectives.require_seen`.
        """
        self.collectives.require_seen()


#: Function that makes the collectives on device memory of a communicator.
MakeDeviceCalls = Callable[[Participant], DeviceCalls]

__all__ = ["DeviceCalls", "MakeDeviceCalls", "Participant"]
