"""Programs that run collectives of equal parts, and compare them with NumPy."""

from __future__ import annotations

import itertools
import mmap
import tempfile
from collections.abc import Callable

import numpy as np
from support.raising import raises
from support.values import data_of, expected, ops_of, same, some_ops

import r2ccl
from r2ccl.algos import leaf_ring, ring, tree


def in_one_job(*programs: Callable[[r2ccl.Communicator], list[str]]) -> list[str]:
    """Run `programs` one after another; return the wrong cases."""
    with r2ccl.init() as comm:
        return [case for program in programs for case in program(comm)]


def allreduces(
    comm: r2ccl.Communicator,
    counts: tuple[int, ...],
    names: tuple[str, ...],
    ops: Callable[[str], list[r2ccl.ReduceOp]] = ops_of,
) -> list[str]:
    """Run `allreduce` in place and out of place; return the wrong cases."""
    wrong = []
    for name in names:
        for op in ops(name):
            for count in counts:
                want = expected(comm.nranks, count, name, op)
                x = data_of(comm.rank, count, name)
                out = np.empty_like(x)
                comm.allreduce(x, out, op)
                is_untouched = np.array_equal(x, data_of(comm.rank, count, name))
                comm.allreduce(x, op=op)
                if not (is_untouched and same(out, want) and same(x, want)):
                    wrong.append(f"allreduce {name} {op.name} {count}")
    return wrong


def parted(comm: r2ccl.Communicator, counts: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    """Run `allgather` and `reduce_scatter` in place and out of place; return the wrong cases.

    `counts` are elements of one rank's part.
    """
    wrong = []
    n, rank = comm.nranks, comm.rank
    for name, count in itertools.product(names, counts):
        every = np.concatenate([data_of(peer, count, name) for peer in range(n)])
        x = data_of(rank, count, name)
        out = np.zeros_like(every)
        mine = out[rank * count : (rank + 1) * count]
        mine[:] = x
        made = comm.allgather(x.reshape(1, count))
        comm.allgather(mine, out)
        if made.shape != (n, 1, count) or not (same(made, every) and same(out, every)):
            wrong.append(f"allgather {name} {count}")
        for op in ops_of(name)[:3]:
            want = expected(n, count * n, name, op)[rank * count : (rank + 1) * count]
            whole = data_of(rank, count * n, name)
            made = comm.reduce_scatter(whole, op=op)
            is_untouched = same(whole, data_of(rank, count * n, name))
            mine = whole[rank * count : (rank + 1) * count]
            comm.reduce_scatter(whole, mine, op)
            if not (is_untouched and same(made, want) and same(mine, want)):
                wrong.append(f"reduce_scatter {name} {op.name} {count}")
    return wrong


def rooted(comm: r2ccl.Communicator, counts: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    """Run `broadcast` and `reduce` with every root, in and out of place; return the wrong cases."""
    wrong = []
    for name, count, root in itertools.product(names, counts, range(comm.nranks)):
        mine, roots = data_of(comm.rank, count, name), data_of(root, count, name)
        x, out = mine.copy(), np.zeros_like(mine)
        is_right = comm.broadcast(x, out, root=root) is out and same(x, mine)
        comm.broadcast(x, root=root)
        if not (is_right and same(out, roots) and same(x, roots)):
            wrong.append(f"broadcast {name} {count} from {root}")
        for op in ops_of(name)[::-2]:
            want = expected(comm.nranks, count, name, op)
            x = mine.copy()
            results = [comm.reduce(x, out, op, root), comm.reduce(x, op=op, root=root)]
            if comm.rank == root:
                is_right = results[0] is out and same(out, want) and same(x, want)
            else:
                is_right = results == [None, None] and same(x, mine)
            if not is_right:
                wrong.append(f"reduce {name} {op.name} {count} to {root}")
    return wrong


def read_only_roots(comm: r2ccl.Communicator, counts: tuple[int, ...]) -> list[str]:
    """Broadcast from memory that the kernel protects; return the wrong cases.

    Each case is called several times, because a repeated call may run in another way.
    """
    wrong = []
    for count, root, is_async in itertools.product(counts, range(comm.nranks), (False, True)):
        with tempfile.TemporaryFile() as file:
            np.full(count, root + 0.5).tofile(file)
            file.flush()
            x = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for _ in range(4):
            given = x if comm.rank == root else np.zeros(count)
            found = comm.broadcast(given, root=root, async_op=is_async)
            result = found.wait() if is_async else found
            if result is not given or not (result == root + 0.5).all():
                wrong.append(f"broadcast {count} from {root}")
    other = (comm.rank + 1) % comm.nranks
    with raises(r2ccl.InvalidArgument):
        comm.broadcast(x, root=other)
    return wrong


def prefixes(
    comm: r2ccl.Communicator, counts: tuple[int, ...], names: tuple[str, ...]
) -> list[str]:
    """Run `scan` and `exscan` in place and out of place; return the wrong cases."""
    wrong = []
    cases = ((name, op) for name in names for op in some_ops(name))
    for (name, op), count in itertools.product(cases, counts):
        mine = data_of(comm.rank, count, name)
        for method, nbelow in ((comm.scan, comm.rank + 1), (comm.exscan, comm.rank)):
            want = expected(nbelow, count, name, op) if nbelow else mine
            x, out = mine.copy(), mine.copy()
            is_right = method(x, out, op) is out and same(x, mine)
            work = method(x, op=op, async_op=True)
            if not (is_right and work.wait() is x and same(out, want) and same(x, want)):
                wrong.append(f"{method.__name__} {name} {op.name} {count}")
    return wrong


def own_schedules(count: int) -> list[str]:
    """Run schedules that the user provides; return the wrong cases."""
    wrong = []
    with r2ccl.init() as comm:
        mine = (
            leaf_ring.allreduce([3] + [4] * (comm.nranks - 1), 4, 2),
            tree.allreduce([tree.chain(range(comm.nranks))], "chain"),
        )
        for schedule in mine:
            for op in (r2ccl.SUM, r2ccl.AVG, r2ccl.MAX):
                x = data_of(comm.rank, count, "float64")
                out = comm.run_schedule(schedule, x, np.empty_like(x), op)
                if not same(out, expected(comm.nranks, count, "float64", op)):
                    wrong.append(f"{schedule.name} {op!r}")
        for bad in (ring.allreduce(comm.nranks + 1), ring.allgather(comm.nranks)):
            with raises(r2ccl.InvalidArgument, match="schedule for allreduce over 3 ranks"):
                comm.run_schedule(bad, x)
        assert "* ring" in str(comm.explain(1 << 26))
    return wrong


def right_to_the_last_byte(collective: str, nbytes: int) -> bool:
    """Return whether an allreduce, or a broadcast of rank 0, is right to the last byte."""
    with r2ccl.init() as comm:
        x = np.full(nbytes, comm.rank + 1, np.uint8)
        x[-1] = 10 + comm.rank
        if collective == "broadcast":
            comm.broadcast(x)
            return bool(x[-1] == 10 and (x[:-1] == 1).all())
        comm.allreduce(x)
        total = sum(range(1, comm.nranks + 1))
        last = sum(10 + rank for rank in range(comm.nranks))
        return bool(x[-1] == last and (x[:-1] == total).all())


def reduced_bits(counts: tuple[int, ...], seed: int) -> list[bytes]:
    """Return sums of data whose result depends on the order of additions."""
    with r2ccl.init() as comm:
        rng = np.random.default_rng((seed, comm.rank))
        xs = [rng.standard_normal(count).astype(np.float32) for count in counts]
        return [comm.allreduce(x).tobytes() for x in xs]


def strided(comm: r2ccl.Communicator, count: int) -> list[str]:
    """Pass inputs that are not contiguous to collectives and messages; return the wrong cases."""
    n, rank = comm.nranks, comm.rank
    whole = [np.arange(4.0 * count).reshape(2 * count, 2) + each for each in range(n)]
    column = [each[::2, 1] for each in whole]
    out = np.empty(count)
    is_right = {}
    is_right["allreduce"] = np.array_equal(comm.allreduce(column[rank], out), sum(column))
    is_right["allgather"] = np.array_equal(comm.allgather(column[rank].T), np.stack(column))
    to, source = (rank + 1) % n, (rank - 1) % n
    comm.sendrecv(column[rank], to, out, source)
    is_right["sendrecv"] = np.array_equal(out, column[source])
    work = comm.allreduce(column[rank], out, async_op=True)
    is_right["async allreduce"] = np.array_equal(work.wait(), sum(column))
    return [f"{call} {count}" for call in is_right if not is_right[call]]


def registered() -> bool:
    """Reduce registered memory, during and after its registration."""
    with r2ccl.init() as comm:
        x = np.full(100_000, comm.rank + 1, np.float32)
        with comm.register(x) as registration:
            comm.allreduce(x)
        registration.close()
        comm.allreduce(x)
        with raises(r2ccl.InvalidArgument):
            comm.register(x[::2])
        return bool(np.all(x == comm.nranks * sum(range(1, comm.nranks + 1))))
