"""Cases of `mpi_rank` for messages between two ranks, and the communicators that carry them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from support.mpi_cases import FORMS, Case, Cases, Form

CASES = Cases()
case = CASES.add


def around(comm: Any) -> tuple[int, int]:
    """Return the next rank and the one before."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def ramp(comm: Any, count: int = 6) -> Any:
    return np.arange(count) + 100.0 * (comm.rank + 1)


def blank(count: int = 6) -> Any:
    return np.full(count, -1.0)


def described(MPI: Any, status: Any) -> Any:
    return [
        status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE),
        status.Get_count(MPI.DOUBLE), status.Get_elements(MPI.DOUBLE), status.Is_cancelled(),
        status.Get_error(),
    ]  # fmt: skip


def pair(comm: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """Run one function on rank 0 and one on rank 1, and nothing on others; return its result."""
    return (first, second)[comm.rank]() if comm.rank < 2 else None


#: Specifications of a part of it.
PARTS: dict[str, Form] = {
    "part_by_count": lambda MPI, x: [x, 4],
    "part_by_count_datatype": lambda MPI, x: [x, 4, MPI.DOUBLE],
    "part_by_pair": lambda MPI, x: [x, (2, 3), MPI.DOUBLE],
    "part_by_four": lambda MPI, x: [x, 2, 1, MPI.DOUBLE],
    "nothing": lambda MPI, x: x[:0],
}


@case
def messages_of_all_forms(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    found = {}
    for tag, (name, form) in enumerate((FORMS | PARTS).items()):
        out, status = blank(), MPI.Status()
        request = comm.Isend(form(MPI, ramp(comm)), after, tag)
        comm.Recv(form(MPI, out), before, tag, status)
        request.Wait()
        found[name] = [out, described(MPI, status)]
    return found


@case
def every_way_to_send(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    comm.Attach_buffer(np.zeros(100_000, "u1"))
    found = []
    for count in (0, 3, 2000):
        x = ramp(comm, count)
        for tag, name in enumerate(("Send", "Ssend", "Bsend", "Rsend")):
            out, status = blank(count), MPI.Status()
            request = comm.Irecv(out, source=before, tag=tag)
            comm.Barrier()  # the receive is there, as Rsend needs
            getattr(comm, name)(x, dest=after, tag=tag)
            request.Wait(status)
            found += [out, described(MPI, status)]
            out, status = blank(count), MPI.Status()
            request = comm.Irecv(out, before)
            comm.Barrier()
            sent = getattr(comm, f"I{name.lower()}")(x, after, tag)
            MPI.Request.Waitall([request, sent], [status])
            found += [out, described(MPI, status)]
    comm.Detach_buffer()
    return found


@case
def a_buffered_send_copies(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    comm.Attach_buffer(np.zeros(5_000_000, "u1"))
    x, out = ramp(comm, 200_000), blank(200_000)
    comm.Bsend(x, after)
    x[:] = 0
    comm.Recv(out, before)
    comm.Flush_buffer()
    return len(comm.Detach_buffer()), float(out.sum())


@case
def a_synchronous_send_waits(MPI: Any, comm: Any) -> Any:
    found: Any = None
    for to in (1, 0):
        out = blank(1)
        if comm.rank == 0:
            request = comm.Issend(np.ones(1), to)
        comm.Barrier()
        if comm.rank == 0:
            found = request.Test()
        comm.Barrier()
        if comm.rank == to:
            comm.Recv(out)
        if comm.rank == 0:
            request.Wait()
    return found, out


@case
def receives_choose(MPI: Any, comm: Any) -> Any:
    if comm.rank:
        sent = [
            comm.Isend(np.full(count, 10.0 * comm.rank + tag), 0, tag)
            for tag in (1, 2, 1)
            for count in (10, 50_000)
        ]
        comm.Barrier()
        MPI.Request.Waitall(sent)
        comm.Barrier()
        return None
    comm.Barrier()
    found = []
    for source in range(comm.size - 1, 0, -1):
        for tag in (2, 1, MPI.ANY_TAG):
            for _ in range(2):
                out, status = blank(50_000), MPI.Status()
                comm.Recv(out, source, tag, status)
                found.append([described(MPI, status), out[:10], out[-1]])
    comm.Barrier()
    return found


@case
def receives_of_any_rank(MPI: Any, comm: Any) -> Any:
    sent = comm.Isend(ramp(comm), 0, 5 + comm.rank)
    found = []
    if comm.rank == 0:
        for _ in range(comm.size):
            out, status = blank(), MPI.Status()
            comm.Recv(out, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            found.append([described(MPI, status), out.tolist()])
    sent.Wait()
    comm.Barrier()
    return sorted(found)


@case
def a_ring_of_large_messages(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    x, out, status = ramp(comm, 300_000), blank(300_001), MPI.Status()
    comm.Sendrecv(x, after, 7, out, before, 7, status)
    request = comm.Isendrecv(out[:-1], after, 8, x, before, 8)
    request.Wait()  # MPICH does not write the status of its request
    return out.sum(), x.sum(), described(MPI, status)


@case
def replaced_messages(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    every_other = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    x, y, z, status = ramp(comm), ramp(comm), ramp(comm, 90_000), MPI.Status()
    comm.Sendrecv_replace(x, after, source=before, status=status)
    comm.Sendrecv_replace([y, 1, every_other], after, 3, before, 3)
    comm.Isendrecv_replace(z, after, 4, before, 4).Wait()
    own = ramp(comm)
    comm.Sendrecv_replace([own, 2], comm.rank, 1, comm.rank)
    comm.Sendrecv(own, MPI.PROC_NULL, 0, x[:0], MPI.PROC_NULL)
    return x, y, z.sum(), own, described(MPI, status)


@case
def replaced_by_a_message_that_waits(MPI: Any, comm: Any) -> Any:
    """The array is sent as it was before the message to receive, which has arrived already."""
    after, before = around(comm)
    x, y = ramp(comm), blank()
    comm.Send(ramp(comm) + 0.5, after)
    comm.Barrier()
    time.sleep(0.05)
    comm.Sendrecv_replace(x, after, source=before)
    comm.Recv(y, before)
    return x, y


@case
def messages_of_derived_datatypes(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    column = MPI.DOUBLE.Create_vector(4, 1, 5).Commit()
    matrix = (np.arange(20.0) + 100 * comm.rank).reshape(4, 5)
    row, whole, status = blank(4), blank(20), MPI.Status()
    comm.Sendrecv([matrix.reshape(-1)[2:], 1, column], after, 0, row, before)
    comm.Sendrecv(row, after, 0, [whole, 1, column], before, 0, status)
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Create_resized(0, 32).Commit()
    part, found = blank(20), MPI.Status()
    comm.Sendrecv(ramp(comm, 5), after, 0, [part, 4, pairs], before, 0, found)
    as_bytes = np.zeros(32, "u1")
    comm.Sendrecv([row, MPI.DOUBLE], after, 0, [as_bytes, MPI.BYTE], before)
    counts = [status.Get_count(column), found.Get_count(pairs), found.Get_elements(pairs)]
    return row, whole, part, as_bytes, counts, described(MPI, found)


@case
def messages_of_read_only_memory(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    out = bytearray(4)
    comm.Sendrecv(b"four", after, 0, out, before)
    return list(out)


@case
def messages_to_nobody(MPI: Any, comm: Any) -> Any:
    null, status, out = MPI.PROC_NULL, MPI.Status(), blank()
    found = [
        comm.Send(out, null),
        comm.Ssend(None, null),
        comm.send("x", null),
        comm.bsend(1, null),
    ]
    comm.Recv(out, null, 4, status)
    found += [out, described(MPI, status)]
    comm.Irecv(out, null).Wait(status)
    found += [out, described(MPI, status), comm.recv(source=null, status=status)]
    found += [described(MPI, status), comm.irecv(source=null).wait(), comm.isend(1, null).wait()]
    found += [comm.Probe(null, status=status), described(MPI, status), comm.Iprobe(null)]
    message = comm.Mprobe(null, status=status)
    message.Recv(out, status)
    found += [out, described(MPI, status), comm.sendrecv("x", null, source=null)]
    no_pickle = lambda: 0  # noqa: E731
    found += [each(no_pickle, null) for each in (comm.send, comm.ssend, comm.bsend)]
    found += [comm.isend(no_pickle, null).wait(), comm.sendrecv(no_pickle, null, source=null)]
    found.append(comm.Sendrecv_replace(None, null, 0, null))
    for make in (comm.Send_init, comm.Recv_init):
        request = make(out, null)
        request.Start()
        found.append(request.Wait())
        request.Free()
    return found


def failure(MPI: Any, run: Callable[[], Any]) -> Any:
    try:
        return ["no error", run()]
    except MPI.Exception as exc:
        return exc.Get_error_class() == MPI.ERR_TRUNCATE


@case
def messages_that_are_too_long(MPI: Any, comm: Any) -> Any:
    """A message that does not fit stays in r2ccl, so each attempt has a communicator of its own."""
    found = []
    out = blank(3)
    column = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    for receive in (
        lambda made: made.Recv(out, 0),
        lambda made: made.Irecv(out, 0).Wait(),
        lambda made: made.Recv([blank(5), 1, column], 0),
        lambda made: made.Sendrecv(None, MPI.PROC_NULL, 0, out, 0),
        lambda made: made.Mprobe(0).Recv(out),
        lambda made: made.irecv(5, 0).wait(),
    ):
        made = comm.Dup()
        if comm.rank == 0:
            made.Send(ramp(comm), 1)
        if comm.rank == 1:
            found.append(failure(MPI, lambda receive=receive, made=made: receive(made)))
        made.Barrier()
        made.Free()
    return found


@case
def probes(MPI: Any, comm: Any) -> Any:
    found: list[Any] = []
    status, out = MPI.Status(), blank()
    if comm.rank == 1:
        found += [comm.Iprobe(), comm.iprobe(0, 3), comm.improbe(), comm.Improbe(0)]
        comm.Barrier()
        for kind in (comm.Probe, comm.probe):
            found += [kind(0, 3, status), described(MPI, status)]
        while not comm.Iprobe(status=status):
            pass
        found.append(described(MPI, status))
        comm.Recv(out, status.Get_source(), status.Get_tag())
        found += [out.copy(), comm.Iprobe(tag=9)]
    else:
        comm.Barrier()
        if comm.rank == 0:
            comm.Send([ramp(comm), 4], 1, 3)
    comm.Barrier()
    return found


@case
def matched_messages(MPI: Any, comm: Any) -> Any:
    found: list[Any] = []
    if comm.rank == 0:
        for tag in range(8):
            comm.send({"tag": tag}, 1, tag) if tag >= 4 else comm.Send(ramp(comm), 1, tag)
    if comm.rank == 1:
        status, out, part = MPI.Status(), blank(), blank(11)
        every_other = MPI.DOUBLE.Create_vector(6, 1, 2).Commit()
        third, second = comm.Mprobe(0, 2, status), comm.Mprobe(MPI.ANY_SOURCE, 1)
        found += [described(MPI, status), bool(third), third == MPI.MESSAGE_NULL]
        second.Recv([part, 1, every_other], status)
        found += [part, described(MPI, status), bool(second), second == MPI.MESSAGE_NULL]
        third.Irecv(out).Wait(status)
        found += [out.copy(), described(MPI, status)]
        MPI.Message.Probe(comm, 0, status=status).Recv(out)
        found.append(described(MPI, status))
        while (polled := MPI.Message.Iprobe(comm, 0, 3, status)) is None:
            pass
        polled.Recv(whole := blank(9), status)
        found += [whole, described(MPI, status), comm.mprobe(0, 4).recv(status)]
        found += [described(MPI, status), MPI.Message.probe(comm, 0, 5).irecv().wait()]
        found += [MPI.Message.probe(comm, 0, 6, status).recv(), described(MPI, status)]
        while (polled := MPI.Message.iprobe(comm, 0, 7)) is None:
            pass
        found += [polled.recv(), comm.Improbe()]
    comm.Barrier()
    return found


@case
def messages_that_are_objects(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    mine = {"rank": comm.rank, "text": "x" * 40_000 * comm.rank}
    comm.Attach_buffer(np.zeros(500_000, "u1"))
    found = []
    for name in ("isend", "issend", "ibsend"):
        status = MPI.Status()
        request = getattr(comm, name)(mine, after, tag=4)
        found += [comm.recv(source=before, tag=4, status=status), request.wait()]
        found.append([status.Get_source(), status.Get_tag()])
    for name in ("send", "ssend", "bsend"):
        small, large = comm.irecv(source=before), comm.irecv(1 << 18, before)
        getattr(comm, name)([comm.rank], dest=after)
        getattr(comm, name)(mine, after)
        found += [small.wait(), large.wait()]
    comm.Detach_buffer()
    status = MPI.Status()
    found += [comm.sendrecv(mine, after, source=before, status=status), status.Get_source()]
    found.append(comm.sendrecv(None, after, 3, None, before, 3))
    sent = [comm.isend("to a buffer", after), comm.Isend(blank(0), after)]
    found += [comm.irecv(bytearray(100), before).wait(), comm.recv(source=before)]
    MPI.Request.Waitall(sent)
    own = comm.isend("to itself", comm.rank)
    found += [comm.recv(source=comm.rank), own.wait()]
    return found


@case
def persistent_messages(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    every_other = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    comm.Attach_buffer(np.zeros(100_000, "u1"))
    x, found = ramp(comm), []
    out, columns = [blank() for _ in range(4)], blank(5)
    requests = [comm.Recv_init(each, before, tag) for tag, each in enumerate(out)]
    requests += [
        comm.Recv_init([columns, 1, every_other], before, 4),
        comm.Send_init(x, after, 0),
        comm.Ssend_init([x, 3], after, 1),
        comm.Bsend_init(x, after, tag=2),
        comm.Rsend_init(x[:0], after, 3),
        comm.Send_init([x, 1, every_other], dest=after, tag=4),
    ]
    statuses = [MPI.Status() for _ in requests]
    for turn in range(3):
        x += turn
        MPI.Prequest.Startall(requests[:5])
        comm.Barrier()  # the receives are there, as Rsend needs
        MPI.Prequest.Startall(requests[5:])
        MPI.Request.Waitall(requests, statuses)
        found += [*(each.copy() for each in out), columns.copy()]
    found += [described(MPI, each) for each in statuses[:5]]
    found += [requests[0].Test(), bool(requests[0])]
    for each in requests:
        each.Free()
    comm.Detach_buffer()
    return found, [bool(each) for each in requests]


def received_by_all(MPI: Any, comm: Any, as_objects: bool) -> tuple[list[Any], list[Any]]:
    """Start a receive from each rank, and send to each; return buffers and requests."""
    out = [blank(2) for _ in range(comm.size)]
    if as_objects:
        requests = [comm.irecv(source=source) for source in range(comm.size)]
    else:
        requests = [comm.Irecv(each, source) for source, each in enumerate(out)]
    for to in range(comm.size):
        comm.bsend(comm.rank, to) if as_objects else comm.Bsend(ramp(comm, 2), to, comm.rank)
    return out, requests


@case
def requests_of_messages(MPI: Any, comm: Any) -> Any:
    R, n = MPI.Request, comm.size
    found: list[Any] = []
    comm.Attach_buffer(np.zeros(100_000, "u1"))
    out, requests = received_by_all(MPI, comm, False)
    statuses: list[Any] = []
    R.Waitall(requests, statuses)
    found += [out, [described(MPI, each) for each in statuses], [bool(each) for each in requests]]
    out, requests = received_by_all(MPI, comm, False)
    status, seen = MPI.Status(), []
    for _ in range(n):
        seen.append([R.Waitany(requests, status), described(MPI, status)])
    found += [out, sorted(seen), R.Waitany(requests)]
    out, requests = received_by_all(MPI, comm, False)
    seen = []
    while (indices := R.Waitsome(requests, each := [])) is not None:
        seen += [[i, s.Get_source()] for i, s in zip(indices, each, strict=False)]
    found += [out, sorted(seen)]
    out, requests = received_by_all(MPI, comm, False)
    while not all(each.Get_status(status) for each in requests):
        pass
    found += [described(MPI, status), R.Testall(requests), out]
    out, requests = received_by_all(MPI, comm, False)
    while not R.Get_status_all(requests, each := []):
        pass
    found += [[described(MPI, status) for status in each], R.get_status_some(requests, each)]
    found += [R.Get_status_any(requests[1:], status), described(MPI, status)]
    while not R.Testall(requests):
        pass
    found += [R.Get_status_all(requests), R.get_status_any(requests), R.Get_status_some(requests)]
    found.append(R.get_status_all(requests))
    comm.Detach_buffer()
    return [*found, out]


def has_finished(MPI: Any, request: Any) -> Any:
    try:
        return request.Get_status()
    except MPI.Exception:
        return True


@case
def requests_of_which_one_fails(MPI: Any, comm: Any) -> Any:
    """The first of two receives is too short; r2ccl keeps its message: see the case above."""
    R, found = MPI.Request, []
    for complete in (
        R.Waitall, R.Waitsome, R.Testall, R.Testsome, R.Waitany, R.Testany,
        R.waitall, R.waitsome, R.testall, R.testsome, R.waitany, R.testany,
    ):  # fmt: skip
        made = comm.Dup()
        if comm.rank == 0:
            made.Send(ramp(comm), 1, 1)
            made.Send(ramp(comm, 3), 1, 2)
        if comm.rank == 1:
            out = blank(3)
            requests = [made.Irecv(blank(3), 0, 1), made.Irecv(out, 0, 2)]
            while not all(has_finished(MPI, each) for each in requests):
                time.sleep(0.01)  # MPICH keeps a short ring of errors: each look at one adds one
            statuses: list[Any] = []
            is_any = complete in (R.Waitany, R.Testany, R.waitany, R.testany)
            given = [requests] if is_any else [requests, statuses]
            try:
                complete(*given)
            except MPI.Exception as exc:
                found.append(
                    [exc.Get_error_class() == (MPI.ERR_TRUNCATE if is_any else MPI.ERR_IN_STATUS)]
                )
            found[-1] += [MPI.Get_error_class(each.Get_error()) for each in statuses]
            found += [[bool(each) for each in requests], complete(requests), out]
        made.Barrier()
        made.Free()
    return found


@case
def requests_of_objects(MPI: Any, comm: Any) -> Any:
    R, found = MPI.Request, []
    comm.Attach_buffer(np.zeros(100_000, "u1"))
    _, requests = received_by_all(MPI, comm, True)
    found.append(R.waitall(requests))
    _, requests = received_by_all(MPI, comm, True)
    found.append(sorted(R.waitany(requests) for _ in requests))
    _, requests = received_by_all(MPI, comm, True)
    seen: list[Any] = []
    while (some := R.waitsome(requests))[0] is not None:
        seen += zip(*some, strict=True)
    found += [sorted(seen), some, R.testsome(requests)]
    _, requests = received_by_all(MPI, comm, True)
    while not (answer := R.testall(requests))[0]:
        pass
    found.append(answer)
    _, requests = received_by_all(MPI, comm, True)
    while not (answer := requests[0].test())[0]:
        pass
    found += [answer, R.waitall(requests[1:]), requests[0].wait()]
    comm.Detach_buffer()
    return found


@case
def a_receive_that_is_cancelled(MPI: Any, comm: Any) -> Any:
    status, out = MPI.Status(), blank()
    request = comm.Irecv(out, tag=77)
    request.Cancel()
    request.Wait(status)
    lower = comm.irecv(tag=78)
    lower.cancel()
    found = [status.Is_cancelled(), bool(request), lower.wait()]
    sent = comm.isend("freed", comm.rank)
    sent.free()
    comm.Isend(b"freed", comm.rank, 1).Free()
    comm.Recv(bytearray(5), comm.rank, 1)
    persistent = comm.Recv_init(out, tag=79)
    persistent.Start()
    persistent.cancel()
    persistent.Wait(status)
    found += [status.Is_cancelled(), comm.recv(source=comm.rank), bool(sent), bool(persistent)]
    persistent.free()
    return found, out


@case
def messages_of_several_communicators(MPI: Any, comm: Any) -> Any:
    after, before = around(comm)
    made = [comm.Dup(), comm.Split(comm.rank % 2, -comm.rank), comm.Dup().Dup()]
    requests = [each.isend(at, after) for at, each in enumerate((made[0], comm, made[2]))]
    found = [each.recv(source=before) for each in (made[2], made[0], comm)]
    MPI.Request.waitall(requests)
    half = made[1]
    if half.size == 2:
        found.append(half.sendrecv(comm.rank, 1 - half.rank, source=1 - half.rank))
    found += [comm.Iprobe(), half.allgather(comm.rank)]
    made[0].Free()
    found.append(made[2].allgather(comm.rank))  # a child of a child, whose parent stays
    for each in made[1:]:
        each.Free()
    return found, made[0] == MPI.COMM_NULL


# Errors, on all ranks alike


def failing(name: str, *given: Any, **named: Any) -> Case:
    """Call a method; functions among the arguments make them of MPI and an array of four."""

    def run(MPI: Any, comm: Any) -> Any:
        def made(value: Any) -> Any:
            return value(MPI, np.zeros(4)) if callable(value) else value

        keywords = {key: made(value) for key, value in named.items()}
        return getattr(comm, name)(*map(made, given), **keywords)

    return run


def x(MPI: Any, x: Any) -> Any:
    return x


CASES |= {
    "error_of_a_dest_too_large": failing("Send", x, 3),
    "error_of_a_dest_below_0": failing("Isend", x, -9),
    "error_of_any_dest": failing("Send", x, lambda MPI, x: MPI.ANY_SOURCE),
    "error_of_a_dest_that_is_text": failing("Send", x, "0"),
    "error_of_a_source_too_large": failing("Recv", x, 77),
    "error_of_a_source_of_a_probe": failing("Iprobe", 77),
    "error_of_a_tag_below_0": failing("Send", x, 0, -5),
    "error_of_any_tag_sent": failing("Send", x, 0, lambda MPI, x: MPI.ANY_TAG),
    "error_of_a_tag_too_large": failing(
        "Irecv", x, 0, lambda MPI, x: MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) + 1
    ),
    "error_of_a_tag_that_is_text": failing("Recv", x, 0, "1"),
    "error_of_a_missing_dest": failing("Send", x),
    "error_of_a_status_of_an_irecv": failing("Irecv", x, 0, 0, None),
    "error_of_none_sent": failing("Send", None, 0),
    "error_of_read_only_memory_received": failing("Recv", b"four", 0),
    "error_of_strides_sent": failing("Send", lambda MPI, x: x[::2], 0),
    "error_of_a_null_datatype_sent": failing("Send", lambda MPI, x: [x, 1, MPI.DATATYPE_NULL], 0),
    "error_of_an_object_to_no_rank": failing("send", "text", 9),
    "error_of_a_message_that_is_no_object": failing("isend", lambda MPI, x: lambda: 0, 0),
    "error_of_a_persistent_dest": failing("Send_init", x, 5),
    "error_of_a_replaced_source": failing("Sendrecv_replace", x, 0, 0, 12),
}
