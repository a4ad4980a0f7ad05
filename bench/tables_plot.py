"""Plot a table: one line per row, with published, modelled, simulated and measured values.

Needs matplotlib, from r2ccl's extra `demo`; only this module does.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

_MARKS = {"paper": "D", "model": "x", "simulated": "o", "measured": "s"}
_INCHES_PER_ROW = 0.22


class Line(NamedTuple):
    """Row of a table: its label, and the numbers in its columns."""

    label: str
    figures: dict[str, float]


def require_matplotlib() -> None:
    """Check that matplotlib is installed, before a long simulation starts.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    if util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib; install r2ccl[demo], or omit --plot")


def lines_of(results: Sequence[dict[str, Any]]) -> tuple[str, list[Line]]:
    """Return the axis label of a saved table, and its rows that have a simulation.

    Tables of allreduces are plotted as T/T0, those of steps and requests by their overhead.
    """
    shown = [each for each in results if "simulated" in each]
    if all("overhead" in each for each in shown):
        names = ["ngpus", "setting", "case", "strategy", "quantity"]
        columns = {"paper": "paper_overhead", "model": "model_overhead", "simulated": "overhead"}
        axis = "% above the time without failures"
    else:
        names = ["n", "case", "schedule", "k", "trees", "slices"]
        columns = {name: name for name in _MARKS}
        axis = "T/T0"
    return axis, [Line(_label(each, names), _figures(each, columns)) for each in shown]


def _label(row: dict[str, Any], names: Sequence[str]) -> str:
    """Return the label of a row; integers are preceded by the name of their column."""
    said = [(name, row[name]) for name in names if row[name] is not None]
    return ", ".join(f"{name} {value}" if isinstance(value, int) else value for name, value in said)


def _figures(row: dict[str, Any], columns: dict[str, str]) -> dict[str, float]:
    numbers = {name: _number(row[column]) for name, column in columns.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: object) -> float | None:
    """Return the number in a column; None for a published range or bound, which is no point."""
    try:
        return float(str(value))
    except ValueError:
        return None


def plot(path: Path, title: str, results: Sequence[dict[str, Any]]) -> None:
    """Plot a saved table to `path`; the file's suffix selects the format."""
    from matplotlib.figure import Figure

    axis, lines = lines_of(results)
    figure = Figure(figsize=(11, 2 + _INCHES_PER_ROW * len(lines)), layout="constrained")
    axes = figure.subplots()
    for name, mark in _MARKS.items():
        points = [(line.figures[name], at) for at, line in enumerate(lines) if name in line.figures]
        if points:
            axes.plot(*zip(*points, strict=True), mark, label=name, fillstyle="none")
    axes.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=7)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(axis="y", linewidth=0.3)
    axes.set(xlabel=axis, title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


__all__ = ["Line", "lines_of", "plot", "require_matplotlib"]
