"""Plan cache: the plan of each call shape, made on first use and kept.

`planner` chooses the schedule and its placement on the rails, the checker verifies a schedule that
is small or the user's, `lowering` cuts the schedule into slices, and `kernels` has the arithmetic.
Apart from the rank, and the places of parts in its memory, a plan depends only on values that are
equal on all ranks: the call's signature, its number and the user's schedule, the settings, the
fabric with its agreed rates, and the agreed health. The plans of all ranks therefore match.

Invariant: a cache holds at most `_KEPT` plans of calls with parts of unequal size, and at most
`_KEPT` plans of other calls. The total size of each kind is bounded. All plans are of the two
newest versions of the health (`r2ccl.planning.kept`); the oldest plans are evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl import kernels
from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.dtypes import dtype_of
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.bandwidth_samples import BandwidthSamples, SampleCost
from r2ccl.planning.cost_model import UNMEASURED, Choice, Fabric, Rates
from r2ccl.planning.kept import Kept
from r2ccl.planning.lowering import Layout, limit_windows, lower, renumbered
from r2ccl.planning.planner import Explanation, Planner
from r2ccl.schedule.check import check, check_order
from r2ccl.schedule.chunks import Parts
from r2ccl.schedule.ir import Schedule
from r2ccl.types import DIRECT, ORDERED_OP, PAIRWISE, PREFIXES, CallSignature


class Plan(NamedTuple):
    """Schedule, slices and arithmetic of a call: everything that does not depend on its memory.

    Attributes
    ----------
    signature : int
        Packed call signature, sent with every slice or with the announcement of its landing place.
    layout : Layout
    reduce : callable
        Reduction of two operands, ``reduce(left, right, out)``.
    finish : callable or None
        Division of the complete sum, for AVG; None for other operations.
    is_bandwidth_sample : bool
        True if the traffic of the call can measure the bandwidth of rails.
    pairs : dict of (int, bool) to int, or None
        Signatures that are sent instead of `signature`, by peer and direction (True: to the peer).
        Each has the number of elements that the pair exchanges in this direction. None unless the
        collective is in `r2ccl.types.PAIRWISE`.
    is_lasting : bool
        True if all equal calls have this plan until the health changes, whatever their collective
        numbers. Always True with a schedule of the user. With the planner's choice, False if equal
        calls must sometimes be bandwidth samples, or if the plan was made without a collective
        number.
    kernel : int
        Address of the kernel that reduces in compiled code; 0: the library's kernel for the dtype
        and the op of the signature.
    """

    signature: int
    layout: Layout
    reduce: kernels.Reducer
    finish: kernels.Divider | None
    is_bandwidth_sample: bool
    pairs: dict[tuple[int, bool], int] | None = None
    is_lasting: bool = False
    kernel: int = 0


class Planning(msgspec.Struct, frozen=True):
    """Number of plans made for one version of the health, and the times that they took.

    A call waits until its plan is made.

    Attributes
    ----------
    version : int
        Version of the health; every change of the health begins a new version.
    nplans : int
        Number of plans made.
    total_s, longest_s : float
        Time taken by all plans, and by the slowest of them, in seconds.
    """

    version: int = 0
    nplans: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


#: Function that replaces the ranks and link channels of a communicator in a layout by those of its
#: job.
Place = Callable[[Layout], Layout]


def in_job(members: Sequence[int], first_channel: int) -> Place:
    """Return the function that maps layouts of a communicator to ranks and channels of its job.

    `members` has the ranks of the communicator, as numbers in the job. `first_channel` is the
    communicator's lowest link channel in the job.
    """
    return lambda layout: renumbered(layout, members, lambda number: first_channel + number)


class GroupPlanCache:
    """Plan cache of the collectives within one group of ranks.

    Each rank belongs to one group, and all groups run the same collective at the same time.

    Parameters
    ----------
    rank : int
        This rank, one of `members`.
    members : sequence of int
        Ranks of the group in ascending order, each on a different node.
    nranks : int
        Number of ranks of all groups together: the divisor of AVG.
    fabric : Fabric
        Fabric of the whole communicator.
    config : Config
    homes : sequence of int, optional
        Home rails of the group's channels, a subset of the home rails of `fabric`. Default: all.
    place : callable, optional
        As for `PlanCache`.
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
        place: Place | None = None,
    ) -> None:
        self._members = tuple(members)
        self._place = place
        self._nranks = nranks
        #: Index of each of the group's home rails among the fabric's.
        self._places = [fabric.homes.index(rail) for rail in homes or fabric.homes]
        self._width = len(fabric.homes)
        index = self._members.index(rank)
        own = fabric._replace(nodes=(), homes=[fabric.homes[at] for at in self._places])
        self._plans = PlanCache(index, len(self._members), own, config, packs_channels=True)
        self._is_at_home = len(self._places) < self._width
        self._renumbered: Kept[tuple[int, CallSignature, Parts | None], Plan] = Kept(
            _KEPT, _UNEQUAL_SIZE
        )

    def __call__(self, call: CallSignature, health: Health, parts: Parts | None = None) -> Plan:
        """Return the plan of a collective of the group, given the health of all ranks.

        The ranks and link channels of the plan are those of the whole communicator or, if the cache
        was made with `place`, the numbers to which `place` maps them.

        Parameters
        ----------
        call : CallSignature
            The root is the index of a member of the group.
        health : Health
        parts : Parts, optional
            Places of the members' parts in this rank's memory, as for `PlanCache`.

        Raises
        ------
        InvalidArgument, ImportError, TransportError
            If `r2ccl.kernels.arithmetic` raises it, for example because the dtype does not support
            the reduction.
        """
        key = (health.version, call, parts)
        found = self._renumbered.get(key)
        if found is None:
            plan = self._plans(call, self._planned_with(health), parts=parts)
            layout = renumbered(plan.layout, self._members, self._channel)
            found = plan._replace(
                layout=layout if self._place is None else self._place(layout),
                finish=kernels.arithmetic(call, self._nranks)[1],
                is_bandwidth_sample=False,
            )
            self._renumbered.keep(key, found, _size_of(found))
        return found

    def _planned_with(self, health: Health) -> Health:
        among = health.of_ranks(self._members)
        if self._is_at_home:
            # The other home rails belong to other groups. The work of a lost rail detours over all
            # of them equally; a schedule that avoids the lost port would load only a few.
            shares = bytes(each or WHOLE for each in among.shares)
            among = msgspec.structs.replace(among, shares=shares, excluded=())
        return among

    def _channel(self, number: int) -> int:
        """Return the link channel of the communicator for link channel `number` of the group."""
        turn, at = divmod(number, len(self._places))
        return turn * self._width + self._places[at]


class CheckedSchedules:
    """Record of the schedules that the checker has accepted, for one or more plan caches.

    Thread-safe.
    """

    def __init__(self) -> None:
        #: Key of each accepted schedule, with whether its reduction order was checked too.
        self._keys: set[tuple[Hashable, bool]] = set()

    def check(self, schedule: Schedule, key: Hashable, *, is_ordered: bool) -> None:
        """Check `schedule`, unless the same `key` and `is_ordered` were accepted before.

        Only schedules of the same collective, with the same root and the same ops, may have the
        same `key`.

        Raises
        ------
        ScheduleError
            If `schedule` is incorrect or, with `is_ordered`, does not reduce in rank order.
        InvalidArgument
            As in `r2ccl.schedule.check.check`.
        """
        if (key, is_ordered) in self._keys:
            return
        check(schedule)
        if is_ordered:
            check_order(schedule)
        if len(self._keys) >= _KEPT:
            self._keys.clear()
        self._keys.add((key, is_ordered))


class PlanCache:
    """Plan cache of one rank: a callable that returns the plan of a call.

    Only the thread that runs a collective may request its plan, or query whether the collective is
    a bandwidth sample. Any thread may call `choose`, `choice_of`, `explain` and `check_own`.

    Parameters
    ----------
    rank, nranks : int
    fabric : Fabric
    config : Config
    place : callable, optional
        Maps the layout of every plan (see `Place`). Default: layouts are used as they are.
    packs_channels : bool
        True if plans use the lowest link channels (see `Placement.packed`); needs one rank per
        node.
    checked : CheckedSchedules, optional
        Record of schedules that need no check, shared with other plan caches. Default: a new,
        empty one.
    """

    def __init__(
        self,
        rank: int,
        nranks: int,
        fabric: Fabric,
        config: Config,
        *,
        place: Place | None = None,
        packs_channels: bool = False,
        checked: CheckedSchedules | None = None,
    ) -> None:
        #: Mapping of the layouts of all plans; None: layouts are used as they are.
        self.place = place
        self._rank = rank
        self._nranks = nranks
        self._planner = Planner(fabric, config)
        self._config = config
        self._packs_channels = packs_channels
        self._measures = config.balance != "0"
        self._plans: Kept[_Key, Plan] = Kept(_KEPT, _KEPT_SIZE)
        #: Plans of calls with unequal parts. These can differ in every call, and would drop those
        #: of the other calls of a program.
        self._unequal: Kept[_Key, Plan] = Kept(_KEPT, _UNEQUAL_SIZE)
        #: Number and times of the plans made for the newest health.
        self.planning = Planning()
        self._samples = BandwidthSamples()
        #: Costs of bandwidth samples, by health version, call and predicted time of two levels;
        #: None: the call must never be a sample.
        self._costs: Kept[_CostKey, SampleCost | None] = Kept(_KEPT)
        self._checked = checked or CheckedSchedules()

    @property
    def fabric(self) -> Fabric:
        """Fabric that plans are made for, with the rates measured so far."""
        return self._planner.fabric

    def measured(self, rates: Rates) -> None:
        """Use `rates` in all later plans and drop the existing plans.

        All ranks must call this between the same two collectives, with equal rates.
        """
        self._planner = Planner(self.fabric._replace(rates=rates), self._config)
        self._plans.clear()
        self._unequal.clear()
        self._costs.clear()

    def __call__(
        self,
        call: CallSignature,
        health: Health,
        op: int | None = None,
        own: Schedule | None = None,
        parts: Parts | None = None,
        *,
        is_bandwidth_sample: bool = False,
    ) -> Plan:
        """Return the plan of `call` for the given health.

        Parameters
        ----------
        call : CallSignature
        health : Health
        op : int, optional
            Number of the collective before this one, equal on all ranks. If given, the call is
            counted, and may be selected as a bandwidth sample (see the method
            `is_bandwidth_sample`). By default, the call is not counted and is no sample.
        own : Schedule, optional
            Schedule of the user, which replaces the planner's choice. The caller has verified that
            its collective and its number of ranks are those of the call.
        parts : Parts, optional
            Places of the parts in this rank's memory, as for `r2ccl.planning.lowering.lower`.
        is_bandwidth_sample : bool
            True if the plan must be a bandwidth sample, because the method `is_bandwidth_sample`
            has counted and selected the call.

        Raises
        ------
        InvalidArgument, ImportError, TransportError
            If `r2ccl.kernels.arithmetic` raises it, for example because the dtype does not support
            the reduction. For `own`, InvalidArgument also as in `check_own`.
        ScheduleError
            If `own` is not a correct schedule, or does not reduce in rank order although the
            operation is not commutative.
        """
        is_candidate = is_bandwidth_sample
        if op is not None and not is_bandwidth_sample:
            cost = self._cost_of(call, health) if own is None else None
            is_candidate = cost is not None
            # Most calls are no candidates and need no function call here.
            if is_candidate or op == self._samples.op:
                is_bandwidth_sample = self._take(op, cost, health)
        key = (health.version, call, is_bandwidth_sample, own, parts)
        plans = self._plans if parts is None else self._unequal
        found = plans.get(key)
        if found is None:
            begun_s = monotonic()
            found = self._make(call, health, is_bandwidth_sample, own, parts)
            is_lasting = op is not None and not is_candidate
            found = found._replace(is_lasting=own is not None or is_lasting)
            self._note(health.version, monotonic() - begun_s)
            plans.keep(key, found, _size_of(found))
        return found

    def _note(self, version: int, took_s: float) -> None:
        past = self.planning if self.planning.version == version else Planning(version)
        self.planning = Planning(
            version, past.nplans + 1, past.total_s + took_s, max(past.longest_s, took_s)
        )

    def choose(self, nbytes: int, health: Health) -> Choice:
        """Return the planner's choice for an allreduce of `nbytes`."""
        return self._planner.allreduce(nbytes, health)

    def choice_of(self, call: CallSignature, health: Health) -> Choice:
        """Return the planner's choice for `call`."""
        return self._planner.plan(call, call.count * dtype_of(call.dtype).itemsize, health)

    def explain(self, nbytes: int, health: Health) -> Explanation:
        """Compare the schedules that an allreduce of `nbytes` could run."""
        return self._planner.explain(nbytes, health)

    def check_own(self, schedule: Schedule, *, is_ordered: bool = False) -> None:
        """Check a schedule supplied by the user before its first use; any thread may call this.

        Raises
        ------
        ScheduleError
            If `schedule` is incorrect or, with `is_ordered`, does not reduce in rank order.
        InvalidArgument
            As in `r2ccl.schedule.check.check`.
        """
        self._checked.check(schedule, schedule, is_ordered=is_ordered)

    def _make(
        self,
        call: CallSignature,
        health: Health,
        is_bandwidth_sample: bool,
        own: Schedule | None,
        parts: Parts | None,
    ) -> Plan:
        reduce, finish = kernels.arithmetic(call, self._nranks)
        itemsize = dtype_of(call.dtype).itemsize
        nbytes = call.count * itemsize
        is_ordered = call.op == ORDERED_OP
        if own is None:
            choice = self._planner.plan(
                call, nbytes, health, is_bandwidth_sample=is_bandwidth_sample
            )
            self._check_choice(choice.schedule, is_ordered=is_ordered)
        else:
            self.check_own(own, is_ordered=is_ordered)
            choice = self._planner.own(own, nbytes, health)
            call = call.with_digest(own.digest())
        placement = choice.placement
        if self._packs_channels:
            placement = placement.packed(len(self.fabric.homes))
        is_bulk = (placement.edges or placement.spread) and nbytes > self.fabric.inlet_nbytes
        # A schedule of the user is never a direct exchange or a sample: it may have any name.
        is_direct = own is None and choice.name == "direct"
        whole_nbytes = self._whole_nbytes() if is_direct else 0
        layout = lower(
            choice.schedule.program(self._rank),
            call.count,
            itemsize,
            slice_nbytes=choice.slice_nbytes,
            # Eager slices ignore the receive window and would overrun ports with several senders.
            eager_nbytes=0 if is_bulk or whole_nbytes else self._config.eager_nbytes,
            weights=placement.weights,
            channels=placement.channels,
            numbers=placement.numbers(self._rank, self._nranks),
            parts=parts,
            whole_nbytes=whole_nbytes,
            announces_parts=call.collective in PAIRWISE,
            clears_busy_links=self.fabric.is_loopback,
        )
        layout = limit_windows(layout, len(self.fabric.homes), self.fabric.inlet_nbytes)
        if self.place is not None:
            layout = self.place(layout)
        pairs = None
        if call.collective in PAIRWISE:
            pairs = _pairs(call, layout)
            call = msgspec.structs.replace(call, count=-1)  # equals the signature of no pair
        return Plan(
            call.pack(),
            layout,
            reduce,
            finish,
            own is None and choice.is_bandwidth_sample,
            pairs,
        )

    def _whole_nbytes(self) -> int:
        """Return the size, in bytes, up to which a part of a direct exchange is sent eagerly.

        If all other ranks send such a part to one port at once, all parts together fit the byte
        budget of the port.
        """
        return min(self._config.eager_nbytes, self.fabric.inlet_nbytes // self._nranks)

    def is_bandwidth_sample(
        self, call: CallSignature, health: Health, op: int, two_level_ns: int | None = None
    ) -> bool:
        """Return whether `call` must run as a bandwidth sample, even if another schedule is faster.

        This method also counts the call; see `r2ccl.planning.bandwidth_samples` for the selection.
        The last call of this method with a given `op` must be for the collective that this rank
        then runs.

        `op` is the number of the collective before `call`, equal on all ranks. `two_level_ns` is
        the predicted time of the call in two levels (`r2ccl.planning.two_level`), 0 if unknown;
        None if the call would run in one level.

        The result is equal on all ranks, because all ranks use a new health from the same call on.
        It is False for scans, collectives in `r2ccl.types.DIRECT` and operations that are not
        commutative, and with ``R2CC_BALANCE=0``. It is also False if the network was not measured,
        if the predicted time of the call is unknown, if the fastest schedule of the call is a
        sample anyway, or if none of its schedules is a sample.
        """
        return self._take(op, self._cost_of(call, health, two_level_ns), health)

    def _take(self, op: int, cost: SampleCost | None, health: Health) -> bool:
        """Count a call whose `_cost_of` is `cost`, and return whether it must be a sample.

        If the call is a candidate and `health` has another version than the last count, start a new
        count first.
        """
        if cost is not None and health.version != self._samples.version:
            is_slow = any(0 < share < WHOLE for share in health.shares)
            self._samples.begin(health.version, is_slow=is_slow)
        return self._samples.take(op, cost)

    def _cost_of(
        self, call: CallSignature, health: Health, two_level_ns: int | None = None
    ) -> SampleCost | None:
        """Return the cost of running `call` as a sample; None if it must never be one."""
        if not self._measures or self.fabric.rates == UNMEASURED or call.op == ORDERED_OP:
            return None
        if call.collective in DIRECT or call.collective in PREFIXES:
            return None
        key = (health.version, call, two_level_ns)
        try:
            return self._costs[key]
        except KeyError:
            return self._costs.keep(key, self._predicted_cost(call, health, two_level_ns))

    def _predicted_cost(
        self, call: CallSignature, health: Health, two_level_ns: int | None
    ) -> SampleCost | None:
        nbytes = call.count * dtype_of(call.dtype).itemsize
        chosen, gauge = (
            self._planner.plan(call, nbytes, health, is_bandwidth_sample=is_bandwidth_sample)
            for is_bandwidth_sample in (False, True)
        )
        chosen_ns = chosen.predicted_ns if two_level_ns is None else two_level_ns
        is_always_one = two_level_ns is None and chosen.is_bandwidth_sample
        if is_always_one or not gauge.is_bandwidth_sample or not chosen_ns:
            return None
        return SampleCost(chosen_ns, max(0, gauge.predicted_ns - chosen_ns))

    def _check_choice(self, schedule: Schedule, *, is_ordered: bool) -> None:
        """Check a small schedule of the library before its first use; tests check large ones."""
        if schedule.nranks * schedule.nchannels <= _CHECKED_SIZE:
            # Schedules of one family and size can have different ops, for example other trees.
            # Comparing digests takes a tenth of the time of a check.
            key = (schedule.collective, schedule.root, schedule.digest())
            self._checked.check(schedule, key, is_ordered=is_ordered)


def _pairs(call: CallSignature, layout: Layout) -> dict[tuple[int, bool], int]:
    """Return `Plan.pairs` of a direct exchange: per pair, a signature with its element count."""
    counts: dict[tuple[int, bool], int] = {}
    for lane in layout.lanes:
        for is_sent, ways in ((True, lane.sends), (False, lane.recvs)):
            for way in ways:
                cuts = [lane.steps[index].cuts for index in way.steps]
                count = sum(each[-1] - each[0] for each in cuts)
                counts[way.peer, is_sent] = counts.get((way.peer, is_sent), 0) + count
    return {key: msgspec.structs.replace(call, count=count).pack() for key, count in counts.items()}


def _size_of(plan: Plan) -> int:
    """Return the size of a plan, in slice boundaries; a step counts as `_STEP_SIZE` of them."""
    lanes = plan.layout.lanes
    ncuts = sum(len(step.cuts) for lane in lanes for step in lane.steps)
    return sum(len(lane.steps) for lane in lanes) * _STEP_SIZE + ncuts + len(plan.pairs or ())


#: Health version, call, whether the plan is a bandwidth sample, the user's schedule, and the places
#: of unequal parts.
_Key = tuple[int, CallSignature, bool, Schedule | None, Parts | None]
_CostKey = tuple[int, CallSignature, int | None]

#: Maximum number of plans per cache. A training job has a few dozen call shapes.
_KEPT = 1024
#: Maximum size of the plans of calls with equal parts together, in slice boundaries (36 bytes each,
#: measured with tracemalloc for alltoallvs of 64 and 256 ranks). Such calls are few in a job and
#: repeat; their plans can be large (a ring of 64 ranks and 8 rails: 140,000).
_KEPT_SIZE = 1 << 23
#: The same for calls with unequal parts, which can differ in every call.
_UNEQUAL_SIZE = 1 << 21
#: Size of a step without its slice boundaries, in slice boundaries.
_STEP_SIZE = 8
#: Largest product of ranks and channels of a schedule that is checked before use (some 10 ms).
_CHECKED_SIZE = 64

__all__ = [
    "CheckedSchedules",
    "GroupPlanCache",
    "Place",
    "Plan",
    "PlanCache",
    "Planning",
    "in_job",
]
