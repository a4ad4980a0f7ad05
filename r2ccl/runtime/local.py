"""Calls of one communicator in memory that its ranks share, if all of them are on one host.

The signature of a call, and the presence of a user's schedule, determine whether it runs in shared
memory. Both are equal on all ranks, so all ranks make the same choice. A blocking call runs in the
calling thread, unless asynchronous calls are in progress; all other calls run in the worker thread.
Calls in shared memory do not pass through the data loop; one sequence of numbers covers them and
the calls that do. A call that waits long for a peer checks whether the communicator has ended or
the call's timeout has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from r2ccl import kernels
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.dtypes import dtype_of
from r2ccl.errors import CommunicatorRevoked, InvalidArgument
from r2ccl.runtime.arguments import Request, allreduce
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.progress import closed_early, describe, difference
from r2ccl.runtime.repeats import Make, Repeats, array_of
from r2ccl.runtime.waits import Missing
from r2ccl.schedule.chunks import Range
from r2ccl.shm.local_call import LocalCall
from r2ccl.types import (
    REDUCTIONS,
    USER_OP,
    AllgatherBytes,
    CallSignature,
    Collective,
)

if TYPE_CHECKING:
    from r2ccl.shm.group import LocalGroup
    from r2ccl.shm.rings import Rings

_log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
#: Maximum number of communicators of a rank that share memory; further ones use the network. Each
#: takes 3 MiB of memory at every rank, and up to 32 MiB more at every rank for messages.
MOST_GROUPS = 32


class LocalCalls:
    """Calls of one communicator in shared memory; made by `connect`.

    Parameters
    ----------
    engine : Engine
    group : LocalGroup
        Shared memory of all ranks of the communicator.
    """

    def __init__(self, engine: Engine, group: LocalGroup) -> None:
        self._engine = engine
        self._group = group
        self._has_ended = False
        #: True if calls run in shared memory, by collective, dtype and op.
        self._taken: dict[tuple[int, int, int], bool] = {}
        #: Calls that can be run again; empty once the communicator has ended.
        self.repeats = Repeats(_NREPEATS)
        engine.attach(self)

    @property
    def ncalls(self) -> int:
        """Number of calls in shared memory that this rank has begun."""
        return self._group.ncalls

    def ahead(self) -> dict[int, int]:
        """Implement `LocalPath.ahead`."""
        positions = self._group.positions().items()
        return {self.members[index]: ncalls for index, ncalls in positions if ncalls > 0}

    @property
    def rings(self) -> Rings:
        """Rings in shared memory that carry the messages between the ranks."""
        return self._group.rings

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the communicator, in its order, numbered as in the job."""
        return self._engine.context.members

    # Calls

    def takes(self, call: CallSignature) -> bool:
        """Return whether calls with this collective, dtype and op run in shared memory.

        A call with a schedule of the user never runs in shared memory; `run` checks this.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op.
        """
        key = (call.collective, call.dtype, call.op)
        found = self._taken.get(key)
        if found is None:
            found = call.op < USER_OP
            if found and call.collective in REDUCTIONS:
                found = self._group.has_kernel(call.dtype, kernels.check_op(call.dtype, call.op))
            self._taken[key] = found
        return found

    def run(self, request: Request) -> LocalCall | None:
        """Run `request` in shared memory; return the prepared call.

        `request` must not have a conversion of its input (``Request.conversion``). Return None, and
        do nothing, if `request` cannot run in shared memory. Any error of the running call ends the
        communicator.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op, in which case nothing was done; or if another rank
            makes a different call.
        R2cclError
            If the communicator has ended or ends during the call, or the call times out.
        """
        signature, source, output = request.signature, request.source, request.output
        if request.schedule is not None or not self.takes(signature):
            return None
        assert isinstance(source, Buffer)
        if _is_placed(request):
            return self._run_placed(request, source)
        parts = _parts_of(request, self._engine.rank)
        call = self._group.prepare(signature, parts)
        x = source.array
        if _is_copied(request):
            x = x.copy()
        self._guarded(
            self._group.run, call, x, output.array if isinstance(output, Buffer) else x[:0]
        )
        return call

    def _run_placed(self, request: Request, source: Buffer) -> LocalCall:
        """Run an allgather of equal parts, and copy them to the ranges ``request.parts.outputs``.

        These ranges may differ between the ranks, but the allgather itself must not.
        """
        parts, output = request.parts, request.output
        assert parts is not None
        assert isinstance(output, Buffer)
        call = self._group.prepare(request.signature)
        together = np.empty(source.count * len(parts.outputs), source.array.dtype)
        self._guarded(self._group.run, call, source.array, together)
        for number, (first, end) in enumerate(parts.outputs):
            output.array[first:end] = together[number * source.count :][: source.count]
        return call

    def collect(self, call: CallSignature, source: Array, output: Array) -> bool:
        """Run an allreduce, or an allgather whose input is this rank's part of `output`.

        Return False, and do nothing, if the call does not run in shared memory. Raise the errors of
        `run`.
        """
        if not self.takes(call):
            return False
        if call.collective == Collective.ALLGATHER:
            count = output.size // self._engine.nranks
            source = output[self._engine.rank * count :][:count]
        self._guarded(self._group.run, self._group.prepare(call), source, output)
        return True

    def allocate(
        self, nbytes: int, exchange: AllgatherBytes, in_turn: Callable[[Callable[[], None]], None]
    ) -> Array:
        """Return memory of at least `nbytes` for access by all ranks; see `SymmetricMemory`."""
        return self._group.symmetric.allocate(nbytes, exchange, in_turn)

    def _guarded(self, run: Callable[..., object], *given: Any) -> None:
        """Call ``run(*given)``; end the communicator if it raises."""
        if self._has_ended:
            self._refuse()
        try:
            run(*given)
        except BaseException as exc:
            raise self._failed(exc) from None

    def _failed(self, error: BaseException) -> BaseException:
        """End the communicator because of `error`; return the error that the call must raise."""
        from r2ccl.shm.group import CallsDiffer

        if isinstance(error, CallsDiffer):
            error = self._difference(error)
        self._has_ended = True
        self.repeats.forget()
        self._engine.fail_local(error)
        return error

    def _refuse(self) -> None:
        self._engine.check()
        raise CommunicatorRevoked(
            f"rank {self._engine.rank_in_job}: the communicator was revoked: a call in shared "
            "memory failed before; fix the first error"
        )

    # The same call again

    def remember(
        self, make: Make, x: Any, out: Any, rest: tuple[Any, ...], request: Request, call: LocalCall
    ) -> None:
        """Remember a call that `run` has run; see `Repeats.remember`.

        In shared memory, compiled code makes no copies, so calls that need one are not remembered.
        """
        if _is_copied(request) or _is_placed(request):
            return
        repeat_of = partial(self._group.repeat_of, call, proceed=self._proceed)
        self.repeats.remember(make, x, out, rest, request, call, repeat_of)
        if self._has_ended:  # in another thread meanwhile
            self.repeats.forget()

    def leave(self, make: Make, x: Any, out: Any) -> None:
        """Withdraw the arrays of a failed call from the peers, which may be accessing them.

        The failed call repeated an earlier call, with the arguments `x` and `out`. `make` is the
        function that made the request of the earlier call. See `r2ccl.shm.group.LocalGroup.leave`.
        """
        output = array_of(x if out is None else out) if make is allreduce else None
        self._group.leave(output)

    def _proceed(self, call: LocalCall, x: Array, out: Array, result: int) -> None:
        """Continue a repeated call, which waits for a peer or differs from the call of a peer."""
        self._guarded(self._group.proceed, call, x, out, result)

    # Waits and ends

    def attend(self, resume: Callable[[], bool], call: int) -> None:
        """Wait for a late peer; see `r2ccl.shm.group.Attend`."""
        engine = self._engine
        engine.waits.await_local(engine.op, call, resume, self._find_absent)

    def _find_absent(self) -> Missing:
        members = self.members
        return [members[index] for index in self._group.absent()], members[self._group.awaited]

    def end(self) -> None:
        """Wake the running call; it and later calls then raise the communicator's error."""
        self._has_ended = True
        self.repeats.forget()
        self._group.wake()

    def require_same(self, *, is_last: bool) -> None:
        """Check that each other rank made the same calls as this rank.

        A call may have ended on one rank without waiting for the others, and so without comparing
        their calls. Only calls that both ranks are known to have begun are compared. If `is_last`,
        all ranks have made all their calls, so the numbers of calls are compared, too.

        Raises
        ------
        InvalidArgument
            If the calls differ.
        """
        op, rank = self._engine.op, self.members[self._engine.rank]
        for index, ncalls in self._group.positions().items() if is_last else ():
            peer = self.members[index]
            if ncalls > 0:
                raise closed_early(rank, op, peer, op + ncalls)
            if ncalls < 0:
                raise closed_early(peer, op + ncalls, rank, op)
        found = self._group.find_difference()
        if found is not None:
            raise self._difference(found)

    def close(self) -> None:
        """Free the memory; no call may be running, and none may be made afterwards."""
        self._has_ended = True
        self.repeats.forget()
        self._engine.detach(self)
        self._group.close()

    def _difference(self, found: Any) -> InvalidArgument:
        op, rank, peer = self._engine.op, self.members[self._engine.rank], self.members[found.index]
        mine = found.own
        if mine != found.call:
            return difference(op, rank, peer, mine, found.call, is_earlier=found.is_earlier)
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
        Reason why this rank cannot share memory; empty if it can.

    Raises
    ------
    TransportError
        If any two of the ranks cannot share memory; then no rank does.

    Notes
    -----
    *Collective*: all ranks.
    """
    from r2ccl.shm.group import LocalGroup

    calls: list[LocalCalls] = []
    group = LocalGroup.connect(
        engine.context.members,
        engine.rank,
        exchange,
        control.setting.secret,
        attend=lambda resume, call: calls[0].attend(resume, call),
        on_exit=lambda index: control.report_exit(engine.context.members[index]),
        has_ended=lambda: engine.error is not None,
        obstacle=obstacle,
        communicator=control.communicator_id,
    )
    calls.append(LocalCalls(engine, group))
    return calls[0]


def _is_copied(request: Request) -> bool:
    """Return whether the call runs on a copy of its input."""
    return request.signature.collective == Collective.ALLTOALLV and request.is_in_place


def _is_placed(request: Request) -> bool:
    """Return whether the call is an allgather of equal parts to output ranges chosen by the caller.

    For host memory, `r2ccl.runtime.arguments.allgatherv` makes such a request only if the ranges
    are not those of an allgather, or the output has more elements than all parts together.
    """
    parts = request.parts
    if parts is None or request.signature.collective != Collective.ALLGATHER:
        return False
    return len({end - first for first, end in parts.outputs}) == 1


def _parts_of(request: Request, rank: int) -> tuple[tuple[Range, ...], tuple[Range, ...]] | None:
    """Return the parts to and from each rank; None if the signature determines them."""
    call, parts = request.signature, request.parts
    if parts is None or call.collective in _EQUAL:
        return None
    sent, put, n = parts.inputs, parts.outputs, len(parts.inputs)
    if call.collective == Collective.ALLGATHER:
        sent = _only(rank, (0, put[rank][1] - put[rank][0]), n)
    elif call.collective == Collective.REDUCE_SCATTER:
        put = ((0, sent[rank][1] - sent[rank][0]),) * n
    elif call.collective == Collective.GATHERV:
        sent = _only(call.root, sent[rank], n)
    elif call.collective == Collective.SCATTERV:
        put = _only(call.root, put[rank], n)
    else:
        sent = tuple(sent[(to - rank) % n] for to in range(n))
        put = tuple(put[(rank - source) % n] for source in range(n))
    return sent, put


def _only(rank: int, part: Range, n: int) -> tuple[Range, ...]:
    """Return the parts of `n` ranks: `part` for `rank`, and an empty part for all others."""
    return tuple(part if each == rank else (0, 0) for each in range(n))


#: Collectives whose parts have equal sizes, which follow from the signature.
_EQUAL = (Collective.GATHER, Collective.SCATTER, Collective.ALLTOALL)
#: Maximum number of calls that are remembered.
_NREPEATS = 512

__all__ = ["MOST_GROUPS", "LocalCalls", "connect"]
