"""One rank of one library under measurement; started by `jobs`, not by hand.

Connects to the bench once the library is ready, then runs what it is told until the connection
ends.
While it waits it sleeps in a read. A library is imported only by its own worker.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]


class Group(NamedTuple):
    """A library's communicator, reduced to what the bench needs."""

    nranks: int
    barrier: Callable[[], object]
    #: Gives the call that sums this array, in place, over all ranks.
    allreduce_of: Callable[[Array], Callable[[], object]]


def open_r2ccl() -> AbstractContextManager[Group]:
    """Join by the launcher's environment; settings come from ``R2CC_*``."""
    import r2ccl

    comm = r2ccl.init()

    class Session:
        def __enter__(self) -> Group:
            return Group(comm.nranks, comm.barrier, lambda x: lambda: comm.allreduce(x))

        def __exit__(self, *_: object) -> None:
            comm.close()

    return Session()


def open_gloo() -> AbstractContextManager[Group]:
    """Join through a file; one thread a rank for arithmetic, as the others have."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    nranks = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["BENCH_STORE"], nranks)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=nranks)

    def allreduce_of(x: Array) -> Callable[[], object]:
        tensor = torch.from_numpy(x)
        return lambda: dist.all_reduce(tensor)

    return nullcontext(Group(nranks, dist.barrier, allreduce_of))


def open_mpich() -> AbstractContextManager[Group]:
    """Join by mpiexec; mpi4py finalises at exit."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def allreduce_of(x: Array) -> Callable[[], object]:
        return lambda: world.Allreduce(MPI.IN_PLACE, x)

    return nullcontext(Group(world.Get_size(), world.Barrier, allreduce_of))


_OPEN = {"r2ccl": open_r2ccl, "gloo": open_gloo, "mpich": open_mpich}


def verify(group: Group, nbytes: int) -> None:
    """Check one sum before that size is timed."""
    x = np.arange(nbytes // 4, dtype=np.float32) % 1024
    expected = x * group.nranks
    group.allreduce_of(x)()
    if not np.array_equal(x, expected):
        raise ValueError(f"wrong sum of {nbytes} bytes: {np.count_nonzero(x != expected)} elements")


def measure(group: Group, call: Callable[[], object], iterations: int, warmup: int) -> float:
    """Return the seconds of one call in a loop of `iterations`, back to back."""
    for _ in range(warmup):
        call()
    group.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - start) / iterations


def serve(group: Group, bench: socket.socket) -> None:
    """Run commands until the bench closes the connection."""
    calls: dict[int, Callable[[], object]] = {}
    while command := bench.recv(1 << 16):
        nbytes, iterations, warmup = msgspec.json.decode(command, type=tuple[int, int, int])
        if nbytes not in calls:
            verify(group, nbytes)
            x = np.empty(nbytes // 4, np.float32)
            x.fill(0)  # zeros stay zeros however often they are summed; written, not mapped
            calls[nbytes] = group.allreduce_of(x)
        seconds = measure(group, calls[nbytes], iterations, warmup)
        bench.send(msgspec.json.encode(seconds))


def main() -> None:
    """Join the library's group, then serve the bench."""
    bench = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with bench, _OPEN[sys.argv[1]]() as group:
        bench.connect(os.environ["BENCH_ADDRESS"])
        try:
            serve(group, bench)
        except Exception as exc:
            bench.send(msgspec.json.encode(f"{type(exc).__name__}: {exc}"))
            raise


if __name__ == "__main__":
    main()
