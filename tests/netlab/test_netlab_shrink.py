"""Kill of a rank at a given slice, on real sockets between hosts: the others finish the job.

R2CC_CAMPAIGN_RUNS sets the runs of each victim (default 2; `make campaign` 50). The time is from
the call of shrink() to its return, so it does not include the detection.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from pathlib import Path

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
SCRIPT = ROOT / "tests/contract/shrink_rank.py"
NODES, RAILS = 4, 2
PLAN = {"steps": 8, "count": 1_000_000}
#: Smallest number of slices that a rank posts in one allreduce.
STEPS = 12


@pytest.mark.parametrize("is_coordinator", [False, True], ids=["member", "coordinator"])
def test_survivors_of_a_kill_in_mid_call_finish_the_job(is_coordinator: bool) -> None:
    rng = random.Random(f"shrink {is_coordinator}")
    times: list[float] = []
    with Lab(nodes=NODES, rails=RAILS) as lab:
        for _ in range(RUNS):
            victim = 0 if is_coordinator else rng.randrange(1, NODES)
            survivors = [rank for rank in range(NODES) if rank != victim]
            step = rng.randrange(STEPS)
            plan = FaultPlan([Fault(action=Action.KILL, rank=victim, at_op=3, at_step=step)])
            lines: list[str] = []
            results = lab.run(
                [sys.executable, str(SCRIPT), json.dumps(PLAN)],
                env={
                    "PYTHONPATH": str(ROOT),
                    "R2CC_MODE": "balance",
                },  # faults occur at slices of rings
                plan=plan,
                timeout_s=150,
                sink=lines.append,
            )
            plan.assert_all_fired()
            codes = [-9 if rank == victim else 0 for rank in range(NODES)]
            assert [each.returncode for each in results] == codes, "\n".join(lines)
            for rank in survivors:
                report = json.loads(results[rank].output.splitlines()[-1])
                assert report["failure"] == ""
                assert (report["steps"], report["names"]) == (PLAN["steps"], survivors)
                assert report["errors"] == ["PeerLost"]
                times += report["shrink_s"]
    assert len(times) == RUNS * (NODES - 1)
    print(
        f"shrink of {NODES} to {NODES - 1}: {RUNS}/{RUNS} jobs finished, median "
        f"{1e3 * statistics.median(times):.0f} ms, most {1e3 * max(times):.0f} ms"
    )
