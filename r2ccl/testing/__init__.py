"""Tools to test what is built on r2ccl: fault plans, and netlab, a cluster on one machine.

Public. Sits beside the executor and imports down. `r2ccl.testing.netlab` is imported by name, not
from here, so that a rank's reporter costs no more than its own module.
"""

from r2ccl.testing.fault_plan import FaultPlan, fail_at, reporter_from_env
from r2ccl.testing.faults import Action, Fault, Firing
from r2ccl.testing.faults_reporter import FaultReporter

__all__ = [
    "Action",
    "Fault",
    "FaultPlan",
    "FaultReporter",
    "Firing",
    "fail_at",
    "reporter_from_env",
]
