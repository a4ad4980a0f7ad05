"""Cases of `mpi_rank` for broadcasts, allgathers, barriers and pickled objects."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
from support.mpi_cases import Cases, ramp

CASES = Cases()
case = CASES.add


@case
def bcast_from_each_root(MPI: Any, comm: Any) -> Any:
    found = []
    for root in range(comm.size):
        x = ramp(comm)
        comm.Bcast(x, root)
        comm.Bcast([x, 2, MPI.DOUBLE], root=comm.size - 1 - root)
        found.append(x)
    return found


@case
def bcast_of_read_only_memory(MPI: Any, comm: Any) -> Any:
    text: Any = b"four" if comm.rank == 0 else bytearray(4)
    comm.Bcast(text)
    return list(text)


@case
def bcast_copies_no_writable_memory(MPI: Any, comm: Any) -> Any:
    x = np.zeros(1 << 20, np.uint8)
    comm.Bcast(x)
    tracemalloc.start()
    comm.Bcast(x)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most < x.nbytes // 2


@case
def bcast_of_types_that_no_op_has(MPI: Any, comm: Any) -> Any:
    found = []
    for dtype in ("?", "g", "f2"):
        x = np.zeros(3, dtype)
        if comm.rank == 0:
            x[1] = 1
        comm.Bcast(x)
        found.append(x.astype("f8"))
    pairs = np.zeros(4, [("a", "f8"), ("b", "i4"), ("gap", "i4")])
    pairs["b"] = comm.rank
    pairs["gap"] = comm.rank
    comm.Bcast([pairs, MPI.DOUBLE_INT], root=1)
    return found, pairs["b"], pairs["gap"]


def datatypes(MPI: Any) -> dict[str, Any]:
    """Derived datatypes that fit once or more in 48 doubles."""
    double = MPI.DOUBLE
    column = double.Create_vector(6, 1, 8)
    return {
        "contiguous": double.Create_contiguous(3),
        "duplicate": double.Dup(),
        "vector": double.Create_vector(3, 2, 4),
        "hvector": double.Create_hvector(3, 1, 40),
        "indexed": double.Create_indexed([2, 1, 3], [9, 0, 4]),
        "hindexed": double.Create_hindexed([1, 2], [80, 8]),
        "indexed_block": double.Create_indexed_block(2, [6, 0, 10]),
        "subarray": double.Create_subarray([6, 8], [2, 3], [1, 4]),
        "fortran_subarray": double.Create_subarray([6, 8], [2, 3], [1, 4], MPI.ORDER_FORTRAN),
        "column": column.Create_resized(0, 8),
        "padded": double.Create_resized(0, 24),
        "struct": MPI.Datatype.Create_struct([1, 2], [0, 24], [MPI.INT, double]),
        "nested": double.Create_vector(2, 1, 3).Create_contiguous(2),
    }


@case
def derived_datatypes(MPI: Any, comm: Any) -> Any:
    found = {}
    for name, datatype in datatypes(MPI).items():
        datatype.Commit()
        x = np.arange(48.0) + 100 * comm.rank
        comm.Bcast([x, 1, datatype], root=1)
        twice = np.arange(100.0) + 1000 * comm.rank
        comm.Bcast([twice, (2, 0), datatype], root=0)
        found[name] = [x, twice]
        datatype.Free()
    return found


@case
def derived_with_displacement(MPI: Any, comm: Any) -> Any:
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()  # of three doubles
    x = np.arange(9.0) + 100 * comm.rank
    comm.Bcast([x, (1, 2), pairs], root=1)
    whole = np.arange(9.0) + 100 * comm.rank
    comm.Bcast([whole, pairs], root=1)
    return x, whole


@case
def the_ranks_differ_in_datatype(MPI: Any, comm: Any) -> Any:
    column = MPI.DOUBLE.Create_vector(4, 1, 5).Commit()
    if comm.rank == 0:
        matrix = np.arange(20.0).reshape(4, 5)
        comm.Bcast([matrix.reshape(-1)[2:], 1, column])
        return matrix
    row = np.zeros(4)
    comm.Bcast([row, MPI.DOUBLE])
    return row


@case
def allgather_forms(MPI: Any, comm: Any) -> Any:
    n = comm.size
    forms = [
        lambda out: out[1:],
        lambda out: [out[1:], MPI.DOUBLE],
        lambda out: [out, 2, MPI.DOUBLE],
        lambda out: [out, (2, 1), MPI.DOUBLE],
    ]
    found = [np.full(2 * n + 1, -1.0) for _ in forms]
    for form, out in zip(forms, found, strict=True):
        comm.Allgather(ramp(comm, 2), form(out))
    return found


@case
def movements_of_no_elements(MPI: Any, comm: Any) -> Any:
    comm.Bcast(np.zeros(0))
    comm.Bcast([np.zeros(3), 0, MPI.DOUBLE])
    comm.Bcast(bytes(0) if comm.rank == 0 else bytearray(0))
    comm.Allgather(np.zeros(0), np.zeros((comm.size, 0)))
    comm.Allgather([np.zeros(2), 0], [out := np.zeros(2), 0])
    comm.Allgather(MPI.IN_PLACE, np.zeros(0))
    return out


@case
def allgather_in_place(MPI: Any, comm: Any) -> Any:
    out = np.zeros((comm.size, 3))
    out[comm.rank] = ramp(comm, 3)
    comm.Allgather(MPI.IN_PLACE, out)
    return out


@case
def allgather_of_columns(MPI: Any, comm: Any) -> Any:
    n = comm.size
    column = MPI.DOUBLE.Create_vector(4, 1, n).Create_resized(0, 8).Commit()
    matrix = np.zeros((4, n))
    comm.Allgather(ramp(comm, 4), [matrix, 1, column])
    again = np.zeros((4, n))
    again[:, comm.rank] = ramp(comm, 4)
    comm.Allgather(MPI.IN_PLACE, [again, 1, column])
    rows = np.zeros((n, 4))
    comm.Allgather([matrix.reshape(-1)[comm.rank :], 1, column], rows)
    return matrix, again, rows


@case
def barrier(MPI: Any, comm: Any) -> Any:
    return comm.Barrier(), comm.barrier(), comm.Ibarrier().Wait()


@case
def large_arrays(MPI: Any, comm: Any) -> Any:
    x, out = ramp(comm, 300_000), np.zeros(300_000)
    comm.Allreduce(x, out)
    whole = np.zeros(300_000 * comm.size)
    comm.Allgather(x, whole)
    comm.Bcast(x, 2)
    return [float(np.dot(each, np.arange(each.size))) for each in (x, out, whole)]


# Pickled objects


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def __add__(self, other: Any) -> Any:
        return Point(self.x + other.x)


@case
def objects(MPI: Any, comm: Any) -> Any:
    mine = {"rank": comm.rank, "text": "x" * 1000 * comm.rank}
    return [
        comm.bcast(mine, root=1),
        comm.bcast(None),
        comm.allgather(mine),
        comm.allgather(None),
        comm.allreduce(comm.rank + 1),
        comm.allreduce(comm.rank + 1, MPI.PROD),
        comm.allreduce(comm.rank, op=MPI.MAX),
        comm.allreduce((comm.rank, 5), op=MPI.MAXLOC),
        comm.allreduce([comm.rank], op=lambda a, b: a + b),
        comm.allreduce(Point(comm.rank)).x,
        comm.bcast(np.arange(3) if comm.rank == 0 else None),
    ]


@case
def objects_are_copies(MPI: Any, comm: Any) -> Any:
    mine = [comm.rank]
    return [
        [each == [comm.rank], each is mine]
        for each in (
            comm.bcast(mine, 0), comm.allgather(mine)[comm.rank],
            comm.scatter([mine] * comm.size), comm.alltoall([mine] * comm.size)[comm.rank],
            comm.sendrecv(mine, comm.rank, source=comm.rank),
        )
    ]  # fmt: skip


@case
def objects_through_the_pickler_of_mpi4py(MPI: Any, comm: Any) -> Any:
    seen: list[str] = []

    def dumps(obj: Any, *args: Any) -> bytes:
        seen.append("dumps")
        return json.dumps(obj).encode()

    def loads(data: Any, *args: Any) -> Any:
        seen.append("loads")
        return json.loads(bytes(data))

    MPI.pickle.__init__(dumps, loads)
    try:
        return comm.allgather((comm.rank,)), "loads" in seen
    finally:
        MPI.pickle.__init__()


@case
def error_of_an_object_without_a_pickle(MPI: Any, comm: Any) -> Any:
    return comm.allgather(lambda: 0)
