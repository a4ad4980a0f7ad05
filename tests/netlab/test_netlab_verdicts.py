"""Verdicts on real sockets: each kind of fault is diagnosed at both ends.

R2CC_CAMPAIGN_RUNS sets the runs of each kind (default 2). Each run is a separate job.
"""

from __future__ import annotations

import json
import os
import random
import sys
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
NODES, RAILS, NOPS = 4, 2, 3
NBYTES = 8 << 20
#: Smallest number of slices that a rank posts in an operation.
STEPS = 10

Report = dict[str, Any]


def run_job(lab: Lab, plan: FaultPlan, rail: int) -> list[Report]:
    """Run the job once; return the findings of each rank."""
    script = Path(__file__).with_name("verdicts_rank.py")
    lines: list[str] = []
    results = lab.run(
        [sys.executable, str(script), str(NOPS), str(NBYTES), str(rail)],
        env={"PYTHONPATH": str(ROOT), "R2CC_MODE": "balance"},  # faults occur at slices of rings
        plan=plan,
        timeout_s=60,
        sink=lines.append,
    )
    assert all(each.returncode == 0 for each in results), "\n".join(lines)
    plan.assert_all_fired()
    return [json.loads(each.output.strip().splitlines()[-1]) for each in results]


def neighbours(node: int) -> set[int]:
    """Return the ranks with which `node` exchanges data: its neighbours in the ring."""
    return {(node - 1) % NODES, (node + 1) % NODES}


@pytest.fixture
def lab() -> Any:
    with Lab(nodes=NODES, rails=RAILS) as made:
        yield made


@pytest.mark.timeout(60 + 30 * RUNS)
@pytest.mark.parametrize(
    "kind", [Action.NIC_DOWN, Action.SWITCH_PORT_DOWN, Action.BLACKHOLE], ids=str
)
def test_a_dead_nic_is_local_to_its_node_and_remote_to_its_peers(lab: Lab, kind: Action) -> None:
    rng = random.Random(kind.value)
    for _ in range(RUNS):
        node, rail = rng.randrange(NODES), rng.randrange(RAILS)
        cut = Fault(action=kind, node=node, rail=rail, at_op=1, at_step=rng.randrange(STEPS))
        reports = run_job(lab, FaultPlan([cut]), rail)
        lab.restore()
        print(f"{kind}: node {node}, rail {rail}: {reports[node]['all'][0][2]}")
        # A blackhole is noticed only where there is traffic; a lost carrier is reported to all
        # ranks.
        concerned = neighbours(node) if kind is Action.BLACKHOLE else set(range(NODES)) - {node}
        expected = {str(peer): "local_nic" for peer in concerned}
        assert reports[node]["found"] == expected, reports
        for peer in concerned:
            assert reports[peer]["found"] == {str(node): "remote_nic"}, reports


@pytest.mark.timeout(60 + 30 * RUNS)
def test_two_nics_that_do_not_reach_each_other_are_a_link(lab: Lab) -> None:
    rng = random.Random(3)
    for _ in range(RUNS):
        node, rail = rng.randrange(NODES), rng.randrange(RAILS)
        peer = (node + 1) % NODES
        cut = Fault(
            action=Action.ISOLATE, node=node, peer=peer, rail=rail, at_op=1,
            at_step=rng.randrange(STEPS),
        )  # fmt: skip
        reports = run_job(lab, FaultPlan([cut]), rail)
        lab.restore()
        print(f"isolate: nodes {node} and {peer}, rail {rail}: {reports[node]['all']}")
        assert reports[node]["found"] == {str(peer): "link"}, reports
        assert reports[peer]["found"] == {str(node): "link"}, reports


@pytest.mark.timeout(60 + 30 * RUNS)
def test_a_stopped_process_is_slow_and_nothing_moves(lab: Lab) -> None:
    rng = random.Random(4)
    for _ in range(RUNS):
        victim = rng.randrange(NODES)
        stop = Fault(
            action=Action.STOP, rank=victim, duration_s=1.0, at_op=1, at_step=rng.randrange(STEPS)
        )
        reports = run_job(lab, FaultPlan([stop]), 0)
        assert [report["repairs"] for report in reports] == [[]] * NODES, "nothing may move"
        found = {(path[0], kind) for report in reports for path, kind, _ in report["all"]}
        print(f"stop: rank {victim}: {sorted(found)}")
        assert {kind for _, kind in found} == {"peer_slow"}
        assert victim in {peer for peer, _ in found}
