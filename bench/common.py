"""Utilities of all benches: statistics and JSON output.

A saved result records the machine, the commit and the command that produced it.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from r2ccl.cli.perf.report import save_results


class Stats(NamedTuple):
    """Median and quartiles, in the unit of the samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Stats:
        """Compute median and quartiles; a single sample is all three."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def commit() -> str:
    """Return the commit of this checkout, with ``+changes`` if the working tree differs from it."""
    folder = Path(__file__).resolve().parent
    try:
        name = _git(folder, "rev-parse", "--short=12", "HEAD")
        return name + ("+changes" if _git(folder, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write machine, commit, command, results",
    )


def write_json(path: Path, results: Iterable[dict[str, Any]]) -> None:
    """Write ``{machine, commit, command, results}`` to `path`; `results` are flat objects."""
    save_results(path, results, command(), commit=commit())


def command() -> str:
    """Return the command line that repeats this bench."""
    script = Path(sys.argv[0])
    name = f"{script.parent.name}/{script.name}" if script.parent.name else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


def _git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return run.stdout.strip()


__all__ = [
    "Stats",
    "add_json_argument",
    "command",
    "commit",
    "write_json",
]
