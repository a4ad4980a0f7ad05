"""Train a GPT on four nodes through two lost NICs, and get the same weights as without.

Runs the same training twice, with DistributedDataParallel over r2ccl. In the second run, a NIC of
one node fails during an allreduce, later a NIC of another node, and later both come back. The
program compares the losses and the final weights of both runs. It exits with status 1 if any bit of
the weights differs, or if a NIC did not fail during an allreduce. ``make demo-gpt`` runs it, in an
environment with torch and the packages of the extra ``demo``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from demos import cluster
from demos.narration import Narration
from demos.report import print_losses, print_repair, summarise
from demos.run import Run
from gpt import text
from gpt.model import HEAD, Size, nweights
from gpt.rank import BATCH_PER_RANK, PARTS
from gpt.report import Mark, plot
from rich.console import Console

from r2ccl.testing import Action, Fault, FaultPlan

#: Node and rail of the NICs that fail, after a quarter and after half of the steps. Both are
#: restored after three quarters.
NICS = ((1, 2), (3, 0))
#: A NIC fails just before its node sends this slice of the first gradients of the step.
AT_SLICE = 4
PNG = Path("out/gpt.png")
RANK_PROGRAM = Path(__file__).with_name("gpt") / "rank.py"
#: Timeout of one training run: for its start and end, and for each of its steps.
_START_TIMEOUT_S, _STEP_TIMEOUT_S = 300.0, 20.0
#: With rings only, the order of additions is the same whatever NICs are lost. By default, r2ccl may
#: change the schedule after a failure, and round differently.
_ENV = {
    "R2CC_ALGO": "ring",
    # torch warns that the addresses in network namespaces have no names.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}


def plan_of(healthy: Run, where: cluster.Where) -> FaultPlan:
    """Return the faults of the second run; the first tells the collectives of each step."""
    first = healthy.ends[0]["first_collectives"]
    quarter = len(first) // 4
    faults = []
    for at, (node, rail) in enumerate(NICS, 1):
        op = first[at * quarter]
        faults.append(
            Fault(action=Action.NIC_DOWN, node=node, rail=rail, at_op=op, at_step=AT_SLICE)
        )
    if isinstance(where, cluster.Netlab):  # on loopback, the library restores a connection at once
        faults.append(Fault(action=Action.RESTORE, at_op=first[3 * quarter]))
    return FaultPlan(faults)


def marks_of(plan: FaultPlan, faulty: Run) -> list[Mark]:
    """Return the faults that happened, each with its step."""
    found = []
    for fault in plan.faults:
        is_cut = fault.action is Action.NIC_DOWN
        name = f"node {fault.node} loses rail {fault.rail}" if is_cut else "both restored"
        time_s = faulty.cut_time(plan, fault)
        step = faulty.step_at(time_s) if time_s is not None else None
        if time_s is not None and step is not None:
            found.append(Mark(name, time_s, faulty.steps.index(step)))
    return found


def judge(console: Console, healthy: Run, faulty: Run, plan: FaultPlan, marks: list[Mark]) -> str:
    """Compare the runs and print the results; return an error message, empty if all is right."""
    print_losses(console, healthy.losses(), faulty.losses(), "tenth")
    if len(marks) < len(plan.faults):
        return "a planned fault did not happen"
    for fault, mark in zip(plan.faults, marks, strict=True):
        console.print(f"\n[bold]step {mark.step}[/]: {mark.name}")
        if fault.rail is not None:
            print_repair(console, summarise(faulty.repairs(fault.rail), mark.time_s))
    if len(healthy.weights() | faulty.weights()) > 1:
        return "the final weights differ between the runs or between ranks"
    return ""


def train_twice(
    where: cluster.Where, size: Size, nsteps: int, console: Console, folder: Path
) -> tuple[Run, Run, FaultPlan]:
    """Train without and with faults; return both runs and the faults."""
    tokens = text.tokens()
    if len(tokens) <= size.context:
        raise cluster.Failed(
            f"a text of {len(tokens)} characters for --context {size.context}: choose a smaller "
            "context, or a Python whose standard library has its source"
        )
    console.print(f"text: {len(tokens):,} characters of docstrings of the standard library\n")
    with Narration(console, PARTS, nsteps, "tenth") as narration:

        def train(name: str, faults: FaultPlan) -> Run:
            run = Run(folder / name.replace(" ", "-"), narration)
            narration.begin(name)
            run.folder.mkdir()
            np.save(run.folder / "text.npy", tokens)
            sizes = map(str, (nsteps, size.layers, size.width, size.context))
            argv = [sys.executable, str(RANK_PROGRAM), str(run.folder), *sizes]
            timeout_s = _START_TIMEOUT_S + _STEP_TIMEOUT_S * nsteps
            where.run(cluster.Program(argv, timeout_s, _ENV), faults, run.take)
            return run

        healthy = train("no failure", FaultPlan())
        plan = plan_of(healthy, where)
        return healthy, train("NICs lost", plan), plan


def demonstrate(where: cluster.Where, size: Size, nsteps: int, console: Console) -> int:
    """Train twice, print and plot the comparison; return the exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="r2ccl-demo-") as folder:
        healthy, faulty, plan = train_twice(where, size, nsteps, console, Path(folder))
        marks = marks_of(plan, faulty)
        wrong = judge(console, healthy, faulty, plan, marks)
    ntokens = cluster.NODES * BATCH_PER_RANK * size.context
    plot(PNG, healthy.steps, faulty.steps, marks, ntokens)
    console.print(f"\nlosses and tokens per second: plotted in {PNG}")
    if wrong:
        console.print(f"[bold red]FAILED[/]: {wrong}")
        return 1
    console.print(
        "[bold green]OK[/]: two NICs died, each during an allreduce, and on all ranks the final "
        "weights are bit-for-bit equal to those without failure "
        f"({time.monotonic() - began:.0f} s)",
        soft_wrap=True,
    )
    return 0


def main() -> int:
    """Parse the command line, choose netlab or loopback, and run both trainings."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=60, help=f"training steps, {PARTS} or more")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model")
    parser.add_argument(
        "--width", type=int, default=384, help=f"width of the model, a multiple of {HEAD}"
    )
    parser.add_argument("--context", type=int, default=128, help="length of a sequence in tokens")
    parser.add_argument("--loopback", action="store_true", help="use no network namespaces")
    args = parser.parse_args()
    if args.steps < PARTS:
        parser.error(f"--steps {args.steps}: must be {PARTS} or more")
    if min(args.layers, args.width, args.context) < 1 or args.width % HEAD:
        parser.error(f"--layers, --width, --context: 1 or more; --width a multiple of {HEAD}")
    size = Size(len(text.ALPHABET), args.layers, args.width, args.context)
    console = Console(highlight=False)
    where = cluster.Loopback("requested with --loopback") if args.loopback else cluster.choose()
    console.print(f"[bold]r2ccl GPT demo[/] on {where.name}", soft_wrap=True)
    console.print(
        f"{args.steps} steps of a GPT of {nweights(size) / 1e6:.1f} million weights, "
        "with DistributedDataParallel"
    )
    try:
        return demonstrate(where, size, args.steps, console)
    except cluster.Failed as exc:
        console.print(f"FAILED: {exc}", style="bold red", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
