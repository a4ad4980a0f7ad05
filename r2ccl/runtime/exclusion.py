"""Exclusion of NICs while a job runs, by agreement of all its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from r2ccl.errors import CommunicatorRevoked, InvalidArgument, TransportTimeout
from r2ccl.failover.context import RankContext
from r2ccl.failover.health.protocol import COORDINATOR
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.patience import revoked

#: Interval in seconds at which `Exclusions.change` checks whether the job has ended.
_LOOK_S = 0.02


class Exclusions:
    """NICs of a job that are excluded. Any thread may call the methods.

    Parameters
    ----------
    job : RankContext
        This rank in the job.
    loop : DataLoop
        Data loop of the job.
    """

    def __init__(self, job: RankContext, loop: DataLoop) -> None:
        self._job = job
        self._loop = loop
        self._failover = loop.failover

    def rails(self) -> tuple[int, ...]:
        """Return this rank's rails that are excluded, in ascending order."""
        own = self._job.rank
        return tuple(rail for rank, rail in sorted(self._failover.excluded) if rank == own)

    def change(self, ports: Sequence[tuple[int, int]], *, is_excluded: bool, nics: str) -> None:
        """Exclude NICs or end their exclusion; wait until all ranks have agreed to the change.

        Parameters
        ----------
        ports : sequence of (int, int)
            Rank (in the job) and rail of each NIC.
        is_excluded : bool
            True: exclude the NICs; False: end their exclusion.
        nics : str
            Text that lists the NICs from which the caller chose, for the error message.

        Raises
        ------
        InvalidArgument
            In mode failstop, which has no health agreement; or if an exclusion would leave a rank
            without a rail, or two ranks without a common rail.
        ConcurrentCalls
            If the caller is a signal handler that interrupted a call of its thread, or a function
            of `user_op`.
        TransportTimeout
            If the ranks have not agreed within ``R2CC_TIMEOUT_S``.
        CommunicatorRevoked
            If the communicator has ended, or another thread has closed it. The call in progress, if
            any, raises the error that ended the communicator.
        """
        job, loop = self._job, self._loop
        agreement, answers = self._failover.agreement, SimpleQueue[str]()
        if agreement is None:
            raise InvalidArgument(
                "with R2CC_MODE=failstop, no NIC can be excluded or included while the job runs: "
                "set R2CC_FAILED_NICS before the job starts, or use another mode"
            )
        loop.require_outside()
        loop.submit(partial(agreement.exclude, ports, answers.put, is_excluded=is_excluded))
        timeout_s = job.config.timeout_s
        deadline = job.clock() + timeout_s
        while True:
            # Read before the queue: no answer comes after the end.
            has_ended = loop.error is not None or loop.is_closed
            with suppress(Empty):
                refusal = answers.get(timeout=0 if has_ended else _LOOK_S)
                break
            if loop.error is not None:
                loop.is_end_known = True
                raise revoked(job.rank, loop.error)
            if has_ended:
                raise CommunicatorRevoked(f"rank {job.rank}: the communicator was closed")
            if job.clock() >= deadline:
                raise TransportTimeout(
                    f"rank {job.rank}: ranks {list(agreement.waits_for()) or [COORDINATOR]} have "
                    f"not agreed to exclude or include a NIC within {timeout_s:g} s: check that "
                    "they run",
                    rank=job.rank,
                )
        if refusal:
            is_several = len({rail for _, rail in ports}) > 1
            or_one = ", or exclude a single rail by its number" if is_several else ""
            raise InvalidArgument(
                f"the NIC cannot be excluded: {refusal}; {nics}: first include, repair or add "
                f"another NIC{or_one}"
            )


__all__ = ["Exclusions"]
