"""Train a small network on four nodes, lose a NIC during an allreduce, get the same weights.

Runs the same training twice. In the second run, a NIC of one node fails during an allreduce. The
program compares the losses and the final weights of both runs. It exits with status 1 if any bit
of the weights differs, or if the NIC did not fail during an allreduce. Needs the packages of
``pip install "r2ccl[compiled,demo]"``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from demos import cluster, report
from demos.narration import Narration
from demos.run import Run
from digits.rank import BATCH_PER_RANK, nweights
from rich.console import Console
from sklearn.datasets import load_digits

from r2ccl.testing import Action, Fault, FaultPlan

#: Node and rail of the NIC that fails, just before the node sends slice `AT_SLICE` of the allreduce
#: in the middle step. A rank sends more than 100 slices per step.
NODE, RAIL, AT_SLICE = 1, 2, 40
PNG = Path("out/demo.png")
RANK_PROGRAM = Path(__file__).with_name("digits") / "rank.py"
#: Timeout of one training run, which takes 6 s on two cores.
_RUN_TIMEOUT_S = 240.0


def judge(console: Console, healthy: Run, faulty: Run, cut_s: float | None) -> str:
    """Compare the runs and print the results; return an error message, empty if all is right."""
    report.print_losses(console, healthy.losses(), faulty.losses(), "epoch")
    step = faulty.step_at(cut_s) if cut_s is not None else None
    if cut_s is None or step is None:
        return "the planned fault did not happen"
    usual_ms = 1e3 * float(np.median([each.took_s for each in healthy.steps]))
    report.print_repair(console, report.summarise(faulty.repairs(RAIL), cut_s))
    console.print(f"that allreduce    {1e3 * step.took_s:.0f} ms; usually {usual_ms:.0f} ms")
    if len(healthy.weights() | faulty.weights()) > 1:
        return "the final weights differ between the runs or between ranks"
    return ""


def train_twice(
    where: cluster.Where, epochs: int, console: Console, folder: Path
) -> tuple[Run, Run, float | None]:
    """Train without and with the fault; return both runs and the time of the NIC failure."""
    digits = load_digits()
    x = (digits.data / digits.data.max()).astype(np.float32)
    nsteps = epochs * (len(x) // (BATCH_PER_RANK * cluster.NODES))
    middle = nsteps // 2
    fault = Fault(action=Action.NIC_DOWN, node=NODE, rail=RAIL, at_op=middle, at_step=AT_SLICE)
    plan = FaultPlan([fault])

    with Narration(console, epochs, nsteps, "epoch") as narration:

        def train(name: str, faults: FaultPlan) -> Run:
            run = Run(folder / name.replace(" ", "-"), narration)
            narration.begin(name)
            run.folder.mkdir()
            np.savez(run.folder / "digits.npz", x=x, labels=digits.target)
            argv = [sys.executable, str(RANK_PROGRAM), str(run.folder), str(epochs)]
            where.run(cluster.Program(argv, _RUN_TIMEOUT_S), faults, run.take)
            return run

        healthy = train("no failure", FaultPlan())
        faulty = train(f"NIC lost in step {middle}", plan)
    return healthy, faulty, faulty.cut_time(plan, fault)


def demonstrate(where: cluster.Where, epochs: int, console: Console) -> int:
    """Train twice, print and plot the comparison; return the exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="r2ccl-demo-") as folder:
        healthy, faulty, cut_s = train_twice(where, epochs, console, Path(folder))
        wrong = judge(console, healthy, faulty, cut_s)
    if where.samples and cut_s is not None:
        title = f"Node {NODE} loses rail {RAIL} during an allreduce"
        report.plot(PNG, where.samples, node=NODE, cut_s=cut_s, title=title)
        console.print(f"throughput        plotted in {PNG}")
    else:
        console.print("throughput        not plotted: all loopback rails share one interface")
    if wrong:
        console.print(f"[bold red]FAILED[/]: {wrong}")
        return 1
    console.print(
        "[bold green]OK[/]: a NIC died during an allreduce, and on all ranks the final weights are "
        f"bit-for-bit equal to those without failure ({time.monotonic() - began:.0f} s)",
        soft_wrap=True,
    )
    return 0


def main() -> int:
    """Parse the command line, choose netlab or loopback, and run both trainings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--loopback", action="store_true", help="use no network namespaces")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be 1 or more")
    console = Console(highlight=False)
    where = cluster.Loopback("requested with --loopback") if args.loopback else cluster.choose()
    console.print(f"[bold]r2ccl demo[/] on {where.name}", soft_wrap=True)
    size = f"{4 * nweights() / 2**20:.1f} MiB"
    console.print(f"{args.epochs} epochs of scikit-learn's digits, a gradient of {size} per step\n")
    try:
        return demonstrate(where, args.epochs, console)
    except cluster.Failed as exc:
        console.print(f"FAILED: {exc}", style="bold red", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
