"""A long program of ranks: all kinds of calls on several communicators, from threads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import re
import threading
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from support import matrix_programs, values

import r2ccl
from r2ccl import Communicator, kernels
from r2ccl.dtypes import dtype_name
from r2ccl.kernels.fold import fold_kernel
from r2ccl.kernels.native import callable_of
from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.types import ReduceOp

COUNTS = (0, 1, 7, 1000, 9000, 150_000)
#: Element types of the calls, and those of the quick form, whose kernels take less time to compile.
#: Small floats are left out, because they load their types and loops at their first reduction.
DTYPES = tuple(name for name in values.DTYPES if not re.search("float(8|16)", name))
QUICK = tuple(name for name in DTYPES if name in (*values.COMPILED, "float32_index"))


class Report(NamedTuple):
    """Wrong results, faults and lost paths, and what the process holds at half-time and later.

    `early` and `late` are the numbers of descriptors, of threads, and of resident MiB.
    """

    wrong: list[str]
    nfired: int
    nrepairs: int
    early: tuple[int, int, int]
    late: tuple[int, int, int]


def compile_kernels(dtypes: Collection[str]) -> None:
    """Compile what this host has not compiled yet: ranks that compile hold 100 MiB more."""
    callable_of("r2ccl.shm.scan:make_scan")
    for code, ops in kernels.OPS.items():
        for op in ops:
            if dtype_name(code) in dtypes or op is ReduceOp.SUM:
                kernels.reducer(code, op)
                fold_kernel(code, op)


def random_faults(nfaults: int, ncalls: int, seed: int) -> FaultPlan:
    """Return a plan in which random ranks lose random rails in random calls."""
    draw = random.Random(seed)
    return FaultPlan(
        Fault(
            action=Action.NIC_DOWN, node=rank, rank=rank, rail=draw.randrange(2),
            at_op=draw.randrange(2, ncalls), at_step=draw.randrange(2),
        )
        for rank in (draw.randrange(4) for _ in range(nfaults))
    )  # fmt: skip


def mixed(dtypes: Collection[str], ncalls: int, nfaults: int, seed: int) -> Report:
    """Make `ncalls` calls on each of three communicators, from one thread each.

    Calls of any collective and operation have arrays of `dtypes`.
    """
    plan = random_faults(nfaults, ncalls, seed)
    wrong: list[str] = []
    with r2ccl.init(faults=plan) as comm:
        half = comm.split(comm.rank % 2)
        assert half is not None
        group = [comm, comm.dup(), half]
        for each in group:  # the first asynchronous call of a communicator starts its worker
            each.allreduce(np.ones(1), async_op=True).wait()
        held = []
        for first, last in ((0, ncalls // 2), (ncalls // 2, ncalls)):
            threads = [
                threading.Thread(
                    target=_calls, args=(each, dtypes, range(first, last), seed + at, wrong)
                )
                for at, each in enumerate(group)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            held.append(_held())
        return Report(wrong, len(plan.fired), len(comm.repairs()), held[0], held[1])


def _calls(
    comm: Communicator, dtypes: Collection[str], numbers: range, seed: int, wrong: list[str]
) -> None:
    try:
        _make_calls(comm, dtypes, numbers, seed, wrong)
    except BaseException as exc:
        wrong.append(f"rank {comm.rank} of {comm.nranks} raised {exc!r}")
        comm.abort("a thread of the test failed")


def _make_calls(
    comm: Communicator, dtypes: Collection[str], numbers: range, seed: int, wrong: list[str]
) -> None:
    n, rank = comm.nranks, comm.rank
    matrix = [row for row in matrix_programs.rows(rank) if row[1] in dtypes]
    for at in numbers:
        choice = random.Random(f"{seed} {at}")  # the same on all ranks
        count, kind = choice.choice(COUNTS), choice.randrange(9)
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
        elif kind == 5:
            out = comm.alltoall(np.repeat(x[:1], 4 * n))
            is_right = out.size == 0 or bool((out == np.repeat(np.arange(n) + at, 4)).all())
        elif kind == 6:
            is_right = _messages(comm, x, at)
        elif kind == 7:
            outs = np.empty((n, min(count, 1000)))
            with comm.group():
                for peer in range(n):
                    comm.send(x[: outs.shape[1]], peer, at)
                    comm.recv(outs[peer], peer, at)
                comm.allreduce(x)
            is_right = bool((x == whole).all() and (outs == np.arange(n)[:, None] + at).all())
        else:
            is_right = _row(comm, choice, *choice.choice(matrix))
        if not is_right:
            wrong.append(f"rank {rank} of {n}, call {at} of kind {kind}, {count} elements")


def _messages(comm: Communicator, x: np.ndarray, tag: int) -> bool:
    """Send `x` to every rank, and receive from any rank, all at once; return if all came."""
    outs = [np.empty_like(x) for _ in range(comm.nranks)]
    receives = [comm.recv(out, tag=tag, async_op=True) for out in outs]
    sends = [comm.send(x, peer, tag, async_op=True) for peer in range(comm.nranks)]
    found = [each.wait() for each in receives]
    for each in sends:
        each.wait()
    is_right = sorted(each.source for each in found) == list(range(comm.nranks))
    return is_right and all(
        bool((out == each.source + tag).all()) for each, out in zip(found, outs, strict=True)
    )


def _row(
    comm: Communicator,
    choice: random.Random,
    collective: str,
    dtype: str,
    reduction: matrix_programs.Reduction | None,
) -> bool:
    """Make two calls of a row of the matrix, in and out of place; return if both are right."""
    count, root = choice.choice((0, 1, 7, 301)), choice.randrange(comm.nranks)
    cells = [
        matrix_programs.COLLECTIVES[collective](
            matrix_programs.Case(comm, dtype, reduction, count, is_in_place, root=root)
        )
        for is_in_place in (False, True)
    ]
    choice.choice(list(matrix_programs.MODES.values()))(comm, cells)
    return all(each.is_right for each in cells)


def _held() -> tuple[int, int, int]:
    """Return the descriptors, the threads and the resident MiB of this process."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # musl has no such function
        ctypes.CDLL(None).malloc_trim(0)  # return to the system what is free
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    resident_mib = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident_mib
