"""Measure collectives in shared memory beside TCP, MPICH and Open MPI, on one machine, in one run.

Rounds and loops are those of `peers`. Each MPI also runs with glibc's thresholds raised
(``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``), so that it keeps its temporary memory.
r2ccl also runs on arrays of `Communicator.empty` ("symmetric"). The ratios are r2ccl's times in
shared memory, on ordinary and on symmetric arrays, divided by that of the fastest MPI: below 1,
r2ccl is faster.
"""

from __future__ import annotations

import argparse
import sys

from common import Stats
from jobs import LOCAL, MPICH, OPENMPI, R2CCL, SYMMETRIC, Library
from peers import Row, Samples, add_case_arguments, measure
from rich.table import Table

from r2ccl.cli.values import format_size

_KEPT = (("MALLOC_MMAP_THRESHOLD_", str(1 << 30)), ("MALLOC_TRIM_THRESHOLD_", str(1 << 31)))
_MPIS = tuple(
    each._replace(transport=f"{each.transport}{suffix}", env=each.env + env)
    for each in (MPICH, OPENMPI)
    for suffix, env in (("", ()), (", malloc", _KEPT))
)
_LIBRARIES: tuple[Library, ...] = (LOCAL, SYMMETRIC, R2CCL, *_MPIS)
#: Names of the ratios to the faster MPI.
_RATIOS = {"ratio": LOCAL, "symmetric": SYMMETRIC}


def rows_of(samples: Samples, collective: str, nranks: int) -> list[Row]:
    """Return one JSON object per size."""
    rows = []
    for nbytes in sorted({size for _, size in samples}):
        times = {
            library: Stats.of(samples[library, nbytes]).median * 1e6
            for library in _LIBRARIES
            if (library, nbytes) in samples
        }
        others = [time for library, time in times.items() if library in _MPIS]
        ratios = {
            key: times[library] / min(others) if others and library in times else None
            for key, library in _RATIOS.items()
        }
        rows.append(
            {
                "collective": collective,
                "nranks": nranks,
                "nbytes": nbytes,
                "median_us": {f"{each.name} ({each.transport})": us for each, us in times.items()},
                **ratios,
            }
        )
    return rows


def table_of(rows: list[Row], collective: str, nranks: int) -> Table:
    """Return the rows as a table, one line per size."""
    table = Table(
        title=f"{collective}, float32, {nranks} ranks: µs, median; ratio to the faster MPI"
    )
    names = list(rows[0]["median_us"])
    for name in ("size", *names, *_RATIOS):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['median_us'].get(name, float('nan')):,.1f}" for name in names]
        cells += ["-" if row[name] is None else f"{row[name]:.2f}" for name in _RATIOS]
        table.add_row(format_size(row["nbytes"]), *cells)
    return table


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Compare shared memory with MPICH and Open MPI.")
    add_case_arguments(parser)
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("--loop-s", type=float, default=0.02, help="default: 0.02")
    parser.add_argument("--budget-s", type=float, default=600.0, help="default: 600")
    measure(_LIBRARIES, parser.parse_args(), rows_of, table_of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
