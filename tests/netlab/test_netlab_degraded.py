"""Large allreduces after NICs are lost, on real sockets: what each schedule makes of the others.

A job runs rings over all rails, loses NICs between two operations, and goes on with what
``R2CC_ALGO`` allows. All times are given as multiples of the job's own time with all NICs.

R2CC_CAMPAIGN_RUNS sets the runs (default 1). Figures are printed; asserted is that every result is
exact, and that with packed trees a node that lost bandwidth costs the others less than with rings.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from fractions import Fraction

import pytest
from netlab import steady

from r2ccl.algos.packed_trees import lower_bound
from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import unavailable_reason

REASON = unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}")

RUNS = int(os.environ.get("R2CC_CAMPAIGN_RUNS", "1"))
NBYTES = 64 << 20
#: Operations with the NICs lost; the last ones are the figure.
NOPS, SETTLED = 10, 6
#: NICs lost, by node and rail.
LOST = {
    "one NIC": [(2, 1)],
    "one NIC here, two there": [(0, 3), (2, 0), (2, 2)],
}


def relative(lost: Sequence[tuple[int, int]], algo: str) -> float:
    """Run one job; return the time of an operation without the NICs as a multiple of that with."""
    plan = FaultPlan(
        [
            Fault(action=Action.NIC_DOWN, node=node, rail=rail, at_op=steady.FIRST_OP)
            for node, rail in lost
        ]
    )
    with steady.make_lab() as lab:
        reports = steady.run_steady(
            lab,
            plan,
            from_op=steady.FIRST_OP + NOPS,
            lasting_s=0.0,
            nbytes=NBYTES,
            env={"R2CC_ALGO": algo},
            timeout_s=150,
        )
    found = steady.operations(reports)
    without_s = statistics.median(each.took_s for each in found[-SETTLED:])
    return without_s / steady.healthy_s(found)


def bound(lost: Sequence[tuple[int, int]]) -> Fraction:
    """Return the least any schedule can do, as such a multiple; also for nodes as single ports."""
    left = [steady.RAILS - sum(node == each for node, _ in lost) for each in range(steady.NODES)]
    return lower_bound(left) / lower_bound([steady.RAILS] * steady.NODES)


@pytest.mark.timeout(60 + 400 * RUNS)
@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_a_degraded_node_costs_less_with_packed_trees(lost: list[tuple[int, int]]) -> None:
    found = {algo: [relative(lost, algo) for _ in range(RUNS)] for algo in ("ring", "auto")}
    print(
        f"{NBYTES >> 20} MiB on {steady.NODES} nodes of {steady.RAILS} rails, without NICs {lost}: "
        f"{RUNS} runs (minimum / median / maximum), multiples of the time with all of them; "
        f"no schedule can do better than {float(bound(lost)):.3f}"
    )
    for algo, times in found.items():
        print(f"  R2CC_ALGO={algo}: {steady.spread(times, 3, 1)}")
    assert statistics.median(found["auto"]) < statistics.median(found["ring"])
