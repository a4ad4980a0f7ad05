"""Simulate the planner's choices on random clusters with lost and slow NICs.

For every drawn cluster the planner chooses a schedule for an allreduce of a drawn size and for the
other collectives. `r2ccl.flowsim` simulates each choice, and for the allreduce every other
candidate too. A lower bound counts only the bandwidth that ports can use. The report shows routes
that do not exist, schedules that the checker refuses, the time over the bound and over the best
candidate, predicted over simulated time, and the worst cases with the seeds that reproduce them.

    python bench/clusters.py --count 200 --seed 1
    python bench/clusters.py --seed 1:17 --verbose    # draw 17 of seed 1 alone

Only the ports between nodes are simulated. Schedules for several ranks per node are planned and
checked, but the traffic inside a node is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import msgspec
from common import add_json_argument, write_json

from r2ccl.algos import direct_exchange
from r2ccl.cli.values import format_size
from r2ccl.errors import ScheduleError
from r2ccl.failover.health.table import WHOLE
from r2ccl.flowsim.choices import simulate_choice
from r2ccl.flowsim.program import Program, compile_schedule
from r2ccl.planning.cluster import ClusterShape
from r2ccl.planning.cost_model import Rates
from r2ccl.planning.planner import Planner, best
from r2ccl.schedule.check import check
from r2ccl.schedule.ir import Op, OpKind, Schedule
from r2ccl.types import DIRECT, PREFIXES, CallSignature, Collective, ReduceOp

#: Latency and bandwidth of a NIC of 10 and of 100 Gbit/s.
FABRICS = (Rates(10_000, 1_250_000_000), Rates(5_000, 12_500_000_000))

#: Size in bytes from which bandwidth dominates the time.
LARGE_NBYTES = 64 << 20
ROOTLESS = (Collective.ALLGATHER, Collective.REDUCE_SCATTER)
ROOTED = (Collective.BROADCAST, Collective.REDUCE, Collective.GATHER, Collective.SCATTER)
OTHERS = (*ROOTLESS, *ROOTED, Collective.ALLTOALL, Collective.SCAN, Collective.EXSCAN)
OTHERS_NBYTES = 16 << 20
#: Alltoalls of unequal parts: of sizes that differ by up to 8x, and by up to 1000x.
UNEQUAL = {"alltoallv, 8x": 8, "alltoallv, 1000x": 1000}

#: Ranks times channels up to which a schedule is replayed symbolically (larger ones take seconds).
_CHECKED_SIZE = 1500
#: Nodes up to which direct exchanges, whose links grow with the square of the nodes, are simulated.
_DIRECT_NODES = 16


class Cluster(msgspec.Struct, frozen=True):
    """Drawn cluster and call; `rows` holds the bandwidth of each node's ports, in sixteenths."""

    seed: str
    rows: tuple[tuple[int, ...], ...]
    ranks_per_node: int
    rates: Rates
    nbytes: int

    @property
    def shape(self) -> ClusterShape:
        """Shape of the cluster, for the planner and the simulator."""
        return ClusterShape(self.rows, self.ranks_per_node, self.rates)

    @property
    def usable(self) -> list[list[float]]:
        """Bytes/s that each node can use on each rail: its own, or its peers' total if smaller."""
        totals = [sum(column) for column in zip(*self.rows, strict=True)]
        unit = self.rates.beta / WHOLE
        return [
            [unit * min(own, total - own) for own, total in zip(row, totals, strict=True)]
            for row in self.rows
        ]

    def bound_s(self, collective: Collective, nbytes: int) -> float:
        """Return a lower bound in seconds on the time of any schedule, ignoring latency.

        The bound is the larger of two times. The first is the time in which the slowest node sends
        its part. The second is the time in which all nodes together send every byte n - 1 times
        (twice that for an allreduce), as joining n nodes takes n - 1 messages. A rail with m live
        nodes can carry at most m - 1 of these messages: more would join nodes that are already
        joined.
        """
        n, usable = len(self.rows), self.usable
        if collective in DIRECT:
            return self.exchange_bound_s(equal_parts(collective, n, nbytes))
        ways = 2 if collective == Collective.ALLREDUCE else 1
        part = (n - 1) / n if collective in ROOTLESS else 1.0
        alone_s = part / min(sum(row) for row in usable)
        needed, taken, spent_s = ways * (n - 1), 0.0, 0.0
        rails = []
        for column in zip(*usable, strict=True):
            most = ways * (sum(map(bool, column)) - 1)
            if most > 0:
                rails.append((most / sum(column), sum(column)))
        rate = sum(each for _, each in rails)
        # The last rail carries the rest.
        for full_s, each in sorted(rails)[:-1]:
            if taken + (full_s - spent_s) * rate >= needed:
                break
            taken += (full_s - spent_s) * rate
            rate, spent_s = rate - each, full_s
        together_s = spent_s + (needed - taken) / rate
        return float(nbytes * max(alone_s, together_s))

    def exchange_bound_s(self, sizes: Sequence[Sequence[int]]) -> float:
        """Return a lower bound in seconds for parts of ``sizes[source][destination]`` bytes."""
        bound = direct_exchange.lower_bound(sizes, self.rows)
        return float(bound) * WHOLE / self.rates.beta

    def describe(self) -> str:
        """Describe the size of the cluster and its nodes with lost or slow NICs."""
        n, nrails = len(self.rows), len(self.rows[0])
        odd = [
            f"node {node}: {' '.join(map(str, row))}"
            for node, row in enumerate(self.rows)
            if set(row) != {WHOLE}
        ]
        return f"{n} nodes x {nrails} NICs, {format_size(self.nbytes)}; " + "; ".join(odd)


def draw(seed: int, number: int, ranks_per_node: int, most_nodes: int) -> Cluster:
    """Draw a cluster in which every node reaches every other, directly or through other nodes."""
    rng = random.Random(f"{seed}:{number}")
    while True:
        n = round(math.exp(rng.uniform(math.log(3), math.log(most_nodes))))
        nrails = rng.randrange(2, 9)
        rows = [[WHOLE] * nrails for _ in range(n)]
        for node in rng.sample(range(n), min(n, rng.choice((0, 1, 1, 1, 2, 2, 3, 4)))):
            for rail in rng.sample(range(nrails), rng.randrange(1, nrails)):
                rows[node][rail] = 0 if rng.random() < 0.7 else rng.randrange(1, WHOLE)
        nbytes = int(2 ** rng.uniform(20, 30)) // 4096 * 4096
        cluster = Cluster(
            f"{seed}:{number}", tuple(map(tuple, rows)), ranks_per_node, rng.choice(FABRICS), nbytes
        )
        if is_joined(cluster.rows):
            return cluster


def is_joined(rows: Sequence[Sequence[int]]) -> bool:
    """Return whether rails connect all nodes, directly or through other nodes."""
    joined, size = {0}, 0
    while size < len(joined):
        size = len(joined)
        joined |= {
            node
            for node, row in enumerate(rows)
            if any(any(map(min, row, rows[other])) for other in joined)
        }
    return size == len(rows)


def equal_parts(collective: Collective, n: int, nbytes: int) -> list[list[int]]:
    """Return the size of each part from source to destination; root of gather and scatter is 0."""
    sources = range(1) if collective == Collective.SCATTER else range(n)
    targets = range(1) if collective == Collective.GATHER else range(n)
    return [
        [nbytes // n if source in sources and target in targets else 0 for target in range(n)]
        for source in range(n)
    ]


def unequal_parts(cluster: Cluster, nbytes: int, spread: int) -> list[list[int]]:
    """Draw the size of each part of an alltoallv, of about `nbytes` per rank."""
    n, rng = len(cluster.rows), random.Random(f"{cluster.seed} {spread}")
    drawn = [[spread ** rng.random() for _ in range(n)] for _ in range(n)]
    mean = sum(map(sum, drawn)) / n
    return [[int(nbytes * each / mean) // 64 * 64 for each in row] for row in drawn]


def by_pair(schedule: Schedule) -> Program:
    """Return an alltoall with one part of the buffer per pair of ranks, so that sizes can differ.

    The size of part ``i * n + j`` is that of the data from rank i to rank j.
    """
    n = schedule.nranks

    def numbered(op: Op, rank: int) -> Op:
        if op.kind == OpKind.RECV:
            return msgspec.structs.replace(op, dst=op.peer * n + rank)
        if op.kind == OpKind.SEND:
            return msgspec.structs.replace(op, src=rank * n + op.peer)
        return msgspec.structs.replace(op, src=rank * n + rank, dst=rank * n + rank)

    def generate(rank: int) -> tuple[tuple[Op, ...], ...]:
        ops = tuple(numbered(op, rank) for op in schedule.program(rank).channels[0])
        return (ops,) * schedule.nchannels

    nchunks = (n * n,) * schedule.nchannels
    numbered_by_pair = msgspec.structs.replace(schedule, nchunks=nchunks, generate=generate)
    return compile_schedule(numbered_by_pair)._replace(nparts=n * n)


def without_route(schedule: Schedule, cluster: Cluster) -> int:
    """Return the number of messages between ranks whose nodes have no rail in common."""
    rows, per = cluster.rows, schedule.nranks // len(cluster.rows)
    apart = {
        (a, b)
        for a in range(len(rows))
        for b in range(len(rows))
        if a != b and not any(map(min, rows[a], rows[b]))
    }
    if not apart:
        return 0
    return sum(
        op.peer >= 0 and (rank // per, op.peer // per) in apart
        for rank in range(schedule.nranks)
        for ops in schedule.program(rank).channels
        for op in ops
    )


def is_refused(schedule: Schedule) -> bool:
    """Return whether the checker refuses a schedule; do not check large ones."""
    if schedule.nranks * schedule.nchannels > _CHECKED_SIZE:
        return False
    try:
        check(schedule)
    except ScheduleError:
        return True
    return False


def examine(cluster: Cluster, *, has_others: bool) -> dict[str, Any]:
    """Plan, simulate and compare; return one row of the study."""
    shape = cluster.shape
    planner, health = shape.planner, shape.health
    call = CallSignature(Collective.ALLREDUCE, 0, ReduceOp.SUM, 0, 0)
    began_s = time.process_time()
    full = planner.plan(call, cluster.nbytes, health)
    planned_s = time.process_time() - began_s
    among_nodes = planner.compare(cluster.nbytes, health)
    chosen = best(among_nodes)
    nlost = without_route(full.schedule, cluster)
    found: dict[str, Any] = {
        "seed": cluster.seed,
        "is": cluster.describe(),
        "nbytes": cluster.nbytes,
        "schedule": full.schedule.name,
        "planned_s": planned_s,
        "without_route": nlost,
        "refused": int(is_refused(full.schedule)),
    }
    if chosen.schedule.nranks != len(cluster.rows):  # a flat ring over several ranks per node
        return found
    took = {}
    for number, each in enumerate(among_nodes):
        if each.schedule.nranks == len(cluster.rows):
            took[f"{number} {each.schedule.name}"] = simulate_choice(shape, each, cluster.nbytes)
    at = next(number for number, each in enumerate(among_nodes) if each is chosen)
    chosen_s = took[f"{at} {chosen.schedule.name}"]
    found |= {
        "over_bound": chosen_s / cluster.bound_s(Collective.ALLREDUCE, cluster.nbytes),
        "over_best": chosen_s / min(took.values()),
        "best": min(took, key=lambda name: took[name]),
        "predicted": chosen.predicted_ns / 1e9 / chosen_s,
        "predictions": {
            f"{number} {each.schedule.name}": each.predicted_ns
            / 1e9
            / took[f"{number} {each.schedule.name}"]
            for number, each in enumerate(among_nodes)
            if f"{number} {each.schedule.name}" in took
        },
    }
    if has_others and cluster.ranks_per_node == 1:
        n = len(cluster.rows)
        nbytes = max(cluster.nbytes, OTHERS_NBYTES) // n * n
        for collective in OTHERS:
            choice = planner.plan(
                msgspec.structs.replace(call, collective=collective), nbytes, health
            )
            found["refused"] += is_refused(choice.schedule)
            nlost = without_route(choice.schedule, cluster)
            if collective in DIRECT and n > _DIRECT_NODES:
                continue
            if collective in DIRECT | PREFIXES and nlost:
                continue  # pairs without a common rail use bypasses, which are not simulated
            found["without_route"] += nlost
            took_s = simulate_choice(shape, choice, nbytes)
            found[collective.name.lower()] = took_s / cluster.bound_s(collective, nbytes)
        if "alltoall" in found:
            found |= unequal(cluster, planner, nbytes)
    return found


def unequal(cluster: Cluster, planner: Planner, nbytes: int) -> dict[str, float]:
    """Return the time over the bound of alltoalls of unequal parts."""
    call = CallSignature(Collective.ALLTOALLV, 0, ReduceOp.SUM, 0)
    shape = cluster.shape
    choice = planner.plan(call, 0, shape.health)
    program = by_pair(choice.schedule)
    found = {}
    for name, spread in UNEQUAL.items():
        sizes = unequal_parts(cluster, nbytes, spread)
        counts = [size for row in sizes for size in row]
        took_s = simulate_choice(shape, choice, sum(counts), counts, program)
        found[name] = took_s / cluster.exchange_bound_s(sizes)
    return found


def quantiles(values: Iterable[float]) -> str:
    """Format median, 90th percentile and extremes."""
    ordered = sorted(values)
    if not ordered:
        return "none"
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return (
        f"median {statistics.median(ordered):.3f}, p90 {p90:.3f}, worst {ordered[-1]:.3f}, "
        f"least {ordered[0]:.3f} of {len(ordered)}"
    )


def share_of(values: Sequence[float], low: float, high: float) -> str:
    """Format the share of values between `low` and `high`, in percent."""
    inside = sum(low <= value <= high for value in values)
    return f"{100 * inside / max(1, len(values)):.1f} % within {low:g} to {high:g}"


def report(rows: Sequence[dict[str, Any]], nworst: int) -> None:
    """Print distributions and the worst cases."""
    large = [row for row in rows if row["nbytes"] >= LARGE_NBYTES and "over_bound" in row]
    small = [row for row in rows if row["nbytes"] < LARGE_NBYTES and "over_bound" in row]
    both = [*large, *small]
    print(f"clusters                 {len(rows)}")
    print(f"without a route          {sum(row['without_route'] > 0 for row in rows)}")
    print(f"refused by the checker   {sum(row['refused'] for row in rows)}")
    print(f"time over bound, large   {quantiles(row['over_bound'] for row in large)}")
    for name, part in (("large", large), ("small", small)):
        over = [row["over_best"] for row in part]
        print(f"over best, {name:14}{quantiles(over)}; {share_of(over, 0, 1.03)}")
    ratios = [row["predicted"] for row in both]
    print(f"predicted, chosen        {quantiles(ratios)}; {share_of(ratios, 0.9, 1.1)}")
    every = [value for row in both for value in row["predictions"].values()]
    print(f"predicted, all           {quantiles(every)}; {share_of(every, 0.9, 1.1)}")
    for name in (*(each.name.lower() for each in OTHERS), *UNEQUAL):
        print(f"{name:25}{quantiles(row[name] for row in rows if name in row)}")
    print(f"planned, s               {quantiles(row['planned_s'] for row in rows)}")
    for key, part in (("over_bound", large), ("over_best", both)):
        print(f"worst by {key}:")
        for row in sorted(part, key=lambda row: -row[key])[:nworst]:
            print(
                f"  {row['seed']:8} {row[key]:.3f} {row['schedule']} (best {row['best']}): "
                f"{row['is'][:150]}"
            )
    print("worst predictions:")
    for row in sorted(both, key=lambda row: -abs(math.log(row["predicted"])))[:nworst]:
        print(f"  {row['seed']:8} {row['predicted']:.3f} {row['schedule']}: {row['is'][:150]}")


def main() -> int:
    """Run the study; return 1 if a choice has no route or is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="clusters to draw")
    parser.add_argument("--seed", default="1", help="seed of the draws; S:N: only draw N of seed S")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--most-nodes", type=int, default=64)
    parser.add_argument("--allreduce-only", action="store_true")
    parser.add_argument("--worst", type=int, default=5, help="number of worst cases to show")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    add_json_argument(parser)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    seed, _, only = args.seed.partition(":")
    numbers = [int(only)] if only else range(args.count)
    clusters = [draw(int(seed), each, args.ranks_per_node, args.most_nodes) for each in numbers]
    work = partial(examine, has_others=not args.allreduce_only)
    with ProcessPoolExecutor(min(args.jobs, len(clusters))) as pool:
        rows = list(pool.map(work, clusters, chunksize=1))
    if args.verbose:
        for row in rows:
            print(json.dumps(row, indent=1))
    report(rows, args.worst)
    if args.json:
        write_json(args.json, rows)
    return int(any(row["without_route"] or row["refused"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
