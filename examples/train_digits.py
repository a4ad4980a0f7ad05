"""Train a small network on four nodes, lose a NIC in mid-allreduce, get the same weights.

Runs the same training twice, the second time with a NIC of one node dying inside an allreduce,
and compares everything. Ends with 1 if a single bit differs or the NIC did not die as planned.
Needs the packages of ``pip install r2ccl[demo]``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from digits import cluster, report
from digits.narration import Narration
from digits.rank import BATCH_PER_RANK, nweights
from rich.console import Console
from sklearn.datasets import load_digits

from r2ccl.testing import Action, Fault, FaultPlan

#: Which NIC dies, and before which slice its node sends in the allreduce of the middle step; a
#: rank sends more than 100 slices a step.
NODE, RAIL, AT_SLICE = 1, 2, 40
PNG = Path("out/demo.png")
RANK_PROGRAM = Path(__file__).with_name("digits") / "rank.py"


class Step(NamedTuple):
    """One step of the training, as rank 0 tells it; CLOCK_MONOTONIC seconds."""

    epoch: int
    loss: float
    begun_s: float
    took_s: float


class Run:
    """One training: reads what its ranks say, and keeps it."""

    def __init__(self, folder: Path, narration: Narration) -> None:
        self.folder = folder
        self.steps: list[Step] = []
        self.repairs: dict[int, list[dict[str, Any]]] = {}
        self._narration = narration

    def take(self, line: str) -> None:
        """Take a line of a rank, ``[who] text``: JSON of the demo, or a word of the library's."""
        text = line.partition("] ")[2]
        if not text.startswith("{"):
            self._narration.line(line)
            return
        said = json.loads(text)
        if "repairs" in said:
            self.repairs[said["rank"]] = said["repairs"]
        else:
            self.steps.append(Step(**said))
            self._narration.step(said["epoch"], said["loss"])

    def losses(self) -> list[float]:
        """Mean loss of each epoch."""
        epochs = range(self.steps[-1].epoch + 1)
        return [float(np.mean([s.loss for s in self.steps if s.epoch == at])) for at in epochs]

    def weights(self) -> set[bytes]:
        """Final weights of all ranks: one element if they are equal bit for bit."""
        files = (self.folder / f"weights-{rank}.npy" for rank in range(cluster.NODES))
        return {np.load(file).tobytes() for file in files}

    def step_at(self, time_s: float) -> Step | None:
        """Return the step in whose allreduce that moment lies."""
        inside = (step for step in self.steps if 0 <= time_s - step.begun_s <= step.took_s)
        return next(inside, None)


def cut_time(plan: FaultPlan, run: Run) -> float | None:
    """Return when the NIC was cut (CLOCK_MONOTONIC seconds); None if it was not."""
    if plan.fired:
        return plan.fired[0].time_s
    # Without a lab the rank cuts its own connections; the first of them it knows to be lost, by
    # itself or from a peer that was quicker, tells when.
    lost = (each for each in run.repairs[NODE] if each["rail"] == RAIL)
    return min((each["failed_s"] for each in lost), default=None)


def judge(console: Console, healthy: Run, struck: Run, cut_s: float | None) -> str:
    """Compare the runs and print what is to be seen; return what is wrong, if anything."""
    report.print_losses(console, healthy.losses(), struck.losses())
    step = struck.step_at(cut_s) if cut_s is not None else None
    if cut_s is None or step is None:
        return "the planned fault did not strike inside an allreduce"
    usual_ms = 1e3 * float(np.median([each.took_s for each in healthy.steps]))
    report.print_repair(console, report.summarise(struck.repairs, cut_s))
    console.print(f"that allreduce    {1e3 * step.took_s:.0f} ms, otherwise {usual_ms:.0f} ms")
    if len(healthy.weights() | struck.weights()) > 1:
        return "the final weights differ"
    return ""


def train_twice(
    where: cluster.Where, epochs: int, console: Console, folder: Path
) -> tuple[Run, Run, float | None]:
    """Train without and with the fault; return both runs, and when the NIC was cut."""
    digits = load_digits()
    x = (digits.data / digits.data.max()).astype(np.float32)
    nsteps = epochs * (len(x) // (BATCH_PER_RANK * cluster.NODES))
    middle = nsteps // 2
    fault = Fault(action=Action.NIC_DOWN, node=NODE, rail=RAIL, at_op=middle, at_step=AT_SLICE)
    plan = FaultPlan([fault])

    with Narration(console, epochs, nsteps) as narration:

        def train(name: str, faults: FaultPlan) -> Run:
            run = Run(folder / name.replace(" ", "-"), narration)
            narration.begin(name)
            run.folder.mkdir()
            np.savez(run.folder / "digits.npz", x=x, labels=digits.target)
            argv = [sys.executable, str(RANK_PROGRAM), str(run.folder), str(epochs)]
            where.run(argv, faults, run.take)
            return run

        healthy = train("no failure", FaultPlan())
        struck = train(f"NIC lost in step {middle}", plan)
    return healthy, struck, cut_time(plan, struck)


def demonstrate(where: cluster.Where, epochs: int, console: Console) -> int:
    """Train twice, show everything; return the exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="r2ccl-demo-") as folder:
        healthy, struck, cut_s = train_twice(where, epochs, console, Path(folder))
        wrong = judge(console, healthy, struck, cut_s)
    if where.samples and cut_s is not None:
        title = f"Node {NODE} loses rail {RAIL} in mid-allreduce"
        report.plot(PNG, where.samples, node=NODE, cut_s=cut_s, title=title)
        console.print(f"throughput        drawn in {PNG}")
    else:
        console.print("throughput        not drawn: loopback rails share one interface")
    if wrong:
        console.print(f"[bold red]FAILED[/]: {wrong}")
        return 1
    console.print(
        "[bold green]OK[/]: a NIC died in mid-allreduce, and the final weights are bit for bit "
        f"equal to those without failure, on all ranks ({time.monotonic() - began:.0f} s)",
        soft_wrap=True,
    )
    return 0


def main() -> int:
    """Parse the command line, choose where to run, train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--loopback", action="store_true", help="do without network namespaces")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be above 0")
    console = Console(highlight=False)
    where = cluster.Loopback("as asked for") if args.loopback else cluster.choose()
    console.print(f"[bold]r2ccl demo[/] on {where.name}", soft_wrap=True)
    size = f"{4 * nweights() / 2**20:.1f} MiB"
    console.print(f"{args.epochs} epochs of scikit-learn's digits, a gradient of {size} a step\n")
    try:
        return demonstrate(where, args.epochs, console)
    except cluster.Failed as exc:
        console.print(f"FAILED: {exc}", style="bold red", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
