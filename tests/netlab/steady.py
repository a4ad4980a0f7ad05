"""Jobs of `steady_rank.py`: start in a lab, and evaluation of the reports of their ranks.

Throughput is that of operations, without the time between them. The time of an operation is the
median over the ranks of the duration of their calls. Its share of the line rate excludes the bytes
that shapers' buckets let pass unshaped.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from r2ccl.config import Config
from r2ccl.failover.migration.repairs import Repair
from r2ccl.testing import Action, FaultPlan, Firing
from r2ccl.testing.netlab import Lab

ROOT = Path(__file__).parents[2]
NODES = RAILS = 4
RATE_MBPS = 200
BURST_NBYTES = 256 << 10
NBYTES = 16 << 20
#: Smallest number of slices that a rank posts in one operation of `NBYTES`.
STEPS = 70
#: The first operations meet cold TCP windows and unmapped pages; the next give the healthy figure.
WARMUP, HEALTHY = 3, 10
#: First operation that may meet a fault.
FIRST_OP = WARMUP + HEALTHY
#: Operations whose median throughput must be high enough before it counts as reached.
WINDOW = 5

_INIT_S = 60.0


class Said(msgspec.Struct, frozen=True):
    """One rank's report of one operation; ``shares`` is the health it knew afterwards."""

    begun_s: float
    ended_s: float
    shares: list[int]


class Report(msgspec.Struct, frozen=True):
    """One rank's report of the job: the last line of `steady_rank.py`."""

    operations: list[Said]
    arrivals: dict[int, list[float]]
    losses: list[float]
    repairs: list[Repair]


class Operation(NamedTuple):
    """One allreduce of the job.

    ``begun_s`` is when the last rank called it, ``took_s`` the median duration over the ranks;
    ``shares`` are the least share of each NIC that any rank knew afterwards, node by node.
    """

    begun_s: float
    took_s: float
    shares: tuple[int, ...]


def make_lab() -> Lab:
    """Build the lab of these jobs."""
    return Lab(nodes=NODES, rails=RAILS, rate=f"{RATE_MBPS}mbit", burst=f"{BURST_NBYTES >> 10}kb")


def run_steady(
    lab: Lab,
    plan: FaultPlan,
    *,
    from_op: int,
    lasting_s: float,
    whole_s: float = 0.0,
    nbytes: int = NBYTES,
    env: dict[str, str] | None = None,
    timeout_s: float,
) -> list[Report]:
    """Run one job whose plan breaks one NIC, that of its first fault; see `steady_rank.Task`."""
    task = {
        "nbytes": nbytes,
        "node": plan.faults[0].node,
        "rail": plan.faults[0].rail,
        "from_op": from_op,
        "lasting_s": lasting_s,
        "whole_s": whole_s,
    }
    lines: list[str] = []
    results = lab.run(
        [
            sys.executable,
            str(Path(__file__).with_name("steady_rank.py")),
            msgspec.json.encode(task).decode(),
        ],
        # Rings only: all operations take equally long, and have the slices at which faults occur.
        env={"PYTHONPATH": str(ROOT), "R2CC_MODE": "balance", **(env or {})},
        plan=plan,
        timeout_s=_INIT_S + timeout_s,
        sink=lines.append,
    )
    lab.restore()
    assert all(each.returncode == 0 for each in results), "\n".join(line[:2000] for line in lines)
    plan.assert_all_fired()
    return [
        msgspec.json.decode(each.output.strip().splitlines()[-1], type=Report) for each in results
    ]


def firing(plan: FaultPlan, action: Action) -> Firing:
    """Return the firing of the plan's only fault with this action."""
    (found,) = [each for each in plan.fired if each.fault.action is action]
    return found


def operations(reports: Sequence[Report]) -> list[Operation]:
    """Combine the reports of all ranks into one record per operation."""
    return [
        Operation(
            max(each.begun_s for each in said),
            statistics.median(each.ended_s - each.begun_s for each in said),
            tuple(map(min, zip(*(of_rails(each.shares) for each in said), strict=True))),
        )
        for said in zip(*(report.operations for report in reports), strict=True)
    ]


def of_rails(shares: Sequence[int]) -> list[int]:
    """Return the shares of the rails, without those of each node's last resort."""
    width = len(shares) // NODES
    return [share for at, share in enumerate(shares) if at % width < RAILS]


def healthy_s(found: Sequence[Operation]) -> float:
    """Return the median time of the operations before the first fault."""
    return statistics.median(each.took_s for each in found[WARMUP:FIRST_OP])


def reached_s(found: Sequence[Operation], least_s: float, since_s: float) -> float:
    """Return seconds from `since_s` until operations take at most `least_s`; infinite if never.

    The time is the begin of the first operation that is fast enough and starts a window of `WINDOW`
    operations whose median is fast enough. Only operations begun after `since_s` count.
    """
    after = [each for each in found if each.begun_s >= since_s]
    for first in range(len(after) - WINDOW + 1):
        window = [each.took_s for each in after[first : first + WINDOW]]
        if max(window[0], statistics.median(window)) <= least_s:
            return after[first].begun_s - since_s
    return float("inf")


def mbps(took_s: float) -> float:
    """Return the Mbit/s that each rank sends at the shaped rate in an operation of `took_s`."""
    shaped_nbytes = 2 * (NODES - 1) / NODES * NBYTES - RAILS * BURST_NBYTES
    return 8e-6 * shaped_nbytes / took_s


def of_line(took_s: float) -> float:
    """Return the throughput as a share of the line rate of all NICs of a node."""
    return mbps(took_s) / (RAILS * RATE_MBPS)


def settings() -> str:
    """Format the settings in force in the ranks, on which the figures depend."""
    config = Config.from_env(os.environ)
    return (
        f"{NODES} nodes, {RAILS} rails of {RATE_MBPS} Mbit/s, operations of {NBYTES >> 20} MiB; "
        f"K={config.failback_probes} probes W={config.failback_interval_s:g} s apart, "
        f"cap {config.failback_cap_s:g} s; timeouts: suspicion {config.suspicion_timeout_s:g} s, "
        f"probe {config.probe_timeout_s:g} s, no rail {config.no_rail_timeout_s:g} s"
    )


def row(figures: tuple[float, ...]) -> str:
    """Format the figures of one run, a named tuple, and the load of the machine."""
    names = figures._fields  # type: ignore[attr-defined]
    said = [f"{name} {value:.3g}" for name, value in zip(names, figures, strict=True)]
    return ", ".join([*said, f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"])


def spread(values: Sequence[float], digits: int = 0, scale: float = 1e3) -> str:
    """Format minimum, median and maximum, in milliseconds unless `scale` is given."""
    marks = (min(values), statistics.median(values), max(values))
    return " / ".join(f"{scale * each:.{digits}f}" for each in marks)


__all__ = [
    "BURST_NBYTES",
    "FIRST_OP",
    "HEALTHY",
    "NBYTES",
    "NODES",
    "RAILS",
    "RATE_MBPS",
    "STEPS",
    "WARMUP",
    "WINDOW",
    "Operation",
    "Report",
    "Said",
    "firing",
    "healthy_s",
    "make_lab",
    "mbps",
    "of_line",
    "operations",
    "reached_s",
    "row",
    "run_steady",
    "settings",
    "spread",
]
