"""Final report of a demo: comparison of the two runs, and throughput of the rails."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from demos.cluster import RAILS, SAMPLE_S, Sample
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

Array = np.ndarray[Any, np.dtype[np.float64]]

#: Width of the Hann window over which throughput is averaged; it evens out the alternation of
#: computing and sending within each step.
_WINDOW_S = 1.0


class Repaired(NamedTuple):
    """Summary of the repairs after the NIC failure."""

    cause: str
    #: Pairs of a rank and the milliseconds from the NIC failure to the first byte that this rank
    #: received over another rail, earliest first; only ranks that waited for a byte.
    first_bytes_ms: list[tuple[int, float]]
    nbytes_replayed: int


def summarise(repairs: dict[int, list[dict[str, Any]]], cut_s: float) -> Repaired:
    """Summarise the repairs of all ranks; `cut_s` is the time of the failure (CLOCK_MONOTONIC)."""
    everything = [(rank, repair) for rank in repairs for repair in repairs[rank]]
    causes = sorted((repair["failed_s"], repair["cause"]) for _, repair in everything)
    first = [
        (rank, 1e3 * (repair["first_byte_s"] - cut_s))
        for rank, repair in everything
        if repair["first_byte_s"]
    ]
    return Repaired(
        causes[0][1],
        sorted(first, key=lambda item: item[1]),
        sum(repair["nbytes_replayed"] for _, repair in everything),
    )


def print_losses(
    console: Console, without: Sequence[float], with_cut: Sequence[float], part: str
) -> None:
    """Print a table with the mean loss of each `part` in both runs, in full precision."""
    table = Table(part, "loss, no failure", "loss, NIC lost", "same bits")
    for at, (one, other) in enumerate(zip(without, with_cut, strict=True)):
        table.add_row(str(at + 1), f"{one:.9f}", f"{other:.9f}", "yes" if one == other else "NO")
    console.print(table)


def print_repair(console: Console, repaired: Repaired) -> None:
    """Print the evidence of the failure, the recovery times and the bytes replayed."""
    console.print(f"evidence          {repaired.cause}")
    for rank, milliseconds in repaired.first_bytes_ms:
        console.print(f"first byte        {milliseconds:.1f} ms after the failure, at rank {rank}")
    if not repaired.first_bytes_ms:
        console.print("first byte        none: no rank waited for one, or the rail recovered")
    console.print(f"replayed          {repaired.nbytes_replayed / 2**20:.2f} MiB")


def throughput(samples: Sequence[Sample], node: int) -> tuple[Array, Array]:
    """Return sampling times, and the Mbit/s that each NIC of `node` sent at these times.

    The rates have shape (rails, times) and are averaged over `_WINDOW_S`.
    """
    times = np.arange(samples[0].time_s, samples[-1].time_s, SAMPLE_S)
    sampled_at = [sample.time_s for sample in samples]
    weights = np.hanning(round(_WINDOW_S / SAMPLE_S))
    rates = []
    for rail in range(RAILS):
        sent = np.interp(times, sampled_at, [sample.sent[node, rail] for sample in samples])
        mbps = 8e-6 * np.diff(sent, append=sent[-1]) / SAMPLE_S
        rates.append(np.convolve(mbps, weights / weights.sum(), mode="same"))
    return times, np.array(rates)


def plot(path: Path, samples: Sequence[Sample], *, node: int, cut_s: float, title: str) -> None:
    """Plot the stacked throughput of the NICs of `node` over time, and mark the failure."""
    moving = [after for before, after in pairwise(samples) if before.sent != after.sent]
    shown = [s for s in samples if moving[0].time_s - 1 <= s.time_s <= moving[-1].time_s + 1]
    times, rates = throughput(shown, node)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(times - cut_s, rates, labels=[f"rail {rail}" for rail in range(RAILS)])
    axes.axvline(0, color="black", linestyle="--", linewidth=1)
    axes.annotate(" NIC down", (0, 1), xycoords=("data", "axes fraction"), va="top")
    axes.set(xlabel="seconds after the failure", ylabel=f"Mbit/s sent, mean over {_WINDOW_S:g} s")
    axes.set(title=title, xlim=(times[0] - cut_s, times[-1] - cut_s))
    axes.set_ylim(0, 1.15 * float(rates.sum(axis=0).max()))
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
