"""Planner: which schedule a call runs, on which rails and in what slices; alike on every rank.

Pure: it reads what all ranks share (the call, the configuration, the fabric with the rates they
agreed on, the agreed health) and nothing a rank measured for itself.

While the data fits one eager slice, where latency decides, it is recursive doubling or a flat tree.
Above it an allreduce is whatever `predicted` to end first; other collectives run rings, and with a
root chains. ``R2CC_ALGO`` names a family, ``R2CC_MODE`` bounds what there is to choose from.

The prediction of a candidate::

    T = steps x alpha + D x load / beta x (1 + fill / slices)

`load` is what its most loaded port carries of the data D, over what that port has left; it includes
the detours of what is at home on a port that is down. A pipeline of `fill` slices has to be filled
and emptied. alpha and beta were measured (`r2ccl.calibration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.algos import recursive_doubling, ring, tree
from r2ccl.candidates import FAMILIES, Candidate, Terms, candidates
from r2ccl.config import Config
from r2ccl.resilience.health import WHOLE, Health
from r2ccl.schedule.ir import Schedule
from r2ccl.spread import Placement, inlets, place, place_edges, port_time, ring_time
from r2ccl.types import CallSignature, Collective


class Rates(NamedTuple):
    """What all ranks agreed that the network gives.

    Attributes
    ----------
    alpha_ns : int
        From one rank's slice to the next one's, of no size.
    beta : int
        Bytes/s of a rail that carries all it should, each way.
    """

    alpha_ns: int
    beta: int


#: Where nothing was measured: candidates are compared by their loads alone.
UNMEASURED = Rates(0, 10**9)


class Fabric(NamedTuple):
    """What lies between the ranks; the same for all of them.

    Attributes
    ----------
    homes : sequence of int
        Rails that channels are at home on.
    nwires : int
        Rails that add bandwidth to one another: rails on one wire, as on loopback, are backups of
        each other and get one channel together (measured there, 1 against 2 channels: 8 to 30 %
        less time from 256 KiB to 64 MiB, with 2 and 4 ranks).
    nodes : sequence of int
        Of every rank its node, whose ports it shares; empty: one rank a node.
    rates : Rates
    """

    homes: Sequence[int]
    nwires: int
    nodes: Sequence[int] = ()
    rates: Rates = UNMEASURED

    @property
    def inlet_nbytes(self) -> int:
        """What a port to which several peers send is to be sent at once."""
        return max(_LEAST_INLET_NBYTES, int(self.rates.beta * _INLET_S))


class Choice(NamedTuple):
    """What a call runs, where its channels go, and the size of a slice.

    Attributes
    ----------
    name : str
        Of the schedule's family.
    schedule : Schedule
    placement : Placement
    slice_nbytes : int
    load : Fraction
        What the busiest port takes for the data, as a multiple of what one whole rail takes.
    predicted_ns : int
        How long the call takes, 0: nothing is known of it.
    """

    name: str
    schedule: Schedule
    placement: Placement
    slice_nbytes: int
    load: Fraction = Fraction(0)
    predicted_ns: int = 0


def plan(
    call: CallSignature,
    nbytes: int,
    fabric: Fabric,
    health: Health,
    config: Config,
    *,
    is_gauge: bool = False,
) -> Choice:
    """Choose for a call whose whole buffer has `nbytes` bytes.

    With `is_gauge`, one that shows what the rails carry: see `r2ccl.plans`.
    """
    if call.collective == Collective.ALLREDUCE and nbytes > config.eager_nbytes:
        found = list(predicted(nbytes, fabric, health, config, is_gauge=is_gauge))
        return best(found)
    nranks = health.nranks
    nchannels = _nchannels(nbytes, nranks, fabric, config)
    is_small = nbytes <= config.eager_nbytes
    match call.collective:
        case Collective.ALLGATHER:
            schedule = ring.allgather(nranks, nchannels)
        case Collective.REDUCE_SCATTER:
            schedule = ring.reduce_scatter(nranks, nchannels)
        case Collective.BROADCAST:
            schedule = tree.broadcast(_rooted(nranks, call.root, nchannels, is_small))
        case Collective.REDUCE:
            schedule = tree.reduce(_rooted(nranks, call.root, nchannels, is_small))
        case _:
            schedule = recursive_doubling.allreduce(nranks)
    placement = place(schedule.nchannels, fabric.homes, _carried(fabric, health, config))
    return Choice(schedule.name, schedule, placement, config.slice_nbytes)


def predicted(
    nbytes: int,
    fabric: Fabric,
    health: Health,
    config: Config,
    *,
    is_gauge: bool = False,
    names: Iterable[str] | None = None,
) -> Iterator[Choice]:
    """Place every candidate for an allreduce of `nbytes`, and predict its time.

    Parameters
    ----------
    names : iterable of str, optional
        Families of `r2ccl.candidates`. Default: those that the settings allow, and that may be the
        best for this health.
    """
    carried = _carried(fabric, health, config)
    terms = _terms(nbytes, fabric, carried, config)
    if names is None:
        names = ("ring",) if is_gauge and config.algo == "auto" else _names(terms, fabric, config)
    found = [candidate for name in names for candidate in candidates(name, terms)]
    for candidate in found or candidates("ring", terms):
        yield _placed(candidate, nbytes, fabric, carried, config)


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
                f"{mark:2}{each.name:<20}{time:>12}{each.schedule.cost.steps:>8}"
                f"{float(each.load):>12.3f} D{each.slice_nbytes:>12}"
            )
        return "\n".join(lines)


def explain(nbytes: int, fabric: Fabric, health: Health, config: Config) -> Explanation:
    """Compare all families for an allreduce of `nbytes`, with what would run."""
    call = CallSignature(Collective.ALLREDUCE, 0, 0, nbytes)
    chosen = plan(call, nbytes, fabric, health, config)
    forms: dict[str, list[Choice]] = {}
    for each in predicted(nbytes, fabric, health, config, names=FAMILIES):
        forms.setdefault(each.name, []).append(each)
    others = sorted(
        (best(found) for name, found in forms.items() if name != chosen.name),
        key=lambda each: each.predicted_ns,
    )
    if not chosen.predicted_ns:
        chosen = best(forms[chosen.name])
    return Explanation(nbytes, chosen, tuple(others), _why(nbytes, fabric, config))


def _why(nbytes: int, fabric: Fabric, config: Config) -> str:
    if nbytes <= config.eager_nbytes:
        return "as it fits one eager slice"
    if config.mode != "auto":
        return f"as R2CC_MODE={config.mode} says"
    if config.algo != "auto":
        return f"as R2CC_ALGO={config.algo} says"
    if fabric.nwires == 1:
        return "as rails that are one wire lose no bandwidth with a rail"
    if fabric.rates == UNMEASURED:
        return "as the network was not measured"
    return "predicted to end first, or as good as first and simpler"


def own(schedule: Schedule, nbytes: int, fabric: Fabric, health: Health, config: Config) -> Choice:
    """Place a schedule that a user brings."""
    candidate = Candidate(schedule.name, schedule, schedule.cost.steps // 2)
    return _placed(candidate, nbytes, fabric, _carried(fabric, health, config), config)


def best(found: Sequence[Choice]) -> Choice:
    """Return the choice that is predicted to end first, of nearly equal ones the simplest."""
    least = min(choice.predicted_ns for choice in found)
    return next(each for each in found if each.predicted_ns <= least * _AS_GOOD)


def full_channels(nrails: int) -> int:
    """Channels that keep every rail busy, also when one is lost.

    Each rail carries a multiple of ``nrails - 1`` channels, so that those of a lost rail spread
    evenly over the others.
    """
    return nrails * max(1, nrails - 1)


def _nchannels(nbytes: int, nranks: int, fabric: Fabric, config: Config) -> int:
    most = config.channels or full_channels(fabric.nwires)
    return min(most, max(1, nbytes // (nranks * _MIN_CHUNK_NBYTES)))


def _rooted(nranks: int, root: int, nchannels: int, is_small: bool) -> list[tree.Parents]:
    """Return the trees of a rooted collective: one that is flat, or chains that are pipelines."""
    if is_small:
        return [tree.turned(tree.double_binary(nranks)[0], root)]
    order = [(root + place) % nranks for place in range(nranks)]
    return [tree.chain(order)] * nchannels


def _carried(fabric: Fabric, health: Health, config: Config) -> Health:
    """Return the health that counts: rails that only migrate are used as if all were whole."""
    if config.mode in _MIGRATING_MODES:
        return Health.whole(health.nranks, health.nrails)
    return health


def _terms(nbytes: int, fabric: Fabric, health: Health, config: Config) -> Terms:
    teams: dict[int, list[int]] = {}
    for rank, node in enumerate(fabric.nodes or range(health.nranks)):
        teams.setdefault(node, []).append(rank)
    shares = tuple(
        tuple(min(health.share(rank, rail) for rank in team) for rail in fabric.homes)
        for team in teams.values()
    )
    nchannels = _nchannels(nbytes, health.nranks, fabric, config)
    return Terms(shares, tuple(map(tuple, teams.values())), nchannels)


def _names(terms: Terms, fabric: Fabric, config: Config) -> tuple[str, ...]:
    """Return the families that may be the best, the simplest first."""
    if config.mode in _RING_MODES:
        return ("ring",)
    if config.mode == "3":
        return ("ring", "r2cc")
    if config.algo != "auto":
        return (config.algo,)
    if fabric.nwires == 1 or fabric.rates == UNMEASURED:
        return ("ring",)
    if terms.is_whole:
        return ("ring", "halving_doubling", "tree")
    return tuple(name for name in FAMILIES if name not in _NEVER_BEST)


def _placed(
    candidate: Candidate, nbytes: int, fabric: Fabric, health: Health, config: Config
) -> Choice:
    schedule, homes = candidate.schedule, fabric.homes
    if candidate.is_ring:
        placement = place(schedule.nchannels, homes, health)
        slice_nbytes = config.slice_nbytes
        load = ring_time(placement, homes, health, fabric.nodes) * WHOLE
    else:
        placement = place_edges(schedule, homes, health, fabric.nodes)
        slice_nbytes = _slice_nbytes(schedule, placement, nbytes, fabric, config)
        load = port_time(schedule, placement, homes, health, fabric.nodes) * WHOLE
    channel_nbytes = Fraction(nbytes * max(placement.weights), sum(placement.weights))
    nslices = max(1, channel_nbytes // slice_nbytes)
    wire_ns = load * nbytes * 10**9 / fabric.rates.beta * (1 + Fraction(candidate.fill, nslices))
    total_ns = int(schedule.cost.steps * fabric.rates.alpha_ns + wire_ns)
    return Choice(candidate.name, schedule, placement, slice_nbytes, load, total_ns)


def _slice_nbytes(
    schedule: Schedule, placement: Placement, nbytes: int, fabric: Fabric, config: Config
) -> int:
    """Return a size small enough for a pipeline, and large enough to be worth its handling."""
    channel_nbytes = nbytes // schedule.nchannels
    nlinks = max(1, inlets(placement, fabric.homes))
    wanted = min(channel_nbytes // _PIPELINED_SLICES, fabric.inlet_nbytes // nlinks)
    return min(config.slice_nbytes, max(_MIN_SLICE_NBYTES, wanted))


#: Modes in which nothing but rings runs; in the first two, with equal channels whatever happens.
_MIGRATING_MODES = ("0", "1")
_RING_MODES = (*_MIGRATING_MODES, "2")
#: Families that another one is ahead of on any network; they run by name.
_NEVER_BEST = ("recursive_doubling", "one_shot", "optcc", "nested_rings")
#: What is predicted to take up to this much more counts as equally good: that is how far
#: predictions are off.
_AS_GOOD = Fraction(102, 100)
#: A channel is worth its overhead from this many bytes per chunk on: below it the ring's steps
#: cost more than the rails gain.
_MIN_CHUNK_NBYTES = 64 << 10
#: Slices of a channel that are enough for its pipeline, and the least a slice should have.
_PIPELINED_SLICES = 32
_MIN_SLICE_NBYTES = 32 << 10
#: What a port is sent at once: as much as it takes in this time, and no less than that.
_INLET_S = Fraction(1, 100)
_LEAST_INLET_NBYTES = 256 << 10

__all__ = [
    "UNMEASURED",
    "Choice",
    "Explanation",
    "Fabric",
    "Rates",
    "best",
    "explain",
    "full_channels",
    "own",
    "plan",
    "predicted",
]
