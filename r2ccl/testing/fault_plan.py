"""Fault plans, and the record of the faults that fired.

A `FaultPlan` is built in Python or read from JSON. A rank gets it as ``r2ccl.init(faults=plan)`` or
through environment variables (see `wrap_by_env`). A netlab, a cluster emulated on one machine
(`r2ccl.testing.netlab`), applies the faults to network interfaces and processes. Without a netlab,
only ``nic_down`` faults with `at_op` can be applied: the rank that triggers one breaks its own
connections on that rail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.testing.faults import Action, Fault, Firing, check_fits
from r2ccl.testing.faults_reporter import Due, FaultReporter, LabClient

if TYPE_CHECKING:
    from r2ccl.testing.reporting import ReportingTransport
    from r2ccl.transport.base import Transport

_faults_decoder = msgspec.json.Decoder(list[Fault])


class FaultPlan:
    """List of faults for one run, with a record of the faults that fired.

    For a second run, make a fresh plan with ``FaultPlan(plan.faults)``. As a context manager, the
    plan raises AssertionError on exit if a fault did not fire, unless the body raised an error. In
    a rank, only the faults that this rank triggers must have fired.

    Parameters
    ----------
    faults : iterable of Fault
        Each fault must have a trigger (`at_s` or `at_op`).

    Raises
    ------
    InvalidArgument
        If a fault has no trigger, or an item is not a `Fault`.

    Attributes
    ----------
    faults : tuple of Fault
    fired : list of Firing
        The faults that fired, oldest first. In a rank, only faults that the rank triggers.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)
        self.fired: list[Firing] = []
        #: Indices of the faults that must fire in this process: all by default; in a rank, those
        #: that the rank triggers.
        self._claimed: Sequence[int] = range(len(self.faults))
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise InvalidArgument(
                    f"fault plan: {fault!r} is not a Fault; make one with Fault(...) or, from "
                    "text, with Fault.parse"
                )
            if fault.at_s is None and fault.at_op is None:
                raise InvalidArgument(
                    f"fault {fault} of the plan has no trigger: give it at_s or at_op"
                )

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Read a plan from a JSON list of objects with the fields of `Fault`.

        Raises
        ------
        InvalidArgument
            If `data` is not a JSON list, or a fault is malformed or has no trigger. The message
            about a fault names the fault or its position.
        """
        try:
            return cls(_faults_decoder.decode(data))
        except msgspec.DecodeError as exc:
            raise InvalidArgument(f"fault plan: {exc}") from exc

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a JSON file; see `from_json`.

        Raises
        ------
        InvalidArgument
            If the file cannot be read or is malformed.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as exc:
            raise InvalidArgument(f"fault plan {str(path)!r} cannot be read: {exc}") from exc
        return cls.from_json(data)

    def to_json(self) -> bytes:
        """Return the plan as JSON for `from_json`."""
        return msgspec.json.encode(self.faults)

    def check(self, *, nodes: int, rails: int, ranks_per_node: int = 1) -> None:
        """Raise InvalidArgument if a lab of this size lacks a node, rail or rank of a fault."""
        for fault in self.faults:
            check_fits(fault, nodes=nodes, rails=rails, ranks_per_node=ranks_per_node)

    def check_needs_no_lab(self) -> None:
        """Raise InvalidArgument if a fault has `at_s` or `duration_s`, which need a lab."""
        for fault in self.faults:
            if fault.at_op is None:
                raise InvalidArgument(
                    f"fault {fault}: without a netlab, only faults with at_op can be applied; give "
                    "it at_op, or run under `r2ccl netlab`"
                )
            if fault.duration_s is not None:
                raise InvalidArgument(
                    f"fault {fault}: only a netlab can undo a fault after duration_s; leave "
                    "duration_s out, or run under `r2ccl netlab`"
                )

    def check_unused(self) -> None:
        """Raise InvalidArgument if any fault has fired, because a plan is for one run only."""
        if self.fired:
            raise InvalidArgument(
                "this fault plan was already used; make a fresh one: FaultPlan(plan.faults)"
            )

    def resolved(self, ranks_per_node: int) -> FaultPlan:
        """Return a fresh plan in which each fault with `at_op` names the rank that triggers it."""
        return FaultPlan(
            fault
            if fault.at_op is None
            else msgspec.structs.replace(fault, rank=fault.triggered_by(ranks_per_node))
            for fault in self.faults
        )

    def claim(self, indices: Sequence[int]) -> None:
        """Restrict `pending` and `assert_all_fired` to the faults that this process triggers.

        `indices` are the positions of these faults in the plan.
        """
        self._claimed = indices

    def record(self, index: int, time_s: float, applied_s: float) -> Firing:
        """Add a `Firing` of fault `index` to `fired` and return it.

        Parameters
        ----------
        index : int
            Position of the fault in the plan.
        time_s, applied_s : float
            CLOCK_MONOTONIC seconds; see `Firing`.
        """
        firing = Firing(index=index, fault=self.faults[index], time_s=time_s, applied_s=applied_s)
        self.fired.append(firing)
        return firing

    def pending(self) -> Sequence[Fault]:
        """Return the faults that have not fired; in a rank, only faults that the rank triggers."""
        fired = {firing.index for firing in self.fired}
        return [self.faults[index] for index in self._claimed if index not in fired]

    def assert_all_fired(self) -> None:
        """Raise AssertionError if `pending` faults are left; the message names them.

        A fault with `at_op` does not fire if the run ends before collective `at_op`, or if the rank
        that triggers it does not post slice `at_step` of that collective.
        """
        pending = self.pending()
        if pending:
            raise AssertionError(
                f"{len(pending)} of {len(self._claimed)} expected fault(s) did not fire; check "
                "that the run reaches their times, collectives and slices: "
                f"{'; '.join(map(str, pending))}"
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

    def wrap(self, inner: Transport, rank: int, nranks: int) -> ReportingTransport:
        """Return a wrapper of `inner` that applies the faults that `rank` of `nranks` triggers.

        `r2ccl.init` calls this method. The wrapper owns `inner`.

        Raises
        ------
        InvalidArgument
            If a fault of the plan has `at_s` or `duration_s`, which need a lab; if the job lacks a
            rank or rail of a fault; or if a fault has fired before.
        """
        # Imported here because it imports NumPy, which commands do not need.
        from r2ccl.testing.reporting import ReportingTransport

        self.check_unused()
        self.check_needs_no_lab()
        self.check(nodes=nranks, rails=inner.nrails)
        return ReportingTransport(inner, lambda cut: FaultReporter(self, rank, cut))


def fail_at(rank: int, rail: int, op: int, step: int = 0) -> FaultPlan:
    """Return a plan in which `rank` loses `rail` just before it sends a given slice.

    Parameters
    ----------
    rank, rail : int
        The rank, and the number of the rail that it loses.
    op, step : int
        Number of the collective, and number of the slice among the slices that `rank` sends in this
        collective; both count from 0.

    Returns
    -------
    FaultPlan
        Pass it to ``init(faults=plan)`` on every rank. As a context manager it raises
        AssertionError in `rank` if the fault did not fire. `r2ccl.init` raises InvalidArgument if
        the job has no such rank or rail.

    Raises
    ------
    InvalidArgument
        If an argument is negative or not an integer.

    Examples
    --------
    >>> with fail_at(rank=1, rail=0, op=0, step=5) as plan, r2ccl.init(faults=plan) as comm:
    ...     comm.allreduce(x)  # doctest: +SKIP
    """
    where = Fault(action=Action.NIC_DOWN, node=rank, rank=rank, rail=rail, at_op=op, at_step=step)
    return FaultPlan([where])


def wrap_by_env(inner: Transport, rank: int) -> ReportingTransport:
    """Return a wrapper of `inner` that triggers this rank's faults of the plan in the environment.

    `r2ccl.init` without `faults` calls this function if the variable ``R2CC_TRANSPORT_WRAPPER`` is
    ``r2ccl.testing.fault_plan:wrap_by_env``. ``R2CC_FAULT_PLAN`` is the file of the plan; without
    it there are no faults. The lab that listens on ``R2CC_FAULT_SOCKET`` applies the faults or, if
    that variable is not set, the wrapper does. ``RANK``, if set, takes precedence over `rank`,
    because plans number the ranks as they were started, and ``init(comm=...)`` may number them
    differently.

    Raises
    ------
    InvalidArgument
        If the plan or ``RANK`` is not valid; see `reporter_from_env`.
    """
    from r2ccl.testing.reporting import ReportingTransport

    env = {"RANK": str(rank), **os.environ}
    return ReportingTransport(
        inner, lambda cut: reporter_from_env(env, apply=cut, nrails=inner.nrails)
    )


def reporter_from_env(
    env: Mapping[str, str],
    *,
    apply: Callable[[Due], None] | None = None,
    nrails: int | None = None,
) -> FaultReporter | None:
    """Return the reporter of this process for the plan that the environment names.

    Parameters
    ----------
    env : mapping
        ``R2CC_FAULT_PLAN`` is the plan's file, ``RANK`` the number of this process, and
        ``WORLD_SIZE``, if set, the number of ranks. If ``R2CC_FAULT_SOCKET`` is set, the lab that
        listens on this socket applies the faults.
    apply : callable, optional
        Function that applies a fault, used only if ``R2CC_FAULT_SOCKET`` is not set.
    nrails : int, optional
        Number of rails; default: unknown.

    Returns
    -------
    FaultReporter or None
        None if ``R2CC_FAULT_PLAN`` is not set or is empty.

    Raises
    ------
    InvalidArgument
        If the plan cannot be read or is malformed, or if ``RANK`` is missing or not a number.
        Without ``R2CC_FAULT_SOCKET`` also if `apply` is None, a fault of the plan has `at_s` or
        `duration_s`, the job lacks a rank of a fault (if ``WORLD_SIZE`` is set), or it lacks a rail
        (if `nrails` is given).
    """
    path = env.get("R2CC_FAULT_PLAN")
    if not path:
        return None
    plan = FaultPlan.load(path)
    try:
        rank = int(env["RANK"])
    except (KeyError, ValueError) as exc:
        raise InvalidArgument(
            f"R2CC_FAULT_PLAN={path} needs the rank of this process in RANK, "
            f"but RANK is {env.get('RANK')!r}: set it, or start the process with `r2ccl launch`, "
            "`r2ccl netlab` or torchrun"
        ) from exc
    address = env.get("R2CC_FAULT_SOCKET")
    if address:
        return FaultReporter(plan, rank, LabClient(address))
    if apply is None:
        raise InvalidArgument(
            f"R2CC_FAULT_PLAN={path} is set, but no lab applies its faults: "
            "run under `r2ccl netlab`, which sets R2CC_FAULT_SOCKET, or unset R2CC_FAULT_PLAN"
        )
    plan.check_needs_no_lab()
    nranks = env.get("WORLD_SIZE", "")
    plan.check(
        nodes=int(nranks) if nranks.isascii() and nranks.isdecimal() else sys.maxsize,
        rails=sys.maxsize if nrails is None else nrails,
    )
    return FaultReporter(plan, rank, apply)


__all__ = ["FaultPlan", "fail_at", "reporter_from_env", "wrap_by_env"]
