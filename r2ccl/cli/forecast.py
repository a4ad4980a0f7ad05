"""Comparison of the schedules of a collective on a cluster, healthy and with lost or slow NICs.

The candidates, their predicted times and the choice are those of `r2ccl.planning.planner`, with the
default settings. The flow-level simulator runs the same schedules on the same rails.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import msgspec

from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE
from r2ccl.planning.cluster import ClusterShape
from r2ccl.planning.cost_model import Choice, Rates
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.planning.planner import best, reason
from r2ccl.planning.two_level import TwoLevelPlans
from r2ccl.types import DIRECT, CallSignature, Collective, ReduceOp


class Scenario(msgspec.Struct, frozen=True):
    """Cluster and collective call for which schedules are compared.

    ``nbytes`` is the size of the whole buffer. ``rate`` is the bandwidth of a NIC in bytes/s,
    ``latency_s`` the time of one step of a small collective. ``lost`` has (node, NIC) for each NIC
    that is down. ``slow`` has (node, NIC, sixteenths of its bandwidth that are left) for each slow
    NIC.
    """

    collective: str
    nbytes: int
    nnodes: int
    nnics: int
    ranks_per_node: int
    rate: int
    latency_s: float
    lost: tuple[tuple[int, int], ...] = ()
    slow: tuple[tuple[int, int, int], ...] = ()

    @property
    def nranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nnodes * self.ranks_per_node

    def cluster(self, *, is_healthy: bool) -> ClusterShape:
        """Return the cluster; if `is_healthy`, none of its NICs is lost or slow."""
        shares = {} if is_healthy else {(node, nic): share for node, nic, share in self.slow}
        shares |= {} if is_healthy else dict.fromkeys(self.lost, 0)
        rows = tuple(
            tuple(shares.get((node, nic), WHOLE) for nic in range(self.nnics))
            for node in range(self.nnodes)
        )
        rates = Rates(max(1, round(self.latency_s * 1e9)), self.rate)
        return ClusterShape(rows, self.ranks_per_node, rates)


class Forecast(msgspec.Struct, frozen=True):
    """Times of one schedule in one state of the network.

    ``predicted_s`` is the time by the cost model, None if the planner does not predict one;
    ``simulated_s`` is None if the schedule was not simulated. ``steps`` is the number of messages
    on the longest chain of dependent messages. ``load`` is the time of the busiest port, as a
    multiple of the time in which a rail with its full bandwidth carries the data; 0 if unknown.
    ``slice_nbytes`` is the largest size of a slice in bytes. ``is_chosen`` is True for the schedule
    that the planner selects.
    """

    predicted_s: float | None
    simulated_s: float | None
    steps: int
    load: float
    slice_nbytes: int
    is_chosen: bool


class Comparison(msgspec.Struct, frozen=True):
    """Forecasts of a scenario by schedule, and the reasons of the planner.

    ``degraded`` and ``why_degraded`` are empty if no NIC is lost or slow. ``nchunks`` is the number
    of chunks of the call if it runs in two levels, shared memory within the nodes and the network
    between them; 0 if it runs in one level. If a NIC is lost or slow, ``nchunks`` is that of the
    degraded cluster. ``notes`` say what was not simulated, and why.
    """

    scenario: Scenario
    healthy: dict[str, Forecast]
    degraded: dict[str, Forecast]
    why: str
    why_degraded: str
    nchunks: int
    notes: tuple[str, ...] = ()


#: Function that returns the simulated time of a choice in seconds; None if it is not simulated.
Simulate = Callable[[ClusterShape, Choice], float | None]


def scenario_of(args: argparse.Namespace) -> Scenario:
    """Return the scenario in the parsed arguments of ``r2ccl explain``.

    The size is rounded down to a multiple of `_UNIT_NBYTES` bytes per rank.

    Raises
    ------
    InvalidArgument
        If a NIC does not exist or is named twice, a node has no NIC left, there are too few or too
        many nodes, ranks or NICs, or fewer than `_UNIT_NBYTES` bytes per rank.
    """
    nranks = args.nodes * args.ranks_per_node
    for name, value, least, most in (
        ("nodes", args.nodes, 2, _MOST_RANKS),
        ("ranks-per-node", args.ranks_per_node, 1, _MOST_RANKS // 2),
        ("nics", args.nics, 1, _MOST_NICS),
    ):
        if not least <= value <= most:
            raise InvalidArgument(f"--{name} {value}: allowed is {least} to {most}")
    if nranks > _MOST_RANKS:
        raise InvalidArgument(
            f"--nodes {args.nodes} --ranks-per-node {args.ranks_per_node}: {nranks} ranks in all; "
            f"allowed is 2 to {_MOST_RANKS}"
        )
    for option, node, nic in (
        *(("--lose", *port) for port in args.lose),
        *(("--slow", node, nic) for node, nic, _ in args.slow),
    ):
        if node >= args.nodes or nic >= args.nics:
            raise InvalidArgument(
                f"the cluster has no NIC {node}:{nic}, which {option} names: allowed are nodes 0 "
                f"to {args.nodes - 1} and NICs 0 to {args.nics - 1}"
            )
    named = [*args.lose, *((node, nic) for node, nic, _ in args.slow)]
    for node, nic in named:
        if named.count((node, nic)) > 1:
            raise InvalidArgument(f"--lose and --slow name NIC {node}:{nic} twice; name it once")
        if sum(lost == node for lost, _ in args.lose) == args.nics:
            raise InvalidArgument(f"--lose names all NICs of node {node}: leave at least one")
    unit = nranks * _UNIT_NBYTES
    if args.nbytes < unit:
        raise InvalidArgument(
            f"--nbytes {args.nbytes}: allowed is {unit} or more, {_UNIT_NBYTES} per rank"
        )
    return Scenario(
        args.collective,
        args.nbytes - args.nbytes % unit,
        args.nodes,
        args.nics,
        args.ranks_per_node,
        args.rate,
        args.latency,
        tuple(args.lose),
        tuple((node, nic, _sixteenths(fraction)) for node, nic, fraction in args.slow),
    )


def _sixteenths(fraction: float) -> int:
    """Round the fraction of a slow NIC to sixteenths; return at least 1 and at most 15."""
    return min(max(1, round(fraction * WHOLE)), WHOLE - 1)


def compare(scenario: Scenario, *, is_simulated: bool = True) -> Comparison:
    """Predict and, with `is_simulated`, simulate all schedules of a scenario.

    Notes
    -----
    *Cost*: planning takes 0.3 s for 64 nodes with 8 NICs. Simulations of more than `_MOST_SLICES`
    slices, of gather, scatter and alltoall on more than `_DIRECT_NODES` nodes, and of schedules in
    which two ranks without a common rail exchange data, are left out and named in the notes. The
    first simulation on a machine compiles the simulator, which takes up to 30 s.

    Raises
    ------
    InvalidArgument
        If `is_simulated`, and Numba, which the simulator needs, is not installed.
    """
    notes: list[str] = []
    simulate = _simulator(scenario, notes) if is_simulated else None
    healthy, why, nchunks = _forecasts(scenario, simulate, is_healthy=True)
    degraded: dict[str, Forecast] = {}
    why_degraded = ""
    if scenario.lost or scenario.slow:
        degraded, why_degraded, nchunks = _forecasts(scenario, simulate, is_healthy=False)
    return Comparison(
        scenario, healthy, degraded, why, why_degraded, nchunks, tuple(dict.fromkeys(notes))
    )


def _forecasts(
    scenario: Scenario, simulate: Simulate | None, *, is_healthy: bool
) -> tuple[dict[str, Forecast], str, int]:
    cluster = scenario.cluster(is_healthy=is_healthy)
    health, planner = cluster.health, cluster.planner
    collective = Collective[scenario.collective.upper()]
    call = CallSignature(collective, 0, ReduceOp.SUM, scenario.nbytes)
    chosen = planner.plan(call, scenario.nbytes, health)
    forms: dict[str, list[Choice]] = {}
    for each in planner.options(call, scenario.nbytes, health):
        forms.setdefault(each.name, []).append(each)
    variants = {name: best(found) for name, found in forms.items()}
    variants.setdefault(chosen.name, chosen)  # options() may leave out the spanning tree
    ordered = sorted(variants.items(), key=lambda item: item[1].predicted_ns or math.inf)
    found = {
        name: Forecast(
            choice.predicted_ns / 1e9 if choice.predicted_ns else None,
            simulate(cluster, choice) if simulate else None,
            choice.steps or choice.schedule.cost.steps,
            float(choice.load),
            choice.slice_nbytes,
            name == chosen.name,
        )
        for name, choice in ordered
    }
    nchunks = _nchunks(cluster, call)
    if collective != Collective.ALLREDUCE:
        return found, reason(chosen, list(variants.values())), nchunks
    return found, planner.explain(scenario.nbytes, health).why, nchunks


def _nchunks(cluster: ClusterShape, call: CallSignature) -> int:
    """Return the number of chunks of a call in two levels; 0 if the call runs in one level."""
    if cluster.ranks_per_node == 1:
        return 0
    plans = PlanCache(0, len(cluster.nodes), cluster.fabric, Config())
    division = TwoLevelPlans(0, cluster.teams, plans, Config()).division(call, cluster.health)
    return len(division.chunks) if division else 0


def _simulator(scenario: Scenario, notes: list[str]) -> Simulate:
    """Return a function that simulates a choice, or adds a reason to `notes` if it does not."""
    try:
        from r2ccl.flowsim.choices import simulate_choice
    except ImportError as exc:
        raise InvalidArgument(
            f"the simulator needs Numba ({exc}): pip install 'r2ccl[compiled]', or give "
            "--no-simulate to only predict"
        ) from exc

    def simulate(cluster: ClusterShape, choice: Choice) -> float | None:
        if Collective[scenario.collective.upper()] in DIRECT and scenario.nnodes > _DIRECT_NODES:
            notes.append(
                f"gather, scatter and alltoall are not simulated on more than {_DIRECT_NODES} nodes"
            )
            return None
        nslices = _count_slices(choice, scenario.nbytes)
        if nslices > _MOST_SLICES:
            notes.append(
                f"{choice.name} is not simulated: {nslices:.1e} slices, more than "
                f"{_MOST_SLICES:.0e}"
            )
            return None
        try:
            return simulate_choice(cluster, choice, scenario.nbytes)
        except InvalidArgument as exc:  # two ranks that exchange data have no common rail
            notes.append(f"{choice.name} is not simulated: {str(exc).removeprefix('simulate: ')}")
            return None

    return simulate


def _count_slices(choice: Choice, nbytes: int) -> float:
    """Estimate the number of slices that all ranks together send."""
    schedule = choice.schedule
    chunk_nbytes = nbytes / schedule.nchannels / max(schedule.nchunks)
    sent_nbytes = float(schedule.cost.sent) * nbytes
    return schedule.nranks * sent_nbytes / min(chunk_nbytes, choice.slice_nbytes)


#: Sizes are multiples of this number of bytes per rank, so that parts are whole elements.
_UNIT_NBYTES = 64
#: Limits of the size of a cluster. Planning for 1,024 nodes with 8 NICs takes 20 s.
_MOST_RANKS, _MOST_NICS = 1024, 32
#: Largest number of slices of a simulation, which then takes about 3 s.
_MOST_SLICES = 2_000_000
#: Largest number of nodes on which gather, scatter and alltoall are simulated. The number of links
#: of an alltoall grows with the square of the number of nodes.
_DIRECT_NODES = 16

__all__ = ["Comparison", "Forecast", "Scenario", "compare", "scenario_of"]
