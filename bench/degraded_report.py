"""Evaluate and print the times of the degraded bench.

Times are measured and models are closed forms; nothing here is simulated.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from common import Stats
from degraded_cases import Case
from degraded_job import AGAIN, AUTO, DEGRADED, Outcome, Prediction, Times
from rich.console import Console
from rich.table import Table

from r2ccl.cli.values import format_size

#: Largest regret of a good choice, as a share; readings that differ by more allow more.
TOLERATED = 0.05


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of the planner for one size and pattern of lost NICs, and the best schedule.

    Attributes
    ----------
    pattern : str
        Name of the pattern of lost NICs.
    nbytes : int
    choice : str
    chosen_s, predicted_s : float
        Measured and predicted time of the planner's choice.
    noise : float
        Relative difference between two series of readings of the choice.
    times : dict of str to float
        Measured time of every other candidate, in seconds.
    predictions : dict of str to float
        Predicted time of every candidate, in seconds.
    """

    pattern: str
    nbytes: int
    choice: str
    chosen_s: float
    predicted_s: float
    noise: float
    times: dict[str, float]
    predictions: dict[str, float]

    @property
    def best(self) -> str:
        """Schedule that took the least time."""
        return min({self.choice: self.chosen_s, **self.times}.items(), key=lambda item: item[1])[0]

    @property
    def regret(self) -> float:
        """Extra time of the choice over the best schedule, as a share of the best time."""
        return self.chosen_s / min(self.chosen_s, *self.times.values()) - 1

    @property
    def error(self) -> float:
        """Predicted minus measured time of the choice, as a share of the measured time."""
        return self.predicted_s / self.chosen_s - 1

    @property
    def is_good(self) -> bool:
        """True if the choice is as good as the best, within tolerance and noise."""
        return self.regret <= max(TOLERATED, self.noise)

    def flat(self) -> list[dict[str, Any]]:
        """Return the JSON objects of this point: one for the point, one for each schedule."""
        where = {"pattern": self.pattern, "nbytes": self.nbytes}
        point = {
            "measure": "point", **where, "choice": self.choice, "best": self.best,
            "seconds": self.chosen_s, "predicted_s": self.predicted_s, "error": self.error,
            "regret": self.regret, "noise": self.noise, "is_good": self.is_good,
        }  # fmt: skip
        seconds = {self.choice: self.chosen_s, **self.times}
        candidates = [
            {"measure": "candidate", **where, "schedule": name, "seconds": time,
             "predicted_s": self.predictions[name]}
            for name, time in seconds.items()
        ]  # fmt: skip
        return [point, *candidates]


def points_of(pattern: str, outcome: Outcome) -> list[Point]:
    """Return the points of a job, one per size."""
    by_size: dict[int, list[Prediction]] = {}
    for each in outcome.predictions:
        by_size.setdefault(each.nbytes, []).append(each)
    return [_point(pattern, nbytes, group, outcome) for nbytes, group in by_size.items()]


def _point(pattern: str, nbytes: int, group: Sequence[Prediction], outcome: Outcome) -> Point:
    [chosen] = [each for each in group if each.is_choice]
    one, other = (outcome.times[DEGRADED, name, nbytes] for name in (AUTO, AGAIN))
    return Point(
        pattern=pattern,
        nbytes=nbytes,
        choice=chosen.name,
        chosen_s=statistics.median([*one.seconds, *other.seconds]),
        predicted_s=chosen.seconds,
        noise=abs(one.median / other.median - 1),
        times={
            each.name: outcome.times[DEGRADED, each.name, nbytes].median
            for each in group
            if not each.is_choice
        },
        predictions={each.name: each.seconds for each in group},
    )


def verdict_of(points: Sequence[Point]) -> dict[str, Any]:
    """Return the summary of all points."""
    return {
        "measure": "verdict",
        "points": len(points),
        "share_good": statistics.fmean(point.is_good for point in points),
        "median_regret": statistics.median(point.regret for point in points),
        "worst_regret": max(point.regret for point in points),
        "median_noise": statistics.median(point.noise for point in points),
        "median_error": statistics.median(abs(point.error) for point in points),
        "worst_error": max((point.error for point in points), key=abs),
    }


def schedule_rows(
    table: str,
    case: str,
    cases: Sequence[Case],
    outcome: Outcome,
    fault_free: Times,
    bound: float,
    phase: str = DEGRADED,
) -> list[dict[str, Any]]:
    """Return the JSON objects of the schedules a job ran in `phase`, as multiples of T0.

    `table`, `case`, the schedule's name, `k` and `trees` identify the row of `tables.py`.
    """
    rows = []
    for (of_phase, key, nbytes), times in outcome.times.items():
        for each in cases:
            if of_phase == phase and each.key == key:
                stats = Stats.of(times.seconds)
                rows.append(
                    {
                        "measure": "schedule",
                        "table": table,
                        "case": case,
                        "schedule": each.name,
                        "k": each.k,
                        "trees": each.trees,
                        "nbytes": nbytes,
                        "model": None if each.model is None else float(each.model),
                        "bound": bound,
                        "measured": stats.median / fault_free.median,
                        "low": stats.low / fault_free.median,
                        "high": stats.high / fault_free.median,
                        "seconds": stats.median,
                        "fault_free_s": fault_free.median,
                        "cores": statistics.median(times.cores),
                        "shares": outcome.shares,
                    }
                )
    return rows


def print_cases(out: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the times of schedules as a table."""
    table = Table("lost", "schedule", title=title)
    headings = ("k", "trees", "T*/T0", "model", "measured", "quartiles", "/model", "/T*")
    for heading in (*headings, "s", "T0, s", "cores"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["case"],
            row["schedule"],
            *("-" if row[name] is None else str(row[name]) for name in ("k", "trees")),
            f"{row['bound']:.3f}",
            "-" if row["model"] is None else f"{row['model']:.3f}",
            f"{row['measured']:.3f}",
            f"{row['low']:.3f}-{row['high']:.3f}",
            "-" if row["model"] is None else f"{row['measured'] / row['model']:.3f}",
            f"{row['measured'] / row['bound']:.3f}",
            f"{row['seconds']:.2f}",
            f"{row['fault_free_s']:.2f}",
            f"{row['cores']:.2f}",
        )
    out.print(table)
    sizes = ", ".join(dict.fromkeys(format_size(row["nbytes"]) for row in rows))
    out.print(
        f"{sizes}; medians and quartiles of T/T0; cores: processors the ranks kept busy; "
        "every result was right"
    )


def print_points(out: Console, points: Sequence[Point]) -> None:
    """Print the points of one pattern."""
    table = Table("lost", "size", "choice", "best")
    for heading in ("measured\nms", "predicted\nms", "error", "regret", "A/A", "others, ms"):
        table.add_column(heading, justify="right")
    for point in points:
        others = sorted(point.times.items(), key=lambda item: item[1])
        table.add_row(
            point.pattern,
            format_size(point.nbytes),
            point.choice,
            point.best,
            f"{1e3 * point.chosen_s:.1f}",
            f"{1e3 * point.predicted_s:.1f}",
            f"{point.error:+.1%}",
            f"{point.regret:.1%}" + ("" if point.is_good else " !"),
            f"{point.noise:.1%}",
            ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in others),
        )
    out.print(table)


def print_verdict(out: Console, verdict: dict[str, Any]) -> None:
    """Print the summary of all points."""
    out.print(
        f"{verdict['points']} points: the choice was within max({TOLERATED:.0%}, A/A) of the best "
        f"at {verdict['share_good']:.1%} of them; regret {verdict['median_regret']:.1%} in the "
        f"median, {verdict['worst_regret']:.1%} at worst; A/A {verdict['median_noise']:.1%} in the "
        f"median; predictions were off by {verdict['median_error']:.1%} in the median, "
        f"{verdict['worst_error']:+.1%} at worst; every result was right"
    )


__all__ = [
    "TOLERATED",
    "Point",
    "points_of",
    "print_cases",
    "print_points",
    "print_verdict",
    "schedule_rows",
    "verdict_of",
]
