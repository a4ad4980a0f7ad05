"""Return of a rail that recovers, and of one that flaps, on real sockets.

R2CC_CAMPAIGN_RUNS sets the number of runs (default 1), each a separate job. Times are printed; they
start just before the kernel is asked for the restore. The tests assert that every result is exact,
that the fault occurred, and that the traffic returns.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from netlab import steady

from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}"),
]

RUNS = int(os.environ.get("R2CC_CAMPAIGN_RUNS", "1"))
#: Operations while the port is down; each takes a third of a second then.
DOWN_OPS = 5
RESTORE_OP = steady.FIRST_OP + DOWN_OPS
#: Share of the healthy throughput to reach, and the seconds in which it should be reached.
ENOUGH, SHOULD_S = 0.97, 2.0
AFTER_S = 4.0

#: Seconds and number of flaps; a campaign flaps for a minute, three times.
IS_CAMPAIGN = RUNS >= 50
FLAP_S, FLAP_RUNS = (60.0, 3) if IS_CAMPAIGN else (6.0, 1)
FLAP_MEAN_S = 0.4
TOGETHER_S = 0.05


class Return(NamedTuple):
    """Return of a restored rail: seconds since the restore, and throughput.

    ``up_s`` is when the last path of the NIC was in use at both ends. ``first_s`` and
    ``everywhere_s`` are when the first and the last end that had received payload on the rail
    received a slice again. ``throughput_s`` is `steady.reached_s`. ``share`` is the throughput from
    `SHOULD_S` on relative to the healthy one, and ``of_line`` relative to the line rate.
    ``least_share`` is the least share, in sixteenths, that any rank knew of any NIC meanwhile.
    """

    up_s: float
    first_s: float
    everywhere_s: float
    throughput_s: float
    share: float
    of_line: float
    least_share: int


def look_at_return(plan: FaultPlan, reports: Sequence[steady.Report]) -> Return:
    """Return the times of one run."""
    cut_s = steady.firing(plan, Action.SWITCH_PORT_DOWN).time_s
    restored_s = steady.firing(plan, Action.RESTORE).time_s
    repairs = [repair for report in reports for repair in report.repairs]
    assert {repair.rail for repair in repairs} == {plan.faults[0].rail}
    ups = [repair.restored_s for repair in repairs]
    assert min(ups) > restored_s, "a path of the rail is still out of use, or was never cut"
    returns = []
    for rank, report in enumerate(reports):
        for peer, times in report.arrivals.items():
            if any(time < cut_s for time in times):
                later = [time for time in times if time > restored_s]
                assert later, f"rank {rank} gets nothing over the rail from rank {peer} any more"
                returns.append(later[0] - restored_s)
    assert len(returns) >= 2, "the rail carried nothing before the fault, in one direction at least"
    found = steady.operations(reports)
    healthy_s = steady.healthy_s(found)
    late = [each for each in found if each.begun_s >= restored_s + SHOULD_S]
    return Return(
        max(ups) - restored_s,
        min(returns),
        max(returns),
        steady.reached_s(found, healthy_s / ENOUGH, restored_s),
        healthy_s / statistics.median(each.took_s for each in late),
        steady.of_line(healthy_s),
        min(share for each in late for share in each.shares),
    )


@pytest.mark.timeout(120 + 60 * RUNS)
def test_a_restored_rail_carries_again() -> None:
    rng = random.Random(17)
    found = []
    with steady.make_lab() as lab:
        for _ in range(RUNS):
            nic = {"node": rng.randrange(steady.NODES), "rail": rng.randrange(steady.RAILS)}
            plan = FaultPlan(
                Fault(action=action, at_op=op, at_step=rng.randrange(steady.STEPS), **nic)
                for action, op in (
                    (Action.SWITCH_PORT_DOWN, steady.FIRST_OP),
                    (Action.RESTORE, RESTORE_OP),
                )
            )
            reports = steady.run_steady(
                lab, plan, from_op=RESTORE_OP, lasting_s=AFTER_S, whole_s=AFTER_S, timeout_s=60
            )
            found.append(look_at_return(plan, reports))
            print(steady.row(found[-1]))
    in_time = sum(max(each.everywhere_s, each.throughput_s) <= SHOULD_S for each in found)
    print(
        f"switch port restored, {RUNS} runs (minimum / median / maximum; {steady.settings()}):\n"
        f"  paths in use          {steady.spread([each.up_s for each in found])} ms\n"
        f"  first payload         {steady.spread([each.first_s for each in found])} ms\n"
        f"  payload at every end  {steady.spread([each.everywhere_s for each in found])} ms\n"
        f"  {ENOUGH:.0%} of throughput     "
        f"{steady.spread([each.throughput_s for each in found])} ms, with payload at every end "
        f"within {SHOULD_S:g} s: {in_time}/{RUNS}\n"
        f"  throughput from {SHOULD_S:g} s on "
        f"{steady.spread([each.share for each in found], 1, 100)} % of healthy, which is "
        f"{steady.spread([each.of_line for each in found], 1, 100)} % of the line"
    )


class Thirds(NamedTuple):
    """Events of one flap at the NIC's node, by thirds of its time.

    ``losses`` are losses of the carrier; ``migrations`` those that found the rail in use, so that
    work moved; ``paths`` the paths that were taken out of use.
    """

    losses: list[int]
    migrations: list[int]
    paths: list[int]


def look_at_flap(plan: FaultPlan, reports: Sequence[steady.Report]) -> Thirds:
    """Count the events in each third."""
    fault, begun_s = plan.faults[0], plan.fired[0].time_s
    assert fault.node is not None
    own = reports[fault.node]
    failed = sorted(repair.failed_s for repair in own.repairs)
    # All paths in use are taken out of use together when the carrier is lost.
    migrations = failed[:1] + [
        after for before, after in itertools.pairwise(failed) if after - before > TOGETHER_S
    ]

    def by_thirds(times: Sequence[float]) -> list[int]:
        thirds = [math.floor(3 * (time - begun_s) / FLAP_S) for time in times]
        return [thirds.count(third) for third in range(3)]

    return Thirds(by_thirds(own.losses), by_thirds(migrations), by_thirds(failed))


def flap(lab: Lab, run: int, rng: random.Random) -> Thirds:
    """Let one NIC flap through one job."""
    fault = Fault(
        action=Action.FLAP, node=rng.randrange(steady.NODES), rail=rng.randrange(steady.RAILS),
        at_op=steady.FIRST_OP, at_step=rng.randrange(steady.STEPS),
        duration_s=FLAP_S, mean_s=FLAP_MEAN_S, seed=run,
    )  # fmt: skip
    plan = FaultPlan([fault])
    reports = steady.run_steady(
        lab, plan, from_op=steady.FIRST_OP, lasting_s=FLAP_S + 1, timeout_s=60 + FLAP_S
    )
    assert {repair.rail for report in reports for repair in report.repairs} == {fault.rail}
    return look_at_flap(plan, reports)


@pytest.mark.timeout(120 + 2 * FLAP_RUNS * FLAP_S)
def test_a_flapping_rail_is_left_alone_more_and_more() -> None:
    rng = random.Random(23)
    with steady.make_lab() as lab:
        found = [flap(lab, run, rng) for run in range(FLAP_RUNS)]
    print(f"flap of {FLAP_S:g} s, mean {FLAP_MEAN_S:g} s ({steady.settings()}):")
    for each in found:
        shares = " / ".join(
            f"{moved / max(1, losses):.0%}"
            for moved, losses in zip(each.migrations, each.losses, strict=True)
        )
        print(
            f"  by thirds: {each.losses} carrier losses, {each.migrations} of them moved work "
            f"({shares}), {each.paths} paths; every result exact"
        )
    assert all(sum(each.losses) > 1 for each in found), "the rail did not flap"
    assert all(each.migrations[0] for each in found), "the flap never moved anything"
    if IS_CAMPAIGN:
        assert sum(each.migrations[-1] for each in found) < sum(
            each.migrations[0] for each in found
        )
