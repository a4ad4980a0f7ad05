"""Draw a table: every row a line, with what was published, the closed form, and the simulation.

Needs matplotlib, of r2ccl's extra `demo`; nothing else here does.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

_MARKS = {"paper": "D", "model": "x", "simulated": "o", "measured": "s"}
_INCHES_PER_ROW = 0.22


class Line(NamedTuple):
    """One row of a table: what it is of, and the figures of its columns that are numbers."""

    label: str
    figures: dict[str, float]


def require_matplotlib() -> None:
    """Refuse to start what could not be drawn in the end.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    if util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib; install r2ccl[demo], or leave --plot out")


def lines_of(results: Sequence[dict[str, Any]]) -> tuple[str, list[Line]]:
    """Name the axis of a saved table, and give its rows; those without a simulation are left out.

    Tables of allreduces are drawn as T/T0, those of steps and requests by their overhead.
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
    """Spell what a row is of; numbers say of what they are."""
    said = [(name, row[name]) for name in names if row[name] is not None]
    return ", ".join(f"{name} {value}" if isinstance(value, int) else value for name, value in said)


def _figures(row: dict[str, Any], columns: dict[str, str]) -> dict[str, float]:
    numbers = {name: _number(row[column]) for name, column in columns.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: object) -> float | None:
    """Read a column; a published range or bound is no point on an axis."""
    try:
        return float(str(value))
    except ValueError:
        return None


def plot(path: Path, title: str, results: Sequence[dict[str, Any]]) -> None:
    """Draw a saved table to `path`; the ending names the format."""
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
