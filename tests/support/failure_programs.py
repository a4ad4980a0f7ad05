"""Programs whose calls fail, or survive the loss of a rail."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from support.interrupted import as_acquired, at_entry
from support.raising import raises
from support.values import dtype_of

import r2ccl
from r2ccl import communicator
from r2ccl.algos import ring
from r2ccl.testing import fail_at


def disagree(calls: tuple[tuple[int, str, str], ...]) -> tuple[str, float]:
    """Call with ``calls[rank]`` = (count, dtype, op); return the error, and seconds until it."""
    with r2ccl.init() as comm:
        count, name, op = calls[comm.rank]
        begin = time.monotonic()
        try:
            comm.barrier()  # else the error may reach a rank that is still in init()
            comm.allreduce(np.ones(count, dtype_of(name)), op=r2ccl.ReduceOp[op])
            comm.barrier()  # a rank that needs no peer for its own call fails here
        except r2ccl.R2cclError as exc:
            text = f"{type(exc).__name__}: {exc}"
        else:
            text = "no error"
        return text, time.monotonic() - begin  # close() waits until every rank knows the cause


def wait_for_each_other(what: str) -> tuple[str, float]:
    """Let every rank wait for another one in another call; return the error, and its delay."""
    with r2ccl.init(shm=0) as comm:
        x, rank, other = np.ones(4), comm.rank, (comm.rank + 1) % comm.nranks
        calls: dict[str, Callable[[], Any]] = {
            "broadcast": lambda: comm.broadcast(x, root=other),
            "reduce": lambda: comm.reduce(x, root=rank),
            "gather": lambda: comm.scatter(None, x) if rank else comm.gather(x),
            "scan": lambda: comm.scan(x) if rank else comm.broadcast(x, root=1),
        }
        comm.barrier()
        begin = time.monotonic()
        try:
            calls[what]()
            comm.barrier()
        except r2ccl.R2cclError as exc:
            text = f"{type(exc).__name__}: {exc}"
        return text, time.monotonic() - begin


def leave_out(is_early: bool, compiled: str) -> str:
    """Leave out a call on rank 1, whose next one has the same form; return the error.

    If `is_early`, data of the next call is at rank 0 before rank 0 makes the call left out.
    """
    with r2ccl.init(shm=0, compiled=compiled) as comm:
        x, engine = np.ones(4), comm._engine
        comm.barrier()
        if comm.rank:
            # As a collective that neither sends to rank 0 nor waits for it.
            engine.call(functools.partial(engine._calls.pass_over, 1))
        elif is_early:
            links = engine._links.receivers
            while not any(link.arrivals for link in links.values()):
                time.sleep(0.001)
        try:
            comm.allgather(x)
            comm.barrier()  # rank 1 may have its data, as it sees no call left out
        except r2ccl.R2cclError as exc:
            return f"{type(exc).__name__}: {exc}"
        comm.abort()
        return "no error"


def close_before_the_last_call(count: int, shm: int) -> tuple[str, float]:
    """Call `close` on rank 1 while rank 0 scatters; return the error, and its delay."""
    begin, text = 0.0, "no error"
    try:
        with r2ccl.init(shm=shm) as comm:
            comm.barrier()
            begin = time.monotonic()
            if comm.rank == 0:
                comm.scatter(np.ones(2 * count))
    except r2ccl.R2cclError as exc:
        text = f"{type(exc).__name__}: {exc}"
    return text, time.monotonic() - begin


def closed_after_the_end(path: str, seen: str) -> list[str]:
    """Let rank 1 revoke, and call `close` once each rank knows; return the errors of `close`.

    `seen` says where rank 0 has seen the error before: "nowhere", "in a call", "in a child" (a call
    on a derived communicator, which is closed first), or "in exclude". "with a wrong argument" is
    an error of another call.
    """
    found: list[str] = []
    comm = r2ccl.init()
    child = comm.dup()
    comm.barrier()
    if comm.rank == 1:
        while not Path(path).exists():  # until rank 0 has left the barrier
            time.sleep(0.001)
        comm.revoke("a reason")
    else:
        Path(path).touch()
        while comm._job.engine.error is None:
            time.sleep(0.001)
        if seen == "with a wrong argument":
            with raises(r2ccl.InvalidArgument):
                comm.allreduce("text")
        elif seen != "nowhere":
            with raises(r2ccl.CommunicatorRevoked, "a reason"):
                if seen == "in exclude":
                    comm.exclude(0, 0)
                else:
                    (child if seen == "in a child" else comm).barrier()
    for closed in (child, comm):
        try:
            closed.close()
        except r2ccl.R2cclError as exc:
            found.append(f"{type(exc).__name__}: {exc}")
    comm.close()
    return found


def closed_after_ctrl_c(path: str) -> list[str]:
    """Press Ctrl-C on rank 0 in the wait for a message, and close; return the errors of `close`."""
    found: list[str] = []
    comm = r2ccl.init()
    comm.barrier()
    if comm.rank:
        Path(path).touch()
    else:
        while not Path(path).exists():  # until rank 1 has left the barrier
            time.sleep(0.001)
        request = comm.recv(np.empty(1), 1, async_op=True)
        number = 1
        while comm._engine.error is None:  # until Ctrl-C comes within the wait
            assert at_entry(number, request.wait)
            number += 1
    try:
        comm.close()
    except r2ccl.R2cclError as exc:
        found.append(f"{type(exc).__name__}: {exc}")
    return found


def waited_after_ctrl_c(path: str) -> str:
    """Press Ctrl-C on rank 0 in the wait for a message; return the error of another wait."""
    comm = r2ccl.init(shm="0")
    comm.barrier()
    if comm.rank:
        Path(path).touch()
        return _error_of(lambda: comm.recv(np.empty(1), 0))
    while not Path(path).exists():  # until rank 1 has left the barrier
        time.sleep(0.001)
    requests = [comm.recv(np.empty(1), 1, tag, async_op=True) for tag in range(2)]
    number = 1
    while comm._engine.error is None:  # until Ctrl-C comes within the wait
        assert at_entry(number, requests[0].wait)
        number += 1
    found = _error_of(requests[1].wait)
    comm.abort("the program has ended")
    return found


def _error_of(fn: Callable[[], object]) -> str:
    """Call `fn`, and return the name of the class of its error."""
    try:
        fn()
    except Exception as exc:
        return type(exc).__name__
    return "no error"


def closed_in_two_threads(path: str, is_child: bool) -> list[str]:
    """Close a communicator in two threads at once; return what is wrong when they return.

    On rank 0, the second thread begins while the first one waits for rank 1.
    """
    with r2ccl.init() as comm:
        closed = comm.dup() if is_child else comm
        closed.barrier()
        found: list[str] = []

        def close() -> None:
            try:
                closed.close()
            except r2ccl.R2cclError as exc:
                found.append(repr(exc))
            is_over = closed._participant not in comm._job._participants
            if not (is_over if is_child else comm._job._ending.wait(0.0)):
                found.append("not closed yet")

        threads = [threading.Thread(target=close) for _ in range(2)]
        if comm.rank == 0:
            threads[0].start()
            while not closed._participant.is_closed:
                time.sleep(0.001)
            threads[1].start()
            threads[1].join(0.5)
            Path(path).touch()
        else:
            while not Path(path).exists():
                time.sleep(0.001)
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        if is_child:
            comm.barrier()
    return found


def usable_after_bad_arguments() -> list[str]:
    """Pass arguments that are refused before any I/O; check that the communicator still works."""
    read_only = np.ones(4)
    read_only.flags.writeable = False
    overlapping = np.ones(10)
    refused: list[tuple[Any, ...]] = [
        (np.ones((4, 4))[:, ::2],),
        (read_only,),
        ([1.0, 2.0],),
        (np.array(["a"]),),
        (np.ones(4), np.ones(5)),
        (np.ones(4), np.ones(4, np.float32)),
        (overlapping[:8], overlapping[1:9]),
        (np.ones(4, complex), None, r2ccl.MIN),
    ]
    messages = []
    with r2ccl.init() as comm:
        for arguments in refused:
            try:
                comm.allreduce(*arguments)
            except r2ccl.InvalidArgument as exc:
                messages.append(str(exc))
        assert comm.allreduce(np.ones(3))[0] == comm.nranks
    return messages


def usable_after_wrong_ops_roots_and_schedules(is_busy: bool) -> None:
    """Pass wrong ops, roots and schedules, if `is_busy` while an asynchronous call runs."""
    x, big = np.ones(4), np.ones(1_000_000)
    ops: list[Any] = [9, "sum", [r2ccl.SUM], None, 1.5]
    whole = ring.allreduce(2, 1)
    half = msgspec.structs.replace(whole, generate=lambda rank: (whole.generate(rank)[0][:1],))
    with r2ccl.init() as comm:
        refused: list[Callable[[], Any]] = [
            *(functools.partial(comm.allreduce, x, op=op) for op in ops),
            lambda: comm.reduce(x, op=9),  # type: ignore[arg-type]
            lambda: comm.reduce_scatter(x, op=9),  # type: ignore[arg-type]
            *(functools.partial(comm.broadcast, x, root=root) for root in (0.5, "0", -1, 2)),
            lambda: comm.reduce(x, root=0.5),  # type: ignore[arg-type]
            lambda: comm.allreduce(np.ones(4, complex), op=r2ccl.MAX),
            lambda: comm.allreduce(np.ones(4), op=int(r2ccl.SUM)),  # type: ignore[arg-type]
            lambda: comm.run_schedule(x, whole),
            lambda: comm.run_schedule(None, x),  # type: ignore[call-overload]
            lambda: comm.run_schedule(half, x),
            lambda: comm.run_schedule(half, x, async_op=True),
        ]
        for call in refused:
            work = comm.allreduce(big, op=r2ccl.MAX, async_op=True) if is_busy else None
            with raises((r2ccl.InvalidArgument, r2ccl.ScheduleError)):
                call()
            if work is not None:
                work.wait()
        comm.reduce(x, root=np.int64(1))  # type: ignore[arg-type]


def killed_report(victim: int, nbytes: int) -> dict[str, Any]:
    """Kill one rank during an allreduce; return the error of each survivor."""
    with r2ccl.init() as comm:
        x = np.ones(nbytes, np.uint8)
        comm.allreduce(x)
        if comm.rank == victim:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        begin = time.monotonic()
        report: dict[str, Any] = {}
        try:
            while True:
                comm.allreduce(x)
        except r2ccl.R2cclError as exc:
            report["error"] = type(exc).__name__
            report["peer"] = getattr(exc, "peer", None)
            report["delay_s"] = time.monotonic() - begin
        try:
            comm.barrier()
        except r2ccl.CommunicatorRevoked as exc:
            report["after"] = type(exc.reason).__name__
        comm.abort()
        return report


def killed_in_init(victim: int) -> tuple[int | None, str]:
    """Kill one rank after the rendezvous; return the lost peer and the error of each survivor."""
    connect = communicator.Communicator.connect

    def die(comm: r2ccl.Communicator) -> None:
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        connect(comm)

    communicator.Communicator.connect = die  # type: ignore[method-assign]
    with raises(r2ccl.PeerLost) as caught:
        r2ccl.init()
    return caught.value.peer, str(caught.value)


def interrupted(victim: int, ncalls: int, shm: str) -> str:
    """End a call that waits for an absent peer by Ctrl-C; return the error of this rank.

    The call repeats `ncalls` earlier ones.
    """
    with r2ccl.init(shm=shm) as comm:
        for _ in range(ncalls):
            comm.allreduce(np.ones(1 << 20))
        if comm.rank == victim:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                comm.allreduce(np.ones(1 << 20))
            except KeyboardInterrupt:
                comm.abort("interrupted")
                return "KeyboardInterrupt"
        else:
            deadline = time.monotonic() + 30
            while comm._engine.error is None and time.monotonic() < deadline:
                time.sleep(0.01)
            try:
                comm.allreduce(np.ones(1 << 20))
            except r2ccl.CommunicatorRevoked as exc:
                comm.abort()
                return str(exc)
    return "no error"


def interrupted_as_it_begins(what: str, shm: str) -> list[str]:
    """Press Ctrl-C exactly as a call takes its turn; return its error, and that of the next call.

    The call is the first of its form, a repeated one, or one that makes a communicator.
    """
    comm = r2ccl.init(shm=shm)
    x, turn = np.ones(50), comm._collectives._turn.lock
    calls: dict[str, Callable[[], Any]] = {
        "first": lambda: comm.allreduce(np.ones(70)),
        "repeated": lambda: comm.allreduce(x),
        "dup": comm.dup,
    }
    # On rank 1, rank 0 may have ended the communicator already.
    with contextlib.suppress(r2ccl.CommunicatorRevoked):
        for _ in range(5):
            comm.allreduce(x)
            comm.allreduce(np.ones(60))  # compiled code leaves a call of another form to Python

    found = []
    for call in (calls[what], lambda: comm.allreduce(x)):
        is_quiet = comm.rank or found
        try:
            with contextlib.nullcontext() if is_quiet else as_acquired(turn):
                call()
        except (r2ccl.R2cclError, KeyboardInterrupt) as exc:
            found.append(type(exc).__name__)

    def take_and_release() -> None:
        with turn:
            pass

    other = threading.Thread(target=take_and_release, daemon=True)
    other.start()
    other.join(30.0)
    found.append("held" if other.is_alive() else "free")
    comm.abort("the program has ended")
    return found


def timed_out() -> str:
    """Return the timeout error of rank 0, which names the absent peer."""
    with r2ccl.init(timeout_s=0.5) as comm:
        if comm.rank == 0:
            try:
                comm.allreduce(np.ones(1 << 20, np.float32))
            except r2ccl.TransportTimeout as exc:
                return str(exc)
        else:
            deadline = time.monotonic() + 10
            while comm._engine.error is None and time.monotonic() < deadline:
                time.sleep(0.01)
        comm.abort()
    return ""


def lose_rails(count: int, step: int, ops: int) -> tuple[list[bytes], int]:
    """Break rail 0 at `step` of every other operation; return digests of results, and repairs."""
    from r2ccl.testing import Action, Fault, FaultPlan

    faults = [
        Fault(action=Action.NIC_DOWN, node=0, rail=0, rank=0, at_op=op, at_step=step)
        for op in range(0, ops, 2)
    ]
    plan = FaultPlan(faults)
    with r2ccl.init(faults=plan) as comm:
        results = []
        for op in range(ops):
            x = np.random.default_rng((op, comm.rank)).standard_normal(count).astype(np.float32)
            results.append(hashlib.sha256(comm.allreduce(x)).digest())
        return results, len(comm.repairs())


def lose_a_rail_in(collective: str) -> tuple[bool, int]:
    """Lose rail 0 of rank 1 in the second of two calls; return if both are right, and repairs."""
    step = 1 if collective == "gather" else 2  # in a gather, rank 1 sends only two slices
    with fail_at(rank=1, rail=0, op=1, step=step) as plan, r2ccl.init(faults=plan) as comm:
        n, rank = comm.nranks, comm.rank
        sizes = [400_000 + 1000 * peer for peer in range(n)]
        whole = np.arange(sum(sizes), dtype=np.float32) + rank
        mine = whole[: sizes[rank]]
        received = [sizes[rank]] * n  # in an alltoallv, every rank sends rank r sizes[r] elements
        calls: dict[str, Callable[[], Any]] = {
            "alltoall": lambda: comm.alltoall(np.tile(mine, n)[: n * sizes[0]]),
            "alltoallv": lambda: comm.alltoallv(whole, sendcounts=sizes, recvcounts=received),
            "gather": lambda: comm.gather(mine[: sizes[0]]),
            "gatherv": lambda: comm.gatherv(mine, counts=sizes),
            "scatter": lambda: comm.scatter(whole[: n * sizes[0]], mine[: sizes[0]], root=1),
            "scatterv": lambda: comm.scatterv(whole, mine.copy(), root=1, counts=sizes),
            "allgatherv": lambda: comm.allgatherv(mine, counts=sizes),
            "reduce_scatterv": lambda: comm.reduce_scatterv(whole, counts=sizes),
            "scan": lambda: comm.scan(whole, np.empty_like(whole)),
            "exscan": lambda: comm.exscan(whole, np.zeros_like(whole)),
        }
        if collective == "scatter":
            mine = mine.copy()
        results = []
        for _ in range(2):
            result = calls[collective]()
            results.append(b"" if result is None else result.tobytes())
        return results[0] == results[1], len(comm.repairs())


def many_reductions(count: int, ops: int) -> list[bytes]:
    """Run the operations of `lose_rails` without faults; return digests of the results."""
    results = []
    with r2ccl.init() as comm:
        for op in range(ops):
            x = np.random.default_rng((op, comm.rank)).standard_normal(count).astype(np.float32)
            results.append(hashlib.sha256(comm.allreduce(x)).digest())
    return results


def does_not_shrink() -> str:
    """Let rank 1 not call shrink() while the others wait for it; return the error of each rank."""
    comm = r2ccl.init()
    # A short timeout for shrink() only: init() may be slow on a busy machine.
    control = comm._job.control
    impatient = msgspec.structs.replace(control.setting.config, init_timeout_s=3.0)
    control.setting = msgspec.structs.replace(control.setting, config=impatient)
    # A rank that has already passed the barrier may have revoked the communicator.
    with contextlib.suppress(r2ccl.CommunicatorRevoked):
        comm.barrier()
    if comm.rank == 1:
        deadline, news = time.monotonic() + 40, comm._job.event_queue._news
        # Until the others have given up; they may have told their views more than once.
        while sum(told == "it left" for _, told in tuple(news)) < 2:
            assert time.monotonic() < deadline, news
            time.sleep(0.01)
    try:
        comm.shrink()
    except r2ccl.R2cclError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "no error"


def shrink_again_and_again(times: int) -> list[str]:
    """Revoke while the others are in a call, and shrink to all ranks; return the errors."""
    comm = r2ccl.init()
    wrong = []
    usage = []
    for turn in range(times):
        try:
            for call in itertools.count():
                if call == 3 and turn % comm.nranks == comm.rank:
                    comm.revoke()
                if comm.allreduce(np.ones(3))[0] != comm.nranks:
                    wrong.append(f"wrong sum in turn {turn}")
        except r2ccl.CommunicatorRevoked:
            usage.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
            comm = comm.shrink()
        if comm.members != tuple(range(comm.nranks)):
            wrong.append(f"members {comm.members}")
    # One connection more or less may be in setup; a leaked communicator has more than that.
    (threads, fds), (threads_then, fds_then) = usage[-1], usage[0]
    if threads != threads_then or fds > fds_then + 4:
        wrong.append(f"threads and descriptors in use: {usage}")
    comm.close()
    return wrong
