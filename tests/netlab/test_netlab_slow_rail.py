"""Rail that loses three quarters of its rate without failing, on real sockets.

The NIC of one node is shaped to a quarter of its rate, in both directions. This node, which has
3.25 of 4 rails left, then limits a ring. The same job is measured with work distributed by measured
bandwidth, and without (R2CC_BALANCE=0).

R2CC_CAMPAIGN_RUNS sets the number of runs (default 1), each a separate job. Figures are printed.
The tests assert that every result is exact, that no rail was declared failed, and that balancing
makes the difference.
"""

from __future__ import annotations

import os
import random
import statistics
from itertools import pairwise
from typing import NamedTuple

import pytest
from netlab import steady

from r2ccl.failover.health.table import WHOLE
from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}"),
]

RUNS = int(os.environ.get("R2CC_CAMPAIGN_RUNS", "1"))
SLOW_SHARE = 0.25
#: Largest share of its healthy throughput that a ring can reach while one rail of a node is slow.
ALLOWED = (steady.RAILS - 1 + SLOW_SHARE) / steady.RAILS
#: Operations while the rail is slow, with and without balancing; the second half is measured.
SLOW_OPS = {"1": 16, "0": 6}
#: Throughput that counts as adapted, relative to `ALLOWED`, and as back, relative to healthy.
ADAPTED, BACK = 0.9, 0.97
#: Seconds of operations after the rail is back.
AFTER_S = {"1": 5.0, "0": 2.0}
#: Least share of a NIC at its full rate; it is `WHOLE`, but less on a busy machine.
OTHERS = 0.75 * WHOLE
#: Smallest accepted gain of balancing; it is above three, but less on a busy machine.
GAIN = 1.5


class Figures(NamedTuple):
    """One job: throughput relative to the healthy one, while the rail is slow and afterwards.

    ``adapted_s`` and ``back_s`` are seconds from the change of rate, as in `steady.reached_s`. The
    others describe the health: the least share of the NIC and its last one, the least share of any
    NIC of another rail, and the number of operations after which it had changed.
    """

    of_line: float
    slow: float
    adapted_s: float
    back: float
    back_s: float
    least_share: int
    last_share: int
    others_share: int
    nchanges: int


def measure(lab: Lab, balance: str, rng: random.Random) -> Figures:
    """Run one job, and return its figures."""
    nic = {"node": rng.randrange(steady.NODES), "rail": rng.randrange(steady.RAILS)}
    restore_op = steady.FIRST_OP + SLOW_OPS[balance]
    rate = f"{SLOW_SHARE * steady.RATE_MBPS:.0f}mbit"
    plan = FaultPlan(
        [
            Fault(action=Action.SLOW, at_op=steady.FIRST_OP, rate=rate, **nic),
            Fault(action=Action.RESTORE, at_op=restore_op, **nic),
        ]
    )
    reports = steady.run_steady(
        lab,
        plan,
        from_op=restore_op,
        lasting_s=AFTER_S[balance],
        env={"R2CC_BALANCE": balance},
        timeout_s=120,
    )
    assert not any(report.repairs for report in reports), "a slow rail is no broken rail"
    found = steady.operations(reports)
    healthy_s = steady.healthy_s(found)
    slow_s, restored_s = (
        steady.firing(plan, action).time_s for action in (Action.SLOW, Action.RESTORE)
    )
    place = nic["node"] * steady.RAILS + nic["rail"]
    settled = found[restore_op - SLOW_OPS[balance] // 2 : restore_op]
    figures = Figures(
        of_line=steady.of_line(healthy_s),
        slow=healthy_s / statistics.median(each.took_s for each in settled),
        adapted_s=steady.reached_s(found[:restore_op], healthy_s / (ADAPTED * ALLOWED), slow_s),
        back=healthy_s / statistics.median(each.took_s for each in found[-steady.WINDOW :]),
        back_s=steady.reached_s(found, healthy_s / BACK, restored_s),
        least_share=min(each.shares[place] for each in found),
        last_share=found[-1].shares[place],
        others_share=min(
            share
            for each in found
            for at, share in enumerate(each.shares)
            if at % steady.RAILS != nic["rail"]
        ),
        nchanges=sum(after.shares != before.shares for before, after in pairwise(found)),
    )
    print(f"balance {balance}: {steady.row(figures)}")
    return figures


def show(title: str, found: list[Figures]) -> None:
    """Print the figures of all runs of one kind."""
    slow = [each.slow for each in found]
    print(
        f"{title}\n"
        f"  healthy   {steady.spread([each.of_line for each in found], 1, 100)} % of the line\n"
        f"  slow      {steady.spread(slow, 1, 100)} % of healthy = "
        f"{steady.spread([each / ALLOWED for each in slow], 1, 100)} % of what is left, "
        f"{ADAPTED:.0%} of that after {steady.spread([each.adapted_s for each in found])} ms\n"
        f"  restored  {steady.spread([each.back for each in found], 1, 100)} % of healthy, "
        f"{BACK:.0%} after {steady.spread([each.back_s for each in found])} ms\n"
        f"  shares    of the NIC least {[each.least_share for each in found]} and at the end "
        f"{[each.last_share for each in found]} of {WHOLE}, of other rails least "
        f"{[each.others_share for each in found]}, changes {[each.nchanges for each in found]}"
    )


@pytest.mark.timeout(180 + 120 * RUNS)
def test_work_is_shared_out_by_what_rails_give() -> None:
    rng = random.Random(31)
    with steady.make_lab() as lab:
        static = [measure(lab, "0", rng) for _ in range(RUNS)]
        balanced = [measure(lab, "1", rng) for _ in range(RUNS)]
    print(
        f"one rail of a node at {SLOW_SHARE:.0%} of its rate, both ways; {ALLOWED:.1%} is left; "
        f"{RUNS} runs (minimum / median / maximum; {steady.settings()})"
    )
    show("without balancing", static)
    show("with balancing", balanced)
    assert all(each.nchanges == 0 for each in static)
    assert all(each.least_share < WHOLE for each in balanced), "no rank said that a rail is slow"
    assert all(each.last_share > each.least_share for each in balanced), "it is still called slow"
    assert statistics.median(each.slow for each in balanced) > GAIN * statistics.median(
        each.slow for each in static
    )


@pytest.mark.timeout(300)
def test_a_node_whose_nics_are_all_slow_is_known_and_no_other() -> None:
    node = 2
    faults = [
        Fault(
            action=Action.SLOW,
            node=node,
            rail=rail,
            at_op=steady.FIRST_OP,
            rate=f"{SLOW_SHARE * steady.RATE_MBPS:.0f}mbit",
        )
        for rail in range(steady.RAILS)
    ]
    last_op = steady.FIRST_OP + 4 * SLOW_OPS["1"]
    with steady.make_lab() as lab:
        reports = steady.run_steady(
            lab,
            FaultPlan(faults),
            from_op=last_op,
            lasting_s=0.1,
            env={"R2CC_MODE": "auto"},
            timeout_s=240,
        )
    assert not any(report.repairs for report in reports), "a slow rail is no broken rail"
    found = steady.operations(reports)
    shares = [found[-1].shares[at : at + steady.RAILS] for at in _starts()]
    taken = [each.took_s for each in found]
    healthy_s = steady.healthy_s(found)
    print(f"healthy {healthy_s:.3f} s, at the end {statistics.median(taken[-8:]):.3f} s, {shares}")
    assert all(3 <= share <= 6 for share in shares.pop(node)), "its NICs give a quarter"
    assert min(share for row in shares for share in row) >= OTHERS, "the others are whole"


def _starts() -> range:
    return range(0, steady.NODES * steady.RAILS, steady.RAILS)
