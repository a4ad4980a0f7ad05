"""What a stranger can do to a running job: a flood of connections to its rail ports.

Three nodes with two NICs each in a netlab run verified allreduces without end. A process in the
third node, which knows no secret, finds the ports that listen on the first node's NICs and opens
thousands of connections a second to them. Rounds measure calls per second without a flood, with one
of a port there that is not r2ccl's (which shows what the flooder takes of the machine's processors
and of the network), and with one of the rail ports, close together. A rail that is given up, or a
rank that ends, ends the bench with 1.
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

from common import Stats, add_json_argument, parse_counts, parse_size, write_json
from failover_job import Cluster, Failure
from rich.console import Console
from rich.table import Table

from r2ccl.clock import monotonic
from r2ccl.testing.netlab import Lab, LabError, ensure_privileged

NODES, RAILS = 3, 2
#: The node that is flooded, and the one the flood comes from.
VICTIM, STRANGER = 0, NODES - 1
STATES = ("quiet", "elsewhere", "rail ports")
_FLOOD = str(Path(__file__).with_name("strangers_flood.py"))
#: The flood is under way, and calls are as they will be.
_SETTLE_S = 0.5
_WARMUP = 20
#: proc(5), net/tcp: the state of a socket that listens.
_LISTENS = "0A"
_EXIT_UNAVAILABLE = 69


def rail_ports(lab: Lab) -> list[str]:
    """Find what listens on the victim's NICs, as its own kernel lists it."""
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
    """Flood ports while the block runs; the list gets the connections per second it came to."""
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
    """Measure; operations, and the ranks' looking at their results, one after the other."""
    begun_s = monotonic()
    threading.Event().wait(seconds)
    (last,) = cluster.wait_operations(1, begun_s + seconds)
    ops = [each for each in cluster.operations if begun_s <= each.begun_s < last.begun_s]
    return len(ops) / (last.begun_s - ops[0].begun_s)


def measure(
    lab: Lab, cluster: Cluster, rate: int, order: Sequence[str], seconds: float
) -> dict[str, float]:
    """Measure the three states once; calls per second of each."""
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
    """Measure every rate in rounds; a flat object per rate."""
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
    """Print the table."""
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
    parser = argparse.ArgumentParser(description="A flood of connections against a running job.")
    parser.add_argument("--rates", type=parse_counts, default=[2000, 8000], help="connections/s")
    parser.add_argument("--rounds", type=int, default=6, help="per rate")
    parser.add_argument("--window-s", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--nbytes", type=parse_size, default=256 << 10, help="of each call")
    add_json_argument(parser)
    args = parser.parse_args()
    if args.rounds < 1 or args.window_s <= 0:
        parser.error("--rounds and --window-s must be above 0")
    return args


def main() -> int:
    """Build the lab, flood it, print and save what came of it."""
    args = parse_arguments()
    try:
        ensure_privileged()
        with Lab(nodes=NODES, rails=RAILS, rate="200mbit") as lab:
            rows = run(lab, args)
    except LabError as exc:
        print(f"strangers: {exc}", file=sys.stderr)
        return _EXIT_UNAVAILABLE
    except Failure as exc:
        print(f"strangers: {exc}", file=sys.stderr)
        return 1
    print_rows(rows, args.nbytes)
    if args.json:
        write_json(args.json, rows)
    nrepairs = sum(row["repairs"] for row in rows)
    print(f"strangers: {nrepairs} rails given up, no rank ended, every result right")
    return 1 if nrepairs else 0


if __name__ == "__main__":
    sys.exit(main())
