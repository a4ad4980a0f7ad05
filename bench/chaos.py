"""Run random jobs on random netlabs under random faults; check every result.

Each job has 2 to 5, 8 or 12 nodes with 2 to 4 rails and runs random collectives, sizes and types,
asynchronously or not, while NICs, switch ports and pairs of nodes fail, drop traffic silently, slow
down, flap and recover, and processes are stopped. At the end all ranks close, or one rank aborts or
is killed. A job fails if a result is wrong, a call hangs, or a rank ends in another way. The seed
alone determines a job: ``--seed 7 --jobs 1`` repeats job 7.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, LabError, ensure_privileged

PROGRAM = str(Path(__file__).with_name("chaos_rank.py"))
#: Seconds that a job runs, that its start takes, and after which it is considered hung.
JOB_S, INIT_S, PATIENCE_S = 20.0, 5.0, 90.0
#: Faults per second of a job.
RATE = 0.8
_EXIT_UNAVAILABLE = 69


def draw_plan(rng: random.Random, nodes: int, rails: int, seconds: float) -> FaultPlan:
    """Draw self-reverting faults in any combination; one rail of each node never fails."""
    whole = [rng.randrange(rails) for _ in range(nodes)]
    faults: list[Fault] = []
    for _ in range(int(RATE * seconds)):
        action = rng.choice(
            [Action.NIC_DOWN, Action.SWITCH_PORT_DOWN, Action.BLACKHOLE, Action.ISOLATE,
             Action.SLOW, Action.FLAP, Action.STOP]
        )  # fmt: skip
        node, rail = rng.randrange(nodes), rng.randrange(rails)
        times: dict[str, Any] = {
            "at_s": INIT_S + rng.uniform(0, seconds), "duration_s": rng.uniform(0.2, 3.0)
        }  # fmt: skip
        if action is Action.STOP:
            times["duration_s"] /= 2
            faults.append(Fault(action=action, rank=node, **times))
            continue
        more: dict[str, Any] = {}
        if action is Action.ISOLATE:
            more["peer"] = rng.choice([other for other in range(nodes) if other != node])
        if any(whole[end] == rail for end in (node, more.get("peer")) if end is not None):
            continue
        if action is Action.SLOW:
            more["rate"] = f"{rng.randrange(10, 150)}mbit"
        if action is Action.FLAP:
            more |= {"mean_s": 0.3, "seed": rng.randrange(1000)}
        faults.append(Fault(action=action, node=node, rail=rail, **times, **more))
    return FaultPlan(faults)


def run_job(seed: int, seconds: float) -> dict[str, Any]:
    """Run the job of `seed`; ``bad`` in the row lists everything that was wrong."""
    rng = random.Random(f"chaos {seed}")
    nodes, rails = rng.choice([2, 3, 4, 5, 8, 12]), rng.randint(2, 4)
    fabric = rng.choice(["full", "rail"])
    ends = rng.choice(["close", "close", "abort", "kill"])
    plan = draw_plan(rng, nodes, rails, seconds)
    task = {"seed": seed, "seconds": seconds, "ends": ends, "victim": rng.randrange(nodes)}
    lines: list[str] = []
    begun_s = time.monotonic()
    with Lab(nodes=nodes, rails=rails, rate="200mbit", burst="256kb", fabric=fabric) as lab:
        results = lab.run(
            [sys.executable, PROGRAM, json.dumps(task)],
            # With few connections, ranks close and open paths all the time.
            env={
                "PYTHONPATH": os.pathsep.join(sys.path),
                "R2CC_MAX_CONNECTIONS": rng.choice(["1", "3", "128"]),
            },
            plan=plan,
            timeout_s=INIT_S + seconds + PATIENCE_S,
            sink=lines.append,
        )
    row: dict[str, Any] = {
        "seed": seed, "nodes": nodes, "rails": rails, "fabric": fabric, "ends": ends,
        "faults": len(plan.faults), "fired": len(plan.fired), "calls": 0, "repairs": 0,
        "slowest_s": 0.0, "bad": [], "took_s": round(time.monotonic() - begun_s, 1),
    }  # fmt: skip
    for rank, result in enumerate(results):
        if (ends, rank) == ("kill", task["victim"]):
            if result.returncode != -signal.SIGKILL:
                row["bad"].append(f"rank {rank} ended with {result.returncode}, not by SIGKILL")
            continue
        told = [line for line in result.output.splitlines() if line.startswith("{")]
        if result.returncode != 0 or not told:
            row["bad"].append(f"rank {rank} ended with {result.returncode}: {result.output[-800:]}")
            continue
        said = json.loads(told[-1])
        allowed = {"close": {""}, "abort": {"CommunicatorRevoked"}, "kill": {"PeerLost"}}[ends]
        if said["error"] not in allowed:
            row["bad"].append(f"rank {rank}: {said['error'] or 'no error'}: {said['text']}")
        row["bad"] += [f"rank {rank}: {name}" for name in said.get("wrong", ())]
        row["calls"] = max(row["calls"], said.get("calls", 0))
        row["repairs"] += said.get("repairs", 0)
        row["slowest_s"] = max(row["slowest_s"], said.get("slowest_s", 0.0))
    return row


def main() -> int:
    """Run jobs until the time is over; return 1 if any job went wrong."""
    parser = argparse.ArgumentParser(
        description="Random collectives under random faults, on random netlabs."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="start no job after this time")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first job")
    parser.add_argument("--jobs", type=int, default=10**9, help="largest number of jobs")
    parser.add_argument("--json", metavar="FILE", help="write all rows")
    args = parser.parse_args()
    try:
        ensure_privileged()
    except LabError as exc:
        print(f"chaos: cannot build a netlab on this machine: {exc}", file=sys.stderr)
        return _EXIT_UNAVAILABLE
    rows: list[dict[str, Any]] = []
    until_s = time.monotonic() + args.seconds
    while len(rows) < args.jobs and time.monotonic() < until_s:
        row = run_job(args.seed + len(rows), JOB_S)
        rows.append(row)
        print(
            "seed {seed}: {nodes} x {rails} {fabric}, {fired} of {faults} faults, {calls} calls, "
            "{repairs} repairs, slowest {slowest_s:.2f} s, {ends}, {took_s} s".format(**row),
            *(f"\n  BAD: {bad}" for bad in row["bad"]),
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    nbad = sum(bool(row["bad"]) for row in rows)
    print(
        f"chaos: {len(rows)} jobs, {sum(row['calls'] for row in rows)} calls per rank, "
        f"{sum(row['repairs'] for row in rows)} repairs, {nbad} jobs went wrong"
    )
    return 1 if nbad else 0


if __name__ == "__main__":
    sys.exit(main())
