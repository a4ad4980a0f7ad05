"""Execution of a demo's ranks, in a netlab or, if the machine allows none, on loopback rails.

`Netlab` and `Loopback` start one rank per node and pass every line of output to the caller. In a
netlab, the lab takes the NIC down. On loopback, the rank closes its own connections instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from r2ccl.testing import FaultPlan
from r2ccl.testing.netlab import Lab, LabError, ensure_privileged

NODES = 4
RAILS = 4
RATE = "400mbit"
#: Shorter than the default of a minute, so that a failed start is reported sooner.
_INIT_TIMEOUT_S = 30
#: Interval between readings of the NICs' byte counters.
SAMPLE_S = 0.05

#: Transport wrapper that applies a fault plan without a netlab.
_WRAPPER = "r2ccl.testing.fault_plan:wrap_by_env"

_SETTINGS = {
    # By default each rank starts one thread per core, and the sums depend on the number of threads.
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB")},
    "R2CC_INIT_TIMEOUT_S": str(_INIT_TIMEOUT_S),
}

Sink = Callable[[str], None]


class Sample(NamedTuple):
    """Time (CLOCK_MONOTONIC seconds), and total bytes sent by then, per (node, rail)."""

    time_s: float
    sent: dict[tuple[int, int], int]


class Program(NamedTuple):
    """Command that every rank of a run executes, its variables, and its timeout in seconds."""

    argv: Sequence[str]
    timeout_s: float
    env: Mapping[str, str] = MappingProxyType({})


class Failed(Exception):
    """A rank failed or timed out."""


class Netlab:
    """Runner that gives each rank a network namespace with its own NICs."""

    name = f"netlab: {NODES} namespaces with {RAILS} NICs of {RATE}/s each, real TCP"

    def __init__(self) -> None:
        #: Readings of the NICs' byte counters during the last run.
        self.samples: list[Sample] = []

    def run(self, program: Program, plan: FaultPlan, sink: Sink) -> None:
        """Run one rank per node; record the fired faults in `plan`, bytes sent in `samples`."""
        self.samples = []
        with Lab(nodes=NODES, rails=RAILS, rate=RATE) as lab:
            is_over = threading.Event()
            sampler = threading.Thread(target=self._sample, args=(lab, is_over))
            sampler.start()
            try:
                results = lab.run(
                    program.argv,
                    env={**_SETTINGS, **program.env},
                    plan=plan,
                    timeout_s=program.timeout_s,
                    sink=sink,
                )
            finally:
                is_over.set()
                sampler.join()
        bad = [result for result in results if result.returncode or result.is_timed_out]
        if bad:
            raise Failed(
                f"rank {bad[0].rank} exited with status {bad[0].returncode}:\n{bad[0].output}"
            )

    def _sample(self, lab: Lab, is_over: threading.Event) -> None:
        while not is_over.wait(SAMPLE_S):
            sent = {nic: tx_bytes for nic, (tx_bytes, _) in lab.counters().items()}
            self.samples.append(Sample(time.monotonic(), sent))


class Loopback:
    """Runner that starts all ranks on this machine, with loopback addresses as rails."""

    def __init__(self, why: str) -> None:
        self.name = f"loopback: {NODES} processes with {RAILS} rails of 127.0.0.x each ({why})"
        #: Always empty: all loopback rails share one interface, whose counters cannot be separated.
        self.samples: list[Sample] = []

    def run(self, program: Program, plan: FaultPlan, sink: Sink) -> None:
        """Run one rank per node; the fault appears only in the repairs that the ranks report."""
        launch = [sys.executable, "-m", "r2ccl", "launch", "-n", str(NODES), "--tag", "always"]
        with tempfile.TemporaryDirectory(prefix="r2ccl-demo-") as folder:
            file = Path(folder, "plan.json")
            file.write_bytes(plan.to_json())
            faults = {"R2CC_TRANSPORT_WRAPPER": _WRAPPER, "R2CC_FAULT_PLAN": str(file)}
            # As many channels as in the netlab; by default, loopback uses one channel on one rail,
            # and ranks of one host shared memory, which has no rails.
            rails = {
                "R2CC_RAILS": str(RAILS),
                "R2CC_CHANNELS": str(RAILS * (RAILS - 1)),
                "R2CC_SHM": "0",
            }
            ranks = subprocess.Popen(
                [*launch, "--", *program.argv],
                env={
                    **os.environ,
                    **_SETTINGS,
                    **program.env,
                    **rails,
                    **(faults if plan.faults else {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            # Terminating the launcher closes the pipe, which ends the loop below.
            timer = threading.Timer(program.timeout_s, ranks.terminate)
            timer.start()
            assert ranks.stdout is not None
            try:
                for line in ranks.stdout:
                    sink(line.rstrip("\n"))
                status = ranks.wait(program.timeout_s)
            finally:
                timer.cancel()
                if ranks.poll() is None:
                    ranks.terminate()
                    ranks.wait()
                ranks.stdout.close()
        if status:
            raise Failed(f"the launcher of the ranks exited with status {status}")


Where = Netlab | Loopback


def choose() -> Where:
    """Return a `Netlab` if this machine allows one, else a `Loopback`.

    An ordinary user gets a netlab inside a user namespace.
    """
    try:
        ensure_privileged()
    except LabError as exc:
        return Loopback(str(exc))
    return Netlab()
