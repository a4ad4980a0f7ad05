"""Engine: runs the calls of one communicator in the data loop of its job.

The engine numbers the calls. It enters each call into the health agreement, connects the ranks of
the call's plan, and runs the lanes of the plan (one per channel) until all have ended. Each
communicator of a job has an engine. The communicators share the data loop, the paths and the
control plane, and a failure of one communicator ends all of them.

In ``rank``, in a health, and within the communicator's control messages, ranks are numbered as in
the communicator. In ``peers``, in errors, in the status (except for its health), and as senders of
control messages, ranks are numbered as in the job. In the job's first communicator, both numbers
are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.base import Post
from r2ccl.config import Config
from r2ccl.errors import (
    CommunicatorRevoked,
    ConcurrentCalls,
    R2cclError,
)
from r2ccl.failover.context import RankContext
from r2ccl.failover.health.driver import HealthAgreement, Known
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.links import Links
from r2ccl.failover.revocation import Revoke
from r2ccl.kernels.arrays import data_of
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.compiled.call import CompiledCalls
from r2ccl.runtime.compiled.program import CompiledProgram
from r2ccl.runtime.contexts import Closing, Context, ContextPost, Contexts, InContext
from r2ccl.runtime.data_loop import BackgroundControl, DataLoop
from r2ccl.runtime.desync_check import Calling, DesyncCheck
from r2ccl.runtime.exclusion import Exclusions
from r2ccl.runtime.executor import HostLanes, LaneRun, are_done, begin_lanes
from r2ccl.runtime.messages.messenger import Messenger
from r2ccl.runtime.patience import Caller, Patience, revoked, without_frames
from r2ccl.runtime.progress import (
    Computer,
    closed_early,
    describe,
    difference,
    is_other_call,
)
from r2ccl.runtime.reports import Reports
from r2ccl.runtime.staged_call import StagedCall, words_of
from r2ccl.runtime.status import Operation, Pending
from r2ccl.runtime.waits import Waits
from r2ccl.shm.arrays import form_of
from r2ccl.shm.repeat import Repeat, Role, repeat_of
from r2ccl.transport.base import Registered
from r2ccl.transport.preconnected import Unregistered

#: Time in seconds for which a call waits for all paths to new peers; then one to each is enough.
STANDBY_S = 0.5


class LocalPath(Protocol):
    """Interface through which the engine of a communicator sees its calls in shared memory."""

    @property
    def ncalls(self) -> int:
        """Number of begun calls that use only shared memory, which the data loop does not count."""
        ...

    def ahead(self) -> dict[int, int]:
        """Return how many calls each other rank is ahead of this rank, by rank in the job.

        The result omits ranks that have not begun more calls than this rank.
        """
        ...

    def end(self) -> None:
        """Wake the running call; it and later calls then raise the communicator's error."""
        ...


class _ClosedPath(NamedTuple):
    """`LocalPath` of a communicator whose shared memory is no longer in use."""

    ncalls: int

    def ahead(self) -> dict[int, int]:
        """Return an empty dict: the calls of the other ranks are not known."""
        return {}

    def end(self) -> None:
        """Do nothing: no call can run."""


#: Function that returns the plan of the next collective; its arguments are the health to plan with
#: and the number of the collective before it.
SelectPlan = Callable[[Health, int], Plan]


class Engine:
    """Runner of the calls of one communicator.

    `of_job` makes the engine of a job's first communicator, `derived` that of any other.

    Parameters
    ----------
    job : RankContext
        This rank in the job.
    control : BackgroundControl
        Control plane of `job`.
    loop : DataLoop
        Data loop of the job.
    contexts : Contexts
        Communicators of the job at this rank.
    context : Context
        Identity of the communicator.
    agreement : HealthAgreement or None
        Agreement of the communicator on the health; None in mode failstop.
    desync : DesyncCheck
    post : Post
        Sends control messages to ranks of the communicator.

    Attributes
    ----------
    rank, nranks : int
        This rank in the communicator, and number of its ranks.
    rank_in_job : int
        This rank in the job, which errors name.
    context : Context
    waits : Waits
    exclusions : Exclusions
    reports : Reports
    waiting, since_s, is_calling, has_raised, peers
        As in `r2ccl.runtime.patience.Caller`.
    """

    def __init__(
        self,
        job: RankContext,
        control: BackgroundControl,
        loop: DataLoop,
        contexts: Contexts,
        context: Context,
        *,
        agreement: HealthAgreement | None,
        desync: DesyncCheck,
        post: Post,
    ) -> None:
        self.context = context
        self.rank = context.members.index(job.rank)
        self.nranks = len(context.members)
        self.rank_in_job = job.rank
        self.config = job.config
        #: Home rails: the rails that channels use while all are up.
        self.homes = job.homes
        #: Home rails whose connections the transport makes itself: those of RDMA NICs.
        self.joined = job.joined
        #: Health to plan with in mode failstop, which has no health agreement.
        self.whole_health = job.whole_health().of_ranks(context.members)
        self._job = job
        self._control = control
        self._transport = job.transport
        self._clock = job.clock
        self._loop = loop
        self._owner = loop.owner
        self._contexts = contexts
        self._links = loop.links
        self._progress = loop.progress
        self._failover = loop.failover
        self._migration = loop.failover.migration
        self._revocation = loop.failover.revocation
        self._agreement = agreement
        self._desync = desync
        self._post = post
        #: Ranks that have closed the communicator; complete on its rank 0 only.
        self._closed: set[int] = set()
        self._calls = loop.links.calls_of(context.context_id)
        self._calls.skip_to(context.first_op - 1)
        #: Number of calls and messages that had to connect data paths before their first slice.
        self.nconnects = 0
        #: Calls in shared memory, and how many of them `_calls` has counted; see `_count_local`.
        self._local: LocalPath | None = None
        self._nlocal = 0
        #: Lanes of the call in progress.
        self._runs: Sequence[LaneRun] = ()
        self.waits = Waits(job, loop, context, self, desync)
        self.exclusions = Exclusions(job, loop)
        self.reports = Reports(job, loop, self, self.waits, self.exclusions)
        self._call = Patience(self.config.timeout_s, "timeout_s", self._pending_call)
        self._run_compiled = partial(loop.run_compiled, self, self._call)
        self.waiting: Patience | None = None
        self.since_s = 0.0
        self.is_calling = False
        self.has_raised = False
        self.peers: frozenset[int] = frozenset()
        loop.callers.append(self)
        #: Messages between two ranks of the communicator. Made now, because a peer may send many
        #: before this rank has a use for them.
        self.messenger = Messenger(
            job, loop, context, self, connect=self._connect, health=self._newest_health
        )

    @classmethod
    def of_job(cls, job: RankContext, control: BackgroundControl) -> Engine:
        """Return the engine of a job's first communicator, with a new data loop."""
        loop, contexts = DataLoop(job, control), Contexts()
        agreement = loop.failover.agreement
        if agreement is not None:
            agreement.on_known(contexts.adopt)
        everyone = Context(0, 1, tuple(range(job.nranks)))
        desync = DesyncCheck(job.rank, job.peers, job.config.suspicion_timeout_s, control)
        return cls(
            job, control, loop, contexts, everyone, agreement=agreement, desync=desync, post=control
        )

    def derived(self, context: Context, config: Config) -> Engine:
        """Return the engine of a new communicator, which shares the data loop of this engine.

        The new communicator begins with the initial health of the job. Except in mode failstop, its
        rank 0 then starts an agreement of its ranks on the present health of the job.

        Parameters
        ----------
        context : Context
            Identity of the new communicator; this rank is among its members.
        config : Config
            Settings of the new communicator: those of this one, perhaps with another ``timeout_s``.
        """
        rank = context.members.index(self._job.rank)
        health = self._job.whole_health().of_ranks(context.members)
        post = ContextPost(self._control, rank, context)
        others = [peer for peer in range(len(context.members)) if peer != rank]
        desync = DesyncCheck(rank, others, self.config.suspicion_timeout_s, post)
        agreement = None
        if self._agreement is not None:
            agreement = HealthAgreement(rank, health, control=post, clock=self._clock)
            agreement.skip_to(context.first_op - 1)

        def make() -> Engine:
            made = Engine(
                self._job._replace(config=config), self._control, self._loop, self._contexts,
                context, agreement=agreement, desync=desync, post=post,
            )  # fmt: skip
            self._contexts.add(made)
            known = self._failover.agreement
            if known is not None:
                made.adopt(known.known.health)
            return made

        try:
            made: Engine = self.call(make)
        except BaseException:
            self._contexts.give_up(context)
            raise
        return made

    # State; any thread may read it, without waiting

    @property
    def op(self) -> int:
        """Number of the running collective, or of the last one."""
        local, compiled = self._local, self._loop.compiled
        op = self._calls.op if compiled is None else compiled.last_op_of(self._calls)
        return op + (0 if local is None else local.ncalls - self._nlocal)

    @property
    def error(self) -> R2cclError | None:
        """Error that ended the job's communicators at this rank; None while they are in use."""
        return self._revocation.error

    @property
    def contexts(self) -> Contexts:
        """Communicators of the job at this rank."""
        return self._contexts

    def known_health(self) -> Known | None:
        """Return the newest health that this rank has received.

        None in mode failstop, which has no health agreement.
        """
        return None if self._agreement is None else self._agreement.known

    def _newest_health(self) -> Health:
        known = self.known_health()
        return self.whole_health if known is None else known.health

    def operation(self) -> Operation | None:
        """Return the running collective; None if there is none.

        Collectives in shared memory, and repetitions in compiled code, do not count.
        """
        op, signature, program = self.op, self._calls.signature, self._loop.program_of(self._calls)
        left = tuple(run.remaining for run in self._runs)
        if program is not None:
            left = (program.remaining,)
        return Operation(op, describe(signature), left) if left else None

    # Called in the control thread, for the job

    def on_message(self, peer: int, message: object) -> None:
        """Handle a control message from `peer`, a rank of the job.

        The engine of the job's first communicator receives the messages of all communicators.
        """
        if self.context.context_id:
            self._take(self.context.members.index(peer), message)
        elif isinstance(message, InContext):
            self._loop.submit(self._contexts.on_message, peer, message)
        elif isinstance(message, Calling):
            self._loop.submit(self._take, peer, message)
        else:
            self._loop.submit(self._failover.on_message, peer, message)

    def _take(self, peer: int, message: Any) -> None:
        """Handle a control message of this communicator from `peer`, one of its ranks."""
        if isinstance(message, Calling):
            # The last call may run in shared memory, where peers see whether this rank takes
            # part; all earlier calls have ended.
            op = max(self._calls.op, self.op - 1)
            self._desync.on_calling(message, op, self._signature_of(op))
            self._compare(message)
        elif isinstance(message, Closing):
            self._note_closed(peer)
        elif self._agreement is not None and self._revocation.error is None:
            self._agreement.on_message(peer, message)

    def _signature_of(self, op: int) -> int | None:
        """Return the packed signature of collective `op` of this rank; None if it is not known."""
        if op and op == self.waits.local_op:
            return self.waits.local_signature
        return self._calls.signatures.get(op)

    def _compare(self, message: Calling) -> None:
        """End the communicator if a reported call differs from this rank's call of that number."""
        for rank, op, theirs in message.last:
            mine, members = self._signature_of(op), self.context.members
            if mine is None or theirs is None or rank not in self._desync.said:
                continue
            if is_other_call(mine, theirs):
                error = difference(op, self._job.rank, members[rank], mine, theirs)
                self._revocation.revoke(Revoke("InvalidArgument", str(error), self._job.rank))

    def on_path(self, peer: int, rail: int, epoch: int, sock: Any) -> None:
        """Add an authenticated connection of `peer` as epoch `epoch` of the path on `rail`."""
        self._loop.submit(self._migration.on_opened, peer, rail, epoch, sock)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """Handle the loss of the process of `peer`; `why` is the reason.

        `last_heard_s` is the time since the last sign of life of `peer`, in seconds; None: not
        known.
        """
        self._loop.submit(self._failover.on_peer_lost, peer, why, last_heard_s)

    def on_tick(self, now: float) -> None:
        """Handle a tick of the control thread, see `DataLoop.tick`; `now` is in seconds."""
        self._loop.tick(now)

    def on_carrier(self, rail: int, is_up: bool) -> None:
        """Handle a change of the carrier of the local NIC of `rail`: gained (`is_up`) or lost."""
        self._loop.submit(self._failover.on_carrier, rail, is_up)

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Run ``fn(*args)`` here if no thread owns the data loop; otherwise let the owner run it.

        This method does not wait for the owner.
        """
        self._loop.submit(fn, *args)

    # Called by the owner of the data loop

    def tick(self, now: float) -> None:
        """Do the periodic work of the communicator; `now` is in seconds."""
        if self._revocation.error is not None:
            return
        if self.context.context_id and self._agreement is not None:
            self._agreement.tick(now)
        waiting = self.waiting
        if self._runs and waiting is not None:
            activity = sum(path.activity for path in self._links.paths.values())
            is_late = now >= self.since_s + waiting.timeout_s / 2
            self._desync.look(now, self._calls.op, self._calls.signature, activity, is_late)
        elif self.waits.local_op and waiting is not None:
            is_late = now >= self.since_s + waiting.timeout_s / 2
            op, signature = self.waits.local_op, self.waits.local_signature
            self._desync.look(now, op, signature, 0, is_late)
            if self.waits.is_local_part:
                self._desync.answer(op, signature)
        self._desync.spread()

    def adopt(self, health: Health) -> None:
        """Propose `health`, the health of the job, to the agreement, if any; only on rank 0."""
        if self.rank == 0 and self._agreement is not None:
            self._agreement.adopt(health.of_ranks(self.context.members))

    # Called in the user's thread

    def start(self) -> None:
        """Connect the paths to the first peers (`RankContext.first_peers`).

        Return when all these paths are up or, after ``R2CC_CONNECT_TIMEOUT_S``, when at least one
        path to each of these peers is up. The wait ignores paths of excluded NICs and, after
        ``R2CC_CONNECT_TIMEOUT_S``, peers that have already left.

        Raises
        ------
        TransportTimeout
            If a peer has no path after ``R2CC_INIT_TIMEOUT_S``.
        R2cclError
            If the communicator has ended.
        """
        self._loop.owned(self._start)

    def _start(self) -> None:
        """Implement `start`, as the owner of the data loop."""
        self._failover.start()
        give_up = self._clock() + self.config.connect_timeout_s

        def is_connected() -> bool:
            if self._migration.is_whole:
                return True
            is_late = self._clock() >= give_up
            # A rank that has left already will not exchange data any more.
            awaited = self._links.peers - self._revocation.left
            return is_late and all(map(self._migration.up, awaited))

        self._loop.wait(self, is_connected, self._patience(self._pending_init), spins=False)

    def set_nominal_rate(self, rate: int) -> None:
        """Set the nominal bandwidth of each rail, in bytes per second; 0 means unknown."""
        self.call(partial(self._failover.set_nominal_rate, rate))

    def enter(self) -> Health:
        """Enter the next collective and return the health to plan it with.

        Wait while the ranks agree on a new health. The caller then passes the plan to `run`.

        Raises
        ------
        TransportTimeout
            If the ranks do not agree within ``R2CC_TIMEOUT_S``.
        ConcurrentCalls
            As `DataLoop.acquire`.
        R2cclError
            If the communicator has ended and this method had to wait. If it did not have to wait,
            `run` raises this error.
        """
        agreement = self._agreement
        if agreement is None:
            return self.whole_health

        def enter() -> Health:
            self._count_local()
            op = self._calls.op + 1
            return agreement.enter(op) or self._await_health(agreement, op)

        return self._loop.owned(enter)

    def _await_health(self, agreement: HealthAgreement, op: int) -> Health:
        found: list[Health] = []

        def has_entered() -> bool:
            health = None if found else agreement.enter(op)
            if health is not None:
                found.append(health)
            return bool(found)

        def pending() -> Pending:
            return self.waits.for_health(op, agreement.waits_for())

        self.check()
        patience = Patience(self.config.timeout_s, "timeout_s", pending)
        self._loop.wait(self, has_entered, patience)
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
            called by the owner of the data loop. If `make` is a `HostLanes`, compiled code may run
            the collective without lanes.
        computer : Computer, optional
            Executes the work that the lanes defer.

        Raises
        ------
        ConcurrentCalls
            As `DataLoop.acquire`.
        R2cclError
            If the communicator has ended, or the collective failed; afterwards no peer can write
            into the collective's memory.
        """
        loop, links, progress, calls = self._loop, self._links, self._progress, self._calls
        try:
            # Most calls are small; each function call here takes 1 % of the time of a small call.
            owner = self._owner
            if owner._is_owned() or not owner.acquire(blocking=False):  # type: ignore[attr-defined]
                loop.acquire()
            elif loop.compiled is not None and loop.compiled.held is not None:
                loop.compiled.settle()
            if self._revocation.error is not None:
                self.check()
            if self._local is not None:
                self._count_local()
            agreement, health = self._agreement, None
            if not isinstance(plan, Plan):
                health = self.whole_health
                if agreement is not None:
                    op, steady = calls.op + 1, agreement.steady
                    if steady is None:
                        health = self._await_health(agreement, op)
                    else:
                        agreement.last_started, health = op, steady
                plan = plan(health, calls.op)
            if not plan.layout.peers <= links.connected:
                self._connect(plan.layout.peers)
            self.peers = plan.layout.peers
            self.is_calling = is_calling = True
            try:
                links.begin(calls, plan.signature, plan.pairs)
                if computer is not None or calls.ahead:
                    progress.begin(calls, computer)
                if calls.op <= self._desync.asked_op:
                    self._desync.called(calls.op, plan.signature)
                if self._revocation.error is not None:
                    self.check()
                runs: Sequence[LaneRun] | None = None
                compiled = loop.compiled
                if compiled is not None and type(make) is HostLanes:
                    if loop.is_tick_due:  # else the next tick would interrupt compiled code
                        loop.run_due_timers(has_others=compiled.has_other_events(plan))
                    if loop.inbox:
                        loop.serve_inbox()
                    # A repetition asks neither for the health nor for a plan nor for `asked_op`:
                    # the call is held only if all stay the same while the loop has this owner.
                    is_steady = health is not None and plan.is_lasting
                    is_steady = is_steady and calls.op >= self._desync.asked_op
                    if agreement is not None:
                        is_steady = is_steady and agreement.steady is health
                    on_settled = self._note_started if is_steady else None
                    runs = compiled.run(
                        plan, make, calls, self._run_compiled, on_settled, health=health
                    )
                if runs is None:
                    runs = make(plan, links)
                if compiled is None or compiled.held is None:
                    self._runs = runs
                    begin_lanes(runs, calls)
                    progress.advance()
                    loop.wait(self, partial(are_done, runs), self._call)
                is_calling = False
            except BaseException as exc:
                loop.give_up(self, exc)
                raise
            finally:
                self._leave_call(is_calling)
        finally:
            try:  # as in `DataLoop.owned`, inlined: most calls are small
                self._owner.release()
            except RuntimeError:  # not owned
                pass
            else:
                loop.wake_followers()
        if loop.inbox:
            self._control.call_soon(loop.serve)
        loop.send_rest()

    def _leave_call(self, is_calling: bool) -> None:
        """Clear the state of the call in progress.

        `is_calling` is true if the call has failed; its paths may then still be in use.
        """
        self._runs = ()
        self._progress.finish(self._calls)
        self.peers = frozenset()
        self.is_calling = is_calling and not self._loop.is_settled

    # Repeated calls in compiled code

    @property
    def is_owner(self) -> bool:
        """True if the calling thread owns the data loop."""
        return self._owner._is_owned()  # type: ignore[attr-defined, no-any-return]

    @property
    def held_program(self) -> CompiledProgram | None:
        """Program of the last call, if the call is held; see `r2ccl.runtime.compiled.call`."""
        compiled = self._loop.compiled
        held = None if compiled is None else compiled.held
        return None if held is None or held.current.calls is not self._calls else held.program

    def _switch(self, program: CompiledProgram, compiled: CompiledCalls) -> bool:
        """Prepare a repetition of the last call of `program`; return False if it is impossible.

        It is impossible if the call might now have another plan, the communicator has ended, a rank
        waits for the report of a later call, calls in shared memory are not counted yet, or
        `CompiledCalls.switch` returns False.
        """
        agreement, local = self._agreement, self._local
        health = self.whole_health if agreement is None else agreement.steady
        is_steady = health is not None and program.health is health
        if not is_steady or compiled.last_op_of(self._calls) < self._desync.asked_op:
            return False
        if self._revocation.error is not None:
            return False
        if local is not None and local.ncalls != self._nlocal:
            return False
        return compiled.switch(program, self._calls, self._note_started)

    def repeat_of(
        self,
        program: CompiledProgram,
        x: npt.NDArray[Any],
        out: npt.NDArray[Any],
        *,
        rest: tuple[Any, ...],
        uses_input: bool,
        role: Role,
        call: StagedCall,
        proceed: Callable[[Any, Any, int], None],
    ) -> Repeat:
        """Return a function that repeats the call of `program` on arrays of the form of `x`, `out`.

        For the form, see `r2ccl.shm.arrays.form_of`. `call` is the memory of the call with `x` and
        `out`. ``proceed(x, out, result)`` must call `Engine.proceed`. For the other parameters and
        the errors, see `r2ccl.shm.repeat.repeat_of`.
        """
        loop = self._loop
        assert loop.compiled is not None
        form = form_of(x, out)
        words, memory = words_of(call, data_of(form), x, out)
        repeat = repeat_of(
            loop.compiled.repeated,
            program.address,
            data_of(words),
            rest,
            uses_input=uses_input,
            output=role,
            proceed=proceed,
            kept=(program, form, words, memory, x.dtype, out.dtype),
        )
        return partial(loop.repeat, self, program, partial(self._switch, program), repeat)

    def proceed(self, program: CompiledProgram, lanes: HostLanes, result: int) -> None:
        """Finish a repeated call whose loop has returned `result`, neither FINISHED nor CHANGED.

        The calling thread must own the data loop. This method raises the same errors as `run`.
        """
        loop = self._loop
        assert loop.compiled is not None
        if loop.compiled.has_ended(result):
            return
        self.peers = program.layout.peers
        self.is_calling = is_calling = True
        try:
            self._runs = runs = loop.compiled.proceed(lanes, result, self._run_compiled)
            begin_lanes(runs, self._calls)
            self._progress.advance()
            loop.wait(self, partial(are_done, runs), self._call)
            is_calling = False
        except BaseException as exc:
            loop.give_up(self, exc)
            raise
        finally:
            self._leave_call(is_calling)
        loop.send_rest()

    def _note_started(self, op: int) -> None:
        """Tell the agreement that `op` is the last collective that was started."""
        if self._agreement is not None:
            self._agreement.last_started = op

    # Calls in shared memory

    def attach(self, local: LocalPath) -> None:
        """Count the calls of `local` too; call ``local.end()`` when the communicator ends."""
        self._local = local
        self.watch_end(local.end)

    def detach(self, local: LocalPath) -> None:
        """Undo `attach`, because `local` is closed; its calls remain included in the count."""
        # Only the owner of the data loop may count them, and it does so before the next call.
        self._local = _ClosedPath(local.ncalls)
        self.unwatch_end(local.end)

    def watch_end(self, act: Callable[[], None]) -> None:
        """Call ``act()``, in any thread, when the communicator ends; at once if it has ended."""
        self._revocation.on_end.append(act)
        if self._revocation.error is not None:
            act()

    def unwatch_end(self, act: Callable[[], None]) -> None:
        """Undo `watch_end`: do not call ``act()`` when the communicator ends."""
        self._revocation.on_end.remove(act)

    def _count_local(self) -> None:
        """Count the calls in shared memory that were begun since this method last ran."""
        if self._local is not None:
            ncalls = self._local.ncalls
            if ncalls != self._nlocal:
                self._calls.pass_over(ncalls - self._nlocal)
                self._nlocal = ncalls

    def fail_local(self, error: BaseException) -> None:
        """End the communicator because a call or message in shared memory raises `error`."""
        rank = self._job.rank
        # A call raises its own `R2cclError` even if another rank has ended the communicator before.
        # Ctrl-C then does not tell the caller of that end, so the next call must raise the error.
        if isinstance(error, R2cclError) or self._revocation.error is None:
            self.has_raised = True
        if not isinstance(error, R2cclError):
            error = CommunicatorRevoked(f"rank {rank}: interrupted by {error!r}")
        self.note_end_known()
        try:
            self.call(partial(self._loop.fail, error))
        except ConcurrentCalls:  # in a signal handler that interrupted a call in the data loop
            self._loop.submit(self._loop.fail, error)

    def _connect(self, peers: frozenset[int]) -> None:
        """Connect data paths to each of `peers` (ranks of the job) that has none; wait for them.

        After `STANDBY_S`, one path to each peer is enough. Paths on the rails in
        `RankContext.last_resorts` are also connected, but this method does not wait for them,
        because they are used only if all other rails are lost. It also does not wait for paths with
        a port that is known to be down.
        """
        self.nconnects += 1
        self._failover.connect_peers(peers)
        enough_s = self._clock() + STANDBY_S
        last_resorts = self._job.last_resorts

        def is_connected() -> bool:
            if all(self._migration.is_connected(peer, apart=last_resorts) for peer in peers):
                return True
            return self._clock() >= enough_s and all(map(self._migration.up, peers))

        def pending() -> Pending:
            doing = f"call {self._calls.op + 1} or a message, before its first slice"
            return self.waits.for_paths(doing, peers)

        patience = Patience(self.config.timeout_s, "timeout_s", pending)
        try:
            self._loop.wait(self, is_connected, patience, spins=False)
        finally:
            self._failover.joined(peers)

    def call(self, fn: Callable[[], Any]) -> Any:
        """Call ``fn()`` as the owner of the data loop, and return its result.

        Ctrl-C during `fn` ends the communicator, because the transport's tables may then be
        inconsistent.

        Raises
        ------
        ConcurrentCalls
            As `DataLoop.acquire`.
        """

        def run() -> Any:
            try:
                return fn()
            except Exception:
                raise
            except BaseException as exc:
                self._loop.give_up(self, exc)
                raise

        return self._loop.owned(run)

    def register(self, memory: npt.NDArray[np.uint8]) -> RegisteredMemory:
        """Register host memory, which may be empty, with the transport; return the registration.

        Ctrl-C during this method ends the communicator, as in `call`.

        Raises
        ------
        TransportError
            If a NIC refuses the memory, or the limit of registered memory would be exceeded.
        ConcurrentCalls
            As `DataLoop.acquire`.
        """
        register = partial(self._transport.register, memory) if memory.size else Unregistered
        return RegisteredMemory(self, self.call(register), memory)

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Register `nbytes` of device memory at `address` with the transport; return the result.

        Only the owner of the data loop may call this method, for example a function that `call`
        runs.

        Raises
        ------
        InvalidArgument
            If the bytes are not part of one allocation.
        TransportError
            If a rail cannot reach the memory, or the limit of registered memory would be exceeded.
        """
        return self._transport.register_device(address, nbytes)

    def leave(self) -> None:
        """Wait until the slices of all ranks are confirmed and all ranks have called this method.

        Raises
        ------
        TransportTimeout
            If a peer does not confirm a slice, or a rank does not call this method, within
            ``R2CC_INIT_TIMEOUT_S``.
        InvalidArgument
            If another rank is known to have called a collective that this rank has not called.
        R2cclError
            If the communicator has ended.

        Notes
        -----
        *Collective*: all ranks.
        """
        self._loop.owned(self._leave)

    def _leave(self) -> None:
        """Implement `leave`, as the owner of the data loop."""
        peers, loop = frozenset(self._job.peers), self._loop
        self.check()
        self._links.drop_messages()
        self._links.confirm_all()
        self._progress.advance()
        patience = self._patience(self.waits.for_confirmation)
        loop.wait(self, lambda: self._is_last() and self._links.is_drained(), patience)
        self._revocation.leave()
        patience = self._patience(self._pending_leave)
        loop.wait(self, lambda: self._is_last() and self._revocation.left >= peers, patience)
        self._revocation.spread()

    def _is_last(self) -> bool:
        """Return False if a peer is known to have called more collectives than this rank.

        In this case, also end the communicator, because the peer would wait for this rank, which is
        in `leave`.
        """
        rank, own, ops = self._job.rank, self.op, self.waits.last_ops()
        if self._local is not None:
            ops |= {peer: own + ncalls for peer, ncalls in self._local.ahead().items()}
        for peer, op in ops.items():
            if op > own:
                error = closed_early(rank, own, peer, op)
                self._revocation.revoke(Revoke("InvalidArgument", str(error), rank))
                return False
        return True

    def remove(self) -> None:
        """Leave a communicator that `derived` made; no call and no message may be in progress.

        This rank takes part in the communicator's health agreement until all ranks have left the
        communicator.
        """

        def leave() -> None:
            self._count_local()
            self._contexts.nclosing += 1
            if self.rank:
                self._post.send(0, Closing())
            else:
                self._note_closed(0)

        self.call(leave)

    def _note_closed(self, peer: int) -> None:
        """Record that `peer` has left; remove the communicator once all its ranks have left.

        On ranks other than 0, `peer` is 0, which reports that all ranks have left.
        """
        self._closed.add(peer)
        if self.rank == 0:
            if len(self._closed) < self.nranks:
                return
            self._post.broadcast(Closing())
        self._loop.callers.remove(self)
        self.messenger.close()
        self._contexts.remove(self, self._calls.op)

    def fail_call(self, error: BaseException) -> None:
        """End the communicator, because a call raises `error`, possibly outside the data loop.

        Otherwise the other ranks would wait in the same collective until their timeout.
        """
        self.note_end_known()
        if self._revocation.error is None:
            self.revoke(f"a call failed: {error!r}")

    def note_end_known(self) -> None:
        """Record that the user knows of the end of the job; see `DataLoop.is_end_known`."""
        self._loop.is_end_known = True

    def check_unknown(self) -> None:
        """Raise the error that ended the job, if any, unless the user knows of it."""
        if not self._loop.is_end_known:
            self.check()

    def revoke(self, why: str) -> None:
        """End the job's communicators on all ranks, for the reason `why`.

        May be called in any thread and in a signal handler.
        """
        rank = self._job.rank
        message = Revoke("CommunicatorRevoked", why, rank)
        if self._revocation.error is None:
            # Sent first: this may be a signal handler whose own thread owns the loop, so that
            # `submit` only queues.
            self._control.gossip(message)
        error = CommunicatorRevoked(f"rank {rank}: {why}")
        self._loop.submit(self._revocation.end, error, message)

    def tell_why(self) -> None:
        """Send the other ranks the reason why the communicator ended, if it ended with an error."""
        self._revocation.tell_why()

    def descriptors(self) -> list[int]:
        """Return the transport's file descriptors in use.

        Call it only while no other thread runs, as in the child of a fork.
        """
        return self._transport.descriptors()

    def close(self) -> None:
        """Free the transport once all running calls have ended; see `DataLoop.close`."""
        self._loop.close()

    def check(self) -> None:
        """Raise an error if the communicator has ended.

        The error is a copy of the error that ended the communicator or, if a call has already
        raised that error, `CommunicatorRevoked`. The user then counts as informed of the end (see
        `check_unknown`).
        """
        error = self._revocation.error
        if error is None:
            return
        self.note_end_known()
        if not self.has_raised:
            self.has_raised = True
            raise without_frames(error)
        raise revoked(self.rank_in_job, error)

    # Descriptions of the current wait; called in any thread

    def pending(self) -> Pending:
        """Return a description of what the blocked call waits for; any thread may call this.

        This method does not wait. If no collective is blocked, describe a blocked message or, in
        the job's first communicator, a blocked call on another communicator. If nothing is blocked,
        ``doing`` is empty.
        """
        callers: Iterable[Caller] = (self, self.messenger, *self.messenger.waits)
        if not self.context.context_id:
            callers = (self, *self._loop.callers.copy())
        for caller in callers:
            waiting = caller.waiting
            if waiting is not None:
                return waiting.pending()
        return self.waits.nothing()

    def _patience(self, pending: Callable[[], Pending]) -> Patience:
        """Return the `Patience` of a wait in init() or close(); ``pending()`` describes it."""
        return Patience(self.config.init_timeout_s, "init_timeout_s", pending)

    def _pending_init(self) -> Pending:
        return self.waits.for_paths("init()", self._links.peers)

    def _pending_call(self) -> Pending:
        return self.waits.for_slices(self._runs)

    def _pending_leave(self) -> Pending:
        return self.waits.for_leaving(self._revocation.left)


class RegisteredMemory:
    """Registration of host memory, as `Communicator.register` returns it.

    A context manager: leaving it, or calling `close`, ends the registration. Until then, this
    object keeps the memory alive.
    """

    def __init__(
        self, engine: Engine, registered: Registered, memory: npt.NDArray[np.uint8]
    ) -> None:
        self._engine = engine
        self._registered: Registered | None = registered
        self._memory: npt.NDArray[np.uint8] | None = memory

    def close(self) -> None:
        """End the registration; idempotent. The memory itself does not change.

        If this method raises, the registration has not ended: call the method again.

        Raises
        ------
        ConcurrentCalls
            If the caller is a signal handler that interrupted a call, or a function of `user_op`.
        """
        if self._registered is not None:
            self._engine.call(self._end)

    def _end(self) -> None:
        """End the registration, if it has not ended; called by the owner of the data loop."""
        if self._registered is not None:
            self._registered.close()
            self._registered = self._memory = None

    def __enter__(self) -> RegisteredMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["STANDBY_S", "Engine", "LocalPath", "RegisteredMemory", "SelectPlan"]
