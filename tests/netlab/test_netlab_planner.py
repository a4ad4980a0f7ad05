"""Planner on a real network: its rates, its choice after losing NICs, several ranks per node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from r2ccl.failover.health.table import WHOLE
from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}"),
]

RATE_MBPS = 100
NBYTES = 8 << 20


def run(nodes: int, rails: int, ranks_per_node: int) -> list[list[dict[str, Any]]]:
    """Run a job whose node 1 loses a NIC, if it has several; return the report of each rank."""
    fault = Fault(action=Action.NIC_DOWN, node=1, rail=0, at_op=4)
    with Lab(
        nodes=nodes, rails=rails, rate=f"{RATE_MBPS}mbit", ranks_per_node=ranks_per_node
    ) as lab:
        plan = FaultPlan([fault] if rails > 1 else [])
        results = lab.run(
            [sys.executable, str(Path(__file__).with_name("planner_rank.py")), str(NBYTES)],
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
            plan=plan,
            timeout_s=100,
            sink=lambda line: None,
        )
    assert all(each.returncode == 0 for each in results), results[0].output[-2000:]
    plan.assert_all_fired()
    return [json.loads(each.output.strip().splitlines()[-1]) for each in results]


@pytest.mark.parametrize(
    ("nodes", "rails", "ranks_per_node", "lost"),
    [(4, 3, 1, "packed_trees"), (3, 3, 2, "hierarchy/packed_trees")],
)
def test_the_choice_follows_the_network(
    nodes: int, rails: int, ranks_per_node: int, lost: str
) -> None:
    reports = run(nodes, rails, ranks_per_node)
    for before, after in reports:
        # The ring, or with high latencies measured on a busy machine another of the same load. A
        # busy machine can also slow one rail for so long that the library measures a low share.
        least = 2 * (nodes - 1) / nodes / rails
        if before["lowest_share"] == WHOLE:
            assert before["load"] == pytest.approx(least)
        else:
            assert before["load"] > least * (1 - 1e-9)
        # The line rate without headers, within the limits of the processors.
        beta = before["load"] * NBYTES / before["predicted_s"]
        assert 0.7 < beta / (RATE_MBPS * 1e6 / 8) < 1.3
        assert after["schedule"] == lost
        assert after["load"] > before["load"]
        if after["lowest_share"] == WHOLE:
            assert after["load"] < before["load"] * rails / (rails - 1)
    said = [[(each["schedule"], each["predicted_s"]) for each in report] for report in reports]
    assert all(each == said[0] for each in said), "ranks do not plan alike"


def test_a_network_of_one_nic_per_node_is_measured_too() -> None:
    for before, after in run(4, 1, 1):
        assert before["predicted_s"] == after["predicted_s"]
        beta = before["load"] * NBYTES / before["predicted_s"]
        assert 0.7 < beta / (RATE_MBPS * 1e6 / 8) < 1.3
