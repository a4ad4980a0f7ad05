"""Many ranks in one thread on a virtual clock: the real links, repairs and executor, any failure.

`simulate` runs a `Workload` under a `FailurePlan` and a seed. Public: a new schedule, a change of
the tables or a nastier network can be held against everything that ever went wrong. Sits beside the
executor and imports down; must not import sockets or threads.
"""

from r2ccl.testing.simulation.checks import Violation
from r2ccl.testing.simulation.data import PAIRS
from r2ccl.testing.simulation.plan import (
    CallSpec,
    CutPath,
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
