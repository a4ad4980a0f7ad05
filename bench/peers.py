"""Measure r2ccl, gloo, MPICH and Open MPI: same sizes, same arrays, same run.

r2ccl and MPICH run twice, over TCP and over shared memory; gloo and Open MPI over TCP. All ranks
live during the whole run and sleep while another library is measured. For each collective, a round
measures every library at every size, one after the other. The first library changes from round to
round, so that a slow moment of the machine affects all of them. The time of a round is that of a
loop of back-to-back calls, divided by their number, on the slowest rank. Collectives whose names
are joined by ``+`` are called in turn, and the time is the mean over them. The number of calls is
chosen per library and size so that all loops take about the same time. A row is the median over
rounds. The ratio is the time of r2ccl over the same transport divided by the peer's: below 1, r2ccl
is faster.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any

from common import Stats, add_json_argument, write_json
from jobs import GLOO, LOCAL, MPICH, MPICH_TCP, OPENMPI_TCP, R2CCL, Job, Library, Unavailable
from rich.console import Console
from rich.table import Table

from r2ccl.cli.perf.forms import FORMS
from r2ccl.cli.perf.report import machine
from r2ccl.cli.values import format_size, parse_counts, parse_sizes

_SIZES = "256,4K,64K,1M,4M,16M,64M"
_LIBRARIES = (R2CCL, LOCAL, GLOO, MPICH_TCP, OPENMPI_TCP, MPICH)
_OWN = (R2CCL, LOCAL)

Samples = dict[tuple[Library, int], list[float]]
Row = dict[str, Any]
#: Functions of samples, or rows, of a collective on a number of ranks.
RowsOf = Callable[[Samples, str, int], list[Row]]
TableOf = Callable[[list[Row], str, int], Table]


def start_jobs(
    libraries: tuple[Library, ...], nranks: int, stack: ExitStack, out: Console
) -> list[Job]:
    """Start the ranks of every library; report libraries that cannot be measured, and continue."""
    jobs = []
    for library in libraries:
        try:
            jobs.append(stack.enter_context(Job(library, nranks)))
        except Unavailable as exc:
            name = f"{library.name} over {library.transport}"
            out.print(f"[yellow]{name} ({nranks} ranks) skipped:[/] {exc}", highlight=False)
    return jobs


def sample(jobs: list[Job], collective: str, args: argparse.Namespace, out: Console) -> Samples:
    """Measure in rounds; report a library that fails, and leave it out from then on.

    A library that lacks a collective that `collective` names is left out, too.
    """
    sizes = [0] if collective == "barrier" else args.sizes
    samples: Samples = defaultdict(list)
    iterations: dict[tuple[Library, int], int] = {}
    start = time.monotonic()
    for number, nbytes in product(range(args.rounds), sizes):
        if nbytes == sizes[0] and _is_late(number, time.monotonic() - start, args.budget_s):
            out.print(f"ended after {number} rounds: the time budget is used up", highlight=False)
            break
        able = [job for job in jobs if not job.library.lacks_any(collective)]
        first = number % max(1, len(able))
        for job in able[first:] + able[:first]:
            key = job.library, nbytes
            try:
                if key not in iterations:
                    iterations[key] = job.calibrate(nbytes, args.loop_s, collective)
                count = iterations[key]
                warmup = 1 + count // 10
                # Run first: reading samples[key] makes a row, which would stay empty if this fails.
                taken = job.run(nbytes, count, warmup, collective=collective)
                samples[key].append(taken)
            except Unavailable as exc:
                name = f"{job.library.name} over {job.library.transport}"
                out.print(f"[red]{name} failed at {nbytes} bytes of {collective}:[/] {exc}")
                job.close()
                jobs.remove(job)
    return samples


def _is_late(number: int, elapsed_s: float, budget_s: float) -> bool:
    """Return whether one more round, as long as the mean so far, would exceed the budget."""
    return number > 0 and elapsed_s * (number + 1) / number > budget_s


def rows_of(samples: Samples, collective: str, nranks: int) -> list[Row]:
    """Return one JSON object per size and library."""
    rows = []
    for (library, nbytes), seconds in sorted(
        samples.items(), key=lambda item: (item[0][1], _LIBRARIES.index(item[0][0]))
    ):
        stats = Stats.of(seconds)
        own = LOCAL if library.transport == LOCAL.transport else R2CCL
        ours = None if library is own else samples.get((own, nbytes))
        rows.append(
            {
                "collective": collective,
                "nranks": nranks,
                "nbytes": nbytes,
                "library": library.name,
                "transport": library.transport,
                "median_us": stats.median * 1e6,
                "low_us": stats.low * 1e6,
                "high_us": stats.high * 1e6,
                "ratio": Stats.of(ours).median / stats.median if ours else None,
                "rounds": len(seconds),
            }
        )
    return rows


def table_of(rows: list[Row], collective: str, nranks: int) -> Table:
    """Return the rows as a table, one line per size."""
    by_key = {(row["nbytes"], row["library"], row["transport"]): row for row in rows}
    libraries = [
        each for each in _LIBRARIES if any(key[1:] == (each.name, each.transport) for key in by_key)
    ]
    table = Table(
        title=f"{collective}, float32, {nranks} ranks: µs, median (quartiles); "
        "ratio = r2ccl's time over the same transport / the peer's"
    )
    table.add_column("size", justify="right")
    for library in libraries:
        table.add_column(f"{library.name} ({library.transport})", justify="right")
        if library not in _OWN:
            table.add_column("ratio", justify="right")
    for nbytes in sorted({r["nbytes"] for r in rows}):
        cells = [format_size(nbytes)]
        for library in libraries:
            row = by_key.get((nbytes, library.name, library.transport))
            if row is None:
                cells += ["failed"] if library in _OWN else ["failed", "-"]
                continue
            cells.append(f"{row['median_us']:,.1f} ({row['low_us']:,.1f}-{row['high_us']:,.1f})")
            if library not in _OWN:
                cells.append("-" if row["ratio"] is None else f"{row['ratio']:.3f}")
        table.add_row(*cells)
    return table


@contextmanager
def neighbour(nice: int) -> Iterator[None]:
    """Run a process that computes, with this niceness, until the context or this process ends."""
    code = f"import os\nos.nice({nice})\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _parse_collective(text: str) -> str:
    """Return `text`, which must name a collective, several joined by ``+``, or all."""
    unknown = [name for name in text.split("+") if name not in FORMS]
    if unknown and text != "all":
        known = ", ".join(FORMS)
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: all, {known}")
    return text


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name what is measured, and the file with the results."""
    parser.add_argument(
        "--collective",
        type=_parse_collective,
        default="allreduce",
        help="default: allreduce; all measures each; allreduce+broadcast calls them in turn",
    )
    parser.add_argument("--nranks", type=parse_counts, default="2,4", help="default: 2,4")
    parser.add_argument("--sizes", type=parse_sizes, default=_SIZES, help=f"default: {_SIZES}")
    add_json_argument(parser)


def collectives_of(args: argparse.Namespace) -> list[str]:
    """Return the collectives that the command line names."""
    return list(FORMS) if args.collective == "all" else [args.collective]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare r2ccl with gloo, MPICH and Open MPI.")
    add_case_arguments(parser)
    parser.add_argument("--rounds", type=int, help="default: 15, with --quick 5")
    parser.add_argument(
        "--quick", action="store_true", help="end within 60 s; with all, one round at least"
    )
    parser.add_argument(
        "--neighbour",
        type=int,
        metavar="NICE",
        help="niceness, 0 to 19, of a process that computes beside the ranks; default: none",
    )
    args = parser.parse_args()
    if args.rounds is None:
        args.rounds = 5 if args.quick else 15
    args.loop_s = 0.02 if args.quick else 0.06
    # Time left of the 60 s after starting and ending the ranks.
    runs = len(args.nranks) * len(collectives_of(args))
    args.budget_s = 40 / runs if args.quick else math.inf
    if args.rounds < 1 or any(nbytes % 4 for nbytes in args.sizes):
        parser.error("--rounds must be above 0, and --sizes multiples of 4 bytes")
    return args


def measure(
    libraries: tuple[Library, ...], args: argparse.Namespace, rows_of: RowsOf, table_of: TableOf
) -> list[Row]:
    """Measure and print every collective on every number of ranks; return and save the rows."""
    out = Console(width=None if sys.stdout.isatty() else 140)
    out.print(" · ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
    results: list[Row] = []
    for nranks in args.nranks:
        with ExitStack() as stack:
            jobs = start_jobs(libraries, nranks, stack, out)
            for collective in collectives_of(args) if jobs else ():
                rows = rows_of(sample(jobs, collective, args, out), collective, nranks)
                out.print(table_of(rows, collective, nranks))
                results += rows
    if args.json:
        write_json(args.json, results)
    return results


def main() -> int:
    """Measure and print; return 1 if r2ccl itself could not be measured."""
    args = parse_arguments()
    with nullcontext() if args.neighbour is None else neighbour(args.neighbour):
        results = measure(_LIBRARIES, args, rows_of, table_of)
    ours = [row for row in results if row["library"] == R2CCL.name]
    measured = {(row["nranks"], row["collective"]) for row in ours}
    return 0 if measured == set(product(args.nranks, collectives_of(args))) else 1


if __name__ == "__main__":
    sys.exit(main())
