"""Processor architectures on which ranks can share memory.

The module also has the numbers of the system calls that compiled code makes on these architectures,
and chooses a CPU for each rank.
"""

from __future__ import annotations

import functools
import operator
import os
import platform
from collections.abc import Sequence

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


def allowed_cpus() -> int:
    """Return the CPUs on which this thread may run, as a set of bits; 0 if it is not representable.

    A set of CPUs in compiled code has `CPU_SET_NBYTES` bytes.
    """
    mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    return mask if mask >> (8 * CPU_SET_NBYTES) == 0 else 0


def assign_cpu(index: int, allowed: Sequence[int]) -> tuple[int, int]:
    """Assign a CPU to rank `index` of the ranks of a host.

    Parameters
    ----------
    index : int
    allowed : sequence of int
        Result of `allowed_cpus` on each rank.

    Returns
    -------
    cpu : int
        -1 if the ranks are not all allowed to run on the same CPUs, because somebody else has
        assigned CPUs to them, or if the CPUs are not known.
    nsharers : int
        Maximum number of ranks that have to share a CPU; 1 if there is a CPU for each rank, or the
        CPUs are not known.
    """
    together = functools.reduce(operator.or_, allowed)
    if 0 in allowed:
        return -1, 1
    nsharers = -(-len(allowed) // together.bit_count())
    if any(each != together for each in allowed):
        return -1, nsharers
    cpus = [cpu for cpu in range(together.bit_length()) if together >> cpu & 1]
    return cpus[index % len(cpus)], nsharers


__all__ = ["MACHINE", "SYSTEM_CALLS", "UNSUPPORTED", "allowed_cpus", "assign_cpu"]
