"""The rank's side of a fault plan: says which operation and step it has reached, and waits there.

The communicator calls `FaultReporter.at` before it posts each slice. Where a fault is due, the
reporter asks the lab to apply it (over the Unix socket in ``R2CC_FAULT_SOCKET``), or calls the
function it was given, and returns when that is done: the fault lands at that very slice. Must not
know how a fault is applied. Invariant: with no fault left for this rank, `at` is one comparison.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from r2ccl.clock import monotonic
from r2ccl.errors import TransportTimeout
from r2ccl.testing.faults import Fault, Firing

#: A netlink request takes less than a millisecond; seconds mean that the lab is gone.
ANSWER_TIMEOUT_S = 10.0

#: Larger than any message of this protocol.
MESSAGE_NBYTES = 4096

_NEVER = (math.inf, math.inf)


class Due(msgspec.Struct, frozen=True):
    """A rank's report that it has reached a fault; `index` is the fault's place in the plan."""

    rank: int
    op: int
    step: int
    index: int
    fault: Fault


class Applied(msgspec.Struct, frozen=True):
    """The lab's answer; `error` says why the fault could not be applied, empty when it was."""

    error: str = ""


class PlanRecord(Protocol):
    """A plan, as far as a reporter sees it."""

    faults: tuple[Fault, ...]

    def claim(self, indices: Sequence[int]) -> None:
        """Say which faults this process sees fired."""
        ...

    def record(self, index: int, time_s: float, applied_s: float) -> Firing:
        """Note that a fault was applied, and when."""
        ...


class FaultReporter:
    """Reports one rank's progress to whoever applies the faults.

    Parameters
    ----------
    plan : PlanRecord
        Only faults triggered by this rank's operations count, and it records when they fired;
        those with `at_s` are the lab's.
    rank : int
    apply : callable of Due
        The fault must be in force when it returns. On machines without namespaces this is where
        the caller cuts a loopback rail: ``lambda due: cut(due.fault.rail)``.
    """

    def __init__(self, plan: PlanRecord, rank: int, apply: Callable[[Due], None]) -> None:
        self._rank = rank
        self._apply = apply
        self._plan = plan
        mine = [
            (fault.at_op, fault.at_step or 0, index, fault)
            for index, fault in enumerate(plan.faults)
            if fault.at_op is not None and fault.triggered_by() == rank
        ]
        plan.claim([index for _, _, index, _ in mine])
        self._pending = deque(sorted(mine, key=lambda item: item[:3]))
        self._next: tuple[float, float] = _NEVER
        self._advance()

    @property
    def is_done(self) -> bool:
        """Whether no fault is left for this rank."""
        return self._next is _NEVER

    def at(self, op: int, step: int) -> None:
        """Say that this rank is about to post slice `step` of operation `op`.

        Parameters
        ----------
        op, step : int
            Counted from 0; `step` counts the slices this rank sends in this operation.

        Raises
        ------
        TransportTimeout
            The lab did not answer, or could not apply the fault.
        """
        if (op, step) >= self._next:
            self._reach(op, step)

    def _reach(self, op: int, step: int) -> None:
        while (op, step) >= self._next:
            at_op, _, index, fault = self._pending.popleft()
            self._advance()
            # An operation that ended before `at_step` leaves its fault unfired, for
            # `assert_all_fired` to name, rather than to strike a later one.
            if at_op == op:
                begun_s = monotonic()
                self._apply(Due(self._rank, op, step, index, fault))
                self._plan.record(index, begun_s, monotonic())

    def _advance(self) -> None:
        self._next = self._pending[0][:2] if self._pending else _NEVER


class LabClient:
    """Asks the lab to apply a fault and waits until it has; one short connection a fault."""

    def __init__(self, address: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s

    def __call__(self, due: Due) -> None:
        """Have the fault of `due` applied; raises TransportTimeout where that fails."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lab:
                lab.settimeout(self._timeout_s)
                lab.connect(self._address)
                lab.send(msgspec.msgpack.encode(due))
                answer = lab.recv(MESSAGE_NBYTES)
            error = msgspec.msgpack.decode(answer, type=Applied).error
        except (OSError, msgspec.DecodeError) as exc:
            raise _not_applied(due, f"no answer from the lab at {self._address} ({exc})") from exc
        if error:
            raise _not_applied(due, error)


def _not_applied(due: Due, why: str) -> TransportTimeout:
    return TransportTimeout(
        f"rank {due.rank}: fault {due.fault} was not applied: {why}; look at the lab's output",
        rank=due.rank,
        rail=due.fault.rail,
        status="FAULT_NOT_APPLIED",
    )


__all__ = [
    "ANSWER_TIMEOUT_S",
    "MESSAGE_NBYTES",
    "Applied",
    "Due",
    "FaultReporter",
    "LabClient",
    "PlanRecord",
]
