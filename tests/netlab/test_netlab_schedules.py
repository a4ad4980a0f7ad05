"""Every schedule on real sockets, in many element types, while NICs fail and recover.

NICs are lost and restored between and during operations, so that schedules made for one failure
meet the next. Every element of every result is compared, and all ranks must have the same bits.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from r2ccl.config import ALGOS
from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason
from r2ccl.testing.simulation import SCHEDULES

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}"),
]

TESTS = Path(__file__).parents[1]
NODES = RAILS = 4
ROUNDS = 3

#: Collective, element type, operation and root.
Operation = tuple[str, str, str, int]
ALLREDUCES: list[Operation] = [
    ("allreduce", dtype, op, 0)
    for dtype, op in (
        ("float32", "SUM"), ("float64", "AVG"), ("uint8", "MAX"), ("bfloat16", "SUM"),
        ("complex64", "SUM"), ("int64", "PROD"), ("float16", "PROD"), ("int8", "MIN"),
        ("float32", "SUM"), ("int32", "AVG"),
    )
]  # fmt: skip
OTHERS: list[Operation] = [
    ("allgather", "float32", "SUM", 0), ("reduce_scatter", "int32", "AVG", 0),
    ("broadcast", "bfloat16", "SUM", 1), ("reduce", "float64", "AVG", 2),
    ("allgather", "int64", "SUM", 0), ("reduce_scatter", "float64", "PROD", 0),
    ("broadcast", "complex64", "SUM", 1), ("reduce", "float16", "MAX", 2),
    ("allgather", "float64", "SUM", 0), ("reduce_scatter", "complex64", "SUM", 0),
]  # fmt: skip
#: Schedules that the planner does not choose here.
BY_NAME: list[Operation] = [
    (name, dtype, op, 0)
    for (dtype, op), name in zip(
        itertools.cycle([("float64", "AVG"), ("complex64", "SUM"), ("int64", "PROD")]),
        [name for name, make in SCHEDULES.items() if make(NODES, 1).collective == "allreduce"] * 2,
        strict=False,
    )
]

#: Any two nodes always have a common rail. In every schedule, the rank that triggers a fault sends
#: more slices in that operation than `at_step`.
FAULTS = [
    Fault(action=Action.NIC_DOWN, node=1, rail=2, at_op=2, duration_s=1.0),
    Fault(action=Action.SWITCH_PORT_DOWN, node=0, rail=1, at_op=5, at_step=3),
    Fault(action=Action.NIC_DOWN, node=3, rail=3, at_op=8, at_step=2, duration_s=0.6),
    Fault(action=Action.NIC_DOWN, node=1, rail=0, at_op=12, at_step=1),
    Fault(action=Action.BLACKHOLE, node=2, rail=3, at_op=15, at_step=3, duration_s=0.8),
    Fault(action=Action.RESTORE, node=0, rail=1, at_op=18),
    Fault(action=Action.RESTORE, node=1, rail=0, at_op=19, at_step=2),
    Fault(action=Action.NIC_DOWN, node=3, rail=0, at_op=23, at_step=1),
    Fault(action=Action.ISOLATE, node=0, peer=2, rail=1, at_op=24, at_step=2, duration_s=0.8),
    Fault(action=Action.NIC_DOWN, node=2, rail=2, at_op=25, at_step=3),
    Fault(action=Action.RESTORE, rank=1, at_op=28, at_step=2),
]
#: Slices small enough that large operations have several.
SETTINGS = {
    "R2CC_SLICE_NBYTES": str(16 << 10),
    "R2CC_EAGER_NBYTES": str(8 << 10),
    "R2CC_QUARANTINE_CAP_S": "0",
}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(nodes=NODES, rails=RAILS, rate="1gbit") as lab:
        yield lab


def run_job(lab: Lab, operations: Sequence[Operation], **settings: str) -> list[dict[str, Any]]:
    """Run the operations on every node, with all faults; return the report of each rank."""
    plan = FaultPlan(FAULTS)
    script = TESTS / "netlab/schedules_rank.py"
    lines: list[str] = []
    lab.restore()
    results = lab.run(
        [sys.executable, str(script), json.dumps(operations)],
        env={"PYTHONPATH": f"{TESTS.parent}:{TESTS}", **SETTINGS, **settings},
        plan=plan,
        timeout_s=60,
        sink=lines.append,
    )
    assert all(each.returncode == 0 for each in results), "\n".join(line[:2000] for line in lines)
    plan.assert_all_fired()
    return [json.loads(each.output.strip().splitlines()[-1]) for each in results]


def require_exact(reports: list[dict[str, Any]]) -> None:
    assert [report["wrong"] for report in reports] == [[]] * len(reports)
    assert all(report["nrepairs"] for report in reports), "a rank whose paths never broke"
    planned = {version for report in reports for version in report["versions"]}
    assert len(planned) > 2, "no plan was made for a failure"


@pytest.mark.parametrize("algo", ALGOS)
def test_every_schedule_is_exact_while_nics_go_and_come_back(lab: Lab, algo: str) -> None:
    reports = run_job(lab, ALLREDUCES * ROUNDS, R2CC_ALGO=algo)
    require_exact(reports)
    assert all(report["digests"] == reports[0]["digests"] for report in reports[1:])


def test_named_schedules_are_exact_while_nics_go_and_come_back(lab: Lab) -> None:
    require_exact(run_job(lab, BY_NAME))


def test_other_collectives_are_exact_while_nics_go_and_come_back(
    lab: Lab,
) -> None:
    require_exact(run_job(lab, OTHERS * ROUNDS))


@pytest.mark.parametrize("settings", [{"R2CC_ALGO": "packed_trees"}, {"R2CC_SHM": "1"}], ids=str)
def test_ranks_sharing_nodes_are_exact_while_nics_come_and_go(settings: dict[str, str]) -> None:
    """In one level by a named schedule, and in two levels, planned anew for every failure."""
    with Lab(nodes=NODES, rails=RAILS, rate="1gbit", ranks_per_node=2) as lab:
        reports = run_job(lab, ALLREDUCES * ROUNDS, **settings)
    require_exact(reports)
    assert all(report["digests"] == reports[0]["digests"] for report in reports[1:])
