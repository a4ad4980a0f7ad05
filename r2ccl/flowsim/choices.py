"""Simulation of the schedules that the planner chooses on a cluster with lost and slow NICs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from r2ccl.failover.health.table import WHOLE
from r2ccl.failover.migration.path import choose_routes
from r2ccl.flowsim.network import Network
from r2ccl.flowsim.program import Program
from r2ccl.flowsim.routes import Rails
from r2ccl.flowsim.simulation import simulate
from r2ccl.planning.cluster import ClusterShape
from r2ccl.planning.cost_model import Choice
from r2ccl.schedule.graph import Ints
from r2ccl.types import PathKey


def simulate_choice(
    cluster: ClusterShape,
    choice: Choice,
    nbytes: int,
    counts: Sequence[int] = (),
    program: Program | None = None,
) -> float:
    """Return the simulated time in seconds of a schedule that the planner chose.

    Traffic within a node takes no time. A schedule whose ranks stand for nodes
    (`Choice.is_among_nodes`) is simulated with one rank per node.

    Parameters
    ----------
    cluster : ClusterShape
    choice : Choice
        Made by the planner of `cluster`.
    nbytes : int
        Size of the whole buffer in bytes.
    counts : sequence of int, optional
        Bytes of each part of the buffer. Default: equal parts.
    program : Program, optional
        Program to simulate in place of the schedule of `choice`, with messages between the same
        ranks, on the same channels.

    Raises
    ------
    InvalidArgument
        If two ranks that exchange data have no rail that is up at both, or for the reasons given in
        `simulate`.
    """
    rows, n = cluster.rows, len(cluster.rows)
    nodes = range(n) if choice.schedule.nranks == n else cluster.nodes
    rate = cluster.rates.beta / WHOLE
    network = Network(
        egress=tuple(tuple(share * rate for share in row) for row in rows),
        nodes=tuple(nodes),
        alpha_s=cluster.rates.alpha_ns / 1e9,
    )
    return simulate(
        choice.schedule if program is None else program,
        nbytes,
        network,
        slice_nbytes=choice.slice_nbytes,
        counts=counts,
        weights=choice.placement.weights,
        rails=rails_of(choice, [rows[node] for node in nodes]),
        sharing="max_min" if n <= _EXACT_NODES else "fair_queue",
        tolerance=0.01,
    ).time_s


def rails_of(choice: Choice, rows: Sequence[Sequence[int]]) -> Rails:
    """Return a function that gives the rails of the links of `choice`, chosen as in a real call.

    ``rows[rank][rail]`` is the share of its bandwidth that the rail still has at this rank
    (`r2ccl.failover.health.table`). A link whose home rail is down at either end uses a rail that
    is up at both ends, if there is one (`r2ccl.failover.migration.path.choose_routes`).
    """
    placement, nrails = choice.placement, len(rows[0])
    home = {(c, low, high): number % nrails for c, low, high, number in placement.edges}

    def routes(low: int, high: int, channels: set[int]) -> dict[int, int]:
        share = [min(one, other) for one, other in zip(rows[low], rows[high], strict=True)]
        rails = {
            c: home.get((c, low, high), placement.number(c, low, high) % nrails)
            for c in sorted(channels)
        }
        at_home = Counter(PathKey(high, rail) for rail in rails.values() if share[rail])
        detoured = choose_routes(
            [c for c, rail in rails.items() if not share[rail]],
            [PathKey(high, rail) for rail in range(nrails) if share[rail]],
            {},
            lambda key: share[key.rail],
            at_home,
        )
        return rails | {c: key.rail for c, key in detoured.items()}

    def rails(src: Ints, dst: Ints, channel: Ints) -> tuple[Ints, Ints]:
        links = [
            (min(a, b), max(a, b), c)
            for a, b, c in zip(src.tolist(), dst.tolist(), channel.tolist(), strict=True)
        ]
        channels: dict[tuple[int, int], set[int]] = {}
        for low, high, c in links:
            channels.setdefault((low, high), set()).add(c)
        found = {pair: routes(*pair, each) for pair, each in channels.items()}
        used = np.array([found[low, high][c] for low, high, c in links], np.int64)
        return used, used

    return rails


#: Largest number of nodes for which max-min sharing is simulated. Fair queues are much faster, and
#: their times usually differ by at most 3 %.
_EXACT_NODES = 16

__all__ = ["rails_of", "simulate_choice"]
