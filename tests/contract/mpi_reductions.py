"""Cases of `mpi_rank` for reductions, their operations and the forms of their buffers."""

from __future__ import annotations

import array
import copy
from typing import Any

import numpy as np
from support.mpi_cases import FORMS, Case, Cases, Form, ramp

CASES = Cases()
case, cases = CASES.add, CASES.add_named

DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16"]


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


@case
def copies_of_operations(MPI: Any, comm: Any) -> Any:
    top = MPI.Op.Create(longest, commute=True)
    found = []
    for op in (MPI.Op(MPI.SUM), MPI.Op(top), copy.copy(MPI.MAX), MPI.Op.fromhandle(MPI.MIN.handle)):
        out = np.zeros(3)
        comm.Allreduce(np.array([comm.rank - 1.5, 2.0 - comm.rank, 0.25]), out, op)
        found.append(out)
    top.Free()
    return found, MPI.Op() == MPI.OP_NULL, MPI.Op(MPI.SUM) == MPI.SUM


def allreduce_of(send: Form, receive: Form) -> Case:
    """Allreduce of two specifications of arrays of six elements."""

    def run(MPI: Any, comm: Any) -> Any:
        x, out = ramp(comm), np.full(6, -1.0)
        comm.Allreduce(send(MPI, x), receive(MPI, out))
        return x, out

    return run


for each, form in FORMS.items():
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


def unaligned(values: Any) -> Any:
    """Return a copy of an array whose memory is one byte away from an aligned address."""
    memory = np.zeros(values.nbytes + 1, np.uint8)[1:]
    memory[:] = values.view(np.uint8)
    return memory


@case
def reductions_of_memory_that_is_not_aligned(MPI: Any, comm: Any) -> Any:
    n, rank = comm.size, comm.rank

    def spec(count: int) -> list[Any]:
        return [unaligned(ramp(comm, count)), MPI.DOUBLE]

    x, whole = spec(3), spec(3 * n)
    found = [spec(3) for _ in range(10)]
    comm.Allreduce(x, found[0])
    comm.Allreduce(MPI.IN_PLACE, found[1], MPI.MAX)
    comm.Reduce(x, found[2] if rank == 1 else None, root=1)
    comm.Scan(x, found[3])
    comm.Exscan(x, found[4])
    comm.Reduce_scatter_block(whole, found[5])
    comm.Reduce_scatter(whole, found[6], [3] * n)
    comm.Iallreduce(x, found[7]).Wait()
    request = comm.Allreduce_init(x, found[8])
    for _ in range(2):
        x[0][:] = unaligned(ramp(comm, 3) + 1)
        request.Start()
        request.Wait()
    request.Free()
    comm.Reduce_scatter_block(MPI.IN_PLACE, whole)
    pairs = np.zeros(2, [("a", "f8"), ("b", "i4"), ("gap", "i4")])
    pairs["a"], pairs["b"] = [rank, -rank], rank
    comm.Allreduce(MPI.IN_PLACE, [at := unaligned(pairs), MPI.DOUBLE_INT], MPI.MAXLOC)
    return [np.frombuffer(each[0].tobytes()) for each in found], whole[0][:24], x[0], at


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
