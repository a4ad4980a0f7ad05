"""Processor architectures on which ranks can share memory.

The module also has the numbers of the system calls that compiled code makes on these architectures,
and chooses a CPU for each rank.
"""

from __future__ import annotations

import os
import platform

from r2ccl.shm.layout import CPU_SET_NBYTES

MACHINE = platform.machine()
#: Numbers of futex(2), sched_setaffinity(2), sched_getaffinity(2) and process_vm_readv(2), by
#: machine (asm/unistd.h).
_NUMBERS = {"x86_64": (202, 203, 204, 310), "aarch64": (98, 122, 123, 270)}
SYSTEM_CALLS = _NUMBERS.get(MACHINE, (0, 0, 0, 0))
#: Reason why this machine cannot run the compiled functions; empty if it can.
UNSUPPORTED = ""
if MACHINE not in _NUMBERS:
    UNSUPPORTED = f"machine {MACHINE!r}: supported are {', '.join(sorted(_NUMBERS))}"


def home_cpu(index: int, nranks: int) -> tuple[int, int]:
    """Assign a CPU to rank `index` of the `nranks` ranks of this host.

    All ranks must be allowed to run on the same CPUs. Return the CPU, and the maximum number of
    ranks to which one CPU is assigned, which is 1 unless there are more ranks than CPUs. Return
    (-1, 0) if one of these CPUs has a number above ``8 * CPU_SET_NBYTES - 1``, which the sets of
    CPUs in compiled code cannot contain.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if cpus[-1] >= 8 * CPU_SET_NBYTES:
        return -1, 0
    return cpus[index % len(cpus)], -(-nranks // len(cpus))


__all__ = ["MACHINE", "SYSTEM_CALLS", "UNSUPPORTED", "home_cpu"]
