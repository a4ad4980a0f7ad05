"""Programs of ranks with arrays of `Communicator.empty`, for `contract/test_empty`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support import matrix_programs
from support.raising import raises

import r2ccl
from r2ccl.runtime import arguments
from r2ccl.shm import layout, symmetric

Array = np.ndarray[Any, np.dtype[Any]]


#: Root of the broadcast of `slices`.
ROOT = 1


def is_direct(comm: r2ccl.Communicator) -> bool:
    """Return whether peers reached this rank's arrays in the last call."""
    local = comm._participant.on_host.local
    assert local is not None
    return bool(local._group._memory[layout.MODE] == layout.DIRECT)


def forms() -> None:
    """Make arrays of several forms, and wrong ones."""
    with r2ccl.init() as comm:
        assert comm.empty(5).dtype == np.float64
        x = comm.empty((2, 3), np.int16)
        assert (x.shape, x.dtype, x.flags.c_contiguous) == ((2, 3), np.int16, True)
        like = comm.empty(like=bytearray(7))
        assert (like.shape, like.dtype) == ((7,), np.uint8)
        assert comm.empty(like=x, dtype=np.float16).dtype == np.float16
        assert comm.empty(()).shape == ()
        assert comm.empty((0, 4)).size == 0
        for wrong in ({}, {"shape": 3, "like": x}, {"shape": -1}, {"shape": 1.5},
                      {"shape": 3, "dtype": "U4"}, {"shape": 3, "dtype": ">f4"}):  # fmt: skip
            with raises(r2ccl.InvalidArgument):
                comm.empty(**wrong)
        if comm._participant.on_host.shares_memory:
            with raises(r2ccl.InvalidArgument, match="equal shape"):
                comm.empty(10_000 if comm.rank else 1)
        x[:] = comm.rank
        assert (comm.allreduce(x, op=r2ccl.ReduceOp.MAX) == comm.nranks - 1).all()


def slices() -> list[bool]:
    """Call on slices and views of one array; return for each whether peers reached this rank's."""
    found = []
    with r2ccl.init() as comm:
        n, rank = comm.nranks, comm.rank
        room = comm.empty(4 * n * 100_000, np.float32)
        at = 7 * rank
        x, out = room[at : at + n * 50_000], room[n * 200_000 + at :][: n * 50_000]

        def note(is_right: bool) -> None:
            assert is_right
            found.append(is_direct(comm))

        x[:] = rank
        note(bool((comm.allreduce(x, out) == sum(range(n))).all()))
        for _ in range(3):  # repeated calls do not run the same code in Python
            x[:] = rank
            note(bool((comm.allreduce(x) == sum(range(n))).all()))
        matrix = np.from_dlpack(x).reshape(-1, n)
        matrix[:] = 1
        note(bool((comm.allreduce(matrix) == n).all()))
        x[:] = rank
        note(bool((comm.allgather(x).reshape(n, -1) == np.arange(n)[:, None]).all()))
        note(bool((comm.alltoall(x).reshape(n, -1) == np.arange(n)[:, None]).all()))
        note(bool((comm.reduce_scatter(x) == sum(range(n))).all()))
        note(bool((comm.broadcast(x, root=ROOT) == ROOT).all()))
        other = np.ones(n * 50_000, np.float32) if rank else x
        other[:] = 1
        note(bool((comm.allreduce(other) == n).all()))
        note(bool((comm.allreduce(np.ones(n * 50_000, np.float32)) == n).all()))
        with comm.dup() as again:
            x[:] = 2
            assert (again.allreduce(x) == 2 * n).all()
            found.append(is_direct(again))
    return found


def matrix(every: int) -> tuple[int, list[str]]:
    """Run the matrix of collectives with all arrays in memory that peers reach."""
    sizes = ((0, False), (7, False), (5003, True), (40_001, False))
    with reached_arrays(), smaller_sizes(sizes):
        return matrix_programs.matrix(every)


@contextmanager
def smaller_sizes(sizes: Any) -> Iterator[None]:
    before, matrix_programs.SIZES = matrix_programs.SIZES, sizes
    try:
        yield
    finally:
        matrix_programs.SIZES = before


@contextmanager
def reached_arrays() -> Iterator[None]:
    """Let the cases of the matrix put their arrays into memory that peers reach."""
    room: list[Any] = [None, 0]

    def put(self: matrix_programs.Case, values: Array) -> Array:
        if room[0] is None or room[0][0] is not self.comm:
            room[:] = [(self.comm, self.comm.empty(1 << 26, np.uint8)), 0]
        memory = room[0][1]
        nbytes = values.nbytes + values.itemsize * self.is_shifted
        if room[1] + nbytes > memory.size:
            room[1] = 0
        at = room[1] + values.itemsize * self.is_shifted
        room[1] += -(-nbytes // 64) * 64
        x: Array = memory[at : at + values.nbytes].view(values.dtype)
        x[:] = values
        return x

    before, matrix_programs.Case.put = matrix_programs.Case.put, put  # type: ignore[method-assign]
    try:
        yield
    finally:
        matrix_programs.Case.put = before  # type: ignore[method-assign]


def kept() -> tuple[float, int]:
    """Return the sum of a view after the communicator was closed, and what is mapped then."""
    with r2ccl.init() as comm:
        x = comm.empty(100_000)[10:]
        x[:] = comm.rank
        comm.allreduce(x)
        with raises(r2ccl.InvalidArgument):
            comm.empty(None)
    x += 1
    total = float(x.sum()) / x.size
    del x
    return total, Path("/proc/self/maps").read_text().count("memfd:r2ccl")


def forked() -> tuple[float, str]:
    """Let a child see and change an array; return what the rank has then, and the child's error."""
    with r2ccl.init() as comm:
        x = comm.empty(100_000)
        x[:] = 1
        comm.allreduce(x)
        reader, writer = os.pipe()
        if not os.fork():
            try:
                x[:5] += x[5]
                comm.empty(10)
            except r2ccl.CommunicatorRevoked as exc:
                os.write(writer, str(exc).encode())
            os._exit(0)
        os.wait()
        said = os.read(reader, 1000).decode()
        for each in (reader, writer):
            os.close(each)
        comm.allreduce(x)
        return float(x[0] / comm.nranks**2), said


def revoked() -> tuple[str, bool]:
    """Revoke while a rank waits in a call; return the error, and whether its output is withdrawn.

    The last rank writes to the output of rank 0 after rank 0's call has failed, as a rank would
    that was stopped in the call.
    """
    with r2ccl.init() as comm:
        x = comm.empty(1 << 16)
        x[:] = 5
        comm.barrier()
        if comm.rank:
            while comm._engine.error is None:
                time.sleep(0.001)
            time.sleep(0.5)
            symmetric = comm._participant.on_host.local._group.symmetric  # type: ignore[union-attr]
            symmetric._shared[0].peers[0].data[:] = 1
            comm.abort()
            return "", bool((x == 5).all())
        threading.Timer(0.3, comm.revoke).start()
        try:
            comm.allreduce(x[100:-100])
        except r2ccl.R2cclError as exc:
            time.sleep(1.0)
            inner = x[1000:-1000]
            return type(exc).__name__, bool((inner == 0).all())
    return "it ran", False


def interrupted() -> tuple[bool, bool]:
    """Press Ctrl-C in a repeated allreduce; return whether it came, and whether the array is kept.

    The last rank writes to the output of rank 0 afterwards, as it would in the call.
    """
    with r2ccl.init() as comm:
        x = comm.empty(1 << 16)
        for _ in range(3):
            x[:] = 5
            comm.allreduce(x)
        host = comm._participant.on_host
        comm.barrier()
        if comm.rank:
            while comm._engine.error is None:
                time.sleep(0.001)
            time.sleep(0.5)
            host.local._group.symmetric._shared[0].peers[0].data[:] = 1  # type: ignore[union-attr]
            comm.abort()
            return True, True

        def repeat(x: Any, out: Any, rest: Any) -> Any:
            raise KeyboardInterrupt  # as a signal that is handled when compiled code returns

        host.repeats.last[arguments.allreduce] = repeat
        try:
            comm.allreduce(x)
        except KeyboardInterrupt:
            x[:] = 7777
            time.sleep(1.0)
            return True, bool((x == 7777).all())
    return False, False


def placed() -> list[bool]:
    """Gather equal parts, in places that differ between the ranks; return whether it is right."""
    found = []
    with r2ccl.init() as comm:
        n, rank = comm.nranks, comm.rank
        for count in (3, 5000):
            mine = comm.empty(count, np.int64)
            for number in range(4):
                mine[:] = 10 * number + rank
                out = np.full(n * count, -1)
                order = range(n) if rank == 0 or number == 0 else range(n - 1, -1, -1)
                displs = [count * at for at in order]
                comm.allgatherv(mine, out, counts=[count] * n, displs=displs if rank else None)
                wanted = np.repeat([10 * number + each for each in order], count)
                found.append(bool((out == wanted).all()))
    return found


def empty_beside_a_call() -> tuple[str, float]:
    """Call `empty` in a thread while a call runs; return its error, and the result of the call."""
    said: list[str] = []
    with r2ccl.init() as comm:
        x = np.ones(4)
        comm.barrier()

        def ask() -> None:
            time.sleep(0.2)
            with raises(r2ccl.ConcurrentCalls):
                comm.empty(10)
            said.append("refused")

        if comm.rank == 0:
            asking = threading.Thread(target=ask)
            asking.start()
        else:
            time.sleep(0.6)
        comm.allreduce(x)
        if comm.rank == 0:
            asking.join()
        return "ConcurrentCalls" if said or comm.rank else "", float(x[0])


def killed_in_an_allocation() -> float:
    """Kill the last rank before it passes its segment; return how long another rank waits."""
    comm = r2ccl.init()

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if comm.rank == comm.nranks - 1:
        symmetric.pass_segments = die  # type: ignore[assignment]
    comm.barrier()
    begun_s = time.monotonic()
    try:
        comm.empty(1000)
    except r2ccl.R2cclError:
        return time.monotonic() - begun_s
    finally:
        comm.abort()
    return 1e9


def survived(victim: int) -> tuple[str, list[float]]:
    """Kill a rank amid calls; return the error, and sums of the same arrays in the new group."""
    comm, name = r2ccl.init(), ""
    x, kept = comm.empty(1 << 18), comm.empty(1000)
    x[:], kept[:] = 1, comm.rank + 1
    try:
        for at in range(1_000_000):
            if comm.rank == victim and at == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.allreduce(x, op=r2ccl.ReduceOp.MAX)
    except r2ccl.R2cclError as exc:
        name = f"{type(exc).__name__} of rank {getattr(exc, 'peer', None)}"
    with comm.shrink() as fewer:
        x[:] = 3
        total = fewer.allreduce(x)[7]
        again = fewer.empty(1 << 18)
        again[:] = 4
        fewer.allreduce(again)
        return name, [float(total), float(fewer.allreduce(kept)[9]), float(again[3])]


def refused(limit: int) -> tuple[str, float]:
    """Ask for more memory than there is; return the error, and a sum afterwards."""
    with r2ccl.init() as comm:
        try:
            comm.empty(limit, np.uint8)
        except r2ccl.TransportError as exc:
            x = comm.empty(10)
            x[:] = 1
            return str(exc), float(comm.allreduce(x)[0])
    return "it ran", 0.0
