"""netlab: a cluster of multi-NIC nodes emulated on one machine, with real TCP and injected faults.

Each node is a network namespace. The switch of a rail is a bridge. A NIC with its cable is a veth
pair whose traffic is shaped. `Lab` builds the cluster, runs programs on it and injects the faults
of a `FaultPlan`. It builds the network with iproute2: one batch process of ``ip`` and one of ``tc``
per namespace. Faults of NICs are applied and undone over netlink; only ``slow``, and bringing a NIC
up again, use iproute2.
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
