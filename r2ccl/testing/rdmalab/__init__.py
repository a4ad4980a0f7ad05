"""rdmalab: real ibverbs on Soft-RoCE devices, in a virtual machine with a kernel that has RDMA.

QEMU boots a distribution's kernel on the root file system of this very machine (virtme-ng), so what
is installed here is installed there; the processor is emulated unless KVM is asked for. Inside,
veth pairs stand for NICs and cables, and rdma_rxe makes an RDMA device of each. A "node" is a set
of devices: rdma_rxe 6.1 knows no network namespaces.

`packages` says what that takes and gets it, `shape` names what the lab has, `vm` boots and runs,
`guest` is what happens inside. Imports errors and `topology` below it; nothing of the library
imports this package but the command line.
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
