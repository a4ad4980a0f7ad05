"""Measure what each kind of fault costs: detection, repair, bytes replayed, goodput around it.

Four nodes with four NICs each in a netlab run verified allreduces without end. A fault occurs at a
random moment, lasts for some operations, and is reverted. When all rails work again, the next fault
follows. Only one job is started, so many faults fit into a minute.

Every time starts just before the kernel is asked for the fault, so it includes the kernel's own
work. Throughput is goodput: the bytes a rank must send, 2(n-1)/n of the data, less what the
shapers' buckets held before each operation, divided by the time of the operations. It is measured
in steady state before, during and after a fault, and compared with the most that any schedule could
reach with what the fault leaves. If one element is wrong, the bench exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import statistics
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import add_json_argument, write_json
from failover_goodput import (
    BURST_NBYTES,
    NODES,
    RAILS,
    SLOW_PART,
    bound_share,
    call_rows,
    goodput_mbps,
    state_rows,
)
from failover_job import Cluster, Operation
from failover_report import plot, print_incident, print_summary
from labs import ready_for_labs
from rich.console import Console

from r2ccl.cli.values import parse_size
from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.testing import Action, Fault, Firing
from r2ccl.testing.netlab import Lab, LabShape

KINDS = tuple(action for action in Action if action not in (Action.RESTORE, Action.KILL))

#: Operations per steady-state measurement.
_NOPS = 3
#: Windows of `_NOPS` operations to wait for at most, and the relative difference below which two
#: consecutive windows count as steady.
_MOST_WINDOWS, _STEADY = 20, 0.02
#: Operations not measured: they meet cold TCP windows and unmapped pages.
_WARMUP = 3
#: Seconds that NICs flap, or ranks are stopped.
_DURATION_S = 1.0
_FLAP_MEAN_S = 0.1
#: A fault that does not end by itself lasts for at least this many operations.
_LEAST_DURING = 12
#: Least size of an operation: a smaller one fits into the buckets of the shapers, so that it shows
#: nothing of their rate.
_LEAST_NBYTES = 1 << 20
#: Columns of the table: more than the 80 that rich assumes for a pipe.
_WIDTH = 120


def draw_fault(kind: Action, rng: random.Random, rate_mbps: int) -> Fault:
    """Return a fault of `kind` on a random NIC or a random rank."""
    node, rail = rng.randrange(NODES), rng.randrange(RAILS)
    if kind is Action.STOP:
        return Fault(action=kind, rank=node, duration_s=_DURATION_S)
    if kind is Action.ISOLATE:  # from the next node of the ring: only neighbours exchange data
        return Fault(action=kind, node=node, peer=(node + 1) % NODES, rail=rail)
    if kind is Action.SLOW:
        rate = f"{1000 * rate_mbps // SLOW_PART}kbit"  # exact: bounds assume this part of the rate
        return Fault(action=kind, node=node, rail=rail, rate=rate)
    if kind is Action.FLAP:
        return Fault(
            action=kind, node=node, rail=rail, duration_s=_DURATION_S,
            mean_s=_FLAP_MEAN_S, seed=rng.randrange(1 << 30),
        )  # fmt: skip
    return Fault(action=kind, node=node, rail=rail)


class Incident(NamedTuple):
    """Fault and its observed effects; times are CLOCK_MONOTONIC seconds.

    ``operations`` are all operations from the first of ``before`` to the last of ``after``.
    ``before`` and ``after`` are in steady state without the fault, ``during`` with it; ``during``
    is empty if the fault ended by itself. ``struck`` are the operations that the fault interrupted.
    """

    fault: Fault
    firing: Firing
    restored_s: float
    operations: list[Operation]
    before: list[Operation]
    struck: list[Operation]
    during: list[Operation]
    after: list[Operation]
    repairs: list[dict[str, Any]]


def strike(cluster: Cluster, lab: Lab, fault: Fault, rng: random.Random) -> Incident:
    """Apply one fault to a healthy cluster; return when the cluster is healthy again."""
    before = settle(cluster, monotonic())
    took_s = before[-1].ended_s - before[-1].begun_s
    threading.Event().wait(rng.uniform(0, took_s))
    firing = lab.apply(fault)
    cut_s = firing.time_s
    lasts_s = fault.duration_s or 0.0
    cluster.wait_operations(_NOPS, cut_s + lasts_s)
    # The fault may hit something this operation no longer needs; then it affects the next one.
    resumed = [each["resumed_s"] for each in cluster.repairs(cut_s) if each["moved"]]
    next_one = cluster.wait_operations(1, max([cut_s + lasts_s, *resumed]))[0]
    struck = [
        each
        for each in cluster.operations
        if each.ended_s > cut_s and each.begun_s < next_one.begun_s
    ] or [next_one]
    during: list[Operation] = []
    if fault.duration_s is None:
        cluster.wait_operations(_LEAST_DURING, next_one.begun_s)
        during = settle(cluster, cluster.operations[-1].begun_s)
        lab.restore()
    restored_s = monotonic()
    lab.raise_errors()
    cluster.wait(
        lambda: all(repair["restored_s"] for repair in cluster.repairs(cut_s)),
        f"every rail after {fault}",
    )
    after = settle(cluster, monotonic())
    operations = [each for each in cluster.operations if each.begun_s >= before[0].begun_s]
    repairs = cluster.repairs(cut_s)
    return Incident(fault, firing, restored_s, operations, before, struck, during, after, repairs)


def settle(cluster: Cluster, since_s: float) -> list[Operation]:
    """Wait until operations take as long as those before them, or give up; return the last ones.

    After a loss or a return, the first operations still run the old schedule, or measure the rails.
    """
    window = cluster.wait_operations(_NOPS, since_s)
    for _ in range(_MOST_WINDOWS):
        later = cluster.wait_operations(_NOPS, window[-1].ended_s)
        both = [
            statistics.median(each.ended_s - each.begun_s for each in part)
            for part in (window, later)
        ]
        window = later
        if abs(both[1] - both[0]) <= _STEADY * both[0]:
            break
    return window


def fault_row(incident: Incident, nbytes: int, run: int) -> dict[str, Any]:
    """Return the JSON object of an incident; None means that nothing of the kind was observed."""

    def mbps(operations: Sequence[Operation]) -> float | None:
        return goodput_mbps(operations, nbytes) if operations else None

    cut_s, repairs = incident.firing.time_s, incident.repairs
    failed = [repair["failed_s"] - cut_s for repair in repairs]
    resumed = [repair["resumed_s"] - cut_s for repair in repairs if repair["moved"]]
    first = [repair["first_byte_s"] - cut_s for repair in repairs if repair["first_byte_s"]]
    if incident.fault.action is Action.FLAP:  # later failures are not counted from the first cut
        resumed, first = resumed[:0], sorted(first)[:1]
    return {
        "measure": "fault",
        "fault": str(incident.fault.action),
        "run": run,
        "target": str(incident.fault),
        "kernel_ms": 1e3 * (incident.firing.applied_s - cut_s),
        "detection_ms": 1e3 * min(failed) if failed else None,
        "last_resume_ms": 1e3 * max(resumed) if resumed else None,
        "repair_ms": 1e3 * min(first) if first else None,
        "last_repair_ms": 1e3 * max(first) if first else None,
        "nbytes_replayed": sum(repair["nbytes_replayed"] for repair in repairs),
        "paths_moved": sum(bool(repair["moved"]) for repair in repairs),
        "evidence": min(repairs, key=lambda each: each["failed_s"])["cause"] if repairs else "",
        "struck_s": max(each.ended_s for each in incident.struck) - cut_s,
        "lasts_s": incident.restored_s - cut_s if incident.during else None,
        "bound_share": bound_share(incident.fault),
        "before_mbps": mbps(incident.before),
        "struck_mbps": mbps(incident.struck),
        "during_mbps": mbps(incident.during),
        "after_mbps": mbps(incident.after),
        "load": os.getloadavg()[0],
    }


def parameters(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the figures depend on."""
    shape, config = lab.shape, Config()
    return {
        "nodes": NODES,
        "rails": RAILS,
        "rate_mbps": args.rate,
        "burst": shape.burst,
        "queue": shape.latency,
        "mtu": shape.mtu,
        "fabric": shape.fabric,
        "congestion_control": congestion_control(lab, config),
        "nbytes": args.nbytes,
        "suspicion_timeout_s": config.suspicion_timeout_s,
        "no_rail_timeout_s": config.no_rail_timeout_s,
        "peer_timeout_s": config.peer_timeout_s,
    }


def congestion_control(lab: Lab, config: Config) -> str:
    """Return the congestion control of the rails' sockets: the configured one if granted."""

    def ask() -> str:
        with socket.socket() as sock:
            with contextlib.suppress(OSError):  # refused: it stays the default, as in a rank
                wanted = config.tcp_congestion.encode()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted)
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            return name.rstrip(b"\0").decode()

    return lab.inside(0, ask)


def run(lab: Lab, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Apply every kind of fault `args.runs` times, in turns."""
    rng = random.Random(args.seed)
    rows: list[dict[str, Any]] = []
    with contextlib.closing(Cluster(lab, args.nbytes)) as cluster:
        cluster.wait_operations(_WARMUP, 0.0)
        for number in range(args.runs):
            for kind in args.faults:
                fault = draw_fault(kind, rng, args.rate)
                incident = strike(cluster, lab, fault, rng)
                row = fault_row(incident, args.nbytes, number)
                calls = call_rows(
                    incident.operations, args.nbytes, fault, number, incident.firing.time_s
                )
                rows += [row, *calls]
                print_incident(console, row)
    return rows


def parse_faults(text: str) -> list[Action]:
    """Parse a comma-separated list of kinds of faults."""
    kinds: list[Action] = [kind for kind in KINDS if kind in text.split(",")]
    if len(kinds) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} has an unknown kind; known: {', '.join(KINDS)}")
    return kinds


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Measure the cost of each kind of fault, in a netlab."
    )
    parser.add_argument("--runs", type=int, help="faults of each kind (default 10)")
    parser.add_argument("--quick", action="store_true", help="2 runs, 8 MiB: under a minute")
    parser.add_argument("--faults", type=parse_faults, default=KINDS, help=", ".join(KINDS))
    parser.add_argument("--rate", type=int, default=200, metavar="MBIT", help="rate of each NIC")
    parser.add_argument(
        "--queue", default=LabShape().latency, help="longest delay in a NIC's queue, in tc's syntax"
    )
    parser.add_argument("--nbytes", type=parse_size, help="bytes per operation (default 16M)")
    parser.add_argument("--seed", type=int, default=1, help="seed of targets and moments")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the results")
    add_json_argument(parser)
    args = parser.parse_args()
    if args.runs is None:
        args.runs = 2 if args.quick else 10
    if args.nbytes is None:
        args.nbytes = 8 << 20 if args.quick else 16 << 20
    if args.runs < 1 or args.rate < 4:
        parser.error("--runs must be above 0, --rate at least 4")
    if args.nbytes % 4 or args.nbytes < _LEAST_NBYTES:
        parser.error("--nbytes must be a multiple of 4, and at least 1M")
    return args


def main() -> int:
    """Build the lab, run the faults, print and save the results."""
    args = parse_arguments()
    console = Console(highlight=False, width=_WIDTH)
    with ready_for_labs("failover"), Lab(
        nodes=NODES, rails=RAILS, rate=f"{args.rate}mbit", burst=f"{BURST_NBYTES >> 10}kb",
        latency=args.queue,
    ) as lab:  # fmt: skip
        setting = parameters(lab, args)
        console.print("  ".join(f"{name}={value}" for name, value in setting.items()))
        rows = run(lab, args, console)
    line_mbps = RAILS * args.rate
    states = state_rows(rows, line_mbps)
    print_summary(console, [row for row in rows if row["measure"] == "fault"], states)
    if args.json:
        write_json(args.json, [{**setting, **row} for row in [*states, *rows]])
    if args.png:
        plot(args.png, rows, states, line_mbps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
