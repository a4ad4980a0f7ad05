"""Run one rank of one measured library; started by `jobs`.

Connects to the bench once the library is ready, then runs commands until the connection ends.
Between commands it sleeps in a read. A library is imported only by its own worker.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
#: Bytes, calls in the loop, warm-up calls, and index of the group that makes them.
Command = tuple[int, int, int, int]


class Group(NamedTuple):
    """Communicator of a library, reduced to what the bench needs."""

    nranks: int
    barrier: Callable[[], object]
    #: Returns the function that sums this array over all ranks, in place.
    allreduce_of: Callable[[Array], Callable[[], object]]


@contextmanager
def open_r2ccl() -> Iterator[list[Group]]:
    """Join by the launcher's environment, once for every mode in ``BENCH_MODES``."""
    import r2ccl

    def group_of(comm: r2ccl.Communicator) -> Group:
        return Group(comm.nranks, comm.barrier, lambda x: lambda: comm.allreduce(x))

    with ExitStack() as stack:
        modes = os.environ.get("BENCH_MODES", "auto").split(",")
        yield [group_of(stack.enter_context(r2ccl.init(mode=mode))) for mode in modes]


def open_gloo() -> AbstractContextManager[list[Group]]:
    """Join through a file; one arithmetic thread per rank, like the other libraries."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    nranks = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["BENCH_STORE"], nranks)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=nranks)

    def allreduce_of(x: Array) -> Callable[[], object]:
        tensor = torch.from_numpy(x)
        return lambda: dist.all_reduce(tensor)

    return nullcontext([Group(nranks, dist.barrier, allreduce_of)])


def open_mpich() -> AbstractContextManager[list[Group]]:
    """Join by mpiexec; mpi4py finalises at exit."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def allreduce_of(x: Array) -> Callable[[], object]:
        return lambda: world.Allreduce(MPI.IN_PLACE, x)

    return nullcontext([Group(world.Get_size(), world.Barrier, allreduce_of)])


_OPEN = {"r2ccl": open_r2ccl, "gloo": open_gloo, "mpich": open_mpich}


def verify(group: Group, nbytes: int) -> None:
    """Check one sum before this size is timed."""
    x = np.arange(nbytes // 4, dtype=np.float32) % 1024
    expected = x * group.nranks
    group.allreduce_of(x)()
    if not np.array_equal(x, expected):
        raise ValueError(f"wrong sum of {nbytes} bytes: {np.count_nonzero(x != expected)} elements")


def measure(group: Group, call: Callable[[], object], iterations: int, warmup: int) -> float:
    """Return the time of one call in seconds, from a loop of `iterations` back-to-back calls."""
    for _ in range(warmup):
        call()
    group.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - start) / iterations


def serve(groups: list[Group], bench: socket.socket) -> None:
    """Run commands until the bench closes the connection; all groups use the same memory."""
    calls: dict[int, list[Callable[[], object]]] = {}
    while command := bench.recv(1 << 16):
        nbytes, iterations, warmup, chosen = msgspec.json.decode(command, type=Command)
        if nbytes not in calls:
            for group in groups:
                verify(group, nbytes)
            x = np.empty(nbytes // 4, np.float32)
            x.fill(0)  # zeros stay zeros, however often they are summed; writing maps the pages
            calls[nbytes] = [group.allreduce_of(x) for group in groups]
        seconds = measure(groups[chosen], calls[nbytes][chosen], iterations, warmup)
        bench.send(msgspec.json.encode(seconds))


def main() -> None:
    """Join the library's group, then serve the bench."""
    bench = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with bench, _OPEN[sys.argv[1]]() as groups:
        bench.connect(os.environ["BENCH_ADDRESS"])
        try:
            serve(groups, bench)
        except Exception as exc:
            bench.send(msgspec.json.encode(f"{type(exc).__name__}: {exc}"))
            raise


if __name__ == "__main__":
    main()
