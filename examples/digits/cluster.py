"""Where the demo's ranks run: in a netlab, or on loopback rails where that is not allowed.

Both start one rank a node and hand every line a rank writes to the caller. In a netlab the cut is
made to the real NIC, by the lab; on loopback by the rank itself, to its connections.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from r2ccl.testing import FaultPlan
from r2ccl.testing.netlab import Lab, LabError, ensure_privileged

NODES = 4
RAILS = 4
RATE = "400mbit"
#: Bound of one training, which takes 6 s on two cores.
_RUN_TIMEOUT_S = 240.0
#: A rank that finds no peer says so after this long instead of a minute.
_INIT_TIMEOUT_S = 30
#: Of the NICs' counters.
SAMPLE_S = 0.05

#: Has the faults of a plan strike where there is no netlab.
_WRAPPER = "r2ccl.testing.fault_plan:wrap_by_env"

_SETTINGS = {
    # Else each of the ranks starts a thread a core, and sums differ with their number.
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB")},
    "R2CC_INIT_TIMEOUT_S": str(_INIT_TIMEOUT_S),
}

Sink = Callable[[str], None]


class Sample(NamedTuple):
    """When (CLOCK_MONOTONIC seconds), and how many bytes each (node, rail) had sent."""

    time_s: float
    sent: dict[tuple[int, int], int]


class Failed(Exception):
    """A rank did not end well."""


class Netlab:
    """Ranks in network namespaces, each with NICs of its own."""

    name = f"netlab: {NODES} namespaces with {RAILS} NICs of {RATE}/s each, real TCP"

    def __init__(self) -> None:
        #: Throughput of the last run.
        self.samples: list[Sample] = []

    def run(self, argv: Sequence[str], plan: FaultPlan, sink: Sink) -> None:
        """Run one rank a node; `plan` says afterwards what fired, `samples` what was sent."""
        self.samples = []
        with Lab(nodes=NODES, rails=RAILS, rate=RATE) as lab:
            is_over = threading.Event()
            sampler = threading.Thread(target=self._sample, args=(lab, is_over))
            sampler.start()
            try:
                results = lab.run(
                    argv, env=_SETTINGS, plan=plan, timeout_s=_RUN_TIMEOUT_S, sink=sink
                )
            finally:
                is_over.set()
                sampler.join()
        bad = [result for result in results if result.returncode or result.is_timed_out]
        if bad:
            raise Failed(f"rank {bad[0].rank} ended with {bad[0].returncode}:\n{bad[0].output}")

    def _sample(self, lab: Lab, is_over: threading.Event) -> None:
        while not is_over.wait(SAMPLE_S):
            sent = {nic: tx_bytes for nic, (tx_bytes, _) in lab.counters().items()}
            self.samples.append(Sample(time.monotonic(), sent))


class Loopback:
    """Ranks on this machine, with loopback addresses for rails."""

    def __init__(self, why: str) -> None:
        self.name = f"loopback: {NODES} processes with {RAILS} rails of 127.0.0.x each ({why})"
        #: All rails share one interface there, so there is nothing to tell them apart by.
        self.samples: list[Sample] = []

    def run(self, argv: Sequence[str], plan: FaultPlan, sink: Sink) -> None:
        """Run one rank a node; the rank that cuts its own rail says so in its repairs."""
        launch = [sys.executable, "-m", "r2ccl", "launch", "-n", str(NODES), "--tag", "always"]
        with tempfile.TemporaryDirectory(prefix="r2ccl-demo-") as folder:
            file = Path(folder, "plan.json")
            file.write_bytes(plan.to_json())
            faults = {"R2CC_TRANSPORT_WRAPPER": _WRAPPER, "R2CC_FAULT_PLAN": str(file)}
            # As many channels as in the netlab; left alone, loopback would use one rail for all.
            rails = {"R2CC_RAILS": str(RAILS), "R2CC_CHANNELS": str(RAILS * (RAILS - 1))}
            ranks = subprocess.Popen(
                [*launch, "--", *argv],
                env={**os.environ, **_SETTINGS, **rails, **(faults if plan.faults else {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            # Its end closes the pipe, and with it the loop below.
            timer = threading.Timer(_RUN_TIMEOUT_S, ranks.terminate)
            timer.start()
            assert ranks.stdout is not None
            try:
                for line in ranks.stdout:
                    sink(line.rstrip("\n"))
                status = ranks.wait(_RUN_TIMEOUT_S)
            finally:
                timer.cancel()
                if ranks.poll() is None:
                    ranks.terminate()
                    ranks.wait()
                ranks.stdout.close()
        if status:
            raise Failed(f"the ranks ended with {status}")


Where = Netlab | Loopback


def choose() -> Where:
    """Choose a netlab where this machine allows one, also by way of a user namespace."""
    try:
        ensure_privileged()
    except LabError as exc:
        return Loopback(str(exc))
    return Netlab()
