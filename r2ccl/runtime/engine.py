"""Engine: who may run the data loop, and for how long one waits.

`Progress` belongs to one thread at a time. A blocking call owns it while it waits; otherwise the
control thread does, so a rank that is busy in user code still answers failures, replays and
confirms. Whatever the control thread learns goes through an inbox: run at once if the loop is
free, else by the thread that owns it, which is woken.

Invariants: every wait has a deadline; no wait ends, by result, error or Ctrl-C, while a peer could
still write into the call's memory. A call that was left without an end, as a second Ctrl-C can do,
is ended by the control thread at its next tick.
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
from r2ccl.failover.revocation import Leaving, Revoke
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.desync_check import Calling, DesyncCheck
from r2ccl.runtime.executor import LaneRun
from r2ccl.runtime.progress import Computer, Progress, describe
from r2ccl.runtime.status import (
    HeldPath,
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

#: Long enough for a thread that waits for the GIL to take it.
_GIVE_WAY_S = 50e-6
#: How often the control thread sends what sockets did not take of a call that is over.
_REST_S = 0.002
#: Time for paths to come to rest after an error: a queue pair that does not in a second is
#: destroyed by its transport. And how often Ctrl-C can come meanwhile.
_SETTLE_S = 2.0
_MOST_INTERRUPTS = 1_000
#: Time for all rails to a new peer to come up, before a call begins over those that are.
STANDBY_S = 0.5
#: Time for a call to see that the communicator was closed.
_LAST_CALL_S = 10.0
#: Timers are looked at this often while a call waits; the suspicion timeout is 25 times as long.
_TICK_S = 0.02


#: Selects a collective's plan by the health to plan with and the number of the last collective.
SelectPlan = Callable[[Health, int], Plan]


class BackgroundControl(ControlPort, Protocol):
    """What the engine itself needs of the control plane."""

    is_busy: bool

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread."""
        ...

    def call_later(self, delay_s: float, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread after `delay_s`."""
        ...


class _Patience(NamedTuple):
    """How long something is waited for, by which setting, and what it is."""

    timeout_s: float
    variable: str
    pending: Callable[[], Pending]


class Engine:
    """Runs one rank's data loop; implements the control plane's handler.

    Parameters
    ----------
    context : RankContext
    control : BackgroundControl
        The context's.
    """

    def __init__(self, context: RankContext, control: BackgroundControl) -> None:
        self.rank = context.rank
        self.nranks = context.nranks
        self.config = context.config
        #: Rails channels are at home on.
        self.homes = context.homes
        #: Those of them whose ends the transport connects itself: RDMA NICs.
        self.joined = context.joined
        self._peers_of_job = context.peers
        self._transport = context.transport
        self._control = control
        self._clock = context.clock
        #: Health to plan with where ranks agree on none.
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
        #: Calls that had to connect data paths before their first slice.
        self.nconnects = 0
        #: The control thread sends what a call has left.
        self._is_sending_rest = False
        #: A call has begun and not ended.
        self._is_calling = False
        #: After an error: no path is in use any more.
        self._is_settled = False
        #: Who has called what, and the lanes of the collective under way.
        self._desync = DesyncCheck(context.peers, self.config.suspicion_timeout_s, control.send)
        self._runs: Sequence[LaneRun] = ()
        self._call = _Patience(self.config.timeout_s, "R2CC_TIMEOUT_S", self._pending_call)
        self._waiting: _Patience | None = None
        self._since_s = 0.0

    # Asked in any thread, at once

    @property
    def op(self) -> int:
        """Number of the collective that runs, or ran last."""
        return self._links.op

    @property
    def error(self) -> R2cclError | None:
        """The error that ended the communicator, if one did."""
        return self._revocation.error

    def repairs(self) -> tuple[Repair, ...]:
        """Return what was repaired, oldest first."""
        return tuple(self._migration.log.repairs.copy())

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return what was last found to be wrong with each path."""
        diagnosis = self._failover.diagnosis
        return () if diagnosis is None else diagnosis.verdicts()

    def known_health(self) -> Known | None:
        """Return the newest health this rank has heard of; None: ranks agree on none."""
        agreement = self._failover.agreement
        return None if agreement is None else agreement.known

    def rails(self, nics: Sequence[Nic]) -> tuple[RailHealth, ...]:
        """Return the state of every rail; ``nics[i]`` is the local end of rail i."""
        return rails(self._links.on_rails, self.repairs(), nics)

    def status(self, peers: Iterable[PeerInfo], last_heard: Callable[[int], float]) -> RankStatus:
        """Read what is under way and waited for.

        Parameters
        ----------
        peers : iterable of PeerInfo
            Every other rank.
        last_heard : callable
            Rank to the clock's reading of its last sign of life.
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
        """Take a message of `peer`."""
        if isinstance(message, Calling):
            self.submit(self._on_calling, peer, message.op)
        else:
            self.submit(self._failover.on_message, peer, message)

    def on_path(self, peer: int, rail: int, epoch: int, sock: Any) -> None:
        """Take an authenticated connection."""
        self.submit(self._migration.on_opened, peer, rail, epoch, sock)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float) -> None:
        """Give `peer` up."""
        self.submit(self._failover.on_peer_lost, peer, why, last_heard_s)

    def on_tick(self, now: float) -> None:
        """Keep the loop going while no call does."""
        self.submit(self._background, now)

    def on_carrier(self, rail: int, is_up: bool) -> None:
        """The local NIC of `rail` changed."""
        self.submit(self._failover.on_carrier, rail, is_up)

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Have the owner of the loop run ``fn(*args)``, or run it here if there is none."""
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
                # What was being handled is lost: to go on would be to wait for it for ever.
                self._fail(self._broken(exc))
            finally:
                self._owner.release()

    def _drain(self) -> None:
        while self._inbox:
            fn, args = self._inbox.popleft()
            fn(*args)

    def _background(self, now: float) -> None:
        """One round on behalf of a rank that is not in a call (or, harmless, of one that is)."""
        if self._revocation.error is None:
            self._progress.step()
            self._failover.tick(now, self._peers)
        elif not (self._is_settled or self._migration.is_quiet):
            self._progress.step()

    def _send_rest(self) -> None:
        """Send what sockets did not take of a call that is over; eager ones are over at once."""
        # First, as a call that ends from now on begins this anew.
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

    def _on_calling(self, peer: int, op: int) -> None:
        self._desync.on_calling(peer, op, self._links.op)

    # Called by the user's thread

    def start(self) -> None:
        """Connect every path; returns when all are up, or some to each peer at the deadline."""
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
        """Set the rate of a whole rail, in bytes/s."""
        with self._owner:
            self._failover.set_nominal_rate(rate)

    def enter(self) -> Health:
        """Start the next collective, whose plan `run` gets later; return the health to plan with.

        Waits while ranks agree on a new one.

        Raises
        ------
        R2cclError
            The communicator ended, or TransportTimeout.
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
        """Run a collective to its end.

        Parameters
        ----------
        plan : Plan or callable
            The plan of a collective that was entered; or what selects the plan of one that is
            entered now.
        make : callable
            Prepares the lanes of a planned collective. Links may be created, so the owner of the
            loop does it.
        computer : Computer, optional
            Executes the work that the lanes defer.

        Raises
        ------
        R2cclError
            The collective failed; afterwards no peer can write into its memory.
        """
        links, progress = self._links, self._progress
        with self._owner:
            # Most calls are small, and each function called here is 1 % of such a call.
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
            if not plan.layout.peers <= links.peers:
                self._connect(plan.layout.peers - links.peers)
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
                if self._desync.askers:
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
        """Connect data paths to ranks that a plan needs for the first time."""
        self.nconnects += 1
        for peer in sorted(peers):
            self._failover.add_peer(peer)
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
        """Run ``fn()`` as the owner of the data loop; Ctrl-C in its midst ends the communicator.

        What is half done then, in the transport's tables, would stay so.
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
        """Prepare `memory` with the transport; Ctrl-C ends the communicator, as in `call`."""
        return RegisteredMemory(self, self.call(partial(self._transport.register, memory)))

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Prepare device memory with the transport."""
        return self._transport.register_device(address, nbytes)

    def leave(self) -> None:
        """Collective: wait until every slice is confirmed here and everywhere."""
        peers = frozenset(self._peers_of_job)
        with self._owner:
            self.check()
            self._links.confirm_all()
            self._progress.advance()
            self._wait(self._links.is_drained, self._patience(self._pending_drain))
            self._revocation.is_leaving = True
            self._control.broadcast(Leaving())
            self._wait(lambda: self._revocation.left >= peers, self._patience(self._pending_leave))

    def fail_call(self, error: BaseException) -> None:
        """End the communicator: a call failed outside the data loop, and its peers wait for it."""
        if self._revocation.error is None:
            self.revoke(f"a collective failed: {error!r}")

    def revoke(self, why: str) -> None:
        """End the communicator everywhere, from any thread, and from a signal handler."""
        message = Revoke("CommunicatorRevoked", why, self.rank)
        if self._revocation.error is None:
            # At once: who owns the loop may be this very thread, below the handler.
            self._control.broadcast(message)
        error = CommunicatorRevoked(f"rank {self.rank}: {why}")
        self.submit(self._revocation.end, error, message)

    def tell_why(self) -> None:
        """Tell all ranks, before this one leaves, what ended the communicator, if anything did.

        Goodbyes of those that have heard may overtake the word of the one that ended it.
        """
        if self._revocation.reason is not None:
            self._control.broadcast(self._revocation.reason)

    def descriptors(self) -> list[int]:
        """Descriptors in use; read where nothing else runs, as in the child of a fork."""
        return self._transport.descriptors()

    def close(self) -> None:
        """Free the transport, when the call that is under way, if one is, has ended."""
        if not self._owner.acquire(timeout=_LAST_CALL_S):
            _log.error(
                "rank %d: a call still runs %g s after the communicator was closed: its "
                "connections and memory stay in use until the process ends; end it to free them",
                self.rank, _LAST_CALL_S,
            )  # fmt: skip
            return
        try:
            self._transport.close()
        finally:
            self._owner.release()

    def check(self) -> None:
        """Raise what ended the communicator: first a copy of it, then `CommunicatorRevoked`."""
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
        """Run the loop until `is_done`; the owner's lock is held."""
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
                if progress.step():
                    idle_since = 0.0
                    if self._revocation.error is None:
                        if self._migration.repairing:
                            # The control thread carries the announcements: a busy loop would
                            # have it wait for the GIL, 5 ms at a time.
                            time.sleep(_GIVE_WAY_S)
                        continue
                now = clock()
                self._look(now, deadline, patience)
                if not idle_since:
                    idle_since = now
                if now - idle_since < self.config.spin_s:
                    os.sched_yield()
                elif progress.is_computing:
                    # No descriptor tells that a kernel has ended: look, and let others run.
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
                self._desync.look(now, self._links.op, activity, is_late, self._absent)
        self.check()
        if now >= deadline:
            raise _timeout(patience)

    def _sleep(self, timeout_s: float) -> None:
        self._sleeping = True
        try:
            # The inbox is looked at after the flag is set: a later message sees it and wakes.
            if not self._inbox:
                self._progress.step(timeout_s)
        finally:
            self._sleeping = False

    def _broken(self, cause: Exception) -> InternalError:
        error = InternalError(
            f"rank {self.rank}: the data loop failed with {cause!r}; please report it, "
            "with the stack that the log has"
        )
        error.__cause__ = cause
        return error

    def _give_up(self, exc: BaseException) -> None:
        """End the communicator, if it has not ended, because a call ends with `exc`.

        Afterwards no peer can write into its memory; more Ctrl-C does not break this off.
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
        """Go on until no path is in use.

        Paths that do not come to rest are closed; and all at once where an exception may have come
        between the transport and who heard its events.
        """
        if self._is_settled:
            return
        self._failover.fence_all()
        if not (is_sound and self._comes_to_rest()):
            try:
                self._transport.close()
            except Exception:
                _log.exception("rank %d: not all of the transport was freed", self.rank)
        self._is_settled = True
        self._progress.forget()

    def _comes_to_rest(self) -> bool:
        clock = self._clock
        give_up_s = clock() + _SETTLE_S
        try:
            while not self._migration.is_quiet:
                if clock() >= give_up_s:
                    _log.error("rank %d: paths did not come to rest", self.rank)
                    return False
                self._progress.step(_GIVE_WAY_S)
        except Exception:
            _log.exception("rank %d: the data loop failed in its end", self.rank)
            return False
        return True

    def _fail(self, exc: R2cclError) -> None:
        """End the communicator, if it has not ended, because of an error found here."""
        if self._revocation.error is not None:
            return
        if isinstance(exc, InternalError):
            _log.error("rank %d: %s", self.rank, exc, exc_info=exc)
        message = Revoke(type(exc).__name__, str(exc), self.rank)
        self._revocation.revoke(message, error=_without_frames(exc))

    # What is waited for; called in any thread

    def pending(self) -> Pending:
        """Say what the call that is blocked waits for; any thread, at once."""
        waiting = self._waiting
        if waiting is not None:
            return waiting.pending()
        now = self._clock()
        return Pending(self.rank, "", now, now)

    def _patience(self, pending: Callable[[], Pending]) -> _Patience:
        """Those of init() and close()."""
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
    """What `Communicator.register` returns: a context manager, or `close` it by hand."""

    def __init__(self, engine: Engine, registered: Registered) -> None:
        self._engine = engine
        self._registered: Registered | None = registered

    def close(self) -> None:
        """End the registration. Idempotent; the memory itself stays as it is."""
        registered, self._registered = self._registered, None
        if registered is not None:
            self._engine.call(registered.close)

    def __enter__(self) -> RegisteredMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _without_frames(error: R2cclError) -> R2cclError:
    """Return a copy of `error` without its traceback, which would keep the caller's arrays."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def _timeout(patience: _Patience) -> TransportTimeout:
    pending = patience.pending()
    awaited = {*pending.absent, *(wait.peer for wait in pending.waits)}
    return TransportTimeout(
        f"{pending}; it gave up after {patience.timeout_s:g} s: look at these ranks, or raise "
        f"{patience.variable} if they are only slow",
        rank=pending.rank,
        peer=awaited.pop() if len(awaited) == 1 else None,
    )


__all__ = ["STANDBY_S", "BackgroundControl", "Engine", "RegisteredMemory", "SelectPlan"]
