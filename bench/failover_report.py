"""How the failover bench shows its results: a line per fault, a table, a drawing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_HEADINGS = (
    "runs",
    "detection\nms",
    "repair\nms",
    "slowest\nms",
    "last rank\nms",
    "replayed\nMiB",
    "before\nMbit/s",
    "during\nMbit/s",
    "after\nMbit/s",
)
_PHASES = ("before", "during", "after")


def median(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Median of a field over the rows that have it."""
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else None


def by_kind(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Put the rows of each kind of fault together, in the order of their first ones."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["fault"], []).append(row)
    return kinds


def spell(value: float | None, digits: int = 1) -> str:
    """Spell a number, or that there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_incident(console: Console, row: dict[str, Any]) -> None:
    """Print one fault as it is over."""
    console.print(
        f"{row['run']:>3} {row['target']:<58} found {spell(row['detection_ms'])} ms,"
        f" first byte {spell(row['repair_ms'])} ms, {row['nbytes_replayed'] / 2**20:.2f} MiB again",
        style="dim",
        soft_wrap=True,
    )


def print_summary(
    console: Console, rows: Sequence[dict[str, Any]], goodput: Sequence[dict[str, Any]]
) -> None:
    """Print medians per kind of fault, and the two answers on throughput."""
    table = Table("fault", title="Medians; times from the cut, throughput per rank")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for kind, group in by_kind(rows).items():
        repairs = [row["repair_ms"] for row in group if row["repair_ms"] is not None]
        replayed = median(group, "nbytes_replayed")
        assert replayed is not None
        table.add_row(
            kind,
            str(len(group)),
            spell(median(group, "detection_ms")),
            spell(median(group, "repair_ms")),
            spell(max(repairs, default=None)),
            spell(median(group, "last_repair_ms")),
            spell(replayed / 2**20, 2),
            *(spell(median(group, f"{phase}_mbps"), 0) for phase in _PHASES),
        )
    console.print(table)
    console.print(
        "detection: the first rank knows. repair: the first byte sent again, or held back by the "
        "fault, arrives at its receiver over another rail; last rank: the same for the last rank "
        "that waits for one. '-': nothing moved. during: the operations the fault met; after: the "
        "next ones, with the fault still there (flap, stop: over)."
    )
    for row in goodput:
        shares = ", ".join(
            f"{100 * row[name]:.1f} % of {what}"
            for name, what in (
                ("share_of_line_rate", "the shaped line rate"),
                ("share_of_healthy", "healthy"),
            )
            if name in row
        )
        console.print(f"goodput, {row['state']}: {row['mbps']:.0f} Mbit/s per rank = {shares}")
    console.print(f"every element of every operation of {len(rows)} faults was right")


def plot(path: Path, rows: Sequence[dict[str, Any]], line_mbps: float) -> None:
    """Draw detection and repair of every run, and throughput around the faults."""
    from matplotlib.figure import Figure

    kinds = by_kind(rows)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, throughput = figure.subplots(1, 2)
    for name, colour, shift in (("detection_ms", "C0", -0.12), ("repair_ms", "C1", 0.12)):
        points = [
            (at + shift, row[name])
            for at, group in enumerate(kinds.values())
            for row in group
            if row[name] is not None
        ]
        if points:
            label = name.removesuffix("_ms")
            times.scatter(*zip(*points, strict=True), s=14, color=colour, alpha=0.6, label=label)
    times.set(yscale="log", ylabel="ms after the cut", title="Detection and repair, every run")
    times.axhline(20, color="grey", linewidth=0.8, linestyle=":", label="20 ms")
    times.set_xlim(-0.5, len(kinds) - 0.5)
    times.legend()
    for number, phase in enumerate(_PHASES):
        heights = [median(group, f"{phase}_mbps") or 0.0 for group in kinds.values()]
        places = [at + 0.27 * (number - 1) for at in range(len(kinds))]
        throughput.bar(places, heights, width=0.25, label=phase)
    throughput.axhline(line_mbps, color="grey", linewidth=0.8, linestyle=":", label="line rate")
    throughput.set(
        ylabel="Mbit/s of goodput per rank", title="Throughput around the fault, medians"
    )
    throughput.set_ylim(top=1.2 * line_mbps)
    throughput.legend(fontsize="small", ncols=4, loc="upper center")
    for axes in (times, throughput):
        axes.set_xticks(range(len(kinds)), list(kinds), rotation=30, ha="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


__all__ = ["plot", "print_incident", "print_summary"]
