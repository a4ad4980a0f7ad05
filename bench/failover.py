"""What each kind of fault costs: detection, repair, bytes replayed, throughput around it.

Four nodes with four NICs each in a netlab run verified allreduces without end; a fault strikes at a
random moment, stays for some operations, is taken back, and when everything is whole again the next
one comes. Only one job is started, so many faults fit into a minute.

Every time is counted from just before the fault is asked of the kernel, so that it includes the
kernel's own work. Throughput is goodput: what a rank must send, 2(n-1)/n of the data, by the time
of the operations. One wrong element anywhere ends the bench with 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import add_json_argument, format_size, parse_size, write_json
from failover_report import plot, print_table

from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.testing import Action, Fault
from r2ccl.testing.netlab import Job, Lab, LabError, ensure_privileged

NODES = RAILS = 4
KINDS = tuple(action for action in Action if action not in (Action.RESTORE, Action.KILL))

#: Operations measured before a fault, and after the one(s) it struck.
_NOPS = 3
#: For how long NICs flap, and ranks are stopped.
_DURATION_S = 1.0
_FLAP_MEAN_S = 0.1
#: A slow NIC has this part of its rate left.
_SLOW_SHARE = 0.25
#: How long anything that is waited for may take.
_PATIENCE_S = 60.0
_EXIT_UNAVAILABLE = 69


class Failure(Exception):
    """The job ended, or something did not come in time."""


class Operation(NamedTuple):
    """One allreduce as rank 0 saw it; CLOCK_MONOTONIC seconds."""

    begun_s: float
    ended_s: float


class Cluster:
    """A running job: its operations and repairs as they come in.

    Parameters
    ----------
    lab : Lab
    nbytes : int
        Of each operation.
    """

    def __init__(self, lab: Lab, nbytes: int) -> None:
        self.operations: list[Operation] = []
        #: By rank, peer, rail and time of failure; a later version replaces an earlier one.
        self._repairs: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._news = threading.Condition()
        self._is_over = False
        self._words: list[str] = []
        program = str(Path(__file__).with_name("failover_rank.py"))
        self._job: Job = lab.start([sys.executable, program, str(nbytes)])
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait until `is_there`, which is asked whenever a rank says something."""
        with self._news:
            if not self._news.wait_for(lambda: is_there() or self._is_over, _PATIENCE_S):
                raise Failure(f"{what} did not come within {_PATIENCE_S:g} s")
            if self._is_over:
                raise Failure("a rank ended: " + "; ".join(self._words[-4:]))

    def wait_operations(self, count: int, since_s: float) -> list[Operation]:
        """Wait for `count` operations begun after `since_s`, and return the first ones."""

        def found() -> list[Operation]:
            return [each for each in self.operations if each.begun_s >= since_s][:count]

        self.wait(lambda: len(found()) == count, f"{count} operations")
        return found()

    def repairs(self, since_s: float) -> list[dict[str, Any]]:
        """Return the repairs that began after `since_s`, of all ranks."""
        return [each for each in self._repairs.values() if each["failed_s"] >= since_s]

    def close(self) -> None:
        """End the job: in order if it can, by force if not."""
        try:
            with self._news:
                for process in self._job.ranks[:1] if not self._is_over else ():
                    assert process.popen.stdin is not None
                    process.popen.stdin.close()
                self._news.wait_for(lambda: self._is_over, _PATIENCE_S)
        finally:
            self._job.close()
            self._reader.join()

    def _read(self) -> None:
        self._job.stream(3600.0, self._take)
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def _take(self, rank: int, line: str) -> None:
        with self._news:
            if not line.startswith("{"):
                self._words.append(f"rank {rank}: {line}")
                return
            said = json.loads(line)
            if "repair" in said:
                repair = said["repair"]
                key = (rank, repair["peer"], repair["rail"], repair["failed_s"])
                self._repairs[key] = repair
            else:
                self.operations.append(Operation(said["begun_s"], said["ended_s"]))
            self._news.notify_all()


def draw_fault(kind: Action, rng: random.Random, rate_mbps: float) -> Fault:
    """Make a fault of `kind` that strikes a random NIC, or a random rank."""
    node, rail = rng.randrange(NODES), rng.randrange(RAILS)
    if kind is Action.STOP:
        return Fault(action=kind, rank=node, duration_s=_DURATION_S)
    if kind is Action.ISOLATE:  # from the next node of the ring: others do not talk to each other
        return Fault(action=kind, node=node, peer=(node + 1) % NODES, rail=rail)
    if kind is Action.SLOW:
        rate = f"{_SLOW_SHARE * rate_mbps:.0f}mbit"
        return Fault(action=kind, node=node, rail=rail, rate=rate)
    if kind is Action.FLAP:
        return Fault(
            action=kind, node=node, rail=rail, duration_s=_DURATION_S,
            mean_s=_FLAP_MEAN_S, seed=rng.randrange(1 << 30),
        )  # fmt: skip
    return Fault(action=kind, node=node, rail=rail)


class Incident(NamedTuple):
    """A fault, and everything that was seen of it."""

    fault: Fault
    cut_s: float
    before: list[Operation]
    during: list[Operation]
    after: list[Operation]
    repairs: list[dict[str, Any]]


def strike(cluster: Cluster, lab: Lab, fault: Fault, rng: random.Random) -> Incident:
    """Let one fault happen to a whole cluster, and leave a whole cluster."""
    before = cluster.wait_operations(_NOPS, monotonic())
    took_s = before[-1].ended_s - before[-1].begun_s
    threading.Event().wait(rng.uniform(0, took_s))
    cut_s = lab.apply(fault).time_s
    struck_until_s = cut_s + (fault.duration_s or 0.0)
    after = cluster.wait_operations(_NOPS, struck_until_s)
    during = [
        each
        for each in cluster.operations
        if each.ended_s > cut_s and each.begun_s < struck_until_s
    ] or after[:1]  # between two operations: the next one meets the fault
    if fault.duration_s is None:
        lab.restore()
    lab.raise_errors()
    cluster.wait(
        lambda: all(repair["restored_s"] for repair in cluster.repairs(cut_s)),
        f"every rail after {fault}",
    )
    return Incident(fault, cut_s, before, during, after, cluster.repairs(cut_s))


def goodput_mbps(operations: Sequence[Operation], nbytes: int) -> float:
    """Return Mbit/s of useful bytes each rank sent in these operations."""
    seconds = sum(each.ended_s - each.begun_s for each in operations)
    return 8e-6 * len(operations) * 2 * (NODES - 1) / NODES * nbytes / seconds


def fault_row(incident: Incident, nbytes: int, run: int) -> dict[str, Any]:
    """Make the flat object of an incident; None where nothing of the kind was to be seen."""
    cut_s, repairs = incident.cut_s, incident.repairs
    failed = [repair["failed_s"] - cut_s for repair in repairs]
    first = [repair["first_byte_s"] - cut_s for repair in repairs if repair["first_byte_s"]]
    return {
        "measure": "fault",
        "fault": str(incident.fault.action),
        "run": run,
        "target": str(incident.fault),
        "detection_ms": 1e3 * min(failed) if failed else None,
        "repair_ms": 1e3 * min(first) if first else None,
        "last_repair_ms": 1e3 * max(first) if first else None,
        "nbytes_replayed": sum(repair["nbytes_replayed"] for repair in repairs),
        "paths_moved": sum(bool(repair["moved"]) for repair in repairs),
        "evidence": min(repairs, key=lambda each: each["failed_s"])["cause"] if repairs else "",
        "before_mbps": goodput_mbps(incident.before, nbytes),
        "during_mbps": goodput_mbps(incident.during, nbytes),
        "after_mbps": goodput_mbps(incident.after, nbytes),
        "wrong": 0,
    }


def throughput_rows(rows: Sequence[dict[str, Any]], line_mbps: float) -> list[dict[str, Any]]:
    """Answer what goodput is of the line rate, and what is left of it with a NIC lost."""
    healthy = statistics.median(row["before_mbps"] for row in rows)
    made = [
        {"measure": "goodput", "state": "healthy", "mbps": healthy,
         "share_of_line_rate": healthy / line_mbps}
    ]  # fmt: skip
    lost = [row["after_mbps"] for row in rows if row["fault"] == Action.NIC_DOWN]
    if lost:
        mbps = statistics.median(lost)
        made.append({"measure": "goodput", "state": "one of four NICs lost", "mbps": mbps,
                     "share_of_line_rate": mbps / line_mbps, "share_of_healthy": mbps / healthy})  # fmt: skip
    return made


def parameters(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """List what the figures depend on."""
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
    """Name what the rails' sockets run: what they ask for if it is to be had, as they do."""
    import socket

    def ask() -> str:
        with socket.socket() as sock:
            try:
                sock.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_CONGESTION, config.tcp_congestion.encode()
                )
            except OSError:
                pass
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            return name.rstrip(b"\0").decode()

    return lab.inside(0, ask)
