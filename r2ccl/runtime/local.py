"""Calls of one communicator in memory that its ranks share, if all of them are on one host.

Whether a call takes this path follows from its signature alone, which is equal on all ranks, so
all ranks take the same path. Blocking and asynchronous calls take it alike, in the thread that runs
the call. The calls are counted with those that the data loop runs, but do not enter it: a call that
waits long for a peer asks the engine whether the communicator has ended, or time is up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl import kernels
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.dtypes import dtype_of
from r2ccl.errors import CommunicatorRevoked, InvalidArgument, TransportError
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.progress import describe, difference
from r2ccl.runtime.waits import Missing
from r2ccl.schedule.chunks import Range
from r2ccl.types import (
    PREFIXES,
    REDUCTIONS,
    USER_OP,
    AllgatherBytes,
    CallSignature,
    Collective,
    ReduceOp,
)

if TYPE_CHECKING:
    from r2ccl.shm.group import LocalGroup

_log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

#: Most communicators of a rank that share memory, of 0.8 MiB each; further ones use the data loop.
MOST_GROUPS = 32
_REASON_NBYTES = 200


class _Repeatable(NamedTuple):
    """Properties of a checked allreduce on NumPy arrays; a call with equal ones needs no checks."""

    make: Callable[..., Request]
    nbytes: int
    dtype: np.dtype[Any]
    op: ReduceOp
    code: int
    source_flags: int
    output_flags: int


class LocalCalls:
    """Calls of one communicator in shared memory; made by `connect`.

    Parameters
    ----------
    engine : Engine
    group : LocalGroup
        All ranks of the communicator.
    """

    def __init__(self, engine: Engine, group: LocalGroup) -> None:
        self._engine = engine
        self._group = group
        self._has_ended = False
        #: Whether calls of a collective, dtype and op take this path.
        self._taken: dict[tuple[int, int, int], bool] = {}
        #: The last allreduce, if it can be repeated.
        self._last: _Repeatable | None = None
        self._allreduce, self._are_apart = group.allreduce, group.are_apart
        engine.attach(self)

    @property
    def ncalls(self) -> int:
        """Number of calls begun."""
        return self._group.ncalls

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the job that the communicator has."""
        return self._engine.context.members

    # Calls

    def takes(self, call: CallSignature) -> bool:
        """Return whether a call takes this path, by its collective, dtype and op.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op.
        """
        key = (call.collective, call.dtype, call.op)
        found = self._taken.get(key)
        if found is None:
            found = call.op < USER_OP and call.collective not in PREFIXES
            if found and call.collective in REDUCTIONS:
                found = self._group.has_kernel(call.dtype, kernels.check_op(call.dtype, call.op))
            self._taken[key] = found
        return found

    def run(self, request: Request) -> bool:
        """Run a call without a conversion if it takes this path; return whether it does.

        Any error ends the communicator.

        Raises
        ------
        InvalidArgument
            If another rank makes a different call.
        CommunicatorRevoked
            If the communicator was revoked because an earlier call here failed.
        R2cclError
            If the communicator ends during the call, or the call times out.
        """
        call, source, output = request.signature, request.source, request.output
        is_divided = call.collective == Collective.REDUCE_SCATTER and request.parts is not None
        if request.schedule is not None or is_divided or not self.takes(call):
            return False
        assert isinstance(source, Buffer)
        x = source.array
        out = output.array if isinstance(output, Buffer) else x[:0]
        self._guarded(_FORMS[call.collective], self._group, request, x, out)
        return True

    def collect(self, call: CallSignature, source: Array, output: Array) -> bool:
        """Run a barrier, an allgather in place, or an allreduce of the arrays of a group.

        Returns and raises as `run`.
        """
        if not self.takes(call):
            return False
        if call.collective == Collective.BARRIER:
            self._guarded(self._group.barrier)
        elif call.collective == Collective.ALLREDUCE:
            self._guarded(self._group.allreduce, source, output, call.dtype, call.op, call.root)
        elif call.collective == Collective.ALLGATHER:
            count = output.size // self._engine.nranks
            own = output[self._engine.rank * count :][:count]
            self._guarded(self._group.allgather, own, output, call.dtype)
        else:
            return False
        return True

    def _guarded(self, run: Callable[..., None], *given: Any) -> None:
        """Call ``run(*given)``; end the communicator if it raises."""
        if self._has_ended:
            self._refuse()
        try:
            run(*given)
        except BaseException as exc:
            raise self._failed(exc) from None

    def _failed(self, error: BaseException) -> BaseException:
        """End the communicator after an error within a call; return the error to raise."""
        from r2ccl.shm.group import CallsDiffer

        if isinstance(error, CallsDiffer):
            error = self._difference(error)
        self._has_ended = True
        self._engine.fail_local(error)
        return error

    def _refuse(self) -> None:
        self._engine.check()
        raise CommunicatorRevoked(
            f"rank {self._engine.rank}: the communicator was revoked: a call in shared memory "
            "failed before; fix the first error"
        )

    # The same allreduce again

    def remember(self, make: Callable[..., Request], x: Any, out: Any, request: Request) -> None:
        """Remember an allreduce that `run` has run, so that `repeat` can run it again.

        `make`, `x` and `out` are the function that made `request` and its arguments. The call is
        remembered only if it used the arrays themselves: NumPy arrays that are C-contiguous.
        """
        self._last = None
        call = request.signature
        result = x if out is None else out
        is_plain = type(x) is np.ndarray and type(result) is np.ndarray and x.flags.c_contiguous
        if is_plain and request.conversion is None and self.takes(call):
            self._last = _Repeatable(
                make, x.nbytes, x.dtype, ReduceOp(call.op), call.dtype, x.flags.num,
                result.flags.num,
            )  # fmt: skip

    def repeats(self, make: Callable[..., Request], given: tuple[Any, ...]) -> bool:
        """Return whether `repeat` can run ``make(x, out, op)``; `given` is ``(x, out, op)``.

        It can if an allreduce by `make` with this op is remembered, and its arrays had the types,
        sizes and flags of these, which must not overlap unless they are the same.
        """
        last = self._last
        if last is None or make is not last.make:
            return False
        x, out, op = given
        if out is None:
            out = x
        return bool(
            type(x) is type(out) is np.ndarray
            and op is last.op
            and x.nbytes == out.nbytes == last.nbytes
            and x.dtype is out.dtype is last.dtype
            and x.flags.num == last.source_flags
            and out.flags.num == last.output_flags
            and (x is out or self._are_apart(x, out))
        )

    def repeat(self, x: Array, out: Array) -> None:
        """Run the remembered allreduce on arrays for which `repeats` was true; raises as `run`."""
        if self._has_ended:
            self._refuse()
        last = self._last
        assert last is not None
        try:
            self._allreduce(x, out, last.code, last.op)
        except BaseException as exc:
            raise self._failed(exc) from None

    # Waits and ends

    def attend(self, resume: Callable[[], bool], call: int) -> None:
        """Wait for a late peer; see `r2ccl.shm.group.Attend`."""
        engine = self._engine
        engine.waits.await_local(engine.op, call, resume, self._find_absent)

    def _find_absent(self) -> Missing:
        members = self.members
        return [members[index] for index in self._group.absent()], members[self._group.awaited]

    def end(self) -> None:
        """Make the running call and later ones find that the communicator has ended."""
        self._has_ended = True
        self._group.wake()

    def close(self) -> None:
        """Free the memory; no call may run or follow."""
        self._has_ended = True
        self._engine.detach(self)
        self._group.close()

    def _difference(self, found: Any) -> InvalidArgument:
        op, rank, peer = self._engine.op, self.members[self._engine.rank], self.members[found.index]
        mine = found.own
        if mine != found.call:
            return difference(op, rank, peer, mine, found.call)
        itemsize = dtype_of(CallSignature.unpack(mine).dtype).itemsize
        return InvalidArgument(
            f"call {op}, {describe(mine)}: rank {peer} passes {found.sent_nbytes // itemsize} "
            f"elements for rank {rank}, rank {rank} expects {found.wanted_nbytes // itemsize} "
            f"elements from rank {peer}; pass equal counts on both ranks"
        )


def connect(
    engine: Engine, control: ControlPlane, exchange: AllgatherBytes, obstacle: str
) -> LocalCalls:
    """Share memory between all ranks of a communicator, which are on one host.

    Parameters
    ----------
    engine : Engine
        Engine of the communicator.
    control : ControlPlane
    exchange : callable
        Allgathers bytes between the ranks of the communicator.
    obstacle : str
        Reason why this rank cannot share memory; empty: it may.

    Raises
    ------
    TransportError
        If any two of the ranks cannot share memory; then no rank does.

    Notes
    -----
    *Collective*: all ranks.
    """
    rank = engine.context.members[engine.rank]
    try:
        from r2ccl.shm.group import LocalGroup, preload

        preload()
    except (ImportError, OSError, TransportError) as exc:
        obstacle = obstacle or f"compiled code cannot be used: {exc}"
    text = f"rank {rank}: {obstacle}" if obstacle else ""
    told = exchange(text.encode()[:_REASON_NBYTES].ljust(_REASON_NBYTES, b"\0"))
    reasons = [each.rstrip(b"\0").decode(errors="replace") for each in told]
    if any(reasons):
        raise TransportError(f"no shared memory: {next(filter(None, reasons))}")
    calls: list[LocalCalls] = []
    group = LocalGroup.connect(
        engine.context.members,
        engine.rank,
        exchange,
        control.setting.secret,
        attend=lambda resume, call: calls[0].attend(resume, call),
        communicator=control.communicator_id,
    )
    calls.append(LocalCalls(engine, group))
    return calls[0]


def _ranges(places: Sequence[Range]) -> list[tuple[int, int]]:
    return [(first, end - first) for first, end in places]


def _allreduce(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    group.allreduce(x, out, request.signature.dtype, request.signature.op)


def _allgather(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    code, parts = request.signature.dtype, request.parts
    if parts is None:
        group.allgather(x, out, code)
    else:
        group.allgatherv(x, out, code, _ranges(parts.outputs), request.signature.root)


def _reduce_scatter(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    group.reduce_scatter(x, out, request.signature.dtype, request.signature.op)


def _broadcast(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    group.broadcast(x, out, request.signature.dtype, request.signature.root)


def _reduce(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    call = request.signature
    group.reduce(x, out, call.dtype, call.op, call.root)


def _gather(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    group.gather(x, out, request.signature.dtype, request.signature.root)


def _scatter(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    group.scatter(x, out, request.signature.dtype, request.signature.root)


def _gatherv(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    call, parts = request.signature, request.parts
    assert parts is not None
    places = None if request.output is None else _ranges(parts.outputs)
    group.gatherv(x, out, call.dtype, places, call.root)


def _scatterv(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    call, parts = request.signature, request.parts
    assert parts is not None
    places = _ranges(parts.inputs) if group.rank == call.root else None
    group.scatterv(x, out, call.dtype, places, call.root)


def _alltoall(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    group.alltoall(x, out, request.signature.dtype)


def _alltoallv(group: LocalGroup, request: Request, x: Array, out: Array) -> None:
    parts, rank = request.parts, group.rank
    assert parts is not None
    n = len(parts.inputs)
    sent = [parts.inputs[(to - rank) % n] for to in range(n)]
    put = [parts.outputs[(rank - source) % n] for source in range(n)]
    data = x.copy() if request.is_in_place else x
    group.alltoallv(data, out, request.signature.dtype, _ranges(sent), _ranges(put))


_FORMS: dict[int, Callable[[LocalGroup, Request, Array, Array], None]] = {
    Collective.ALLREDUCE: _allreduce,
    Collective.ALLGATHER: _allgather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.BROADCAST: _broadcast,
    Collective.REDUCE: _reduce,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.ALLTOALL: _alltoall,
    Collective.GATHERV: _gatherv,
    Collective.SCATTERV: _scatterv,
    Collective.ALLTOALLV: _alltoallv,
}

__all__ = ["MOST_GROUPS", "LocalCalls", "connect"]
