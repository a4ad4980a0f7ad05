"""Measure what resilience costs when nothing fails: the default mode against mode failstop, paired.

The same processes hold three communicators and call them on the same memory: *A* and *A'* in the
default mode, *B* with ``R2CC_MODE=failstop``. A round measures all three close together, in an
order that changes from round to round. Its ratios are A/B and A'/B (the overhead) and A/A' (the
noise of the measurement, which is 1 on a perfect machine). The job is restarted several times,
because the placement of a process's memory changes its speed for as long as it lives. With one job
per communicator, this alone would cause differences of 5 %.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from itertools import permutations
from typing import Any

from common import Stats, add_json_argument, write_json
from jobs import R2CCL, Job
from rich.console import Console
from rich.table import Table

from r2ccl.cli.perf.report import machine
from r2ccl.cli.values import format_size, parse_sizes

_SIZES = "1M,2M,4M"
_ORDERS = tuple(permutations(("A", "A'", "B")))

#: Times of A, A' and B in seconds: one dict per round, by size in bytes.
Rounds = dict[int, list[dict[str, float]]]


def sample(job: Job, names: tuple[str, ...], args: argparse.Namespace, rounds: Rounds) -> None:
    """Measure `args.rounds` rounds of every size with this job's communicators, `names`."""
    counts = {nbytes: job.calibrate(nbytes, args.loop_s) for nbytes in args.sizes}
    for number in range(args.rounds):
        for nbytes, count in counts.items():
            order = _ORDERS[number % len(_ORDERS)]
            measured = {
                name: job.run(nbytes, count, warmup=2, group=names.index(name)) for name in order
            }
            rounds[nbytes].append(measured)


def rows_of(rounds: Rounds, nranks: int) -> list[dict[str, Any]]:
    """Return one JSON object per size."""
    rows = []
    for nbytes, measured in sorted(rounds.items()):
        overhead = Stats.of([each[a] / each["B"] for each in measured for a in ("A", "A'")])
        noise = Stats.of([each["A"] / each["A'"] for each in measured])
        rows.append(
            {
                "collective": "allreduce",
                "nranks": nranks,
                "nbytes": nbytes,
                "library": "r2ccl",
                "transport": "tcp",
                "default_us": Stats.of([each["A"] for each in measured]).median * 1e6,
                "mode0_us": Stats.of([each["B"] for each in measured]).median * 1e6,
                "overhead_percent": (overhead.median - 1) * 100,
                "overhead_low_percent": (overhead.low - 1) * 100,
                "overhead_high_percent": (overhead.high - 1) * 100,
                "noise_percent": (noise.median - 1) * 100,
                "noise_low_percent": (noise.low - 1) * 100,
                "noise_high_percent": (noise.high - 1) * 100,
                "rounds": len(measured),
            }
        )
    return rows


def table_of(rows: list[dict[str, Any]], nranks: int) -> Table:
    """Return the rows as a table."""
    table = Table(
        title=f"allreduce, float32, in place, {nranks} ranks: default against R2CC_MODE=failstop; "
        "median (quartiles) of paired rounds"
    )
    for name in (
        "size",
        "default µs",
        "failstop µs",
        "overhead A/B - 1",
        "noise A/A' - 1",
        "rounds",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [format_size(row["nbytes"]), f"{row['default_us']:,.0f}", f"{row['mode0_us']:,.0f}"]
        for what in ("overhead", "noise"):
            middle, low, high = (row[f"{what}{part}_percent"] for part in ("", "_low", "_high"))
            cells.append(f"{middle:+.2f} % ({low:+.1f} to {high:+.1f})")
        table.add_row(*cells, str(row["rounds"]))
    return table


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Cost of resilience when nothing fails.")
    parser.add_argument("--nranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=_SIZES, help=f"default: {_SIZES}")
    parser.add_argument("--jobs", type=int, help="number of jobs; default: 6, with --quick 2")
    parser.add_argument("--rounds", type=int, help="rounds per job; default: 30, with --quick 12")
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    add_json_argument(parser)
    args = parser.parse_args()
    if args.jobs is None:
        args.jobs = 2 if args.quick else 6
    if args.rounds is None:
        args.rounds = 12 if args.quick else 30
    args.loop_s = 0.05
    if min(args.jobs, args.rounds, args.nranks) < 1 or any(nbytes % 4 for nbytes in args.sizes):
        parser.error("--jobs, --rounds, --nranks must be above 0, --sizes multiples of 4 bytes")
    return args


def main() -> int:
    """Measure and print."""
    args = parse_arguments()
    out = Console(width=None if sys.stdout.isatty() else 140)
    out.print(" · ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
    rounds: Rounds = defaultdict(list)
    for number in range(args.jobs):
        names = _ORDERS[number % len(_ORDERS)]  # order of creation
        modes = ",".join("0" if name == "B" else "auto" for name in names)
        with Job(R2CCL, args.nranks, BENCH_MODES=modes) as job:
            sample(job, names, args, rounds)
    rows = rows_of(rounds, args.nranks)
    out.print(table_of(rows, args.nranks))
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
