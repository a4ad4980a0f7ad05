"""Plans: what this rank does in a call of one shape, worked out once and kept.

`planner` chooses the schedule and its place on the rails, the checker refuses one that is wrong,
`lowering` cuts it into slices, `kernels` has the arithmetic. A plan depends on the call's signature
and the agreed health, both the same on all ranks, and on nothing else; so do the plans of all ranks
fit together.

Must not see memory, links or the clock. Invariant: at most `_KEPT` plans are held; the oldest goes
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

import msgspec

from r2ccl import kernels
from r2ccl.config import Config
from r2ccl.dtypes import dtype_of
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.cost_model import UNMEASURED, Choice, Fabric, Rates
from r2ccl.planning.lowering import Layout, limit_windows, lower, renumbered
from r2ccl.planning.planner import Explanation, Planner
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
    is_bandwidth_sample : bool
        Whether its slices show what the rails carry.
    """

    signature: int
    layout: Layout
    reduce: kernels.Reducer
    finish: kernels.Divider | None
    is_bandwidth_sample: bool


class GroupPlanCache:
    """The plans of allreduces among some of the ranks, each in one group; all groups at once.

    Parameters
    ----------
    rank : int
        One of `members`.
    members : sequence of int
        Ranks of the group, in rising order, each on a node of its own.
    nranks : int
        What AVG divides by.
    fabric : Fabric
        Of the whole communicator.
    config : Config
    homes : sequence of int, optional
        Those of the fabric's homes that the group's channels are at home on. Default: all.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        nranks: int,
        fabric: Fabric,
        config: Config,
        *,
        homes: Sequence[int] = (),
    ) -> None:
        self._members = tuple(members)
        self._nranks = nranks
        #: Of every home of the group its place among the fabric's.
        self._places = [fabric.homes.index(rail) for rail in homes or fabric.homes]
        self._width = len(fabric.homes)
        index = self._members.index(rank)
        own = fabric._replace(nodes=(), homes=[fabric.homes[at] for at in self._places])
        self._plans = PlanCache(index, len(self._members), own, config)
        self._is_at_home = len(self._places) < self._width
        self._renumbered: dict[tuple[int, CallSignature], Plan] = {}

    def __call__(self, call: CallSignature, health: Health) -> Plan:
        """Return the plan of an allreduce while the rails of all ranks are as `health` says."""
        key = (health.version, call)
        found = self._renumbered.get(key)
        if found is None:
            plan = self._plans(call, self._planned_with(health))
            is_mean = call.op == ReduceOp.AVG
            found = plan._replace(
                layout=renumbered(plan.layout, self._members, self._channel),
                finish=kernels.divider(call.dtype, self._nranks) if is_mean else None,
                is_bandwidth_sample=False,
            )
            if len(self._renumbered) >= _KEPT:
                self._renumbered.pop(next(iter(self._renumbered)))
            self._renumbered[key] = found
        return found

    def _planned_with(self, health: Health) -> Health:
        among = health.of_ranks(self._members)
        if self._is_at_home:
            # Other homes are other groups': what is lost makes a detour over all of them in equal
            # parts, where a schedule that spares a port would put its part on few.
            among = msgspec.structs.replace(
                among, shares=bytes(each or WHOLE for each in among.shares)
            )
        return among

    def _channel(self, number: int) -> int:
        """Return the links' channel that is at home where the group's own number is."""
        turn, at = divmod(number, len(self._places))
        return turn * self._width + self._places[at]


class PlanCache:
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
        self._planner = Planner(fabric, config)
        self._config = config
        self._measures = config.balance != "0"
        self._plans: dict[_Key, Plan] = {}
        #: Version of the health, the first collective planned with it, and how often measuring
        #: collectives come soon after that.
        self._since = (-1, 0, _GAUGE_EVERY)
        #: By version and call, how often it measures the rails in the long run; 0: it need not.
        self._periods: dict[tuple[int, CallSignature], int] = {}
        self._checked: set[tuple[str, str, int, int, int]] = set()

    @property
    def fabric(self) -> Fabric:
        """What lies between the ranks, as it is planned with."""
        return self._planner.fabric

    def measured(self, rates: Rates) -> None:
        """Plan with these rates from now on; all ranks must at the same call."""
        self._planner = Planner(self.fabric._replace(rates=rates), self._config)
        self._plans.clear()
        self._periods.clear()

    def __call__(
        self,
        call: CallSignature,
        health: Health,
        op: int | None = None,
        own: Schedule | None = None,
    ) -> Plan:
        """Return the plan of `call` while the rails are as `health` says.

        Parameters
        ----------
        call : CallSignature
        health : Health
        op : int, optional
            Number of the collective: now and then it is one that measures the rails. Default: it is
            none of those.
        own : Schedule, optional
            The user's, to run instead of what the planner would choose.

        Raises
        ------
        InvalidArgument
            There is no such operation on this dtype.
        ScheduleError
            The user's schedule is wrong.
        """
        is_bandwidth_sample = (
            op is not None and own is None and self._is_bandwidth_sample(call, health, op)
        )
        key = (health.version, call, is_bandwidth_sample, own)
        found = self._plans.get(key)
        if found is None:
            found = self._make(call, health, is_bandwidth_sample, own)
            if len(self._plans) >= _KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = found
        return found

    def choose(self, nbytes: int, health: Health) -> Choice:
        """Return what an allreduce of `nbytes` runs."""
        return self._planner.allreduce(nbytes, health)

    def explain(self, nbytes: int, health: Health) -> Explanation:
        """Compare what an allreduce of `nbytes` could run."""
        return self._planner.explain(nbytes, health)

    def _make(
        self, call: CallSignature, health: Health, is_bandwidth_sample: bool, own: Schedule | None
    ) -> Plan:
        op = kernels.check_op(call.dtype, ReduceOp(call.op))
        itemsize = dtype_of(call.dtype).itemsize
        nbytes = call.count * itemsize
        if own is None:
            choice = self._planner.plan(
                call, nbytes, health, is_bandwidth_sample=is_bandwidth_sample
            )
            # What is placed edge by edge was made for this health; a ring is the same for all.
            self._check(choice.schedule, health.version if choice.placement.edges else 0)
        else:
            check(own)
            choice = self._planner.own(own, nbytes, health)
            call = call.with_schedule(own.digest())
        placement = choice.placement
        is_bulk = placement.edges and nbytes > self.fabric.inlet_nbytes
        layout = lower(
            choice.schedule.program(self._rank),
            call.count,
            itemsize,
            slice_nbytes=choice.slice_nbytes,
            # What nobody asked for would overrun the ports that several peers send to.
            eager_nbytes=0 if is_bulk else self._config.eager_nbytes,
            weights=placement.weights,
            channels=placement.channels,
            numbers=placement.numbers(self._rank),
        )
        layout = limit_windows(layout, len(self.fabric.homes), self.fabric.inlet_nbytes)
        finish = kernels.divider(call.dtype, self._nranks) if op is ReduceOp.AVG else None
        return Plan(
            call.pack(), layout, kernels.reducer(call.dtype, op), finish, choice.is_bandwidth_sample
        )

    def _is_bandwidth_sample(self, call: CallSignature, health: Health, op: int) -> bool:
        """Return whether this collective is one that measures the rails, whatever else is faster.

        Soon after the health has changed often, as it may change back; then as rarely as that costs
        no more than `_BUDGET` of the time, as predicted. All ranks see a health at the same call.
        """
        if not self._measures or self.fabric.rates == UNMEASURED:
            return False
        if health.version != self._since[0]:
            is_slow = any(0 < share < WHOLE for share in health.shares)
            often = _GAUGE_EVERY_SLOW if is_slow else _GAUGE_EVERY
            self._since = (health.version, op, often)
        key = (health.version, call)
        period = self._periods.get(key)
        if period is None:
            if len(self._periods) >= _KEPT:
                self._periods.pop(next(iter(self._periods)))
            period = self._periods[key] = self._period(call, health)
        _, first, often = self._since
        age = op - first
        return period > 0 and age % (often if age < _SOON else max(often, period)) < _GAUGES

    def _period(self, call: CallSignature, health: Health) -> int:
        nbytes = call.count * dtype_of(call.dtype).itemsize
        chosen, gauge = (
            self._planner.plan(call, nbytes, health, is_bandwidth_sample=is_bandwidth_sample)
            for is_bandwidth_sample in (False, True)
        )
        if chosen.is_bandwidth_sample or not chosen.predicted_ns:
            return 0
        extra = Fraction(gauge.predicted_ns, chosen.predicted_ns) - 1
        return max(1, min(_RAREST, ceil(_GAUGES * extra / _BUDGET)))

    def _check(self, schedule: Schedule, version: int) -> None:
        """Replay a schedule symbolically before its first use; the tests check large ones."""
        shape = (
            schedule.collective, schedule.name, schedule.nchannels, schedule.root, version
        )  # fmt: skip
        if shape not in self._checked and schedule.nranks * schedule.nchannels <= _CHECKED_SIZE:
            check(schedule)
            self._checked.add(shape)


#: Version of the health, the call, whether it measures the rails, and the user's schedule.
_Key = tuple[int, CallSignature, bool, Schedule | None]

#: A training job has a few dozen call shapes.
_KEPT = 1024
#: In every period, so many collectives one after another run rings, or chains, whatever else is
#: faster: only where one peer sends to a port does it show what it carries, and only for a while
#: does it show clearly. More often while a rail is slow, which can end at any time.
_GAUGES = 3
_GAUGE_EVERY_SLOW, _GAUGE_EVERY = 16, 48
#: Collectives after a change of health in which that holds; later the share of the time that
#: measuring may cost, and the longest period.
_SOON = 64
_BUDGET = Fraction(1, 100)
_RAREST = 4096
#: Ranks times channels up to which a schedule is checked before use (some 10 ms).
_CHECKED_SIZE = 64

__all__ = ["GroupPlanCache", "Plan", "PlanCache"]
