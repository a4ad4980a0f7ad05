"""Planner: choose the schedule of a call, its placement on rails and its slice size.

All ranks make the same choice, because the planner reads only values that all ranks share: the
call, the configuration, the fabric with the agreed rates, and the agreed health. The planner keeps
results from call to call; this saves time and never changes a choice.

A collective whose data fits one eager slice is bound by latency and runs recursive doubling,
dissemination, a scan by doubling or a tree of few levels; with settings that allow only rings, a
small allgather or reduce-scatter runs a ring. Larger collectives run the candidate with the least
predicted time, or a preferred candidate whose time is within 2 % of the least
(`r2ccl.planning.cost_model`, `best`). Alltoalls and exchanges of unequal parts, of any size, and
larger gathers and scatters are direct exchanges (`r2ccl.planning.exchange_placement`). A reduction
by an operation that is not commutative runs recursive doubling, or chains in rank order.
``R2CC_MODE`` restricts the schedule families; in mode auto, ``R2CC_ALGO`` can fix the family of
larger allreduces. Its value ``ring`` also restricts the other collectives, as the modes failstop,
migrate and balance do.

If some nodes have no common home rail, the planner chooses a schedule in which every two neighbors
have a common home rail, unless it finds no such schedule. This does not apply to scans, alltoalls,
exchanges of unequal parts and operations that are not commutative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import msgspec

from r2ccl.algos import recursive_doubling, scan, spanning_tree, tree, tree_gather
from r2ccl.config import Config
from r2ccl.failover.health.table import Health
from r2ccl.planning.allreduce_registry import FAMILIES, Candidate, Terms, candidates, expand
from r2ccl.planning.collective_registry import DISSEMINATIONS, collective_candidates, parted
from r2ccl.planning.cost_model import NOT_TREES, UNMEASURED, Choice, Fabric, Placed, predict, put
from r2ccl.planning.exchange_placement import place_exchange
from r2ccl.planning.kept import Kept
from r2ccl.planning.placement import place
from r2ccl.schedule.ir import Schedule
from r2ccl.types import (
    DIRECT,
    ORDERED_OP,
    PAIRWISE,
    PARTED,
    PREFIXES,
    ROOTED,
    CallSignature,
    Collective,
)


class Explanation(NamedTuple):
    """Comparison of the schedules for an allreduce, and the reason for the choice.

    ``str()`` returns a table, with the chosen schedule marked by ``*``.

    Attributes
    ----------
    nbytes : int
        Size of the allreduce, in bytes.
    chosen : Choice
    others : tuple of Choice
        Best variant of every other family in `FAMILIES` that can run, fastest first. All
        ``predicted_ns``, also that of `chosen`, are 0 if the network was not measured.
    why : str
        Reason for the choice, as text for the user.
    excluded : tuple of (int, int)
        Rank and rail of each NIC that `Communicator.exclude` or R2CC_FAILED_NICS has excluded.
    nchunks : int
        0 if the allreduce runs in one level. Otherwise it runs in two levels, shared memory within
        the nodes and the network between them (`r2ccl.planning.two_level`), in this number of
        chunks; `chosen` and `others` are then the schedules that would run in one level.
    is_local : bool
        True if the allreduce runs in memory that all ranks share; `chosen` and `others` are then
        the schedules that would run on the network.
    """

    nbytes: int
    chosen: Choice
    others: tuple[Choice, ...]
    why: str
    excluded: tuple[tuple[int, int], ...] = ()
    nchunks: int = 0
    is_local: bool = False

    def __str__(self) -> str:
        lines = [
            f"allreduce of {self.nbytes} bytes: {self.chosen.schedule.name}, {self.why}",
            f"{'':2}{'schedule':<20}{'predicted':>12}{'steps':>8}{'busiest port':>14}{'slice':>12}",
        ]
        for mark, each in (("*", self.chosen), *((" ", other) for other in self.others)):
            time = f"{each.predicted_ns / 1e6:.3f} ms" if each.predicted_ns else "-"
            lines.append(
                f"{mark:2}{each.name:<20}{time:>12}{each.steps:>8}"
                f"{float(each.load):>12.3f} D{each.slice_nbytes:>12}"
            )
        if self.nchunks:
            lines.append(
                f"  runs in two levels, in {self.nchunks} chunks: shared memory within the nodes, "
                "the network between them; the schedules above are those of one level"
            )
        if self.is_local:
            lines.append(
                "  runs in memory that all ranks share; the schedules above are for the network"
            )
        if self.excluded:
            ports = (f"rail {rail} of rank {rank}" for rank, rail in self.excluded)
            lines.append(f"  excluded: {', '.join(ports)}")
        return "\n".join(lines)


class Planner:
    """Planner of one communicator, which chooses the schedule of each call.

    Parameters
    ----------
    fabric : Fabric
    config : Config
    """

    def __init__(self, fabric: Fabric, config: Config) -> None:
        self.fabric = fabric
        self._config = config
        #: Placed candidates by health version, family or call, and channel count of a ring.
        self._placed: Kept[_Key, list[Placed]] = Kept(_KEPT, _KEPT_SIZE)

    def plan(
        self, call: CallSignature, nbytes: int, health: Health, *, is_bandwidth_sample: bool = False
    ) -> Choice:
        """Return the choice for a call whose whole buffer has `nbytes` bytes.

        With `is_bandwidth_sample`, choose a schedule whose traffic measures rail bandwidth (see
        `r2ccl.planning.plan_cache`), unless the data fits one eager slice, the settings fix another
        schedule, or the call has no such schedule.
        """
        call = _without_digest(call)
        is_small = nbytes <= self._config.eager_nbytes
        carried = self._carried(health)
        terms = self._terms(nbytes, carried)
        if call.op == ORDERED_OP and call.collective not in PREFIXES:
            return self._ordered(call, nbytes, health)
        if call.collective == Collective.ALLREDUCE and not is_small:
            is_ring = is_bandwidth_sample and not self._config.fixed_family
            found = self.compare(nbytes, health, ("ring",) if is_ring else None)
            gauges = [each for each in found if each.is_bandwidth_sample] if is_ring else []
            return _expanded(best(gauges or found), terms)
        if call.collective in _TREE_GATHERS and (is_small or _is_bridged(terms)):
            return self._tree_gather(call, nbytes, terms, carried)
        if call.collective in DIRECT:
            return self._direct(call, nbytes, carried)
        if is_small or call.collective == Collective.BARRIER:
            return self._small(call, terms, carried)
        found = self._predicted(call, nbytes, terms, carried)
        gauges = [each for each in found if each.is_bandwidth_sample] if is_bandwidth_sample else []
        return best(gauges or found)

    def options(self, call: CallSignature, nbytes: int, health: Health) -> list[Choice]:
        """Return the schedules that a call could run, with predicted times; one or more per family.

        The operation of `call` must be commutative. For an allreduce, the result includes families
        that `plan` does not try with these settings and this health, but no spanning tree if
        another family can run. For another collective, the only element is the choice of `plan` if
        there is no other candidate, or if `plan` compares no candidates because the data fits one
        eager slice. The predicted time of this element may be 0.
        """
        if call.collective == Collective.ALLREDUCE:
            return self.compare(nbytes, health, FAMILIES)
        is_compared = call.collective not in DIRECT and nbytes > self._config.eager_nbytes
        if is_compared and call.collective != Collective.BARRIER:
            carried, call = self._carried(health), _without_digest(call)
            return self._predicted(call, nbytes, self._terms(nbytes, carried), carried)
        return [self.plan(call, nbytes, health)]

    def _predicted(
        self, call: CallSignature, nbytes: int, terms: Terms, health: Health
    ) -> list[Choice]:
        """Return the candidates of a collective other than allreduce, with their predicted times.

        The candidates are those of `_placed_for`.
        """
        placed = self._placed_for(call, terms, health)
        return [predict(each, nbytes, self.fabric, self._config) for each in placed]

    def _small(self, call: CallSignature, terms: Terms, health: Health) -> Choice:
        """Return the choice for a call that has no data or whose data fits one eager slice."""
        nranks = health.nranks
        is_bridged = _is_bridged(terms)
        if call.collective in PARTED:
            collective = Collective(call.collective)
            if is_bridged or self._keeps_order:
                schedule = parted(collective, terms, 1)
            else:
                schedule = DISSEMINATIONS[collective](nranks, 1)
        elif call.collective in PREFIXES:
            schedule = scan.doubling(nranks, is_exclusive=call.collective == Collective.EXSCAN)
        elif is_bridged:
            # Some nodes have no common home rail; neighbors in this tree have one.
            parents = spanning_tree.span(nranks, terms.rank_meets(), call.root)
            schedule = _TREES.get(call.collective, tree.allreduce)([parents], "spanning_tree")
        elif call.collective in _TREES:
            parents = tree.turned(tree.double_binary(nranks)[0], call.root)
            schedule = _TREES[call.collective]([parents])
        else:
            schedule = recursive_doubling.allreduce(nranks)
        if is_bridged:
            return self._built_in(schedule, 0, health)
        placement = place(schedule.nchannels, self.fabric.homes, health)
        return Choice(schedule.name, schedule, placement, self._config.slice_nbytes)

    def _tree_gather(
        self, call: CallSignature, nbytes: int, terms: Terms, health: Health
    ) -> Choice:
        """Return the choice for a gather or scatter over a tree.

        The tree is a spanning tree if home rails connect all nodes, but connect some nodes only
        over other nodes. Otherwise it is a binomial tree.
        """
        make = _TREE_GATHERS[call.collective]
        if _is_bridged(terms):
            parents = spanning_tree.span(health.nranks, terms.rank_meets(), call.root)
            schedule = make(parents, terms.nchannels, "spanning_tree")
            return self._built_in(schedule, nbytes, health)
        schedule = make(tree_gather.binomial(health.nranks, call.root))
        placement = place(1, self.fabric.homes, health)
        return Choice(schedule.name, schedule, placement, self._config.slice_nbytes)

    def _direct(self, call: CallSignature, nbytes: int, health: Health) -> Choice:
        """Return the choice for a direct exchange; its placement is cached for each health."""
        collective = Collective(call.collective)
        key = (health.version, f"{collective.name} {call.root}", 0)
        found = self._placed.get(key)
        if found is None:
            channels = self._config.channels
            placed = place_exchange(collective, call.root, channels, self.fabric, health)
            found = self._placed.keep(key, [placed], _size_of(placed))
        size = _NOMINAL_NBYTES if collective in PAIRWISE else nbytes
        return predict(found[0], size, self.fabric, self._config)

    def _ordered(self, call: CallSignature, nbytes: int, health: Health) -> Choice:
        """Return the choice for a reduction that must combine the ranks' data in rank order.

        A reduce-scatter, and a reduce of little data, run as an allreduce; each rank then
        keeps the part of the result that it needs.
        """
        nranks = health.nranks
        if nbytes <= self._config.eager_nbytes:
            return self._built_in(recursive_doubling.allreduce(nranks), nbytes, health)
        nchannels = self._nchannels(nbytes, nranks)
        if call.collective == Collective.REDUCE:
            lines = tree.reduce([tree.line(nranks, call.root)] * nchannels, "line")
        else:
            lines = tree.allreduce([tree.line(nranks, nranks - 1)] * nchannels, "line")
        return self._built_in(lines, nbytes, health)

    def _placed_for(self, call: CallSignature, terms: Terms, health: Health) -> list[Placed]:
        """Return the placed candidates of a collective other than allreduce.

        Candidates in which two neighbors share no home rail are left out, unless that leaves none.
        The candidates are cached for each health.
        """
        collective = Collective(call.collective)
        key = (health.version, f"{collective.name} {call.root}", terms.nchannels)
        made = partial(
            collective_candidates, collective, call.root, terms, keeps_order=self._keeps_order
        )
        found = self._keep(key, made, health)
        return [each for each in found if each.has_way] or found

    @property
    def _keeps_order(self) -> bool:
        """True if only rings and chains may run, in rank order where possible."""
        return not self._config.is_planned or self._config.fixed_family == "ring"

    def allreduce(self, nbytes: int, health: Health) -> Choice:
        """Return the choice for an allreduce of `nbytes`, for any dtype and commutative op."""
        return self.plan(CallSignature(Collective.ALLREDUCE, 0, 0, nbytes), nbytes, health)

    def compare(
        self, nbytes: int, health: Health, families: Iterable[str] | None = None
    ) -> list[Choice]:
        """Return the candidates for an allreduce of `nbytes`, each with its predicted time.

        The candidates are in the order of `families`; a family may have several candidates or none.
        Candidates in which two neighbors share no home rail are left out. If no candidate remains,
        the ring is tried, then the families in `_BRIDGED`. If these have no candidate either, the
        result is the ring, although some neighbors in it share no home rail.

        If nodes have several ranks, a schedule can be over nodes (`Choice.is_among_nodes`). `plan`
        expands the schedule that it chooses.

        Parameters
        ----------
        nbytes : int
        health : Health
        families : iterable of str, optional
            Names in `FAMILIES`, or ``spanning_tree``, to try first. Default: the families that the
            settings allow and that can be the best for this health.
        """
        carried = self._carried(health)
        terms = self._terms(nbytes, carried)
        names = self._names(terms) if families is None else families
        for tried in (names, ("ring",), _BRIDGED):
            placed = [each for name in tried for each in self._put(name, terms, carried)]
            found = [each for each in placed if each.has_way]
            if found:
                break
        # Neighbors without a common home rail use a bypass or a rail that is no home rail, or wait
        # for a rail to come back.
        found = found or self._put("ring", terms, carried)
        return [predict(each, nbytes, self.fabric, self._config) for each in found]

    def _put(self, name: str, terms: Terms, health: Health) -> list[Placed]:
        """Return the placed candidates of a family, which are cached for each health."""
        key = (health.version, name, terms.nchannels if name in _OF_RINGS else 0)
        return self._keep(key, partial(candidates, name, terms), health)

    def _keep(
        self, key: _Key, make: Callable[[], Iterable[Candidate]], health: Health
    ) -> list[Placed]:
        found = self._placed.get(key)
        if found is None:
            found = [put(each, self.fabric, health) for each in make()]
            self._placed.keep(key, found, sum(map(_size_of, found)))
        return found

    def own(self, schedule: Schedule, nbytes: int, health: Health) -> Choice:
        """Return the choice that runs `schedule`, which the user has made for the communicator."""
        cost = schedule.cost
        # The name of a user's schedule proves nothing. If a rank sends or receives a chunk in every
        # step, no port waits until a pipeline is full; otherwise, small slices shorten that wait.
        is_always_busy = cost.steps <= min(schedule.nchunks) * max(cost.sent, cost.received)
        is_pipeline = schedule.name not in NOT_TREES or not is_always_busy
        return self._alone(schedule, nbytes, health, is_pipeline=is_pipeline)

    def _built_in(self, schedule: Schedule, nbytes: int, health: Health) -> Choice:
        """Return the choice that runs `schedule`, the only candidate for a call."""
        is_pipeline = schedule.name not in NOT_TREES
        return self._alone(schedule, nbytes, health, is_pipeline=is_pipeline)

    def _alone(
        self, schedule: Schedule, nbytes: int, health: Health, *, is_pipeline: bool
    ) -> Choice:
        fill = schedule.cost.steps // 2 if is_pipeline else 0
        candidate = Candidate(schedule.name, schedule, fill)
        placed = put(candidate, self.fabric, self._carried(health))
        return predict(placed, nbytes, self.fabric, self._config)

    def explain(self, nbytes: int, health: Health) -> Explanation:
        """Compare the schedule that an allreduce of `nbytes` runs with the other families."""
        chosen = self.allreduce(nbytes, health)
        forms: dict[str, list[Choice]] = {}
        for each in self.compare(nbytes, health, FAMILIES):
            forms.setdefault(each.name, []).append(each)
        others = sorted(
            (best(found) for name, found in forms.items() if name != chosen.name),
            key=lambda each: each.predicted_ns,
        )
        if nbytes <= self._config.eager_nbytes:
            chosen = self._built_in(chosen.schedule, nbytes, health)
        if self.fabric.rates == UNMEASURED:  # loads can be compared; times are unknown
            chosen, *others = (each._replace(predicted_ns=0) for each in (chosen, *others))
        why = self._why(chosen, nbytes, health)
        return Explanation(nbytes, chosen, tuple(others), why, health.excluded)

    def _why(self, chosen: Choice, nbytes: int, health: Health) -> str:
        """Return the reason for the choice of an allreduce, as text for the user."""
        is_allowed = chosen.name in self._names(self._terms(nbytes, self._carried(health)))
        config = self._config
        if nbytes <= config.eager_nbytes:
            return "because the data fits one eager slice"
        if config.mode != "auto" or config.algo != "auto":
            is_mode = config.mode != "auto"
            setting = f"R2CC_MODE={config.mode}" if is_mode else f"R2CC_ALGO={config.algo}"
            return f"because {setting}{'' if is_allowed else _NOT_APPLICABLE}"
        if not is_allowed:
            return "because some nodes have no common home rail"
        if self.fabric.is_loopback:
            return "because all rails share one wire, so losing a rail costs no bandwidth"
        if self.fabric.rates == UNMEASURED:
            return "because the network was not measured"
        return self._comparison(chosen, nbytes, health)

    def _comparison(self, chosen: Choice, nbytes: int, health: Health) -> str:
        """Return the reason for the choice of an allreduce whose candidates were compared."""
        compared = self.compare(nbytes, health)
        if not chosen.has_way:
            return reason(chosen, compared)
        carried = self._carried(health)
        terms = self._terms(nbytes, carried)
        placed = [each for name in self._names(terms) for each in self._put(name, terms, carried)]
        able = {each.candidate.name for each in placed if each.has_way}
        unable = [each.candidate.name for each in placed if each.candidate.name not in able]
        why = reason(chosen, compared)
        if unable:
            why += f"; {_listed(unable)} cannot run, because some nodes have no common rail"
        if not terms.is_whole:
            left = [name for name in _FOR_WHOLE if name not in _FOR_DEGRADED]
            why += f"; {_listed(left)} competes only while all NICs work and nodes are equally fast"
        return why

    def _nchannels(self, nbytes: int, nranks: int) -> int:
        nwires = self.fabric.nwires
        nhomes = min(nwires, len(self.fabric.homes))
        most = self._config.channels or full_channels(nhomes, nwires)
        return min(most, max(1, nbytes // (nranks * _MIN_CHUNK_NBYTES)))

    def _carried(self, health: Health) -> Health:
        """Return `health`, or a health without any failure if the mode ignores failures."""
        if self._config.is_balanced:
            return health
        return Health.whole(health.nranks, health.nrails)

    def _terms(self, nbytes: int, health: Health) -> Terms:
        teams: dict[int, list[int]] = {}
        for rank, node in enumerate(self.fabric.nodes or range(health.nranks)):
            teams.setdefault(node, []).append(rank)
        shares = tuple(
            tuple(min(health.share(rank, rail) for rank in team) for rail in self.fabric.homes)
            for team in teams.values()
        )
        nchannels = self._nchannels(nbytes, health.nranks)
        return Terms(shares, tuple(map(tuple, teams.values())), nchannels)

    def _names(self, terms: Terms) -> tuple[str, ...]:
        """Return the families that the settings allow and that can be best, preferred first."""
        if not self._config.is_planned:
            return ("ring",)
        if self._config.mode == "r2cc":
            return ("ring", "r2cc")
        if self._config.fixed_family:
            return (self._config.fixed_family,)
        if self.fabric.is_loopback or self.fabric.rates == UNMEASURED:
            return ("ring",)
        return _FOR_WHOLE if terms.is_whole else _FOR_DEGRADED


def _size_of(placed: Placed) -> int:
    """Return the number of edges and flows of a candidate, which take most of its memory."""
    candidate, placement, *_ = placed
    flows = candidate.flows.flows if candidate.flows else ()
    return len(placement.edges) + len(candidate.edges) + len(flows)


def best(found: Sequence[Choice]) -> Choice:
    """Return the first of `found` whose predicted time is within 2 % of the least.

    For this comparison, the predicted time of a dissemination is raised by 5 % (`_CROWDED`).
    """

    def weighed(choice: Choice) -> Fraction:
        return choice.predicted_ns * (_CROWDED if choice.name == "dissemination" else Fraction(1))

    least = min(map(weighed, found))
    return next(each for each in found if weighed(each) <= least * _AS_GOOD)


def reason(chosen: Choice, found: Sequence[Choice]) -> str:
    """Return a text that says why `best` chose `chosen` among `found`.

    The text gives the predicted times of `chosen` and of the fastest other family. It gives no
    times if there is no other family, or if some neighbors in `chosen` have no common home rail.
    """
    least: dict[str, Choice] = {}
    for each in sorted(found, key=lambda choice: choice.predicted_ns):
        least.setdefault(each.name, each)
    if not chosen.has_way:
        return (
            "although some ranks that exchange data have no common home rail: no other schedule "
            "avoids that"
        )
    others = [each for each in least.values() if each.name != chosen.name]
    if not others:
        return "the only schedule that can run"
    other = others[0]
    said = f"predicted {_milliseconds(chosen)}"
    if other.predicted_ns < chosen.predicted_ns:
        # `best` accepts both, so the difference is within the error of predictions.
        said += f", preferred to {other.name}, about as fast with {_milliseconds(other)}"
    else:
        said += f", before {other.name} with {_milliseconds(other)}"
    return f"{said}; compared were {_listed(least)}"


def _milliseconds(choice: Choice) -> str:
    return f"{choice.predicted_ns / 1e6:.3f} ms"


def _listed(names: Iterable[str]) -> str:
    """Return names as ``a``, ``a and b`` or ``a, b and c``, each once."""
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last


def _expanded(choice: Choice, terms: Terms) -> Choice:
    """Return `choice` with a schedule over ranks; expand a schedule over nodes."""
    if not choice.is_among_nodes:
        return choice
    schedule, placement = expand(choice.schedule, choice.placement, terms.teams, choice.flows)
    return choice._replace(schedule=schedule, placement=placement, is_among_nodes=False)


def _without_digest(call: CallSignature) -> CallSignature:
    """Return `call`, with ``root`` set to 0 if its collective has no root rank.

    In such a call, ``root`` may be made from a digest (`CallSignature`), which can differ in every
    call; the choice does not depend on it.
    """
    return call if call.collective in ROOTED else msgspec.structs.replace(call, root=0)


def _is_bridged(terms: Terms) -> bool:
    """Return whether some nodes have no common home rail, but home rails connect all nodes."""
    return not terms.is_connected and terms.is_joined


def full_channels(nhomes: int, nrails: int) -> int:
    """Return the number of channels that keeps all home rails busy, even if one rail is lost.

    `nrails` is the number of rails whose bandwidths add up (`Fabric.nwires`). Each of the `nhomes`
    home rails has ``nrails - 1`` channels, but at least one. The channels of a lost rail then
    spread evenly over the other rails.
    """
    return nhomes * max(1, nrails - 1)


#: Functions that build a rooted collective from trees.
_TREES: dict[int, Callable[..., Schedule]] = {
    Collective.BROADCAST: tree.broadcast,
    Collective.REDUCE: tree.reduce,
}
#: Functions that build a gather or scatter over a tree.
_TREE_GATHERS: dict[int, Callable[..., Schedule]] = {
    Collective.GATHER: tree_gather.gather,
    Collective.SCATTER: tree_gather.scatter,
}
#: Size for which collectives in `PAIRWISE` are planned: no rank knows the size of all parts.
_NOMINAL_NBYTES = 1 << 30
#: Health version, family or call, and channel count of a ring.
_Key = tuple[int, str, int]

#: Families tried on a whole and on a degraded network; if several are predicted to be equally good,
#: the first one runs. For larger allreduces, other families run only if R2CC_ALGO or R2CC_MODE
#: selects them or they are in `_BRIDGED`: measured on 4 nodes of 4 rails with lost NICs, none was
#: more than 2 % faster than the best of these.
_FOR_WHOLE = ("ring", "dissemination", "packed_trees", "tree")
_FOR_DEGRADED = ("packed_trees", "ring", "bridged_ring", "tree")
#: Families for networks in which some nodes have no common home rail. They are tried if every
#: candidate of the families tried before has neighbors without a common home rail.
_BRIDGED = ("bridged_ring", "packed_trees", "spanning_tree")
#: Factor of the least predicted time up to which choices count as equally good: the error of
#: predictions.
_AS_GOOD = Fraction(102, 100)
#: Penalty of a dissemination: a port with several senders is not fully used if switches drop
#: excess data (netlab, 4 x 4 and 8 x 2 rails: 1.0 to 1.6 times a ring's time with 4 and 16 MiB, 0.2
#: to 0.5 times with 256 KiB).
_CROWDED = Fraction(105, 100)
#: Minimum size of a chunk, in bytes, at which another channel is worth its overhead. With smaller
#: chunks, the ring's steps cost more time than the additional rails save.
_MIN_CHUNK_NBYTES = 64 << 10
#: Families whose schedules depend on `Terms.nchannels`, which is smaller for little data.
_OF_RINGS = ("ring", "bridged_ring", "spanning_tree")
#: Last words of the reason for a choice if no family that the setting allows can run.
_NOT_APPLICABLE = " has no schedule for these nodes and their rails"
#: Maximum number of entries in `Planner._placed`, and maximum number of their edges and flows
#: together (90 to 200 bytes each, measured with tracemalloc). A broadcast has one entry per root:
#: 8,000 edges with 512 nodes of 8 rails. An allgather among 1,024 nodes has an entry of 160,000.
_KEPT = 128
_KEPT_SIZE = 1 << 19

__all__ = ["Explanation", "Planner", "best", "full_channels", "reason"]
