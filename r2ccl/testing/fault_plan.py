"""Plans of faults, and the record of what fired; a job has one by argument or by environment.

A `FaultPlan` is read from JSON or built in a test. netlab applies it to real interfaces and
processes; without one, ``r2ccl.init(faults=plan)`` has a rank break its own connections.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.testing.faults import Action, Fault, Firing, check_fits
from r2ccl.testing.faults_reporter import Due, FaultReporter, LabClient
from r2ccl.testing.reporting import ReportingTransport
from r2ccl.transport.base import Transport


class FaultPlan:
    """Faults, in the order given, and the record of those that fired.

    A plan serves one run; ``FaultPlan(plan.faults)`` is a fresh one. As a context manager it holds
    the run to it: leaving raises AssertionError where a fault did not fire.

    Parameters
    ----------
    faults : iterable of Fault
        Each with a trigger (`at_s` or `at_op`).

    Raises
    ------
    InvalidArgument
        A fault has no trigger.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)
        self.fired: list[Firing] = []
        #: Faults this process is to see fired: all, or in a rank those it triggers.
        self._claimed: Sequence[int] = range(len(self.faults))
        for fault in self.faults:
            if fault.at_s is None and fault.at_op is None:
                raise InvalidArgument(
                    f"fault {fault} of a plan has no trigger; give it at_s or at_op"
                )

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Read a plan: a JSON list of objects with the fields of `Fault`.

        Raises
        ------
        InvalidArgument
            Not JSON, or a fault is malformed; says which and where.
        """
        try:
            return cls(msgspec.json.decode(data, type=list[Fault]))
        except msgspec.DecodeError as exc:
            raise InvalidArgument(f"fault plan: {exc}") from exc

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a file, as `from_json`.

        Raises
        ------
        InvalidArgument
            Not readable, or malformed.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as exc:
            raise InvalidArgument(f"fault plan {str(path)!r} cannot be read: {exc}") from exc
        return cls.from_json(data)

    def to_json(self) -> bytes:
        """Return the form `from_json` reads."""
        return msgspec.json.encode(self.faults)

    def check(self, *, nodes: int, rails: int, ranks_per_node: int = 1) -> None:
        """Raise InvalidArgument where a fault names a node, rail or rank that does not exist."""
        for fault in self.faults:
            check_fits(fault, nodes=nodes, rails=rails, ranks_per_node=ranks_per_node)

    def resolved(self, ranks_per_node: int) -> FaultPlan:
        """Return a fresh plan in which every fault by `at_op` names the rank that triggers it."""
        return FaultPlan(
            fault
            if fault.at_op is None
            else msgspec.structs.replace(fault, rank=fault.triggered_by(ranks_per_node))
            for fault in self.faults
        )

    def claim(self, indices: Sequence[int]) -> None:
        """Say which faults this process sees fired: those of other ranks are theirs to miss."""
        self._claimed = indices

    def record(self, index: int, time_s: float, applied_s: float) -> Firing:
        """Note that fault `index` was applied, and when (CLOCK_MONOTONIC seconds)."""
        firing = Firing(index=index, fault=self.faults[index], time_s=time_s, applied_s=applied_s)
        self.fired.append(firing)
        return firing

    def pending(self) -> Sequence[Fault]:
        """Return the faults that have not fired; in a rank, of those it triggers."""
        fired = {firing.index for firing in self.fired}
        return [self.faults[index] for index in self._claimed if index not in fired]

    def assert_all_fired(self) -> None:
        """Raise AssertionError, naming them, where faults have not fired.

        One by `at_op` does not fire when the run ends, or that operation does, before `at_step`.
        """
        pending = self.pending()
        if pending:
            raise AssertionError(
                f"{len(pending)} of {len(self.faults)} fault(s) did not fire, because the run or "
                f"the operation ended first: {'; '.join(map(str, pending))}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exc is None:
            self.assert_all_fired()

    def wrap(self, inner: Transport, rank: int) -> ReportingTransport:
        """Put a transport around `inner` that has the faults of `rank` strike; for `r2ccl.init`."""
        return ReportingTransport(inner, lambda cut: FaultReporter(self, rank, cut))


def fail_at(rank: int, rail: int, op: int, step: int = 0) -> FaultPlan:
    """Plan that `rank` loses its `rail` just before it sends slice `step` of collective `op`.

    Parameters
    ----------
    rank, rail : int
    op, step : int
        Counted from 0; `step` counts the slices that `rank` sends in this collective.

    Returns
    -------
    FaultPlan
        For ``init(faults=plan)`` on every rank; as a context manager, `rank` fails if it did not
        come to that.

    Examples
    --------
    >>> with fail_at(rank=1, rail=0, op=0, step=5) as plan, r2ccl.init(faults=plan) as comm:
    ...     comm.allreduce(x)  # doctest: +SKIP
    """
    where = Fault(action=Action.NIC_DOWN, node=rank, rank=rank, rail=rail, at_op=op, at_step=step)
    return FaultPlan([where])


def wrap_by_env(inner: Transport, rank: int) -> ReportingTransport:
    """Put a transport around `inner` that has the plan of the environment strike.

    ``R2CC_TRANSPORT_WRAPPER=r2ccl.testing.fault_plan:wrap_by_env`` has `r2ccl.init` call it.
    """
    return ReportingTransport(inner, lambda cut: reporter_from_env(os.environ, apply=cut))


def reporter_from_env(
    env: Mapping[str, str], *, apply: Callable[[Due], None] | None = None
) -> FaultReporter | None:
    """Make the reporter that the environment asks for; None where it asks for none.

    Parameters
    ----------
    env : mapping
        ``R2CC_FAULT_PLAN`` is the plan's file and ``RANK`` this rank. With
        ``R2CC_FAULT_SOCKET`` the lab behind it applies the faults.
    apply : callable, optional
        Applies the faults where there is no lab.

    Raises
    ------
    InvalidArgument
        The plan cannot be read, ``RANK`` is missing, or nobody is there to apply it.
    """
    path = env.get("R2CC_FAULT_PLAN")
    if not path:
        return None
    plan = FaultPlan.load(path)
    try:
        rank = int(env["RANK"])
    except (KeyError, ValueError) as exc:
        raise InvalidArgument(
            f"R2CC_FAULT_PLAN={path} needs this process's number in RANK, "
            f"which is {env.get('RANK')!r}"
        ) from exc
    address = env.get("R2CC_FAULT_SOCKET")
    if address:
        return FaultReporter(plan, rank, LabClient(address))
    if apply is None:
        raise InvalidArgument(
            f"R2CC_FAULT_PLAN={path} is set, but nobody applies it here: "
            "run under `r2ccl netlab`, which sets R2CC_FAULT_SOCKET, or unset it"
        )
    for fault in plan.faults:
        if fault.at_op is None:
            raise InvalidArgument(
                f"fault {fault}: without a lab only faults by at_op can be applied"
            )
    return FaultReporter(plan, rank, apply)


__all__ = ["FaultPlan", "fail_at", "reporter_from_env", "wrap_by_env"]
