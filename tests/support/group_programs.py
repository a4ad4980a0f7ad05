"""Programs of ranks that group their calls."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from support.raising import raises

import r2ccl
from r2ccl.testing import Action, Fault, FaultPlan


def collectives(nfaults: int) -> list[str]:
    """Group allreduces of several sizes, types and operations with others; return what is wrong."""
    wrong = []
    faults = [
        Fault(action=Action.NIC_DOWN, node=0, rail=at % 2, rank=0, at_op=2 + 2 * at, at_step=at)
        for at in range(nfaults)
    ]
    with r2ccl.init(faults=FaultPlan(faults)) as comm:
        n, rank = comm.nranks, comm.rank
        for count in (0, 1, 1000, 70_000):
            small = [np.full(count + at, float(rank + at)) for at in range(30)]
            ints = [np.full(count + at, rank + at) for at in range(5)]
            outs = [np.empty_like(each) for each in ints]
            before = [each.copy() for each in ints]
            pairs = [np.zeros(count + at, r2ccl.pair_dtype(np.float64)) for at in range(3)]
            for each in pairs:
                each["value"], each["index"] = -rank, rank
            with comm.group():
                for x in small:
                    comm.allreduce(x)
                for x, out in zip(ints, outs, strict=True):
                    comm.allreduce(x, out, r2ccl.MAX)
                for each in pairs:
                    comm.allreduce(each, op=r2ccl.MINLOC)
                rows = comm.allgather(np.array([rank]))
                comm.broadcast(small_root := np.full(3, rank), root=n - 1)
            whole = sum(range(n))
            is_right = all((x == whole + n * at).all() for at, x in enumerate(small))
            is_right &= all((out == n - 1 + at).all() for at, out in enumerate(outs))
            is_right &= all(map(np.array_equal, ints, before))
            is_right &= all((each["index"] == n - 1).all() for each in pairs)
            is_right &= rows.ravel().tolist() == list(range(n)) and (small_root == n - 1).all()
            if not is_right:
                wrong.append(f"rank {rank}, {count} elements")
    return wrong


def exchanges(count: int) -> list[Any]:
    """Write sends down before receives, which would wait for ever one by one."""
    with r2ccl.init() as comm:
        n, rank = comm.nranks, comm.rank
        out = np.empty((n, count))
        with comm.group() as group:
            for to in range(n):
                comm.send(np.full(count, 10.0 * rank + to), to, tag=to)
            for source in range(n):
                assert comm.recv(out[source], source) is None
            total = comm.allreduce(np.ones(3))
        is_right = all((out[source] == 10.0 * source + rank).all() for source in range(n))
        return [is_right, total[0], [(each.source, each.tag) for each in group.messages]]


def misused() -> list[float]:
    """Misuse groups; return sums that are right only if nothing of a failed group ran."""
    with r2ccl.init() as comm:
        x = np.ones(2)
        with contextlib.suppress(ZeroDivisionError), comm.group():
            comm.allreduce(x)
            1 / 0  # noqa: B018
        with raises(r2ccl.InvalidArgument, match="within a group"), comm.group():
            comm.group().__enter__()
        with raises(r2ccl.InvalidArgument, match="async_op"), comm.group():
            comm.allreduce(x, async_op=True)
        with raises(r2ccl.InvalidArgument, match="async_op"), comm.group():
            comm.recv(x, async_op=True)
        with raises(r2ccl.InvalidArgument, match="allowed"), comm.group():
            comm.allreduce(np.ones(2, bool))
        with raises(r2ccl.InvalidArgument, match="arrays in host memory"), comm.group():
            comm.allreduce(x, stream=1)
        with comm.group():
            pass
        found = float(x[0])
        return [found, float(comm.allreduce(x)[0])]


def differing() -> str:
    """Group calls whose counts differ between ranks, with an equal sum; return the error."""
    with r2ccl.init() as comm:
        sizes = (3, 5) if comm.rank else (4, 4)
        try:
            with comm.group():
                for size in sizes:
                    comm.allreduce(np.ones(size))
        except r2ccl.R2cclError as exc:
            return f"{type(exc).__name__}: {exc}"
        return "no error"


def refused_message() -> list[Any]:
    """Group receives of which the first is refused; return the error and what the others took."""
    with r2ccl.init() as comm:
        count = 200_000
        outs = [np.zeros(count - 1), np.zeros(count), np.zeros(count)]
        error = ""
        try:
            with comm.group():
                for tag, out in enumerate(outs):
                    if comm.rank == 0:
                        comm.recv(out, 1, tag)
                    else:
                        comm.send(np.full(count, float(tag)), 0, tag)
                comm.allreduce(np.ones(3))
        except r2ccl.InvalidArgument as exc:
            error = str(exc)
        found = [float(out[-1]) for out in outs]
        comm.barrier()
        return [error, found]


def closed_within(is_child: bool) -> list[float]:
    """Close a communicator within a group of its calls; return what these left as it was."""
    with r2ccl.init() as comm:
        closed = comm.dup() if is_child else comm
        x = np.ones(2)
        with raises(r2ccl.CommunicatorRevoked, match="was closed"), closed.group():
            closed.allreduce(x)
            closed.close()
            # It has the context id of the closed one.
            other = comm.dup() if is_child else None
        if other is not None:
            assert other.allreduce(np.ones(2))[0] == comm.nranks
        return [float(each) for each in x]
