"""Time of the first call between two ranks that have no paths to each other, in a netlab.

Such a call waits until the paths are connected, on all rails. The ranks are nodes of their own, and
those that do not take part in the call sleep, because all share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import add_json_argument, write_json
from labs import Failure, last_lines, ready_for_labs

from r2ccl.cli.values import parse_counts
from r2ccl.testing.netlab import Lab

_RANK = Path(__file__).with_name("first_call_rank.py")
_RAILS = 2
_TIMEOUT_S = 300.0


def measure(nodes: int) -> dict[str, Any]:
    """Return the times in milliseconds of the calls of one job."""
    env = {"PYTHONPATH": str(_RANK.parents[1])}
    with Lab(nodes=nodes, rails=_RAILS) as lab:
        said = last_lines(lab, _RANK, env=env, timeout_s=_TIMEOUT_S)
    found = list(map(json.loads, said))
    # At most one end does not wait: the one that calls after the other has connected both.
    nconnects = sum(each["nconnects"] for each in found)
    if not nodes <= nconnects <= 2 * nodes:
        raise Failure(f"{nconnects} calls of {nodes} pairs of ranks waited for paths")
    calls = [call for each in found for call in each["calls"]]
    first, again = (sorted(times) for times in zip(*calls, strict=True))
    return {
        "nodes": nodes,
        "rails": _RAILS,
        "ncalls": len(calls),
        "nconnects": nconnects,
        "first_ms_median": statistics.median(first),
        "first_ms_max": first[-1],
        "again_ms_median": statistics.median(again),
    }


def report(row: dict[str, Any]) -> dict[str, Any]:
    """Print the figures of one job, and return them."""
    print(
        f"{row['nodes']} nodes, {row['rails']} rails, {row['ncalls']} calls: first call median "
        f"{row['first_ms_median']:.1f} ms, at most {row['first_ms_max']:.1f} ms; repeated, "
        f"median {row['again_ms_median']:.2f} ms",
        flush=True,
    )
    return row


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="Time of the first call between two ranks.")
    parser.add_argument("--nodes", type=parse_counts, default=parse_counts("8,16"))
    add_json_argument(parser)
    args = parser.parse_args()
    if any(nodes < 8 or nodes.bit_count() != 1 for nodes in args.nodes):
        parser.error("--nodes: in jobs of 8, 16, 32, ... no paths join the ranks that are measured")
    with ready_for_labs("first_call"):
        rows = [report(measure(nodes)) for nodes in args.nodes]
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
