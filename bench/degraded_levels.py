"""Measure collectives of several ranks per node, with all NICs and with one lost.

They run in two levels, shared memory within the nodes and the network between them, or in one
level, over the network alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import Stats
from degraded_cases import Nic
from degraded_job import DEGRADED, HEALTHY, Outcome
from rich.console import Console
from rich.table import Table

from r2ccl.cli.values import format_size
from r2ccl.planning.two_level import count_chunks

NODES, NICS, RANKS_PER_NODE = 2, 4, 2
LOST: tuple[Nic, ...] = ((0, 1),)
#: Measured collectives, and the most bytes that leave or enter a node in each of them, as a
#: multiple of the bytes of the whole buffer. Those with a root have it on node 0.
SENT = {
    "allreduce": 2 * (NODES - 1) / NODES,
    "allgather": (NODES - 1) / NODES,
    "reduce_scatter": (NODES - 1) / NODES,
    "broadcast": 1,
    "reduce": 1,
}
NAMES = tuple(SENT)
#: Settings of each number of levels. Without bandwidth measurement: with it, some calls run in one
#: level only to sample bandwidth.
LEVELS = {
    "two": {"R2CC_SHM": "1", "R2CC_BALANCE": "0"},
    "one": {"R2CC_SHM": "0", "R2CC_BALANCE": "0"},
}
#: Least share of the line rate of all NICs, and of the healthy speed, that two levels should reach.
GOALS = (0.93, 0.70)


def ops_per_call(levels: str, nbytes: int) -> int:
    """Return the number of collectives that the network counts for one call, of any name."""
    return count_chunks(nbytes, NODES) if levels == "two" else 1


def rows_of(outcomes: Mapping[str, Outcome], rate_mbps: int) -> list[dict[str, Any]]:
    """Return the JSON objects of jobs by their number of levels, one per phase and collective."""
    line = NICS * rate_mbps * 1e6 / 8
    rows = []
    for levels, outcome in outcomes.items():
        for (phase, name, nbytes), times in outcome.times.items():
            stats = Stats.of(times.seconds)
            healthy_s = outcome.times[HEALTHY, name, nbytes].median
            best_s = nbytes * SENT[name] / line
            rows.append(
                {
                    "measure": "levels",
                    "levels": levels,
                    "collective": name,
                    "lost": len(LOST) if phase == DEGRADED else 0,
                    "nbytes": nbytes,
                    "seconds": stats.median,
                    "of_line_rate": best_s / stats.median,
                    "low": best_s / stats.high,
                    "high": best_s / stats.low,
                    "of_healthy": healthy_s / stats.median,
                    "cores": statistics.median(times.cores),
                    "shares": outcome.shares,
                }
            )
    return rows


def print_rows(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table."""
    title = f"{NODES} nodes of {RANKS_PER_NODE} ranks and {NICS} NICs"
    table = Table("collective", "levels", title=title)
    for heading in ("lost", "size", "ms", "of line rate", "quartiles", "of healthy", "cores"):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: (NAMES.index(row["collective"]), row["lost"])):
        table.add_row(
            row["collective"],
            row["levels"],
            str(row["lost"]),
            format_size(row["nbytes"]),
            f"{1e3 * row['seconds']:.0f}",
            f"{row['of_line_rate']:.1%}",
            f"{row['low']:.1%}-{row['high']:.1%}",
            f"{row['of_healthy']:.1%}",
            f"{row['cores']:.2f}",
        )
    out.print(table)
    line, healthy = GOALS
    out.print(
        f"goals of two levels: {line:.0%} of the line rate with all NICs, {healthy:.0%} of the "
        "healthy speed with one lost; every result was right"
    )


__all__ = [
    "GOALS",
    "LEVELS",
    "LOST",
    "NAMES",
    "NICS",
    "NODES",
    "RANKS_PER_NODE",
    "SENT",
    "ops_per_call",
    "print_rows",
    "rows_of",
]
