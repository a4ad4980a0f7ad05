"""Public test tools: fault plans, and netlab, a cluster of network namespaces on one machine.

Import `r2ccl.testing.netlab` by name: this package does not import it, so that a rank which only
reports faults does not load it.
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
