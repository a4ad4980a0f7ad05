"""Two-level allreduces of one communicator: shared memory in a node, the network between nodes.

Rank i of every node owns part i of each chunk of the buffer (`r2ccl.planning.two_level`)::

    reduce-scatter   within the node: part i of its inputs, into this rank's output
    allreduce        part i, with the ranks i of the other nodes, over the network
    allgather        within the node: all parts, into the outputs of its ranks

The steps within a node run in a `LocalGroup` of its ranks. The allreduce of a chunk between nodes
is a call of the communicator's engine, with a plan of this rank's group
(`r2ccl.planning.plan_cache.GroupPlanCache`). Every rank makes one such call per chunk, so the calls
have the same numbers on all ranks, are planned with the same agreed health, and handle a lost NIC
as any other call does.

While the network works on a chunk, a second thread reduces the next one and distributes the
previous one. The first reduce-scatter and the last allgather run in the calling thread. The steps
of a node run in the same order on all its ranks: reduce-scatter of chunk 0, then, for each chunk,
reduce-scatter of the next chunk and allgather of the chunk itself.

All steps carry the signature of the whole call, so a call that differs on another rank is found in
the first step, within the node or between the nodes.

Invariant: when a call ends, by result, error or Ctrl-C, no thread uses its arrays any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

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
from r2ccl.planning.two_level import Chunk, Division, TwoLevelPlans
from r2ccl.runtime.async_work import Task, Worker
from r2ccl.runtime.engine import Engine, SelectPlan
from r2ccl.runtime.executor import HostLanes, LandingPool, LaneRun
from r2ccl.runtime.local import require_no_obstacle
from r2ccl.runtime.progress import difference
from r2ccl.runtime.waits import Missing
from r2ccl.types import USER_OP, AllgatherBytes, CallSignature, Collective, ReduceOp

if TYPE_CHECKING:
    from r2ccl.shm.group import LocalGroup

Array = npt.NDArray[Any]


class RunEngine(Protocol):
    """`Engine.run`, with NumPy's warnings disabled."""

    def __call__(
        self, plan: Plan | SelectPlan, make: Callable[[Plan, Links], Sequence[LaneRun]]
    ) -> None: ...


class TwoLevelCalls:
    """Two-level allreduces of one communicator; made by `connect`.

    Parameters
    ----------
    engine : Engine
    group : LocalGroup
        Ranks of this node.
    team : tuple of int
        The same ranks, numbered as in the job.
    plans : TwoLevelPlans
        Divisions of calls into chunks, and plans between the nodes.
    one_level : PlanCache
        Plans of the calls that run in one level.
    pool : LandingPool
    run_engine : RunEngine
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
    ) -> None:
        self._engine = engine
        self._group = group
        self._team = team
        self._plans = plans
        self._one_level = one_level
        self._pool = pool
        self._run_engine = run_engine
        self._worker = Worker(f"r2ccl-node-{engine.rank}", nullcontext(), self._on_error)
        #: Whether there is a kernel for shared memory, by dtype and op.
        self._taken: dict[tuple[int, int], bool] = {}
        #: Identifier of the thread of the current call, and whether its first step has ended.
        self._caller = 0
        self._has_begun = False
        engine.attach(self)

    # Calls

    def run(self, call: CallSignature, source: Array, output: Array) -> bool:
        """Run an allreduce from `source` to `output`, which may be equal; return whether it ran.

        Return False, and do nothing, if `call` is another collective or is empty, or if there is no
        kernel for its dtype and op. The allreduce runs in one level if that is faster (see
        `TwoLevelPlans.divide`). Any error of the allreduce ends the communicator.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op, in which case nothing was done; or if another rank
            makes a different call.
        R2cclError
            If the communicator ends during the call, or the call times out.
        """
        if not self._takes(call):
            return False
        engine = self._engine
        engine.check()
        health = engine.enter()
        division = self._plans.divide(call, health, engine.op)
        if division is None:
            plan = self._one_level(call, health, engine.op)
            self._run_engine(plan, HostLanes(self._pool, source, output))
        else:
            _Run(self, call, source, output, division).run(health)
        return True

    def count_chunks(self, nbytes: int, health: Health) -> int:
        """Return the number of chunks of an allreduce of `nbytes`; 0: it runs in one level.

        Any thread may call it.
        """
        call = CallSignature(Collective.ALLREDUCE, _UINT8, ReduceOp.SUM, nbytes)
        division = self._plans.division(call, health) if nbytes else None
        return 0 if division is None else len(division.chunks)

    def _takes(self, call: CallSignature) -> bool:
        if call.collective != Collective.ALLREDUCE or call.op >= USER_OP or not call.count:
            return False
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
            self._engine.fail_local(error)

    def end(self) -> None:
        """Wake a waiting step, which then raises the error of the communicator."""
        self._group.wake()

    def close(self, timeout_s: float) -> bool:
        """End the second thread and free the shared memory; no call may run or follow.

        Return False, and free nothing, if the thread does not end within `timeout_s` seconds.
        """
        if not self._worker.close(timeout_s):
            return False
        self._engine.detach(self)
        self._group.close()
        return True


class _Run:
    """One allreduce in two levels.

    Parameters
    ----------
    calls : TwoLevelCalls
    call : CallSignature
    source, output : ndarray
        Input and output of this rank; may be the same memory.
    division : Division
        Chunks of the call, and the parts of each.
    """

    def __init__(
        self,
        calls: TwoLevelCalls,
        call: CallSignature,
        source: Array,
        output: Array,
        division: Division,
    ) -> None:
        self._calls = calls
        self._call = call
        self._source = source
        self._output = output
        self._division = division
        self._packed = call.pack()
        #: For AVG, a node computes sums; the call between the nodes divides them.
        op = ReduceOp.SUM if call.op == ReduceOp.AVG else call.op
        self._within = msgspec.structs.replace(call, op=op, root=0)
        self._engine = calls._engine
        self._group = calls._group
        self._tasks: list[Task] = []

    def run(self, health: Health) -> None:
        """Run the call, for whose first chunk `Engine.enter` has returned `health`."""
        calls, chunks = self._calls, self._division.chunks
        last = len(chunks) - 1
        calls._caller, calls._has_begun = get_ident(), False
        try:
            self._scatter(chunks[0])
            calls._has_begun = True
            for number, chunk in enumerate(chunks):
                scattered = None
                if number < last:
                    scattered = self._begin(partial(self._scatter, chunks[number + 1]))
                self._between(chunk, None if number else health)
                if scattered is not None:
                    self._begin(partial(self._gather, chunk))
                    self._await(scattered)
            if self._tasks:
                self._await(self._tasks[-1])
            self._gather(chunks[last])
        except BaseException as exc:
            raise self._failed(exc) from None

    # Steps

    def _scatter(self, chunk: Chunk) -> None:
        """Reduce this rank's part of a chunk from the inputs of the node's ranks."""
        own, parts = self._own(chunk), chunk.parts
        put = ((0, own[1] - own[0]),) * len(parts)
        self._local(Collective.REDUCE_SCATTER, chunk, (parts, put), self._source)

    def _gather(self, chunk: Chunk) -> None:
        """Copy this rank's part of a chunk to the node's ranks, and receive their parts."""
        lo, hi = self._own(chunk)
        sent = tuple(
            (0, hi - lo) if index == self._group.rank else (0, 0)
            for index in range(len(chunk.parts))
        )
        self._local(Collective.ALLGATHER, chunk, (sent, chunk.parts), self._output)

    def _local(self, collective: Collective, chunk: Chunk, parts: Any, whole: Array) -> None:
        count = chunk.end - chunk.first
        form = msgspec.structs.replace(self._within, collective=collective, count=count)
        step = self._group.prepare(form, parts).signed(self._packed)
        lo, hi = self._own(chunk)
        own = self._output[chunk.first + lo : chunk.first + hi]
        piece = whole[chunk.first : chunk.end]
        ends = (piece, own) if collective == Collective.REDUCE_SCATTER else (own, piece)
        self._group.run(step, *ends)

    def _between(self, chunk: Chunk, health: Health | None) -> None:
        """Reduce this rank's part of a chunk between the nodes.

        `health` is the result of `Engine.enter` for the chunk; None: it has not been called yet.
        """
        lo, hi = self._own(chunk)
        own = self._output[chunk.first + lo : chunk.first + hi]

        def select(health: Health, _: int = 0) -> Plan:
            is_at_home = self._division.is_at_home
            return self._calls._plans.plan(self._call, hi - lo, health, is_at_home=is_at_home)

        plan = select if health is None else select(health)
        self._calls._run_engine(plan, HostLanes(self._calls._pool, own, own))

    def _own(self, chunk: Chunk) -> tuple[int, int]:
        return chunk.parts[self._group.rank]

    # The second thread

    def _begin(self, step: Callable[[], None]) -> Task:
        task = Task(step)
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
            engine.check()  # raises the error that ended the communicator, if no call has yet
        task.succeed()

    def _failed(self, error: BaseException) -> BaseException:
        """End the communicator, and wait for the steps of the second thread.

        Return the error that the call must raise.
        """
        from r2ccl.shm.group import CallsDiffer

        engine, calls = self._engine, self._calls
        if isinstance(error, CallsDiffer):
            rank, peer = calls._team[self._group.rank], calls._team[error.index]
            error = difference(engine.op + 1, rank, peer, error.own, error.call)
        has_ended = engine.error is not None
        while not has_ended:
            with suppress(KeyboardInterrupt):  # a further Ctrl-C must not interrupt the end
                engine.fail_local(error)
                has_ended = True
        calls.end()
        for task in self._tasks:
            calls._worker.settle(task)
        ended = engine.error
        for task in self._tasks:
            # Prefer the error that ended the communicator to one that says that it has ended.
            if task.error is not None and str(task.error) == str(ended):
                return task.error
        return error


class _TeamExchange:
    """Allgather of bytes among the ranks of a node, as part of an allgather among all ranks.

    Nodes may need different numbers of allgathers: a node whose ranks cannot share memory stops
    early. In each allgather, every rank tells whether its node may need another one. `finish` takes
    part in the allgathers of the other nodes until no node needs another one.

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
        """Return the argument `mine` of each rank of the node; its maximum size is `_NBYTES`."""
        rows = self._allgather(_pack(_MORE, mine))
        return [_unpack(rows[rank]) for rank in self._team]

    def finish(self, problem: str) -> list[str]:
        """Take part until no node needs an allgather; return the problem of each rank, or "".

        `problem` is that of this rank; at most `_NBYTES` bytes of it are sent.
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
) -> TwoLevelCalls:
    """Share memory between the ranks of each node of a communicator.

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
        Ranks of each node, numbered as in the communicator; equally many on all nodes.
    one_level, pool, run_engine
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
    require_no_obstacle(engine.rank_in_job, allgather, obstacle)
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
            communicator=control.communicator_id,
        )
    except TransportError as exc:
        problem = str(exc)
    problems = list(filter(None, exchange.finish(problem)))
    if problems or group is None:
        if group is not None:
            group.close()
        raise TransportError(f"no shared memory: {problems[0]}")
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

__all__ = ["TwoLevelCalls", "connect"]
