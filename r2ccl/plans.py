"""Plans: what this rank does in a call of one shape, worked out once and kept.

`planner` chooses the schedule and its place on the rails, the checker refuses one that is wrong,
`lowering` cuts it into slices, `kernels` has the arithmetic. A plan depends on the call's signature
and the agreed health, both the same on all ranks, and on nothing else; so do the plans of all ranks
fit together.

Must not see memory, links or the clock. Invariant: at most `_KEPT` plans are held; the oldest goes
first.
"""

from __future__ import annotations

from typing import NamedTuple

from r2ccl import kernels
from r2ccl.admission import admit
from r2ccl.config import Config
from r2ccl.dtypes import dtype_of
from r2ccl.lowering import Layout, lower
from r2ccl.planner import Fabric, plan
from r2ccl.resilience.health import Health
from r2ccl.schedule.check import check
from r2ccl.schedule.ir import Schedule
from r2ccl.types import CallSignature, ReduceOp


class Plan(NamedTuple):
    """Everything about a call that does not depend on its memory.

    Attributes
    ----------
    signature : int
        Packed, as it travels with every slice.
    layout : Layout
    reduce : callable
        ``reduce(left, right, out)``.
    finish : callable or None
        What AVG does to the finished result.
    is_gauge : bool
        Whether its slices show what the rails carry.
    """

    signature: int
    layout: Layout
    reduce: kernels.Reducer
    finish: kernels.Divider | None
    is_gauge: bool


class Plans:
    """The plans of one rank.

    Parameters
    ----------
    rank, nranks : int
    fabric : Fabric
    config : Config
    """

    def __init__(self, rank: int, nranks: int, fabric: Fabric, config: Config) -> None:
        self._rank = rank
        self._nranks = nranks
        self._fabric = fabric
        self._config = config
        #: By the version of the health they were made from, and the call.
        self._plans: dict[tuple[int, CallSignature], Plan] = {}
        self._checked: set[tuple[str, str, int, int, int]] = set()

    def __call__(self, call: CallSignature, health: Health) -> Plan:
        """Return the plan of `call` while the rails are as `health` says.

        Raises
        ------
        InvalidArgument
            There is no such operation on this dtype.
        """
        key = (health.version, call)
        found = self._plans.get(key)
        if found is None:
            found = self._make(call, health)
            if len(self._plans) >= _KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = found
        return found

    def _make(self, call: CallSignature, health: Health) -> Plan:
        op = kernels.check_op(call.dtype, ReduceOp(call.op))
        itemsize = dtype_of(call.dtype).itemsize
        schedule, placement, slice_nbytes = plan(
            call, call.count * itemsize, self._fabric, health, self._config
        )
        # What is placed edge by edge was made for this health; a ring is the same for all.
        self._check(schedule, health.version if placement.edges else 0)
        layout = lower(
            schedule.program(self._rank),
            call.count,
            itemsize,
            slice_nbytes=slice_nbytes,
            eager_nbytes=0 if placement.edges else self._config.eager_nbytes,
            weights=placement.weights,
            channels=placement.channels,
            numbers=placement.numbers(self._rank),
        )
        layout = admit(layout, len(self._fabric.homes), self._fabric.inlet_nbytes)
        finish = kernels.divider(call.dtype, self._nranks) if op is ReduceOp.AVG else None
        return Plan(
            call.pack(), layout, kernels.reducer(call.dtype, op), finish, not placement.edges
        )

    def _check(self, schedule: Schedule, version: int) -> None:
        """Replay a schedule symbolically before its first use; the tests check large ones."""
        shape = (
            schedule.collective, schedule.name, schedule.nchannels, schedule.root, version
        )  # fmt: skip
        if shape not in self._checked and schedule.nranks * schedule.nchannels <= _CHECKED_SIZE:
            check(schedule)
            self._checked.add(shape)


#: A training job has a few dozen call shapes.
_KEPT = 1024
#: Ranks times channels up to which a schedule is checked before use (some 10 ms).
_CHECKED_SIZE = 64

__all__ = ["Plan", "Plans"]
