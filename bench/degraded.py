"""Measure what lost NICs cost collectives on a real network, and check the planner's choices.

The network is a netlab: network namespaces on this machine, whose NICs are shaped to a rate that
the processors can keep up with. A job measures T0, the time of the fault-free ring, loses NICs
between two calls, and continues. Within a job all schedules and sizes take turns. The last result
of every reading is verified, element by element; if one element is wrong, the bench exits with 1.

``--what cloudlab``: 3 nodes of 2 ranks and 3 NICs, one NIC lost; compares R2CC-AllReduce as
published with this library's schedules. ``straggler``: 4 nodes of 4 NICs with no NIC lost, one
lost, or one lost on one node and two on another. ``planner``: the same nodes, 10 patterns of lost
NICs, 6 sizes each; measures how much slower than the best schedule the planner's choice is, and the
error of its prediction. ``collectives``: every collective on 4 nodes of 8 NICs, with all NICs and
with one and two of one node lost, beside the published claim. ``levels``: collectives on 2 nodes
of 2 ranks and 4 NICs, in two levels and in one, with all NICs and with one lost.

With ``--measured FILE``, `tables.py` shows the results of the first two beside model and
simulation.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import degraded_collectives as study
import degraded_levels
from common import add_json_argument, write_json
from degraded_cases import (
    BALANCE,
    LOST,
    LOST_NIC,
    NICS,
    STRAGGLER,
    STRAGGLER_NICS,
    STRAGGLER_NODES,
    cloudlab,
    cloudlab_bound,
    straggler,
    straggler_bound,
)
from degraded_job import DEGRADED, HEALTHY, Task, run_job
from degraded_report import (
    Point,
    points_of,
    print_cases,
    print_points,
    print_verdict,
    schedule_rows,
    verdict_of,
)
from labs import ready_for_labs
from rich.console import Console

from r2ccl.cli.values import parse_size, parse_sizes
from r2ccl.testing.netlab import Lab, LabShape

WHATS = ("cloudlab", "straggler", "planner", "collectives", "levels")

#: Bucket of each NIC's shaper. It fills while the ranks verify; then traffic exceeds the rate.
_BURST = "256kb"
#: Bytes that back-to-back calls move per reading: enough that the bucket is 2 % of them.
_BATCH_NBYTES = 32 << 20

#: Lost NICs of each pattern of the planner study, as (node, rail).
PATTERNS: dict[str, tuple[tuple[int, int], ...]] = {
    "none": (),
    "1": ((2, 1),),
    "2 of one node": ((2, 1), (2, 3)),
    "3 of one node": ((2, 0), (2, 1), (2, 3)),
    "1 and 1": ((1, 0), (2, 2)),
    "1 and 1 of one rail": ((1, 2), (3, 2)),
    "1 and 2": ((0, 3), (2, 0), (2, 2)),
    "2 and 2": ((0, 0), (0, 1), (2, 1), (2, 2)),
    "1, 1 and 1": ((0, 0), (1, 1), (3, 2)),
    "1 of every node": ((0, 0), (1, 1), (2, 2), (3, 3)),
}
_SIZES = "2M,4M,8M,16M,32M,64M"

#: Columns of the table: more than the 80 that rich assumes for a pipe.
_WIDTH = 140


def run_cloudlab(args: argparse.Namespace, out: Console) -> list[dict[str, Any]]:
    """Measure the schedules of the CloudLab table."""
    cases = list(cloudlab((1, 16)) if args.quick else cloudlab())
    task = Task(
        what="cloudlab",
        sizes=(args.nbytes,),
        rounds=args.rounds,
        batch_nbytes=0,
        healthy=(BALANCE,),
        degraded=tuple(case.key for case in cases),
        lost=(LOST_NIC,),
        ranks_per_node=2,
    )
    with _lab(args, nodes=3, rails=NICS, ranks_per_node=2) as lab:
        outcome = run_job(lab, task)
    fault_free = outcome.times[HEALTHY, BALANCE, args.nbytes]
    rows = schedule_rows(
        "cloudlab", f"{LOST} of one node", cases, outcome, fault_free, float(cloudlab_bound())
    )
    print_cases(out, "CloudLab: 3 nodes of 2 ranks and 3 NICs; T0: flat ring of 6 ranks", rows)
    return rows


def run_straggler(args: argparse.Namespace, out: Console) -> list[dict[str, Any]]:
    """Measure ring and packed trees, with all NICs and with NICs lost."""
    rows: list[dict[str, Any]] = []
    with _lab(args, nodes=STRAGGLER_NODES, rails=STRAGGLER_NICS) as lab:
        for case, lost in STRAGGLER.items():
            cases = list(straggler(lost))
            names = tuple(each.key for each in cases)
            task = Task(
                what="straggler",
                sizes=(args.nbytes,),
                rounds=args.rounds,
                batch_nbytes=0,
                healthy=(BALANCE,) if lost else names,
                degraded=names if lost else (),
                lost=lost,
            )
            # Calls of `comm.allreduce`, which is the case BALANCE, must run rings.
            outcome = run_job(lab, task, {"R2CC_ALGO": "ring"})
            fault_free = outcome.times[HEALTHY, BALANCE, args.nbytes]
            bound = float(straggler_bound(lost))
            phase = DEGRADED if lost else HEALTHY
            rows += schedule_rows("netlab", case, cases, outcome, fault_free, bound, phase)
    print_cases(out, "4 nodes of 4 NICs; T0: ring of 4 ranks", rows)
    return rows


def run_planner(args: argparse.Namespace, out: Console) -> list[dict[str, Any]]:
    """Compare the planner's choice with the other candidates, for every pattern and size."""
    points: list[Point] = []
    with _lab(args, nodes=STRAGGLER_NODES, rails=STRAGGLER_NICS) as lab:
        for pattern in args.patterns:
            task = Task(
                what="planner",
                sizes=tuple(args.sizes),
                rounds=args.rounds,
                batch_nbytes=_BATCH_NBYTES,
                lost=PATTERNS[pattern],
            )
            # Without bandwidth measurement: with it, some calls run as rings only to sample
            # bandwidth.
            env = {"R2CC_ALGO": "auto", "R2CC_BALANCE": "0"}
            found = points_of(pattern, run_job(lab, task, env))
            print_points(out, found)
            points += found
    verdict = verdict_of(points)
    print_verdict(out, verdict)
    return [*(row for point in points for row in point.flat()), verdict]


def run_collectives(args: argparse.Namespace, out: Console) -> list[dict[str, Any]]:
    """Measure every collective with all NICs, and without some of them."""
    outcomes = {}
    with _lab(args, nodes=study.NODES, rails=study.NICS) as lab:
        for name, lost in study.LOST.items():
            task = Task(
                what="collectives",
                sizes=(args.nbytes,),
                rounds=args.rounds,
                batch_nbytes=0,
                healthy=study.NAMES,
                degraded=study.NAMES,
                lost=lost,
            )
            outcomes[name] = run_job(lab, task)
    rows = study.rows_of(outcomes)
    study.print_rows(out, rows)
    return rows


def run_levels(args: argparse.Namespace, out: Console) -> list[dict[str, Any]]:
    """Measure collectives in two levels and in one, with all NICs, and without one of them."""
    outcomes = {}
    size = degraded_levels.RANKS_PER_NODE
    with _lab(
        args, nodes=degraded_levels.NODES, rails=degraded_levels.NICS, ranks_per_node=size
    ) as lab:
        for levels, env in degraded_levels.LEVELS.items():
            task = Task(
                what="levels",
                sizes=(args.nbytes,),
                rounds=args.rounds,
                batch_nbytes=0,
                healthy=degraded_levels.NAMES,
                degraded=degraded_levels.NAMES,
                lost=degraded_levels.LOST,
                ranks_per_node=size,
                ops_per_call=degraded_levels.ops_per_call(levels, args.nbytes),
            )
            outcomes[levels] = run_job(lab, task, env)
    rows = degraded_levels.rows_of(outcomes, args.rate)
    degraded_levels.print_rows(out, rows)
    return rows


def _lab(args: argparse.Namespace, **shape: Any) -> Lab:
    return Lab(
        **shape, rate=f"{args.rate}mbit", burst=_BURST, latency=args.queue, buffer=args.buffer
    )


_RUNS = {
    "cloudlab": run_cloudlab,
    "straggler": run_straggler,
    "planner": run_planner,
    "collectives": run_collectives,
    "levels": run_levels,
}


class _Default(NamedTuple):
    """Default settings of a study, and those of ``--quick``."""

    rate: int
    rounds: int
    nbytes: int = 0
    queue: str = LabShape().latency
    buffer: str = LabShape().buffer
    quick_nbytes: int = 16 << 20
    quick_rounds: int = 2


#: The queues are long enough for what several connections of a NIC enqueue at once while several
#: NICs send to one. A full queue drops segments, and TCP waits 200 ms for a lost last segment.
_DEFAULTS = {
    "cloudlab": _Default(100, 5, 64 << 20, queue="20ms", buffer="100ms"),
    "straggler": _Default(200, 10, 64 << 20, queue="20ms", buffer="50ms"),
    "planner": _Default(200, 3, queue="20ms", buffer="50ms"),
    "collectives": _Default(100, 5, 64 << 20, queue="20ms", buffer="100ms", quick_nbytes=8 << 20),
    "levels": _Default(200, 10, 64 << 20, queue="20ms", buffer="100ms"),
}
_QUICK_PATTERNS, _QUICK_SIZES = ["none", "1"], [4 << 20, 16 << 20]


def parse_patterns(text: str) -> list[str]:
    """Parse a list of pattern names, separated by semicolons."""
    names = [name.strip() for name in text.split(";")]
    if not set(names) <= set(PATTERNS):
        raise argparse.ArgumentTypeError(
            f"{text!r} has an unknown pattern; known: {'; '.join(PATTERNS)}"
        )
    return names


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure what lost NICs cost, in a netlab.")
    parser.add_argument("--what", choices=WHATS, required=True)
    parser.add_argument("--quick", action="store_true", help="little data, few rounds")
    parser.add_argument("--rate", type=int, metavar="MBIT", help="rate of each NIC")
    parser.add_argument("--queue", help="longest delay in a NIC's queue, in tc's syntax")
    parser.add_argument("--buffer", help="longest delay in a switch port's queue, in tc's syntax")
    parser.add_argument("--rounds", type=int, help="readings per schedule")
    parser.add_argument("--nbytes", type=parse_size, help="bytes of a call; not planner")
    parser.add_argument("--sizes", type=parse_sizes, help=f"planner: default {_SIZES}")
    parser.add_argument(
        "--patterns",
        type=parse_patterns,
        metavar="NAME;NAME",
        help="planner: lost NICs",
    )
    add_json_argument(parser)
    args = parser.parse_args()
    planner_only = [name for name in ("sizes", "patterns") if getattr(args, name) is not None]
    if args.what == "planner" and args.nbytes is not None:
        parser.error("--nbytes does not apply to --what planner; use --sizes")
    if args.what != "planner" and planner_only:
        parser.error(f"--{planner_only[0]} applies to --what planner only")
    default = _DEFAULTS[args.what]
    defaults: dict[str, Any] = {
        "rate": default.rate,
        "queue": default.queue,
        "buffer": default.buffer,
        "nbytes": default.quick_nbytes if args.quick else default.nbytes,
        "rounds": default.quick_rounds if args.quick else default.rounds,
        "sizes": _QUICK_SIZES if args.quick else parse_sizes(_SIZES),
        "patterns": _QUICK_PATTERNS if args.quick else list(PATTERNS),
    }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    sizes = args.sizes if args.what == "planner" else [args.nbytes]
    if min(args.rate, args.rounds) < 1:
        parser.error("--rate and --rounds must be above 0")
    if any(nbytes < 4 or nbytes % 4 for nbytes in sizes):
        parser.error("sizes must be multiples of 4 bytes, and above 0")
    return args


def main() -> int:
    """Build the lab, run the study, print and save its rows."""
    args = parse_arguments()
    out = Console(highlight=False, width=_WIDTH)
    setting = {
        "rate_mbps": args.rate,
        "burst": _BURST,
        "queue": args.queue,
        "buffer": args.buffer,
        "mtu": LabShape().mtu,
        "rounds": args.rounds,
    }
    out.print("  ".join(f"{name}={value}" for name, value in setting.items()))
    with ready_for_labs("degraded"):
        rows = _RUNS[args.what](args, out)
    if args.json:
        write_json(args.json, [{**setting, **row} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
