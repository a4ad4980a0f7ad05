"""Figures of the training and serving tables, and their printing.

Published values, closed forms, simulated and measured values have a column each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from tables_rows import print_notes

SOURCES = {
    "R2CCL": "arXiv:2512.25059 (R2CCL)",
    "R2CCL, NSDI": "R2CCL, the NSDI version of arXiv:2512.25059",
}


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a strategy for a training step or a request.

    Parameters
    ----------
    table, setting, case, strategy : str
        Name of the table; workload; lost NICs; strategy.
    ngpus : int
    quantity : str
        Quantity of `paper`, `model`, `simulated` and `measured`, with its unit.
    simulated : float
    overhead : float
        Simulated time over that without failures, minus 1, in percent.
    paper, paper_overhead : str
        Published value; empty if none was published.
    model, model_overhead : float or None
        Value of the closed form.
    measured : float or None
    source : str
        Key of `SOURCES`, if a value was published.
    """

    table: str
    setting: str
    case: str
    strategy: str
    ngpus: int
    quantity: str
    simulated: float
    overhead: float
    paper: str = ""
    paper_overhead: str = ""
    model: float | None = None
    model_overhead: float | None = None
    measured: float | None = None
    source: str = ""

    def flat(self) -> dict[str, Any]:
        """Return the JSON object of this figure."""
        return msgspec.structs.asdict(self)


def percent(after: float, before: float) -> float:
    """Return how much longer `after` is than `before`, in percent."""
    return 100 * (after / before - 1)


def print_figures(
    console: Console, title: str, rows: Sequence[Figure], notes: Sequence[str]
) -> None:
    """Print a table with its notes and sources."""
    table = Table(title=title)
    for heading in ("GPUs", "setting", "lost", "strategy", "figure"):
        table.add_column(heading)
    for heading in ("paper", "model", "simulated", "measured"):
        table.add_column(heading, justify="right")
    for heading in ("paper", "model", "sim"):
        table.add_column(f"{heading} +%", justify="right")
    before = None
    for row in rows:
        if before and (before.setting, before.ngpus) != (row.setting, row.ngpus):
            table.add_section()
        table.add_row(*_cells(row))
        before = row
    console.print(table)
    print_notes(console, notes, [SOURCES[row.source] for row in rows if row.source])


def _cells(row: Figure) -> list[str]:
    return [
        str(row.ngpus),
        row.setting,
        row.case,
        row.strategy,
        row.quantity,
        row.paper or "-",
        _number(row.model),
        _number(row.simulated),
        "not measured" if row.measured is None else _number(row.measured),
        row.paper_overhead or "-",
        "-" if row.model_overhead is None else _percents(row.model_overhead),
        _percents(row.overhead),
    ]


def _percents(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # the sum has no negative zero


def _number(value: float | None) -> str:
    """Format tokens without decimals, milliseconds to the microsecond."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10_000 else f"{value:.3f}"


__all__ = ["SOURCES", "Figure", "percent", "print_figures"]
