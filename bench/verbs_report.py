"""Rows and tables of the verbs bench.

The ratio of a row is the median of the ratios of its rounds: r2ccl's bandwidth or latency divided
by perftest's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from common import Stats
from verbs_pair import Measured

from r2ccl.cli.values import format_size

SLICES, MESSAGES, LATENCY = "slices", "messages", "latency"
_SPELLED = {"0": "off", "1": "on"}


class Sample(NamedTuple):
    """Seconds and processor seconds of one message, and perftest's seconds; 0: not measured."""

    message_s: float
    peer_message_s: float
    sender_cpu_s: float
    receiver_cpu_s: float


class Holding(NamedTuple):
    """Resident set sizes of both nodes in bytes, after `nrequests` work requests of both."""

    nrequests: int
    rss_nbytes: tuple[int, int]


#: By size in bytes, kind and fast path, in the order of the table.
Samples = dict[tuple[int, str, str], list[Sample]]


def sample_of(
    kind: str, nmessages: int, measured: tuple[Measured, Measured], peer_s: float
) -> Sample:
    """Divide the measurements of both ends by the number of messages in one direction.

    For runs of latency, the time of a message is half the median round trip.
    """
    sender, receiver = measured
    if kind == LATENCY:
        message_s = statistics.median(sender.trips_s) / 2
    else:
        message_s = sender.seconds / nmessages
    return Sample(message_s, peer_s, sender.cpu_s / nmessages, receiver.cpu_s / nmessages)


def growth_of(held: Sequence[Holding]) -> tuple[Holding, Holding]:
    """Return the first sample after a tenth of the requests (the warm-up), and the last sample."""
    last = held[-1]
    return next(each for each in held if each.nrequests * 10 >= last.nrequests), last


def rows_of(samples: Samples, npaths: int, window: int) -> list[dict[str, Any]]:
    """Return one JSON object per size, kind and fast path.

    ``ratio`` is r2ccl's value divided by perftest's in the same round: bandwidths, or latencies.
    """
    rows = []
    for (nbytes, kind, fastpath), each in samples.items():
        message_s = Stats.of([one.message_s for one in each])
        row: dict[str, Any] = {
            "measure": kind,
            "nbytes": nbytes,
            "fastpath": fastpath,
            "rails": npaths,
            "rounds": len(each),
            "message_us": message_s.median * 1e6,
            "messages_per_s": 1 / message_s.median,
            "mb_per_s": nbytes / message_s.median / 1e6,
            "sender_cpu_us": statistics.median(one.sender_cpu_s for one in each) * 1e6,
            "receiver_cpu_us": statistics.median(one.receiver_cpu_s for one in each) * 1e6,
            "window": window if kind == SLICES else None,
        }
        if each[0].peer_message_s:
            peer_s = statistics.median(one.peer_message_s for one in each)
            ratios = [one.peer_message_s / one.message_s for one in each]
            if kind == LATENCY:
                ratios = [1 / ratio for ratio in ratios]
            ratio = Stats.of(ratios)
            row |= {
                "peer": "ib_write_lat" if kind == LATENCY else "ib_write_bw",
                "peer_us": peer_s * 1e6,
                "peer_mb_per_s": nbytes / peer_s / 1e6,
                "ratio": ratio.median,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
            }
        rows.append(row)
    return rows


def bandwidth_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of slices and messages, as lines."""
    headings = (
        "size", "as", "fast path", "MB/s", "ib_write_bw", "ratio (quartiles)", "messages/s",
        "CPU us/message: sender", "receiver",
    )  # fmt: skip
    return lay_out(
        headings,
        [
            (
                format_size(row["nbytes"]), row["measure"], _SPELLED[row["fastpath"]],
                f"{row['mb_per_s']:.2f}",
                spell(row, "peer_mb_per_s", "{:.2f}"), spell_ratio(row),
                f"{row['messages_per_s']:.1f}", f"{row['sender_cpu_us']:.1f}",
                f"{row['receiver_cpu_us']:.1f}",
            )
            for row in rows if row["measure"] != LATENCY
        ],
    )  # fmt: skip


def latency_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of latencies, as lines."""
    return lay_out(
        ("size", "fast path", "half a round trip, us", "ib_write_lat", "ratio (quartiles)"),
        [
            (
                format_size(row["nbytes"]), _SPELLED[row["fastpath"]], f"{row['message_us']:.1f}",
                spell(row, "peer_us", "{:.1f}"), spell_ratio(row),
            )
            for row in rows if row["measure"] == LATENCY
        ],
    )  # fmt: skip


def spell(row: dict[str, Any], name: str, how: str) -> str:
    """Format a value, or return ``-`` if the row does not have it."""
    return how.format(row[name]) if name in row else "-"


def spell_ratio(row: dict[str, Any]) -> str:
    """Format the ratio and its quartiles."""
    if "ratio" not in row:
        return "-"
    return f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"


def lay_out(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (headings, *rows)
    ]


def memory_row(held: Sequence[Holding], fastpath: str) -> dict[str, Any]:
    """Return the row of the nodes' memory at the end and its growth since the warm-up."""
    first, last = growth_of(held)
    return {
        "measure": "memory",
        "fastpath": fastpath,
        "requests": last.nrequests,
        "warm_up_requests": first.nrequests,
        **{f"node{node}_rss_nbytes": last.rss_nbytes[node] for node in (0, 1)},
        **{
            f"node{node}_grown_nbytes": last.rss_nbytes[node] - first.rss_nbytes[node]
            for node in (0, 1)
        },
    }


def memory_line(row: dict[str, Any]) -> str:
    """Format a memory row."""
    nodes = " and ".join(
        f"{row[f'node{node}_rss_nbytes'] / 2**20:.1f} MiB "
        f"({row[f'node{node}_grown_nbytes'] / 1024:+,.0f} KiB)"
        for node in (0, 1)
    )
    return (
        f"memory, fast path {_SPELLED[row['fastpath']]}: {nodes} after {row['requests']:,} work "
        f"requests (since {row['warm_up_requests']:,})"
    )


def native_line(row: dict[str, Any]) -> str:
    """Format a native row."""
    return (
        "fast path without a device, per second: "
        f"{row['writes_per_s']:,.0f} writes posted, {row['receives_per_s']:,.0f} receives posted, "
        f"{row['completions_per_s']:,.0f} completions polled, {row['empty_polls_per_s']:,.0f} "
        "empty polls"
    )


__all__ = [
    "LATENCY",
    "MESSAGES",
    "SLICES",
    "Holding",
    "Sample",
    "Samples",
    "bandwidth_lines",
    "latency_lines",
    "memory_line",
    "memory_row",
    "native_line",
    "rows_of",
    "sample_of",
]
