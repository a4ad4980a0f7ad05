"""Programs of ranks that share memory, for `local_ranks`."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate, pairwise
from threading import Thread
from typing import Any

import numpy as np
from support.local_ranks import Host
from support.stopping import stop_at_random

from r2ccl import kernels
from r2ccl.dtypes import CODES, DTYPES, dtype_name
from r2ccl.shm import group as group_module
from r2ccl.shm.group import CallsDiffer, LocalGroup
from r2ccl.shm.layout import (
    LOOP_KERNEL,
    LOOP_LEAST_READ,
    LOOP_NCALLS,
    LOOP_TRANSFERS_NS,
    NSLOTS,
    SLOT_NBYTES,
)
from r2ccl.shm.local_call import LocalCall
from r2ccl.shm.transfer import CACHED, PAST_CACHES, READ
from r2ccl.types import PREFIXES, CallSignature, Collective, ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]
_F32 = CODES[np.dtype(np.float32)]
_U8 = CODES[np.dtype(np.uint8)]
_NOTHING = np.empty(0, np.uint8)
_SLOT = SLOT_NBYTES // 4
#: Elements: none, one, odd numbers, around the limits of one step and of one slot, more than all
#: slots, so that slots are used again within one call.
SIZES = (0, 1, 3, 17, 1000, 4099, _SLOT, _SLOT + 1, NSLOTS * _SLOT + 1001)


def values(rank: int, size: int, code: int) -> Array:
    """Return the input of a rank; every rank can compute that of any other."""
    dtype = DTYPES[code]
    rng = np.random.default_rng([rank, size, code])
    if dtype.kind in "iub":
        return rng.integers(0, 2 if dtype.kind == "b" else 100, size).astype(dtype)
    numbers = rng.random(size) - 0.5
    return (numbers + 1j * rng.random(size)).astype(dtype) if dtype.kind == "c" else (
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


def call(
    group: LocalGroup, which: Collective, x: Array, out: Array, code: int, count: int, *,
    op: ReduceOp = ReduceOp.SUM, root: int = 0, parts: Any = None,
) -> None:  # fmt: skip
    """Run a collective; `count` is that of the whole buffer."""
    group.run(group.prepare(CallSignature(which, code, op, count, root), parts), x, out)


def allreduce(group: LocalGroup, x: Array, out: Array, code: int, op: ReduceOp) -> None:
    call(group, Collective.ALLREDUCE, x, out, code, x.size, op=op)


def barrier(group: LocalGroup) -> None:
    call(group, Collective.BARRIER, _NOTHING, _NOTHING, _U8, 0)


def check_reductions(host: Host, dtypes: list[str]) -> list[str]:
    """Return the cases in which a result is wrong: all ops of `dtypes`, SUM of other dtypes."""
    group, n, me = host.connect(), host.nranks, host.index
    wrong = []
    for code, ops in kernels.OPS.items():
        for size in (7, 5003):
            inputs = [values(rank, size * n, code) for rank in range(n)]
            for op in sorted(ops):
                if op is not ReduceOp.SUM and dtype_name(code) not in dtypes:
                    continue
                if not group.has_kernel(code, op):  # compiles it
                    continue
                whole = reduced(inputs, code, op)
                x, out = inputs[me].copy(), np.zeros(size * n, DTYPES[code])
                allreduce(group, x, out, code, op)
                allreduce(group, x, x, code, op)
                if differs(out, whole, op) or x.tobytes() != out.tobytes():
                    wrong.append(f"allreduce {dtype_name(code)} {op.name} {size}")
                if op is ReduceOp.AVG:
                    continue
                x = inputs[me].copy()
                call(group, Collective.SCAN, x, out, code, x.size, op=op)
                call(group, Collective.SCAN, x, x, code, x.size, op=op)
                wanted = reduced(inputs[: me + 1], code, op)
                if differs(out, wanted, op) or x.tobytes() != out.tobytes():
                    wrong.append(f"scan {dtype_name(code)} {op.name} {size}")
    group.close()
    return wrong


def durations(host: Host, nbytes: int) -> list[bool]:
    """Return for each transfer through slots whether calls of `nbytes` have measured it."""
    group = host.connect()
    x = np.ones(nbytes // 4, np.float32)
    prepared = group.prepare(CallSignature(Collective.ALLREDUCE, _F32, ReduceOp.SUM, x.size))
    for _ in range(200):
        group.run(prepared, x, x)
        assert (x == host.nranks).all()
        x[:] = 1
    group.close()
    return [bool(prepared.words[LOOP_TRANSFERS_NS + each]) for each in (CACHED, PAST_CACHES)]


def check_matrix(
    host: Host, dtypes: list[str], cache_nbytes: int | None = None, transfer: int = CACHED
) -> list[str]:
    """Return the cases of all collectives and sizes in which a result is wrong.

    Outputs that exceed a share of `cache_nbytes` are written past the caches. Calls use `transfer`
    if they can.
    """
    if cache_nbytes is not None:
        group_module._cache_nbytes = lambda: cache_nbytes
    if transfer != CACHED:
        prefer(transfer)
    group = host.connect()
    wrong = [
        f"{name} of {size} elements of {dtype_name(code)}"
        for code in (CODES[np.dtype(each)] for each in dtypes)
        for size in SIZES
        for name, found, wanted in _cases(group, host.index, host.nranks, size, code)
        if differs(found, wanted)
    ]
    group.close()
    return wrong


def alltoall_partly_in_place(host: Host, is_symmetric: bool) -> list[bool]:
    """Run alltoalls in place on the last rank only; return whether the results are right.

    Parts have several pieces. Peers access the inputs of the other ranks directly.
    """
    prefer(READ)
    group, n, me = host.connect(), host.nranks, host.index
    size, found = 3 * SLOT_NBYTES // (n - 1) + 4096, []
    memory = np.empty(n * size, np.uint8)
    if is_symmetric:
        memory = group.symmetric.allocate(n * size, host.exchange, lambda fn: fn())
    x, out = memory[: n * size], np.empty(n * size, np.uint8)
    for number in range(3):
        x[:] = np.repeat(np.arange(n) + n * me + number, size)
        target = x if me == n - 1 else out
        call(group, Collective.ALLTOALL, x, target, _U8, n * size)
        wanted = np.repeat(np.arange(n) * n + me + number, size)
        found.append(bool((target == wanted).all()))
    del memory, x
    group.close()
    return found


def prefer(transfer: int) -> None:
    """Let calls that this process prepares use `transfer`, as if it had been the fastest so far."""
    make = LocalCall.make

    def made(maker: str, words: dict[int, int], *rest: Any) -> LocalCall:
        words = words | {LOOP_TRANSFERS_NS: 1 << 60, LOOP_TRANSFERS_NS + transfer: 1}
        words[LOOP_NCALLS] = 99
        if transfer == READ and not words.get(LOOP_KERNEL):
            words[LOOP_LEAST_READ] = 1
        return make(maker, words, *rest)

    LocalCall.make = made  # type: ignore[method-assign]


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

    def run(which: Collective, x: Array, out: Array, *, root: int = 0) -> None:
        is_parted = which not in (
            Collective.ALLREDUCE, Collective.REDUCE, Collective.BROADCAST, *PREFIXES
        )  # fmt: skip
        call(group, which, x, out, code, size * n if is_parted else size, op=op, root=root)

    for which in (Collective.ALLREDUCE, *sorted(PREFIXES)):
        out, again = new(size), parts[me].copy()
        run(which, parts[me], out)
        run(which, again, again)
        last = {Collective.ALLREDUCE: n, Collective.SCAN: me + 1, Collective.EXSCAN: me}[which]
        wanted = reduced(parts[:last], code, op) if last else new(size)
        yield which.name, out, wanted
        yield f"{which.name} in place", again, wanted if last else parts[me]

    total = reduced(wholes, code, op)
    out = new(size)
    run(Collective.REDUCE_SCATTER, wholes[me], out)
    yield "reduce_scatter", out, total[own]
    out = wholes[me].copy()
    run(Collective.REDUCE_SCATTER, out, out[own])
    yield "reduce_scatter in place", out[own], total[own]

    for place in {0, root}:
        whole = reduced(parts, code, op)
        out = new(size)
        run(Collective.REDUCE, parts[me], out, root=place)
        yield f"reduce to {place}", out, whole if me == place else new(size)
        out = parts[me].copy()
        run(Collective.REDUCE, out, out, root=place)
        yield f"reduce in place to {place}", out, whole if me == place else parts[me]
        out = new(size)
        run(Collective.BROADCAST, parts[me], out, root=place)
        yield f"broadcast from {place}", out, parts[place]
        out = parts[me].copy()
        run(Collective.BROADCAST, out, out, root=place)
        yield f"broadcast in place from {place}", out, parts[place]
        out = new(size * n) if me == place else nothing
        run(Collective.GATHER, parts[me], out, root=place)
        yield f"gather to {place}", out, np.concatenate(parts) if me == place else nothing
        out = new(size)
        run(Collective.SCATTER, wholes[place] if me == place else nothing, out, root=place)
        yield f"scatter from {place}", out, wholes[place][own]

    out = new(size * n)
    run(Collective.ALLGATHER, parts[me], out)
    yield "allgather", out, np.concatenate(parts)
    out = new(size * n)
    out[own] = parts[me]
    run(Collective.ALLGATHER, out[own], out)
    yield "allgather in place", out, np.concatenate(parts)

    exchanged = np.concatenate([each[own] for each in wholes])
    out = new(size * n)
    run(Collective.ALLTOALL, wholes[me], out)
    yield "alltoall", out, exchanged
    out = wholes[me].copy()
    run(Collective.ALLTOALL, out, out)
    yield "alltoall in place", out, exchanged
    yield from _uneven_cases(group, me, n, size, code, wholes)
    barrier(group)


def _uneven_cases(
    group: LocalGroup, me: int, n: int, size: int, code: int, wholes: list[Array]
) -> Iterator[tuple[str, Array, Array]]:
    """Run the collectives whose parts differ in size; they are placed in reverse order."""
    dtype, root = DTYPES[code], n - 1
    counts = [size * rank // n for rank in range(n)]
    starts = [sum(counts[rank + 1 :]) for rank in range(n)]
    places = tuple((at, at + count) for at, count in zip(starts, counts, strict=True))
    joined = np.concatenate([wholes[rank][: counts[rank]] for rank in reversed(range(n))])
    nothing, none = np.empty(0, dtype), ((0, 0),) * n

    def only(rank: int) -> tuple[tuple[int, int], ...]:
        return tuple((0, counts[me]) if each == rank else (0, 0) for each in range(n))

    def run(which: Collective, x: Array, out: Array, sent: Any, put: Any) -> None:
        is_whole = which in (Collective.ALLGATHER, Collective.REDUCE_SCATTER)
        count = sum(counts) if is_whole else 0
        call(group, which, x, out, code, count, root=0 if is_whole else root, parts=(sent, put))

    out = np.zeros(sum(counts), dtype)
    run(Collective.ALLGATHER, wholes[me][: counts[me]], out, only(me), places)
    yield "allgatherv", out, joined
    out = np.zeros(sum(counts) if me == root else 0, dtype)
    put = places if me == root else none
    run(Collective.GATHERV, wholes[me][: counts[me]], out, only(root), put)
    yield "gatherv", out, joined if me == root else nothing
    out = np.zeros(counts[me], dtype)
    source = wholes[root] if me == root else nothing
    run(Collective.SCATTERV, source, out, places if me == root else none, only(root))
    yield "scatterv", out, wholes[root][starts[me] : starts[me] + counts[me]]

    total = reduced([each[: sum(counts)] for each in wholes], code, ReduceOp.SUM)
    own = slice(*places[me])
    put = ((0, counts[me]),) * n
    out = np.zeros(counts[me], dtype)
    run(Collective.REDUCE_SCATTER, wholes[me], out, places, put)
    yield "reduce_scatterv", out, total[own]
    out = wholes[me].copy()
    run(Collective.REDUCE_SCATTER, out, out[own], places, put)
    yield "reduce_scatterv in place", out[own], total[own]

    # Rank s sends counts[(s + d) % n] elements to rank d, one part after the other.
    def sent_by(rank: int) -> tuple[tuple[int, int], ...]:
        return tuple(pairwise(accumulate((counts[(rank + to) % n] for to in range(n)), initial=0)))

    sent = sent_by(me)
    wanted = [wholes[rank][slice(*sent_by(rank)[me])] for rank in range(n)]
    out = np.zeros(sum(each.size for each in wanted), dtype)
    run(Collective.ALLTOALLV, wholes[me], out, sent, sent)  # the sizes are symmetric
    yield "alltoallv", out, np.concatenate(wanted)


def mix_calls(host: Host, ncalls: int, most: int) -> list[str]:
    """Make calls in a random order, equal on all ranks, with sizes up to `most`."""
    group, n, me = host.connect(), host.nranks, host.index
    rng = np.random.default_rng(1)
    wrong = []
    for number in range(ncalls):
        kind, root = int(rng.integers(10)), int(rng.integers(n))
        size = int(most ** rng.uniform(0, 1))
        inputs = [np.full(size, number + rank, np.float32) for rank in range(n)]
        total = np.full(size, sum(number + rank for rank in range(n)), np.float32)
        out = np.zeros(size * n, np.float32)
        if kind == 0:
            allreduce(group, inputs[me], out[:size], _F32, ReduceOp.SUM)
            wanted = total
        elif kind == 1:
            call(group, Collective.BROADCAST, inputs[me], out[:size], _F32, size, root=root)
            wanted = inputs[root]
        elif kind == 2:
            call(group, Collective.ALLGATHER, inputs[me], out, _F32, size * n)
            wanted = np.concatenate(inputs)
        elif kind == 3:
            call(group, Collective.GATHER, inputs[me], out, _F32, size * n, root=root)
            wanted = np.concatenate(inputs) if me == root else out
        elif kind == 4:
            call(group, Collective.REDUCE, inputs[me], out[:size], _F32, size, root=root)
            wanted = total if me == root else out[:size]
        elif kind == 5:
            call(group, Collective.SCAN, inputs[me], out[:size], _F32, size)
            wanted = np.full(size, sum(number + rank for rank in range(me + 1)), np.float32)
        elif kind == 6:
            whole = np.concatenate(inputs)
            call(group, Collective.SCATTER, whole, out[:size], _F32, size * n, root=root)
            wanted = inputs[me]
        elif kind in (7, 8):
            # Rank r has the first (r + 1) / n of its elements. Some of the ranks have many rounds.
            places = tuple((size * r, size * r + size * (r + 1) // n) for r in range(n))
            all_parts = places if me == root else ((0, 0),) * n
            own = tuple((0, size * (me + 1) // n) if r == root else (0, 0) for r in range(n))
            if kind == 7:
                call(
                    group, Collective.GATHERV, inputs[me], out, _F32, 0, root=root,
                    parts=(own, all_parts),
                )  # fmt: skip
                wanted = np.zeros(size * n if me == root else 0, np.float32)
                for (first, end), each in zip(places, inputs, strict=True):
                    wanted[first:end] = each[: end - first] if me == root else 0
            else:
                whole = np.concatenate(inputs)
                call(
                    group, Collective.SCATTERV, whole, out, _F32, 0, root=root,
                    parts=(all_parts, own),
                )  # fmt: skip
                wanted = inputs[me][: size * (me + 1) // n]
        else:
            barrier(group)
            wanted = out
        if out[: wanted.size].tobytes() != wanted.tobytes():
            wrong.append(f"call {number}: kind {kind}, {size} elements, root {root}")
    group.close()
    return wrong


def mix_calls_of_stopped_ranks(
    host: Host, ncalls: int, most: int, nstops: int
) -> tuple[list[str], int]:
    """Return what `mix_calls` finds, and the growth of memory in the second half, in KiB."""
    wrong = mix_calls(host, ncalls // 2, most)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stop_at_random(nstops, host.index)
    wrong += mix_calls(host, ncalls - ncalls // 2, most)
    os.wait()
    return wrong, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def count_memory(host: Host, ncalls: int) -> int:
    """Return by how many bytes the largest memory of the process grew over many calls."""
    group = host.connect()
    x = np.ones(64, np.float32)

    def call(times: int) -> int:
        for _ in range(times):
            allreduce(group, x, np.empty_like(x), _F32, ReduceOp.SUM)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before = call(1000)
    grown = call(ncalls) - before
    group.close()
    return grown


def stop_self(seconds: float) -> None:
    """Let a child stop this process soon, for some seconds."""
    pid = os.getpid()
    if not os.fork():
        time.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


def stop(host: Host, seconds: float) -> float:
    """The last rank is stopped for a while in mid-collective; return the result's first element."""
    group = host.connect()
    barrier(group)
    if host.index == host.nranks - 1:
        stop_self(seconds)
    x = np.ones(1 << 20, np.float32)
    until_s = time.monotonic() + seconds + 0.5
    again = np.ones(1, np.float32)
    while again[0]:
        allreduce(group, x, x, _F32, ReduceOp.MAX)
        again[0] = time.monotonic() < until_s
        allreduce(group, again, again, _F32, ReduceOp.MIN)
    group.close()
    return float(x.sum())


def differ(host: Host, what: str) -> None:
    """Ranks make different calls."""
    group = host.connect()
    x = np.ones(8, np.float32)
    if what == "collective" and host.index:
        barrier(group)
    elif what == "parts":
        sent = ((0, 2 if host.index else 1),) * host.nranks
        put = ((0, 1),) * host.nranks
        call(group, Collective.ALLTOALLV, x, np.zeros(8, np.float32), _F32, 0, parts=(sent, put))
    else:
        size = 4 if what == "count" and host.index else 8
        op = ReduceOp.MAX if what == "op" and host.index else ReduceOp.SUM
        allreduce(group, x[:size], np.zeros(size, np.float32), _F32, op)


#: Calls of `go_ahead` with root 0 or n - 1, so that rank 0 only sends.
AHEAD = {
    "broadcast": (Collective.BROADCAST, 0),
    "scatter": (Collective.SCATTER, 0),
    "scatterv": (Collective.SCATTERV, 0),
    "reduce": (Collective.REDUCE, -1),
    "gather": (Collective.GATHER, -1),
    "gatherv": (Collective.GATHERV, -1),
    "scan": (Collective.SCAN, None),
    "exscan": (Collective.EXSCAN, None),
}


def go_ahead(host: Host, name: str, size: int, ncalls: int) -> list[int]:
    """Rank 0, which only sends, makes all calls before the others begin; return the wrong ones."""
    which, root = AHEAD[name]
    group, n, me = host.connect(), host.nranks, host.index
    root = 0 if root is None else root % n
    barrier(group)
    if me:
        host.exchange(b"x")
    wrong = []
    for number in range(ncalls):
        inputs = [np.full(size * n, 100 * number + rank, np.float32) for rank in range(n)]
        x, out = inputs[me].copy(), np.zeros(size * n, np.float32)
        parts = None
        if which in (Collective.SCATTERV, Collective.GATHERV):
            places = tuple((size * rank, size * (rank + 1)) for rank in range(n))
            none = ((0, 0),) * n
            own = tuple((0, size) if rank == root else (0, 0) for rank in range(n))
            at_root = places if me == root else none
            parts = (at_root, own) if which == Collective.SCATTERV else (own, at_root)
        count = 0 if parts else size * n
        source = x[:size] if which == Collective.GATHER else x
        target = out[:size] if which == Collective.SCATTER else out
        call(group, which, source, target, _F32, count, root=root, parts=parts)
        x[:] = -1  # the call does not use its input any more
        is_receiver = root == 0 or me == root
        wanted = np.zeros(size * n, np.float32)
        if which == Collective.BROADCAST:
            wanted = inputs[0]
        elif which in (Collective.SCATTER, Collective.SCATTERV):
            wanted[:size] = 100 * number
        elif which in (Collective.SCAN, Collective.EXSCAN):
            nadded = me + (which == Collective.SCAN)
            wanted[:] = sum(100 * number + rank for rank in range(nadded))
        elif is_receiver and which == Collective.REDUCE:
            wanted[:] = sum(100 * number + rank for rank in range(n))
        elif is_receiver:
            wanted[:] = np.repeat([100 * number + rank for rank in range(n)], size)
        if out.tobytes() != wanted.tobytes():
            wrong.append(number)
    if not me:
        host.exchange(b"x")
    barrier(group)
    group.close()
    return wrong


def differ_at_the_end(host: Host) -> list[int] | None:
    """Each rank only sends, in its last call, so none waits; return the counts that differ."""
    group, x = host.connect(), np.ones(8 + host.index, np.float32)
    barrier(group)
    call(group, Collective.BROADCAST, x, x, _F32, x.size, root=host.index)
    host.exchange(b"x")
    found = group.find_difference()
    return found and [CallSignature.unpack(each).count for each in (found.own, found.call)]


def many_rounds_after_few(host: Host, before: str) -> bool:
    """Gather parts of eight rounds after a call with one; return whether the result is right."""
    group, n, me = host.connect(), host.nranks, host.index
    size = 8 * SLOT_NBYTES // 4
    x, out, few = np.full(size, me, np.float32), np.zeros(n * size, np.float32), np.ones(16)
    if before == "barrier":
        barrier(group)
    else:
        which = Collective[before]
        call(group, which, few, np.zeros(16 * n), CODES[few.dtype], 16 * n)
    sent = ((0, size), *((0, 0),) * (n - 1))
    put = tuple((size * rank, size * (rank + 1)) for rank in range(n))
    none = ((0, 0),) * n
    parts = (sent, put if me == 0 else none)
    call(group, Collective.GATHERV, x, out, _F32, 0, root=0, parts=parts)
    barrier(group)
    group.close()
    return bool(me or (out == np.repeat(np.arange(n), size)).all())


def differ_ahead(host: Host) -> list[int]:
    """Rank 0 broadcasts other data than the others expect, and goes on; return the calls."""
    group, x = host.connect(), np.ones(8, np.float32)
    try:
        for number in range(3):
            size = 4 if host.index and number == 1 else 8
            call(group, Collective.BROADCAST, x[:size], x[:size], _F32, size)
        barrier(group)
    except CallsDiffer as exc:
        counts = [CallSignature.unpack(each).count for each in (exc.own, exc.call)]
        return [number, exc.is_earlier, *counts]
    return []


def finish_and_leave(host: Host) -> str:
    """Ranks that end after the last call do not disturb the others."""
    group = host.connect()
    for _ in range(100):
        barrier(group)
    if host.index:
        group.close()
        return "closed"
    time.sleep(0.3)
    group.close()
    return "closed"


def end_while_awaited(host: Host, how: str) -> list[int]:
    """The last rank ends while the others wait for it; return the reported indices."""
    found: list[int] = []

    def attend(resume: Callable[[], bool], call: int) -> None:
        until_s = time.monotonic() + 30.0
        while time.monotonic() < until_s and not found:
            assert not resume()
        resume()  # reports nothing twice
        raise TimeoutError

    group = host.connect(attend=attend, on_exit=found.append)
    host.exchange(b"x")
    if host.index == host.nranks - 1:
        _end(how)
    with suppress(TimeoutError):
        barrier(group)
    group.close()
    return found


def _end(how: str) -> None:
    if how == "exit":
        os._exit(0)
    if how == "exec":
        os.execv("/bin/sleep", ["sleep", "0.2"])
    if how == "abort":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    os.kill(os.getpid(), signal.SIGKILL)


def end_something_else(host: Host, what: str) -> list[int]:
    """The last rank ends a thread or a child, or is stopped; return the reported indices."""
    found: list[int] = []
    made: list[LocalGroup] = []
    connecting = Thread(target=lambda: made.append(host.connect(on_exit=found.append)))
    connecting.start()
    connecting.join()  # the thread that made the group has ended
    group = made[0]
    if host.index == host.nranks - 1:
        if what == "fork":
            if not os.fork():
                os._exit(0)
            os.wait()
        elif what == "spawn":
            subprocess.run(["true"], check=True)
        elif what == "stop":
            stop_self(0.1)
    for _ in range(3):
        barrier(group)
    group.close()
    return found


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
    barrier(group)
    note()
    group.close()
    note()
    return found
