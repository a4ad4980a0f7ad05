"""What the machine has: its NICs as rails, and the news about them.

Netlink and the enumeration of interfaces and RDMA devices live here and nowhere else. This package
must not import transports, bootstrap or anything above them; it hands out values (`Nic`, `Hca`,
`LinkEvent`). What is near to a GPU is in modules of its own, which are not imported here, for most
ranks need none of them: `sysfs`, `gpus` and `nccl_xml` give a `machine`, `affinity` chooses NICs.

Invariant: the same machine state and settings give the same rails in the same order.
"""

from r2ccl.topology.hcas import (
    Gid,
    GidFinder,
    Hca,
    choose_gid,
    list_hcas,
    select_hcas,
)
from r2ccl.topology.interfaces import Interface, discover, list_interfaces, select
from r2ccl.topology.monitor import LinkEvent, LinkMonitor

__all__ = [
    "Gid",
    "GidFinder",
    "Hca",
    "Interface",
    "LinkEvent",
    "LinkMonitor",
    "choose_gid",
    "discover",
    "list_hcas",
    "list_interfaces",
    "select",
    "select_hcas",
]
