"""Cost of a communicator per rank as the number of ranks grows: descriptors, start, memory.

All ranks run on this machine and share its cores, so CPU time is the figure that carries over to
a cluster, and wall time is that of this machine. Memory is what a rank does not share with others,
as of /proc/self/smaps_rollup. Figures are the largest of all ranks; of CPU time and memory, the
median is shown too, because rank 0, which all ranks meet, needs more than the others.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from common import add_json_argument, write_json
from rich.console import Console
from rich.table import Table

import r2ccl
from r2ccl.cli.values import parse_counts
from r2ccl.errors import R2cclError

_COUNTS = "2,4,8,16,32,64"
#: Elements of the calls that are made: eager, of a few slices, of many.
_ELEMENTS = (1, 5_000, 100_000)
_TIMEOUT_S = 300.0
_COLUMNS = {
    "descriptors": "{:.0f}",
    "data_peers": "{:.0f}",
    "cpu_ms": "{:.0f}",
    "cpu_ms_median": "{:.0f}",
    "wall_s": "{:.2f}",
    "private_mib": "{:.1f}",
    "private_mib_median": "{:.1f}",
    "nconnects": "{:.0f}",
    "repairs": "{:.0f}",
}


def measure_rank(is_called: bool) -> dict[str, float]:
    """Start a communicator in this rank and return what it cost."""
    init = r2ccl.init  # imports the engine
    before_mib = _private_mib()
    cpu_s, wall_s = time.process_time(), time.monotonic()
    with init(shm="0") as comm:  # each rank stands for a node
        found = {
            "cpu_ms": 1e3 * (time.process_time() - cpu_s),
            "wall_s": time.monotonic() - wall_s,
            "descriptors": float(len(os.listdir("/proc/self/fd"))),
            "private_mib": _private_mib() - before_mib,
        }
        for count in _ELEMENTS if is_called else ():
            for _ in range(2):
                comm.allreduce(np.ones(count))
            comm.allgather(np.ones(count))
        comm.barrier()
        status = json.loads(comm.dump())
        found["data_peers"] = float(len({path["peer"] for path in status["paths"]}))
        found["nconnects"] = float(status["nconnects"])
        found["repairs"] = float(len(status["repairs"]))
    return found


def measure(nranks: int, *, is_called: bool) -> dict[str, float]:
    """Return the largest of each figure over `nranks` ranks, and the time of the whole job."""
    begun_s = time.monotonic()
    ranks = r2ccl.launch(functools.partial(measure_rank, is_called), nranks, timeout_s=_TIMEOUT_S)
    found = {name: max(each[name] for each in ranks) for name in ranks[0]}
    for name in ("cpu_ms", "private_mib"):
        found[f"{name}_median"] = statistics.median(each[name] for each in ranks)
    return {"n": float(nranks), **found, "job_s": time.monotonic() - begun_s}


def _private_mib() -> float:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return sum(map(int, re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))) / 1024


def table_of(rows: list[dict[str, float]]) -> Table:
    """Lay the figures out, one line per number of ranks."""
    table = Table(title="largest of all ranks, on this machine")
    for name in ("n", *_COLUMNS, "job_s"):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        cells = [text.format(row[name]) for name, text in _COLUMNS.items()]
        table.add_row(f"{row['n']:.0f}", *cells, f"{row['job_s']:.1f}")
    return table


def plot(path: Path, rows: list[dict[str, float]]) -> None:
    """Draw each figure against the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    panels = figure.subplots(2, 2)
    names = ("descriptors", "data_peers", "cpu_ms", "private_mib")
    for axes, name in zip(panels.flat, names, strict=True):
        axes.plot([row["n"] for row in rows], [row[name] for row in rows], "o-")
        if f"{name}_median" in rows[0]:
            axes.plot([row["n"] for row in rows], [row[f"{name}_median"] for row in rows], "o--")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="ranks", title=name.replace("_", " "))
        axes.set_ylim(bottom=0)
        axes.grid(linewidth=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="Cost of a communicator as ranks are added.")
    parser.add_argument("--ranks", type=parse_counts, default=parse_counts(_COUNTS))
    parser.add_argument(
        "--no-calls", action="store_true", help="only start and leave; larger numbers of ranks"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw; needs matplotlib")
    add_json_argument(parser)
    args = parser.parse_args()
    out = Console()
    rows: list[dict[str, float]] = []
    for nranks in args.ranks:
        try:
            rows.append(measure(nranks, is_called=not args.no_calls))
        except R2cclError as exc:
            out.print(f"{nranks} ranks failed: {exc}", style="red")
            return 1
        out.print(f"{nranks} ranks: {rows[-1]['job_s']:.1f} s")
    out.print(table_of(rows))
    if args.json:
        write_json(args.json, rows)
    if args.png:
        plot(args.png, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
