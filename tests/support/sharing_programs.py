"""Programs of ranks whose communicators share memory, for `contract/test_local_calls`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.raising import raises
from support.stopping import stop_for_a_second

import r2ccl
from r2ccl.errors import TransportError
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.local import MOST_GROUPS
from r2ccl.testing import FaultPlan

NCALLS = 200


def ways_to_call() -> tuple[int, int, int]:
    """Make every call blocking on one rank, asynchronously on another, in groups on the rest.

    Return how many calls there were, how many of them the data loop ran, and `ncalls`.
    """
    with r2ccl.init() as comm:
        n, rank = comm.nranks, comm.rank
        local, before = comm._participant.on_host.local, comm.ncalls
        assert local is not None
        assert comm.explain(1 << 20).is_local
        shared = local.ncalls

        def call(name: str, *given: Any, **named: Any) -> Any:
            method = getattr(comm, name)
            if rank == 0:
                return method(*given, **named)
            if rank == 1:
                return method(*given, async_op=True, **named).wait()
            with comm.group():
                return method(*given, **named)

        x, rows = np.full(4 * n, rank + 1.0), np.arange(n) + 1.0
        assert (call("allreduce", x.copy()) == rows.sum()).all()
        assert (call("allgather", x)[:, 0] == rows).all()
        assert (call("reduce_scatter", x) == rows.sum()).all()
        assert (call("broadcast", x.copy(), root=n - 1) == n).all()
        assert (call("alltoall", x)[::4] == rows).all()
        gathered = call("gather", x, root=1)
        assert gathered is None if rank != 1 else (gathered[:, 0] == rows).all()
        assert (call("scatter", x if rank == 1 else None, np.empty(4), root=1) == 2).all()
        counts = list(range(1, n + 1))
        assert call("allgatherv", x[: rank + 1], counts=counts).sum() == (rows * rows).sum()
        summed = call("reduce_scatterv", np.arange(1.0, n * n + 1), counts=[n * n, *[0] * (n - 1)])
        assert (summed == n * np.arange(1.0, n * n + 1)[: summed.size]).all()
        assert (call("scan", x.copy()) == rows[: rank + 1].sum()).all()
        below = call("exscan", x.copy())
        assert (below == (rows[:rank].sum() if rank else 1)).all()
        halves = call("allreduce", x.astype(np.float16), op=r2ccl.accumulate_float32())
        assert (halves == rows.sum()).all()
        comm.barrier()
        ncalls = comm.ncalls - before
        product = r2ccl.user_op(np.multiply)
        assert (call("allreduce", x.copy(), op=product) == rows.prod()).all()
        assert (call("allreduce", x.astype(np.float16)) == rows.sum()).all()
        return ncalls, ncalls - (local.ncalls - shared - 1), comm.ncalls - before


def other_paths() -> str:
    """Call a collective that uses the network on the last rank, one in memory on the others."""
    with r2ccl.init() as comm:
        comm.barrier()
        x = np.ones(1000)
        try:
            if comm.rank == comm.nranks - 1:
                comm.scan(x, op=r2ccl.user_op(np.add))
            else:
                comm.allreduce(x)
        except r2ccl.InvalidArgument as exc:
            return str(exc)
    return "it ran"


def late() -> tuple[str, str]:
    """Wait for a rank that does not call; return what `pending` and the error say on rank 0."""
    seen: list[str] = []
    with r2ccl.init(timeout_s=1.0) as comm:
        if comm.rank == comm.nranks - 1:
            while comm._engine.error is None:
                time.sleep(0.01)
            comm.abort()
            return "", ""
        looker = threading.Timer(0.5, lambda: seen.append(str(comm.pending())))
        looker.start()
        try:
            comm.allreduce(np.ones(10))
        except r2ccl.R2cclError as exc:
            looker.join()
            comm.abort()
            return seen[0], f"{type(exc).__name__}: {exc}"
    raise AssertionError("no error")


def stopped() -> float:
    """Stop the last rank for a second amid calls; return the sum of the last result."""
    with r2ccl.init() as comm:
        comm.barrier()
        is_over = stop_for_a_second() if comm.rank == comm.nranks - 1 else lambda: True
        x, goes_on = np.ones(1 << 18, np.float32), np.ones(1)
        while goes_on[0]:
            comm.allreduce(x, op=r2ccl.ReduceOp.MAX)
            goes_on[0] = not is_over()
            comm.allreduce(goes_on, op=r2ccl.ReduceOp.MAX)
        return float(x.sum())


def repeated() -> None:
    """Change arrays between equal calls: each call sees what they are now."""
    with r2ccl.init() as comm:
        n, x, out = comm.nranks, np.ones(64), np.empty(64)
        for _ in range(3):
            comm.allreduce(x, out)
            comm.allreduce(x, out)
            assert (out == n).all()
            comm.allreduce(x, out, r2ccl.ReduceOp.MAX)
            assert (out == 1).all()
        comm.allreduce(x)
        comm.allreduce(x)
        assert (x == n * n).all()
        x.flags.writeable = False
        with raises(r2ccl.InvalidArgument, match="read-only"):
            comm.allreduce(x)
        x.flags.writeable = True
        x.resize(8, refcheck=False)
        assert (comm.allreduce(x) == n**3).all()
        x.dtype = np.int64  # type: ignore[misc]
        x[:] = 3
        assert (comm.allreduce(x) == 3 * n).all()
        repeated_parts(comm)
        with raises(r2ccl.InvalidArgument, match="overlap"):
            comm.allreduce(out[:60], out[4:])
        with raises(r2ccl.InvalidArgument):
            comm.allreduce(None)
        comm.reduce(x)
        with raises(r2ccl.InvalidArgument, match="give the root as root=0"):
            comm.reduce(x, 0)  # also on ranks that do not use their output


def alternated() -> None:
    """Alternate between calls of several sizes, dtypes and shapes: each is repeated, exactly."""
    with r2ccl.init() as comm:
        n, local = comm.nranks, comm._participant.on_host.local
        assert local is not None
        dtypes = (np.float32, np.float64, np.int32)
        arrays = [np.ones(size, dtype) for size in (3, 16, 9000) for dtype in dtypes]
        grid = np.ones((2, 3), np.int16)

        def call_all() -> None:
            for x in arrays:
                out = comm.allreduce(x, np.empty_like(x))
                assert (out == n).all()
                assert comm.allgather(x).shape == (n, *x.shape)
                assert comm.allreduce(out, op=r2ccl.ReduceOp.MAX) is out
                assert (out == n).all()
                for root in range(n):
                    assert (comm.broadcast(x, root=root) == 1).all()
            assert comm.allgather(grid).shape == (n, 2, 3)
            assert comm.allgather(grid.reshape(6)).shape == (n, 6)

        call_all()
        local.run = _refuse  # type: ignore[method-assign]
        for _ in range(3):
            call_all()


def repeated_with_tensors() -> None:
    """Repeat calls with tensors of torch on the CPU."""
    import torch

    with r2ccl.init() as comm:
        n, local = comm.nranks, comm._participant.on_host.local
        assert local is not None
        x, out, gathered = torch.ones(2, 3), torch.empty(2, 3), np.empty((2 * n, 3), np.float32)
        graph = torch.ones(2, 3, requires_grad=True)

        def call_all() -> None:
            assert comm.allreduce(x, out) is out
            assert (out == n).all()
            assert comm.allreduce(out, op=r2ccl.ReduceOp.MAX) is out
            assert comm.allgather(x, gathered) is gathered
            assert (gathered == 1).all()
            assert comm.broadcast(x, root=n - 1) is x

        call_all()
        # These are not repeated; those of the same form before them still are.
        assert type(comm.allgather(x)) is torch.Tensor
        with raises(r2ccl.InvalidArgument, match="require gradient"):
            comm.allreduce(graph)
        assert (comm.allreduce(x.bfloat16()) == n).all()
        local.run = _refuse  # type: ignore[method-assign]
        for _ in range(3):
            call_all()


def _refuse(request: object) -> None:
    raise AssertionError(f"{request} was not repeated")


def closed_in_a_repetition() -> str:
    """Close the communicator while a thread repeats calls; return what the thread raises."""
    comm = r2ccl.init()
    x, raised = np.ones(64), []

    def repeat() -> None:
        try:
            while True:
                comm.allreduce(x)
        except r2ccl.R2cclError as exc:
            raised.append(type(exc).__name__)

    thread = threading.Thread(target=repeat)
    thread.start()
    time.sleep(0.1)
    comm.revoke()
    comm.close()
    thread.join(10.0)
    return raised[0]


def shares(what: str) -> bool:
    """Return whether ranks share memory if they inject faults or choose the ring."""
    faults = FaultPlan([]) if what == "faults" else None
    with r2ccl.init(faults=faults, algo="ring" if what == "ring" else "auto") as comm:
        assert (comm.allreduce(np.ones(1000)) == comm.nranks).all()
        return comm._participant.on_host.shares_memory


def repeated_parts(comm: r2ccl.Communicator) -> None:
    """Repeat calls with parts; then change sizes, places, roots and the overlap of the arrays."""
    n, rank = comm.nranks, comm.rank
    x, rows = np.full(n, rank + 1.0), np.arange(n) + 1.0
    out = np.zeros(4 * n)
    for _ in range(3):
        assert (comm.allgather(x)[:, 0] == rows).all()  # the output is new
        assert (comm.allgather(x.reshape(1, n))[:, 0, 0] == rows).all()
        x.shape = (n,)
        for size in (1, 4, 1):
            counts = [size] * n
            whole = comm.alltoallv(
                np.repeat(x, size), out[: n * size], sendcounts=counts, recvcounts=counts
            )
            assert (whole == np.repeat(rows, size)).all()
        for root in (0, n - 1, n - 1):
            gathered = comm.gather(x, out[: n * n] if rank == root else None, root)
            assert gathered is None if rank != root else (gathered[::n] == rows).all()
            part = comm.scatter(np.repeat(rows, 2) if rank == root else None, out[:2], root)
            assert (part == rank + 1).all()
        same = x.copy()
        assert (comm.alltoall(same, same) == rows).all()
        assert comm.alltoall(x) is not x
        assert (x == rank + 1).all()
        assert (comm.alltoall(x, same) == rows).all()
        own = out[: n * 2]
        own[rank * 2 : rank * 2 + 2] = rank + 1
        assert (comm.allgather(own[rank * 2 : rank * 2 + 2], own) == np.repeat(rows, 2)).all()
        assert comm.reduce(x, None, r2ccl.ReduceOp.MAX, 0) is (x if rank == 0 else None)
        x[:] = rank + 1
        counts = [1] * n
        comm.allgatherv(x[:1], out[:n], counts=counts)
        counts[0], counts[1] = 0, 2
        total = comm.allgatherv(x[: counts[rank]], out[:n], counts=counts)
        assert (total == np.repeat(rows, counts)).all()
        with raises(r2ccl.InvalidArgument, match="counts"):
            comm.allgatherv(x[: counts[rank]], out[:n], counts=[float(each) for each in counts])
        with raises(r2ccl.InvalidArgument, match="overlap"):
            comm.alltoall(out[: 2 * n], out[n : 3 * n])


def repeated_differently(what: str) -> str:
    """Repeat a call, on the last rank with one difference; return the error.

    A rank that does not wait for the others, such as the root of a broadcast, raises the error in a
    later call, or as the communicator closes; a rank that is late, in an earlier call.
    """
    number = 0
    try:
        with r2ccl.init() as comm:
            n, x, counts = comm.nranks, np.ones(8 * comm.nranks), [8] * comm.nranks
            whole = counts.copy()
            for number in range(5):
                is_other = number == 3 and comm.rank == n - 1
                if is_other:
                    counts[0], counts[1] = 7, 9
                    x = x[: 7 * n] if what == "size" else x
                root = n - 1 if is_other and what == "root" else 0
                if what == "counts":
                    comm.reduce_scatterv(x, np.empty(counts[comm.rank]), counts=counts)
                elif what == "sizes":
                    comm.alltoallv(x, np.empty(sum(counts)), sendcounts=whole, recvcounts=counts)
                else:
                    comm.broadcast(x, root=root)
    except r2ccl.InvalidArgument as exc:
        if number < 3 and what not in ("size", "root"):
            raise
        return str(exc)
    return "it ran"


def handled(what: str) -> tuple[str, float, float]:
    """Make a call in a signal handler that interrupts a repeated call of rank 0; return its error.

    Return the results of the interrupted call, and of an asynchronous one that a thread has queued
    if `what` is ``"queued"``.
    """
    said = ""
    with r2ccl.init() as comm:
        x, out, y = np.ones(100), np.zeros(100), np.ones(3)

        def handle(*_: object) -> None:
            nonlocal said
            try:
                comm.empty(10, np.float32) if what == "empty" else comm.allreduce(x)
            except Exception as exc:
                said = type(exc).__name__

        for _ in range(5):
            comm.allreduce(x, out)
        signal.signal(signal.SIGALRM, handle)
        works: list[Any] = []

        def queue() -> None:
            works.append(comm.allreduce(y, async_op=True))

        thread = threading.Timer(0.1, queue)
        if comm.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            if what == "queued":
                thread.start()
        else:
            time.sleep(0.6)
        comm.allreduce(x, out)
        if what == "queued":
            thread.join() if comm.rank == 0 else queue()
            works[0].wait()
        return said, float(out[0]), float(y[0])


def moved(kind: str) -> list[list[float]]:
    """Repeat an allgatherv, then change its places in the same list; return the outputs."""
    with r2ccl.init() as comm:
        counts, places = {
            "list": ([1, 2], [0, 1]),
            "arrays": ([np.array(1), np.array(2)], [np.array(0), np.array(1)]),
            "array": (np.array([1, 2]), np.array([0, 1])),
        }[kind]
        x, found = np.full(comm.rank + 1, comm.rank + 1.0), []
        for number in range(8):
            if number == 5:
                for rank in range(comm.nranks):
                    places[rank] += 1
            out = np.zeros(4)
            comm.allgatherv(x, out, counts=counts, displs=places)
            found.append(out.tolist())
        try:
            comm.allgatherv(x, out, counts=[1.0, 2.0], displs=[0, 1])
        except r2ccl.InvalidArgument:
            found.append([float(comm.allreduce(np.ones(1))[0])])
        return found


def differ_at_the_end(what: str) -> str:
    """Make a last call in which each rank only sends; return the error of `close`."""
    try:
        with r2ccl.init() as parent:
            comm = parent.dup() if what.startswith("child") else parent
            comm.allreduce(np.ones(3))
            if what.endswith("reduce") and comm.rank:
                comm.reduce(np.ones(3), root=0)
            elif what.endswith("missing"):
                for _ in range(4 - comm.rank):
                    comm.broadcast(np.ones(3))
            else:
                comm.broadcast(np.ones(3), root=comm.rank)
            if what == "child reduce":
                parent.barrier()
                comm.close()
    except r2ccl.InvalidArgument as exc:
        return str(exc)
    return "no error"


def slow_receiver() -> int:
    """Let one rank be late while the root of broadcasts goes ahead; return the number of calls."""
    with r2ccl.init(suspicion_timeout_s=0.1) as comm:
        for number in range(40):
            if comm.rank == 2 and number == 20:
                time.sleep(1.0)
            comm.broadcast(np.ones(8))
        comm.barrier()
        return number + 1


def obstructed(what: str, rank: int) -> tuple[bool, float]:
    """Let one rank be unable to share memory; return whether memory is shared, and a sum."""
    if int(os.environ["RANK"]) == rank:
        if what == "numba":
            from r2ccl.shm import group

            def fail() -> None:
                raise ImportError("llvmlite is not installed, in a test")

            group.preload = fail
        else:
            from r2ccl.shm.segment import Segment

            def refuse(nranks: int) -> Segment:
                raise TransportError("no memory is left, in a test")

            Segment.create_of_group = refuse  # type: ignore[method-assign]
    with r2ccl.init() as comm:
        total = comm.allreduce(np.ones(3))
        return comm._participant.on_host.shares_memory, float(total.sum())


def exhausted(rank: int) -> str:
    """Let one rank have no memory while a second communicator is made; return the error."""
    with r2ccl.init(timeout_s=60.0) as comm:
        comm.barrier()
        if comm.rank == rank:
            from r2ccl.shm.segment import Segment

            def fail(nranks: int) -> Segment:
                raise MemoryError

            Segment.create_of_group = fail  # type: ignore[method-assign]
        begun_s = time.monotonic()
        try:
            comm.dup()
        except MemoryError:
            return "MemoryError"
        except r2ccl.R2cclError as exc:
            assert time.monotonic() < begun_s + 20.0
            return f"{type(exc).__name__}: {exc}"
    return "it ran"


def beside_the_network() -> tuple[int, float]:
    """Wait in shared memory for ranks that first need a message and a scan over the network.

    Only the waiting thread runs the data loop: the control thread does not. Return the sum of the
    message that the last rank received, and the sum of the scan.
    """
    DataLoop.on_tick = _do_nothing  # type: ignore[method-assign]
    with r2ccl.init(timeout_s=30.0) as comm, comm.dup() as other:
        last = comm.nranks - 1
        x = np.full(1 << 24, comm.rank, np.uint8)
        work = other.scan(np.ones(1000), op=r2ccl.user_op(np.add), async_op=True)
        if comm.rank == 0:
            sent = comm.send(x + 1, last, async_op=True)
            assert sent is not None
            comm.barrier()
            sent.wait()
            total = work.wait()
        else:
            if comm.rank == last:
                comm.recv(x, 0)
            total = work.wait()
            assert (total == comm.rank + 1).all()
            comm.barrier()
        assert comm._participant.on_host.shares_memory
        return int(x.sum(dtype=np.int64)), float(total.sum())


def _do_nothing(_: DataLoop, now: float) -> None:
    del now


def is_loaded() -> bool:
    """Return whether compiled code was loaded before the rank began."""
    return "r2ccl.shm.group" in sys.modules


def many() -> list[bool]:
    """Make more communicators than may share memory; return which do, the first one included."""
    with r2ccl.init() as comm:
        made = [comm, *(comm.dup() for _ in range(MOST_GROUPS))]
        assert all((each.allreduce(np.ones(5)) == comm.nranks).all() for each in made)
        made[1].close()
        made.append(comm.dup())
        return [each._participant.on_host.shares_memory for each in made]


def freed() -> tuple[int, int]:
    """Return how many segments are mapped while a communicator is open, and afterwards."""

    def count() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:r2ccl")

    with r2ccl.init() as comm:
        child = comm.dup()
        comm.barrier()
        child.barrier()
        during = count()
    return during, count()


def survived(victim: int) -> tuple[str, float, bool]:
    """Kill a rank amid calls; return the error of the others, and what they compute then."""
    comm, name = r2ccl.init(), ""
    x = np.ones(1000)
    try:
        for at in range(1_000_000):
            if comm.rank == victim and at == 100:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.allreduce(x, op=r2ccl.ReduceOp.MAX)
    except r2ccl.R2cclError as exc:
        name = f"{type(exc).__name__} of rank {getattr(exc, 'peer', None)}"
    with comm.shrink() as fewer:
        total = fewer.allreduce(np.ones(3))
        return name, float(total[0]), fewer._participant.on_host.shares_memory
