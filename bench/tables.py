"""Tables of paper, closed form and simulation: allreduces under failures, training and serving.

Figures of allreduces are multiples of T0, the fault-free ring's time, beside their lower bound.
Those of training and serving are tokens per second and milliseconds. The simulated schedules are
the same that the executor runs. Nothing is measured here: the column "measured" shows what
`degraded.py` saved (``--measured``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tables_failures
import tables_inference
import tables_plot
import tables_training
from common import add_json_argument, write_json
from rich.console import Console
from tables_bound import SLICES, TREES, bound_rows, optcc_rows
from tables_cloudlab import cloudlab_rows
from tables_models import print_figures
from tables_netlab import netlab_rows
from tables_rows import TOLERANCE, Row, RowName, print_rows, read_measured, with_measured

from r2ccl.cli.perf.report import machine

_SETTING = (
    "T/T0 with T0 = 2(n - 1)/n D/B; bound: T*/T0, T* = D max(1/b_min, 2(n - 1)/(sum of all b)); "
    "slices: per chunk"
)
_SIMULATED = (
    f"simulated: node ports, no latency, no reduction time; max-min with tolerance {TOLERANCE}"
)
_AT_HALF = (
    "OptCC's 1.02-1.06 is its paper's summary of its own settings; with half lost the bound itself "
    "is n/(n - 1), above 1.06 below 18 nodes"
)
_MULTI_FAILURE, _TRAINING, _INFERENCE = "multi-failure", "r2ccl-training", "r2ccl-inference"

#: Tables with random draws, and their default number of draws.
_DRAWS = {_MULTI_FAILURE: 1000, _TRAINING: 200}


class _Named(NamedTuple):
    """Table whose rows depend only on `--quick`."""

    title: str
    rows: Callable[[bool], Iterator[Row]]
    notes: tuple[str, ...]


_TABLES = {
    "bound": _Named(
        "One straggler: every schedule against the lower bound",
        bound_rows,
        (
            f"packed trees are shown with {TREES} trees and {SLICES} slices, and cheapest: with "
            "the fewest slices of all trees together, of the settings tried, that are within 3 % "
            "of the bound under max-min sharing, 5 % where half is lost",
            "leaf ring: OptCC's ring, filled where the straggler has bandwidth to spare",
            _AT_HALF,
        ),
    ),
    "optcc": _Named(
        "OptCC: model l (k + 1)/k D/B with l = 1/(1 - lost), or the healthy nodes' load if larger",
        optcc_rows,
        (
            "slices are finer than segments, so with few segments OptCC is ahead of its model, "
            "in which the straggler waits for a whole one",
            _AT_HALF,
        ),
    ),
    "cloudlab": _Named(
        "CloudLab: 3 nodes of 2 ranks and 3 NICs, one NIC lost; T0: the flat ring of 6 ranks",
        cloudlab_rows,
        (
            "T0 here is 2(P - 1)/P D/B, P = 6 ranks; schedules among nodes send less than that",
            "model of R2CC-AllReduce: 1 + PX(1 + 1/K)/(2(P - 1)(1 - X)), X = 1/3; among nodes: "
            "max(T1, T2) + T3 of r2ccl.algos.r2cc_allreduce, as if each ring had rails of its own",
        ),
    ),
    "netlab": _Named(
        "4 nodes of 4 NICs that lose some",
        netlab_rows,
        ("packed trees: as many as the planner would choose",),
    ),
}

#: Tables that can show results of `degraded.py`.
_MEASURED = ("cloudlab", "netlab")

_DEFAULT_DRAWS = ", ".join(f"{count} of {name}" for name, count in _DRAWS.items())
_TITLES = {
    **{name: table.title for name, table in _TABLES.items()},
    _MULTI_FAILURE: "Several failures: random patterns of lost NICs",
    _TRAINING: "Training: tokens per second with NICs lost",
    _INFERENCE: "Serving: latency with NICs lost",
}


def make(name: str, args: argparse.Namespace, out: Console) -> list[dict[str, Any]]:
    """Simulate and print one table; return the objects to save."""
    title = _TITLES[name]
    if name == _MULTI_FAILURE:
        return _make_patterns(title, args, out)
    if name == _TRAINING:
        figures = list(tables_training.training_rows(args))
        print_figures(out, title, figures, tables_training.notes(args))
        return [figure.flat() for figure in figures]
    if name == _INFERENCE:
        figures = list(tables_inference.inference_rows(args.quick))
        print_figures(out, title, figures, tables_inference.notes())
        return [figure.flat() for figure in figures]
    table = _TABLES[name]
    rows, measured = with_measured(list(table.rows(args.quick)), args.measured or {})
    print_rows(out, title, rows, (_SETTING, _SIMULATED, *table.notes, *measured))
    return [row.flat() for row in rows]


def _make_patterns(title: str, args: argparse.Namespace, out: Console) -> list[dict[str, Any]]:
    numbers = range(args.first, args.first + args.patterns)
    verdicts = tables_failures.judge_all(args.seed, numbers, args.jobs, mpi=args.mpi)
    rows = list(tables_failures.summary(verdicts))
    notes = (_SETTING, _SIMULATED, *tables_failures.notes(args.seed, verdicts))
    print_rows(out, title, rows, notes)
    return [*(row.flat() for row in rows), *(verdict.flat(args.seed) for verdict in verdicts)]


def parse_measured(text: str) -> dict[RowName, dict[str, Any]]:
    """Read a results file of `degraded.py`."""
    try:
        return read_measured(Path(text))
    except (OSError, ValueError, KeyError) as exc:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a file that degraded.py --json saved: {exc!r}"
        ) from exc


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare paper, closed form and simulation.")
    parser.add_argument("--table", choices=list(_TITLES), required=True)
    parser.add_argument("--quick", action="store_true", help="a small part, within seconds")
    parser.add_argument(
        "--patterns", type=int, help=f"draws; default: {_DEFAULT_DRAWS}, with --quick 5"
    )
    parser.add_argument("--first", type=int, help="number of the first draw; default: 0")
    parser.add_argument("--seed", type=int, help="seed of the draws; default: 1")
    parser.add_argument("--jobs", type=int, help="processes; default: one per core, --quick 1")
    parser.add_argument(
        "--mpi", action="store_true", default=None, help="spread over the ranks of an MPI job"
    )
    parser.add_argument(
        "--measured", type=parse_measured, metavar="FILE", help="results of degraded.py"
    )
    add_json_argument(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot it; needs r2ccl[demo]")
    args = parser.parse_args()
    defaults = {
        "patterns": 5 if args.quick else _DRAWS.get(args.table, 1),
        "first": 0,
        "seed": 1,
        "jobs": 1 if args.quick else len(os.sched_getaffinity(0)),
        "mpi": False,
    }
    given = [name for name in defaults if getattr(args, name) is not None]
    if given and args.table not in _DRAWS:
        parser.error(f"--{given[0]} applies to --table {' and '.join(_DRAWS)} only")
    vars(args).update({name: defaults[name] for name in defaults if name not in given})
    if args.measured is not None:
        if args.table not in _MEASURED:
            parser.error(f"--measured applies to --table {' and '.join(_MEASURED)} only")
        if not any(name.table == args.table for name in args.measured):
            parser.error(f"--measured: the file has nothing of table {args.table}")
    if min(args.patterns, args.jobs) < 1 or args.first < 0:
        parser.error("--patterns and --jobs must be above 0, --first 0 or more")
    return args


def main() -> int:
    """Simulate, print and save one table."""
    args = parse_arguments()
    if args.plot:
        tables_plot.require_matplotlib()
    out = Console(width=None if sys.stdout.isatty() else 160)
    out.print(" · ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
    results = make(args.table, args, out)
    if args.json:
        write_json(args.json, results)
    if args.plot:
        tables_plot.plot(args.plot, _TITLES[args.table], results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
