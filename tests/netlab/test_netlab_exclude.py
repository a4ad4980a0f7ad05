"""A NIC that an operator excludes, unplugs, plugs in and includes, on real sockets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}"),
]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("exclude_rank.py")


def reports(plan: FaultPlan | None = None, **env: str) -> list[dict[str, Any]]:
    lines: list[str] = []
    with Lab(nodes=3, rails=3) as lab:
        results = lab.run(
            [sys.executable, str(SCRIPT)],
            env={"PYTHONPATH": str(ROOT), **env},
            plan=plan,
            timeout_s=60,
            sink=lines.append,
        )
    assert all(each.returncode == 0 for each in results), "\n".join(lines)
    return [json.loads(each.output.strip().splitlines()[-1]) for each in results]


def test_a_cable_pulled_while_its_nic_is_excluded_is_no_failure() -> None:
    # The job excludes the NIC before operation 11.
    down = Fault(action=Action.NIC_DOWN, node=1, rail=1, at_op=14, duration_s=0.6)
    plan = FaultPlan([down])
    found = reports(plan)
    plan.assert_all_fired()
    for report in found:
        assert report["declared"] == []
        assert report["used"] == 0, "a slice on the excluded NIC"
        assert report["down"] == []
    causes = found[1]["causes"]
    assert causes
    assert all("EXCLUDED: " in cause for cause in causes), causes


@pytest.mark.slow
def test_a_nic_declared_failed_is_used_once_it_is_included() -> None:
    """All nodes of a lab have the same host name, so the number of the node names it."""
    for report in reports(R2CC_FAILED_NICS="1:1,9:1"):
        assert report["declared"] == [[1, 1]]
        assert (report["used"], report["causes"], report["down"]) == (0, [], [])
