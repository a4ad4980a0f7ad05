"""Measure how a flood of connections to the rail ports affects a running job.

Three nodes with two NICs each in a netlab run verified allreduces without end. A process in the
third node, which does not know the secret, finds the ports that listen on the first node's NICs and
opens thousands of connections per second to them. Each round measures calls per second in three
states, close together: without a flood, with a flood of a port of that node that is not r2ccl's
(which shows the cost of the flood itself to processors and network), and with a flood of the rail
ports. If a rail is given up or a rank ends, the bench exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from common import Stats, add_json_argument, write_json
from failover_job import Cluster
from labs import Failure, ready_for_labs
from rich.console import Console
from rich.table import Table

from r2ccl.cli.values import parse_counts, parse_size
from r2ccl.clock import monotonic
from r2ccl.testing.netlab import Lab

NODES, RAILS = 3, 2
#: Node that is flooded, and node that the flood comes from.
VICTIM, STRANGER = 0, NODES - 1
STATES = ("quiet", "elsewhere", "rail ports")
_FLOOD = str(Path(__file__).with_name("strangers_flood.py"))
#: Seconds until the flood is at full rate, and operations before the first measurement.
_SETTLE_S = 0.5
_WARMUP = 20
#: State of a listening socket in net/tcp: proc(5).
_LISTENS = "0A"


def rail_ports(lab: Lab) -> list[str]:
    """Return ``address:port`` of the sockets that listen on the victim's NICs."""
    addresses = {lab.shape.address(VICTIM, rail) for rail in range(RAILS)}
    text = lab.inside(VICTIM, lambda: Path("/proc/thread-self/net/tcp").read_text())
    found = []
    for line in text.splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        host, _, port = local.partition(":")
        address = socket.inet_ntoa(bytes.fromhex(host)[::-1])
        if state == _LISTENS and address in addresses:
            found.append(f"{address}:{int(port, 16)}")
    return found


@contextlib.contextmanager
def flood(lab: Lab, rate: int, targets: Sequence[str]) -> Iterator[list[float]]:
    """Flood `targets` while the block runs; then append the connections per second to the list."""
    came_to: list[float] = []

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, _FLOOD, str(rate), *targets],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    with lab.inside(STRANGER, start) as process:
        try:
            threading.Event().wait(_SETTLE_S)
            yield came_to
            said, _ = process.communicate(timeout=10)
            came_to.append(float(said))
        finally:
            process.kill()


def calls_per_s(cluster: Cluster, seconds: float) -> float:
    """Return the operations per second, including the ranks' verification of the results."""
    begun_s = monotonic()
    threading.Event().wait(seconds)
    (last,) = cluster.wait_operations(1, begun_s + seconds)
    ops = [each for each in cluster.operations if begun_s <= each.begun_s < last.begun_s]
    return len(ops) / (last.begun_s - ops[0].begun_s)


def measure(
    lab: Lab, cluster: Cluster, rate: int, order: Sequence[str], seconds: float
) -> dict[str, float]:
    """Measure the three states once; return the calls per second of each."""
    listening = rail_ports(lab)
    if not listening:
        raise Failure(f"nothing listens on the NICs of node {VICTIM}")
    found: dict[str, float] = {}
    came_to: list[float] = []
    with lab.inside(VICTIM, lambda: socket.create_server((lab.shape.address(VICTIM, 0), 0))) as own:
        host, port = own.getsockname()
        for state in order:
            if state == "quiet":
                found[state] = calls_per_s(cluster, seconds)
                continue
            targets = listening if state == "rail ports" else [f"{host}:{port}"]
            with flood(lab, rate, targets) as came_to:
                found[state] = calls_per_s(cluster, seconds)
            found[f"{state} flood"] = came_to[0]
    return found


def run(lab: Lab, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every rate in rounds; return a JSON object per rate."""
    orders = list(permutations(STATES))
    rows = []
    with contextlib.closing(Cluster(lab, args.nbytes)) as cluster:
        cluster.wait_operations(_WARMUP, 0.0)
        begun_s = monotonic()
        for rate in args.rates:
            rounds = [
                measure(lab, cluster, rate, orders[number % len(orders)], args.window_s)
                for number in range(args.rounds)
            ]
            against_quiet = Stats.of([each["rail ports"] / each["quiet"] for each in rounds])
            against_other = Stats.of([each["rail ports"] / each["elsewhere"] for each in rounds])
            rows.append(
                {
                    "measure": "flood",
                    "wanted_per_s": rate,
                    "opened_per_s": Stats.of([each["rail ports flood"] for each in rounds]).median,
                    **{
                        f"calls_per_s_{state.replace(' ', '_')}": Stats.of(
                            [each[state] for each in rounds]
                        ).median
                        for state in STATES
                    },
                    "share_of_quiet": against_quiet.median,
                    "share_of_elsewhere": against_other.median,
                    "share_of_elsewhere_low": against_other.low,
                    "repairs": len(cluster.repairs(begun_s)),
                }
            )
    return rows


def print_rows(rows: Sequence[dict[str, Any]], nbytes: int) -> None:
    """Print the rows as a table."""
    table = Table(title=f"Calls of {nbytes} bytes per second, medians of rounds")
    for heading in (
        "connections/s\nwanted", "opened", "quiet", "flood\nelsewhere", "flood of\nrail ports",
        "of quiet", "of elsewhere", "repairs",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["wanted_per_s"]),
            f"{row['opened_per_s']:.0f}",
            *(f"{row['calls_per_s_' + state.replace(' ', '_')]:.0f}" for state in STATES),
            f"{row['share_of_quiet']:.2f}",
            f"{row['share_of_elsewhere']:.2f} (low {row['share_of_elsewhere_low']:.2f})",
            str(row["repairs"]),
        )
    Console(highlight=False, width=110).print(table)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Flood a running job with connections.")
    parser.add_argument("--rates", type=parse_counts, default=[2000, 8000], help="connections/s")
    parser.add_argument("--rounds", type=int, default=6, help="rounds per rate")
    parser.add_argument("--window-s", type=float, default=3.0, help="seconds per measurement")
    parser.add_argument("--nbytes", type=parse_size, default=256 << 10, help="bytes per call")
    add_json_argument(parser)
    args = parser.parse_args()
    if args.rounds < 1 or args.window_s <= 0:
        parser.error("--rounds and --window-s must be above 0")
    return args


def main() -> int:
    """Build the lab, run the floods, print and save the results."""
    args = parse_arguments()
    with ready_for_labs("strangers"), Lab(nodes=NODES, rails=RAILS, rate="200mbit") as lab:
        rows = run(lab, args)
    print_rows(rows, args.nbytes)
    if args.json:
        write_json(args.json, rows)
    nrepairs = sum(row["repairs"] for row in rows)
    print(f"strangers: {nrepairs} rails given up, no rank ended, every result right")
    return 1 if nrepairs else 0


if __name__ == "__main__":
    sys.exit(main())
