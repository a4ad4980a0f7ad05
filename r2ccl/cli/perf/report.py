"""Table of measurements, in the columns of nccl-tests, and their JSON document."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from r2ccl.cli.perf.cases import Case
from r2ccl.cli.perf.forms import algbw, busbw
from r2ccl.cli.perf.options import NCCL_NAMES, PerfOptions
from r2ccl.cli.results import write_file
from r2ccl.planning.planner import Explanation
from r2ccl.runtime.announcement import describe_transport
from r2ccl.runtime.status import RailHealth


def row_of(
    case: Case, placement: str, options: PerfOptions, seconds: float, wrong: int | None
) -> dict[str, Any]:
    """Return the JSON object of one measurement.

    `placement` is "out_of_place" or "in_place"; `seconds` is the time of one call; `wrong` is the
    number of wrong elements (None if wrong elements were not counted).
    """
    return {
        "collective": case.form.name,
        "nranks": case.nranks,
        "nthreads": options.nthreads,
        "ngpus": options.ngpus,
        "ngrouped": options.ngrouped,
        "is_blocking": options.is_blocking,
        "nbytes": case.nbytes,
        "count": case.count,
        "dtype": case.dtype.name,
        "op": case.op if case.form.reduces else "none",
        "root": case.root if case.form.is_rooted else -1,
        "placement": placement,
        "time_us": seconds * 1e6,
        "algbw_gb_per_s": algbw(case.nbytes, seconds),
        "busbw_gb_per_s": busbw(case.form.name, case.nranks, case.nbytes, seconds),
        "wrong": wrong,
    }


_HALF = f"{'time':>9}{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
_HALF_UNITS = f"{'(us)':>9}{'(GB/s)':>8}{'(GB/s)':>8}{'':>7}"
HEADER = f"""\
#
#{"":53}{"out-of-place":^32}{"in-place":^32}
#{"size":>12}{"count":>14}{"type":>11}{"redop":>8}{"root":>8}{_HALF}{_HALF}
#{"(B)":>12}{"(elements)":>14}{"":27}{_HALF_UNITS}{_HALF_UNITS}"""


def format_line(case: Case, halves: Sequence[dict[str, Any] | None]) -> str:
    """Format a line of the table from the out-of-place and the in-place result of a case.

    The in-place result is None if the collective cannot run in place.
    """
    name = NCCL_NAMES.get(case.dtype.name, case.dtype.name)
    op = case.op if case.form.reduces else "none"
    root = case.root if case.form.is_rooted else -1
    line = f" {case.nbytes:>12}{case.count:>14}{name:>11}{op:>8}{root:>8}"
    for half in halves:
        if half is None:
            line += f"{'N/A':>9}{'N/A':>8}{'N/A':>8}{'N/A':>7}"
            continue
        wrong = "N/A" if half["wrong"] is None else half["wrong"]
        line += f"{half['time_us']:>9.{2 if half['time_us'] < 1e4 else 0}f}"
        line += f"{half['algbw_gb_per_s']:>8.2f}{half['busbw_gb_per_s']:>8.2f}{wrong:>7}"
    return line


def describe(options: PerfOptions, nranks: int) -> str:
    """Return the first line of the output: the options of the run."""
    step = f"{options.factor:g}(factor)" if options.factor > 1 else f"{options.step}(bytes)"
    return (
        f"# nThread {options.nthreads} nGpus {options.ngpus} nRanks {nranks}"
        f" minBytes {options.minbytes} maxBytes {options.maxbytes} step: {step}"
        f" warmup iters: {options.warmup} iters: {options.iterations}"
        f" agg iters: {options.ngrouped} blocking: {int(options.is_blocking)}"
        f" validation: {options.nchecks}"
    )


def describe_paths(rails: Sequence[RailHealth], call: Explanation) -> str:
    """Return the second line of the output: the transport of host arrays, and rank 0's rails.

    `rails` are the rails of rank 0. `call` is the planner's explanation of an allreduce of the
    largest size.
    """
    transport = describe_transport(
        has_rdma=any(not rail.address for rail in rails),
        is_local=call.is_local,
        is_shared=call.is_local or call.nchunks > 0,
    )
    names = ", ".join(f"{rail.rail} {rail.name}" for rail in rails)
    return f"# transport of host arrays: {transport}; rails of rank 0: {names}"


def machine() -> dict[str, Any]:
    """Return the properties that results depend on: processor, memory, kernel and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def save_results(
    path: Path, results: Iterable[dict[str, Any]], command: str, *, commit: str = ""
) -> None:
    """Write ``{machine, commit, command, results}`` to `path`; `results` are flat objects.

    If `commit` is empty, it is left out. ``machine`` contains the version of r2ccl if it is
    installed as a package. A missing folder is made.

    Raises
    ------
    InvalidArgument
        If the file cannot be written.
    """
    document = {
        "machine": machine(),
        **({"commit": commit} if commit else {}),
        "command": command,
        "results": list(results),
    }
    write_file(path, document)


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Return the number of wrong elements in all `rows` and a verdict, such as ``0 OK``.

    If no row has a number of wrong elements, return ``not checked``.
    """
    checked = [each["wrong"] for each in rows if each["wrong"] is not None]
    if not checked:
        return "not checked"
    wrong = sum(checked)
    if wrong:
        return f"{wrong} FAILED"
    return "0 OK" if len(checked) == len(rows) else f"0 OK ({len(rows) - len(checked)} not checked)"


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


__all__ = [
    "HEADER",
    "describe",
    "describe_paths",
    "format_line",
    "machine",
    "row_of",
    "save_results",
    "verdict",
]
