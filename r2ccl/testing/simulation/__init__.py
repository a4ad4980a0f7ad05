"""Many ranks in one thread on a virtual clock: the real links, repairs and executor, any failure.

`simulate` runs a `Workload` under a `Plan` and a seed. Public: a new schedule, a change of the
tables or a nastier network can be held against everything that ever went wrong. Sits beside the
executor and imports down; must not import sockets or threads.
"""

from r2ccl.testing.simulation.checks import Violation
from r2ccl.testing.simulation.data import PAIRS
from r2ccl.testing.simulation.plan import (
    CallSpec,
    CutPath,
    Fault,
    Hold,
    Kill,
    Lose,
    NicDown,
    Noise,
    Plan,
    Stop,
    Workload,
)
from r2ccl.testing.simulation.run import Outcome, simulate
from r2ccl.testing.simulation.schedules import SCHEDULES

__all__ = [
    "PAIRS",
    "SCHEDULES",
    "CallSpec",
    "CutPath",
    "Fault",
    "Hold",
    "Kill",
    "Lose",
    "NicDown",
    "Noise",
    "Outcome",
    "Plan",
    "Stop",
    "Violation",
    "Workload",
    "simulate",
]
