"""Picture of the GPT demo: the losses of both runs, and their tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from demos.run import Step
from matplotlib.figure import Figure


class Mark(NamedTuple):
    """Event of the run with failures: its name, its time (CLOCK_MONOTONIC seconds), its step."""

    name: str
    time_s: float
    step: int


def rates(steps: Sequence[Step], ntokens: int) -> tuple[list[float], list[float]]:
    """Return the time of each step but the first, from the first, and its tokens per second."""
    began_s = steps[0].begun_s
    pairs = list(pairwise(steps))
    times = [after.begun_s - began_s for _, after in pairs]
    return times, [ntokens / (after.begun_s - before.begun_s) for before, after in pairs]


def plot(
    path: Path, healthy: Sequence[Step], faulty: Sequence[Step], marks: Sequence[Mark], ntokens: int
) -> None:
    """Plot both runs on each other; `ntokens` is the number of tokens in a step of all ranks."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    losses, speeds = figure.subplots(2, 1)
    runs = (
        ("no failure", healthy, {"color": "tab:orange", "linewidth": 5, "alpha": 0.5}),
        ("NICs lost and restored", faulty, {"color": "black", "linewidth": 1}),
    )
    for name, steps, style in runs:
        losses.plot([step.loss for step in steps], label=name, **style)
        speeds.plot(*rates(steps, ntokens), label=name, **style)
    for mark in marks:
        for axes, at in ((losses, mark.step), (speeds, mark.time_s - faulty[0].begun_s)):
            axes.axvline(at, color="tab:red", linestyle="--", linewidth=1)
            axes.annotate(
                f" {mark.name}", (at, 1), xycoords=("data", "axes fraction"),
                va="top", fontsize="small", color="tab:red",
            )  # fmt: skip
    losses.set(xlabel="step", ylabel="nats per character", title="Loss, mean of all ranks")
    speeds.set(xlabel="seconds after the first step", ylabel="tokens per second")
    speeds.set(title="Throughput of all ranks")
    speeds.set_ylim(bottom=0)
    losses.legend(loc="center right")
    speeds.legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
