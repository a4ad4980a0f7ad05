"""rdmalab: real ibverbs on Soft-RoCE devices, in a virtual machine with an RDMA-capable kernel.

With virtme-ng, QEMU boots a distribution's kernel on the host's own root file system, so all
software installed on the host is available in the virtual machine. The CPU is emulated unless KVM
is requested. In the virtual machine, NICs and cables are veth pairs, and rdma_rxe provides an
RDMA device on each NIC. A node is only a set of devices, because rdma_rxe 6.1 does not support
network namespaces.

`packages` checks and installs the requirements, `shape` defines names and addresses, `vm` boots the
virtual machine and runs a command, and `guest` makes the devices inside it.
"""

from r2ccl.testing.rdmalab.packages import prepare, unavailable_reason
from r2ccl.testing.rdmalab.shape import MachineShape, RdmaLabError
from r2ccl.testing.rdmalab.vm import VirtualMachine, VmResult, run

__all__ = [
    "MachineShape",
    "RdmaLabError",
    "VirtualMachine",
    "VmResult",
    "prepare",
    "run",
    "unavailable_reason",
]
