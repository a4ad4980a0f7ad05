"""Cases of `test_mpi`: each runs on mpi4py's communicator and on that of r2ccl, in one job.

Only `main` imports mpi4py, because that initializes MPI.

A case takes the module with the names of MPI and a communicator, and returns a result that is equal
on both. It may raise, on all ranks and before it communicates. Rank 0 prints the outcomes of every
rank as JSON.
"""

from __future__ import annotations

import array
import functools
import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from contract import mpi_exchanges, mpi_messages

Case = Callable[[Any, Any], Any]

CASES: dict[str, Case] = {}

DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16"]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def cases(**variants: Case) -> None:
    for name, function in variants.items():
        assert name not in CASES
        CASES[name] = function


def ramp(comm: Any, count: int = 6, dtype: str = "f8") -> Any:
    """Small whole numbers, other ones on each rank: no order of additions changes their sum."""
    return (np.arange(count) % 5 + comm.rank + 1).astype(dtype)


# Reductions


def reductions(MPI: Any, comm: Any, dtype: str) -> Any:
    names = ["SUM", "PROD"] if dtype.startswith("c") else ["SUM", "PROD", "MIN", "MAX"]
    found = {}
    for name in names:
        x, out = ramp(comm, 7, dtype), np.zeros(7, dtype)
        comm.Allreduce(x, out, op=getattr(MPI, name))
        part = np.zeros(2, dtype)
        comm.Reduce_scatter_block(ramp(comm, 2 * comm.size, dtype), part, getattr(MPI, name))
        at_root = np.zeros(7, dtype)
        comm.Reduce(x, at_root, getattr(MPI, name), root=1)
        found[name] = [out, part, at_root]
    return found


for each in DTYPES:
    CASES[f"reductions_{each}"] = lambda MPI, comm, dtype=each: reductions(MPI, comm, dtype)


BITS = ("BAND", "BOR", "BXOR")
LOGIC = ("LAND", "LOR", "LXOR")


@case
def logical_and_bitwise_reductions(MPI: Any, comm: Any) -> Any:
    found = {}
    for dtype in ("u1", "i4"):  # all operations of another type take 3 s to compile
        for name in (*BITS, *LOGIC):
            x, out = np.array([comm.rank, 12, 0, 5 * comm.rank], dtype), np.zeros(4, dtype)
            comm.Allreduce(x, out, getattr(MPI, name))
            found[f"{name} {dtype}"] = out
    for name in LOGIC:
        x, out = np.array([comm.rank > 0, True, False]), np.zeros(3, bool)
        comm.Allreduce(x, out, getattr(MPI, name))
        found[name] = out
    for name in BITS:
        x, out = np.array([comm.rank, 12, 7], "u1"), np.zeros(3, "u1")
        comm.Allreduce([x, MPI.BYTE], [out, MPI.BYTE], getattr(MPI, name))
        found[f"{name} byte"] = out
    return found


@case
def reductions_of_pairs(MPI: Any, comm: Any) -> Any:
    found = {}
    for name, value in (("FLOAT_INT", "f4"), ("DOUBLE_INT", "f8"), ("LONG_INT", "i8"),
                        ("TWOINT", "i4"), ("INT_INT", "i4")):  # fmt: skip
        dtype = np.dtype([("value", value), ("index", "i4")], align=True)
        for op in (MPI.MINLOC, MPI.MAXLOC):
            x, out = np.zeros(4, dtype), np.zeros(4, dtype)
            x["value"] = [comm.rank, -comm.rank, 7, comm.rank % 2]
            x["index"] = [10 + comm.rank, comm.rank, 3 - comm.rank, comm.rank]
            datatype = getattr(MPI, name)
            comm.Allreduce([x, datatype], [out, datatype], op)
            part = x.copy()
            comm.Reduce([x, 3, datatype], [part, 3, datatype], op, root=1)
            found[f"{name} {op == MPI.MINLOC}"] = [out, part if comm.rank == 1 else None]
    return found


def longest(left: Any, right: Any, datatype: Any) -> None:
    a, b = np.frombuffer(left, "f8"), np.frombuffer(right, "f8")
    b[:] = np.where(np.abs(a) >= np.abs(b), a, b)


def affine(left: Any, right: Any, datatype: Any) -> None:
    """Compose the maps x -> a x + b, given as a + bi; it does not commute."""
    a, b = np.frombuffer(left, "c16"), np.frombuffer(right, "c16")
    b[:] = a.real * b.real + 1j * (a.real * b.imag + a.imag)


@case
def operations_of_the_program(MPI: Any, comm: Any) -> Any:
    top, compose = MPI.Op.Create(longest, commute=True), MPI.Op.Create(affine)
    x = np.array([comm.rank - 1.5, 2.0 - comm.rank, 0.25])
    out, part, maps = np.zeros(3), np.zeros(1), np.zeros(2, "c16")
    comm.Allreduce(x, out, top)
    comm.Reduce_scatter_block(x, part, op=top)
    mine = np.array([2 + 1j * comm.rank, comm.rank + 1 + 3j])
    comm.Allreduce(mine, maps, compose)
    comm.Reduce(mine, at_root := np.zeros(2, "c16"), compose, root=2)
    comm.Iallreduce(MPI.IN_PLACE, x, top).Wait()
    facts = top.Is_commutative(), compose.Is_commutative(), isinstance(top, MPI.Op)
    top.Free()
    return out, part, maps, at_root, x, facts


def allreduce_of(send: mpi_messages.Form, receive: mpi_messages.Form) -> Case:
    """Allreduce of two specifications of arrays of six elements."""

    def run(MPI: Any, comm: Any) -> Any:
        x, out = ramp(comm), np.full(6, -1.0)
        comm.Allreduce(send(MPI, x), receive(MPI, out))
        return x, out

    return run


for each, form in mpi_messages.FORMS.items():
    CASES[f"form_{each}"] = allreduce_of(form, form)

cases(
    part_by_count=allreduce_of(
        lambda MPI, x: [x, 2, MPI.DOUBLE], lambda MPI, x: [x, 2, MPI.DOUBLE]
    ),
    part_by_displacement=allreduce_of(
        lambda MPI, x: [x, (2, 3), MPI.DOUBLE], lambda MPI, x: [x, (2, 1), MPI.DOUBLE]
    ),
    rest_by_displacement=allreduce_of(
        lambda MPI, x: [x, None, 2, MPI.DOUBLE], lambda MPI, x: [x, (None, 2), MPI.DOUBLE]
    ),
    no_elements=allreduce_of(lambda MPI, x: x[:0], lambda MPI, x: x[:0]),
    none_is_in_place=allreduce_of(lambda MPI, x: None, lambda MPI, x: x),
)


@case
def allreduce_in_place(MPI: Any, comm: Any) -> Any:
    x = ramp(comm)
    comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
    return x


@case
def allreduce_of_other_buffers(MPI: Any, comm: Any) -> Any:
    x, out = array.array("i", [comm.rank, 7]), bytearray(8)
    comm.Allreduce(x, [out, MPI.INT])
    scalar = np.array(comm.rank)
    comm.Allreduce(MPI.IN_PLACE, scalar)
    return list(out), scalar


@case
def reduce_to_each_root(MPI: Any, comm: Any) -> Any:
    found = []
    for root in range(comm.size):
        x = ramp(comm)
        out = np.zeros(6) if comm.rank == root else None
        comm.Reduce(x, out, op=MPI.SUM, root=root)
        comm.Reduce(MPI.IN_PLACE if comm.rank == root else x, x, MPI.MIN, root)
        found += [x, out]
    return found


@case
def reduce_scatter_block_forms(MPI: Any, comm: Any) -> Any:
    x, out = ramp(comm, 2 * comm.size), np.zeros(2)
    comm.Reduce_scatter_block([x, 2, MPI.DOUBLE], [out, 2, MPI.DOUBLE])
    whole = ramp(comm, 2 * comm.size)
    comm.Reduce_scatter_block(MPI.IN_PLACE, whole)
    return out, whole[:2]


# Movements of data


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


# Requests


@case
def nonblocking(MPI: Any, comm: Any) -> Any:
    n = comm.size
    x, out, at_root, part, all_of = ramp(comm, 2), *(np.zeros(2) for _ in range(3)), np.zeros(2 * n)
    sent = ramp(comm)
    scattered = ramp(comm, 2 * n)
    requests = [
        comm.Iallreduce(x, out, MPI.MAX),
        comm.Ireduce(x, at_root, op=MPI.SUM, root=1),
        comm.Ireduce_scatter_block(scattered, part),
        comm.Ireduce_scatter_block(MPI.IN_PLACE, scattered),
        comm.Ibcast(sent, root=2),
        comm.Iallgather(x, all_of),
        comm.Ibarrier(),
    ]
    done = MPI.Request.Waitall(requests)
    return done, out, at_root, part, scattered[:2], sent, all_of, [bool(each) for each in requests]


@case
def nonblocking_with_derived_datatypes(MPI: Any, comm: Any) -> Any:
    every_other = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    x = np.arange(5.0) + 10 * comm.rank
    request = comm.Ibcast([x, 1, every_other], root=1)
    request.Wait()
    return x


@case
def one_request(MPI: Any, comm: Any) -> Any:
    x = ramp(comm)
    request = comm.Iallreduce(MPI.IN_PLACE, x)
    was_active = bool(request), request == MPI.REQUEST_NULL
    while not request.Test():
        pass
    again = request.Test(), request.Wait(), request.wait(), request.test(), request.Get_status()
    again += (request.get_status(),)
    lower = comm.Ibarrier()
    found = lower.wait()
    polled = comm.Ibarrier()
    while not polled.test()[0]:
        pass
    looked = comm.Ibarrier()
    while not looked.Get_status():
        pass
    is_there = bool(looked)
    looked.Wait()
    is_null = request == MPI.REQUEST_NULL, bool(request)
    return x, was_active, again, found, is_there, is_null


def some(comm: Any, MPI: Any) -> tuple[list[Any], list[Any]]:
    arrays = [ramp(comm) + k for k in range(3)]
    return arrays, [comm.Iallreduce(MPI.IN_PLACE, each) for each in arrays]


@case
def several_requests(MPI: Any, comm: Any) -> Any:
    R = MPI.Request
    found: list[Any] = []
    arrays, requests = some(comm, MPI)
    found += [sorted(R.Waitany(requests) for _ in range(3)), R.Waitany(requests), arrays]
    arrays, requests = some(comm, MPI)
    indices: list[int] = []
    while (more := R.Waitsome(requests)) is not None:
        indices += more
    found += [sorted(indices), arrays]
    arrays, requests = some(comm, MPI)
    while not R.Testall(requests):
        pass
    found += [arrays]
    arrays, requests = some(comm, MPI)
    indices = []
    while len(indices) < 3:
        index, flag = R.Testany(requests)
        indices += [index] if flag else []
    found += [sorted(indices), R.Testany(requests), arrays]
    arrays, requests = some(comm, MPI)
    indices = []
    while (more := R.Testsome(requests)) is not None:
        indices += more
    found += [sorted(indices), arrays]
    return found


@case
def several_requests_with_messages(MPI: Any, comm: Any) -> Any:
    R = MPI.Request
    found: list[Any] = []
    arrays, requests = some(comm, MPI)
    found += [R.waitall(requests), arrays]
    arrays, requests = some(comm, MPI)
    answers = [R.waitany(requests) for _ in range(3)]
    found += [sorted(index for index, _ in answers), [text for _, text in answers]]
    found += [R.waitany(requests), arrays]
    arrays, requests = some(comm, MPI)
    while not (answer := R.testall(requests))[0]:
        pass
    found += [answer, arrays]
    arrays, requests = some(comm, MPI)
    count = 0
    while count < 3:
        count += R.testany(requests)[1]
    found += [R.testany(requests), arrays]
    return found


@case
def no_requests(MPI: Any, comm: Any) -> Any:
    R, null = MPI.Request, [MPI.REQUEST_NULL]
    return [
        [R.Waitall(each), R.Waitany(each), R.Waitsome(each), R.Testall(each), R.Testany(each),
         R.Testsome(each), R.waitall(each), R.waitany(each), R.testall(each), R.testany(each)]
        for each in ([], null)
    ]  # fmt: skip


@case
def requests_with_messages_of_mpi(MPI: Any, comm: Any) -> Any:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, got, total = np.array([comm.rank]), np.zeros(1, int), np.array([comm.rank])
    plain = sys.modules["mpi4py.MPI"].COMM_WORLD
    requests = [
        plain.Irecv(got, before), comm.Iallreduce(MPI.IN_PLACE, total), plain.Isend(x, after)
    ]  # fmt: skip
    statuses: list[Any] = []
    MPI.Request.Waitall(requests, statuses)
    return got, total, len(statuses), statuses[0].source


@case
def error_of_a_request_that_is_none(MPI: Any, comm: Any) -> Any:
    MPI.Request.Waitall([3])


@case
def persistent(MPI: Any, comm: Any) -> Any:
    n = comm.size
    x, out, at_root, part, all_of = ramp(comm, 2), *(np.zeros(2) for _ in range(3)), np.zeros(2 * n)
    sent, scattered = ramp(comm), ramp(comm, 2 * n)
    every_other = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    requests = [
        comm.Allreduce_init(x, out, MPI.MIN),
        comm.Reduce_init(x, at_root, op=MPI.SUM, root=1),
        comm.Reduce_scatter_block_init(scattered, part, info=MPI.INFO_NULL),
        comm.Bcast_init([sent, 1, every_other], 2),
        comm.Allgather_init(x, all_of),
        comm.Barrier_init(),
    ]
    found = []
    for turn in range(3):
        x += turn
        scattered += 1
        sent *= turn + 1
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        found += [each.copy() for each in (out, at_root, part, sent, all_of)]
    state = [bool(each) for each in requests]
    for each in requests:
        each.Free()
    return found, state, [bool(each) for each in requests]


@case
def persistent_one_at_a_time(MPI: Any, comm: Any) -> Any:
    x = ramp(comm)
    request = comm.Allreduce_init(MPI.IN_PLACE, x)
    before = request.Test(), request.Wait(), MPI.Request.Waitany([])
    for _ in range(2):
        request.Start()
        while not request.Test():
            pass
    request.Free()
    return before, x


# Communicators


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


# Errors


def call(name: str, *arguments: Any, **named: Any) -> Case:
    """Call a method; functions among the arguments make them of MPI and an array of four."""

    def run(MPI: Any, comm: Any) -> Any:
        x = np.zeros(4)

        def made(value: Any) -> Any:
            return value(MPI, x) if callable(value) else value

        keywords = {key: made(value) for key, value in named.items()}
        return getattr(comm, name)(*map(made, arguments), **keywords)

    return run


def op(name: str) -> Callable[[Any, Any], Any]:
    return lambda MPI, x: getattr(MPI, name)


def x(MPI: Any, x: Any) -> Any:
    return x


cases(
    error_of_a_number=call("Allreduce", x, lambda MPI, x: 3),
    error_of_a_number_in_a_list=call("Bcast", lambda MPI, x: [3, 1, MPI.INT]),
    error_of_none=call("Bcast", lambda MPI, x: None),
    error_of_text=call("Bcast", lambda MPI, x: "text"),
    error_of_five_items=call("Bcast", lambda MPI, x: [x, 1, 2, MPI.DOUBLE, 4]),
    error_of_one_item=call("Bcast", lambda MPI, x: [x]),
    error_of_an_unknown_code=call("Bcast", lambda MPI, x: [x, "zz"]),
    error_of_no_code=call("Bcast", lambda MPI, x: [None, 0]),
    error_of_a_negative_count=call("Bcast", lambda MPI, x: [x, -1, MPI.DOUBLE]),
    error_of_a_fraction=call("Bcast", lambda MPI, x: [x, 2.5, MPI.DOUBLE]),
    error_of_a_count_without_memory=call("Bcast", lambda MPI, x: [None, 2, MPI.INT]),
    error_of_a_negative_displacement=call("Bcast", lambda MPI, x: [x, (1, -1), MPI.DOUBLE]),
    error_of_a_displacement_too_far=call("Bcast", lambda MPI, x: [x, (1, 9), MPI.DOUBLE]),
    error_of_three_in_a_pair=call("Bcast", lambda MPI, x: [x, (1, 0, 0), MPI.DOUBLE]),
    error_of_a_length_that_does_not_fit=call("Bcast", lambda MPI, x: [x.view("i4")[:3], "d"]),
    error_of_strides=call("Bcast", lambda MPI, x: x[::2]),
    error_of_another_byte_order=call("Bcast", lambda MPI, x: x.view(">f8")),
    error_of_an_unknown_dtype=call("Bcast", lambda MPI, x: x.view("S4")),
    error_of_a_record=call("Bcast", lambda MPI, x: x.view([("a", "i4"), ("b", "f4")])),
    error_of_a_null_datatype=call("Bcast", lambda MPI, x: [x, MPI.DATATYPE_NULL]),
    error_of_a_null_datatype_with_count=call("Bcast", lambda MPI, x: [x, 1, MPI.DATATYPE_NULL]),
    error_of_no_commit=call(
        "Bcast", lambda MPI, x: [x, 1, MPI.DOUBLE.Create_vector(2, 1, 2)]
    ),
    error_of_a_root_too_large=call("Bcast", x, root=3),
    error_of_a_root_below_0=call("Bcast", x, root=-9),
    error_of_a_root_of_an_object=call("bcast", x, root=3),
    error_of_a_root_that_is_text=call("Bcast", x, root="0"),
    error_of_a_root_of_a_reduction=call("Reduce", x, np.zeros(4), root=99),
    error_of_a_read_only_result=call("Allreduce", x, lambda MPI, x: bytes(32)),
    error_of_other_counts=call("Allreduce", x, lambda MPI, x: np.zeros(3)),
    error_of_other_dtypes=call("Allreduce", x, lambda MPI, x: np.zeros(4, "f4")),
    error_of_other_counts_in_blocks=call(
        "Reduce_scatter_block", lambda MPI, x: np.zeros(9), lambda MPI, x: np.zeros(2)
    ),
    error_of_blocks_that_do_not_divide=call("Allgather", x, lambda MPI, x: np.zeros(7)),
    error_of_an_op_that_is_none=call("Allreduce", x, np.zeros(4), op=3),
    error_of_the_null_op=call("Allreduce", x, np.zeros(4), op=op("OP_NULL")),
    error_of_a_logical_op=call("Allreduce", x, np.zeros(4), op=op("LAND")),
    error_of_replace=call("Allreduce", x, np.zeros(4), op=op("REPLACE")),
    error_of_an_order_of_complex_numbers=call(
        "Allreduce", lambda MPI, x: x.view("c16"), lambda MPI, x: np.zeros(2, "c16"),
        op=op("MAX"),
    ),
    error_of_a_sum_of_bytes=call(
        "Allreduce", lambda MPI, x: [x, MPI.BYTE], lambda MPI, x: [np.zeros(4), MPI.BYTE]
    ),
    error_of_an_order_of_bools=call(
        "Allreduce", lambda MPI, x: x > 0, lambda MPI, x: x > 0, op=op("MAX")
    ),
    error_of_a_sum_of_pairs=call(
        "Allreduce",
        lambda MPI, x: [x, MPI.DOUBLE_INT],
        lambda MPI, x: [np.zeros(4), MPI.DOUBLE_INT],
    ),
    error_of_a_location_of_numbers=call("Allreduce", x, np.zeros(4), op=op("MINLOC")),
    error_of_a_missing_argument=call("Allreduce", x),
    error_of_an_unknown_argument=call("Bcast", x, roof=0),
)  # fmt: skip


def forms_of(name: str) -> list[str]:
    """Return the names of the blocking, the nonblocking and the persistent form of a method."""
    once = [name, f"I{name.lower()}"]
    return once if name.startswith("Sendrecv") else [*once, f"{name}_init"]


#: Every method with buffers, and arguments that fit three ranks.
PARTS, WHOLE = np.zeros(4), np.zeros(12)
WITH_BUFFERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Allreduce", "Reduce", "Scan", "Exscan"), (PARTS, np.zeros(4))),
    **dict.fromkeys(("Reduce_scatter", "Reduce_scatter_block"), (WHOLE, PARTS)),
    **dict.fromkeys(("Gather", "Gatherv", "Allgather", "Allgatherv"), (PARTS, WHOLE)),
    **dict.fromkeys(("Scatter", "Scatterv"), (WHOLE, PARTS)),
    **dict.fromkeys(("Alltoall", "Alltoallv", "Alltoallw"), (WHOLE, np.zeros(12))),
    **dict.fromkeys(("Send", "Ssend", "Bsend", "Rsend", "Recv"), (PARTS, 0)),
    "Bcast": (WHOLE,),
    "Sendrecv": (PARTS, 0, 0, np.zeros(4), 0),
    "Sendrecv_replace": (PARTS, 0, 0, 0),
}
for each, given in WITH_BUFFERS.items():
    for method in forms_of(each):
        with_number = [given[0], 3] if each.startswith("Scatter") else [3, *given[1:]]
        CASES[f"error_of_a_number_in_{method}"] = call(method, *with_number)
        if each in ("Bcast", "Reduce", "Gather", "Gatherv", "Scatter", "Scatterv"):
            CASES[f"error_of_the_root_of_{method}"] = call(method, *given, root=9)
        if each.startswith(("Allreduce", "Reduce", "Scan", "Exscan")):
            CASES[f"error_of_the_op_of_{method}"] = call(method, *given, op=op("OP_NULL"))
        if each in ("Recv", "Sendrecv", "Sendrecv_replace") or each.endswith("send"):
            CASES[f"error_of_the_rank_of_{method}"] = call(method, given[0], 9, *given[2:])


@case
def error_of_a_sum_of_vectors(MPI: Any, comm: Any) -> Any:
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    comm.Allreduce([np.zeros(3), 1, pairs], [np.zeros(3), 1, pairs])


@case
def a_collective_cannot_be_cancelled(MPI: Any, comm: Any) -> Any:
    request = comm.Ibarrier()
    try:
        request.Cancel()
    except MPI.Exception:  # each MPI has its own class for it
        return "refused"
    finally:
        request.Wait()


@case
def error_of_a_second_start(MPI: Any, comm: Any) -> Any:
    request = comm.Allreduce_init(np.zeros(1), np.zeros(1))
    request.Start()
    try:
        request.Start()
    finally:
        request.Wait()
        request.Free()


@case
def error_of_free_of_the_world(MPI: Any, comm: Any) -> Any:
    comm.Free()


CASES |= mpi_exchanges.CASES | mpi_messages.CASES


#: Methods of r2ccl's classes that the cases have called, each with the names of these cases.
CALLED: dict[str, set[str]] = {}


def record_calls(case: list[str], *owners: type) -> None:
    """Note in `CALLED` which methods are called by a case, whose name is the last of `case`."""
    for owner in owners:
        for name, found in list(vars(owner).items()):
            is_bound = isinstance(found, classmethod | staticmethod)
            function = found.__func__ if is_bound else found
            if name.startswith("_") or not callable(function):
                continue
            noting = _noting(f"{owner.__name__}.{name}", function, case)
            setattr(owner, name, type(found)(noting) if is_bound else noting)


def _noting(name: str, function: Any, case: list[str]) -> Any:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        # Calls by the package itself do not count.
        if not sys._getframe(1).f_globals["__name__"].startswith("r2ccl."):
            CALLED.setdefault(name, set()).update(case[-1:])
        return function(*args, **kwargs)

    return method


def outcome(function: Case, MPI: Any, comm: Any) -> Any:
    try:
        return {"value": plain(function(MPI, comm))}
    except MPI.Exception as exc:
        return {"error": "MPI.Exception", "class": exc.Get_error_class(), "text": str(exc)}
    except Exception as exc:
        return {"error": type(exc).__name__, "text": str(exc)}


def plain(value: Any) -> Any:
    """Return a value as JSON has it: arrays as lists, complex numbers as text."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, complex) else value


def main() -> None:
    import mpi4py.MPI

    from r2ccl.interop import mpi

    world, running = mpi4py.MPI.COMM_WORLD, [""]
    comm = mpi.COMM_WORLD
    record_calls(
        running,
        *(mpi.Comm, mpi.Request, mpi.Prequest, mpi.Message, mpi.Op),
    )
    found = {}
    for name, function in CASES.items():
        expected = outcome(function, mpi4py.MPI, world)
        running.append(name)
        found[name] = {"mpi4py": expected, "r2ccl": outcome(function, mpi, comm)}
    called = {name: sorted(cases) for name, cases in CALLED.items()}
    ranks = world.gather({"outcomes": found, "called": called})
    if world.rank == 0:
        print(json.dumps(ranks))


if __name__ == "__main__":
    main()
