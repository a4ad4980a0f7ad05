"""A long program of ranks: all kinds of calls on several communicators, from threads."""

from __future__ import annotations

import os
import random
import threading
from typing import NamedTuple

import numpy as np

import r2ccl
from r2ccl import Communicator
from r2ccl.testing import Action, Fault, FaultPlan

COUNTS = (0, 1, 7, 1000, 9000, 150_000)


class Report(NamedTuple):
    """Wrong results, lost paths, and what the process holds before and after the second half."""

    wrong: list[str]
    nrepairs: int
    early: tuple[int, int, int]
    late: tuple[int, int, int]


def mixed(ncalls: int, nfaults: int, seed: int) -> Report:
    """Make `ncalls` calls on each of three communicators, from one thread each."""
    faults = [
        Fault(action=Action.NIC_DOWN, node=0, rail=at % 2, rank=0, at_op=20 + 60 * at, at_step=at)
        for at in range(nfaults)
    ]
    wrong: list[str] = []
    with r2ccl.init(faults=FaultPlan(faults)) as comm:
        half = comm.split(comm.rank % 2)
        assert half is not None
        group = [comm, comm.dup(), half]
        held = []
        for first, last in ((0, ncalls // 2), (ncalls // 2, ncalls)):
            threads = [
                threading.Thread(target=_calls, args=(each, range(first, last), seed + at, wrong))
                for at, each in enumerate(group)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            held.append(_held())
        return Report(wrong, len(comm.repairs()), held[0], held[1])


def _calls(comm: Communicator, numbers: range, seed: int, wrong: list[str]) -> None:
    n, rank = comm.nranks, comm.rank
    for at in numbers:
        choice = random.Random(f"{seed} {at}")  # the same on all ranks
        count, kind = choice.choice(COUNTS), choice.randrange(6)
        x = np.full(count, float(rank + at))
        whole = float(sum(range(n)) + n * at)
        if kind == 0:
            is_right = bool((comm.allreduce(x) == whole).all())
        elif kind == 1:
            works = [comm.allreduce(x.copy(), async_op=True) for _ in range(3)]
            is_right = all((each.wait() == whole).all() for each in works)
        elif kind == 2:
            arrays = [x.copy() for _ in range(choice.randrange(1, 9))]
            with comm.group():
                for each in arrays:
                    comm.allreduce(each)
                rows = comm.allgather(np.array([rank]))
            is_right = all((each == whole).all() for each in arrays)
            is_right &= rows.ravel().tolist() == list(range(n))
        elif kind == 3:
            shift = choice.randrange(n)
            out, source = np.empty(count), (rank - shift) % n
            comm.sendrecv(x, (rank + shift) % n, out, source, tag=at)
            is_right = bool((out == source + at).all())
        elif kind == 4:
            root = choice.randrange(n)
            is_right = bool((comm.broadcast(x, root=root) == root + at).all())
        else:
            out = comm.alltoall(np.repeat(x[:1], 4 * n))
            is_right = out.size == 0 or bool((out == np.repeat(np.arange(n) + at, 4)).all())
        if not is_right:
            wrong.append(f"rank {rank} of {n}, call {at} of kind {kind}, {count} elements")


def _held() -> tuple[int, int, int]:
    """Return the descriptors, the threads and the resident MiB of this process."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    resident_mib = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident_mib
