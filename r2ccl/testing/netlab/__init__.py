"""netlab: a cluster of nodes with several NICs each, on one machine, with real TCP and real faults.

Network namespaces stand for nodes, a bridge for each rail's switch, shaped veth pairs for NICs and
cables. `Lab` builds it, runs programs on it and breaks it; a `FaultPlan` says what breaks when.
iproute2 builds the network (one process a namespace, in batch mode); cuts go through netlink.

Imports `topology`, errors and clock below it; nothing of the library imports this package but the
command line.
"""

from r2ccl.testing.netlab.fabric import LabShape
from r2ccl.testing.netlab.lab import Lab
from r2ccl.testing.netlab.namespaces import LabError, clean
from r2ccl.testing.netlab.privilege import ensure_privileged, unavailable_reason
from r2ccl.testing.netlab.ranks import LabJob, RankProcess, RankResult

__all__ = [
    "Lab",
    "LabError",
    "LabJob",
    "LabShape",
    "RankProcess",
    "RankResult",
    "clean",
    "ensure_privileged",
    "unavailable_reason",
]
