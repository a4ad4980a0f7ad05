"""Programs of ranks on several hosts, two or more on each, for `contract/test_two_level`.

The hosts are this machine: each rank says that its host is that of its number.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support import values
from support.stopping import stop_for_a_second

import r2ccl
from r2ccl.bootstrap import startup
from r2ccl.errors import TransportError
from r2ccl.planning import two_level
from r2ccl.shm.group import LocalGroup

#: Numbers of elements: fewer than parts, odd, several slices.
COUNTS = (1, 5, 60_001)
#: A call of this many elements takes long, in `NCHUNKS` chunks.
MANY, NCHUNKS = 1 << 22, 7


@contextmanager
def hosts(sizes: list[int], **settings: Any) -> Iterator[r2ccl.Communicator]:
    """Join a job whose hosts have these numbers of ranks."""
    own = np.repeat(np.arange(len(sizes)), sizes)[int(os.environ["RANK"])]
    startup.host_id = lambda: f"host{own}/boot/namespace"
    with r2ccl.init(**settings) as comm:
        yield comm


def divided(nchunks: int = NCHUNKS) -> None:
    """Divide all calls, also those of little data, into `nchunks` chunks."""
    two_level.count_chunks = lambda nbytes: nchunks
    two_level._LOCAL_STEPS = -1


def exact(sizes: list[int], nchunks: int, has_all_ops: bool) -> tuple[list[str], bool]:
    """Return the wrong results of all dtypes, and whether there are two levels."""
    wrong = []
    with hosts(sizes) as comm:
        divided(nchunks)
        for name in values.DTYPES:
            every = values.ops_of(name)
            if name.startswith("float8"):  # their sums over more than 4 ranks must be rounded
                every = [op for op in every if op not in (r2ccl.SUM, r2ccl.AVG)]
            for op in every if has_all_ops else {*values.some_ops(name), every[-1]}:
                for count in COUNTS[: 3 if op == r2ccl.SUM else 2]:
                    x = values.data_of(comm.rank, count, name)
                    kept = x.copy()
                    wanted = values.expected(comm.nranks, count, name, op)
                    found = comm.allreduce(x, np.zeros_like(x), op)
                    in_place = comm.allreduce(x.copy(), op=op)
                    if not (values.same(found, wanted) and values.same(in_place, wanted)):
                        wrong.append(f"{name} {op} {count}")
                    if not values.same(x, kept):
                        wrong.append(f"{name} {op} {count}: the input has changed")
        return wrong, comm._collectives._two_level is not None


def counted(sizes: list[int]) -> list[int]:
    """Return how many calls the data loop ran for one of `NCHUNKS` chunks, by way of calling."""
    with hosts(sizes) as comm:
        divided()
        assert comm.explain(4000).nchunks == NCHUNKS
        assert not comm.explain(4000).is_local
        assert f"runs in two levels, in {NCHUNKS} chunks" in str(comm.explain(4000))
        found = []
        for way in ("blocking", "async", "group", "float16"):
            x, before = np.ones(1000, np.float16 if way == "float16" else np.float32), comm.ncalls
            if way == "blocking":
                comm.allreduce(x)
            elif way == "async":
                comm.allreduce(x, async_op=True).wait()
            elif way == "group":
                with comm.group():
                    comm.allreduce(x)
            else:
                comm.allreduce(x, op=r2ccl.accumulate_float32())
            assert (x == comm.nranks).all()
            found.append(comm.ncalls - before)
        return found


def same_bits(sizes: list[int]) -> tuple[bytes, bool]:
    """Return the bits of a sum that must be rounded, and whether they are those of node sums."""
    with hosts(sizes) as comm:
        divided()
        every = [
            np.random.default_rng(rank).standard_normal(4099).astype(np.float32)
            for rank in range(comm.nranks)
        ]
        found = comm.allreduce(every[comm.rank].copy())
        half = comm.nranks // 2
        nodes = [np.add.reduce(np.stack(part)) for part in (every[:half], every[half:])]
        return found.tobytes(), bool((found == nodes[0] + nodes[1]).all())


def different(sizes: list[int], other: int, what: str) -> str:
    """Make another call on one rank; return the error."""
    with hosts(sizes) as comm:
        divided()
        x, is_other = np.ones(1000), comm.rank == other
        try:
            comm.barrier()  # which a slow rank may leave with the error of the next call
            if is_other and what == "barrier":
                comm.barrier()
            elif is_other and what == "scan":
                comm.scan(x)
            else:
                comm.allreduce(x[:999] if is_other else x)
        except r2ccl.InvalidArgument as exc:
            return str(exc)
    return "it ran"


def late(sizes: list[int]) -> tuple[str, str]:
    """Wait for the last rank, which does not call; return what `pending` and the error say."""
    seen: list[str] = []
    with hosts(sizes, timeout_s=2.0) as comm:
        divided()
        comm.barrier()
        if comm.rank == comm.nranks - 1:
            while comm._engine.error is None:
                time.sleep(0.01)
            comm.abort()
            return "", ""
        looker = threading.Timer(1.5, lambda: seen.append(str(comm.pending())))
        looker.start()
        try:
            comm.allreduce(np.ones(10))
        except r2ccl.R2cclError as exc:
            looker.join()
            comm.abort()
            return seen[0], f"{type(exc).__name__}: {exc}"
    raise AssertionError("no error")


def obstructed(sizes: list[int], rank: int) -> tuple[bool, float]:
    """Let one rank be unable to share memory; return whether memory is shared, and a sum."""
    if int(os.environ["RANK"]) == rank:
        from r2ccl.shm.segment import Segment

        def refuse(nranks: int) -> Segment:
            raise TransportError("no memory is left, in a test")

        Segment.create_of_group = refuse  # type: ignore[method-assign]
    with hosts(sizes) as comm:
        total = comm.allreduce(np.ones(3))
        return comm._collectives.shares_memory, float(total.sum())


def split(sizes: list[int]) -> tuple[list[bool], float]:
    """Split off hosts, one rank per host, and two ranks of each; return which share memory."""
    with hosts(sizes) as comm:
        nlocal = sizes[0]
        node, index = divmod(comm.rank, nlocal)
        parts = [comm.split(node), comm.split(index), comm.split(0 if index < 2 else None)]
        sums = [float(each.allreduce(np.ones(3))[0]) for each in parts if each is not None]
        shared = [each._collectives.shares_memory for each in parts if each is not None]
        for each in parts:
            if each is not None:
                each.close()
        return shared, sum(sums)


def watched() -> Callable[[], int]:
    """Slow down all steps within a node; return a function that counts those that run."""
    run, running = LocalGroup.run, [0]

    def watch(*given: Any) -> bool:
        running[0] += 1
        try:
            time.sleep(0.01)
            return run(*given)
        finally:
            time.sleep(0.05)
            running[0] -= 1

    LocalGroup.run = watch  # type: ignore[method-assign]
    return lambda: running[0]


def ended(sizes: list[int], how: str) -> tuple[str, str, bool, list[str]]:
    """Let rank 1 end amid a call of many chunks; return how this rank's call ends.

    That is the class of its error and its text, whether no step ran and its memory was unchanged
    from then on, and the threads that are left.
    """
    with hosts(sizes) as comm:
        divided(200)
        count_running = watched()
        x = np.ones(MANY, np.float32)
        comm.barrier()
        if comm.rank == 1:
            end = {
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "revoke": comm.revoke,
                "interrupt": lambda: signal.raise_signal(signal.SIGINT),
            }[how]
            threading.Timer(0.5, end).start()
        try:
            for _ in range(1000):
                comm.allreduce(x, op=r2ccl.MAX)
        except (r2ccl.R2cclError, KeyboardInterrupt) as exc:
            is_over = count_running() == 0
            after = x.copy()
            error = exc
        x += 1
        after += 1
        time.sleep(0.5)
        is_same = is_over and bool((x == after).all())
        comm.abort()
    left = [each.name for each in threading.enumerate() if each.name.startswith("r2ccl")]
    return type(error).__name__, str(error), is_same, left


def killed(sizes: list[int], victim: int) -> tuple[str, float, float]:
    """Kill a rank amid a call; return the others' error, its delay, and what they sum then."""
    with hosts(sizes) as comm:
        divided(200)
        x = np.ones(MANY, np.float32)
        comm.allreduce(x[:1000])
        comm.barrier()
        if comm.rank == victim:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        error: r2ccl.R2cclError | None = None
        while error is None:
            begun_s = time.monotonic()
            try:
                comm.allreduce(x, op=r2ccl.MAX)
            except r2ccl.R2cclError as exc:
                error = exc
        took_s = time.monotonic() - begun_s
        with comm.shrink() as fewer:
            total = fewer.allreduce(np.ones(3))
            name = f"{type(error).__name__} of rank {getattr(error, 'peer', None)}"
            return name, took_s, float(total[0])


def stopped(sizes: list[int]) -> float:
    """Stop the last rank for a second amid calls; return the sum of the last result."""
    with hosts(sizes) as comm:
        divided()
        comm.barrier()
        if comm.rank == comm.nranks - 1:
            stop_for_a_second()
        # So little data that ranks of the other host send it before the stopped rank's host asks.
        x, goes_on = np.ones(1 << 10, np.float32), np.ones(1)
        until_s = time.monotonic() + 1.5
        while goes_on[0]:
            comm.allreduce(x, op=r2ccl.ReduceOp.MAX)
            goes_on[0] = time.monotonic() < until_s
            comm.allreduce(goes_on, op=r2ccl.ReduceOp.MIN)
        return float(x.sum())


def freed(sizes: list[int]) -> tuple[int, int]:
    """Return how many segments are mapped while a communicator is open, and afterwards."""

    def count() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:r2ccl")

    with hosts(sizes) as comm:
        divided()
        comm.allreduce(np.ones(1000))
        during = count()
    return during, count()
