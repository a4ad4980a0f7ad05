"""Cases of `mpi_rank` for communicators: how they are made, what they are, and their handlers."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from support.mpi_cases import Cases, ramp

CASES = Cases()
case = CASES.add


@case
def split(MPI: Any, comm: Any) -> Any:
    made = comm.Split(comm.rank % 2, -comm.rank)
    found = [made.Get_rank(), made.Get_size(), made.rank, made.size, made.allgather(comm.rank)]
    x = ramp(comm)
    made.Allreduce(MPI.IN_PLACE, x)
    made.Free()
    return found, x, made == MPI.COMM_NULL


@case
def split_of_some_ranks(MPI: Any, comm: Any) -> Any:
    made = comm.Split(MPI.UNDEFINED if comm.rank == 0 else 3)
    if made == MPI.COMM_NULL:
        return "none"
    x = ramp(comm)
    made.Bcast(x, root=1)
    made.free()
    return x


@case
def duplicates(MPI: Any, comm: Any) -> Any:
    found = []
    group = comm.Get_group().Incl([2, 0])
    for make in (
        comm.Dup, comm.Clone, lambda: comm.Dup_with_info(MPI.INFO_NULL),
        lambda: comm.Split_type(MPI.COMM_TYPE_SHARED), lambda: comm.Create(group),
        lambda: comm.Create_group(group) if comm.rank != 1 else MPI.COMM_NULL,
    ):  # fmt: skip
        made = make()
        if made != MPI.COMM_NULL:
            found += [made.rank, made.allgather(comm.rank), made.Split().size]
            x = ramp(comm)
            made.Allreduce(MPI.IN_PLACE, x)
            made.Disconnect()
            found.append(x)
    return found


@case
def made_from_a_group(MPI: Any, comm: Any) -> Any:
    made = MPI.Intracomm.Create_from_group(comm.Get_group())
    found = made.allgather(comm.rank)
    made.Free()
    return found


@case
def error_of_a_freed_communicator(MPI: Any, comm: Any) -> Any:
    made = comm.Dup()
    made.free()
    made.Barrier()


@case
def handlers_of_errors(MPI: Any, comm: Any) -> Any:
    called: list[int] = []

    def remember(_: Any, code: int) -> None:
        called.append(MPI.Get_error_class(code))

    handler = MPI.Comm.Create_errhandler(remember)
    before = comm.Get_errhandler()
    comm.Set_errhandler(handler)
    try:
        comm.Bcast(np.zeros(1), root=77)
    except MPI.Exception:  # r2ccl raises after the handler, MPICH does not
        assert called
    finally:
        comm.Set_errhandler(before)
    return called, called == [MPI.ERR_ROOT]


@case
def what_a_communicator_is(MPI: Any, comm: Any) -> Any:
    plain = sys.modules["mpi4py.MPI"]
    grid = comm.Create_cart([comm.size], periods=[True])
    return [
        comm.Get_rank(), comm.Get_size(), comm.name, comm.Get_name(), comm.is_intra, comm.is_inter,
        comm.Get_group().size, comm.Get_topology() == MPI.UNDEFINED, grid.Shift(0, 1),
        MPI.Comm.Compare(comm, plain.COMM_WORLD), comm == plain.COMM_WORLD,
        isinstance(comm, plain.Intracomm), isinstance(comm, MPI.Comm),
    ]  # fmt: skip


@case
def windows_and_messages(MPI: Any, comm: Any) -> Any:
    memory, got = np.zeros(2), np.zeros(1)
    window = MPI.Win.Create(memory, disp_unit=8, comm=comm)
    window.Fence()
    window.Put(np.array([comm.rank + 1.0]), (comm.rank + 1) % comm.size, 1)
    window.Fence()
    window.Free()
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Sendrecv(memory[1:], after, recvbuf=got, source=before)
    return memory, got, comm.gather(comm.rank), comm.sendrecv("a", after, source=before)


@case
def freed_with_active_requests(MPI: Any, comm: Any) -> Any:
    """They complete as usual, whichever rank frees the communicator first."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    made = comm.Dup()
    x, out = np.full(300_000, comm.rank + 1.0), np.zeros(300_000)
    late, total = np.zeros(300_000), np.ones(1)
    requests = [
        made.Irecv(out, before, 1), made.Irecv(late, before, 2), made.Isend(x, after, 1),
        made.Iallreduce(MPI.IN_PLACE, total),
    ]  # fmt: skip
    made.Isend(x, after, 2).Free()
    made.Free()
    comm.Barrier()
    MPI.Request.Waitall(requests)
    again = comm.Dup()
    found = again.allgather(comm.rank)
    again.Free()
    return out[[0, -1]], late[[0, -1]], total, found


@case
def freed_with_a_forgotten_send(MPI: Any, comm: Any) -> Any:
    """The send goes on, although the program has no reference to its request."""
    made = comm.Dup()
    x, out = np.ones(300_000), np.zeros(300_000)
    if comm.rank == 0 and comm.size > 1:
        made.Isend(x, 1)
        made.Free()
    comm.Barrier()
    if comm.rank == 1:
        made.Recv(out, 0)
    comm.Barrier()  # until then rank 0 keeps x
    if made != MPI.COMM_NULL:
        made.Free()
    return out[[0, -1]]
