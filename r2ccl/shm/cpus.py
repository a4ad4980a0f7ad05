"""Compiled functions that let a thread run only on one CPU for a time, or move it to a CPU.

The CPU affinity of the thread is the same afterwards. If somebody else changes it meanwhile, for
example with taskset(1), the new affinity stays.

`sets` is the address of the memory of `r2ccl.shm.atomics.cpu_sets` in all functions.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import read_affinity, words_at, write_affinity
from r2ccl.shm.layout import CPU_SET_NBYTES


@inlined
def stay_on(cpu: Any, sets: Any) -> Any:
    """Let this thread run only on the CPU `cpu`, and move it there.

    Return the number of bytes of a set of CPUs, for `leave_free`. Return 0, and change nothing, if
    the thread is not allowed to run there, or its affinity is unknown.
    """
    allowed, only = words_at(sets), words_at(sets + CPU_SET_NBYTES)
    nbytes = read_affinity(sets, CPU_SET_NBYTES)
    if cpu >= 8 * nbytes or allowed[cpu >> 6] >> (cpu & 63) & 1 == 0:
        return 0
    for word in range(nbytes >> 3):
        only[word] = 0
    only[cpu >> 6] = 1 << (cpu & 63)
    return nbytes if write_affinity(sets + CPU_SET_NBYTES, nbytes) == 0 else 0


@inlined
def leave_free(nbytes: Any, sets: Any) -> None:
    """Give this thread the affinity that it had before `stay_on`, whose result is `nbytes`."""
    only, found = words_at(sets + CPU_SET_NBYTES), words_at(sets + 2 * CPU_SET_NBYTES)
    is_unchanged = read_affinity(sets + 2 * CPU_SET_NBYTES, CPU_SET_NBYTES) == nbytes
    for word in range(nbytes >> 3):
        is_unchanged = is_unchanged and only[word] == found[word]
    if is_unchanged:
        write_affinity(sets, nbytes)


@inlined
def move_to_cpu(cpu: Any, sets: Any) -> None:
    """Move this thread to the CPU `cpu`, unless the thread is not allowed to run there.

    The scheduler may move the thread again.
    """
    nbytes = stay_on(cpu, sets)
    if nbytes > 0:
        leave_free(nbytes, sets)


__all__ = ["leave_free", "move_to_cpu", "stay_on"]
