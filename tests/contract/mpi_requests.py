"""Cases of `mpi_rank` for requests, of nonblocking and of persistent calls."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from support.mpi_cases import Cases, ramp

CASES = Cases()
case = CASES.add


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
def statuses_of_no_requests(MPI: Any, comm: Any) -> Any:
    R, done = MPI.Request, comm.Isend(np.zeros(1), MPI.PROC_NULL)
    done.Wait()
    found = []
    for complete in (R.Waitany, R.Testany, R.waitany, R.testany, R.Get_status_any):
        for requests in ([], [MPI.REQUEST_NULL], [done]):
            status = MPI.Status()
            status.Set_source(7)
            status.Set_elements(MPI.INT, 3)
            complete(requests, status)
            found.append([status.Get_source(), status.Get_count(MPI.INT)])
    return found


@case
def statuses_in_a_tuple(MPI: Any, comm: Any) -> Any:
    R, status, found = MPI.Request, MPI.Status(), []
    for complete in (R.Waitall, R.waitall, R.Waitsome, R.waitsome):
        for statuses in ((), (status,)):
            requests = [comm.Irecv(np.zeros(2), MPI.PROC_NULL, 3) for _ in range(2)]
            while not R.Get_status_all(requests):
                pass
            found += [complete(requests, statuses), status.Get_source(), len(statuses)]
            status.Set_source(7)
    return found


@case
def error_of_requests_of_a_generator(MPI: Any, comm: Any) -> Any:
    MPI.Request.Waitall(comm.Isend(np.zeros(1), MPI.PROC_NULL) for _ in range(2))


@case
def error_of_a_set_of_requests(MPI: Any, comm: Any) -> Any:
    MPI.Request.Waitall({comm.Isend(np.zeros(1), MPI.PROC_NULL)})


@case
def lists_of_persistent_requests_of_mpi(MPI: Any, comm: Any) -> Any:
    """Requests of a communicator that is MPI's in both: no request counts once it is completed."""
    R, out, found = MPI.Request, bytearray(1), []
    requests = [MPI.COMM_SELF.Send_init(b"x", 0), MPI.COMM_SELF.Recv_init(out, 0)]
    for wait in (R.Waitany, R.waitany):
        MPI.Prequest.Startall(requests)
        found.append([wait(requests) for _ in range(3)])
    for wait in (R.Waitsome, R.waitsome):
        MPI.Prequest.Startall(requests)
        found.append([wait(requests, statuses := []), len(statuses), wait(requests)])
    for look in (
        R.Testany, R.testany, R.Testsome, R.testsome, R.Get_status_any, R.Get_status_some,
    ):  # fmt: skip
        found.append(look(requests))
    for each in requests:
        each.Free()
    return found, out[0]


@case
def a_wrong_list_for_startall_starts_nothing(MPI: Any, comm: Any) -> Any:
    first, found = comm.Recv_init(np.zeros(1), comm.rank, 9), []
    for second in (None, comm.Irecv(np.zeros(1), MPI.PROC_NULL)):
        try:
            MPI.Prequest.Startall([first, second])
        except TypeError:
            found.append("TypeError")
        except MPI.Exception as exc:
            found.append(exc.Get_error_class() == MPI.ERR_REQUEST)
    found.append(first.Test())
    first.Free()
    return found


@case
def a_refused_request_reports_no_second_error(MPI: Any, comm: Any) -> Any:
    """Nothing else is reported when the object that the constructor refused is deleted."""
    reported: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, reported.append
    try:
        MPI.Request("no request")
    except TypeError:
        return len(reported)
    finally:
        sys.unraisablehook = hook


@case
def null_handles(MPI: Any, comm: Any) -> Any:
    """Those that the constructors make, and those of completed and freed requests."""

    def failure(run: Any) -> Any:
        try:
            return run()
        except MPI.Exception as exc:
            return exc.Get_error_class() == MPI.ERR_REQUEST

    done, freed = comm.isend(1, MPI.PROC_NULL), comm.Send_init(np.zeros(1), MPI.PROC_NULL)
    done.wait()
    freed.Free()
    nulls = [MPI.Request(), MPI.Prequest(), done, freed]
    found = [
        [each == MPI.REQUEST_NULL, bool(each), each.Wait(), each.test(), each.Get_status(),
         failure(each.Free), failure(each.Cancel)]
        for each in nulls
    ]  # fmt: skip
    found += [MPI.Request.Waitall(nulls), [failure(each.Start) for each in (nulls[1], freed)]]
    message = MPI.Message()
    return found, message == MPI.MESSAGE_NULL, bool(message), failure(message.recv)


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


@case
def derived_datatypes_freed_meanwhile(MPI: Any, comm: Any) -> Any:
    """The calls still use the datatypes, as MPI allows."""
    after, before, n = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, comm.size
    indexed = MPI.DOUBLE.Create_indexed([2, 1], [4, 0]).Commit()
    got, everyone, blocks, repeated = np.zeros(8), *np.zeros((2, 8 * n)), np.zeros(8)
    spread = np.arange(8.0) + comm.rank
    at = [8 * rank for rank in range(n)]
    displs = [64 * rank for rank in range(n)]
    requests = [
        comm.Irecv([got, 1, indexed], before),
        comm.Iallgather(spread[:3], [everyone, 1, indexed.Create_resized(0, 64).Commit()]),
        comm.Ialltoallw(
            [np.arange(3.0 * n), [3] * n, [24 * rank for rank in range(n)], [MPI.DOUBLE] * n],
            [blocks, [1] * n, displs, [indexed] * n],
        ),
    ]
    persistent = comm.Bcast_init([repeated, 1, indexed], root=0)
    indexed.Free()
    comm.Send(spread[:3], after)
    MPI.Request.Waitall(requests)
    for turn in range(2):
        repeated += comm.rank + turn + 1
        persistent.Start()
        persistent.Wait()
    persistent.Free()
    return got, everyone, blocks[at], blocks, repeated
