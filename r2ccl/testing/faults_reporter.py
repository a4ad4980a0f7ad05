"""Rank side of a fault plan: triggers each fault at its collective and slice.

`ReportingTransport` calls `FaultReporter.at` before it posts each slice of the user's newest
collective. If a fault is due, `at` applies it and returns once the fault is in force, so the fault
takes effect exactly at that slice. In a netlab the lab applies the fault: `LabClient` sends the
request over the Unix socket in ``R2CC_FAULT_SOCKET``. If no fault is due, `at` costs one
comparison.
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

#: Seconds to wait for the lab's answer. Applying a fault takes well under a second, so a lab that
#: does not answer in this time is dead or hangs.
ANSWER_TIMEOUT_S = 10.0

#: Receive buffer size, larger than any message of this protocol.
MESSAGE_NBYTES = 4096

_NEVER = (math.inf, math.inf)


class Due(msgspec.Struct, frozen=True):
    """Message in which `rank` reports that a fault of its plan is due.

    `index` is the position of `fault` in the plan. `rank` is about to send slice `step` of
    collective `op`; both count from 0.
    """

    rank: int
    op: int
    step: int
    index: int
    fault: Fault


class Applied(msgspec.Struct, frozen=True):
    """Answer of the lab to a `Due`: `error` is empty if the fault was applied, else the reason."""

    error: str = ""


_applied_decoder = msgspec.msgpack.Decoder(Applied)


class PlanRecord(Protocol):
    """Part of the interface of `FaultPlan` that a reporter uses."""

    faults: tuple[Fault, ...]

    def claim(self, indices: Sequence[int]) -> None:
        """Declare that in this process only the faults at `indices` of the plan can fire."""
        ...

    def record(self, index: int, time_s: float, applied_s: float) -> Firing:
        """Record that fault `index` was applied; see `Firing` for the times."""
        ...


class FaultReporter:
    """Trigger for the faults of a plan that depend on the progress of one rank.

    Parameters
    ----------
    plan : PlanRecord
        The reporter uses only the faults with `at_op` that `rank` triggers, and records in the plan
        when they fired. It ignores faults with `at_s`, which the lab applies. If nodes have several
        ranks, each fault must have its `rank`, as in a plan from `FaultPlan.resolved`.
    rank : int
        Number of this process.
    apply : callable of Due
        Callable that applies a fault, such as a `LabClient`. The fault must be in force when the
        call returns.
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
        """True if this rank has triggered or passed all its faults."""
        return self._next is _NEVER

    def at(self, op: int, step: int) -> None:
        """Apply the faults that are due before this rank posts slice `step` of collective `op`.

        A fault whose collective ended before its `at_step` is skipped and stays unfired.

        Parameters
        ----------
        op, step : int
            Counted from 0; `step` counts the slices that this rank sends in the collective,
            including slices that it sends again.

        Raises
        ------
        TransportTimeout
            If the lab does not answer or cannot apply the fault.
        InvalidArgument
            Without a lab: if the fault is not ``nic_down``, its rail does not exist, or its
            ``node`` is not the number of this rank, because a rank can cut only its own
            connections.
        """
        if (op, step) >= self._next:
            self._reach(op, step)

    def _reach(self, op: int, step: int) -> None:
        while (op, step) >= self._next:
            at_op, _, index, fault = self._pending.popleft()
            self._advance()
            # If the collective ended before `at_step`, its fault must not be applied to a later
            # collective: it stays unfired, and `assert_all_fired` reports it.
            if at_op == op:
                begun_s = monotonic()
                self._apply(Due(self._rank, op, step, index, fault))
                self._plan.record(index, begun_s, monotonic())

    def _advance(self) -> None:
        self._next = self._pending[0][:2] if self._pending else _NEVER


class LabClient:
    """Client that asks the lab to apply faults, over one short connection per fault.

    Parameters
    ----------
    address : str
        Path of the lab's Unix socket.
    timeout_s : float
        Longest time in seconds to wait for each step: connecting, sending, and the answer.
    """

    def __init__(self, address: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s

    def __call__(self, due: Due) -> None:
        """Ask the lab to apply the fault of `due`, and wait until the fault is in force.

        Raises
        ------
        TransportTimeout
            If the lab does not answer or cannot apply the fault.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lab:
                lab.settimeout(self._timeout_s)
                lab.connect(self._address)
                lab.send(msgspec.msgpack.encode(due))
                answer = lab.recv(MESSAGE_NBYTES)
            error = _applied_decoder.decode(answer).error
        except (OSError, msgspec.DecodeError) as exc:
            raise _not_applied(due, f"no answer from the lab at {self._address} ({exc})") from exc
        if error:
            raise _not_applied(due, error)


def _not_applied(due: Due, why: str) -> TransportTimeout:
    return TransportTimeout(
        f"rank {due.rank}: fault {due.fault} was not applied: {why}; see the lab's output",
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
