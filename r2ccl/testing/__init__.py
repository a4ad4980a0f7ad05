"""Public test tools: fault plans, emulated and simulated networks, and checks of transports.

The package itself exports only fault plans, so that a rank that reports faults loads nothing else.
Import the other tools from their modules: `netlab` (a cluster of network namespaces on one
machine), `rdmalab` (a virtual machine with RDMA devices), `simulation` (many ranks in one thread),
`fakedevice` (a fake GPU), `fakepyverbs` and `fakeverbs` (fakes of RDMA devices), and `contract` and
`probecontract` (checks for any transport).
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
