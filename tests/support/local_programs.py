"""Programs of ranks that share memory, for `local_ranks`."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from support.local_ranks import Host

from r2ccl import kernels
from r2ccl.dtypes import CODES, DTYPES, dtype_name
from r2ccl.shm import group as group_module
from r2ccl.shm.group import LocalGroup
from r2ccl.shm.layout import SLOT_NBYTES
from r2ccl.types import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]
_F32 = CODES[np.dtype(np.float32)]
_U8 = CODES[np.dtype(np.uint8)]
#: Elements: none, one, odd numbers, around the limits of one step and of one slot, several slots.
SIZES = (0, 1, 3, 17, 1000, 4099, SLOT_NBYTES // 4, SLOT_NBYTES // 4 + 1, 700_001)


def values(rank: int, size: int, code: int) -> Array:
    """Return the input of a rank; every rank can compute that of any other."""
    dtype = DTYPES[code]
    rng = np.random.default_rng([rank, size, code])
    if dtype.kind in "iub":
        return rng.integers(0, 2 if dtype.kind == "b" else 100, size).astype(dtype)
    numbers = rng.normal(size=size)
    return (numbers + 1j * rng.normal(size=size)).astype(dtype) if dtype.kind == "c" else (
        numbers.astype(dtype)
    )  # fmt: skip


def reduced(inputs: list[Array], code: int, op: ReduceOp) -> Array:
    """Reduce in rank order with the kernels of slices."""
    total = inputs[0].copy()

    def reduce() -> None:
        for each in inputs[1:]:
            kernels.reducer(code, op)(total, each, total)
        if op is ReduceOp.AVG:
            kernels.divider(code, len(inputs))(total)

    kernels.quiet_context().run(reduce)
    return total


def differs(found: Array, wanted: Array, op: ReduceOp = ReduceOp.SUM) -> bool:
    if found.dtype.kind == "c" and op is ReduceOp.PROD:  # NumPy fuses a multiplication and addition
        return not np.allclose(found, wanted, rtol=1e-4)
    return found.tobytes() != wanted.tobytes()


def check_reductions(host: Host) -> list[str]:
    """Return the cases of all dtypes and ops in which a result is wrong."""
    group, n, me = host.connect(), host.nranks, host.index
    wrong = []
    for code, ops in kernels.OPS.items():
        for op in sorted(ops):
            if not group.has_kernel(code, op):
                continue
            for size in (7, 20_011):
                inputs = [values(rank, size * n, code) for rank in range(n)]
                whole = reduced(inputs, code, op)
                x, out = inputs[me].copy(), np.zeros(size * n, DTYPES[code])
                group.allreduce(x, out, code, op)
                group.allreduce(x, x, code, op)
                if differs(out, whole, op) or x.tobytes() != out.tobytes():
                    wrong.append(f"allreduce {dtype_name(code)} {op.name} {size}")
    group.close()
    return wrong


def check_matrix(host: Host, cache_nbytes: int | None = None) -> list[str]:
    """Return the cases of all collectives and sizes in which a result is wrong.

    Outputs that exceed a share of `cache_nbytes` are written past the caches.
    """
    if cache_nbytes is not None:
        group_module._cache_nbytes = lambda: cache_nbytes
    group = host.connect()
    wrong = [
        f"{name} of {size} elements of {dtype_name(code)}"
        for code in (_F32, CODES[np.dtype(np.float16)], _U8)
        for size in SIZES
        for name, found, wanted in _cases(group, host.index, host.nranks, size, code)
        if differs(found, wanted)
    ]
    group.close()
    return wrong


def _cases(
    group: LocalGroup, me: int, n: int, size: int, code: int
) -> Iterator[tuple[str, Array, Array]]:
    """Run every collective; yield what it gave and what it should give."""
    dtype, op, root = DTYPES[code], ReduceOp.SUM, n - 1
    nothing = np.empty(0, dtype)
    wholes = [values(rank, size * n, code) for rank in range(n)]
    parts = [each[:size].copy() for each in wholes]
    own = slice(me * size, (me + 1) * size)

    def new(count: int) -> Array:
        return np.zeros(count, dtype)

    out = new(size)
    group.allreduce(parts[me], out, code, op)
    yield "allreduce", out, reduced(parts, code, op)
    out = parts[me].copy()
    group.allreduce(out, out, code, op)
    yield "allreduce in place", out, reduced(parts, code, op)

    total = reduced(wholes, code, op)
    out = new(size)
    group.reduce_scatter(wholes[me], out, code, op)
    yield "reduce_scatter", out, total[own]
    out = wholes[me].copy()
    group.reduce_scatter(out, out[own], code, op)
    yield "reduce_scatter in place", out[own], total[own]

    for place in {0, root}:
        out = new(size)
        group.reduce(parts[me], out, code, op, place)
        yield f"reduce to {place}", out, reduced(parts, code, op) if me == place else new(size)
        out = parts[me].copy()
        group.reduce(out, out, code, op, place)
        yield (
            f"reduce in place to {place}",
            out,
            (reduced(parts, code, op) if me == place else parts[me]),
        )
        out = new(size)
        group.broadcast(parts[me], out, code, place)
        yield f"broadcast from {place}", out, parts[place]
        out = parts[me].copy()
        group.broadcast(out, out, code, place)
        yield f"broadcast in place from {place}", out, parts[place]
        out = new(size * n) if me == place else nothing
        group.gather(parts[me], out, code, place)
        yield f"gather to {place}", out, np.concatenate(parts) if me == place else nothing
        out = new(size)
        group.scatter(wholes[place] if me == place else nothing, out, code, place)
        yield f"scatter from {place}", out, wholes[place][own]

    out = new(size * n)
    group.allgather(parts[me], out, code)
    yield "allgather", out, np.concatenate(parts)
    out = new(size * n)
    out[own] = parts[me]
    group.allgather(out[own], out, code)
    yield "allgather in place", out, np.concatenate(parts)

    exchanged = np.concatenate([each[own] for each in wholes])
    out = new(size * n)
    group.alltoall(wholes[me], out, code)
    yield "alltoall", out, exchanged
    out = wholes[me].copy()
    group.alltoall(out, out, code)
    yield "alltoall in place", out, exchanged
    yield from _uneven_cases(group, me, n, size, code, wholes)
    group.barrier()


def _uneven_cases(
    group: LocalGroup, me: int, n: int, size: int, code: int, wholes: list[Array]
) -> Iterator[tuple[str, Array, Array]]:
    """Run the collectives whose parts differ in size; they are placed in reverse order."""
    dtype, root = DTYPES[code], n - 1
    counts = [size * rank // n for rank in range(n)]
    starts = [sum(counts[rank + 1 :]) for rank in range(n)]
    places = list(zip(starts, counts, strict=True))
    joined = np.concatenate([wholes[rank][: counts[rank]] for rank in reversed(range(n))])
    nothing = np.empty(0, dtype)

    out = np.zeros(sum(counts), dtype)
    group.allgatherv(wholes[me][: counts[me]], out, code, places)
    yield "allgatherv", out, joined
    out = np.zeros(sum(counts) if me == root else 0, dtype)
    group.gatherv(wholes[me][: counts[me]], out, code, places if me == root else None, root)
    yield "gatherv", out, joined if me == root else nothing
    out = np.zeros(counts[me], dtype)
    source = wholes[root] if me == root else nothing
    group.scatterv(source, out, code, places if me == root else None, root)
    yield "scatterv", out, wholes[root][starts[me] : starts[me] + counts[me]]

    # Rank s sends counts[(s + d) % n] elements to rank d, one part after the other.
    def sent_by(rank: int) -> list[tuple[int, int]]:
        sizes = [counts[(rank + to) % n] for to in range(n)]
        return [(sum(sizes[:to]), sizes[to]) for to in range(n)]

    sent = sent_by(me)
    wanted = []
    for rank in range(n):
        start, count = sent_by(rank)[me]
        wanted.append(wholes[rank][start : start + count])
    out = np.zeros(sum(each.size for each in wanted), dtype)
    group.alltoallv(wholes[me], out, code, sent, sent)  # the sizes are symmetric
    yield "alltoallv", out, np.concatenate(wanted)


def mix_calls(host: Host, ncalls: int) -> list[str]:
    """Make calls in a random order, equal on all ranks, with sizes up to several slots."""
    group, n, me = host.connect(), host.nranks, host.index
    rng = np.random.default_rng(1)
    wrong = []
    for number in range(ncalls):
        kind, root = int(rng.integers(6)), int(rng.integers(n))
        size = int(10 ** rng.uniform(0, 5.6))
        inputs = [np.full(size, number + rank, np.float32) for rank in range(n)]
        total = np.full(size, sum(number + rank for rank in range(n)), np.float32)
        out = np.zeros(size * n, np.float32)
        if kind == 0:
            group.allreduce(inputs[me], out[:size], _F32, ReduceOp.SUM)
            wanted = total
        elif kind == 1:
            group.broadcast(inputs[me], out[:size], _F32, root)
            wanted = inputs[root]
        elif kind == 2:
            group.allgather(inputs[me], out, _F32)
            wanted = np.concatenate(inputs)
        elif kind == 3:
            group.gather(inputs[me], out, _F32, root)
            wanted = np.concatenate(inputs) if me == root else out
        elif kind == 4:
            group.reduce(inputs[me], out[:size], _F32, ReduceOp.SUM, root)
            wanted = total if me == root else out[:size]
        else:
            group.barrier()
            wanted = out
        if out[: wanted.size].tobytes() != wanted.tobytes():
            wrong.append(f"call {number}: kind {kind}, {size} elements, root {root}")
    group.close()
    return wrong


def count_memory(host: Host, ncalls: int) -> int:
    """Return by how many bytes the largest memory of the process grew over many calls."""
    group = host.connect()
    x = np.ones(64, np.float32)

    def call(times: int) -> int:
        for _ in range(times):
            group.allreduce(x, np.empty_like(x), _F32, ReduceOp.SUM)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before = call(1000)
    grown = call(ncalls) - before
    group.close()
    return grown


def stop(host: Host, seconds: float) -> float:
    """The last rank is stopped for a while in mid-collective; return the result's first element."""
    group = host.connect()
    group.barrier()
    if host.index == host.nranks - 1:
        pid = os.getpid()
        if not os.fork():
            time.sleep(0.05)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
    x = np.ones(1 << 20, np.float32)
    until_s = time.monotonic() + seconds + 0.5
    again = np.ones(1, np.float32)
    while again[0]:
        group.allreduce(x, x, _F32, ReduceOp.MAX)
        again[0] = time.monotonic() < until_s
        group.allreduce(again, again, _F32, ReduceOp.MIN)
    group.close()
    return float(x.sum())


def differ(host: Host, what: str) -> None:
    """Ranks make different calls."""
    group = host.connect()
    x = np.ones(8, np.float32)
    if what == "collective" and host.index:
        group.barrier()
    elif what == "parts":
        sent = [(0, 2 if host.index else 1)] * host.nranks
        group.alltoallv(x, np.zeros(8, np.float32), _F32, sent, [(0, 1)] * host.nranks)
    else:
        size = 4 if what == "count" and host.index else 8
        op = ReduceOp.MAX if what == "op" and host.index else ReduceOp.SUM
        group.allreduce(x[:size], np.zeros(size, np.float32), _F32, op)


def finish_and_leave(host: Host) -> str:
    """Ranks that end after the last call do not disturb the others."""
    group = host.connect()
    for _ in range(100):
        group.barrier()
    if host.index:
        group.close()
        return "closed"
    time.sleep(0.3)
    group.close()
    return "closed"


def wrong_secret(host: Host) -> None:
    """The last rank has another secret."""
    from r2ccl.bootstrap.auth import Secret

    host.connect(secret=Secret(bytes([host.index == host.nranks - 1]) * 32))


def leave_nothing(host: Host) -> list[list[str]]:
    """Return the names in /dev/shm and the open descriptors, before, during and after a group."""
    found: list[list[str]] = []

    def note() -> None:
        found.append(sorted(os.listdir("/dev/shm")))
        found.append(sorted(os.listdir("/proc/self/fd")))

    note()
    group = host.connect()
    group.barrier()
    note()
    group.close()
    note()
    return found
