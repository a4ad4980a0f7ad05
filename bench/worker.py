"""Run one rank of one measured library; started by `jobs`.

Connects to the bench once the library is ready, then runs commands until the connection ends.
Between commands it sleeps in a read. A library is imported only by its own worker.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from r2ccl.cli.perf.cases import Array, Buffers, Case, count_wrong, make_inputs, place
from r2ccl.cli.perf.forms import FORMS
from r2ccl.config import Mode

#: Collectives joined by ``+``, bytes, rounds of one call of each in the loop, warm-up rounds, and
#: index of the group that makes the calls.
Command = tuple[str, int, int, int, int]
#: Collectives whose data is received where it was sent from: gloo has no others.
_IN_PLACE = ("allreduce", "broadcast", "reduce")


class Group(NamedTuple):
    """Communicator of a library, reduced to what the bench needs."""

    rank: int
    nranks: int
    barrier: Callable[[], object]
    #: Returns the function that makes the calls of a case on these arrays.
    call_of: Callable[[Case, Buffers], Callable[[], object]]
    #: Returns the function that copies the arrays of a case to the memory that is measured.
    #: *Collective*.
    mover_of: Callable[[Case], Callable[[Array], Array]] = lambda case: lambda block: block


@contextmanager
def open_r2ccl() -> Iterator[list[Group]]:
    """Join by the launcher's environment, once for every mode in ``BENCH_MODES``.

    With ``BENCH_SYMMETRIC``, the arrays are parts of one that `Communicator.empty` returned.
    """
    import r2ccl
    from r2ccl.cli.perf.calls import call_of

    def group_of(comm: r2ccl.Communicator) -> Group:
        group = Group(comm.rank, comm.nranks, comm.barrier, partial(call_of, comm))
        if "BENCH_SYMMETRIC" not in os.environ:
            return group
        return group._replace(mover_of=partial(_symmetric_mover, comm))

    with ExitStack() as stack:
        modes = cast("list[Mode]", os.environ.get("BENCH_MODES", "auto").split(","))
        yield [group_of(stack.enter_context(r2ccl.init(mode=mode))) for mode in modes]


def _symmetric_mover(comm: Any, case: Case) -> Callable[[Array], Array]:
    """Return a function that copies the input and the output of a case to parts of one array."""
    room = comm.empty(2 * case.nbytes + 64, np.uint8)
    used = 0

    def move(block: Array) -> Array:
        nonlocal used
        place: Array = room[used : used + block.nbytes].view(block.dtype)
        used += -(-block.nbytes // 64) * 64
        place[:] = block
        return place

    return move


def open_gloo() -> AbstractContextManager[list[Group]]:
    """Join through a file; one arithmetic thread per rank, like the other libraries."""
    import torch
    from peer_calls import gloo_call
    from torch import distributed as dist

    torch.set_num_threads(1)
    nranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    store = dist.FileStore(os.environ["BENCH_STORE"], nranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nranks)
    return nullcontext([Group(rank, nranks, dist.barrier, partial(gloo_call, rank))])


def open_mpich() -> AbstractContextManager[list[Group]]:
    """Join by mpiexec; mpi4py finalises at exit."""
    from mpi4py import MPI
    from peer_calls import mpi_call

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    return nullcontext([Group(rank, world.Get_size(), world.Barrier, partial(mpi_call, world))])


_OPEN = {
    "r2ccl": open_r2ccl,
    "gloo": open_gloo,
    "mpich": open_mpich,
    "openmpi": open_mpich,
}


def verify(group: Group, case: Case) -> None:
    """Check one result before this case is timed."""
    inputs = make_inputs(case, (case.nbytes,))
    in_place = case.form.name in _IN_PLACE
    data, move = inputs[group.rank], group.mover_of(case)
    buffers = place(case, group.rank, data, in_place=in_place, move=move)
    group.call_of(case, buffers)()
    if group.rank != case.root and case.form.name == "reduce":
        return  # gloo changes the arrays of the other ranks
    wrong = count_wrong(case, group.rank, inputs, buffers, in_place=in_place)
    if wrong:
        raise ValueError(f"wrong {case.form.name} of {case.nbytes} bytes: {wrong} elements")


def zeros(case: Case, group: Group) -> Buffers:
    """Return arrays that stay zero, however often they are summed; writing maps the pages."""
    count = case.sends(group.rank)
    data = None if count is None else np.zeros(count, case.dtype)
    in_place = case.form.name in _IN_PLACE
    buffers = place(case, group.rank, data, in_place=in_place, move=group.mover_of(case))
    for each in buffers:
        if each is not None:
            each.fill(0)
    return buffers


def measure(
    group: Group, calls: Sequence[Callable[[], object]], iterations: int, warmup: int
) -> float:
    """Return the mean time of one call in seconds, from `iterations` rounds of calls in turn."""
    if len(calls) == 1:
        (in_turn,) = calls
    else:

        def in_turn() -> None:
            for call in calls:
                call()

    for _ in range(warmup):
        in_turn()
    group.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        in_turn()
    return (time.perf_counter() - start) / iterations / len(calls)


def serve(groups: list[Group], bench: socket.socket) -> None:
    """Run commands until the bench closes the connection; all groups use the same memory."""
    calls: dict[Case, list[Callable[[], object]]] = {}
    kept = ""
    while command := bench.recv(1 << 16):
        names, nbytes, iterations, warmup, chosen = msgspec.json.decode(command, type=Command)
        if names != kept:
            calls.clear()  # else the memory of all measured collectives is kept
            kept = names
        first, in_turn = groups[0], []
        for name in names.split("+"):
            case = Case.of(FORMS[name], first.nranks, nbytes, np.dtype(np.float32))
            if case not in calls:
                for group in groups:
                    verify(group, case)
                buffers = zeros(case, first)
                calls[case] = [group.call_of(case, buffers) for group in groups]
            in_turn.append(calls[case][chosen])
        seconds = measure(groups[chosen], in_turn, iterations, warmup)
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
