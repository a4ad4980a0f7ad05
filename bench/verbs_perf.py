"""Compare the verbs transport with perftest's programs, on the same devices in the same run.

Two processes, each with a `VerbsTransport`, act as two nodes of this machine. They are joined by
RDMA devices: those of an rdmalab, ports that reach each other, or one port in loopback. Rounds
interleave r2ccl with ``ib_write_bw`` and ``ib_write_lat``; whatever is not measured sleeps.

- *slices*: from registered memory into registered memory, landing places named ahead; compared
  with ``ib_write_bw``;
- *messages*: eager slices, copied at both ends and confirmed as the library does; also compared
  with ``ib_write_bw``;
- *latency*: half a round trip; compared with ``ib_write_lat``.

The time of a run is the sender's, from the first request until all data is confirmed. After the
rounds, messages and small slices are moved until `--requests` work requests have been posted, to
detect memory growth after the first tenth.

With and without the fast path (compiled polls and posts), r2ccl runs in separate nodes, alive at
once. `--native` needs no device: it measures the cost of the fast path itself on stub functions.
pyverbs cannot be measured that way.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import perftest
from common import add_json_argument, write_json
from jobs import Unavailable
from perftest import Port
from verbs_pair import NodeError, Nodes, Run
from verbs_report import (
    LATENCY,
    MESSAGES,
    SLICES,
    Holding,
    Samples,
    bandwidth_lines,
    latency_lines,
    memory_line,
    memory_row,
    native_line,
    rows_of,
    sample_of,
)

from r2ccl.cli.perf.report import machine
from r2ccl.cli.values import parse_sizes
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.testing.fakeverbs import rates
from r2ccl.testing.rdmalab import MachineShape
from r2ccl.topology.hcas import choose_gid, list_hcas

#: Values of `Offer.fastpath`, by argument of `--fastpath`.
_FASTPATHS = {"off": ("0",), "on": ("1",), "both": ("0", "1")}
_SIZES = "64,4K,64K,1M"
_EAGER_NBYTES = Config().eager_nbytes
#: Runs that detect memory growth: size in bytes, window, and approximate work requests per message
#: at both ends (its own, the receive request it consumes, and its share of other messages).
_SMALL = {MESSAGES: (64, Config().eager_slots, 2.25), SLICES: (4096, 8, 4.0)}
_NPARTS = 100
_MOST_TRIPS, _MOST_MESSAGES = 1000, 1_000_000
_EXIT_UNAVAILABLE = 69


def choose_pairs(near: str, far: str, nrails: int) -> list[perftest.Pair]:
    """Return the pairs of ports named `near` and `far`, or the rdmalab's if no names are given.

    Raises
    ------
    Unavailable
        If there is no such active port.
    """
    active = {hca.name: hca for hca in list_hcas() if hca.state == "ACTIVE"}
    if not active:
        raise Unavailable("this machine has no ACTIVE RDMA port; `make bench-rdma` creates some")
    shape = MachineShape.from_environment(os.environ)
    if near:
        sides = [near.split(","), (far or near).split(",")]
    elif shape is not None:
        sides = [list(shape.devices(node)) for node in (0, shape.nodes - 1)]
    else:
        raise Unavailable(f"name the devices with --from and --to; ACTIVE are {', '.join(active)}")
    if strange := [name for side in sides for name in side if name not in active]:
        raise Unavailable(f"not ACTIVE: {', '.join(strange)}; ACTIVE are {', '.join(active)}")
    if min(map(len, sides)) < nrails:
        raise Unavailable(f"{nrails} rails need {nrails} devices on each side")
    try:
        ports = [
            [Port(name, active[name].port, choose_gid(active[name]).index) for name in side]
            for side in sides
        ]
    except InvalidArgument as exc:
        raise Unavailable(str(exc)) from exc
    return list(zip(*ports, strict=False))[:nrails]


class Comparison:
    """Nodes and perftest, measured in turns.

    Parameters
    ----------
    nodes : dict of Nodes
        By fast path, as in `Offer`.
    pairs : sequence of pairs of Port
    window : int
        Landing places named ahead.
    seconds : int
        Target duration of a run.
    has_peer : bool
        Whether perftest is installed.
    """

    def __init__(
        self, nodes: dict[str, Nodes], pairs: Sequence[perftest.Pair], *, window: int,
        seconds: int, has_peer: bool,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self._pairs = pairs
        self._window = window
        self._seconds = seconds
        self._has_peer = has_peer
        self._counts: dict[tuple[int, str, str], int] = {}
        self.samples: Samples = defaultdict(list)

    def round(self, nbytes: int) -> None:
        """Measure one size once in every way; latency only with a single rail."""
        peer_s = 0.0
        if self._has_peer:
            peer_s = nbytes / perftest.bandwidth(self._pairs, nbytes, self._seconds)
        for kind in (SLICES, MESSAGES) if nbytes <= _EAGER_NBYTES else (SLICES,):
            for fastpath in self._nodes:
                self._measure(nbytes, kind, fastpath, peer_s)
        if len(self._pairs) == 1:
            self._round_trips(nbytes)

    def _round_trips(self, nbytes: int) -> None:
        peer_s = 0.0
        if self._has_peer:
            count = min(self._count(nbytes, LATENCY, fastpath) for fastpath in self._nodes)
            peer_s = perftest.latency(self._pairs[0], nbytes, count, self._seconds)
        for fastpath in self._nodes:
            self._measure(nbytes, LATENCY, fastpath, peer_s)

    def _measure(self, nbytes: int, kind: str, fastpath: str, peer_s: float) -> None:
        count = self._count(nbytes, kind, fastpath)
        measured = self._nodes[fastpath].run(self._run(nbytes, kind, count))
        self.samples[nbytes, kind, fastpath].append(
            sample_of(kind, count * len(self._pairs), measured, peer_s)
        )

    def _count(self, nbytes: int, kind: str, fastpath: str) -> int:
        """Return the messages per path that fill the target duration, from one short trial."""
        key = nbytes, kind, fastpath
        if key not in self._counts:
            few = 2 * self._window
            tried, _ = self._nodes[fastpath].run(self._run(nbytes, kind, few))
            most = _MOST_TRIPS if kind == LATENCY else _MOST_MESSAGES
            self._counts[key] = min(most, max(few, int(self._seconds * few / tried.seconds)))
        return self._counts[key]

    def _run(self, nbytes: int, kind: str, count: int) -> Run:
        window = Config().eager_slots if kind == MESSAGES else self._window
        return Run(kind, nbytes, count, window, time_limit_s=60.0 + 10 * self._seconds)


def watch_memory(nodes: Nodes, npaths: int, requests: int) -> list[Holding]:
    """Run until both nodes have posted `requests` work requests; sample their memory."""
    held: list[Holding] = []
    posted = part = 0
    while posted < requests:
        kind = (MESSAGES, SLICES)[part % 2]
        nbytes, window, cost = _SMALL[kind]
        count = max(1, round(requests / _NPARTS / cost / npaths))
        measured = nodes.run(Run(kind, nbytes, count, window, time_limit_s=60.0 + 0.05 * count))
        # Each send request consumes a receive request of the other end, which is posted again.
        posted += 2 * sum(each.posted for each in measured)
        held.append(Holding(posted, (measured[0].rss_nbytes, measured[1].rss_nbytes)))
        part += 1
    return held


def native_row() -> dict[str, Any]:
    """Measure the fast path without a device: calls per second on one processor."""
    measured = rates()
    return {
        "measure": "native",
        "fastpath": "1",
        "writes_per_s": 1 / measured.write_s,
        "receives_per_s": 1 / measured.receive_s,
        "completions_per_s": 1 / measured.completion_s,
        "empty_polls_per_s": 1 / measured.empty_poll_s,
    }


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare the verbs transport with perftest.")
    parser.add_argument(
        "--from", dest="near", default="", metavar="DEVICE,...", help="devices of node 0"
    )
    parser.add_argument(
        "--to",
        dest="far",
        default="",
        metavar="DEVICE,...",
        help="devices of node 1; default: the same",
    )
    parser.add_argument("--rails", type=int, default=1, help="devices to use on each side")
    parser.add_argument("--sizes", type=parse_sizes, default=_SIZES, help=f"default: {_SIZES}")
    parser.add_argument("--window", type=int, default=8, help="landing places named ahead")
    parser.add_argument("--fastpath", choices=_FASTPATHS, default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=1, help="target duration of a run")
    parser.add_argument(
        "--requests", type=int, default=1_000_000, help="work requests of the memory check; 0: none"
    )
    parser.add_argument(
        "--native", action="store_true", help="measure only the fast path, without a device"
    )
    add_json_argument(parser)
    args = parser.parse_args()
    if min(args.rails, args.rounds, args.seconds, args.window, *args.sizes) < 1:
        parser.error("--rails, --rounds, --seconds, --window, --sizes must be above 0")
    return args


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print; return the rows to save.

    Raises
    ------
    Unavailable
        If this machine has no suitable devices.
    NodeError, PerftestError
        If a measurement fails.
    """
    pairs = choose_pairs(args.near, args.far, args.rails)
    lacks = perftest.missing()
    print(", ".join(f"{near.device} to {far.device}" for near, far in pairs), flush=True)
    if lacks:
        print(f"not comparing with perftest: {lacks}")
    with ExitStack() as stack:
        nodes = {
            each: stack.enter_context(Nodes(pairs, each)) for each in _FASTPATHS[args.fastpath]
        }
        comparison = Comparison(
            nodes, pairs, window=args.window, seconds=args.seconds, has_peer=not lacks
        )
        for _ in range(args.rounds):
            for nbytes in args.sizes:
                comparison.round(nbytes)
        rows = rows_of(comparison.samples, len(pairs), args.window)
        print(*bandwidth_lines(rows), "", *latency_lines(rows), "", sep="\n", flush=True)
        for fastpath, each in nodes.items() if args.requests else ():
            rows.append(memory_row(watch_memory(each, len(pairs), args.requests), fastpath))
            print(memory_line(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Measure, print and save."""
    args = parse_arguments()
    print(" · ".join(f"{key} {value}" for key, value in machine().items()))
    try:
        rows = [native_row()] if args.native else compare(args)
    except Unavailable as exc:
        print(f"verbs_perf: skipped: {exc}", file=sys.stderr)
        return _EXIT_UNAVAILABLE
    except (NodeError, perftest.PerftestError) as exc:
        print(f"verbs_perf: {exc}", file=sys.stderr)
        return 1
    if args.native:
        print(native_line(rows[0]))
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
