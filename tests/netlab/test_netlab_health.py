"""Time from the loss of a carrier until all ranks hold the new health, on real sockets.

R2CC_CAMPAIGN_RUNS sets the number of runs (default 2), each a separate job; times are printed.
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
NODES, RAILS = 4, 4


@pytest.mark.timeout(60 + 40 * RUNS)
@pytest.mark.parametrize(
    ("nbytes", "busy_s"), [(8 << 20, 0.0), (4 << 10, 0.3)], ids=["in a call", "in user code"]
)
def test_all_ranks_hear_of_a_carrier_that_is_gone(nbytes: int, busy_s: float) -> None:
    rng = random.Random(nbytes)
    script = Path(__file__).with_name("health_rank.py")
    delays = []
    with Lab(nodes=NODES, rails=RAILS) as lab:
        for _ in range(RUNS):
            node, rail = rng.randrange(NODES), rng.randrange(RAILS)
            cut = Fault(
                action=Action.SWITCH_PORT_DOWN, node=node, rail=rail, at_s=3.0 + rng.random()
            )
            plan = FaultPlan([cut])
            lines: list[str] = []
            results = lab.run(
                [sys.executable, str(script), str(nbytes), str(busy_s)],
                env={"PYTHONPATH": str(ROOT)},
                plan=plan,
                timeout_s=40,
                sink=lines.append,
            )
            lab.restore()
            assert all(each.returncode == 0 for each in results), "\n".join(lines)
            plan.assert_all_fired()
            reports = [json.loads(each.output.strip().splitlines()[-1]) for each in results]
            # Besides the dead rail, another may have been slow for a moment.
            dead = {
                tuple(at for at, share in enumerate(report["shares"]) if not share)
                for report in reports
            }
            assert dead == {(node * reports[0]["nrails"] + rail,)}
            assert len({report["version"] for report in reports}) == 1
            assert len({report["nops"] for report in reports}) == 1
            delays.append(max(report["since_s"] for report in reports) - plan.fired[0].time_s)
    low, middle, high = min(delays), statistics.median(delays), max(delays)
    print(
        f"carrier lost to all {NODES} ranks holding the new health: {low * 1e3:.1f} / "
        f"{middle * 1e3:.1f} / {high * 1e3:.1f} ms, minimum, median, maximum of {RUNS} runs"
    )
