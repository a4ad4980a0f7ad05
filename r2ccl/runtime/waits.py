"""Waits of the calls of one communicator: their descriptions, and the wait in shared memory.

Any thread may make descriptions, even while the data loop hangs. Descriptions number the ranks as
in the job, not as in the communicator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from r2ccl.errors import CommunicatorRevoked, InvalidArgument
from r2ccl.failover.context import RankContext
from r2ccl.failover.diagnosis.driver import SAY_AGAIN_S, SlowRecords
from r2ccl.runtime.contexts import Context
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.desync_check import DesyncCheck
from r2ccl.runtime.executor import LaneRun
from r2ccl.runtime.patience import Caller, Patience, timed_out
from r2ccl.runtime.progress import describe, difference
from r2ccl.runtime.status import Pending, Wait, waits_for_confirmation, waits_of_call

_log = logging.getLogger(__name__)

#: Ranks of the job that have not made a call, and the rank of the job that the call waits for.
Missing: TypeAlias = tuple[list[int], int]


class Waits:
    """Descriptions of the waits of one communicator's calls, and the wait in shared memory.

    Parameters
    ----------
    job : RankContext
        This rank in the job.
    loop : DataLoop
    context : Context
        Identity of the communicator.
    caller : Caller
        The communicator's calls.
    desync : DesyncCheck
    """

    def __init__(
        self,
        job: RankContext,
        loop: DataLoop,
        context: Context,
        caller: Caller,
        desync: DesyncCheck,
    ) -> None:
        self._rank = job.rank
        self._clock = job.clock
        self._timeout_s = job.config.timeout_s
        self._suspicion_timeout_s = job.config.suspicion_timeout_s
        self._loop = loop
        self._links = loop.links
        self._failover = loop.failover
        self._context = context
        self._calls = loop.links.calls_of(context.context_id)
        self._caller = caller
        self._desync = desync
        #: Number of the call in shared memory that waits for a late peer; 0: none does.
        self.local_op = 0
        #: Packed signature of that call.
        self.local_signature = 0
        #: True if ranks of other hosts take part in that call, but not in the wait.
        self.is_local_part = False
        self._late = SlowRecords()

    def last_ops(self) -> dict[int, int]:
        """Return the number of the last collective in which each other rank was seen; 0: none.

        The keys are ranks of the job. A rank is seen in a collective when a frame of the collective
        arrives from it, or when it answers the desync check.
        """
        seen, members = self._calls.seen.copy(), self._context.members
        said = self._desync.said.copy()
        return {members[peer]: max(op, seen.get(members[peer], 0)) for peer, op in said.items()}

    def nothing(self) -> Pending:
        """Return a `Pending` that says that no call of this rank is blocked."""
        now = self._clock()
        return Pending(self._rank, "", now, now)

    def for_paths(self, doing: str, peers: Iterable[int]) -> Pending:
        """Describe the wait of a call for paths to `peers`, ranks of the job.

        `doing` is a text that names the call.
        """
        alone = [peer for peer in sorted(peers) if not self._failover.migration.up(peer)]
        waits = [
            Wait(peer, "path", why="; ".join(self._failover.obstacles(peer))) for peer in alone
        ]
        return self._blocked(doing, waits=waits)

    def for_health(self, op: int, peers: Iterable[int]) -> Pending:
        """Describe the wait of call `op` for `peers` of the communicator to agree on the health."""
        members = self._context.members
        waits = [Wait(members[peer], "agreement on the health") for peer in peers]
        return self._blocked(f"call {op}, before it is planned", waits=waits)

    def for_slices(self, runs: Sequence[LaneRun]) -> Pending:
        """Describe the wait of the running call, whose lanes are `runs`."""
        op = self._calls.op
        doing = f"call {op}, {describe(self._calls.signature)}"
        absent = {rank: last for rank, last in self.last_ops().items() if last < op}
        program = self._loop.program_of(self._calls)
        waits: Sequence[Wait] = ()
        if program is None:
            waits = waits_of_call(self._links, self._context.context_id, runs)
        else:
            waits = [Wait(peer, "slice", channel, seq) for peer, channel, seq in program.waits()]
        return self._blocked(doing, absent, waits)

    def for_confirmation(self) -> Pending:
        """Describe the wait of close() for the confirmation of slices."""
        return self._blocked(
            "close()", waits=waits_for_confirmation(self._links, is_eager_too=True)
        )

    def for_leaving(self, left: set[int]) -> Pending:
        """Describe the wait of close() for all ranks except `left`, which have called close()."""
        ops = self.last_ops()
        return self._blocked("close()", {peer: ops[peer] for peer in ops.keys() - left})

    def _blocked(
        self, doing: str, missing: dict[int, int] | None = None, waits: Sequence[Wait] = ()
    ) -> Pending:
        now, since_s = self._clock(), self._caller.since_s
        told = self._context.told()
        doing = f"{doing}, {told}" if told else doing
        diagnosis = self._failover.diagnosis
        slow = diagnosis.slow_since(since_s) if diagnosis is not None else ()
        return Pending(self._rank, doing, now, since_s, missing or {}, tuple(waits), slow)

    # The wait in shared memory

    def await_local(
        self,
        op: int,
        signature: int,
        resume: Callable[[], bool],
        missing: Callable[[], Missing],
        *,
        has_begun: bool = False,
        is_part: bool = False,
    ) -> None:
        """Wait until a call in shared memory, or a step of such a call, has ended.

        Call `resume` until it returns True. Between two calls of `resume`, run the data loop unless
        another thread runs it. Log a line after ``R2CC_SUSPICION_TIMEOUT_S``, and again every
        `SAY_AGAIN_S`.

        Parameters
        ----------
        op : int
            Number of the call.
        signature : int
            Packed signature of the call.
        resume : callable
            ``resume()`` waits some milliseconds for peers, without the GIL, and returns whether the
            call or step has ended.
        missing : callable
            ``missing()`` returns the ranks that have not made the call, and the rank that the call
            waits for.
        has_begun : bool
            True in a later step of a call: all ranks of the wait are known to have made this call.
        is_part : bool
            True if ranks of other hosts take part in the call, but not in this wait.

        Raises
        ------
        InvalidArgument
            If a peer has made another call, which uses the network.
        TransportTimeout
            If the wait takes longer than ``R2CC_TIMEOUT_S``.
        R2cclError
            If the communicator has ended.
        """
        caller, loop = self._caller, self._loop
        patience = self._patience(op, signature, missing, has_begun=has_begun)
        caller.since_s = self._clock()
        deadline = caller.since_s + patience.timeout_s
        say_s = caller.since_s + self._suspicion_timeout_s
        caller.waiting = patience
        # The number is set last, because another thread may read it and then the signature.
        self.local_signature, self.is_local_part, self.local_op = signature, is_part, op
        try:
            while not resume():
                if loop.error is not None:
                    if resume():  # the peers may have done their part before
                        return
                    caller.check()
                if not has_begun:
                    self._require_same(op, signature, missing)
                loop.poll(caller)
                now = self._clock()
                if now >= deadline:
                    raise timed_out(patience)
                if now >= say_s:
                    say_s = now + SAY_AGAIN_S
                    self._say_late(patience.pending())
        finally:
            caller.waiting = None
            self.local_op = 0

    def await_beside(
        self,
        op: int,
        signature: int,
        resume: Callable[[], bool],
        missing: Callable[[], Missing],
    ) -> None:
        """Wait for a step of a call, while another step of this call runs in another thread.

        Parameters are those of `await_local`. The other thread runs the data loop, and raises the
        error that ended the communicator.

        Raises
        ------
        TransportTimeout
            If the wait takes longer than ``R2CC_TIMEOUT_S``.
        CommunicatorRevoked
            If the communicator has ended.
        """
        patience = self._patience(op, signature, missing, has_begun=True)
        deadline = self._clock() + patience.timeout_s
        while not resume():
            error = self._loop.error
            if error is not None:
                if resume():  # the peers may have done their part before
                    return
                raise CommunicatorRevoked(
                    f"rank {self._rank}: the communicator was revoked: {error}", reason=error
                )
            if self._clock() >= deadline:
                raise timed_out(patience)

    def _say_late(self, pending: Pending) -> None:
        """Log what the call waits for: at INFO once per `SAY_AGAIN_S` and rank, else at DEBUG."""
        _log.log(self._late.level(pending.waits[0].peer, pending.now_s), "%s", pending)

    def _patience(
        self, op: int, signature: int, missing: Callable[[], Missing], *, has_begun: bool
    ) -> Patience:
        def pending() -> Pending:
            absent, awaited = missing()
            waits = (Wait(awaited, "data in shared memory"),)
            doing = f"call {op}, {describe(signature)}"
            late = {} if has_begun else dict.fromkeys(absent, op - 1)
            return self._blocked(doing, late, waits)

        return Patience(self._timeout_s, "timeout_s", pending)

    def _require_same(self, op: int, signature: int, missing: Callable[[], Missing]) -> None:
        """Raise InvalidArgument if a rank has made another call numbered `op`, over the network."""
        rank, members = self._rank, self._context.members
        for theirs, peer, _ in tuple(self._calls.ahead.get(op, ())):
            if theirs != signature:  # equal: another node runs the second level of this call
                raise difference(op, rank, peer, signature, theirs)
        if self._desync.asked_op < op:
            return
        # The reports are read before the absent ranks: a rank that has reported a later call is
        # absent only if it has made another call than this one. A rank that has reported this call
        # may be about to begin it in shared memory.
        called = [members[peer] for peer in self._desync.elsewhere(op, signature)]
        for absent in missing()[0] if called else ():
            if absent in called:
                raise InvalidArgument(
                    f"call {op} differs between ranks: rank {rank} called {describe(signature)}, "
                    f"rank {absent} called a collective that uses the network; all ranks must pass "
                    "the same collective, dtype, op, root, count, counts and schedule"
                )


__all__ = ["Missing", "Waits"]
