"""Train a small network on four nodes, lose a NIC in mid-allreduce, get the same weights.

Runs the same training twice, the second time with a NIC of one node dying inside an allreduce,
and compares everything. Ends with 1 if a single bit differs or the NIC did not die as planned.
Needs the packages of ``pip install r2ccl[demo]``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from digits import cluster, report
from digits.rank import BATCH_PER_RANK, nweights
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits

from r2ccl.testing import Action, Fault, FaultPlan

EPOCHS = 6
#: Which NIC dies, and before which slice of its node's sends in the allreduce of the middle step
#: (a rank sends 120 slices or more a step).
NODE, RAIL, AT_SLICE = 1, 2, 40
PNG = Path("out/demo.png")
RANK_PROGRAM = Path(__file__).with_name("digits") / "rank.py"


class Run:
    """One training: reads what its ranks say, and keeps it."""

    def __init__(self, folder: Path, progress: Progress, label: str, nsteps: int) -> None:
        self.folder = folder
        self.losses: list[list[float]] = [[] for _ in range(EPOCHS)]
        self.repairs: dict[int, list[dict[str, Any]]] = {}
        self.allreduce_s: list[float] = []
        self._progress = progress
        self._task = progress.add_task(label, total=nsteps, loss="")

    def take(self, line: str) -> None:
        """Take a line of a rank: JSON of the demo, or a word of the library's."""
        text = line.partition("] ")[2]
        if not text.startswith("{"):
            self._progress.console.print(line, style="dim", markup=False, highlight=False)
            return
        said = json.loads(text)
        if "repairs" in said:
            self.repairs[said["rank"]] = said["repairs"]
        else:
            self.losses[said["epoch"]].append(said["loss"])
            self.allreduce_s.append(said["took_s"])
            self._progress.update(self._task, advance=1, loss=f"loss {said['loss']:.4f}")

    def epoch_losses(self) -> list[float]:
        """Mean loss of each epoch."""
        return [float(np.mean(losses)) for losses in self.losses]

    def weights(self) -> list[bytes]:
        """Final weights of every rank, as bytes."""
        return [np.load(self.folder / f"weights-{n}.npy").tobytes() for n in range(cluster.NODES)]


def save_digits(folder: Path) -> int:
    """Put the data set where the ranks find it; return the number of steps of a training."""
    digits = load_digits()
    np.savez(
        folder / "digits.npz", x=(digits.data / 16).astype(np.float32), labels=digits.target
    )
    return EPOCHS * (len(digits.data) // (BATCH_PER_RANK * cluster.NODES))


def cut_time(plan: FaultPlan, run: Run) -> float | None:
    """Return when the NIC was cut (CLOCK_MONOTONIC seconds); None if it was not."""
    if plan.fired:
        return plan.fired[0].time_s
    # Without a lab a rank cuts its own connections, and knows it at once.
    own = [each["failed_s"] for each in run.repairs.get(NODE, []) if "plan" in each["cause"]]
    return min(own, default=None)


def train(
    where: cluster.Netlab | cluster.Loopback, plan: FaultPlan, run: Run
) -> Run:
    """Train once, with the faults of `plan`."""
    argv = [sys.executable, str(RANK_PROGRAM), str(run.folder), str(EPOCHS)]
    where.run(argv, plan, run.take)
    return run


def main() -> int:
    """Run both trainings, print and draw what came of them; return the exit status."""
    console = Console()
    started = time.monotonic()
    where = cluster.choose()
    console.print(f"[bold]r2ccl demo[/] on {where.name}")
    console.print(f"gradient of {4 * nweights() / 2**20:.1f} MiB a step, {EPOCHS} epochs\n")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[loss]}"))  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="r2ccl-demo-") as one,
        tempfile.TemporaryDirectory(prefix="r2ccl-demo-") as other,
    ):
        nsteps = save_digits(Path(one))
        save_digits(Path(other))
        fault = Fault(
            action=Action.NIC_DOWN, node=NODE, rail=RAIL, at_op=nsteps // 2, at_step=AT_SLICE
        )
        plan = FaultPlan([fault])
        with Progress(*columns, console=console) as progress:
            healthy = Run(Path(one), progress, "without failure", nsteps)
            train(where, FaultPlan(), healthy)
            struck = Run(Path(other), progress, f"NIC dies in step {nsteps // 2 + 1}", nsteps)
            train(where, plan, struck)
        return judge(console, where, healthy, struck, cut_time(plan, struck), started)


def judge(
    console: Console,
    where: cluster.Netlab | cluster.Loopback,
    healthy: Run,
    struck: Run,
    cut_s: float | None,
    started: float,
) -> int:
    """Compare the runs; return 0 if they agree bit for bit although the NIC died."""
    console.print()
    report.print_losses(console, healthy.epoch_losses(), struck.epoch_losses())
    if cut_s is None or not any(struck.repairs.values()):
        console.print("[bold red]FAILED[/]: the planned fault did not strike")
        return 1
    report.print_repair(console, report.summarise(struck.repairs, cut_s))
    step = 1e3 * float(np.median(healthy.allreduce_s))
    hit = 1e3 * max(struck.allreduce_s[len(struck.allreduce_s) // 2 :][:1])
    console.print(f"allreduce         {step:.0f} ms without failure (median), {hit:.0f} ms the one cut")
    if where.samples:
        title = f"Node {NODE} loses rail {RAIL} in mid-allreduce"
        report.plot(PNG, where.samples, node=NODE, cut_s=cut_s, title=title)
        console.print(f"throughput        drawn in {PNG}")
    else:
        console.print("throughput        not drawn: loopback rails share one interface")
    if len(set(healthy.weights() + struck.weights())) > 1:
        console.print("[bold red]FAILED[/]: the final weights differ")
        return 1
    console.print(
        f"[bold green]OK[/]: a NIC died in mid-allreduce, training went on, and the final weights "
        f"are bit for bit equal on all ranks of both runs ({time.monotonic() - started:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
