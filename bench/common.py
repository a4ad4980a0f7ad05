"""Utilities of all benches: sizes, bandwidth factors, statistics, machine description, JSON output.

A saved result records the machine, the commit and the command that produced it. The module imports
nothing of r2ccl, so that benches of other libraries can use it too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

#: Bus bandwidth divided by algorithm bandwidth, per collective (PERFORMANCE.md of nccl-tests).
#: Unequal parts count like equal ones. nccl-tests has no prefix sums; no rank need send or receive
#: the data more than once, so that their factor is 1.
_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(
        (
            *("allgather", "allgatherv", "reduce_scatter", "reduce_scatterv"),
            *("gather", "gatherv", "scatter", "scatterv", "alltoall", "alltoallv"),
        ),
        lambda n: (n - 1) / n,
    ),
    **dict.fromkeys(
        ("broadcast", "reduce", "scan", "exscan", "sendrecv", "barrier"), lambda n: 1.0
    ),
}


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


def parse_size(text: str) -> int:
    """Parse ``"256"``, ``"64K"``, ``"1.5M"``, ``"2G"`` into bytes; units are powers of 1024.

    Raises
    ------
    argparse.ArgumentTypeError
        If `text` is not a size.
    """
    number, unit = text.strip().upper().removesuffix("IB").removesuffix("B"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        nbytes = float(number) * _UNITS[unit]
    except ValueError:
        nbytes = -1.0
    if nbytes < 0 or not nbytes.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 256, 64K, 1.5M or 2G")
    return int(nbytes)


def parse_sizes(text: str) -> list[int]:
    """Parse a comma-separated list of sizes."""
    return [parse_size(part) for part in text.split(",")]


def parse_counts(text: str) -> list[int]:
    """Parse a comma-separated list of numbers above 0."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers; write 2,4")
    return counts


def format_size(nbytes: int) -> str:
    """Format a number of bytes: ``"256 B"``, ``"64 KiB"``, ``"1 MiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def size_range(begin: int, end: int, *, step: int, factor: float) -> Iterator[int]:
    """Yield sizes from `begin` to `end`: times `factor` if that is above 1, else plus `step`.

    Raises
    ------
    ValueError
        If `step` and `factor` never reach `end`.
    """
    if factor <= 1 and step <= 0:
        raise ValueError(f"step {step} and factor {factor} never reach {end} from {begin}")
    size = begin
    while size <= end:
        yield size
        # Add at least one byte, so that a range from 0 or with a small factor ends.
        size = max(int(size * factor), size + 1) if factor > 1 else size + step


def algbw(nbytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth in GB/s (1e9 bytes)."""
    return nbytes / seconds / 1e9


def busbw(collective: str, nranks: int, nbytes: int, seconds: float) -> float:
    """Return the bus bandwidth in GB/s (1e9 bytes): the load of each rank's NIC, per direction."""
    return algbw(nbytes, seconds) * _BUS_FACTORS[collective](nranks)


def machine() -> dict[str, Any]:
    """Return what results depend on: processor, memory, kernel and package versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


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
    document = {
        "machine": machine(),
        "commit": commit(),
        "command": command(),
        "results": list(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def command() -> str:
    """Return the command line that repeats this bench."""
    script = Path(sys.argv[0])
    name = f"{script.parent.name}/{script.name}" if script.parent.name else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


_PACKAGES = ("r2ccl", "numpy", "torch", "mpi4py", "mpich", "openmpi")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    # Arm kernels give no model name.
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return run.stdout.strip()


__all__ = [
    "Stats",
    "add_json_argument",
    "algbw",
    "busbw",
    "command",
    "commit",
    "format_size",
    "machine",
    "parse_counts",
    "parse_size",
    "parse_sizes",
    "size_range",
    "write_json",
]
