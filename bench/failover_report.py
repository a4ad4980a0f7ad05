"""Print and draw the results of the failover bench."""

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
    "struck\nMbit/s",
    "during\nMbit/s",
    "after\nMbit/s",
)
_PHASES = ("before", "struck", "during", "after")
#: Seconds to draw before a cut or a return, and after a return.
_LEAD_S, _TAIL_S = 1.5, 5.0


def median(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the median of a field over the rows that have it."""
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else None


def by_kind(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group rows by kind of fault, in order of first appearance."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["fault"], []).append(row)
    return kinds


def spell(value: float | None, digits: int = 1) -> str:
    """Format a number; None is ``-``."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_incident(console: Console, row: dict[str, Any]) -> None:
    """Print the row of one fault."""
    console.print(
        f"{row['run']:>3} {row['target']:<58} found {spell(row['detection_ms'])} ms,"
        f" first byte {spell(row['repair_ms'])} ms, "
        f"{row['nbytes_replayed'] / 2**20:.2f} MiB replayed",
        style="dim",
        soft_wrap=True,
    )


def print_summary(
    console: Console, rows: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]
) -> None:
    """Print medians per kind of fault, and goodput in each state."""
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
        "detection: the first rank notices. repair: the first byte replayed, or delayed by the "
        "fault, arrives at its receiver over another rail; last rank: the same for the last rank "
        "that waits for one. '-': nothing moved. struck: operations interrupted by the fault; "
        "before, during, after: steady states without it, with it (flap, stop: it ends by "
        "itself), without it."
    )
    for row in states:
        console.print(
            f"goodput, {row['state']}: median {row['mbps']:.0f} Mbit/s per rank = "
            f"{100 * row['share_of_bound']:.1f} % of the best possible schedule and "
            f"{100 * row['share_of_healthy']:.1f} % of healthy; worst of {row['ncalls']}: "
            f"{row['worst_mbps']:.0f} Mbit/s = {100 * row['worst_share_of_bound']:.1f} %"
        )
    console.print(f"every element of every operation of {len(rows)} faults was right")


def plot(
    path: Path, rows: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]], line_mbps: float
) -> None:
    """Draw detection and repair of every run, and throughput over time around the first fault."""
    from matplotlib.figure import Figure

    kinds = by_kind([row for row in rows if row["measure"] == "fault"])
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    times, cut, back = figure.subplots(1, 3, width_ratios=(3, 4, 3))
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
    times.set_xticks(range(len(kinds)), list(kinds), rotation=30, ha="right")
    times.set_xlim(-0.5, len(kinds) - 0.5)
    times.legend()
    staying = [kind for kind, group in kinds.items() if group[0]["lasts_s"] is not None]
    kind = next(iter(staying or kinds))
    spans = [row["lasts_s"] or _TAIL_S for row in kinds[kind]]
    for axes, word, shifts, reach_s in (
        (cut, "cut", [0.0] * len(spans), min(spans)),
        (back, "return", spans, _TAIL_S),
    ):
        for row, shift in zip(kinds[kind], shifts, strict=True):
            calls = [
                each
                for each in rows
                if (each["measure"], each["fault"], each["run"]) == ("call", kind, row["run"])
            ]
            ends = [each["ended_s"] - shift for each in calls]
            speeds = [each["mbps"] for each in calls]
            axes.step(ends, speeds, where="pre", color="C0", linewidth=0.8, alpha=0.6)
        axes.axvline(0, color="C3", linewidth=0.8)
        for state in states:
            if state["state"] in ("healthy", f"under {kind}"):
                axes.axhline(
                    state["bound_mbps"], color="grey", linewidth=0.8, linestyle=":",
                )  # fmt: skip
        axes.set(
            xlim=(-_LEAD_S, reach_s), ylim=(0, 1.1 * line_mbps), xlabel=f"s after the {word}",
            title=f"{kind}: calls around the {word}, every run",
        )  # fmt: skip
    cut.set_ylabel("Mbit/s of goodput per rank (dotted: bounds)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


__all__ = ["plot", "print_incident", "print_summary"]
