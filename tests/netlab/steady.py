"""Jobs of `steady_rank.py`: started in a lab, and what is read from what their ranks say.

Throughput is that of operations, not of the time between them. The time of one is the median over
the ranks of how long their calls took. What it is of the line is counted as if nothing but the
shaped rate carried it: bytes that a shaper's bucket had saved up before are taken off.
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
#: Slices a rank posts in one operation of `NBYTES`, at least.
STEPS = 70
#: The first operations meet cold windows and fresh pages; those after give the healthy figure.
WARMUP, HEALTHY = 3, 10
#: The first operation that may meet a fault.
FIRST_OP = WARMUP + HEALTHY
#: Operations over whose median throughput must hold before it counts as reached.
WINDOW = 5

_INIT_S = 60.0


class Said(msgspec.Struct, frozen=True):
    """What one rank says of one operation; ``shares`` is the health it knew afterwards."""

    begun_s: float
    ended_s: float
    shares: list[int]


class Report(msgspec.Struct, frozen=True):
    """What one rank says of the job: the last line of `steady_rank.py`."""

    operations: list[Said]
    arrivals: dict[int, list[float]]
    losses: list[float]
    repairs: list[Repair]


class Operation(NamedTuple):
    """One allreduce of the job.

    ``begun_s`` is when the last rank called it, ``took_s`` the median over the ranks; ``shares``
    are the least any rank knew of each NIC after it, node by node.
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
        # Rings alone: all operations take alike, and have the slices that faults strike at.
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
    """Return when the plan's fault of this kind was applied."""
    (found,) = [each for each in plan.fired if each.fault.action is action]
    return found


def operations(reports: Sequence[Report]) -> list[Operation]:
    """Put together what all ranks say of each operation."""
    return [
        Operation(
            max(each.begun_s for each in said),
            statistics.median(each.ended_s - each.begun_s for each in said),
            tuple(map(min, zip(*(of_rails(each.shares) for each in said), strict=True))),
        )
        for said in zip(*(report.operations for report in reports), strict=True)
    ]


def of_rails(shares: Sequence[int]) -> list[int]:
    """Leave out what lies behind the rails of each node: its last resort."""
    width = len(shares) // NODES
    return [share for at, share in enumerate(shares) if at % width < RAILS]


def healthy_s(found: Sequence[Operation]) -> float:
    """Median time of the operations before the first fault."""
    return statistics.median(each.took_s for each in found[WARMUP:FIRST_OP])


def reached_s(found: Sequence[Operation], least_s: float, since_s: float) -> float:
    """Seconds from `since_s` until operations take at most `least_s`, infinite if they never do.

    That is when the first one begins that does and with which begin `WINDOW` whose median does,
    all of them begun after `since_s`.
    """
    after = [each for each in found if each.begun_s >= since_s]
    for first in range(len(after) - WINDOW + 1):
        window = [each.took_s for each in after[first : first + WINDOW]]
        if max(window[0], statistics.median(window)) <= least_s:
            return after[first].begun_s - since_s
    return float("inf")


def mbps(took_s: float) -> float:
    """Mbit/s each rank sends at the shaped rate in an operation that takes so long."""
    shaped_nbytes = 2 * (NODES - 1) / NODES * NBYTES - RAILS * BURST_NBYTES
    return 8e-6 * shaped_nbytes / took_s


def of_line(took_s: float) -> float:
    """Part of the line rate of all NICs of a node."""
    return mbps(took_s) / (RAILS * RATE_MBPS)


def settings() -> str:
    """Spell what the figures depend on, as it is in force in the ranks."""
    config = Config.from_env(os.environ)
    return (
        f"{NODES} nodes, {RAILS} rails of {RATE_MBPS} Mbit/s, operations of {NBYTES >> 20} MiB; "
        f"K={config.failback_probes} probes W={config.failback_interval_s:g} s apart, "
        f"cap {config.failback_cap_s:g} s; timeouts: suspicion {config.suspicion_timeout_s:g} s, "
        f"probe {config.probe_timeout_s:g} s, no rail {config.no_rail_timeout_s:g} s"
    )


def row(figures: tuple[float, ...]) -> str:
    """Spell the figures of one run, a named tuple, and how busy the machine is."""
    names = figures._fields  # type: ignore[attr-defined]
    said = [f"{name} {value:.3g}" for name, value in zip(names, figures, strict=True)]
    return ", ".join([*said, f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"])


def spread(values: Sequence[float], digits: int = 0, scale: float = 1e3) -> str:
    """Spell minimum, median and maximum, in milliseconds unless scaled otherwise."""
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
