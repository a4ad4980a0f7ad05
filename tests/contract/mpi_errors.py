"""Cases of `mpi_rank` for wrong arguments and wrong calls, whose errors are those of mpi4py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from support.mpi_cases import Case, Cases

CASES = Cases()
case, cases = CASES.add, CASES.add_named


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
    error_of_dates=call("Bcast", lambda MPI, x: x.view("M8[s]")),
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


#: Every method that writes a status: what it is called on, and its arguments before the status.
WITH_STATUS: dict[str, Callable[[Any, Any, Any], Any]] = {
    name: lambda MPI, comm, status, name=name: getattr(comm, name)(
        *([np.zeros(1)] if name in ("Recv", "recv") else []), MPI.PROC_NULL, 0, status
    )
    for name in (
        "Recv", "recv", "Probe", "probe", "Iprobe", "iprobe", "Mprobe", "mprobe", "Improbe",
        "improbe",
    )
}  # fmt: skip
for each in ("Sendrecv", "Sendrecv_replace", "sendrecv"):
    WITH_STATUS[each] = lambda MPI, comm, status, name=each: getattr(comm, name)(
        np.zeros(1), MPI.PROC_NULL, source=MPI.PROC_NULL, status=status
    )
for each in ("Wait", "Test", "Get_status", "wait", "test"):
    WITH_STATUS[f"request_{each}"] = lambda MPI, comm, status, name=each: getattr(
        comm.Isend(b"", MPI.PROC_NULL), name
    )(status)
for each in ("any", "all", "some"):
    for verb in ("Wait", "Test", "Get_status_", "wait", "test"):
        WITH_STATUS[f"request_{verb}{each}"] = lambda MPI, comm, status, name=verb + each: getattr(
            MPI.Request, name
        )([comm.Isend(b"", MPI.PROC_NULL)], status if name.endswith("any") else [status])
for name, calling in WITH_STATUS.items():
    CASES[f"error_of_the_status_of_{name}"] = (
        lambda MPI, comm, calling=calling: calling(MPI, comm, "no status")
    )  # fmt: skip


@case
def a_wrong_status_leaves_the_message(MPI: Any, comm: Any) -> Any:
    out, found = np.zeros(1), []
    sent = comm.Isend(np.ones(1), comm.rank, 3)
    matched = comm.Isend(np.ones(1), comm.rank, 4)
    message = comm.Mprobe(comm.rank, 4)
    for run in (
        lambda: comm.Recv(out, comm.rank, 3, "no status"),
        lambda: comm.Mprobe(comm.rank, 3, "no status"),
        lambda: message.Recv(out, "no status"),
        lambda: message.recv("no status"),
    ):
        try:
            run()
        except TypeError:
            found.append([out.copy(), bool(message)])
    found.append(comm.Iprobe(comm.rank, 3))
    if found[-1]:
        comm.Recv(out, comm.rank, 3)
        message.Recv(out)
    MPI.Request.Waitall([sent, matched])
    return found


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


@case
def an_error_is_copied_and_pickled(MPI: Any, comm: Any) -> Any:
    try:
        comm.Send(np.zeros(1), 99)
    except MPI.Exception as exc:
        error = exc
    copies = [copy.copy(error), *comm.allgather(error)]
    kinds = [[isinstance(each, MPI.Exception), each.Get_error_class()] for each in copies]
    return kinds, str(copies[0]) == str(copies[1 + comm.rank]) == str(error)
