"""Measure every collective with all NICs, and with NICs of one node lost.

The published claim (arXiv:2512.25059) is that large calls of all collectives keep 85 to 89 % of
their healthy speed when one of two nodes loses one of its 8 NICs. The node that loses NICs here has
8, too, and is the root of the collectives that have one, which is their worst case.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from clusters import FABRICS, Cluster
from common import Stats
from degraded_cases import Nic
from degraded_job import DEGRADED, HEALTHY, Outcome
from rich.console import Console
from rich.table import Table

from r2ccl.cli.perf.forms import FORMS, busbw
from r2ccl.cli.values import format_size
from r2ccl.failover.health.table import WHOLE
from r2ccl.types import Collective

NODES, NICS = 4, 8
#: Lost NICs, as (node, rail), by number.
LOST: dict[str, tuple[Nic, ...]] = {"1 of 8": ((0, 1),), "2 of 8": ((0, 1), (0, 3))}
#: Measured collectives; those of unequal parts run like those of equal ones.
NAMES = tuple(
    form.name for form in FORMS.values() if not form.is_unequal and form.name != "barrier"
)
#: Published speed with one of 8 NICs lost, as a share of the healthy speed.
PUBLISHED = (0.85, 0.89)


def bound_s(name: str, lost: Sequence[Nic], nbytes: int) -> float:
    """Return a lower bound on the time of any schedule, in units of a NIC's rate."""
    rows = tuple(
        tuple(0 if (node, rail) in lost else WHOLE for rail in range(NICS)) for node in range(NODES)
    )
    cluster = Cluster("", rows, 1, FABRICS[0], nbytes)
    if name == "sendrecv":
        sizes = [
            [nbytes if to == (source + 1) % NODES else 0 for to in range(NODES)]
            for source in range(NODES)
        ]
        return cluster.exchange_bound_s(sizes)
    return cluster.bound_s(Collective[name.upper()], nbytes)


def rows_of(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """Return the JSON objects of jobs by name of their lost NICs, one per job and collective."""
    rows = []
    for lost, outcome in outcomes.items():
        for (phase, name, nbytes), times in outcome.times.items():
            if phase != DEGRADED:
                continue
            healthy = outcome.times[HEALTHY, name, nbytes]
            stats = Stats.of(times.seconds)
            most = bound_s(name, (), nbytes) / bound_s(name, LOST[lost], nbytes)
            rows.append(
                {
                    "measure": "collective",
                    "collective": name,
                    "lost": lost,
                    "nbytes": nbytes,
                    "healthy_s": healthy.median,
                    "healthy_busbw_gb_per_s": busbw(name, NODES, nbytes, healthy.median),
                    "seconds": stats.median,
                    "share": healthy.median / stats.median,
                    "low": healthy.median / stats.high,
                    "high": healthy.median / stats.low,
                    "bound": most,
                    "published_low": PUBLISHED[0] if lost == "1 of 8" else None,
                    "published_high": PUBLISHED[1] if lost == "1 of 8" else None,
                    "cores": statistics.median(times.cores),
                    "shares": outcome.shares,
                }
            )
    return rows


def print_rows(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table, and the published claim below."""
    table = Table("collective", title=f"{NODES} nodes of {NICS} NICs; one node loses some")
    for heading in ("lost", "healthy\nms", "ms", "share of\nhealthy", "quartiles", "most", "cores"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["collective"],
            row["lost"],
            f"{1e3 * row['healthy_s']:.0f}",
            f"{1e3 * row['seconds']:.0f}",
            f"{row['share']:.1%}",
            f"{row['low']:.1%}-{row['high']:.1%}",
            f"{row['bound']:.1%}",
            f"{row['cores']:.2f}",
        )
    out.print(table)
    sizes = ", ".join(dict.fromkeys(format_size(row["nbytes"]) for row in rows))
    low, high = PUBLISHED
    out.print(
        f"{sizes}; share: median healthy time / median time; most: what no schedule can exceed; "
        f"published for 1 of 8: {low:.0%}-{high:.0%}; every result was right"
    )


__all__ = ["LOST", "NAMES", "NICS", "NODES", "PUBLISHED", "bound_s", "print_rows", "rows_of"]
