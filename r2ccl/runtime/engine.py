"""Ownership of the data loop by one thread at a time, and waits with a deadline.

A blocking call owns the data loop (`Progress`) while it waits. At other times the control thread
runs the loop, so that a rank that is busy in user code still handles failures, replays slices and
confirms them. Events of the control thread are functions in an inbox. The control thread runs them
at once if no thread owns the loop; otherwise it wakes the owner, which runs them.

Invariants: every wait has a deadline. No wait ends, by result, error or Ctrl-C, while a peer could
still write into the call's memory. If a call could not end properly, which a second Ctrl-C can
cause, the control thread ends the communicator at its next tick.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.base import ControlPort
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.errors import CommunicatorRevoked, InternalError, R2cclError, TransportTimeout
from r2ccl.failover.context import RankContext
from r2ccl.failover.diagnosis.verdict import Verdict
from r2ccl.failover.failover import Failover
from r2ccl.failover.health.driver import HealthAgreement, Known
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.failover.migration.repairs import Repair
from r2ccl.failover.revocation import Revoke
from r2ccl.planning.plan_cache import Plan, Planning
from r2ccl.runtime.desync_check import Calling, DesyncCheck
from r2ccl.runtime.executor import LaneRun
from r2ccl.runtime.progress import Computer, Progress, describe
from r2ccl.runtime.status import (
    HeldPath,
    MemoryReport,
    Operation,
    Pending,
    RailHealth,
    RankStatus,
    Wait,
    absent,
    agreed,
    last_ops,
    link_entries,
    path_entries,
    peer_entries,
    rails,
    spelled,
    waits_for_confirmation,
    waits_of_call,
)
from r2ccl.transport.base import Registered
from r2ccl.types import Nic

_log = logging.getLogger(__name__)

#: Sleep that lets another thread acquire the GIL.
_GIVE_WAY_S = 50e-6
#: Interval at which the control thread sends data of a finished call that sockets did not accept.
_REST_S = 0.002
#: Time that paths have to become quiet after an error. A transport destroys a queue pair that has
#: not drained after one second.
_SETTLE_S = 2.0
#: Maximum number of Ctrl-C that may interrupt the end of a failed call.
_MOST_INTERRUPTS = 1_000
#: Time for all rails to a new peer to come up; afterwards one path to the peer is enough.
STANDBY_S = 0.5
#: Time that a running call has to end after the communicator was closed.
_LAST_CALL_S = 10.0
#: Interval of timer checks while a call waits; the default suspicion timeout is 25 times as long.
_TICK_S = 0.02


#: Function that returns the plan of the next collective, given the health to plan with and the
#: number of the last collective.
SelectPlan = Callable[[Health, int], Plan]


class BackgroundControl(ControlPort, Protocol):
    """Interface of the control plane that the engine uses, in addition to `ControlPort`.

    Attributes
    ----------
    is_busy : bool
        Set by the engine: True while a call waits in the data loop.
    """

    is_busy: bool

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread."""
        ...

    def call_later(self, delay_s: float, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread after `delay_s` seconds."""
        ...


class _Patience(NamedTuple):
    """Timeout of a wait, the setting it comes from, and a function that describes the wait."""

    timeout_s: float
    variable: str
    pending: Callable[[], Pending]


class Engine:
    """Runner of one rank's data loop, and event handler of its control plane.

    Parameters
    ----------
    context : RankContext
    control : BackgroundControl
        Control plane of `context`.
    """

    def __init__(self, context: RankContext, control: BackgroundControl) -> None:
        self.rank = context.rank
        self.nranks = context.nranks
        self.config = context.config
        #: Home rails: the rails that channels use while all are up.
        self.homes = context.homes
        #: Home rails whose connections the transport makes itself: those of RDMA NICs.
        self.joined = context.joined
        self._peers_of_job = context.peers
        self._transport = context.transport
        self._control = control
        self._clock = context.clock
        #: Health to plan with if the ranks do not agree on health (mode failstop).
        self.whole_health = context.whole_health()
        self._links = Links(context)
        self._failover = Failover(context, self._links)
        self._migration = self._failover.migration
        self._revocation = self._failover.revocation
        self._progress = Progress(context, self._links, self._failover)
        self._owner = threading.Lock()
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._sleeping = False
        self._next_tick = 0.0
        self._peers: frozenset[int] = frozenset()
        self._has_raised = False
        #: Number of calls that connected data paths before their first slice.
        self.nconnects = 0
        #: The control thread is sending the data that a finished call left.
        self._is_sending_rest = False
        #: A call has begun and not ended.
        self._is_calling = False
        #: The communicator has failed and no path is in use any more.
        self._is_settled = False
        self._desync = DesyncCheck(
            self.rank, context.peers, self.config.suspicion_timeout_s, control
        )
        #: Lanes of the collective in progress.
        self._runs: Sequence[LaneRun] = ()
        self._call = _Patience(self.config.timeout_s, "R2CC_TIMEOUT_S", self._pending_call)
        self._waiting: _Patience | None = None
        self._since_s = 0.0

    # State; any thread may read it, without waiting

    @property
    def op(self) -> int:
        """Number of the running collective, or of the last one."""
        return self._links.op

    @property
    def error(self) -> R2cclError | None:
        """Error that ended the communicator at this rank; None while it is in use."""
        return self._revocation.error

    def repairs(self) -> tuple[Repair, ...]:
        """Return the repairs of this rank's paths, oldest first."""
        return tuple(self._migration.log.repairs.copy())

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the last verdict on each path."""
        diagnosis = self._failover.diagnosis
        return () if diagnosis is None else diagnosis.verdicts()

    def known_health(self) -> Known | None:
        """Return the newest health that this rank has received.

        None if the ranks do not agree on health (mode failstop).
        """
        agreement = self._failover.agreement
        return None if agreement is None else agreement.known

    def rails(self, nics: Sequence[Nic]) -> tuple[RailHealth, ...]:
        """Return the state of every rail; ``nics[i]`` is the local NIC of rail i."""
        return rails(self._links, self.repairs(), nics)

    def memory(self, landing_nbytes: int) -> MemoryReport:
        """Return the memory in use; the landing places take `landing_nbytes` of it."""
        return MemoryReport(
            landing_nbytes, self._links.eager_nbytes(), *self._transport.memory_use()
        )

    def status(
        self,
        peers: Iterable[PeerInfo],
        last_heard: Callable[[int], float | None],
        planning: Planning,
        memory: MemoryReport,
    ) -> RankStatus:
        """Return the status of this rank: its collective, paths, links, peers and repairs.

        Parameters
        ----------
        peers : iterable of PeerInfo
            Every other rank.
        last_heard : callable
            Maps a rank to the time of its last sign of life, in seconds of the engine's clock; to
            None if this rank has no session with it.
        planning : Planning
        memory : MemoryReport
        """
        pending, ops = self.pending(), last_ops(self._links.paths, self._desync)
        held = self._failover.failback.held()
        op, signature, left = self.op, self._links.signature, self._runs
        doing = Operation(op, describe(signature), tuple(run.remaining for run in left))
        return RankStatus(
            rank=self.rank,
            nranks=self.nranks,
            now_s=pending.now_s,
            error="" if self.error is None else str(self.error),
            nconnects=self.nconnects,
            planning=planning,
            memory=memory,
            pending=pending,
            operations=(doing,) if left else (),
            paths=path_entries(self._links),
            links=link_entries(self._links),
            peers=peer_entries(peers, last_heard, ops),
            repairs=self.repairs(),
            health=agreed(self.known_health()),
            verdicts=spelled(self.verdicts()),
            held=tuple(HeldPath(*key, hold_s) for key, hold_s in held.items()),
        )

    # Called in the control thread

    def on_message(self, peer: int, message: object) -> None:
        """Handle a control message from `peer`."""
        if isinstance(message, Calling):
            self.submit(self._on_calling, message)
        else:
            self.submit(self._failover.on_message, peer, message)

    def on_path(self, peer: int, rail: int, epoch: int, sock: Any) -> None:
        """Add an authenticated connection of `peer` as epoch `epoch` of the path on `rail`."""
        self.submit(self._migration.on_opened, peer, rail, epoch, sock)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """Handle the loss of the process of `peer`.

        `last_heard_s` is the time since its last sign of life, in seconds; None if it is not known.
        """
        self.submit(self._failover.on_peer_lost, peer, why, last_heard_s)

    def on_tick(self, now: float) -> None:
        """Run the data loop and the timers of failover once; `now` is in seconds."""
        self.submit(self._background, now)

    def on_carrier(self, rail: int, is_up: bool) -> None:
        """Handle a carrier change of the local NIC of `rail`."""
        self.submit(self._failover.on_carrier, rail, is_up)

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Run ``fn(*args)`` in the thread that owns the data loop, or here if none owns it."""
        self._inbox.append((fn, args))
        self._serve()

    def _serve(self) -> None:
        while self._inbox:
            if not self._owner.acquire(blocking=False):
                if self._sleeping:
                    self._transport.wake()
                return
            try:
                if self._is_calling:
                    self._is_calling = False
                    self._fail(CommunicatorRevoked(f"rank {self.rank}: interrupted"))
                self._drain()
                self._progress.advance()
            except R2cclError as exc:
                self._fail(exc)
            except Exception as exc:
                # The event that raised is lost, and a call that depends on it would wait until its
                # timeout.
                self._fail(self._broken(exc))
            finally:
                self._owner.release()

    def _drain(self) -> None:
        while self._inbox:
            fn, args = self._inbox.popleft()
            fn(*args)

    def _background(self, now: float) -> None:
        """Run the data loop and the timers once, for a rank that is not in a call.

        If the rank is in a call, the call's thread runs this function, which does no harm.
        """
        if self._revocation.error is None:
            self._progress.step()
            self._failover.tick(now, self._peers)
            self._desync.spread()
        elif not (self._is_settled or self._migration.is_quiet):
            self._progress.step()

    def _send_rest(self) -> None:
        """Send data of finished calls that sockets did not accept.

        A call whose slices are all eager ends as soon as they are copied, before they are sent.
        """
        # Cleared first, because a call that ends from now on schedules this function again.
        self._is_sending_rest = False
        if self._is_calling:
            return
        self.submit(self._step_once)
        if self._transport.has_unsent():
            self._is_sending_rest = True
            self._control.call_later(_REST_S, self._send_rest)

    def _step_once(self) -> None:
        if self._revocation.error is None:
            self._progress.step()

    def _on_calling(self, message: Calling) -> None:
        self._desync.on_calling(message, self._links.op)

    # Called in the user's thread

    def start(self) -> None:
        """Connect every path.

        Return when all paths to the first peers are up or, after ``R2CC_CONNECT_TIMEOUT_S``, at
        least one to each of them is up.

        Raises
        ------
        TransportTimeout
            If a peer has no path within ``R2CC_INIT_TIMEOUT_S``.
        R2cclError
            If the communicator ended meanwhile.
        """
        with self._owner:
            self._failover.start()
            give_up = self._clock() + self.config.connect_timeout_s

            def is_connected() -> bool:
                if self._migration.is_whole:
                    return True
                is_late = self._clock() >= give_up
                return is_late and all(map(self._migration.up, self._links.peers))

            self._wait(is_connected, self._patience(self._pending_init))

    def set_nominal_rate(self, rate: int) -> None:
        """Set the rate of a rail at full bandwidth, in bytes/s."""
        with self._owner:
            self._failover.set_nominal_rate(rate)

    def enter(self) -> Health:
        """Enter the next collective and return the health to plan it with.

        Waits while the ranks agree on a new health. The caller then passes the plan to `run`.

        Raises
        ------
        TransportTimeout
            If the ranks do not agree within ``R2CC_TIMEOUT_S``.
        R2cclError
            If this method had to wait and the communicator has ended. Without a wait, only `run`
            raises this error.
        """
        agreement = self._failover.agreement
        if agreement is None:
            return self.whole_health
        with self._owner:
            op = self._links.op + 1
            return agreement.enter(op) or self._await_health(agreement, op)

    def _await_health(self, agreement: HealthAgreement, op: int) -> Health:
        found: list[Health] = []

        def has_entered() -> bool:
            health = agreement.enter(op)
            if health is not None:
                found.append(health)
            return health is not None

        def pending() -> Pending:
            doing = f"call {op}, before it is planned"
            waits = tuple(Wait(peer, "agreement on the health") for peer in agreement.waits_for())
            return self._blocked(doing, waits=waits)

        self.check()
        self._wait(has_entered, _Patience(self.config.timeout_s, "R2CC_TIMEOUT_S", pending))
        return found[0]

    def run(
        self,
        plan: Plan | SelectPlan,
        make: Callable[[Plan, Links], Sequence[LaneRun]],
        computer: Computer | None = None,
    ) -> None:
        """Run a collective until it has finished.

        Parameters
        ----------
        plan : Plan or callable
            Plan of a collective that `enter` has entered, or a `SelectPlan`, for which this method
            enters the collective.
        make : callable
            ``make(plan, links)`` creates the lanes of the collective. It may create links, so it is
            called by the owner of the data loop.
        computer : Computer, optional
            Executes the work that the lanes defer.

        Raises
        ------
        R2cclError
            If the collective failed; no peer can write into its memory afterwards.
        """
        links, progress = self._links, self._progress
        with self._owner:
            # Most calls are small; each function call here takes 1 % of the time of such a call.
            if self._revocation.error is not None:
                self.check()
            if not isinstance(plan, Plan):
                agreement, health = self._failover.agreement, self.whole_health
                if agreement is not None:
                    op, steady = links.op + 1, agreement.steady
                    if steady is None:
                        health = self._await_health(agreement, op)
                    else:
                        agreement.last_started, health = op, steady
                plan = plan(health, links.op)
            if not plan.layout.peers <= links.connected:
                self._connect(plan.layout.peers)
            self._peers = plan.layout.peers
            self._is_calling = is_calling = True
            try:
                links.begin(plan.signature)
                runs = make(plan, links)
                consumers: dict[int, Consumer] = {}
                for run in runs:
                    for at in run.channels:
                        consumers[at] = run
                links.consumers = consumers
                if computer is not None or progress.ahead:
                    progress.begin(computer)
                self._runs = runs
                if links.op <= self._desync.asked_op:
                    self._desync.called(links.op)
                if self._revocation.error is not None:
                    self.check()
                for run in runs:
                    run.advance()
                progress.advance()
                self._wait(lambda: not any(run.remaining for run in runs), self._call)
                is_calling = False
            except BaseException as exc:
                self._give_up(exc)
                raise
            finally:
                self._runs = ()
                progress.finish()
                self._peers = frozenset()
                self._is_calling = is_calling and not self._is_settled
        if self._inbox:
            self._control.call_soon(self._serve)
        if not self._is_sending_rest and self._transport.has_unsent():
            self._is_sending_rest = True
            self._control.call_later(_REST_S, self._send_rest)

    def _connect(self, peers: frozenset[int]) -> None:
        """Connect data paths to those of the ranks of a plan that have none; wait for them."""
        self.nconnects += 1
        self._failover.connect_peers(peers)
        enough_s = self._clock() + STANDBY_S

        def is_connected() -> bool:
            if all(map(self._migration.is_connected, peers)):
                return True
            return self._clock() >= enough_s and all(map(self._migration.up, peers))

        def pending() -> Pending:
            doing = f"call {self._links.op + 1}, before its first slice"
            return self._blocked(doing, waits=self._waits_for_paths(peers))

        self._wait(is_connected, _Patience(self.config.timeout_s, "R2CC_TIMEOUT_S", pending))

    def call(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn()`` as the owner of the data loop.

        Ctrl-C during `fn` ends the communicator, because it may leave the transport's tables
        inconsistent.
        """
        with self._owner:
            try:
                return fn()
            except Exception:
                raise
            except BaseException as exc:
                self._give_up(exc)
                raise

    def register(self, memory: npt.NDArray[np.uint8]) -> RegisteredMemory:
        """Register host memory with the transport; Ctrl-C ends the communicator, as in `call`.

        Raises
        ------
        TransportError
            If a NIC refuses the memory, or the limit of registered memory would be exceeded.
        """
        return RegisteredMemory(self, self.call(partial(self._transport.register, memory)), memory)

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Register `nbytes` of device memory at `address` with the transport.

        The caller must own the data loop, as in `call`.

        Raises
        ------
        TransportError
            If a rail cannot reach the memory.
        """
        return self._transport.register_device(address, nbytes)

    def leave(self) -> None:
        """Wait until every slice of every rank is confirmed.

        Raises
        ------
        TransportTimeout
            If a peer does not confirm, or a rank does not call it, within
            ``R2CC_INIT_TIMEOUT_S``.
        R2cclError
            If the communicator has ended.

        Notes
        -----
        *Collective*: all ranks.
        """
        peers = frozenset(self._peers_of_job)
        with self._owner:
            self.check()
            self._links.confirm_all()
            self._progress.advance()
            self._wait(self._links.is_drained, self._patience(self._pending_drain))
            self._revocation.leave()
            self._wait(lambda: self._revocation.left >= peers, self._patience(self._pending_leave))
            self._revocation.spread()

    def fail_call(self, error: BaseException) -> None:
        """End the communicator after a call failed outside the data loop.

        The other ranks wait in the same collective and would otherwise wait until their timeout.
        """
        if self._revocation.error is None:
            self.revoke(f"a collective failed: {error!r}")

    def revoke(self, why: str) -> None:
        """End the communicator on all ranks; callable in any thread and in a signal handler."""
        message = Revoke("CommunicatorRevoked", why, self.rank)
        if self._revocation.error is None:
            # Sent first: this may be a signal handler whose own thread owns the loop, so that
            # `submit` only queues.
            self._control.gossip(message)
        error = CommunicatorRevoked(f"rank {self.rank}: {why}")
        self.submit(self._revocation.end, error, message)

    def tell_why(self) -> None:
        """Send the other ranks the reason why the communicator ended, if it ended with an error."""
        self._revocation.tell_why()

    def descriptors(self) -> list[int]:
        """Return the transport's file descriptors in use.

        Call it only while no other thread runs, as in the child of a fork.
        """
        return self._transport.descriptors()

    def close(self) -> None:
        """Free the transport once the running call, if any, has ended.

        If the call does not end within `_LAST_CALL_S`, log an error and free nothing.
        """
        if not self._owner.acquire(timeout=_LAST_CALL_S):
            _log.error(
                "rank %d: a call still runs %g s after the communicator was closed: its "
                "connections and memory stay in use; end the process to free them",
                self.rank, _LAST_CALL_S,
            )  # fmt: skip
            return
        try:
            self._transport.close()
        finally:
            self._owner.release()

    def check(self) -> None:
        """Raise if the communicator has ended.

        The first call raises a copy of the error that ended the communicator; later calls raise
        `CommunicatorRevoked`.
        """
        error = self._revocation.error
        if error is None:
            return
        if not self._has_raised:
            self._has_raised = True
            raise _without_frames(error)
        raise CommunicatorRevoked(
            f"rank {self.rank}: the communicator was revoked: {error}", reason=error
        ) from error

    def _wait(self, is_done: Callable[[], bool], patience: _Patience) -> None:
        """Run the data loop until ``is_done()``; the caller must own the loop."""
        clock, progress = self._clock, self._progress
        self._since_s = clock()
        deadline = self._since_s + patience.timeout_s
        self._waiting = patience
        self._control.is_busy = True
        idle_since = 0.0
        try:
            while not is_done():
                if self._inbox:
                    self._drain()
                    progress.advance()
                    continue  # an event may be what this wait is for
                if progress.step():
                    idle_since = 0.0
                    if self._revocation.error is None:
                        if self._migration.repairing:
                            # The control thread exchanges the announcements of a migration. A busy
                            # loop would make it wait 5 ms (Python's switch interval) for the GIL.
                            time.sleep(_GIVE_WAY_S)
                        continue
                now = clock()
                self._look(now, deadline, patience)
                if not idle_since:
                    idle_since = now
                if now - idle_since < self.config.spin_s:
                    os.sched_yield()
                elif progress.is_computing:
                    # No file descriptor reports the end of a kernel, so poll with short sleeps.
                    time.sleep(_GIVE_WAY_S)
                else:
                    self._sleep(min(_TICK_S, deadline - now))
        except BaseException as exc:
            self._give_up(exc)
            raise
        finally:
            self._waiting = None
            self._control.is_busy = False

    def _look(self, now: float, deadline: float, patience: _Patience) -> None:
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._failover.tick(now, self._peers)
            if self._runs:
                activity = sum(path.activity for path in self._links.paths.values())
                is_late = now >= deadline - patience.timeout_s / 2
                self._desync.look(now, self._links.op, activity, is_late)
            self._desync.spread()
        self.check()
        if now >= deadline:
            raise _timeout(patience)

    def _sleep(self, timeout_s: float) -> None:
        self._sleeping = True
        try:
            # The inbox is checked after the flag is set: a thread that adds an event later sees the
            # flag and wakes the loop.
            if not self._inbox:
                self._progress.step(timeout_s)
        finally:
            self._sleeping = False

    def _broken(self, cause: Exception) -> InternalError:
        error = InternalError(
            f"rank {self.rank}: the data loop failed with {cause!r}; please report this bug with "
            "the stack trace in the log"
        )
        error.__cause__ = cause
        return error

    def _give_up(self, exc: BaseException) -> None:
        """End the communicator, unless it has ended, because a call raises `exc`.

        Afterwards no peer can write into the call's memory. Further Ctrl-C does not interrupt this
        method.
        """
        is_sound = isinstance(exc, R2cclError)
        for _ in range(_MOST_INTERRUPTS):
            try:
                if isinstance(exc, R2cclError):
                    self._has_raised = True
                    self._fail(exc)
                else:
                    rank = self.rank
                    self._fail(CommunicatorRevoked(f"rank {rank}: interrupted by {exc!r}"))
                self._settle(is_sound)
                return
            except BaseException as again:
                is_sound = False
                _log.debug("rank %d: %r while a call ends", self.rank, again)

    def _settle(self, is_sound: bool) -> None:
        """Fence all paths and run the data loop until none is in use.

        Close the transport if some path stays in use. If not `is_sound`, close it at once, because
        an exception may have lost events of the transport.
        """
        if self._is_settled:
            return
        self._failover.fence_all()
        if not (is_sound and self._comes_to_rest()):
            try:
                self._transport.close()
            except Exception:
                _log.exception(
                    "rank %d: the transport was not freed completely; end the process to free it",
                    self.rank,
                )
        self._is_settled = True
        self._progress.forget()

    def _comes_to_rest(self) -> bool:
        clock = self._clock
        give_up_s = clock() + _SETTLE_S
        try:
            while not self._migration.is_quiet:
                if clock() >= give_up_s:
                    _log.error("rank %d: some paths did not drain; all are closed", self.rank)
                    return False
                self._progress.step(_GIVE_WAY_S)
        except Exception:
            _log.exception("rank %d: the data loop failed while paths were fenced", self.rank)
            return False
        return True

    def _fail(self, exc: R2cclError) -> None:
        """End the communicator, unless it has ended, because this rank found the error `exc`."""
        if self._revocation.error is not None:
            return
        if isinstance(exc, InternalError):
            _log.error("rank %d: %s", self.rank, exc, exc_info=exc)
        message = Revoke(type(exc).__name__, str(exc), self.rank)
        self._revocation.revoke(message, error=_without_frames(exc))

    # Descriptions of the current wait; called in any thread

    def pending(self) -> Pending:
        """Describe what the blocked call waits for; callable in any thread, does not wait."""
        waiting = self._waiting
        if waiting is not None:
            return waiting.pending()
        now = self._clock()
        return Pending(self.rank, "", now, now)

    def _patience(self, pending: Callable[[], Pending]) -> _Patience:
        """Return the patience of a wait in init() or close(), which `pending` describes."""
        return _Patience(self.config.init_timeout_s, "R2CC_INIT_TIMEOUT_S", pending)

    def _pending_init(self) -> Pending:
        return self._blocked("init()", waits=self._waits_for_paths(self._links.peers))

    def _waits_for_paths(self, peers: Iterable[int]) -> tuple[Wait, ...]:
        alone = [peer for peer in sorted(peers) if not self._migration.up(peer)]
        return tuple(
            Wait(peer, "path", why="; ".join(self._failover.obstacles(peer))) for peer in alone
        )

    def _pending_call(self) -> Pending:
        doing = f"call {self._links.op}, {describe(self._links.signature)}"
        return self._blocked(doing, self._absent(), waits_of_call(self._links, self._runs))

    def _pending_drain(self) -> Pending:
        return self._blocked(
            "close()", waits=waits_for_confirmation(self._links, is_eager_too=True)
        )

    def _pending_leave(self) -> Pending:
        ops = last_ops(self._links.paths, self._desync)
        waited = ops.keys() - self._revocation.left
        return self._blocked("close()", {peer: ops[peer] for peer in waited})

    def _absent(self) -> dict[int, int]:
        return absent(self._links.paths, self._desync, self._links.op)

    def _blocked(
        self, doing: str, missing: dict[int, int] | None = None, waits: tuple[Wait, ...] = ()
    ) -> Pending:
        rank, now = self.rank, self._clock()
        diagnosis = self._failover.diagnosis
        slow = diagnosis.slow_since(self._since_s) if diagnosis is not None else ()
        return Pending(rank, doing, now, self._since_s, missing or {}, waits, slow)


class RegisteredMemory:
    """Registration of host memory, as `Communicator.register` returns it.

    A context manager; leaving it, or calling `close`, ends the registration. Keeps the memory alive
    until then: a registration ends when its memory is freed, and the view of a ``bytearray`` or of
    a tensor, which the transport watches, has no other owner.
    """

    def __init__(
        self, engine: Engine, registered: Registered, memory: npt.NDArray[np.uint8]
    ) -> None:
        self._engine = engine
        self._registered: Registered | None = registered
        self._memory: npt.NDArray[np.uint8] | None = memory

    def close(self) -> None:
        """End the registration; idempotent. The memory itself does not change."""
        registered, self._registered = self._registered, None
        if registered is not None:
            self._engine.call(registered.close)
            self._memory = None

    def __enter__(self) -> RegisteredMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _without_frames(error: R2cclError) -> R2cclError:
    """Return a copy of `error` without its traceback, which would keep arrays of callers alive."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def _timeout(patience: _Patience) -> TransportTimeout:
    pending = patience.pending()
    awaited = {*pending.absent, *(wait.peer for wait in pending.waits)}
    return TransportTimeout(
        f"{pending}; gave up after {patience.timeout_s:g} s: check these ranks, or raise "
        f"{patience.variable} if they are only slow",
        rank=pending.rank,
        peer=awaited.pop() if len(awaited) == 1 else None,
    )


__all__ = ["STANDBY_S", "BackgroundControl", "Engine", "RegisteredMemory", "SelectPlan"]
