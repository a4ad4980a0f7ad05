"""Goodput of the failover bench: of each call around a fault, and of each state of the cluster.

Pure functions of the times at which calls began and ended.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from failover_job import Operation

from r2ccl.algos import packed_trees
from r2ccl.testing import Action, Fault

NODES = RAILS = 4
#: Bucket of each NIC's shaper, in bytes. It fills while the ranks verify, then exceeds the rate.
BURST_NBYTES = 256 << 10
#: Divisor of a slow NIC's rate.
SLOW_PART = 4
#: Faults that cost a node a whole NIC. A fault that separates one pair, or ends by itself, leaves
#: every node its bandwidth.
_TAKES_ALL = (Action.NIC_DOWN, Action.SWITCH_PORT_DOWN, Action.BLACKHOLE)


def goodput_mbps(operations: Sequence[Operation], nbytes: int) -> float:
    """Return the goodput per rank in Mbit/s, without the bytes that shapers let pass at once."""
    seconds = sum(each.ended_s - each.begun_s for each in operations)
    shaped_nbytes = 2 * (NODES - 1) / NODES * nbytes - RAILS * BURST_NBYTES
    return 8e-6 * len(operations) * max(0.0, shaped_nbytes) / seconds


def bound_share(fault: Fault) -> float:
    """Return the share of the line rate that the best schedule could reach under a fault."""
    whole = [RAILS * SLOW_PART] * NODES
    left = list(whole)
    if fault.node is not None and fault.action in _TAKES_ALL:
        left[fault.node] -= SLOW_PART
    if fault.node is not None and fault.action is Action.SLOW:
        left[fault.node] -= SLOW_PART - 1
    return float(packed_trees.lower_bound(whole) / packed_trees.lower_bound(left))


def call_rows(
    operations: Sequence[Operation], nbytes: int, fault: Fault, run: int, cut_s: float
) -> list[dict[str, Any]]:
    """Return the curve of one fault: an object per call, its times in seconds since the cut."""
    return [
        {
            "measure": "call",
            "fault": str(fault.action),
            "run": run,
            "begun_s": each.begun_s - cut_s,
            "ended_s": each.ended_s - cut_s,
            "mbps": goodput_mbps([each], nbytes),
        }
        for each in operations
    ]


def state_rows(rows: Sequence[dict[str, Any]], line_mbps: float) -> list[dict[str, Any]]:
    """Return the goodput of each state, healthy and under each lasting fault, over all runs.

    `rows` are those of faults and of calls. Calls that a fault interrupted do not count for the
    state under that fault: their time is that of the repair.
    """
    faults = [row for row in rows if row["measure"] == "fault"]
    before = [row["mbps"] for row in rows if row["measure"] == "call" and row["ended_s"] < 0]
    healthy = statistics.median(before)
    made = [_state("healthy", before, healthy, line_mbps)]
    for kind in dict.fromkeys(row["fault"] for row in faults):
        spans = {
            row["run"]: row for row in faults if row["fault"] == kind and row["lasts_s"] is not None
        }
        calls = [
            row["mbps"]
            for row in rows
            if row["measure"] == "call"
            and row["fault"] == kind
            and row["run"] in spans
            and row["begun_s"] > spans[row["run"]]["struck_s"]
            and row["ended_s"] < spans[row["run"]]["lasts_s"]
        ]
        if calls:
            share = next(iter(spans.values()))["bound_share"]
            made.append(_state(f"under {kind}", calls, healthy, share * line_mbps))
    return made


def _state(
    state: str, mbps: Sequence[float], healthy_mbps: float, bound_mbps: float
) -> dict[str, Any]:
    median = statistics.median(mbps)
    return {
        "measure": "goodput",
        "state": state,
        "ncalls": len(mbps),
        "mbps": median,
        "worst_mbps": min(mbps),
        "bound_mbps": bound_mbps,
        "share_of_healthy": median / healthy_mbps,
        "share_of_bound": median / bound_mbps,
        "worst_share_of_bound": min(mbps) / bound_mbps,
    }


__all__ = [
    "BURST_NBYTES", "NODES", "RAILS", "SLOW_PART", "bound_share", "call_rows", "goodput_mbps",
    "state_rows",
]  # fmt: skip
