"""Deterministic simulator: many ranks in one thread, on a virtual clock and a simulated network.

The ranks run the library's own links, migration and executor. `simulate` runs a `Workload` with the
faults of a `FailurePlan`, in an order of events that a seed chooses. The simulator is public, so
that new schedules, changes to the failover and harsher networks can be tested with any failure.
"""

from r2ccl.testing.simulation.checks import Violation
from r2ccl.testing.simulation.data import PAIRS
from r2ccl.testing.simulation.plan import (
    CallSpec,
    CutPath,
    Exclude,
    FailurePlan,
    Fault,
    Hold,
    Kill,
    Lose,
    NicDown,
    Noise,
    Stop,
    Workload,
)
from r2ccl.testing.simulation.run import SimOutcome, simulate
from r2ccl.testing.simulation.schedules import SCHEDULES

__all__ = [
    "PAIRS",
    "SCHEDULES",
    "CallSpec",
    "CutPath",
    "Exclude",
    "FailurePlan",
    "Fault",
    "Hold",
    "Kill",
    "Lose",
    "NicDown",
    "Noise",
    "SimOutcome",
    "Stop",
    "Violation",
    "Workload",
    "simulate",
]
