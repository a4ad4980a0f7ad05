"""Large allreduces after NICs are lost, on real sockets: time of each schedule.

A job runs allreduces over all rails, loses NICs between two of them, and continues. Times before
and after are multiples of the ring's time with all NICs.

R2CC_CAMPAIGN_RUNS sets the number of runs, of 64 MiB; the default is one run of 16 MiB. Figures are
printed. The tests assert that every result is exact, and that a node that lost bandwidth slows
packed trees down less, relative to their time, than the ring.
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
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}"),
]

RUNS = int(os.environ.get("R2CC_CAMPAIGN_RUNS", "1"))
NBYTES = 64 << 20 if RUNS > 1 else 16 << 20
#: Operations with the NICs lost, and how many of the last ones are measured.
NOPS, SETTLED = 10, 6
#: Lost NICs, as (node, rail).
LOST = {
    "one NIC": [(2, 1)],
    "one NIC here, two there": [(0, 3), (2, 0), (2, 2)],
}


def times(lost: Sequence[tuple[int, int]], algo: str) -> tuple[float, float]:
    """Run one job; return the seconds per operation with all NICs, and without those in `lost`."""
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
            env={"R2CC_MODE": "auto", "R2CC_ALGO": algo},
            timeout_s=150,
        )
    found = steady.operations(reports)
    return steady.healthy_s(found), statistics.median(each.took_s for each in found[-SETTLED:])


def bound(lost: Sequence[tuple[int, int]]) -> Fraction:
    """Return the lower bound of any schedule, as a multiple of that with all NICs.

    The bound also holds for nodes as single ports.
    """
    left = [steady.RAILS - sum(node == each for node, _ in lost) for each in range(steady.NODES)]
    return lower_bound(left) / lower_bound([steady.RAILS] * steady.NODES)


@pytest.mark.timeout(60 + 400 * RUNS)
@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_a_degraded_node_costs_packed_trees_less(lost: list[tuple[int, int]]) -> None:
    found = {algo: [times(lost, algo) for _ in range(RUNS)] for algo in ("ring", "packed_trees")}
    ring_s = statistics.median(healthy for healthy, _ in found["ring"])
    print(
        f"{NBYTES >> 20} MiB on {steady.NODES} nodes of {steady.RAILS} rails, without NICs {lost}: "
        f"{RUNS} runs (minimum / median / maximum), multiples of the ring's time with all of them; "
        f"without them no schedule can do better than {float(bound(lost)):.3f}"
    )
    for algo, both in found.items():
        healthy, degraded = (
            steady.spread([each / ring_s for each in column], 3, 1)
            for column in zip(*both, strict=True)
        )
        print(f"  R2CC_ALGO={algo}: {healthy} with, {degraded} without")
    costs = {
        algo: statistics.median(degraded / healthy for healthy, degraded in both)
        for algo, both in found.items()
    }
    assert costs["packed_trees"] < costs["ring"]
