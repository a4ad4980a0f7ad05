"""Hardware of this machine: NICs as rails, changes of their links, and which NIC is near which GPU.

Only this package uses netlink and enumerates interfaces and RDMA devices; it returns values (`Nic`,
`Hca`, `LinkEvent`). The modules for GPU topology are not imported here, since most ranks need none:
`sysfs` and `gpus` read a `machine`, `affinity` assigns NICs to GPUs, `nccl_xml` writes NCCL's file.

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
