"""Planner: which schedule a call runs, on which rails and in what slices; alike on every rank.

It reads what all ranks share (the call, the configuration, the fabric with the rates they agreed
on, the agreed health) and nothing a rank measured for itself.

While the data fits one eager slice, where latency decides, it is recursive doubling, dissemination
or a binary tree. Above it every collective runs the candidate that is predicted to end first
(`r2ccl.planning.cost_model`). ``R2CC_ALGO`` names a family, ``R2CC_MODE`` bounds what there is to
choose from. Where some nodes have no rail in common, only schedules whose neighbours have one are
admissible.

Invariant: equal arguments, equal choice. What is kept from call to call saves time and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from r2ccl.algos import recursive_doubling, spanning_tree, tree
from r2ccl.config import Config
from r2ccl.failover.health.table import Health
from r2ccl.planning.allreduce_registry import FAMILIES, Candidate, Terms, candidates, expand
from r2ccl.planning.collective_registry import DISSEMINATIONS, collective_candidates, parted
from r2ccl.planning.cost_model import NOT_TREES, UNMEASURED, Choice, Fabric, Placed, predict, put
from r2ccl.planning.placement import place
from r2ccl.schedule.ir import Schedule
from r2ccl.types import PARTED, CallSignature, Collective


class Explanation(NamedTuple):
    """Why a call runs what it runs; ``str()`` is a table.

    Attributes
    ----------
    nbytes : int
    chosen : Choice
    others : tuple of Choice
        The best form of every other family, the fastest first.
    why : str
    """

    nbytes: int
    chosen: Choice
    others: tuple[Choice, ...]
    why: str

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
        return "\n".join(lines)


class Planner:
    """Chooses for the calls of one communicator.

    Parameters
    ----------
    fabric : Fabric
    config : Config
    """

    def __init__(self, fabric: Fabric, config: Config) -> None:
        self.fabric = fabric
        self._config = config
        #: By health, family or call, and channels of a ring: all forms, on the rails.
        self._placed: dict[_Key, list[Placed]] = {}

    def plan(
        self, call: CallSignature, nbytes: int, health: Health, *, is_bandwidth_sample: bool = False
    ) -> Choice:
        """Choose for a call whose whole buffer has `nbytes` bytes.

        With `is_bandwidth_sample`, what shows what the rails carry, if any schedule may run: see
        `r2ccl.planning.plan_cache`.
        """
        is_small = nbytes <= self._config.eager_nbytes
        carried = self._carried(health)
        terms = self._terms(nbytes, carried)
        if call.collective == Collective.ALLREDUCE and not is_small:
            is_ring = is_bandwidth_sample and self._config.algo == "auto"
            found = self.compare(nbytes, health, ("ring",) if is_ring else None)
            gauges = [each for each in found if each.is_bandwidth_sample] if is_ring else []
            return _expanded(best(gauges or found), terms)
        if is_small or call.collective == Collective.BARRIER:
            return self._small(call, terms, carried)
        placed = self._placed_for(call, terms, carried)
        found = [predict(each, nbytes, self.fabric, self._config) for each in placed]
        gauges = [each for each in found if each.is_bandwidth_sample] if is_bandwidth_sample else []
        return best(gauges or found)

    def _small(self, call: CallSignature, terms: Terms, health: Health) -> Choice:
        """Choose the schedule of a call without data, or whose data fits one eager slice."""
        nranks = health.nranks
        is_bridged = not terms.is_connected and terms.is_joined
        if call.collective in PARTED:
            collective = Collective(call.collective)
            if is_bridged or self._keeps_order:
                schedule = parted(collective, terms, 1)
            else:
                schedule = DISSEMINATIONS[collective](nranks, 1)
        elif is_bridged:
            # Some nodes have no home in common: only neighbours in this tree need one.
            parents = spanning_tree.span(nranks, terms.rank_meets(), call.root)
            schedule = _TREES.get(call.collective, tree.allreduce)([parents], "spanning_tree")
        elif call.collective in _TREES:
            parents = tree.turned(tree.double_binary(nranks)[0], call.root)
            schedule = _TREES[call.collective]([parents])
        else:
            schedule = recursive_doubling.allreduce(nranks)
        if is_bridged:
            return self.own(schedule, 0, health)
        placement = place(schedule.nchannels, self.fabric.homes, health)
        return Choice(schedule.name, schedule, placement, self._config.slice_nbytes)

    def _placed_for(self, call: CallSignature, terms: Terms, health: Health) -> list[Placed]:
        """Place the candidates of a collective other than allreduce, once for a health."""
        collective = Collective(call.collective)
        key = (health.version, f"{collective.name} {call.root}", terms.nchannels)
        made = partial(
            collective_candidates, collective, call.root, terms, keeps_order=self._keeps_order
        )
        found = self._keep(key, made, health)
        return [each for each in found if each.has_way] or found

    @property
    def _keeps_order(self) -> bool:
        """Whether nothing but rings may run, in the order of ranks if they can."""
        return not self._config.is_planned or self._config.algo == "ring"

    def allreduce(self, nbytes: int, health: Health) -> Choice:
        """Choose for an allreduce of `nbytes`, of whatever type and operation."""
        return self.plan(CallSignature(Collective.ALLREDUCE, 0, 0, nbytes), nbytes, health)

    def compare(
        self, nbytes: int, health: Health, families: Iterable[str] | None = None
    ) -> list[Choice]:
        """Predict every candidate for an allreduce of `nbytes`, in the order of the families.

        Where nodes have several ranks, the schedules are among nodes: `plan` expands the best.

        Parameters
        ----------
        families : iterable of str, optional
            Names in `FAMILIES`. Default: those that the settings allow, and that
            may be the best for this health. Where none of them has a way it is the ring,
            then what bridges.
        """
        carried = self._carried(health)
        terms = self._terms(nbytes, carried)
        names = self._names(terms) if families is None else families
        for tried in (names, ("ring",), _BRIDGED):
            placed = [each for name in tried for each in self._put(name, terms, carried)]
            found = [each for each in placed if each.has_way]
            if found:
                break
        # Without a way over homes it is the ring, over the last resort or until a rail is back.
        found = found or self._put("ring", terms, carried)
        return [predict(each, nbytes, self.fabric, self._config) for each in found]

    def _put(self, name: str, terms: Terms, health: Health) -> list[Placed]:
        """Place the forms of a family, once for a health."""
        key = (health.version, name, terms.nchannels if name in _OF_RINGS else 0)
        return self._keep(key, partial(candidates, name, terms), health)

    def _keep(
        self, key: _Key, make: Callable[[], Iterable[Candidate]], health: Health
    ) -> list[Placed]:
        found = self._placed.get(key)
        if found is None:
            found = [put(each, self.fabric, health) for each in make()]
            if len(self._placed) >= _KEPT:
                self._placed.pop(next(iter(self._placed)))
            self._placed[key] = found
        return found

    def own(self, schedule: Schedule, nbytes: int, health: Health) -> Choice:
        """Place a schedule that a user brings."""
        fill = 0 if schedule.name in NOT_TREES else schedule.cost.steps // 2
        candidate = Candidate(schedule.name, schedule, fill)
        placed = put(candidate, self.fabric, self._carried(health))
        return predict(placed, nbytes, self.fabric, self._config)

    def explain(self, nbytes: int, health: Health) -> Explanation:
        """Compare all families for an allreduce of `nbytes` with what would run."""
        chosen = self.allreduce(nbytes, health)
        forms: dict[str, list[Choice]] = {}
        for each in self.compare(nbytes, health, FAMILIES):
            forms.setdefault(each.name, []).append(each)
        others = sorted(
            (best(found) for name, found in forms.items() if name != chosen.name),
            key=lambda each: each.predicted_ns,
        )
        if nbytes <= self._config.eager_nbytes:
            chosen = self.own(chosen.schedule, nbytes, health)
        if self.fabric.rates == UNMEASURED:  # loads compare; times would be of some other network
            chosen, *others = (each._replace(predicted_ns=0) for each in (chosen, *others))
        return Explanation(nbytes, chosen, tuple(others), self._why(nbytes))

    def _why(self, nbytes: int) -> str:
        config = self._config
        if nbytes <= config.eager_nbytes:
            return "as it fits one eager slice"
        if config.mode != "auto":
            return f"as R2CC_MODE={config.mode} says"
        if config.algo != "auto":
            return f"as R2CC_ALGO={config.algo} says"
        if self.fabric.nwires == 1:
            return "as rails that are one wire lose no bandwidth with a rail"
        if self.fabric.rates == UNMEASURED:
            return "as the network was not measured"
        return "predicted to end first, or as good as first and preferred"

    def _nchannels(self, nbytes: int, nranks: int) -> int:
        nwires = self.fabric.nwires
        nhomes = min(nwires, len(self.fabric.homes))
        most = self._config.channels or full_channels(nhomes, nwires)
        return min(most, max(1, nbytes // (nranks * _MIN_CHUNK_NBYTES)))

    def _carried(self, health: Health) -> Health:
        """Return the health that counts: rails that only migrate are used as if all were whole."""
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
        """Return the families that may be the best, the one to prefer first."""
        mode, algo = self._config.mode, self._config.algo
        if not self._config.is_planned:
            return ("ring",)
        if mode == "r2cc":
            return ("ring", "r2cc")
        if algo != "auto":
            return (algo,)
        if self.fabric.nwires == 1 or self.fabric.rates == UNMEASURED:
            return ("ring",)
        return _FOR_WHOLE if terms.is_whole else _FOR_DEGRADED


def best(found: Sequence[Choice]) -> Choice:
    """Return the choice that is predicted to end first, of nearly equal ones the first here."""

    def weighed(choice: Choice) -> Fraction:
        return choice.predicted_ns * (_CROWDED if choice.name == "dissemination" else Fraction(1))

    least = min(map(weighed, found))
    return next(each for each in found if weighed(each) <= least * _AS_GOOD)


def _expanded(choice: Choice, terms: Terms) -> Choice:
    """Return the choice over ranks."""
    if not choice.is_among_nodes:
        return choice
    schedule, placement = expand(choice.schedule, choice.placement, terms.teams, choice.flows)
    return choice._replace(schedule=schedule, placement=placement, is_among_nodes=False)


def full_channels(nhomes: int, nrails: int) -> int:
    """Channels that keep every rail busy on which some are at home, also when one is lost.

    Each carries a multiple of ``nrails - 1`` channels, so that those of a lost rail spread evenly
    over the others.
    """
    return nhomes * max(1, nrails - 1)


#: Makes a rooted collective of trees.
_TREES: dict[int, Callable[..., Schedule]] = {
    Collective.BROADCAST: tree.broadcast,
    Collective.REDUCE: tree.reduce,
}
#: Version of the health, family, channels of a ring.
_Key = tuple[int, str, int]

#: Families that can be the best while nothing is broken, and when something is: the one first that
#: is taken where several are predicted to be equally good. Others run by name: measured on 4 nodes
#: of 4 rails that lacked NICs, none was ahead of all of these by more than 2 %.
_FOR_WHOLE = ("ring", "dissemination", "packed_trees", "tree")
_FOR_DEGRADED = ("packed_trees", "ring", "bridged_ring", "tree")
#: Families for networks in which some nodes have no home in common, if no wanted one has a way.
_BRIDGED = ("bridged_ring", "packed_trees", "spanning_tree")
#: What is predicted to take up to this much more counts as equally good: that is how far
#: predictions are off.
_AS_GOOD = Fraction(102, 100)
#: Ports to which several peers send are not used to the full where switches drop what is too much
#: (netlab, 4 x 4 and 8 x 2 rails, 4 and 16 MiB: 1.0 to 1.6 of a ring's time; 256 KiB: 0.2 to 0.5).
_CROWDED = Fraction(105, 100)
#: A channel is worth its overhead from this many bytes per chunk on: below it the ring's steps
#: cost more than the rails gain.
_MIN_CHUNK_NBYTES = 64 << 10
#: Families that depend on `Terms.nchannels`, which are fewer for little data.
_OF_RINGS = ("ring", "bridged_ring", "spanning_tree")
#: Placed families that are kept.
_KEPT = 128

__all__ = ["Explanation", "Planner", "best", "full_channels"]
