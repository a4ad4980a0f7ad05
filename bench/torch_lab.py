"""Steps of training with torch on a network whose wires are the limit, in a netlab.

The ranks are nodes. Their gradients travel over shaped NICs; the computation of a layer is a sleep
in its backward pass, because all ranks share the cores of this machine.

``degraded``: DistributedDataParallel on nodes of four NICs, in jobs with all NICs and in jobs in
which one NIC of a node goes down in the first step, one after the other. Each job measures steps
without computation, then steps whose computation takes as long as the first, and four times as
long. ``overlap`` is the second of these times with all NICs, divided by the time of the computation
or by the first, whichever is longer.

``backends``: DistributedDataParallel on nodes of two NICs, first on r2ccl, then on gloo, in
one job. gloo uses one NIC.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from common import add_json_argument, write_json
from labs import last_lines, ready_for_labs

from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab

_RANK = Path(__file__).with_name("torch_lab_rank.py")
_TIMEOUT_S = 300.0
_ENV = {"PYTHONPATH": str(_RANK.parents[1]), "OMP_NUM_THREADS": "1"}
#: Rate of a NIC. At a higher rate the cores of a small machine, not the wires, are the limit.
_RATE = "50mbit"
#: Number of a collective of the first step: every rank sends data in it, unlike in the broadcasts
#: before.
_FIRST_STEP = 12


class Step(NamedTuple):
    """Median time of a step, and of its computation, in seconds."""

    whole_s: float
    computation_s: float


def run(
    lab: Lab, backends: list[str], computations: list[float], plan: FaultPlan | None = None
) -> dict[str, list[Step]]:
    """Run the program on every node; return what rank 0 measured, by backend."""
    task = json.dumps({"backends": backends, "computations": computations})
    said = json.loads(last_lines(lab, _RANK, task, env=_ENV, plan=plan, timeout_s=_TIMEOUT_S)[0])
    return {backend: [Step(*times) for times in steps] for backend, steps in said.items()}


def degraded(rounds: int) -> dict[str, Any]:
    """Measure steps of jobs with all NICs, and of jobs that lose one."""
    jobs: dict[str, list[list[Step]]] = {"healthy": [], "lost": []}
    with Lab(nodes=4, rails=4, rate=_RATE) as lab:
        wire_s = run(lab, ["r2ccl"], [0.0])["r2ccl"][0].whole_s
        computations = [0.0, wire_s, 4 * wire_s]
        for _ in range(rounds):
            for name, found in jobs.items():
                fault = Fault(action=Action.NIC_DOWN, node=1, rail=2, at_op=_FIRST_STEP)
                plan = FaultPlan([fault]) if name == "lost" else None
                found.append(run(lab, ["r2ccl"], computations, plan)["r2ccl"])
    healthy, lost = (
        [statistics.median(step.whole_s for step in steps) for steps in zip(*found, strict=True)]
        for found in jobs.values()
    )
    overlaps = [
        both.whole_s / max(both.computation_s, alone.whole_s) for alone, both, _ in jobs["healthy"]
    ]
    return {
        "what": "degraded",
        "rate": _RATE,
        "computation_s": computations,
        "healthy_s": healthy,
        "lost_s": lost,
        "ratios": [each / other for each, other in zip(lost, healthy, strict=True)],
        "overlap": statistics.median(overlaps),
    }


def backends() -> dict[str, Any]:
    """Measure steps on r2ccl over two NICs, and on gloo over one."""
    with Lab(nodes=2, rails=2, rate=_RATE) as lab:
        found = run(lab, ["r2ccl", "gloo"], [0.0])
    times = {name: each[0].whole_s for name, each in found.items()}
    return {"what": "backends", "rate": _RATE, **times, "ratio": times["r2ccl"] / times["gloo"]}


def report_degraded(row: dict[str, Any]) -> dict[str, Any]:
    """Print the figures of `degraded`, and return them."""
    print(f"DDP, 4 nodes of 4 NICs of {row['rate']}, steps in ms")
    for number, seconds in enumerate(row["computation_s"]):
        print(
            f"computation {1e3 * seconds:.0f}: all NICs {1e3 * row['healthy_s'][number]:.0f}, "
            f"one lost {1e3 * row['lost_s'][number]:.0f}, ratio {row['ratios'][number]:.3f}"
        )
    print(f"overlap {row['overlap']:.3f}", flush=True)
    return row


def report_backends(row: dict[str, Any]) -> dict[str, Any]:
    """Print the figures of `backends`, and return them."""
    print(
        f"DDP, 2 nodes of 2 NICs of {row['rate']}: r2ccl {1e3 * row['r2ccl']:.0f} ms, gloo "
        f"{1e3 * row['gloo']:.0f} ms a step, ratio {row['ratio']:.2f}",
        flush=True,
    )
    return row


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="Steps of training with torch in a netlab.")
    parser.add_argument("--what", choices=("degraded", "backends", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind (default: 3)")
    add_json_argument(parser)
    args = parser.parse_args()
    rows = []
    with ready_for_labs("torch_lab"):
        if args.what in ("degraded", "all"):
            rows.append(report_degraded(degraded(args.rounds)))
        if args.what in ("backends", "all"):
            rows.append(report_backends(backends()))
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
