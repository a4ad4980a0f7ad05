"""Two-level collectives of one communicator: shared memory in a node, the network between nodes.

A call is divided into chunks (`r2ccl.planning.two_level`), and the work on a chunk into steps
within the nodes and one step between them (`r2ccl.runtime.two_level_steps`). The steps within a
node run in a `LocalGroup` of its ranks. The step between nodes is a call of the communicator's
engine, with a plan of this rank's group (`r2ccl.planning.plan_cache.GroupPlanCache`). Every rank
makes one such call per chunk, so the calls have the same numbers on all ranks, are planned with the
same agreed health, and handle a lost NIC as any other call does.

Within a node, the *first steps* of a chunk come before its step between the nodes, the *last steps*
after it. While the step between the nodes of one chunk runs, a second thread runs the first steps
of the next chunk and the last steps of the previous chunk. The first steps of the first chunk and
the last steps of the last chunk run in the calling thread. All ranks of a node run its steps in the
same order: the first steps of chunk 0; then, for each chunk, the first steps of the next chunk and
the last steps of the chunk itself.

All steps carry the signature of the whole call, so a step between ranks whose calls differ fails.

Invariant: after a call has ended, by result, error or Ctrl-C, no thread uses its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl import kernels
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.dtypes import CODES
from r2ccl.errors import TransportError
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.links import Links
from r2ccl.planning.plan_cache import Plan, PlanCache
from r2ccl.planning.two_level import COLLECTIVES, Division, TwoLevelPlans
from r2ccl.runtime.async_work import Task, Worker
from r2ccl.runtime.engine import Engine, SelectPlan
from r2ccl.runtime.executor import HostLanes, LandingPool, LaneRun
from r2ccl.runtime.progress import difference
from r2ccl.runtime.two_level_steps import CallMemory, LocalStep, NetworkStep, StepMaker, Steps
from r2ccl.runtime.waits import Missing
from r2ccl.schedule.chunks import Parts, consecutive
from r2ccl.types import (
    REDUCTIONS,
    ROOTED,
    USER_OP,
    AllgatherBytes,
    CallSignature,
    Collective,
    ReduceOp,
)

if TYPE_CHECKING:
    from r2ccl.shm.group import LocalGroup

Array = npt.NDArray[Any]
#: Function that returns uninitialized memory for a number of elements of a dtype.
Scratch: TypeAlias = Callable[[int, np.dtype[Any]], Array]


class RunEngine(Protocol):
    """`Engine.run`, with NumPy's warnings disabled."""

    def __call__(
        self, plan: Plan | SelectPlan, make: Callable[[Plan, Links], Sequence[LaneRun]]
    ) -> None:
        """Run `plan` as `Engine.run` does."""
        ...


class TwoLevelCalls:
    """Two-level collectives of one communicator; made by `connect`.

    Parameters
    ----------
    engine : Engine
    group : LocalGroup
        Shared memory of the ranks of this node.
    team : tuple of int
        Ranks of this node, numbered as in the job.
    plans : TwoLevelPlans
        Divisions of calls into chunks, and plans between the nodes.
    one_level : PlanCache
        Plans of the calls that run in one level.
    pool : LandingPool
    run_engine : RunEngine
    scratch : callable
        ``scratch(count, dtype)`` returns memory that no other call uses at the same time.
    """

    #: Number of calls that the data loop does not count: none, because each chunk is a call in it.
    ncalls = 0

    def __init__(
        self,
        engine: Engine,
        group: LocalGroup,
        team: tuple[int, ...],
        *,
        plans: TwoLevelPlans,
        one_level: PlanCache,
        pool: LandingPool,
        run_engine: RunEngine,
        scratch: Scratch,
    ) -> None:
        self._engine = engine
        self._group = group
        self._team = team
        self._plans = plans
        self._one_level = one_level
        self._pool = pool
        self._run_engine = run_engine
        self._scratch = scratch
        self._worker = Worker(f"r2ccl-node-{engine.rank}", nullcontext(), self._on_error)
        #: True if there is a kernel for shared memory, by dtype and op.
        self._taken: dict[tuple[int, int], bool] = {}
        #: Identifier of the thread of the current call. True once all ranks of the node are known
        #: to have begun its first steps, or its first step between the nodes is done.
        self._caller = 0
        self._has_begun = False
        #: Error of the second thread that has ended the communicator, if any.
        self._second_error: BaseException | None = None
        engine.attach(self)

    # Calls

    def run(
        self,
        call: CallSignature,
        source: Array,
        output: Array | None,
        run_plan: Callable[[Plan], None],
        parts: Parts | None = None,
    ) -> bool:
        """Run a collective from `source` to `output`; return whether it ran.

        Return False, and do nothing, if `call` never runs in two levels or is empty, or if there is
        no kernel for its dtype and op. If the call is to run in one level, for example because that
        is faster (see `TwoLevelPlans.division`), or if it is a bandwidth sample, pass the plan for
        one level to `run_plan`, and return True. Any error of the collective ends the communicator.

        Parameters
        ----------
        call : CallSignature
        source, output : ndarray
            Flat; may overlap as in the calls of `Communicator`. `output` is None on ranks that get
            no result of a reduce.
        run_plan : callable
            ``run_plan(plan)`` runs the collective in one level.
        parts : Parts, optional
            Parts of an allgather or a reduce-scatter. Default: equal parts that follow one another.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op, in which case nothing was done; or if another rank
            makes a different call.
        R2cclError
            If the communicator has ended or ends during the call, or the call times out.
        """
        if not self._takes(call):
            return False
        engine = self._engine
        engine.check()
        health = engine.enter()
        ranges = () if parts is None else parts.outputs
        sizes = tuple(end - first for first, end in ranges)
        division = self._plans.division(call, health, sizes)
        is_sample = division is not None and self._plans.is_bandwidth_sample(
            call, health, engine.op, division
        )
        if division is None or is_sample:
            run_plan(
                self._one_level(call, health, engine.op, parts=parts, is_bandwidth_sample=is_sample)
            )
            return True
        # Each rank chooses the places of the parts of an allgather; other ranks do not know them.
        is_apart = call.collective == Collective.ALLGATHER and ranges != consecutive(sizes)
        if output is None or is_apart or call.collective == Collective.REDUCE_SCATTER:
            work = self._scratch(call.count, source.dtype)
        else:
            work = output[: call.count]
        memory = CallMemory(source, work, work if output is None else output)
        _Run(self, call, memory, division, sizes).run(health)
        if is_apart:
            assert output is not None
            for (first, end), (lo, hi) in zip(ranges, consecutive(sizes), strict=True):
                output[first:end] = work[lo:hi]
        return True

    def count_chunks(self, nbytes: int, health: Health) -> int:
        """Return the number of chunks of an allreduce of `nbytes`; 0 if it runs in one level.

        Any thread may call this method.
        """
        call = CallSignature(Collective.ALLREDUCE, _UINT8, ReduceOp.SUM, nbytes)
        division = self._plans.division(call, health) if nbytes else None
        return 0 if division is None else len(division.chunks)

    def _takes(self, call: CallSignature) -> bool:
        if call.collective not in COLLECTIVES or call.op >= USER_OP or not call.count:
            return False
        if call.collective not in REDUCTIONS:
            return True
        key = call.dtype, call.op
        found = self._taken.get(key)
        if found is None:
            op = kernels.check_op(call.dtype, call.op)
            found = self._taken[key] = self._group.has_kernel(call.dtype, op)
        return found

    # Waits and ends

    def attend(self, resume: Callable[[], bool], call: int) -> None:
        """Wait for a late peer; see `r2ccl.shm.group.Attend`."""
        waits, op = self._engine.waits, self._engine.op
        if get_ident() != self._caller:
            waits.await_beside(op, call, resume, self._find_absent)
        elif self._has_begun:
            waits.await_local(op, call, resume, self._find_absent, has_begun=True)
        else:
            waits.await_local(op + 1, call, resume, self._find_absent, is_part=True)

    def _find_absent(self) -> Missing:
        team = self._team
        return [team[index] for index in self._group.absent()], team[self._group.awaited]

    def _on_error(self, error: BaseException) -> None:
        """End the communicator after an error in the second thread."""
        if self._engine.error is None:
            self._second_error = self._reported(error)
            self._engine.fail_local(self._second_error)

    def _reported(self, error: BaseException) -> BaseException:
        """Return the error to report for `error`; only a `CallsDiffer` is replaced."""
        from r2ccl.shm.group import CallsDiffer

        if not isinstance(error, CallsDiffer):
            return error
        rank, peer = self._team[self._group.rank], self._team[error.index]
        op = self._engine.op if self._has_begun else self._engine.op + 1
        return difference(op, rank, peer, error.own, error.call, is_earlier=error.is_earlier)

    def ahead(self) -> dict[int, int]:
        """Return an empty dict: the engine sees the calls through their steps over the network."""
        return {}

    def end(self) -> None:
        """Wake a waiting step, which then raises the error of the communicator."""
        self._group.wake()

    def close(self, timeout_s: float) -> bool:
        """End the second thread and free the shared memory; return True.

        Return False, and free nothing, if the thread does not end within `timeout_s` seconds. No
        call may be running, and none may be made afterwards.
        """
        if not self._worker.close(timeout_s):
            return False
        self._engine.detach(self)
        self._group.close()
        return True


class _Run:
    """One collective in two levels.

    Parameters
    ----------
    calls : TwoLevelCalls
    call : CallSignature
    memory : CallMemory
    division : Division
    sizes : tuple of int
        As for `TwoLevelPlans.division`.
    """

    def __init__(
        self,
        calls: TwoLevelCalls,
        call: CallSignature,
        memory: CallMemory,
        division: Division,
        sizes: tuple[int, ...],
    ) -> None:
        self._calls = calls
        self._call = call
        self._is_at_home = division.is_at_home
        self._packed = call.pack()
        #: For AVG, a node computes sums; the call between the nodes divides them.
        op = ReduceOp.SUM if call.op == ReduceOp.AVG else call.op
        self._within = msgspec.structs.replace(call, op=op, root=0)
        self._engine = calls._engine
        self._group = calls._group
        self._tasks: list[Task] = []
        plans = calls._plans
        place = plans.place_of(self._engine.rank)
        root = plans.place_of(call.root if call.collective in ROOTED else 0)
        first = self._engine.rank - place.local_rank
        bounds = plans.bounds(call.count, sizes)[first : first + place.nlocal + 1]
        make = StepMaker(place, memory, root, bounds).steps
        self._steps: list[Steps] = [make(call.collective, chunk) for chunk in division.chunks]

    def run(self, health: Health) -> None:
        """Run the call; `health` is the result of `Engine.enter` for the first chunk."""
        calls, last = self._calls, len(self._steps) - 1
        calls._caller, calls._has_begun = get_ident(), False
        try:
            self._run_local(self._steps[0].before)
            # A rank that only sends does not wait for the others.
            calls._has_begun = not self._group.absent()
            for number, steps in enumerate(self._steps):
                prepared = self._begin(self._steps[number + 1].before) if number < last else None
                self._run_between(steps.between, None if number else health)
                calls._has_begun = True
                if number < last:
                    self._begin(steps.after)
                if prepared is not None:
                    self._await(prepared)
            if self._tasks:
                self._await(self._tasks[-1])
            self._run_local(self._steps[last].after)
        except BaseException as exc:
            raise self._failed(exc) from None

    # Steps

    def _run_local(self, steps: Sequence[LocalStep]) -> None:
        for each in steps:
            form = msgspec.structs.replace(
                self._within, collective=each.collective, count=each.count, root=each.root
            )
            step = self._group.prepare(form, each.parts).signed(self._packed)
            self._group.run(step, each.source, each.output)

    def _run_between(self, step: NetworkStep, health: Health | None) -> None:
        """Run the step between the nodes.

        `health` is the result of `Engine.enter` for the chunk, or None if `Engine.enter` has not
        been called for the chunk.
        """

        def select(health: Health, _: int = 0) -> Plan:
            return self._calls._plans.plan(
                self._call, step.count, health, is_at_home=self._is_at_home, parts=step.parts
            )

        plan = select if health is None else select(health)
        self._calls._run_engine(plan, HostLanes(self._calls._pool, step.array, step.array))

    # The second thread

    def _begin(self, steps: Sequence[LocalStep]) -> Task | None:
        """Let the second thread run steps; return their task, or None if there are no steps."""
        if not steps:
            return None
        task = Task(partial(self._run_local, steps))
        self._tasks.append(task)
        self._calls._worker.enqueue(task)
        return task

    def _await(self, task: Task) -> None:
        engine = self._engine
        engine.waits.await_local(
            engine.op,
            self._packed,
            partial(task.wait, _LOOK_S),
            self._calls._find_absent,
            has_begun=True,
        )
        if task.error is not None:
            engine.check()  # if the communicator has ended, this raises the error to report
        task.succeed()

    def _failed(self, error: BaseException) -> BaseException:
        """End the communicator, and wait for the steps of the second thread.

        Return the error that the call must raise.
        """
        engine, calls = self._engine, self._calls
        error = calls._reported(error)
        engine.note_end_known()
        has_ended = engine.error is not None
        while not has_ended:
            with suppress(KeyboardInterrupt):  # a further Ctrl-C must not interrupt the end
                engine.fail_local(error)
                has_ended = True
        calls.end()
        for task in self._tasks:
            calls._worker.settle(task)
        ended = engine.error
        for found in (calls._second_error, *(task.error for task in self._tasks)):
            # Prefer the error that ended the communicator to one that says that it has ended.
            if found is not None and str(found) == str(ended):
                return found
        return error


class _TeamExchange:
    """Allgather of bytes among the ranks of a node, as part of an allgather among all ranks.

    Nodes may need different numbers of allgathers: a node whose ranks cannot share memory stops
    early. In each allgather, every rank tells whether its node may need a further allgather.
    `finish` takes part in the allgathers of the other nodes until no node needs another.

    Parameters
    ----------
    allgather : callable
        Allgathers bytes among all ranks of the communicator.
    team : sequence of int
        Ranks of this node in the communicator.
    """

    def __init__(self, allgather: AllgatherBytes, team: Sequence[int]) -> None:
        self._allgather = allgather
        self._team = team

    def __call__(self, mine: bytes) -> list[bytes]:
        """Return the argument `mine` of each rank of the node, in the order of `team`.

        `mine` must have at most `_NBYTES` bytes.
        """
        rows = self._allgather(_pack(_MORE, mine))
        return [_unpack(rows[rank]) for rank in self._team]

    def finish(self, problem: str) -> list[str]:
        """Take part until no node needs another allgather; return the `problem` of each rank.

        `problem` is the reason why this rank cannot share memory, or "". At most `_NBYTES` bytes of
        the text are sent.
        """
        while True:
            rows = self._allgather(_pack(_LAST, problem.encode()[:_NBYTES]))
            if all(row[:1] == _LAST for row in rows):
                return [_unpack(row).decode(errors="replace") for row in rows]


def connect(
    engine: Engine,
    control: ControlPlane,
    allgather: AllgatherBytes,
    obstacle: str,
    *,
    teams: Sequence[Sequence[int]],
    one_level: PlanCache,
    pool: LandingPool,
    run_engine: RunEngine,
    scratch: Scratch,
) -> TwoLevelCalls:
    """Share memory between the ranks of each node; return the two-level calls of a communicator.

    Parameters
    ----------
    engine : Engine
        Engine of the communicator.
    control : ControlPlane
    allgather : callable
        Allgathers bytes between the ranks of the communicator.
    obstacle : str
        Reason why this rank cannot share memory; empty if it can.
    teams : sequence of sequence of int
        Ranks of each node, numbered as in the communicator; all nodes have equally many ranks.
    one_level, pool, run_engine, scratch
        See `TwoLevelCalls`.

    Raises
    ------
    TransportError
        If any two ranks of a node cannot share memory; then no rank does.

    Notes
    -----
    *Collective*: all ranks.
    """
    members = engine.context.members
    from r2ccl.shm.group import LocalGroup

    team = next(each for each in teams if engine.rank in each)
    in_job = tuple(members[rank] for rank in team)
    exchange = _TeamExchange(allgather, team)
    calls: list[TwoLevelCalls] = []
    group, problem = None, ""
    try:
        group = LocalGroup.connect(
            in_job,
            team.index(engine.rank),
            exchange,
            control.setting.secret,
            attend=lambda resume, call: calls[0].attend(resume, call),
            on_exit=lambda index: control.report_exit(in_job[index]),
            has_ended=lambda: engine.error is not None,
            obstacle=obstacle,
            communicator=control.communicator_id,
        )
    except TransportError as exc:
        problem = str(exc)
    problems = list(filter(None, exchange.finish(problem)))
    if problems or group is None:
        if group is not None:
            group.close()
        raise TransportError(problems[0])
    plans = TwoLevelPlans(engine.rank, teams, one_level, engine.config)
    calls.append(
        TwoLevelCalls(
            engine,
            group,
            in_job,
            plans=plans,
            one_level=one_level,
            pool=pool,
            run_engine=run_engine,
            scratch=scratch,
        )
    )
    return calls[0]


def _pack(kind: bytes, text: bytes) -> bytes:
    assert len(text) <= _NBYTES
    return kind + len(text).to_bytes(2, "little") + text.ljust(_NBYTES, b"\0")


def _unpack(row: bytes) -> bytes:
    return row[3 : 3 + int.from_bytes(row[1:3], "little")]


_UINT8 = CODES[np.dtype(np.uint8)]
#: Kinds of messages of `_TeamExchange`, and their maximum size in bytes.
_MORE, _LAST = b"m", b"l"
_NBYTES = 256
#: Interval in seconds at which the calling thread runs the data loop while it waits for the second
#: thread.
_LOOK_S = 0.004

__all__ = ["RunEngine", "TwoLevelCalls", "connect"]
