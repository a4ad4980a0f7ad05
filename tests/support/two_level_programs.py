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
from support import collective_programs, values
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
def hosts(
    sizes: list[int], is_in_turn: bool = False, **settings: Any
) -> Iterator[r2ccl.Communicator]:
    """Join a job whose hosts have these numbers of ranks, numbered host by host or in turn."""
    rank = int(os.environ["RANK"])
    own = rank % len(sizes) if is_in_turn else np.repeat(np.arange(len(sizes)), sizes)[rank]
    startup.host_id = lambda: f"host{own}/boot/namespace"
    with r2ccl.init(**settings) as comm:
        yield comm


def divided(nchunks: int = NCHUNKS) -> None:
    """Divide all calls, also those of little data, into `nchunks` chunks."""
    two_level.count_chunks = lambda nbytes, npieces=1: nchunks
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
        return wrong, comm._participant.on_host.two_level is not None


def read_only_roots(sizes: list[int]) -> list[str]:
    """Broadcast from read-only memory; return the wrong cases."""
    with hosts(sizes) as comm:
        divided()
        return collective_programs.read_only_roots(comm, COUNTS)


def others_exact(
    sizes: list[int], nchunks: int, names: tuple[str, ...], is_in_turn: bool = False
) -> list[str]:
    """Return the wrong results of the collectives other than allreduce."""
    wrong = []
    with hosts(sizes, is_in_turn) as comm:
        divided(nchunks)
        for name in names:
            for count in COUNTS if len(names) == 1 else COUNTS[:2]:
                for root in (0, comm.nranks - 1):
                    wrong += _broadcast(comm, name, count, root)
                wrong += _gathers(comm, name, [count] * comm.nranks)
                wrong += _gathers(comm, name, [(count * rank) % 7 for rank in range(comm.nranks)])
                for op in values.some_ops(name):
                    wrong += _reduce(comm, name, count, op, comm.nranks - 2)
                    wrong += _scatters(comm, name, [count] * comm.nranks, op)
                    uneven = [count * (rank % 3) for rank in range(comm.nranks)]
                    wrong += _scatters(comm, name, uneven, op)
        assert comm._participant.on_host.two_level is not None
    return wrong


def _broadcast(comm: r2ccl.Communicator, name: str, count: int, root: int) -> list[str]:
    x, wanted = values.data_of(comm.rank, count, name), values.data_of(root, count, name)
    kept = x.copy()
    apart, in_place = comm.broadcast(x, np.zeros_like(x), root=root), x.copy()
    comm.broadcast(in_place, root=root)
    is_right = values.same(apart, wanted) and values.same(in_place, wanted)
    return [] if is_right and values.same(x, kept) else [f"broadcast {name} {count} {root}"]


def _reduce(
    comm: r2ccl.Communicator, name: str, count: int, op: r2ccl.ReduceOp, root: int
) -> list[str]:
    x = values.data_of(comm.rank, count, name)
    kept, wanted = x.copy(), values.expected(comm.nranks, count, name, op)
    apart = comm.reduce(x, np.zeros_like(x) if comm.rank == root else None, op, root=root)
    is_right = values.same(x, kept)
    in_place = comm.reduce(x, op=op, root=root)
    if comm.rank == root:
        is_right &= values.same(apart, wanted) and values.same(in_place, wanted)
    else:
        is_right &= values.same(x, kept)
    return [] if is_right else [f"reduce {name} {op} {count}"]


def _gathers(comm: r2ccl.Communicator, name: str, counts: list[int]) -> list[str]:
    every = [values.data_of(rank, count, name) for rank, count in enumerate(counts)]
    wanted, x = np.concatenate(every), every[comm.rank]
    # Rank 1 leaves gaps between the parts of its output; no other rank knows.
    gap = 3 * (comm.rank == 1)
    places = [sum(counts[:rank]) + gap * rank for rank in range(comm.nranks)]
    out = np.zeros(sum(counts) + gap * comm.nranks, x.dtype)
    comm.allgatherv(x, out, counts=counts, displs=places)
    parts = [out[at:][:count] for at, count in zip(places, counts, strict=True)]
    is_right = values.same(np.concatenate(parts), wanted)
    in_place = np.zeros_like(wanted)
    own = in_place[sum(counts[: comm.rank]) :][: len(x)]
    own[:] = x
    comm.allgatherv(own, in_place, counts=counts)
    is_right &= values.same(in_place, wanted)
    return [] if is_right else [f"allgather {name} {counts}"]


def _scatters(
    comm: r2ccl.Communicator, name: str, counts: list[int], op: r2ccl.ReduceOp
) -> list[str]:
    x = values.data_of(comm.rank, sum(counts), name)
    kept, first = x.copy(), sum(counts[: comm.rank])
    mine = slice(first, first + counts[comm.rank])
    wanted = values.expected(comm.nranks, len(x), name, op)[mine]
    found = comm.reduce_scatterv(x, np.zeros_like(x[mine]), op, counts=counts)
    is_right = values.same(found, wanted) and values.same(x, kept)
    comm.reduce_scatterv(x, x[mine], op, counts=counts)
    is_right &= values.same(x[mine], wanted)
    return [] if is_right else [f"reduce_scatter {name} {op} {counts}"]


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


def others_counted(sizes: list[int]) -> dict[str, list[int]]:
    """Return, by collective, how many calls the data loop ran for one, by way of calling."""
    with hosts(sizes) as comm:
        divided()
        whole, part = np.ones(1000, np.float32), np.ones(1000 // comm.nranks, np.float32)
        calls = {
            "broadcast": lambda **more: comm.broadcast(whole, **more),
            "reduce": lambda **more: comm.reduce(whole, **more),
            "allgather": lambda **more: comm.allgather(part, **more),
            "reduce_scatter": lambda **more: comm.reduce_scatter(whole, **more),
        }
        found: dict[str, list[int]] = {}
        for name, call in calls.items():
            for way in ("blocking", "async", "group"):
                before = comm.ncalls
                if way == "group":
                    with comm.group():
                        call()
                elif way == "async":
                    call(async_op=True).wait()
                else:
                    call()
                found.setdefault(name, []).append(comm.ncalls - before)
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


def scattered_bits(sizes: list[int]) -> bool:
    """Return whether a reduce and a reduce-scatter add the sums of the nodes."""
    with hosts(sizes) as comm:
        divided()
        n = comm.nranks
        every = [
            np.random.default_rng(rank).standard_normal(4099 * n).astype(np.float32)
            for rank in range(n)
        ]
        nodes = [np.add.reduce(np.stack(part)) for part in (every[: n // 2], every[n // 2 :])]
        wanted = nodes[0] + nodes[1]
        part = comm.reduce_scatter(every[comm.rank])
        whole = comm.reduce(every[comm.rank].copy(), root=1)
        is_right = bool((part == np.split(wanted, n)[comm.rank]).all())
        return is_right and (comm.rank != 1 or bool((whole == wanted).all()))


def call_of(comm: r2ccl.Communicator, name: str, x: np.ndarray) -> None:
    """Run a collective whose buffer has the size of `x`."""
    if name == "allgather":
        part = len(x) // comm.nranks
        comm.allgather(x[comm.rank * part :][:part], x)
    elif name == "reduce_scatter":
        comm.reduce_scatter(x, op=r2ccl.MAX)
    elif name == "broadcast":
        comm.broadcast(x, root=comm.nranks - 1)
    else:
        getattr(comm, name)(x, op=r2ccl.MAX)


def different(sizes: list[int], other: int, what: str, name: str = "allreduce") -> str:
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
                call_of(comm, name, x[:996] if is_other else x)
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
        return comm._participant.on_host.shares_memory, float(total.sum())


def split(sizes: list[int]) -> tuple[list[bool], float]:
    """Split off hosts, one rank per host, and two ranks of each; return which share memory."""
    with hosts(sizes) as comm:
        nlocal = sizes[0]
        node, index = divmod(comm.rank, nlocal)
        parts = [comm.split(node), comm.split(index), comm.split(0 if index < 2 else None)]
        sums = [float(each.allreduce(np.ones(3))[0]) for each in parts if each is not None]
        shared = [each._participant.on_host.shares_memory for each in parts if each is not None]
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
            try:
                time.sleep(0.05)
            finally:  # Ctrl-C may end the sleep
                running[0] -= 1

    LocalGroup.run = watch  # type: ignore[method-assign]
    return lambda: running[0]


def ended(sizes: list[int], how: str, called: str) -> tuple[str, str, bool, list[str]]:
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
                call_of(comm, called, x)
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


def killed(sizes: list[int], victim: int, name: str = "allreduce") -> tuple[str, float, float]:
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
                call_of(comm, name, x)
            except r2ccl.R2cclError as exc:
                error = exc
        took_s = time.monotonic() - begun_s
        with comm.shrink() as fewer:
            total = fewer.allreduce(np.ones(3))
            text = f"{type(error).__name__} of rank {getattr(error, 'peer', None)}"
            return text, took_s, float(total[0])


def stopped(sizes: list[int]) -> float:
    """Stop the last rank for a second amid calls; return the sum of the last result."""
    with hosts(sizes) as comm:
        divided()
        comm.barrier()
        is_over = stop_for_a_second() if comm.rank == comm.nranks - 1 else lambda: True
        # So little data that ranks of the other host send it before the stopped rank's host asks.
        x, goes_on = np.ones(1 << 10, np.float32), np.ones(1)
        while goes_on[0]:
            comm.allreduce(x, op=r2ccl.ReduceOp.MAX)
            goes_on[0] = not is_over()
            comm.allreduce(goes_on, op=r2ccl.ReduceOp.MAX)
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
