"""Losses that leave pairs of nodes without a common rail: while idle, and during a call.

R2CC_CAMPAIGN_RUNS sets the number of draws per fabric (default 2).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}"),
]

RUNS = int(os.environ.get("R2CC_CAMPAIGN_RUNS", "2"))
ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("apart_rank.py"))
ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
NODES, RAILS = 4, 3
TIMEOUT_S = 60.0
#: Seconds in which all ranks learn of the losses.
IDLE_S = 1.0

Losses = list[tuple[int, int]]


def draw(rng: random.Random, *, is_ring_left: bool = False) -> Losses:
    """Draw losses at two or three nodes: some pair has no common rail, but all are connected.

    With `is_ring_left`, neighbours in the ring of all nodes do have a common rail.
    """
    while True:
        lost = [
            (node, rail)
            for node in rng.sample(range(NODES), rng.choice((2, 3)))
            for rail in rng.sample(range(RAILS), rng.randrange(1, RAILS))
        ]
        up = [{rail for rail in range(RAILS) if (node, rail) not in lost} for node in range(NODES)]
        joined = {0}
        for _ in range(NODES):
            joined |= {node for node in range(NODES) if any(up[node] & up[at] for at in joined)}
        is_apart = any(not up[a] & up[b] for a, b in combinations(range(NODES), 2))
        has_ring = all(up[node - 1] & up[node] for node in range(NODES))
        if len(joined) == NODES and is_apart and (has_ring or not is_ring_left):
            return lost


#: Nodes 0 and 2 have no rail in common, and are not neighbours in the ring.
KNOWN: Losses = [(0, 0), (2, 1), (2, 2)]


def read(stream: Any) -> dict[str, Any]:
    for line in stream:
        if line.startswith(b"{"):
            said: dict[str, Any] = json.loads(line)
            return said
    raise AssertionError("a rank ended without a word")


@pytest.mark.parametrize("last_resort", ["auto", "none"])
@pytest.mark.parametrize("fabric", ["full", "rail"])
def test_losses_while_idle_leave_every_collective_exact(fabric: str, last_resort: str) -> None:
    rng = random.Random(f"idle {fabric} {last_resort}")
    # With only the rails, the one call that still uses the old plan must not need pairs without a
    # common rail.
    is_bare = last_resort == "none"
    losses = [KNOWN, *(draw(rng, is_ring_left=is_bare) for _ in range(RUNS))]
    env = {**ENV, "R2CC_LAST_RESORT": last_resort, **({"R2CC_ALGO": "ring"} if is_bare else {})}
    with Lab(nodes=NODES, rails=RAILS, fabric=fabric) as lab:
        for lost in losses:
            with lab.start([sys.executable, SCRIPT, "2", "4"], env=env) as job:
                for rank in job.ranks:
                    read(rank.popen.stdout)
                for node, rail in lost:
                    lab.apply(Fault(action=Action.NIC_DOWN, node=node, rail=rail))
                time.sleep(IDLE_S)
                for rank in job.ranks:
                    rank.popen.stdin.write(b"\n")
                    rank.popen.stdin.flush()
                reports = [read(rank.popen.stdout) for rank in job.ranks]
                results = job.wait(TIMEOUT_S)
            lab.restore()
            assert [each.returncode for each in results] == [0] * NODES, lost
            assert not any(report["wrong"] for report in reports), (lost, reports)


@pytest.mark.parametrize("last_resort", ["auto", "none"])
@pytest.mark.parametrize("fabric", ["full", "rail"])
def test_losses_in_mid_call_leave_every_collective_exact(fabric: str, last_resort: str) -> None:
    rng = random.Random(f"struck {fabric}")
    env = {**ENV, "R2CC_LAST_RESORT": last_resort}
    with Lab(nodes=NODES, rails=RAILS, fabric=fabric) as lab:
        for _ in range(RUNS):
            lost = draw(rng)
            # 11 calls per round; the second call of each collective is the large one.
            op = 11 + 2 * rng.randrange(5) + 1
            plan = FaultPlan(
                Fault(action=Action.NIC_DOWN, node=node, rail=rail, rank=node, at_op=op, at_step=0)
                for node, rail in lost
            )
            results = lab.run(
                [sys.executable, SCRIPT, "0", "4"],
                env=env,
                plan=plan,
                timeout_s=TIMEOUT_S,
                sink=lambda line: None,
            )
            lab.restore()
            assert [each.returncode for each in results] == [0] * NODES, (lost, results[0].output)
            reports = [json.loads(each.output.strip().splitlines()[-1]) for each in results]
            print(
                fabric, last_resort, lost, "bypasses", sum(each["nbypasses"] for each in reports),
                "repairs [ms]", sorted(ms for each in reports for ms in each["repairs_ms"]),
                "slowest call [s]", max(each["slowest_s"] for each in reports),
            )  # fmt: skip
            assert not any(report["wrong"] for report in reports), (lost, reports)
