"""What the demo shows at its end: the two runs side by side, and the throughput of the rails."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from digits.cluster import RAILS, Sample
from rich.console import Console
from rich.table import Table

#: Throughput is averaged over this long: steps of the training take turns of computing and sending.
_WINDOW_S = 0.5


class Repaired(NamedTuple):
    """What became of the cut."""

    cause: str
    #: Milliseconds from the cut to the first byte over another rail, at each rank that waited for
    #: one, in order of time.
    first_bytes_ms: list[tuple[int, float]]
    nbytes_replayed: int


def summarise(repairs: dict[int, list[dict[str, Any]]], cut_s: float) -> Repaired:
    """Put the repairs of all ranks together; `cut_s` is CLOCK_MONOTONIC seconds, as theirs."""
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


def print_losses(console: Console, without: Sequence[float], with_cut: Sequence[float]) -> None:
    """Print the mean loss of every epoch, side by side, to the last digit."""
    table = Table("epoch", "loss, no failure", "loss, NIC lost", "same bits")
    for epoch, (one, other) in enumerate(zip(without, with_cut, strict=True)):
        table.add_row(str(epoch + 1), f"{one:.9f}", f"{other:.9f}", "yes" if one == other else "NO")
    console.print(table)


def print_repair(console: Console, repaired: Repaired) -> None:
    """Print how the cut was found and repaired."""
    console.print(f"evidence          {repaired.cause}")
    for rank, milliseconds in repaired.first_bytes_ms:
        console.print(
            f"first byte        {milliseconds:.1f} ms after the cut, over another rail, at rank {rank}"
        )
    if not repaired.first_bytes_ms:
        console.print("first byte        not recorded: nothing of the cut rail was awaited")
    console.print(f"replayed          {repaired.nbytes_replayed / 2**20:.2f} MiB")


def throughput(samples: Sequence[Sample], node: int, rail: int) -> tuple[list[float], list[float]]:
    """Return times and Mbit/s a NIC sent, averaged over the window before each time."""
    times, rates = [], []
    start = 0
    for end, sample in enumerate(samples):
        while sample.time_s - samples[start].time_s > _WINDOW_S:
            start += 1
        seconds = sample.time_s - samples[start].time_s
        if seconds > _WINDOW_S / 2:
            nbytes = sample.sent[node, rail] - samples[start].sent[node, rail]
            times.append(sample.time_s)
            rates.append(8e-6 * nbytes / seconds)
    return times, rates


def plot(path: Path, samples: Sequence[Sample], *, node: int, cut_s: float, title: str) -> None:
    """Draw what each NIC of `node` sent over time, with the cut."""
    from matplotlib.figure import Figure

    moving = [after for before, after in pairwise(samples) if before.sent != after.sent]
    shown = [s for s in samples if moving[0].time_s - 0.5 <= s.time_s <= moving[-1].time_s + 0.5]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for rail in range(RAILS):
        times, rates = throughput(shown, node, rail)
        axes.plot([time - cut_s for time in times], rates, label=f"rail {rail}")
    axes.axvline(0, color="black", linestyle="--", linewidth=1)
    axes.annotate("NIC down", (0, 1), xycoords=("data", "axes fraction"), va="top", ha="right",
                  rotation=90, fontsize="small")  # fmt: skip
    axes.set(xlabel="seconds after the cut", title=title)
    axes.set_ylabel(f"Mbit/s sent, mean over {_WINDOW_S:g} s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", ncols=RAILS)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
