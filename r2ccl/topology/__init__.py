"""Hardware of this machine: the NICs that become rails, their link events, and GPU-NIC affinity.

This package enumerates interfaces and RDMA devices, and contains the library's netlink client. The
modules for GPU topology are not imported here, because most ranks do not need them: `gpus` reads
the GPUs, `sysfs` reads the whole machine as a `Machine`, `affinity` assigns NICs to GPUs, and
`nccl_xml` writes an NCCL topology file.

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
