"""Programs that ranks run in tests: importable functions that return values a test can compare."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import mmap
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from support.raising import raises

import r2ccl
from r2ccl import communicator, dtypes
from r2ccl.algos import leaf_ring, ring, tree
from r2ccl.kernels import OPS
from r2ccl.testing import fail_at

_CODES = {dtypes.dtype_name(code): code for code in dtypes.DTYPES}
DTYPES = tuple(_CODES)
FUNCTIONS = {
    r2ccl.PROD: np.multiply,
    r2ccl.MIN: np.minimum,
    r2ccl.MAX: np.maximum,
    r2ccl.LAND: np.logical_and,
    r2ccl.LOR: np.logical_or,
    r2ccl.LXOR: np.logical_xor,
    r2ccl.BAND: np.bitwise_and,
    r2ccl.BOR: np.bitwise_or,
    r2ccl.BXOR: np.bitwise_xor,
    # The data of a higher rank has higher indices, so the earlier of equal values has the lower.
    r2ccl.MINLOC: lambda a, b: np.where(b["value"] < a["value"], b, a),
    r2ccl.MAXLOC: lambda a, b: np.where(b["value"] > a["value"], b, a),
}


def dtype_of(name: str) -> np.dtype[Any]:
    return dtypes.DTYPES[_CODES[name]]


def ops_of(name: str) -> list[r2ccl.ReduceOp]:
    return sorted(OPS[_CODES[name]])


def some_ops(name: str) -> list[r2ccl.ReduceOp]:
    """Return a few operations of a dtype, at least one, that are exact over eight ranks."""
    ops = [r2ccl.SUM, r2ccl.MAX, r2ccl.LOR, r2ccl.MINLOC]
    if name.startswith("float8"):
        ops.remove(r2ccl.SUM)
    return [op for op in ops if op in ops_of(name)]


def data_of(rank: int, count: int, name: str) -> np.ndarray:
    """Return small integers, whose sums and products over a few ranks are exact in every dtype."""
    values = np.random.default_rng((rank, count)).integers(1, 3, count)
    dtype = dtype_of(name)
    if dtype.names is None:
        return (values - 1 if name == "bool" else values).astype(dtype)
    pairs = np.frombuffer(bytearray(count * dtype.itemsize), dtype)  # 0 between the fields
    pairs["value"], pairs["index"] = values, rank
    return pairs


def expected(nranks: int, count: int, name: str, op: r2ccl.ReduceOp) -> np.ndarray:
    return reduced([data_of(rank, count, name) for rank in range(nranks)], op)


def reduced(every: list[np.ndarray], op: r2ccl.ReduceOp) -> np.ndarray:
    """Reduce the inputs of all ranks with NumPy."""
    nranks = len(every)
    total = functools.reduce(FUNCTIONS.get(op, np.add), every).astype(every[0].dtype)
    if op != r2ccl.AVG:
        return total
    if total.dtype.kind in "iu":
        return (total // nranks).astype(total.dtype)
    # Divide a complex sum part by part: NumPy's complex division may round differently.
    parts = total.view(total.real.dtype)
    return (parts / nranks).astype(parts.dtype).view(total.dtype)


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


def exchanges(
    comm: r2ccl.Communicator, counts: tuple[int, ...], names: tuple[str, ...]
) -> list[str]:
    """Exchange equal parts and parts of all sizes, in place and with gaps; return the wrong cases.

    `counts` are elements of an equal part; the sizes of others reach from 0 to 1000 times as many.
    """
    wrong = []
    for name, count in itertools.product(names, counts):
        wrong += [f"{case} {name} {count}" for case in _equal_parts(comm, name, count)]
        sizes = [(count, 0, max(1, count // 1000))[rank % 3] for rank in range(comm.nranks)]
        wrong += [f"{case} {name} {sizes}" for case in _unequal_parts(comm, name, sizes)]
        wrong += [f"{case} {name} {count}" for case in _alltoallv(comm, name, count)]
    return wrong


def _equal_parts(comm: r2ccl.Communicator, name: str, count: int) -> Iterator[str]:
    """Yield the collectives of equal parts whose result is wrong."""
    n, rank = comm.nranks, comm.rank
    inputs = [data_of(peer, count * n, name).reshape(n, count) for peer in range(n)]
    mine = inputs[rank]
    every = np.stack([each[rank] for each in inputs])
    x = mine.copy()
    made = comm.alltoall(x)
    out = np.empty_like(x)
    comm.alltoall(x, out, async_op=True).wait()
    is_untouched = same(x, mine)
    comm.alltoall(x, x)
    if not (same(made, every) and same(out, every) and same(x, every) and is_untouched):
        yield "alltoall"
    for root in range(n):
        wanted = np.stack([each[0] for each in inputs])
        made = comm.gather(mine[0], root=root)
        out = np.zeros_like(wanted)
        out[rank] = mine[0]
        comm.gather(out[rank] if rank == root else mine[0], out, root)
        is_right = same(made, wanted) and same(out, wanted) if rank == root else made is None
        x, part = inputs[root].copy(), np.zeros_like(mine[0])
        comm.scatter(x if rank == root else None, part, root=root)
        if rank == root:
            comm.scatter(x, x[rank], root=root)
            is_right = is_right and same(x, mine)
            made = comm.scatter(x, root=root)
            is_right = is_right and same(made, mine[rank])
        else:
            comm.scatter(None, part, root=root)
            comm.scatter(None, part, root=root)
        if not (is_right and same(part, inputs[root][rank])):
            yield f"gather or scatter with root {root}"


def _unequal_parts(comm: r2ccl.Communicator, name: str, sizes: list[int]) -> Iterator[str]:
    """Yield the collectives of parts of `sizes` elements whose result is wrong."""
    n, rank = comm.nranks, comm.rank
    parts = [data_of(peer, sizes[peer], name) for peer in range(n)]
    whole = np.concatenate(parts)
    displs = [sum(sizes[peer + 1 :]) + 3 * (n - peer) for peer in range(n)]  # from the last rank on
    spaced = np.zeros(sum(sizes) + 3 * n + 1, dtype_of(name))
    for at, part in zip(displs, parts, strict=True):
        spaced[at : at + part.size] = part
    out = np.zeros_like(spaced)
    made = comm.allgatherv(parts[rank], counts=sizes)
    comm.allgatherv(parts[rank], out, counts=sizes, displs=displs)
    if not (same(made, whole) and same(out, spaced)):
        yield "allgatherv"
    x = data_of(rank, sum(sizes), name)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    op = some_ops(name)[0]
    wanted = expected(n, sum(sizes), name, op)[mine]
    made = comm.reduce_scatterv(x, counts=sizes, op=op)
    comm.reduce_scatterv(x, x[mine], counts=sizes, op=op)
    if not (same(made, wanted) and same(x[mine], wanted)):
        yield "reduce_scatterv"
    for root in range(n):
        counts = sizes if rank == root else None
        made = comm.gatherv(parts[rank], root=root, counts=counts)
        out = np.zeros_like(spaced)
        comm.gatherv(parts[rank], out, root, counts=counts, displs=displs)
        is_right = same(made, whole) and same(out, spaced) if rank == root else made is None
        part = np.zeros_like(parts[rank])
        comm.scatterv(spaced, part, root, counts=counts, displs=displs)
        if not (is_right and same(part, parts[rank])):
            yield f"gatherv or scatterv with root {root}"


def _alltoallv(comm: r2ccl.Communicator, name: str, count: int) -> Iterator[str]:
    """Yield ``alltoallv`` if its result is wrong with parts of 0 to `count` elements."""
    n, rank = comm.nranks, comm.rank

    def size(source: int, target: int) -> int:
        return (0, count, 1, max(1, count // 1000))[(source + 2 * target) % 4]

    sent = [size(rank, peer) for peer in range(n)]
    received = [size(peer, rank) for peer in range(n)]
    senddispls = [sum(sent[peer:]) - sent[peer] for peer in range(n)]  # in reverse rank order
    recvdispls = [sum(received[:peer]) + peer for peer in range(n)]
    x = np.zeros(sum(sent), dtype_of(name))
    out = np.zeros(sum(received) + n, dtype_of(name))
    wanted = out.copy()
    for peer in range(n):
        part = data_of(n * rank + peer, sent[peer], name)
        x[senddispls[peer] : senddispls[peer] + sent[peer]] = part
        part = data_of(n * peer + rank, received[peer], name)
        wanted[recvdispls[peer] : recvdispls[peer] + received[peer]] = part
    given = {"sendcounts": sent, "recvcounts": received, "senddispls": senddispls}
    made = comm.alltoallv(x, **given)
    comm.alltoallv(x, out, **given, recvdispls=recvdispls)
    packed = np.concatenate([data_of(n * peer + rank, received[peer], name) for peer in range(n)])
    if not (same(out, wanted) and same(made, packed)):
        yield "alltoallv"


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


def _failure(call: Callable[[r2ccl.Communicator], object]) -> str:
    """Return the error that `call`, or the barrier after it, raises."""
    found = "no error"
    with r2ccl.init() as comm:
        try:
            comm.barrier()  # else the error may reach a rank that is still in init()
            call(comm)
            comm.barrier()
        except r2ccl.R2cclError as exc:
            found = f"{type(exc).__name__}: {exc}"
    return found


def wrong_count(collective: str, nsent: int, nwanted: int) -> str:
    """Exchange a part that has `nsent` elements on its source, `nwanted` on its destination."""

    def call(comm: r2ccl.Communicator) -> None:
        if collective == "gatherv":
            x = np.ones(nsent if comm.rank == 1 else 2)
            comm.gatherv(x, counts=[2, nwanted, *[2] * (comm.nranks - 2)])
        elif collective == "scatterv":
            counts = [2, nsent, *[2] * (comm.nranks - 2)]
            out = np.ones(nwanted if comm.rank == 1 else 2)
            comm.scatterv(np.ones(sum(counts)), out, counts=counts)
        else:
            sent, received = [2] * comm.nranks, [2] * comm.nranks
            if comm.rank == 0:
                sent[1] = nsent
            if comm.rank == 1:
                received[0] = nwanted
            comm.alltoallv(np.ones(sum(sent)), sendcounts=sent, recvcounts=received)

    return _failure(call)


def different_counts() -> str:
    """Pass other counts on rank 1 than on the other ranks, with the same sum."""

    def call(comm: r2ccl.Communicator) -> None:
        counts = [1, 1, 4] if comm.rank == 1 else [1, 2, 3]
        comm.allgatherv(np.ones(counts[comm.rank]), counts=counts)

    return _failure(call)


def usable_after_wrong_parts() -> None:
    """Pass wrong counts, displacements, sizes and arrays; the communicator must still work."""
    x, whole = np.ones(4), np.ones(6)
    overlapping = {"recvcounts": [2, 2], "recvdispls": [0, 1]}
    with r2ccl.init() as comm:
        mine, other = comm.rank, 1 - comm.rank
        own = [3 if rank == mine else 1 for rank in range(2)]
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("counts=None; give 2 integers", lambda: comm.gatherv(x, root=mine)),
            ("counts=.4, -1.; give 2", lambda: comm.scatterv(x, root=mine, counts=[4, -1])),
            ("sendcounts=.4.; give 2", lambda: comm.alltoallv(x, sendcounts=[4], recvcounts=[1])),
            ("displs=.0, 0.5.; give 2", lambda: comm.allgatherv(x, counts=own, displs=[0, 0.5])),  # type: ignore[list-item]
            ("overlap in out", lambda: comm.alltoallv(x, sendcounts=[2, 2], **overlapping)),  # type: ignore[arg-type]
            ("0 to 5 of x, which has 4", lambda: comm.scatterv(x, root=mine, counts=[5, 0])),
            ("must be equal", lambda: comm.alltoallv(x, sendcounts=own, recvcounts=[1, 1])),
            ("add up to 9", lambda: comm.reduce_scatterv(x, counts=[4, 5])),
            ("x has 4 elements, out has 7", lambda: comm.gather(x, np.ones(7), root=mine)),
            ("cannot be divided", lambda: comm.alltoall(np.ones(3))),
            ("without out", lambda: comm.scatter(x, root=other)),
            ("overlap in part", lambda: comm.alltoall(whole[:4], whole[2:])),
            ("op=AVG", lambda: comm.scan(x, op=r2ccl.AVG)),
            ("stream", lambda: comm.scan(x, stream=1)),
        ]
        for words, call in refused:
            with raises(r2ccl.InvalidArgument, match=words):
                call()
        assert comm.scan(np.ones(3))[0] == comm.rank + 1


def converted(comm: r2ccl.Communicator, counts: tuple[int, ...]) -> list[str]:
    """Scale and widen inputs in every reduction; return the wrong cases."""
    wrong = []
    n, rank = comm.nranks, comm.rank
    for count, name in itertools.product(counts, ("int32", "float64", "bfloat16", "float16")):
        dtype, size = dtype_of(name), count * n
        scaled = [data_of(each, size, name) * (each - 1) for each in range(n)]
        want, mine = sum(scaled).astype(dtype), data_of(rank, size, name)
        ops = [r2ccl.premul_sum(rank - 1)]
        if dtype.itemsize == 2:
            ops.append(r2ccl.accumulate_float32(ops[0]))
        for op in ops:
            x, out = mine.copy(), np.empty_like(mine)
            comm.allreduce(x, out, op)
            part = comm.reduce_scatter(x, op=op)
            at_root = comm.reduce(x, out.copy(), op, n - 1)
            is_right = same(x, mine) and same(out, want)
            is_right &= same(part, want[rank * count : (rank + 1) * count])
            is_right &= at_root is None if rank < n - 1 else same(at_root, want)
            comm.allreduce(x, op=op, async_op=True).wait(30)
            if not (is_right and same(x, want)):
                wrong.append(f"{name} {count} {op}")
    return wrong


def rounded_once(count: int) -> bool:
    """Return whether a mean in float32 is better than one in bfloat16: it is rounded once."""
    with r2ccl.init() as comm:
        xs = [np.random.default_rng(each).standard_normal(count) for each in range(comm.nranks)]
        xs = [x.astype(dtype_of("bfloat16")) for x in xs]
        mine = xs[comm.rank]
        out = comm.allreduce(mine, np.empty_like(mine), r2ccl.accumulate_float32(r2ccl.AVG))
        stepwise = comm.allreduce(mine, np.empty_like(mine), r2ccl.AVG)
        exact = np.mean([x.astype(np.float64) for x in xs], axis=0).astype(mine.dtype)
        return same(out, exact) and not same(stepwise, exact)


def special_bits(count: int, *, is_user_op: bool, is_lossy: bool) -> tuple[bytes, int]:
    """Return a sum of scaled inputs or of an operation of the user, and the number of repairs.

    Rank 1 may lose a rail in the call.
    """
    op = r2ccl.user_op(lambda a, b: a * np.float32(0.5) + b, name="decay", is_commutative=False)
    fault = fail_at(rank=1, rail=0, op=0, step=2) if is_lossy else contextlib.nullcontext()
    with (
        fault as plan,
        r2ccl.init(faults=plan, slice_nbytes=1 << 14) as comm,
    ):
        x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
        comm.allreduce(x, op=op if is_user_op else r2ccl.premul_sum(1 / (3 + comm.rank)))
        return x.tobytes(), len(comm.repairs())


def operations_of_prefixes(comm: r2ccl.Communicator, count: int) -> list[str]:
    """Run scans and parts of unequal size with the user's and converted operations."""
    wrong = []
    n, rank = comm.nranks, comm.rank
    last = r2ccl.user_op(lambda a, b: b + 0 * a, name="last", is_commutative=False)
    x, out = np.full(count, float(rank)), np.full(count, -1.0)
    if not (comm.scan(x, out, last) == rank).all():
        wrong.append("scan")
    out[:] = -1
    if not (comm.exscan(x, out, last) == rank - 1).all():
        wrong.append("exscan")
    sizes = [count + 3 * each for each in range(n)]
    y = np.full(sum(sizes), float(rank))
    for op, whole in ((last, n - 1), (r2ccl.premul_sum(2.0), 2 * sum(range(n)))):
        part = comm.reduce_scatterv(y, counts=sizes, op=op)
        if part.size != sizes[rank] or not (part == whole).all():
            wrong.append(f"reduce_scatterv {op}")
    small = np.full(count, rank, np.float16)
    wide = r2ccl.accumulate_float32(r2ccl.SUM)
    for scan, nranks in ((comm.scan, rank + 1), (comm.exscan, rank)):
        found = scan(small, np.full_like(small, 9), wide)
        # The exscan of rank 0 leaves its output as it is.
        if not (found == (sum(range(nranks)) if nranks else 9)).all():
            wrong.append(f"{scan.__name__} in float32")
    return wrong


def user_operations(comm: r2ccl.Communicator, count: int) -> list[str]:
    """Run operations of the user in every reduction; return the wrong cases."""
    wrong = []
    # An affine map is a pair of numbers; maps are composed in rank order.
    compose = r2ccl.user_op(_compose, is_commutative=False)
    n, rank = comm.nranks, comm.rank
    maps = [_maps_of(each, count * n) for each in range(n)]
    for op, function in (
        (compose, _compose),
        (r2ccl.user_op(_largest), np.fmax),
        (r2ccl.user_op(np.fmax), np.fmax),
    ):
        want = functools.reduce(function, maps)
        x, out = maps[rank].copy(), np.empty_like(want)
        comm.allreduce(x, out, op)
        part = comm.reduce_scatter(x, op=op)
        results = [comm.reduce(x, out.copy(), op, root) for root in range(n)]
        is_right = same(x, maps[rank]) and same(out, want) and same(results[rank], want)
        is_right &= same(part, want[rank * count : (rank + 1) * count])
        comm.allreduce(x, op=op, async_op=True).wait(30)
        if not (is_right and same(x, want)):
            wrong.append(f"{op} {count}")
    return wrong


def _maps_of(rank: int, count: int) -> np.ndarray:
    rng = np.random.default_rng((rank, count))
    return rng.integers(1, 4, count) + 1j * rng.integers(0, 9, count)


def _compose(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Apply ``x -> a x + b`` of `left` after that of `right`; exact in small integers."""
    return left.real * right.real + 1j * (left.real * right.imag + left.imag)


def _largest(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    out[:] = np.where(left.real >= right.real, left, right)
    np.copyto(out, right, where=(left.real == right.real) & (right.imag > left.imag))


def other_operation() -> str:
    """Return the error of ranks that pass different operations of the user."""
    with r2ccl.init() as comm:
        op = r2ccl.user_op(_compose if comm.rank else np.add, name="mine")
        try:
            comm.allreduce(np.ones(9, np.complex128), op=op)
            comm.barrier()
        except r2ccl.R2cclError as exc:
            return f"{type(exc).__name__}: {exc}"
        return "no error"


def failing_operation() -> str:
    """Return the error of ranks whose operation fails on rank 1 in mid-call."""

    def add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if left.size and os.environ["RANK"] == "1":
            raise ZeroDivisionError("on purpose")
        return left + right

    with r2ccl.init() as comm:
        try:
            comm.allreduce(np.ones(100_000), op=r2ccl.user_op(add))
            comm.barrier()
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        return "no error"


def same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.names is not None:  # NumPy copies only the fields, not the bytes between them
        return bool((a.reshape(-1) == b.reshape(-1)).all())
    return a.tobytes() == b.tobytes()


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
            with raises(r2ccl.InvalidArgument, match="pass an allreduce over"):
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


def parts_beyond_4gib() -> bool:
    """Return whether parts that lie beyond 2 GiB and 4 GiB of large arrays are exchanged exactly.

    The arrays are mapped without a reservation, and only the pages of the parts are touched.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    x, out, whole = (np.frombuffer(mmap.mmap(-1, 6 << 30, flags), np.uint8) for _ in range(3))
    with r2ccl.init() as comm:
        n, rank, count = comm.nranks, comm.rank, 200_003
        displs = [((5 - 2 * peer) << 30) + 7 for peer in range(n)]  # 5 GiB, 3 GiB
        for peer, at in enumerate(displs):
            x[at : at + count] = 10 * rank + peer
        counts = [count] * n
        given = {"sendcounts": counts, "recvcounts": counts}
        comm.alltoallv(x, out, **given, senddispls=displs, recvdispls=displs)
        mine = x[displs[rank] : displs[rank] + count]
        comm.allgatherv(mine, whole, counts=counts, displs=displs)
        return all(
            bool((out[at : at + count] == 10 * peer + rank).all())
            and bool((whole[at : at + count] == 11 * peer).all())
            for peer, at in enumerate(displs)
        )


def reduced_bits(counts: tuple[int, ...], seed: int) -> list[bytes]:
    """Return sums of data whose result depends on the order of additions."""
    with r2ccl.init() as comm:
        rng = np.random.default_rng((seed, comm.rank))
        xs = [rng.standard_normal(count).astype(np.float32) for count in counts]
        return [comm.allreduce(x).tobytes() for x in xs]


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
        assert comm.allreduce(np.ones(3), op=int(r2ccl.SUM))[0] == 2  # type: ignore[arg-type]


def killed_report(victim: int, nbytes: int, path: str) -> None:
    """Kill one rank during an allreduce; each survivor writes its error to `path`."""
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
        with open(f"{path}.{comm.rank}", "w") as file:
            json.dump(report, file)
        comm.abort()


def killed_in_init(victim: int, path: str) -> None:
    """Kill one rank after the rendezvous; each survivor writes its error to `path`."""
    connect = communicator.Communicator.connect

    def die(comm: r2ccl.Communicator) -> None:
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        connect(comm)

    communicator.Communicator.connect = die  # type: ignore[method-assign]
    with raises(r2ccl.PeerLost) as caught:
        r2ccl.init()
    with open(f"{path}.{os.environ['RANK']}", "w") as file:
        json.dump([caught.value.peer, str(caught.value)], file)


def survivors(
    run: functools.partial[None], nranks: int, victim: int, timeout_s: float
) -> list[Any]:
    """Launch `run`, whose `victim` dies, and return the reports of the survivors."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(r2ccl.R2cclError):  # the launcher reports the victim's death
            r2ccl.launch(functools.partial(run, f"{folder}/report"), nranks, timeout_s=timeout_s)
        paths = [f"{folder}/report.{rank}" for rank in range(nranks) if rank != victim]
        reports = []
        for path in paths:
            with open(path) as file:
                reports.append(json.load(file))
        return reports


def interrupted(victim: int) -> str:
    """End a call that waits for an absent peer by Ctrl-C; return the error of this rank."""
    with r2ccl.init() as comm:
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
    """Break rail 0 at `step` of every other operation; return results and number of repairs."""
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
            results.append(comm.allreduce(x).tobytes())
        return results, len(comm.repairs())


def lose_a_rail_in(collective: str) -> tuple[bool, int]:
    """Lose rail 0 of rank 1 in the second of two calls; return if both are right, and repairs."""
    from r2ccl.testing import fail_at

    with fail_at(rank=1, rail=0, op=1, step=2) as plan, r2ccl.init(faults=plan) as comm:
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


def exchanges_among_some() -> list[str]:
    """Exchange parts of all sizes in communicators of the odd and of the even ranks."""
    with r2ccl.init() as job, job.split(job.rank % 2, -job.rank) as comm:
        wrong = list(_alltoallv(comm, "float32", 100_003))
        sizes = [5, 100_003, 0, 7][: comm.nranks]
        return wrong + list(_unequal_parts(comm, "int64", sizes))


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


def many_reductions(count: int, ops: int) -> list[bytes]:
    """Run the operations of `lose_rails` without faults."""
    with r2ccl.init() as comm:
        return [
            comm.allreduce(
                np.random.default_rng((op, comm.rank)).standard_normal(count).astype(np.float32)
            ).tobytes()
            for op in range(ops)
        ]


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
        deadline = time.monotonic() + 40
        while len(comm._job.event_queue._news) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)  # two Views, and two Goodbyes once the others have given up
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


def _slices_on(comm: r2ccl.Communicator, rail: int) -> int:
    paths = comm.health().rails[rail].paths
    return sum(path.nslices_sent + path.nslices_received for path in paths)


def exclude_beside_a_call(count: int) -> list[str]:
    """Exclude rail 0 of rank 1 while a call runs, reduce without it, include it; return errors."""
    wrong = []

    def check(is_right: object, what: str) -> None:
        if not is_right:
            wrong.append(f"rank {comm.rank}: {what}: {comm.health()}")

    comm = r2ccl.init(rails=2)
    right = sum(range(1, comm.nranks + 1))
    x = np.full(count, comm.rank + 1)
    work = comm.allreduce(x, async_op=True)
    if comm.rank == comm.nranks - 1:
        comm.exclude(1, 0)
    check(np.all(work.wait() == right), "wrong sum of the call")
    comm.barrier()
    check(comm.known_health().health.excluded == ((1, 0),), "not excluded")
    check(json.loads(comm.dump())["health"]["excluded"] == [[1, 0]], "not in the dump")
    check("excluded: rail 0 of rank 1" in str(comm.explain(1 << 20)), "not explained")
    paths = [path for path in comm.health().rails[0].paths if 1 in (comm.rank, path.peer)]
    check(all("EXCLUDED" in path.cause and path.state != "up" for path in paths), "still up")
    check((comm.health().rails[0].state == "excluded") == (comm.rank == 1), "wrong state")
    if comm.rank == 0:
        with raises(r2ccl.InvalidArgument, match="rank 1 would have no rail left"):
            comm.exclude(1, 1)
        with raises(r2ccl.InvalidArgument, match="no such NIC"):
            comm.exclude(1, "eth99")
    before = _slices_on(comm, 0)
    for _ in range(20):
        check(comm.allreduce(np.full(10_000, 1))[0] == comm.nranks, "wrong sum")
    check(comm.rank != 1 or _slices_on(comm, 0) == before, "a slice on the excluded rail")
    if comm.rank == 0:
        comm.include(1, 0)
    while not comm.allreduce(np.array(_is_whole(comm)), op=r2ccl.MIN):
        time.sleep(0.02)
    check(comm.known_health().health.excluded == (), "still excluded")
    # A rank that gets no CPU time for long may be found slow.
    failures = [str(verdict) for verdict in comm.verdicts() if verdict.is_down]
    check(not failures, f"an exclusion was diagnosed: {failures}")
    for _ in range(20):
        comm.allreduce(np.full(10_000, 1))
    comm.close()
    with raises(r2ccl.CommunicatorRevoked):
        comm.exclude(1, 0)
    return wrong


def _is_whole(comm: r2ccl.Communicator) -> int:
    is_agreed = not comm.known_health().health.degraded()
    return int(is_agreed and all(rail.state == "up" for rail in comm.health().rails))


def declared_failed(mode: str) -> list[tuple[str, int]]:
    """Declare rail 0 of this host failed on rank 1 only; return state and use of each rail."""
    declared = f"{socket.gethostname()}:0" if os.environ["RANK"] == "1" else ""
    with r2ccl.init(rails=2, mode=mode, failed_nics=declared) as comm:
        for _ in range(5):
            assert np.all(comm.allreduce(np.ones(100_000)) == comm.nranks)
        if mode == "failstop":
            with raises(r2ccl.InvalidArgument, match="R2CC_MODE=failstop"):
                comm.include(0, 0)
        return [(rail.state, _slices_on(comm, rail.rail)) for rail in comm.health().rails]


def declared_too_much() -> str:
    """Declare all rails of this host failed on rank 0 only; return the error."""
    declared = f"{socket.gethostname()}:lo" if os.environ["RANK"] == "0" else ""
    with raises(r2ccl.InvalidArgument) as caught:
        r2ccl.init(rails=2, failed_nics=declared)
    return str(caught.value)


def exclude_then_shrink() -> list[tuple[tuple[int, int], ...]]:
    """Exclude a rail of the last rank, shrink twice; return what is excluded after each."""
    comm = r2ccl.init(rails=2)
    last = comm.nranks - 1
    if comm.rank == 0:
        comm.exclude(last, 1)
    comm.barrier()
    found = []

    def shrink() -> r2ccl.Communicator:
        # A rank that has passed the barrier may have revoked the communicator.
        with contextlib.suppress(r2ccl.CommunicatorRevoked):
            comm.barrier()
        return comm.shrink()

    for _ in range(2):
        comm = shrink()
        comm.allreduce(np.ones(100_000))
        found.append(comm.known_health().health.excluded)
        assert (comm.health().rails[1].state == "excluded") == (comm.rank == last)
    comm.barrier()
    if comm.rank == 0:
        comm.include(last, 1)
    while not comm.allreduce(np.array(_is_whole(comm)), op=r2ccl.MIN):
        time.sleep(0.02)
    comm = shrink()
    comm.allreduce(np.ones(100_000))
    found.append(comm.known_health().health.excluded)
    comm.close()
    return found


def exclude_for_all_communicators() -> list[int]:
    """Exclude and include a NIC in a communicator of all ranks but 0; return the shares seen."""
    with r2ccl.init(rails=2) as comm:
        part = comm.split(None if comm.rank == 0 else 1)
        seen = []
        if part is not None:
            for order in (part.exclude, part.include):
                if part.rank == 0:
                    order(1, 1)  # rank 2 of the job
                part.barrier()
                wanted = ((1, 1),) if order == part.exclude else ()
                while not part.allreduce(
                    np.array(int(part.known_health().health.excluded == wanted)), op=r2ccl.MIN
                ):
                    time.sleep(0.02)
                while wanted == () and part.known_health().health.degraded():
                    time.sleep(0.02)
                seen.append(part.known_health().health.share(1, 1))
        comm.barrier()
        return seen
