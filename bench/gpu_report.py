"""Report of the GPU bench: flat rows for JSON, tables of these rows, and speed thresholds.

A ratio is the bandwidth of the measured kernel or allreduce divided by that of the one it is
compared with. It is computed for each round; the median of the rounds is reported. A ratio above 1
means that the measured one is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gpu_collectives as collectives
from common import Stats
from gpu_kernels import COPY, IN_PLACE, PEERS
from gpu_kernels import Found as FoundKernels
from gpu_outcome import Outcome
from verbs_report import lay_out

from r2ccl.cli.perf.forms import algbw, busbw
from r2ccl.cli.values import format_size

#: Element types and smallest size in bytes for which kernels have thresholds, and the threshold:
#: their share of the copy's bandwidth.
_HELD_TYPES, _HELD_NBYTES, _NEEDED_OF_COPY = ("float32", "float16", "bfloat16"), 256 << 20, 0.9
#: Threshold of an in-place addition, as a share of a peer's bandwidth. Two loops of the same kernel
#: differ by half a percent.
_NEEDED_OF_PEER = 0.995
#: Number of ranks and smallest size in bytes for which allreduces have thresholds, and the
#: thresholds by name of the way, as multiples of NCCL's bandwidth.
_HELD_NRANKS, _HELD_ALLREDUCE_NBYTES = 4, 64 << 20
_NEEDED_OF_NCCL = {collectives.IPC.name: 3.0, collectives.CUT.name: 1.0}


def kernel_rows(found: FoundKernels) -> list[dict[str, Any]]:
    """Return one flat object per element type, size and kernel.

    ``ratio_copy`` compares the bandwidth with that of a copy. ``ratio_cupy`` and ``ratio_torch``
    compare in-place additions with those libraries, if they are available.
    """
    rows = []
    for (dtype, nbytes, name), series in found.items():
        if not (series.seconds and found[dtype, nbytes, COPY].seconds):
            continue  # the bench ended before this measurement
        moved = nbytes * series.narrays
        speed = Stats.of([moved / seconds / 1e9 for seconds in series.seconds])
        copy = found[dtype, nbytes, COPY]
        row: dict[str, Any] = {
            "measure": "peer" if name in PEERS else "copy" if name == COPY else "kernel",
            "dtype": dtype,
            "nbytes": nbytes,
            "name": name,
            "gb_per_s": speed.median,
            "gb_per_s_low": speed.low,
            "gb_per_s_high": speed.high,
            "wrong": series.nwrong,
            "rounds": len(series.seconds),
            **_ratio("copy", series.seconds, copy.seconds, series.narrays / copy.narrays),
        }
        if row["measure"] == "kernel":
            if dtype in _HELD_TYPES and nbytes >= _HELD_NBYTES:
                row |= _held(row, "copy", _NEEDED_OF_COPY)
            for peer in PEERS if name.endswith(IN_PLACE) else ():
                if (dtype, nbytes, peer) in found:
                    row |= _ratio(peer, series.seconds, found[dtype, nbytes, peer].seconds)
                    if nbytes >= _HELD_NBYTES:
                        row |= _held(row, peer, _NEEDED_OF_PEER)
        rows.append(row)
    return rows


def kernel_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Format the rows of kernels as a table."""
    return lay_out(
        ("type", "size", "what", "GB/s (quartiles)", "of copy", "of CuPy", "of torch", "wrong"),
        [
            (
                row["dtype"], format_size(row["nbytes"]), row["name"], _spread(row, "gb_per_s"),
                *(_spell(row, each) for each in ("copy", *PEERS)), str(row["wrong"]),
            )
            for row in rows
        ],
    )  # fmt: skip


def allreduce_rows(nranks: int, found: collectives.Found) -> list[dict[str, Any]]:
    """Return one flat object per size, element type and way, with ``ratio_nccl`` if NCCL ran."""
    rows = []
    for (way, cell), series in sorted(found.items(), key=lambda item: item[0][1][::-1]):
        if not series.seconds:
            continue  # the bench ended before this measurement
        us = Stats.of([seconds * 1e6 for seconds in series.seconds])
        row: dict[str, Any] = {
            "measure": "allreduce",
            "nranks": nranks,
            "dtype": cell.dtype,
            "nbytes": cell.nbytes,
            "name": way,
            "us": us.median,
            "us_low": us.low,
            "us_high": us.high,
            "algbw_gb_per_s": algbw(cell.nbytes, us.median / 1e6),
            "busbw_gb_per_s": busbw("allreduce", nranks, cell.nbytes, us.median / 1e6),
            "wrong": series.nwrong,
            "differing": series.ndiffering,
            "repairs": series.nrepairs,
            "rounds": len(series.seconds),
        }
        nccl = found.get((collectives.NCCL.name, cell))
        if nccl is not None and nccl.seconds and way != collectives.NCCL.name:
            row |= _ratio("nccl", series.seconds, nccl.seconds)
            is_held = nranks == _HELD_NRANKS and cell.nbytes >= _HELD_ALLREDUCE_NBYTES
            if is_held and way in _NEEDED_OF_NCCL:
                row |= _held(row, "nccl", _NEEDED_OF_NCCL[way])
        rows.append(row)
    return rows


def allreduce_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Format the rows of allreduces as a table."""
    return lay_out(
        ("size", "type", "way", "us (quartiles)", "algbw", "busbw", "x NCCL", "wrong", "differing"),
        [
            (
                format_size(row["nbytes"]), row["dtype"], row["name"], _spread(row, "us"),
                f"{row['algbw_gb_per_s']:.3f}", f"{row['busbw_gb_per_s']:.3f}",
                _spell(row, "nccl"), str(row["wrong"]), str(row["differing"]),
            )
            for row in rows
        ],
    )  # fmt: skip


def judge(outcome: Outcome, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to an outcome, with their wrong elements and missed thresholds.

    Wrong elements of another library do not fail the bench; they are listed as left out.
    """
    outcome.rows += rows
    for row in rows:
        what = f"{row['name']} of {row['dtype']}, {format_size(row['nbytes'])}"
        if "nranks" in row:
            what += f", {row['nranks']} ranks"
        nwrong = row["wrong"] + row.get("differing", 0)
        is_ours = row["name"] not in (*PEERS, collectives.NCCL.name)
        if nwrong:
            where = outcome.failures if is_ours else outcome.left_out
            where.append(f"{what}: {nwrong} wrong elements")
        for other in ("copy", *PEERS, "nccl"):
            if row.get(f"meets_{other}") is False:
                ratio, needed = row[f"ratio_{other}"], row[f"needs_{other}"]
                outcome.missed.append(f"{what}: {ratio:.3f} of {other}, needed {needed:g}")


def _ratio(
    other: str, seconds: Sequence[float], others: Sequence[float], work: float = 1.0
) -> dict[str, Any]:
    """Return the ratio of bandwidths, round by round.

    `work` is the number of bytes moved in `seconds` divided by the number moved in `others`.
    """
    rounds = zip(seconds, others, strict=False)
    ratio = Stats.of([work * theirs / ours for ours, theirs in rounds])
    return {
        f"ratio_{other}": ratio.median,
        f"ratio_{other}_low": ratio.low,
        f"ratio_{other}_high": ratio.high,
    }


def _held(row: dict[str, Any], other: str, needed: float) -> dict[str, Any]:
    return {f"needs_{other}": needed, f"meets_{other}": row[f"ratio_{other}"] >= needed}


def _spread(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:,.1f} ({row[f'{name}_low']:,.1f}-{row[f'{name}_high']:,.1f})"


def _spell(row: dict[str, Any], other: str) -> str:
    """Format a ratio, with its threshold if it has one."""
    if f"ratio_{other}" not in row:
        return "-"
    spelled = f"{row[f'ratio_{other}']:.3f}"
    if f"meets_{other}" not in row:
        return spelled
    verdict = "pass" if row[f"meets_{other}"] else "FAIL"
    return f"{spelled} >= {row[f'needs_{other}']:g} {verdict}"


__all__ = ["allreduce_lines", "allreduce_rows", "judge", "kernel_lines", "kernel_rows"]
