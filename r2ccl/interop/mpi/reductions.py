"""Reductions of mpi4py, as calls of a `Communicator`.

Each public function takes a `Comm` and the arguments of one method of mpi4py, checks them and
returns a `Call`. `Comm` makes a blocking, a nonblocking and a persistent method of mpi4py from each
function.

r2ccl reduces aligned memory. Elements that are not aligned, which MPI accepts, are copied to new
memory before each run of the call, and the results are copied back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from r2ccl.interop.mpi.buffers import Array, BufferSpec, is_in_place, message
from r2ccl.interop.mpi.calls import Call, nothing, root_of
from r2ccl.interop.mpi.operations import reduction
from r2ccl.interop.mpi.vectors import sequence


def allreduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Call:
    """Reduce `sendbuf` over all ranks into `recvbuf` on every rank, like mpi4py's Allreduce."""
    return _elementwise(comm.communicator.allreduce, sendbuf, recvbuf, op)


def scan(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Call:
    """Reduce `sendbuf` of ranks 0 to this rank into `recvbuf`, like mpi4py's Scan."""
    return _elementwise(comm.communicator.scan, sendbuf, recvbuf, op)


def exscan(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Call:
    """Reduce `sendbuf` of all lower ranks into `recvbuf`, like mpi4py's Exscan.

    On rank 0, `recvbuf` is not modified.
    """
    return _elementwise(comm.communicator.exscan, sendbuf, recvbuf, op)


def reduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> Call:
    """Reduce `sendbuf` over all ranks into `recvbuf` on rank `root`, like mpi4py's Reduce."""
    root = root_of(comm, root)
    run = partial(comm.communicator.reduce, root=root)
    if comm.rank == root:
        return _elementwise(run, sendbuf, recvbuf, op)
    sent = message(sendbuf, writable=False)
    found, dtype = reduction(op, sent.datatype)
    x = sent.elements(dtype)
    return _call(lambda x: partial(run, x, None, found), x)


def reduce_scatter_block(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Call:
    """Reduce `sendbuf` over all ranks; rank r receives block r of the result in `recvbuf`.

    Like mpi4py's Reduce_scatter_block.
    """
    run = comm.communicator.reduce_scatter
    if is_in_place(sendbuf):
        received = message(recvbuf, writable=True, nblocks=comm.size)
        return _at_start(run, received, received.count, op)
    received = message(recvbuf, writable=True)
    found, dtype = reduction(op, received.datatype)
    x = _input(sendbuf, received, nblocks=comm.size).elements(dtype)
    return _call(lambda x, out: partial(run, x, out, found), x, received.elements(dtype))


def reduce_scatter(
    comm: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM
) -> Call:
    """Reduce `sendbuf` over all ranks; rank r receives block r of the result in `recvbuf`.

    Like mpi4py's Reduce_scatter. Block r has ``recvcounts[r]`` elements. Without `recvcounts`, the
    ranks first exchange the counts of their `recvbuf`; a reduction in place needs `recvcounts`.
    """
    received = message(recvbuf, writable=True)
    in_place = is_in_place(sendbuf)
    if recvcounts is None and not in_place:
        mine = np.array([received.count])
        counts = comm.communicator.allgather(mine).reshape(-1).tolist()
    else:
        counts = sequence(recvcounts, comm.size)
    total, own = sum(counts), counts[comm.rank]
    run = partial(comm.communicator.reduce_scatterv, counts=counts)
    if in_place:
        _require_equal("receive count", received.count, "sum(counts)", total)
        return _at_start(run, received, own, op)
    found, dtype = reduction(op, received.datatype)
    sent = message(sendbuf, writable=False)
    _require_same_datatype(sent, received)
    _require_equal("send count", sent.count, "sum(counts)", total)
    _require_equal("receive count", received.count, f"counts[{comm.rank}]", own)
    x, out = sent.elements(dtype), received.elements(dtype)
    return _call(lambda x, out: partial(run, x, out, found), x, out)


def _elementwise(run: Callable[..., Any], sendbuf: Any, recvbuf: Any, op: Any) -> Call:
    """Return a call whose input and output have the same number of elements."""
    received = message(recvbuf, writable=True)
    found, dtype = reduction(op, received.datatype)
    out = received.elements(dtype)
    if is_in_place(sendbuf):
        return _call(lambda out: partial(run, out, out, found), out)
    x = _input(sendbuf, received).elements(dtype)
    return _call(lambda x, out: partial(run, x, out, found), x, out)


def _at_start(run: Callable[..., Any], received: BufferSpec, count: int, op: Any) -> Call:
    """Return the call of a reduce-scatter with MPI.IN_PLACE, whose input is in `received`.

    This rank's part of the result, which has `count` elements, is written to the start of
    `received`.
    """
    found, dtype = reduction(op, received.datatype)
    x = received.elements(dtype)
    out = np.empty(count, dtype)  # r2ccl would write the result to the part of this rank

    def finish() -> None:
        x[:count] = out

    return _call(lambda x: partial(run, x, out, found), x, finish=finish)


def _call(
    prepare: Callable[..., Callable[..., Any]],
    *operands: Array,
    finish: Callable[[], None] = nothing,
) -> Call:
    """Return the call that runs ``prepare(*operands)(async_op=...)``, with aligned operands.

    Operands that are not aligned are replaced by aligned copies. After each run, the copy of a
    writable operand is copied back, and ``finish()`` is called; see `Call`.
    """
    aligned = [each if each.flags.aligned else np.empty_like(each) for each in operands]
    run = prepare(*aligned)
    copied = [pair for pair in zip(operands, aligned, strict=True) if pair[0] is not pair[1]]
    if not copied:
        return Call(lambda is_async: run(async_op=is_async), finish)

    def start(is_async: bool) -> Any:
        for operand, copy in copied:
            copy[:] = operand
        return run(async_op=is_async)

    def finish_copied() -> None:
        for operand, copy in copied:
            if operand.flags.writeable:
                operand[:] = copy
        finish()

    return Call(start, finish_copied)


def _input(sendbuf: Any, received: BufferSpec, nblocks: int = 1) -> BufferSpec:
    """Return the input of a reduction, which must match the datatype and count of `received`."""
    sent = message(sendbuf, writable=False, nblocks=nblocks)
    _require_same_datatype(sent, received)
    _require_equal("send count", sent.count, "receive count", received.count)
    return sent


def _require_same_datatype(sent: BufferSpec, received: BufferSpec) -> None:
    if sent.datatype != received.datatype:
        raise ValueError("mismatch in send and receive MPI datatypes")


def _require_equal(name: str, count: int, other_name: str, other: int) -> None:
    if count != other:
        raise ValueError(f"mismatch in {name} {count} and {other_name} {other}")


__all__ = ["allreduce", "exscan", "reduce", "reduce_scatter", "reduce_scatter_block", "scan"]
